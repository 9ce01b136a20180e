"""Paged attention in Triton: a kernel for prompts, with or without a prefix, and one for decoding.

Chapter 4 tells this module's story. The plain twin is `attend` in `minisgl.engine.attention.torch_backend`. It owns
nothing.

Both kernels walk over a request's tokens in blocks, find each block's slots through the page table, and keep for each
query a running maximum, sum and weighted sum of V (`_absorb`), so that no row of scores is ever in memory. The query
heads that share a KV head are rows of one tile: K and V are read once for all of them.

In decoding each program walks over a stretch of all requests' blocks, as `minisgl.kernels.triton_line` has laid them
out: by a record of its own, which says where it begins and ends and with whom it shares. Programs that are there while
their layer's queries are still computed bring their first blocks into L2.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023 (a
program owns a block of queries; one division, at the end); Kwon et al., "PagedAttention", 2023 (the page table).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import launch, let_next_begin, pdl_options, prefetch, wait_for_previous
from minisgl.kernels.triton_line import MIN_ROWS, RECORD, DecodePlan, block_r, block_rows

# Of a piece's weight, side by side: so it is read by the threads that have the piece. With one copy the compiler takes
# others, and brings them together through shared memory, piece by piece.
_COPIES = 4
# What differs from step to step. A variant for each kind of number or address would be compiled while requests wait.
_ANY_NUMBER = ["num_requests", "table_stride"]
_ANY_PLACE = ["page_table", "seq_lens"]
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
    """K and V, ``[..., BLOCK_D]`` each; row i is of KV head ``heads[i]`` at token ``start + places[i]``. At token
    ``end`` and behind nothing is read: it is 0 there, since what lies in memory might be NaN, and NaN times a weight
    of 0 is NaN."""
    if PAGE_SIZE % BLOCK_K == 0:  # one address, and offsets that stay the same from block to block
        kv += (pages.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        slots = places
    else:
        slots = pages.to(tl.int64) * PAGE_SIZE + (start + places) % PAGE_SIZE
    dims = tl.arange(0, BLOCK_D)
    offsets = tl.expand_dims((slots * NUM_KV_HEADS + heads) * HEAD_DIM, -1) + dims
    mask = tl.expand_dims(start + places < end, -1) & (dims < HEAD_DIM)
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


@triton.jit(do_not_specialize=_ANY_NUMBER, do_not_specialize_on_alignment=_ANY_PLACE)
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


@triton.jit
def _merge(
    pieces, first, last, num_programs, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, COPIES: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The result of an item, ``[BLOCK_S, BLOCK_D]``, of which programs ``first`` to ``last`` wrote a piece each.

    A thread has the same elements of all pieces and reads their weights itself: so no thread waits for another, and
    ``BLOCK_P`` pieces are on their way at a time."""
    rows, dims = tl.minimum(tl.arange(0, BLOCK_S), SIZE - 1)[:, None], tl.arange(0, BLOCK_D)[None, :]
    peak = tl.full((BLOCK_S, BLOCK_D), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    acc = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for begin in range(0, last - first + 1, BLOCK_P):
        for i in tl.static_range(BLOCK_P):
            program = first + begin + i
            place = _place(program, first, num_programs) * SIZE + rows
            there = (program + tl.zeros_like(dims) <= last) & (dims < HEAD_DIM)
            # ".cg": from L2, where other multiprocessors wrote it.
            piece = tl.load(pieces + place * HEAD_DIM + dims, mask=there, other=0.0, cache_modifier=".cg")
            weight = tl.load(
                pieces + 2 * num_programs * (SIZE * HEAD_DIM) + place * COPIES + dims % COPIES,
                mask=there, other=float("-inf"), cache_modifier=".cg",
            )  # fmt: skip
            new_peak = tl.maximum(tl.maximum(peak, weight), -1e38)  # finite, also where no piece is
            shrink, weight = tl.exp2(peak - new_peak), tl.exp2(weight - new_peak)
            total = total * shrink + weight
            acc = acc * shrink + piece * weight
            peak = new_peak
    return acc / total


@triton.jit
def _place(program, first, num_programs):
    """Where a program's piece lies. It has at most two: of the item that it begins with (and another began), and of
    the item that it ends with (and is the first to begin)."""
    return tl.where(program == first, program + num_programs, program)


@triton.jit
def _prefetch_kv(
    kv, v_offset, page_row, head_set, start, stop,
    NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
):  # fmt: skip
    """K and V of ``NUM_TOKENS`` tokens from ``start`` on, at most to ``stop``, into L2. One of them may be new, and not
    be written yet; it will be written to L2."""
    each = tl.arange(0, 2 * NUM_TOKENS)
    token = start + each // 2
    there = token < stop
    page = tl.load(page_row + token // PAGE_SIZE, mask=there, other=0)
    slot = page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    address = kv + slot * (NUM_KV_HEADS * HEAD_DIM) + head_set * WIDTH + each % 2 * v_offset
    prefetch(address, there.to(tl.int32) * (WIDTH * (kv.dtype.element_ty.primitive_bitwidth // 8)))


@triton.jit(do_not_specialize=_ANY_NUMBER, do_not_specialize_on_alignment=_ANY_PLACE)
def _decode_kernel(
    q, kv, out, pieces, counters, page_table, seq_lens, plan, num_requests, scale,
    q_stride, out_stride, v_offset, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, COPIES: tl.constexpr, RECORD: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_O: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program walks over its stretch of the line, item by item. Padding is divided evenly among them too."""
    let_next_begin(PDL)
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

    record = plan + program * RECORD
    item, start, length, page = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    last_item, last_stop = tl.load(record + 4), tl.load(record + 5)
    first_of_first, last_of_first, last_of_last = tl.load(record + 6), tl.load(record + 7), tl.load(record + 8)
    num_real = tl.load(record + 9)
    if AHEAD > 0:
        stop = tl.where(item == last_item, tl.minimum(length, last_stop), length)
        page_row = page_table + (item // NUM_SETS).to(tl.int64) * table_stride
        _prefetch_kv(
            kv, v_offset, page_row, item % NUM_SETS, start, tl.where(item <= last_item, stop, 0),
            NUM_KV_HEADS, HEADS, HEAD_DIM, PAGE_SIZE, AHEAD * BLOCK_K,
        )  # fmt: skip
    wait_for_previous(PDL)

    for padding in range(num_real + program, num_requests, num_programs):
        numbers = tl.arange(0, BLOCK_O)
        zeros, mask = tl.zeros((BLOCK_O,), out.dtype.element_ty), numbers < NUM_SETS * SIZE * HEAD_DIM
        tl.store(out + padding * out_stride + numbers, zeros, mask=mask)

    while item <= last_item:
        request, head_set = item // NUM_SETS, item % NUM_SETS
        q_item = q + request.to(tl.int64) * q_stride + head_set * (SIZE * HEAD_DIM)
        page_row = page_table + request.to(tl.int64) * table_stride
        stop = length
        if item == last_item:
            stop = tl.minimum(length, last_stop)
        if PAGE_SIZE % BLOCK_K == 0:
            pages = page
        else:
            pages = _find_pages(page_row, start, places, stop, PAGE_SIZE, BLOCK_K)
        # What the next item begins with is on its way while this one is read.
        next_request = (item + 1) // NUM_SETS
        next_length = tl.load(seq_lens + next_request, mask=item < last_item, other=0)
        next_page = tl.load(page_table + next_request.to(tl.int64) * table_stride, mask=item < last_item, other=0)

        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        # The weights are summed over columns only at the end: within a row that takes several warps.
        total = tl.zeros((BLOCK_M, BLOCK_K * HEADS), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for token in range(start, stop, BLOCK_K):
            k, v = _load_kv(
                kv, v_offset, pages, token, places, head_set * HEADS + heads, stop,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_K, BLOCK_D,
            )  # fmt: skip
            # Asked for one block ahead, so that no block waits for its address.
            pages = _find_pages(page_row, token + BLOCK_K, places, stop, PAGE_SIZE, BLOCK_K)
            # With each block anew, from L2: so the first K and V are asked for at once, and not after Q has come. That
            # the mask depends on the block keeps the compiler from taking this out of the loop.
            there = q_mask & (token + tl.zeros_like(rows) < stop)[:, None]
            q_tile = tl.load(q_item + q_offsets, mask=there, other=0.0)
            sees = belongs & (token + places < stop)[None, :]
            peak, acc, weights, shrink = _absorb(q_tile, k, v, sees, scale, peak, acc, True, WIDEN)
            total = total * shrink[:, None] + weights
        totals = tl.sum(total, axis=1)
        # A request without tokens has a total of 0: its output is 0.
        result = acc / tl.where(totals > 0, totals, 1.0)[:, None]

        out_item = out + request.to(tl.int64) * out_stride + head_set * (SIZE * HEAD_DIM)
        if (start == 0) & (stop == length):
            tl.store(out_item + q_offsets, result.to(out.dtype.element_ty), mask=q_mask)
        else:
            # The programs that have a piece of this item.
            first, last = program, last_of_last
            if start > 0:
                first, last = first_of_first, last_of_first
            # A piece weighs the sum of its weights, as a power of 2.
            place = _place(program, first, num_programs) * SIZE
            tl.store(pieces + place * HEAD_DIM + q_offsets, result, mask=q_mask)
            weights_of_pieces = pieces + 2 * num_programs * (SIZE * HEAD_DIM)
            copies = weights_of_pieces + ((place + rows) * COPIES)[:, None] + tl.arange(0, COPIES)[None, :]
            tl.store(copies, (peak + tl.log2(totals))[:, None], mask=(rows < SIZE)[:, None])
            # All threads have stored; then one of them counts the program in. "acq_rel" publishes what was stored
            # before, and shows to whoever counts last what the others published.
            tl.debug_barrier()
            num_before = tl.atomic_add(counters + first, 1, sem="acq_rel", scope="gpu")
            if num_before == last - first:
                merged = _merge(pieces, first, last, num_programs, SIZE, HEAD_DIM, COPIES, BLOCK_S, BLOCK_D, BLOCK_P)
                own_rows = tl.arange(0, BLOCK_S)
                offsets = own_rows[:, None] * HEAD_DIM + dims[None, :]
                mask = (own_rows < SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
                tl.store(out_item + offsets, merged.to(out.dtype.element_ty), mask=mask)
                tl.store(counters + first, 0)  # ready for the next launch

        item, start, length, page = item + 1, start * 0, next_length, next_page


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
    num_stages: int = 2,
    each: int | None = None,
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
        each: programs that shall run on a multiprocessor at once, which bounds their registers; by default 2 where the
            sums of a program leave room for that.
    """
    _check(q, kv, out, page_table)
    num_requests, (num_kv_heads, head_dim) = seq_lens.shape[0], kv.shape[3:]
    group = q.shape[1] // num_kv_heads
    block_m = max(block_m, triton.next_power_of_2(group))
    each = each or (2 if head_dim <= 128 else 1)
    grid = (num_kv_heads, q.shape[0] // (block_m // group) + num_requests)
    launch(_prefill_kernel, *grid)(
        q, kv, out, page_table, cu_seqlens_q, seq_lens, num_requests, scale * _LOG2_E,
        q.stride(0), out.stride(0), kv.stride(0), page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=kv.shape[2],
        BLOCK_R=block_r(num_requests), BLOCK_M=block_m, BLOCK_K=block_k or block_rows(head_dim),
        BLOCK_D=_block_d(head_dim), WIDEN=_widen(q.dtype),
        num_warps=num_warps, num_stages=num_stages, maxnreg=_registers(each, num_warps), **pdl_options(q.device),
    )  # fmt: skip


def decode_attention(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    plan: DecodePlan,
    counters: Tensor,
    *,
    scale: float,
) -> None:
    """Attention of requests with one new token each: N is R. A request of length 0 gets zeros, and so does padding:
    requests at the end whose first page is page 0, which is nobody's.

    Args:
        q, kv, out, page_table, seq_lens, scale: see `prefill_attention`.
        plan: `minisgl.kernels.triton_line.lay_out` of ``seq_lens`` and ``page_table``.
        counters: ``[num_programs]`` int32 or longer, all 0; 0 again afterwards. Launches that share them must not run
            at the same time.
    """
    _check(q, kv, out, page_table)
    options, num_programs = plan.options, plan.records.shape[0]
    page_size, num_kv_heads, head_dim = kv.shape[2:]
    assert counters.numel() >= num_programs
    group, block_d = q.shape[1] // num_kv_heads, _block_d(head_dim)
    size = options.heads * group
    block_s, num_warps = triton.next_power_of_2(size), options.num_warps
    pdl = pdl_options(q.device, True)
    can_prefetch = pdl["PDL"] and options.heads * head_dim * kv.element_size() % 16 == 0
    # Two pieces for each program: their values, then their weights.
    pieces = torch.empty(2 * num_programs * size * (head_dim + _COPIES), dtype=torch.float32, device=q.device)
    launch(_decode_kernel, num_programs)(
        q, kv, out, pieces, counters, page_table, seq_lens, plan.records, seq_lens.shape[0], scale * _LOG2_E,
        q.stride(0), out.stride(0), kv.stride(0), page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        HEADS=options.heads, BLOCK_M=max(MIN_ROWS, block_s), BLOCK_K=options.block_k, BLOCK_D=block_d,
        BLOCK_S=block_s, BLOCK_P=min(16, max(1, num_warps * 2048 // (block_s * block_d))),  # 64 registers
        COPIES=_COPIES, RECORD=RECORD, AHEAD=options.ahead if can_prefetch else 0,
        BLOCK_O=triton.next_power_of_2(q.shape[1] * head_dim), WIDEN=_widen(q.dtype),
        num_warps=num_warps, num_stages=options.num_stages,
        maxnreg=_registers(options.each, num_warps), **pdl,
    )  # fmt: skip


def _registers(each: int, num_warps: int) -> int:
    """How many a thread may have so that ``each`` programs run on a multiprocessor at once, which has 65,536."""
    return min(255, 65536 // (each * num_warps * 32) // 8 * 8)


def _block_d(head_dim: int) -> int:
    return max(MIN_ROWS, triton.next_power_of_2(head_dim))


def _widen(dtype: torch.dtype) -> bool:
    """Triton's interpreter has no products of bfloat16 (numpy has no such type): there they are taken in float32."""
    return bool(triton.knobs.runtime.interpret) and dtype == torch.bfloat16
