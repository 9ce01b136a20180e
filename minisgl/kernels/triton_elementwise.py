"""The small kernels of a layer in Triton, each doing in one launch what its plain twins do in several.

Chapter 5 tells this module's story. Twins: `minisgl.kernels.norm`, `rotary`, `activation` and `kv`. Kernels round where
their twins round: what is a tensor on the way there is rounded to the tensors' dtype here, by `_round`. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _round(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, eps, x_stride, residual_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A program for each row; the row stays in registers between the sum and the norm."""
    dtype: tl.constexpr = out.dtype.element_ty
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < SIZE
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        value = _round(value, dtype)
        tl.store(total + row * SIZE + columns, value.to(dtype), mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    result = _round(value * scale, dtype) * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, result.to(dtype), mask=mask)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`minisgl.kernels.norm.rms_norm`: ``[..., D]`` and ``[D]`` to ``[..., D]``."""
    rows = x.reshape(-1, x.shape[-1])
    assert rows.stride(1) == 1 and weight.is_contiguous()
    out, block = torch.empty(x.shape, dtype=x.dtype, device=x.device), triton.next_power_of_2(x.shape[-1])
    if rows.shape[0]:
        _rms_norm_kernel[(rows.shape[0],)](
            rows, rows, weight, out, out, eps, rows.stride(0), 0,
            SIZE=x.shape[-1], BLOCK=block, ADD=False, num_warps=_num_warps(block),
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`minisgl.kernels.norm.add_rms_norm` in one launch: both results ``[N, D]``, ``residual`` is left as it is."""
    assert x.shape == residual.shape and x.stride(1) == residual.stride(1) == 1 and weight.is_contiguous()
    out, total = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    if x.shape[0]:
        _rms_norm_kernel[(x.shape[0],)](
            x, residual, weight, out, total, eps, x.stride(0), residual.stride(0),
            SIZE=x.shape[1], BLOCK=block, ADD=True, num_warps=_num_warps(block),
        )  # fmt: skip
    return out, total


