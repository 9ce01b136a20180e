"""Rotary position embedding applied to queries and keys, alone and with all else between projection and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.kv import store_kv
from minisgl.kernels.norm import rms_norm


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


def norm_rotary_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
) -> Tensor:
    """All between the projection and attention: norm of each head, rotation, and writing to the cache.

    Args:
        qkv: ``[N, (num_heads + 2 * num_kv_heads) * D]``, the merged projection: heads of Q, then of K, then of V. Rows
            are contiguous but may be further apart.
        q_weight, k_weight: ``[D]`` of the norms, dtype of ``qkv``; both None: no norm.
        eps: of the norms.
        cos, sin: ``[N, F]`` in the dtype of ``qkv``, with ``2 F <= D``.
        kv: ``[2, num_pages, page_size, num_kv_heads, D]``, dtype of ``qkv``, contiguous; written in place.
        slot_mapping: ``[N]`` int64. Where a slot is named twice (padding: page 0) any of the tokens may win.
        num_heads: of Q.

    Returns:
        ``[N, num_heads, D]``, the queries, contiguous.
    """
    num_kv_heads, dim = kv.shape[3:]
    qkv = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, dim))
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = apply_rotary(q, k, cos, sin)
    store_kv(k, v, kv, slot_mapping)
    return q
