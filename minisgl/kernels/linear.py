"""Products with a weight matrix, together with what stands before and behind them in a layer.

Chapter 5 tells this module's story. A layer is four products; the norm, the activation and the addition to the residual
stream between them touch little data, but as kernels of their own they cost a launch each. So a product takes them
along, as prologue or epilogue: `minisgl.kernels.triton_linear` has the twins that do each function in one launch.

M tokens, K inputs, N outputs. All tensors of a call have one dtype and lie on one device. Owns nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.activation import silu_and_mul
from minisgl.kernels.norm import rms_norm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``x W^T + b``.

    Args:
        x: ``[M, K]``.
        weight: ``[N, K]``.
        bias: ``[N]``.
        out: ``[M, N]``, written and returned where it is given.

    Returns:
        ``[M, N]``.
    """
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """``rms_norm(x) W^T + b``: what reads the residual stream.

    Args:
        x: ``[M, K]``, the residual stream.
        norm_weight: ``[K]``.
        weight: ``[N, K]``.
        bias: ``[N]``.
        normed: ``[M, K]``, ``rms_norm(x)``, if somebody has made it already; see `linear_add`.

    Returns:
        ``[M, N]``.
    """
    return F.linear(rms_norm(x, norm_weight, eps) if normed is None else normed, weight, bias)


def norm_linear_silu(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """``silu_and_mul(rms_norm(x) W^T + b)``: the first half of a gated feed-forward block.

    Args:
        x: ``[M, K]``, the residual stream.
        norm_weight: ``[K]``.
        weight: ``[2 * F, K]``, gate first.
        bias: ``[2 * F]``.
        normed: ``[M, K]``, ``rms_norm(x)``, if somebody has made it already; see `linear_add`.

    Returns:
        ``[M, F]``.
    """
    return silu_and_mul(norm_linear(x, norm_weight, eps, weight, bias, normed))


def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor | None:
    """``residual += x W^T + b``, in place: what adds to the residual stream.

    Args:
        x: ``[M, K]``.
        weight: ``[N, K]``.
        residual: ``[M, N]``, written in place; shares no memory with ``x``.
        bias: ``[N]``.
        norm: ``[N]`` weight and epsilon of the norm that the stream is read through next.

    Returns:
        ``rms_norm(residual)``, ``[M, N]``, for whoever reads next. A twin returns it where it costs no launch of its
        own, else None, as it is without ``norm``.
    """
    residual.add_(F.linear(x, weight, bias))
    return None if norm is None else rms_norm(residual, *norm)