@triton.jit
def _norm_rotate(
    source, target, weight, cos, sin, eps,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """One head of one token: its norm, then its first ``PAIRS`` pairs turned; what is behind them passes through."""
    dtype: tl.constexpr = target.dtype.element_ty
    pairs, rest = tl.arange(0, BLOCK_F), 2 * PAIRS + tl.arange(0, BLOCK_REST)
    turns, passes = pairs < PAIRS, rest < HEAD_DIM
    first = tl.load(source + pairs, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(source + PAIRS + pairs, mask=turns, other=0.0).to(tl.float32)
    third = tl.load(source + rest, mask=passes, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=0) + tl.sum(third * third, axis=0)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        first = _round(first * scale, dtype) * tl.load(weight + pairs, mask=turns, other=0.0).to(tl.float32)
        second = _round(second * scale, dtype) * tl.load(weight + PAIRS + pairs, mask=turns, other=0.0).to(tl.float32)
        third = _round(third * scale, dtype) * tl.load(weight + rest, mask=passes, other=0.0).to(tl.float32)
        first, second = _round(first, dtype), _round(second, dtype)
    c = tl.load(cos + pairs, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + pairs, mask=turns, other=0.0).to(tl.float32)
    turned_first = _round(first * c, dtype) - _round(second * s, dtype)
    turned_second = _round(second * c, dtype) + _round(first * s, dtype)
    tl.store(target + pairs, turned_first.to(dtype), mask=turns)
    tl.store(target + PAIRS + pairs, turned_second.to(dtype), mask=turns)
    tl.store(target + rest, third.to(dtype), mask=passes)


@triton.jit
def _norm_rotary_store_kernel(
    q, k, v, q_weight, k_weight, cos, sin, q_out, kv, slot_mapping, eps,
    q_stride, k_stride, v_stride, cos_stride, sin_stride, v_offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NORM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program for each token and head: first the query heads, then those of K, then those of V."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos_row, sin_row = cos + token * cos_stride, sin + token * sin_stride
    slot = tl.load(slot_mapping + token)
    if head < NUM_HEADS:
        source, target = q + token * q_stride + head * HEAD_DIM, q_out + (token * NUM_HEADS + head) * HEAD_DIM
        _norm_rotate(source, target, q_weight, cos_row, sin_row, eps, HEAD_DIM, PAIRS, NORM, BLOCK_F, BLOCK_REST)
    elif head < NUM_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_HEADS
        source, target = k + token * k_stride + kv_head * HEAD_DIM, kv + (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        _norm_rotate(source, target, k_weight, cos_row, sin_row, eps, HEAD_DIM, PAIRS, NORM, BLOCK_F, BLOCK_REST)
    else:
        kv_head, dims = head - NUM_HEADS - NUM_KV_HEADS, tl.arange(0, BLOCK_D)
        value = tl.load(v + token * v_stride + kv_head * HEAD_DIM + dims, mask=dims < HEAD_DIM)
        tl.store(kv + v_offset + (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dims, value, mask=dims < HEAD_DIM)


def norm_rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """All between the projection and attention, in one launch. Its twin is the composition::

        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)  # where there are weights
        q, k = apply_rotary(q, k, cos, sin)
        store_kv(k, v, kv, slot_mapping)
        return q

    Args:
        q: ``[N, num_heads, D]``, may be a view of the merged projection, as may ``k`` and ``v``.
        k, v: ``[N, num_kv_heads, D]``.
        q_weight, k_weight: ``[D]``; both or neither.
        cos, sin: ``[N, F]`` in the dtype of ``q``.
        kv: ``[2, num_pages, page_size, num_kv_heads, D]``, dtype of ``q``, contiguous; written in place.
        slot_mapping: ``[N]`` int64. Where a slot is named twice (padding: page 0) any of the tokens may win.

    Returns:
        ``[N, num_heads, D]``, contiguous.
    """
    (num_tokens, num_heads, dim), num_kv_heads, pairs = q.shape, k.shape[1], cos.shape[1]
    assert all(x.stride()[1:] == (dim, 1) for x in (q, k, v)) and kv.is_contiguous()
    assert (q_weight is None) == (k_weight is None) and cos.stride(1) == sin.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens:
        _norm_rotary_store_kernel[num_tokens, num_heads + 2 * num_kv_heads](
            q, k, v, q if q_weight is None else q_weight, k if k_weight is None else k_weight, cos, sin, out, kv,
            slot_mapping, eps, q.stride(0), k.stride(0), v.stride(0), cos.stride(0), sin.stride(0), kv.stride(0),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=dim, PAIRS=pairs, NORM=q_weight is not None,
            BLOCK_F=triton.next_power_of_2(pairs), BLOCK_REST=triton.next_power_of_2(max(dim - 2 * pairs, 1)),
            BLOCK_D=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul_kernel(x, out, size, x_stride, BLOCK: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    result = _round(gate / (1.0 + tl.exp(-gate)), dtype) * up
    tl.store(out + row * size + columns, result.to(dtype), mask=mask)


def silu_and_mul(x: Tensor, *, block: int = 1024) -> Tensor:
    """`minisgl.kernels.activation.silu_and_mul`: ``[N, 2 * F]``, gate first, to ``[N, F]``."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1 and x.shape[1] == 2 * size
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        _silu_and_mul_kernel[num_rows, triton.cdiv(size, block)](x, out, size, x.stride(0), BLOCK=block)
    return out


# A page is copied as the widest integers that it is a multiple of: bits are all that counts.
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _copy_pages_kernel(
    addresses, page_copies, num_copies, num_pages, page_words,
    WORD: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """A program for each layer, K or V, and stretch of a page; it makes *all* copies of that stretch. So that no
    program writes what another one reads, and reading all before writing any takes only a barrier."""
    layer, part, stretch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    base = tl.load(addresses + layer).to(tl.pointer_type(WORD)) + part * num_pages * page_words
    copies, words = tl.arange(0, BLOCK_C), stretch * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = (copies < num_copies)[:, None] & (words < page_words)[None, :]
    sources = tl.load(page_copies + 2 * copies, mask=copies < num_copies, other=0).to(tl.int64)
    destinations = tl.load(page_copies + 2 * copies + 1, mask=copies < num_copies, other=0).to(tl.int64)
    values = tl.load(base + (sources * page_words)[:, None] + words[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(base + (destinations * page_words)[:, None] + words[None, :], values, mask=mask)


def layer_addresses(kv_layers: Iterable[Tensor]) -> Tensor:
    """``[L]`` int64 on their device: where each layer begins. Good as long as the layers live."""
    layers = list(kv_layers)
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64).to(layers[0].device)


def copy_pages(kv_layers: Iterable[Tensor], page_copies: Tensor, *, addresses: Tensor | None = None) -> None:
    """`minisgl.kernels.kv.copy_pages`, one launch for all layers.

    Args:
        kv_layers: each ``[2, num_pages, page_size, num_kv_heads, head_dim]``, contiguous, alike; written in place.
        page_copies: ``[C, 2]`` int32 or int64, source and destination; the destinations differ.
        addresses: `layer_addresses` of the layers. Who copies often makes it once: making it waits for the device.
    """
    layers, num_copies = list(kv_layers), page_copies.shape[0]
    if not num_copies or not layers:
        return
    shape, itemsize = layers[0].shape, layers[0].element_size()
    assert all(layer.shape == shape and layer.is_contiguous() for layer in layers) and page_copies.is_contiguous()
    page_bytes = layers[0][0, 0].numel() * itemsize
    word_bytes = next(n for n in _WORDS if page_bytes % n == 0)
    page_words, block_c = page_bytes // word_bytes, triton.next_power_of_2(num_copies)
    block_w = min(max(4096 // block_c, 8), triton.next_power_of_2(page_words))
    _copy_pages_kernel[len(layers), 2, triton.cdiv(page_words, block_w)](
        layer_addresses(layers) if addresses is None else addresses, page_copies, num_copies, shape[1], page_words,
        WORD=_WORDS[word_bytes], BLOCK_C=block_c, BLOCK_W=block_w, num_warps=8,
    )  # fmt: skip
