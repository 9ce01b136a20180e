"""Triton's set of kernels, as one value.

Chapter 5 tells this module's story.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from minisgl.kernels.kernel_set import Kernels
from minisgl.kernels.triton_elementwise import copy_pages, norm_rotary_store
from minisgl.kernels.triton_linear import SkinnyLinear
from minisgl.kernels.triton_prepare import prepare_step
from minisgl.kernels.triton_sampling import gumbel_argmax, sample_rows


def load_triton_kernels(device: torch.device) -> Kernels:
    """The set for ``device``. Raises ``ValueError`` for a CPU on which Triton does not interpret."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError("kernels 'triton' need a CUDA device (or TRITON_INTERPRET=1)")
    products = SkinnyLinear.load(device)
    return Kernels(
        name="triton",
        norm_linear=products.norm_linear,
        norm_linear_silu=products.norm_linear_silu,
        linear_add=products.linear_add,
        norm_rotary_store=norm_rotary_store,
        copy_pages=copy_pages,
        prepare_step=prepare_step,
        gumbel_argmax=_gumbel_argmax,
        sample_rows=sample_rows,
    )


def _gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The plain version's arguments: the temperature has been applied."""
    return gumbel_argmax(logits, torch.ones(logits.shape[0], device=logits.device), seeds, positions)
