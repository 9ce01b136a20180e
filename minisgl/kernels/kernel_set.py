"""`Kernels`: the device functions that layers and engine call, as one value that is handed to them.

Chapter 5 tells this module's story. There are two sets, with the same meaning: `PLAIN` is torch, runs anywhere, and is
what the other is tested against; Triton's does in one launch what `PLAIN` does in several.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from minisgl.kernels import kv, linear, prepare, rotary, sampling


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """A set of device functions. What each means stands in the module of its plain version.

    Args:
        name: "torch" or "triton".
        norm_linear, norm_linear_silu, linear_add: `minisgl.kernels.linear`.
        norm_rotary_store: `minisgl.kernels.rotary`.
        copy_pages: `minisgl.kernels.kv`.
        prepare_step: `minisgl.kernels.prepare`.
        gumbel_argmax, sample_rows: `minisgl.kernels.sampling`.
    """

    name: str
    norm_linear: Callable[[Tensor, Tensor, float, Tensor, Tensor | None, Tensor | None], Tensor]
    norm_linear_silu: Callable[[Tensor, Tensor, float, Tensor, Tensor | None, Tensor | None], Tensor]
    linear_add: Callable[[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor, float] | None], Tensor | None]
    norm_rotary_store: Callable[..., Tensor]
    copy_pages: Callable[[Tensor, Tensor], None]
    prepare_step: Callable[..., None]
    gumbel_argmax: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    sample_rows: Callable[..., Tensor]


PLAIN = Kernels(
    name="torch",
    norm_linear=linear.norm_linear,
    norm_linear_silu=linear.norm_linear_silu,
    linear_add=linear.linear_add,
    norm_rotary_store=rotary.norm_rotary_store,
    copy_pages=kv.copy_pages,
    prepare_step=prepare.prepare_step,
    gumbel_argmax=sampling.gumbel_argmax,
    sample_rows=sampling.sample_rows,
)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """As long as the block lasts, this thread's kernels run on ``device``: Triton and CUDA graphs know no other than
    the current one, which is device 0 in each new thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def load_kernels(name: str, *, device: torch.device) -> Kernels:
    """The set called ``name`` for ``device``.

    Args:
        name: "torch", "triton", or "auto": Triton's on a CUDA device where Triton is installed, else torch.

    Raises:
        ValueError: no such set, or it cannot run here.
    """
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f"kernels must be one of 'auto', 'torch', 'triton', got {name!r}")
    has_triton = find_spec("triton") is not None
    if name == "torch" or (name == "auto" and not (has_triton and device.type == "cuda")):
        return PLAIN
    if not has_triton:
        raise ValueError("kernels 'triton' need the package triton, which is there for Linux only")
    kernels: Kernels = import_module("minisgl.kernels.triton_set").load_triton_kernels(device)
    return kernels
