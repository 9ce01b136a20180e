"""Paged attention in Triton: a kernel for prompts, with or without a prefix, and one for decoding.

Chapter 4 tells this module's story. The plain twin is `attend` in `minisgl.engine.attention.torch_backend`. It owns
nothing.

Both kernels walk over a request's tokens in blocks, find each block's slots through the page table, and keep for each
query a running maximum, sum and weighted sum of V (`_absorb`), so that no row of scores is ever in memory. The query
heads that share a KV head are rows of one tile: K and V are read once for all of them.

Decoding reads each K and V once and computes little: it is as fast as memory if every multiprocessor reads all the
time. So the work is cut by bytes, not by requests. The tokens of all requests, once for each set of KV heads, lie in
one *line*; a fixed number of programs, as many as the device can run at once, take equal stretches of it:

    requests and heads   | request 0, heads 0 | request 0, heads 1 | request 1, heads 0 | request 1, heads 1 |
    programs             |      0       |      1       |      2       |      3       |      4       |    5   |

A stretch may begin and end inside an *item* (a request and a set of heads). Who has all of an item writes its result;
otherwise each writes its *piece* to memory, and the last of them to arrive merges the pieces. All of this follows from
the lengths on the device: the host plans nothing, and a graph stays right while its requests grow.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023 (a
program owns a block of queries; one division, at the end); Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context
inference", 2023 (a request's tokens divided over programs); Sanovar et al., "Lean Attention", 2024, after Osama et al.,
"Stream-K", 2023 (equal stretches of all the work); Kwon et al., "PagedAttention", 2023 (the page table).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import let_next_begin, pdl_options, wait_for_previous

_MIN_ROWS = 16  # the least number of rows that `tl.dot` takes
_LOG2_E = math.log2(math.e)  # weights are powers of 2, which the hardware has an instruction for


@triton.jit
def _find_pages(page_row, start, places, end, PAGE_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The pages of the block that begins at token ``start``: one number where a block never leaves its page, else one
    for each of ``places``, counted from ``start``. Nothing is read for tokens at ``end`` and behind."""
    if PAGE_SIZE % BLOCK_K == 0:
        pages = tl.load(page_row + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        pages = tl.load(page_row + (start + places) // PAGE_SIZE, mask=start + places < end, other=0)
    return pages


@triton.jit
def _load_kv(
    kv, v_offset, pages, start, places, heads, end,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """K and V, ``[rows, BLOCK_D]`` each; row i is of KV head ``heads[i]`` at token ``start + places[i]``. At token
    ``end`` and behind nothing is read: it is 0 there, since what lies in memory might be NaN, and NaN times a weight
    of 0 is NaN."""
    if PAGE_SIZE % BLOCK_K == 0:  # one address, and offsets that stay the same from block to block
        kv += (pages.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        slots = places
    else:
        slots = pages.to(tl.int64) * PAGE_SIZE + (start + places) % PAGE_SIZE
    dims = tl.arange(0, BLOCK_D)
    offsets = ((slots * NUM_KV_HEADS + heads) * HEAD_DIM)[:, None] + dims[None, :]
    mask = (start + places < end)[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(kv + offsets, mask=mask, other=0.0), tl.load(kv + v_offset + offsets, mask=mask, other=0.0)


@triton.jit
def _absorb(q, k, v, sees, scale, peak, acc, MASKED: tl.constexpr, WIDEN: tl.constexpr):
    """One block of K and V into the running softmax: ``peak`` the greatest score so far, ``acc`` the sum of V weighted
    with ``2 ** (score - peak)``. Without ``MASKED`` all queries see all; else every query must see a token of its first
    block.

    Returns ``peak`` and ``acc``, the block's weights, and ``shrink``: what was summed under the old peak is worth this
    much under the new one. The caller sums the weights."""
    if WIDEN:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(sees, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_peak, acc, weights, shrink


@triton.jit(do_not_specialize=["num_requests"])
def _prefill_kernel(
    q, kv, out, page_table, cu_seqlens_q, seq_lens, num_requests, scale,
    q_stride, out_stride, v_offset, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program for each KV head and block of a request's queries."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    # The last blocks see most tokens. They begin first, so that no long one is left over at the end.
    kv_head, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
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
        places = tl.arange(0, BLOCK_K)
        # First the blocks that the first query, and so each, sees whole: most of them, and nothing is to be masked.
        seen_by_all = (length - num_new + first + 1) // BLOCK_K * BLOCK_K
        for masked in tl.static_range(2):
            if masked:
                begin_k, end_k = seen_by_all, end
            else:
                begin_k, end_k = 0, seen_by_all
            pages = _find_pages(page_row, begin_k, places, end_k, PAGE_SIZE, BLOCK_K)
            for start in range(begin_k, end_k, BLOCK_K):
                k, v = _load_kv(
                    kv, v_offset, pages, start, places, kv_head, end_k,
                    NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_K, BLOCK_D,
                )  # fmt: skip
                pages = _find_pages(page_row, start + BLOCK_K, places, end_k, PAGE_SIZE, BLOCK_K)
                sees = (start + places)[None, :] <= positions[:, None]
                peak, acc, weights, shrink = _absorb(q_tile, k, v, sees, scale, peak, acc, masked, WIDEN)
                total = total * shrink + tl.sum(weights, axis=1)
        result = acc / total[:, None]
        tl.store(out + (places_in_n * out_stride)[:, None] + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_requests"])
def _line_kernel(seq_lens, line, num_requests, BLOCK_R: tl.constexpr, PDL: tl.constexpr):
    """Where each request begins in the line, and behind them the line's end. One program."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    each = tl.arange(0, BLOCK_R)
    there = each < num_requests
    lengths = tl.load(seq_lens + each, mask=there, other=0)
    # A request without tokens (padding of a graph) has a place all the same: somebody must write its zeros.
    places = tl.where(there, tl.maximum(lengths, 1), 0)
    tl.store(line + 1 + each, tl.cumsum(places, axis=0), mask=there)
    tl.store(line, 0)


@triton.jit
def _merge(
    pieces, first, last, num_programs, SIZE: tl.constexpr, BLOCK_S: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The result of an item, ``[BLOCK_S, BLOCK_D]``, of which programs ``first`` to ``last`` wrote a piece each:
    a running softmax over pieces, ``BLOCK_P`` at a time."""
    rows, dims = tl.minimum(tl.arange(0, BLOCK_S), SIZE - 1), tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_S,), tl.float32)
    acc = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    peaks = pieces + 2 * num_programs * (SIZE * HEAD_DIM)
    totals = peaks + 2 * num_programs * SIZE
    for start in range(first, last + 1, BLOCK_P):
        programs = start + tl.arange(0, BLOCK_P)
        there = (programs <= last)[:, None]
        places = _place(programs, first, num_programs)[:, None] * SIZE + rows[None, :]
        # ".cg": from L2, where other multiprocessors wrote it.
        its_peak = tl.load(peaks + places, mask=there, other=float("-inf"), cache_modifier=".cg")
        its_total = tl.load(totals + places, mask=there, other=0.0, cache_modifier=".cg")
        its_acc = tl.load(
            pieces + (places * HEAD_DIM)[:, :, None] + dims[None, None, :],
            mask=there[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(its_peak, axis=0))
        shrink, its_shrink = tl.exp2(peak - new_peak), tl.exp2(its_peak - new_peak[None, :])
        total = total * shrink + tl.sum(its_total * its_shrink, axis=0)
        acc = acc * shrink[:, None] + tl.sum(its_acc * its_shrink[:, :, None], axis=0)
        peak = new_peak
    return acc / total[:, None]


@triton.jit
def _place(program, first, num_programs):
    """Where a program's piece lies. It has at most two: of the item that it begins with (and another began), and of
    the item that it ends with (and is the first to begin)."""
    return tl.where(program == first, program + num_programs, program)


@triton.jit(do_not_specialize=["num_requests"])
def _decode_kernel(
    q, kv, out, pieces, counters, page_table, seq_lens, line, num_requests, scale,
    q_stride, out_stride, v_offset, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program walks over its stretch of the line, item by item."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    NUM_SETS: tl.constexpr = NUM_KV_HEADS // HEADS
    SIZE: tl.constexpr = HEADS * GROUP  # query heads of an item

    # A tile of Q has the item's query heads as rows, a tile of K or V its tokens, each with its heads side by side as
    # they lie in memory. Of the product only what belongs together counts. It costs nothing, since `tl.dot` has rows
    # to spare, and what is read at a time is longer.
    rows, columns, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K * HEADS), tl.arange(0, BLOCK_D)
    places, heads = columns // HEADS, columns % HEADS
    belongs = (rows // GROUP % HEADS)[:, None] == heads[None, :]
    q_offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    q_mask = (rows < SIZE)[:, None] & (dims < HEAD_DIM)[None, :]

    # The stretch, and the first request that has a part in it. A stretch is at least a block.
    line_end = tl.load(line + num_requests) * NUM_SETS
    share = tl.maximum(tl.cdiv(line_end, num_programs), BLOCK_K)
    begin = program * share
    end = tl.minimum(begin + share, line_end)
    each = tl.arange(0, BLOCK_R)
    starts = tl.load(line + each, mask=each < num_requests, other=2147483647)
    request = tl.sum((starts <= begin // NUM_SETS).to(tl.int32), axis=0) - 1
    first_place = tl.load(line + request)
    num_places = tl.load(line + request + 1) - first_place
    head_set = (begin - first_place * NUM_SETS) // num_places
    item_begin = first_place * NUM_SETS + head_set * num_places

    while item_begin < end:
        # A border that cuts an item moves down to the next whole block of it; so at the item's first block it moves
        # down to the item's begin, and the program behind it has the whole item.
        item_end = item_begin + num_places
        last = (item_end - 1) // share
        first = tl.minimum((item_begin + BLOCK_K - 1) // share, last)
        if first <= program:
            page_row = page_table + request.to(tl.int64) * table_stride
            first_head = head_set * HEADS
            start = tl.maximum(begin - item_begin, 0) // BLOCK_K * BLOCK_K
            pages = _find_pages(page_row, start, places, item_end - item_begin, PAGE_SIZE, BLOCK_K)
            length = tl.load(seq_lens + request)
            q_item = q + request.to(tl.int64) * q_stride + head_set * (SIZE * HEAD_DIM)
            q_tile = tl.load(q_item + q_offsets, mask=q_mask, other=0.0)
            stop = length
            if program < last:
                stop = (end - item_begin) // BLOCK_K * BLOCK_K

            peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            # The weights are summed over columns only at the end: within a row that takes several warps.
            total = tl.zeros((BLOCK_M, BLOCK_K * HEADS), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for token in range(start, stop, BLOCK_K):
                k, v = _load_kv(
                    kv, v_offset, pages, token, places, first_head + heads, stop,
                    NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_K, BLOCK_D,
                )  # fmt: skip
                # Asked for one block ahead, so that no block waits for its address.
                pages = _find_pages(page_row, token + BLOCK_K, places, stop, PAGE_SIZE, BLOCK_K)
                sees = belongs & (token + places < stop)[None, :]
                peak, acc, weights, shrink = _absorb(q_tile, k, v, sees, scale, peak, acc, True, WIDEN)
                total = total * shrink[:, None] + weights
            totals = tl.sum(total, axis=1)

            out_item = out + request.to(tl.int64) * out_stride + head_set * (SIZE * HEAD_DIM)
            if first == last:
                # A request without tokens has a total of 0: its output is 0.
                result = acc / tl.where(totals > 0, totals, 1.0)[:, None]
                tl.store(out_item + q_offsets, result.to(out.dtype.element_ty), mask=q_mask)
            else:
                place = _place(program, first, num_programs) * SIZE
                statistics = pieces + 2 * num_programs * (SIZE * HEAD_DIM) + place + rows
                tl.store(pieces + place * HEAD_DIM + q_offsets, acc, mask=q_mask)
                tl.store(statistics, peak, mask=rows < SIZE)
                tl.store(statistics + 2 * num_programs * SIZE, totals, mask=rows < SIZE)
                # All threads have stored; then one of them counts the program in. "acq_rel" publishes what was stored
                # before, and shows to whoever counts last what the others published.
                tl.debug_barrier()
                num_before = tl.atomic_add(counters + first, 1, sem="acq_rel", scope="gpu")
                if num_before == last - first:
                    result = _merge(
                        pieces, first, last, num_programs, SIZE, BLOCK_S, HEAD_DIM, BLOCK_D, BLOCK_P
                    )  # fmt: skip
                    merged = tl.arange(0, BLOCK_S)
                    offsets = merged[:, None] * HEAD_DIM + dims[None, :]
                    mask = (merged < SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
                    tl.store(out_item + offsets, result.to(out.dtype.element_ty), mask=mask)
                    tl.store(counters + first, 0)  # ready for the next launch

        item_begin = item_end
        head_set += 1
        if head_set == NUM_SETS:
            head_set = 0
            request += 1
            there = request < num_requests
            num_places = tl.load(line + request + 1, mask=there, other=0) - tl.load(line + request)


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
    block_m: int = 128,
    block_k: int | None = None,
    num_warps: int = 8,
    num_stages: int = 3,
    max_registers: int | None = None,
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
        num_warps: of a program; 4 or 8 let a block of 64 or 128 rows use Hopper's own matrix instructions.
        num_stages: one more than the blocks of K and V that are on their way or in use at a time.
        max_registers: of a thread; see `registers_of`.
    """
    _check(q, kv, out, page_table)
    num_requests, (num_kv_heads, head_dim) = seq_lens.shape[0], kv.shape[3:]
    group = q.shape[1] // num_kv_heads
    block_m = max(block_m, triton.next_power_of_2(group))
    grid = (num_kv_heads, q.shape[0] // (block_m // group) + num_requests)
    _prefill_kernel[grid](
        q, kv, out, page_table, cu_seqlens_q, seq_lens, num_requests, scale * _LOG2_E,
        q.stride(0), out.stride(0), kv.stride(0), page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=kv.shape[2],
        BLOCK_R=_block_r(num_requests), BLOCK_M=block_m, BLOCK_K=block_k or _block_rows(kv),
        BLOCK_D=_block_d(head_dim), WIDEN=_widen(q.dtype),
        num_warps=num_warps, num_stages=num_stages, maxnreg=max_registers, **pdl_options(q.device),
    )  # fmt: skip


def lay_out(seq_lens: Tensor) -> Tensor:
    """The line of a decode step, for all of its layers.

    Args:
        seq_lens: ``[R]`` int32, on the device.

    Returns:
        ``[R + 1]`` int32: where each request begins, and the line's end.
    """
    num_requests = seq_lens.shape[0]
    line = torch.empty(num_requests + 1, dtype=torch.int32, device=seq_lens.device)
    _line_kernel[1,](seq_lens, line, num_requests, BLOCK_R=_block_r(num_requests), **pdl_options(seq_lens.device))
    return line


def decode_attention(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    line: Tensor,
    counters: Tensor,
    *,
    scale: float,
    num_programs: int,
    heads: int | None = None,
    block_rows: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    max_registers: int | None = None,
) -> None:
    """Attention of requests with one new token each: N is R. A request of length 0 gets zeros.

    Args:
        q, kv, out, page_table, seq_lens, scale: see `prefill_attention`.
        line: `lay_out` of ``seq_lens``.
        counters: ``[num_programs]`` int32 or longer, all 0; 0 again afterwards. Launches that share them must not run
            at the same time.
        num_programs: best as many as the device runs at once.
        heads: KV heads of an item, a power of 2 that divides their number; by default `choose_heads`.
        block_rows: rows of a tile of K and V, ``heads`` for each token: a power of 2, at least 16.
        num_warps, num_stages, max_registers: see `prefill_attention`.
    """
    _check(q, kv, out, page_table)
    num_requests, (page_size, num_kv_heads, head_dim) = seq_lens.shape[0], kv.shape[2:]
    assert counters.numel() >= num_programs and line.shape[0] == num_requests + 1
    group, block_d = q.shape[1] // num_kv_heads, _block_d(head_dim)
    heads = heads or choose_heads(num_requests, num_kv_heads, group, num_programs=num_programs)
    assert num_kv_heads % heads == 0
    size = heads * group
    block_s = triton.next_power_of_2(size)
    # Two pieces for each program: the sums of V, then the peaks, then the totals.
    pieces = torch.empty(2 * num_programs * size * (head_dim + 2), dtype=torch.float32, device=q.device)
    _decode_kernel[num_programs,](
        q, kv, out, pieces, counters, page_table, seq_lens, line, num_requests, scale * _LOG2_E,
        q.stride(0), out.stride(0), kv.stride(0), page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        HEADS=heads, BLOCK_R=_block_r(num_requests), BLOCK_M=max(_MIN_ROWS, block_s),
        BLOCK_K=(block_rows or _block_rows(kv)) // heads, BLOCK_D=block_d,
        BLOCK_S=block_s, BLOCK_P=max(1, num_warps * 512 // (block_s * block_d)),  # 16 registers of a thread
        WIDEN=_widen(q.dtype), num_warps=num_warps, num_stages=num_stages, maxnreg=max_registers,
        **pdl_options(q.device),
    )  # fmt: skip


def registers_of(each: int, num_warps: int) -> int:
    """How many a thread may have so that ``each`` programs run on a multiprocessor at once, which has 65,536."""
    return min(255, 65536 // (each * num_warps * 32) // 8 * 8)


def choose_heads(num_requests: int, num_kv_heads: int, group: int, *, num_programs: int) -> int:
    """KV heads that an item takes together: as many as a tile of Q has rows for, since what they share is read in
    longer runs; but not so many that an item is cut into more than about four pieces, since one program merges them.

    Args:
        num_requests: R.
        group: query heads of a KV head.
        num_programs: that share the work.
    """
    heads = 1
    while (
        num_kv_heads % (2 * heads) == 0
        and 2 * heads * group <= _MIN_ROWS
        and 4 * num_requests * num_kv_heads // (2 * heads) >= num_programs
    ):
        heads *= 2
    return heads


def _block_r(num_requests: int) -> int:
    """The same for most batches, so that a kernel is compiled once; to look at more requests takes no longer."""
    return max(256, triton.next_power_of_2(num_requests))


def _block_d(head_dim: int) -> int:
    return max(_MIN_ROWS, triton.next_power_of_2(head_dim))


def _block_rows(kv: Tensor) -> int:
    """A tile of 16 KB in half precision."""
    return 64 if kv.shape[4] <= 128 else 32


def _widen(dtype: torch.dtype) -> bool:
    """Triton's interpreter has no products of bfloat16 (numpy has no such type): there they are taken in float32."""
    return bool(triton.knobs.runtime.interpret) and dtype == torch.bfloat16
