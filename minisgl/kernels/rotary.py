"""Rotary position embedding applied to queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first F pairs ``(x[i], x[i + F])`` of each head by its token's angles (Su et al., 2021).

    Args:
        q: ``[N, num_heads, D]``.
        k: ``[N, num_kv_heads, D]``.
        cos, sin: ``[N, F]`` in the dtype of ``q``, with ``2 F <= D``; dimensions from ``2 F`` on pass through.

    Returns:
        New ``q`` and ``k``, shapes and dtypes as they came.
    """
    cos, sin = cos[:, None, :], sin[:, None, :]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
