"""RMSNorm, alone and fused with the addition of the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension (Zhang and Sennrich, 2019).

    The norm is taken in float32, rounded to the dtype of ``x``, then multiplied by the weight: the order that
    checkpoints were trained with.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``, dtype of ``x``.

    Returns:
        ``[..., D]``, dtype of ``x``.
    """
    x_float = x.to(torch.float32)
    scale = torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x_float * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    Args:
        x: ``[N, D]``, what a block adds.
        residual: ``[N, D]``, the stream so far; left as it is.
        weight: ``[D]``.

    Returns:
        The normalised sum and the sum, both ``[N, D]`` in the dtype of ``x``.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
