"""The small kernels of a layer in Triton, each doing in one launch what its plain twins do in several.

Chapter 5 tells this module's story. Twins: `minisgl.kernels.norm`, `rotary`, `activation` and `kv`. Kernels round where
their twins round: what is a tensor on the way there is rounded to the tensors' dtype here, by `_round`. Owns nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import launch, let_next_begin, pdl_options, wait_for_previous

# More tokens than these fill the device, or fill it many times: bytes a second count then, not how soon a program ends.
_FEW, _MANY = 64, 512


@triton.jit
def _round(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, eps, x_stride, residual_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each row; the row stays in registers between the sum and the norm."""
    let_next_begin(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < SIZE
    # Asked for before the sum, which all threads wait for, and before what the kernel waits for.
    factor = tl.load(weight + columns, mask=mask, other=0.0)
    wait_for_previous(PDL)
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        value = _round(value, dtype)
        tl.store(total + row * SIZE + columns, value.to(dtype), mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    result = _round(value * scale, dtype) * factor.to(tl.float32)
    tl.store(out + row * SIZE + columns, result.to(dtype), mask=mask)


def _num_warps(block: int, num_rows: int) -> int:
    """Few rows: threads finish sooner with less each. Many: with more each, more of it is under way."""
    each = 32 if num_rows > _MANY else 16
    return min(max(block // (32 * each), 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None, pdl: bool = True) -> Tensor:
    """`minisgl.kernels.norm.rms_norm`: ``[..., D]`` and ``[D]`` to ``[..., D]``; ``num_warps`` a row; ``pdl`` as in
    `pdl_options`."""
    rows = x.reshape(-1, x.shape[-1])
    assert rows.stride(1) == 1 and weight.is_contiguous()
    out, block = torch.empty(x.shape, dtype=x.dtype, device=x.device), triton.next_power_of_2(x.shape[-1])
    if rows.shape[0]:
        launch(_rms_norm_kernel, rows.shape[0])(
            rows, rows, weight, out, out, eps, rows.stride(0), 0,
            SIZE=x.shape[-1], BLOCK=block, ADD=False, num_warps=num_warps or _num_warps(block, rows.shape[0]),
            **pdl_options(x.device, pdl),
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`minisgl.kernels.norm.add_rms_norm` in one launch: both results ``[N, D]``, ``residual`` is left as it is."""
    assert x.shape == residual.shape and x.stride(1) == residual.stride(1) == 1 and weight.is_contiguous()
    out, total = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    if x.shape[0]:
        launch(_rms_norm_kernel, x.shape[0])(
            x, residual, weight, out, total, eps, x.stride(0), residual.stride(0),
            SIZE=x.shape[1], BLOCK=block, ADD=True, num_warps=_num_warps(block, x.shape[0]), **pdl_options(x.device),
        )  # fmt: skip
    return out, total


@triton.jit
def _norm_rotate(
    source, target, weight, cos, sin, heads, mask, eps,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: norms, then the first ``PAIRS`` pairs turned; what is behind them passes through.

    What the heads share is loaded for each of them, from the L1 cache: loaded once, it would have to go through shared
    memory to the threads that want it."""
    dtype: tl.constexpr = target.dtype.element_ty
    SOME: tl.constexpr = HEAD_DIM > 2 * PAIRS
    places, mask = (heads * HEAD_DIM)[:, None], mask[:, None]
    pairs = tl.broadcast_to(tl.arange(0, BLOCK_F)[None, :], (heads.shape[0], BLOCK_F))
    rest = tl.broadcast_to(2 * PAIRS + tl.arange(0, BLOCK_REST)[None, :], (heads.shape[0], BLOCK_REST))
    turns, passes = mask & (pairs < PAIRS), mask & (rest < HEAD_DIM)
    first = tl.load(source + places + pairs, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(source + places + PAIRS + pairs, mask=turns, other=0.0).to(tl.float32)
    c = tl.load(cos + pairs, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + pairs, mask=turns, other=0.0).to(tl.float32)
    if SOME:
        third = tl.load(source + places + rest, mask=passes, other=0.0).to(tl.float32)
    if NORM:
        first_weight = tl.load(weight + pairs, mask=turns, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + PAIRS + pairs, mask=turns, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1)
        if SOME:
            squares += tl.sum(third * third, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _round(_round(first * scale, dtype) * first_weight, dtype)
        second = _round(_round(second * scale, dtype) * second_weight, dtype)
        if SOME:
            third = _round(third * scale, dtype) * tl.load(weight + rest, mask=passes, other=0.0).to(tl.float32)
    turned_first = _round(first * c, dtype) - _round(second * s, dtype)
    turned_second = _round(second * c, dtype) + _round(first * s, dtype)
    tl.store(target + places + pairs, turned_first.to(dtype), mask=turns)
    tl.store(target + places + PAIRS + pairs, turned_second.to(dtype), mask=turns)
    if SOME:
        tl.store(target + places + rest, third.to(dtype), mask=passes)


@triton.jit
def _norm_rotary_store_kernel(
    qkv, q_weight, k_weight, cos, sin, q_out, kv, slot_mapping, eps, qkv_stride, cos_stride, sin_stride, v_offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program for each token and ``HEADS`` heads of Q, of K or of V: never of two of them."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    Q_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    TILES: tl.constexpr = Q_TILES + 2 * KV_TILES
    token, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    qkv += token * qkv_stride
    cos += token * cos_stride
    sin += token * sin_stride
    heads = tl.arange(0, HEADS)
    if tile < Q_TILES:
        heads += tile * HEADS
        target = q_out + token * NUM_HEADS * HEAD_DIM
        _norm_rotate(
            qkv, target, q_weight, cos, sin, heads, heads < NUM_HEADS, eps, HEAD_DIM, PAIRS, NORM, BLOCK_F, BLOCK_REST
        )
    else:
        kv += tl.load(slot_mapping + token) * NUM_KV_HEADS * HEAD_DIM
        if tile < Q_TILES + KV_TILES:
            heads += (tile - Q_TILES) * HEADS
            k = qkv + NUM_HEADS * HEAD_DIM
            _norm_rotate(
                k, kv, k_weight, cos, sin, heads, heads < NUM_KV_HEADS, eps, HEAD_DIM, PAIRS, NORM, BLOCK_F, BLOCK_REST
            )
        else:
            heads += (tile - Q_TILES - KV_TILES) * HEADS
            dims = tl.arange(0, BLOCK_D)[None, :]
            places, mask = (heads * HEAD_DIM)[:, None] + dims, (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)
            value = tl.load(qkv + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + places, mask=mask)
            tl.store(kv + v_offset + places, value, mask=mask)


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
    tile: int | None = None,
    num_warps: int | None = None,
) -> Tensor:
    """`minisgl.kernels.rotary.norm_rotary_store` in one launch.

    Args:
        qkv: ``[N, (num_heads + 2 * num_kv_heads) * D]``, rows contiguous.
        q_weight, k_weight: ``[D]``; both or neither.
        eps: of the norms.
        cos, sin: ``[N, F]``.
        kv: ``[2, num_pages, page_size, num_kv_heads, D]``, contiguous; written in place.
        slot_mapping: ``[N]`` int64.
        num_heads: of Q.
        tile: numbers that a program takes, a power of 2: some heads. What is not given goes by the number of tokens.
        num_warps: of a program.

    Returns:
        ``[N, num_heads, D]``, contiguous.
    """
    (num_kv_heads, dim), num_tokens, pairs = kv.shape[3:], qkv.shape[0], cos.shape[1]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * dim and qkv.stride(1) == 1 and kv.is_contiguous()
    assert (q_weight is None) == (k_weight is None) and cos.stride(1) == sin.stride(1) == 1
    out = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        default_tile, default_warps = (2048, 2) if num_tokens > _FEW else (512, 1)
        block_d, num_warps = triton.next_power_of_2(dim), num_warps or default_warps
        heads = max(min((tile or default_tile) // block_d, triton.next_power_of_2(num_heads)), 1)
        tiles = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
        launch(_norm_rotary_store_kernel, num_tokens * tiles)(
            qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos, sin, out, kv,
            slot_mapping, eps, qkv.stride(0), cos.stride(0), sin.stride(0), kv.stride(0),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=dim, PAIRS=pairs, NORM=q_weight is not None,
            HEADS=heads, BLOCK_F=triton.next_power_of_2(pairs),
            BLOCK_REST=triton.next_power_of_2(max(dim - 2 * pairs, 1)), BLOCK_D=block_d, num_warps=num_warps,
            **pdl_options(qkv.device),
        )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul_kernel(x, out, size, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_begin(PDL)
    wait_for_previous(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    result = _round(gate / (1.0 + tl.exp(-gate)), dtype) * up
    tl.store(out + row * size + columns, result.to(dtype), mask=mask)


def silu_and_mul(x: Tensor, *, block: int | None = None, num_warps: int = 4, pdl: bool = True) -> Tensor:
    """`minisgl.kernels.activation.silu_and_mul`: ``[N, 2 * F]``, gate first, to ``[N, F]``. A program takes ``block``
    results, a power of 2, by default more of them where there are many rows; ``pdl`` as in `pdl_options`."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1 and x.shape[1] == 2 * size
    block = block or (2048 if num_rows > _MANY else 1024)
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        launch(_silu_and_mul_kernel, num_rows, triton.cdiv(size, block))(
            x, out, size, x.stride(0), BLOCK=block, num_warps=num_warps, **pdl_options(x.device, pdl)
        )
    return out


# A page is copied as the widest integers that it is a multiple of: bits are all that counts.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["num_copies", "num_pages"])
def _copy_pages_kernel(
    words, page_copies, num_copies, num_pages, page_words, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program for K or V of a layer, and a stretch of a page; it makes *all* copies of that stretch. So that no
    program writes what another one reads, and reading all before writing any takes only a barrier."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    words += tl.program_id(0).to(tl.int64) * num_pages * page_words
    copies, stretch = tl.arange(0, BLOCK_C), tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = (copies < num_copies)[:, None] & (stretch < page_words)[None, :]
    sources = tl.load(page_copies + 2 * copies, mask=copies < num_copies, other=0).to(tl.int64)
    destinations = tl.load(page_copies + 2 * copies + 1, mask=copies < num_copies, other=0).to(tl.int64)
    values = tl.load(words + (sources * page_words)[:, None] + stretch[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(words + (destinations * page_words)[:, None] + stretch[None, :], values, mask=mask)


def copy_pages(kv: Tensor, page_copies: Tensor) -> None:
    """`minisgl.kernels.kv.copy_pages`, one launch for all layers.

    Args:
        kv: ``[num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]``, contiguous; written in place.
        page_copies: ``[C, 2]`` int32 or int64, source and destination; the destinations differ.
    """
    num_copies, num_pages = page_copies.shape[0], kv.shape[2]
    assert kv.is_contiguous() and page_copies.is_contiguous()
    if not num_copies:
        return
    pages = kv.view(-1, num_pages, kv.shape[3:].numel())
    page_bytes = pages.shape[2] * kv.element_size()
    words = pages.view(next(word for num_bytes, word in _WORDS.items() if page_bytes % num_bytes == 0))
    block_c = max(triton.next_power_of_2(num_copies), 16)
    block_w = min(max(4096 // block_c, 8), triton.next_power_of_2(words.shape[2]))
    launch(_copy_pages_kernel, words.shape[0], triton.cdiv(words.shape[2], block_w))(
        words,
        page_copies,
        num_copies,
        num_pages,
        words.shape[2],
        BLOCK_C=block_c,
        BLOCK_W=block_w,
        num_warps=8,
        **pdl_options(kv.device),
    )
