"""Paged attention in Triton: a kernel for prompts, with or without a prefix, and one for decoding.

Chapter 4 tells this module's story. The plain twin is `attend` in `minisgl.engine.attention.torch_backend`. It owns
nothing.

Both kernels walk over a request's tokens in blocks of `block_k`, find each block's slots through the page table, and
keep for each query a running maximum, sum and weighted sum of V (`_absorb`), so that no row of scores is ever in
memory. The query heads that share a KV head are rows of one tile: K and V are read once for all of them.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023 (a
program owns a block of queries; one division, at the end); Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context
inference", 2023 (a request's tokens divided over programs); Kwon et al., "PagedAttention", 2023 (the page table).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.utils import ceil_div

_MIN_ROWS = 16  # the least number of rows that `tl.dot` takes
_LOG2_E = math.log2(math.e)  # weights are powers of 2, which the hardware has an instruction for


@triton.jit
def _load_kv(
    kv, v_offset, page_row, places, length, kv_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """K and V of one head at ``places`` of a request, ``[block_k, BLOCK_D]`` each. Behind the request's end nothing is
    read: it is 0 there, since what lies in memory might be NaN, and NaN times a weight of 0 is NaN."""
    there = places < length
    pages = tl.load(page_row + places // PAGE_SIZE, mask=there, other=0)
    slots = pages.to(tl.int64) * PAGE_SIZE + places % PAGE_SIZE
    dims = tl.arange(0, BLOCK_D)
    offsets = ((slots * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims[None, :]
    mask = there[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(kv + offsets, mask=mask, other=0.0), tl.load(kv + v_offset + offsets, mask=mask, other=0.0)


@triton.jit
def _absorb(q, k, v, sees, scale, peak, total, acc, WIDEN: tl.constexpr):
    """One block of K and V into the running softmax: ``peak`` the greatest score so far, ``total`` the sum of weights
    ``2 ** (score - peak)``, ``acc`` the sum of V by these weights. Every query must see a token of its first block."""
    if WIDEN:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(sees, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)  # what was summed under the old peak is worth this much under the new one
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _prefill_kernel(
    q, kv, out, page_table, cu_seqlens_q, seq_lens, num_requests, scale,
    q_stride, out_stride, v_offset, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program for each block of a request's queries and each KV head."""
    block, kv_head = tl.program_id(0), tl.program_id(1)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP  # queries of a block, each with GROUP heads

    # Which request? Request i begins at block cu[i] // BLOCK_Q + i: never too few blocks, at most one too many, and
    # the host need not know the lengths.
    each = tl.arange(0, BLOCK_R)
    first_blocks = tl.load(cu_seqlens_q + each, mask=each < num_requests, other=0) // BLOCK_Q + each
    request = tl.sum(((first_blocks <= block) & (each < num_requests)).to(tl.int32), axis=0) - 1
    begin = tl.load(cu_seqlens_q + request)
    num_new = tl.load(cu_seqlens_q + request + 1) - begin
    length = tl.load(seq_lens + request)
    first = (block - begin // BLOCK_Q - request) * BLOCK_Q
    if first < num_new:
        rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        tokens, heads = first + rows // GROUP, kv_head * GROUP + rows % GROUP
        mask = ((rows < BLOCK_Q * GROUP) & (tokens < num_new))[:, None] & (dims < HEAD_DIM)[None, :]
        places_in_n = (begin + tokens).to(tl.int64)
        columns = (heads * HEAD_DIM)[:, None] + dims[None, :]
        q_tile = tl.load(q + (places_in_n * q_stride)[:, None] + columns, mask=mask, other=0.0)

        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        positions = length - num_new + tokens
        end = tl.minimum(length, length - num_new + first + BLOCK_Q)  # behind the block's last query nothing is seen
        page_row = page_table + request.to(tl.int64) * table_stride
        for start in range(0, end, BLOCK_K):
            places = start + tl.arange(0, BLOCK_K)
            k, v = _load_kv(kv, v_offset, page_row, places, length, kv_head, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D)
            sees = (places[None, :] <= positions[:, None]) & (places < length)[None, :]
            peak, total, acc = _absorb(q_tile, k, v, sees, scale, peak, total, acc, WIDEN)
        result = acc / total[:, None]
        tl.store(out + (places_in_n * out_stride)[:, None] + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _decode_kernel(
    q, kv, out, partials, peaks, totals, counters, page_table, seq_lens, num_splits, scale,
    q_stride, out_stride, v_offset, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program for each request, KV head and split of the request's tokens. The last one to arrive merges."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + request)
    # As many splits as were launched if the request is long enough to give each a block: known only here.
    split_size = tl.cdiv(tl.maximum(tl.cdiv(length, num_splits), 1), BLOCK_K) * BLOCK_K
    num_used = tl.maximum(tl.cdiv(length, split_size), 1)
    if split < num_used:
        rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        tile = rows[:, None] * HEAD_DIM + dims[None, :]
        mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q_tile = tl.load(q + request.to(tl.int64) * q_stride + kv_head * GROUP * HEAD_DIM + tile, mask=mask, other=0.0)

        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        page_row = page_table + request.to(tl.int64) * table_stride
        for start in range(split * split_size, tl.minimum(length, (split + 1) * split_size), BLOCK_K):
            places = start + tl.arange(0, BLOCK_K)
            k, v = _load_kv(kv, v_offset, page_row, places, length, kv_head, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_D)
            peak, total, acc = _absorb(q_tile, k, v, (places < length)[None, :], scale, peak, total, acc, WIDEN)

        out_tile = out + request.to(tl.int64) * out_stride + kv_head * GROUP * HEAD_DIM + tile
        if num_used == 1:
            # A request without tokens (padding of a graph) has a total of 0: its output is 0.
            result = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out_tile, result.to(out.dtype.element_ty), mask=mask)
        else:
            item = request * NUM_KV_HEADS + kv_head
            place = item * num_splits + split
            tl.store(partials + place.to(tl.int64) * (GROUP * HEAD_DIM) + tile, acc, mask=mask)
            tl.store(peaks + place * GROUP + rows, peak, mask=rows < GROUP)
            tl.store(totals + place * GROUP + rows, total, mask=rows < GROUP)
            # All threads have stored; then one of them counts the program in. "acq_rel" publishes what was stored
            # before, and shows to whoever counts last what the others published.
            tl.debug_barrier()
            num_before = tl.atomic_add(counters + item, 1, sem="acq_rel", scope="gpu")
            if num_before == num_used - 1:
                peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
                acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                for other in range(0, num_used):
                    place = item * num_splits + other
                    # ".cg": from L2, where other multiprocessors wrote it.
                    its_peak = tl.load(peaks + place * GROUP + rows, mask=rows < GROUP, other=0.0, cache_modifier=".cg")
                    its_total = tl.load(
                        totals + place * GROUP + rows, mask=rows < GROUP, other=1.0, cache_modifier=".cg"
                    )
                    its_acc = tl.load(
                        partials + place.to(tl.int64) * (GROUP * HEAD_DIM) + tile,
                        mask=mask, other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    new_peak = tl.maximum(peak, its_peak)
                    shrink, its_shrink = tl.exp2(peak - new_peak), tl.exp2(its_peak - new_peak)
                    total = total * shrink + its_total * its_shrink
                    acc = acc * shrink[:, None] + its_acc * its_shrink[:, None]
                    peak = new_peak
                tl.store(out_tile, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
                tl.store(counters + item, 0)  # ready for the next launch


def _check(q: Tensor, kv: Tensor, out: Tensor, page_table: Tensor) -> None:
    for x in (q, out):
        assert x.stride()[1:] == (x.shape[2], 1) and x.shape[2] == kv.shape[4], (x.shape, x.stride())
    assert kv.is_contiguous() and page_table.stride(1) == 1 and q.shape[1] % kv.shape[3] == 0


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    block_m: int = 64,
    block_k: int | None = None,
) -> None:
    """Causal attention of requests with any number of new tokens.

    Args:
        q: ``[N, num_heads, head_dim]`` float32, float16 or bfloat16; the heads of a token lie side by side.
        kv: ``[2, num_pages, page_size, num_kv_heads, head_dim]``, dtype of ``q``, contiguous; read only where a request
            has tokens.
        out: shape and dtype of ``q``; written.
        page_table: ``[R, P]`` int32.
        cu_seqlens_q: ``[R + 1]`` int32, 0 first, N last.
        seq_lens: ``[R]`` int32.
        scale: factor of the scores.
        block_m: rows of a tile (a query has ``num_heads / num_kv_heads`` of them), a power of 2, at least 16.
        block_k: tokens of K and V in a step, a power of 2, at least 16; by default what suits ``head_dim``.
    """
    _check(q, kv, out, page_table)
    num_requests, (num_kv_heads, head_dim) = seq_lens.shape[0], kv.shape[3:]
    group = q.shape[1] // num_kv_heads
    block_m = max(block_m, triton.next_power_of_2(group))
    grid = (q.shape[0] // (block_m // group) + num_requests, num_kv_heads)
    _prefill_kernel[grid](
        q, kv, out, page_table, cu_seqlens_q, seq_lens, num_requests, scale * _LOG2_E,
        q.stride(0), out.stride(0), kv.stride(0), page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=kv.shape[2],
        BLOCK_R=triton.next_power_of_2(num_requests), BLOCK_M=block_m, BLOCK_K=block_k or _block_k(head_dim),
        BLOCK_D=_block_d(head_dim), WIDEN=_widen(q.dtype),
    )  # fmt: skip


def decode_attention(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    counters: Tensor | None = None,
    *,
    scale: float,
    num_splits: int = 1,
    block_k: int | None = None,
) -> None:
    """Attention of requests with one new token each: N is R. A request of length 0 gets zeros.

    Args:
        q, kv, out, page_table, seq_lens, scale, block_k: see `prefill_attention`.
        counters: at least ``R * num_kv_heads`` int32, all 0; 0 again afterwards. Launches that share them must not run
            at the same time. Only needed for more than one split.
        num_splits: programs that share a request's tokens; a request too short for all of them uses fewer.
    """
    _check(q, kv, out, page_table)
    num_requests, (num_kv_heads, head_dim) = seq_lens.shape[0], kv.shape[3:]
    group, partials, peaks, totals = q.shape[1] // num_kv_heads, out, out, out
    if num_splits > 1:
        assert counters is not None and counters.numel() >= num_requests * num_kv_heads
        shape = (num_requests, num_kv_heads, num_splits, group)
        partials = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        peaks, totals = torch.empty((2, *shape), dtype=torch.float32, device=q.device)
    _decode_kernel[num_requests, num_kv_heads, num_splits](
        q, kv, out, partials, peaks, totals, seq_lens if counters is None else counters,
        page_table, seq_lens, num_splits, scale * _LOG2_E,
        q.stride(0), out.stride(0), kv.stride(0), page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=kv.shape[2],
        BLOCK_M=max(_MIN_ROWS, triton.next_power_of_2(group)), BLOCK_K=block_k or _block_k(head_dim),
        BLOCK_D=_block_d(head_dim), WIDEN=_widen(q.dtype),
    )  # fmt: skip


def choose_num_splits(num_items: int, max_len: int, *, num_programs: int, split_tokens: int = 256) -> int:
    """How many programs share a request's tokens: enough to have ``num_programs`` in all, none with fewer than
    ``split_tokens`` tokens of the longest request.

    Args:
        num_items: requests times KV heads.
        max_len: bound of the lengths, known on the host, so that the launch can be captured in a graph.
    """
    return max(1, min(num_programs // num_items, ceil_div(max_len, split_tokens)))


def _block_d(head_dim: int) -> int:
    return max(_MIN_ROWS, triton.next_power_of_2(head_dim))


def _block_k(head_dim: int) -> int:
    return 64 if head_dim <= 128 else 32


def _widen(dtype: torch.dtype) -> bool:
    """Triton's interpreter has no products of bfloat16 (numpy has no such type): there they are taken in float32."""
    return bool(triton.knobs.runtime.interpret) and dtype == torch.bfloat16
