"""The gated activation of the feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` (SwiGLU; Shazeer, 2020), for gate and up side by side.

    Args:
        x: ``[N, 2 * F]``, gate first.

    Returns:
        ``[N, F]``, dtype of ``x``.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
