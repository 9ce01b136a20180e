"""How programs share the decodes of a step: the line, and the plan that is read off it. In Triton.

Chapter 4 tells this module's story; the programs are those of `minisgl.kernels.triton_attention`. It owns nothing.

Decoding reads each K and V once and computes little: it is as fast as memory if every multiprocessor reads all the
time. So the work is cut by bytes, not by requests. The blocks of all requests, once for each set of KV heads, lie in
one *line*, with a little before each of them for what takes time but reads nothing; a fixed number of programs, as many
as the device can run at once, take equal stretches of it:

    requests and heads   | request 0, heads 0 | request 0, heads 1 | request 1, heads 0 | request 1, heads 1 |
    programs             |      0       |      1       |      2       |      3       |      4       |    5   |

A stretch may begin and end inside an *item* (a request and a set of heads). Who has all of an item writes its result;
otherwise each writes its *piece* to memory, and the last of them to arrive merges the pieces. A merge takes as long as
two blocks or so; where whole items share the work about as well, each program takes whole items.

All of this follows from the lengths, on the device: the host plans nothing, and a graph stays right while its requests
grow. `lay_out` does it once for all layers of a step. It leaves each program a record of all that it has to know before
it can ask for its first K and V: in a small batch the time is that of a few reads one after the other.

Sources: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023 (a request's tokens divided over
programs); Sanovar et al., "Lean Attention", 2024, after Osama et al., "Stream-K", 2023 (equal stretches of all the
work).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import launch, pdl_options, wait_for_previous

RECORD = 16
"""int32 of a program in a plan, see `_plan_kernel`."""

MIN_ROWS = 16
"""The least number of rows that ``tl.dot`` takes."""


@triton.jit
def _find_block(
    line, num_requests, place, item_cost, NUM_SETS: tl.constexpr, BLOCK_R: tl.constexpr, BITS: tl.constexpr
):
    """What lies at ``place`` of the line: the item (request * NUM_SETS + set), the number of its block, where its first
    block lies, and how many it has. An item begins with its fixed cost: that counts as block 0. At the line's end:
    block 0 behind the last item, also where there is none."""
    request = tl.zeros_like(place)  # the last that begins at or before the place, found by halving
    for bit in range(BITS):  # not unrolled: this is most of what there is to compile
        middle = request + (BLOCK_R >> (bit + 1))
        begins = tl.load(line + middle, mask=middle < num_requests, other=2147483647) * NUM_SETS
        request = tl.where((middle < num_requests) & (begins <= place), middle, request)
    begin = tl.load(line + request)
    size = tl.maximum(tl.load(line + request + 1) - begin, 1)
    within = place - begin * NUM_SETS
    offset = within % size
    block = tl.maximum(offset - item_cost, 0)
    return request * NUM_SETS + within // size, block, place - offset + item_cost, size - item_cost


@triton.jit
def _whole_border(
    line, num_requests, place, item_cost, NUM_SETS: tl.constexpr, BLOCK_R: tl.constexpr, BITS: tl.constexpr
):
    """The border between items that is nearest to ``place``: the item behind it, and its own place."""
    item, _, first, num_blocks = _find_block(line, num_requests, place, item_cost, NUM_SETS, BLOCK_R, BITS)
    begin, end = first - item_cost, first + num_blocks
    up = 2 * place >= begin + end
    return tl.where(up, item + 1, item), tl.where(up, end, begin)


@triton.jit(
    do_not_specialize=["num_requests", "table_stride"], do_not_specialize_on_alignment=["page_table", "seq_lens"]
)
def _plan_kernel(
    seq_lens, page_table, line, plan, num_requests, table_stride, num_programs, num_multiprocessors, patience,
    item_cost, NUM_SETS: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BITS: tl.constexpr, BLOCK_P: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The record of each program of a decode step. One program. It lets nobody begin before it ends: so in all layers
    programs may read their records, and what the step was prepared with before, without waiting."""
    wait_for_previous(PDL)
    each = tl.arange(0, BLOCK_R)
    there = each < num_requests
    lengths = tl.load(seq_lens + each, mask=there, other=0)
    # What begins on page 0 is padding of a graph. All of it stands at the end, and no program is to have it all: an
    # item costs something however short it is.
    is_real = tl.load(page_table + each.to(tl.int64) * table_stride, mask=there, other=0) > 0
    num_requests = tl.max(tl.where(is_real, each + 1, 0), axis=0)
    there = each < num_requests
    # A request without tokens among the others has a block all the same: somebody must write its zeros.
    blocks = tl.where(there, tl.maximum(tl.cdiv(lengths, BLOCK_K), 1), 0)
    sizes = tl.where(there, blocks + item_cost, 0)
    tl.store(line + 1 + each, tl.cumsum(sizes, axis=0), mask=there)
    tl.store(line, 0)
    tl.debug_barrier()  # what some threads stored, all shall read
    end, num_items = tl.sum(sizes, axis=0) * NUM_SETS, num_requests * NUM_SETS
    programs = tl.arange(0, BLOCK_P)
    borders = programs[:, None] + tl.arange(0, 2)[None, :]  # where a program's stretch begins, and where it ends

    # Equal stretches.
    share = tl.maximum(tl.cdiv(end, num_programs), 1)
    item, block, first, size = _find_block(
        line, num_requests, tl.minimum(borders * share, end), item_cost, NUM_SETS, BLOCK_R, BITS
    )
    item, next_item = tl.split(item)
    block, next_block = tl.split(block)
    first, next_first = tl.split(first)
    size, next_size = tl.split(size)
    # Who has the first and the last block of the item that a stretch cuts in its begin, or the last of that in its end.
    first_of_first, last_of_first = first // share, (first + size - 1) // share
    last_of_last = (next_first + next_size - 1) // share
    # Whole items: how much has the busiest multiprocessor to read, and how much would it be if all had the same?
    width = tl.maximum(tl.minimum(num_programs, num_items), 1)
    target = tl.cdiv(end, width)
    whole, place = _whole_border(
        line, num_requests, tl.minimum(borders * target, end), item_cost, NUM_SETS, BLOCK_R, BITS
    )
    whole, next_whole = tl.split(whole)
    place, next_place = tl.split(place)
    most = tl.max(next_place - place, axis=0) * tl.cdiv(width, num_multiprocessors)
    if most <= tl.cdiv(end, num_multiprocessors) + patience:
        item, block, next_item, next_block = whole, block * 0, next_whole, next_block * 0

    last = tl.where(next_block > 0, next_item, next_item - 1)
    request, start = item // NUM_SETS, block * BLOCK_K
    works = (programs < num_programs) & (item <= last)
    length = tl.load(seq_lens + request, mask=works, other=0)
    page_row = page_table + request.to(tl.int64) * table_stride
    page = tl.load(page_row + start // PAGE_SIZE, mask=works & (start < length), other=0)
    record, mask = plan + programs * RECORD, programs < num_programs
    tl.store(record, item, mask=mask)  # the first item of the program's stretch
    tl.store(record + 1, start, mask=mask)  # its token that the stretch begins with
    tl.store(record + 2, length, mask=mask)  # its number of tokens
    tl.store(record + 3, page, mask=mask)  # where that token lies
    tl.store(record + 4, last, mask=mask)  # the stretch's last item; before the first if the program has no work
    tl.store(record + 5, tl.where(next_block > 0, next_block * BLOCK_K, 2147483647), mask=mask)  # its tokens end here
    tl.store(record + 6, first_of_first, mask=mask)
    tl.store(record + 7, last_of_first, mask=mask)
    tl.store(record + 8, last_of_last, mask=mask)
    tl.store(record + 9, num_requests, mask=mask)  # those behind them are padding


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How decodes are cut and computed.

    Args:
        heads: KV heads of an item, a power of 2 that divides their number.
        block_rows: rows of a tile of K and V, ``heads`` for each token: a power of 2, at least 16.
        num_warps: of a program.
        num_stages: see `minisgl.kernels.triton_attention.prefill_attention`.
        each: programs that run on a multiprocessor at once.
        patience: blocks. So much more may the busiest multiprocessor read, if then no item is cut.
        item_cost: blocks. What an item takes beside its own: its queries, its end, an empty pipeline.
        ahead: blocks that a program brings into L2 before it waits, a power of 2 or 0. Where the device can.
    """

    heads: int
    block_rows: int = 64
    num_warps: int = 4
    num_stages: int = 3
    each: int = 2
    patience: int = 2
    item_cost: int = 1
    ahead: int = 0

    @property
    def block_k(self) -> int:
        """Tokens of a block."""
        return self.block_rows // self.heads


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """How programs share the decodes of a step, in all of its layers.

    Args:
        records: ``[num_programs, 16]`` int32, see `_plan_kernel`.
        options: that they hold for.
    """

    records: Tensor
    options: DecodeOptions


def lay_out(
    seq_lens: Tensor,
    page_table: Tensor,
    options: DecodeOptions,
    *,
    num_programs: int,
    num_kv_heads: int,
    page_size: int,
) -> DecodePlan:
    """Share the decodes of a step, on the device. In a model other kernels come between this and attention's, so that
    what it has written is seen there without waiting.

    Args:
        seq_lens: ``[R]`` int32.
        page_table: ``[R, P]`` int32.
        options: see `choose_options`.
        num_programs: best as many as the device runs at once.
    """
    num_requests = seq_lens.shape[0]
    assert num_kv_heads % options.heads == 0
    line = torch.empty(num_requests + 1, dtype=torch.int32, device=seq_lens.device)
    records = torch.empty(num_programs, RECORD, dtype=torch.int32, device=seq_lens.device)
    num_places = block_r(num_requests)
    launch(_plan_kernel, 1)(
        seq_lens, page_table, line, records, num_requests, page_table.stride(0),
        num_programs, max(1, num_programs // options.each), options.patience, options.item_cost,
        NUM_SETS=num_kv_heads // options.heads, BLOCK_K=options.block_k, PAGE_SIZE=page_size,
        BLOCK_R=num_places, BITS=num_places.bit_length() - 1, BLOCK_P=triton.next_power_of_2(num_programs),
        RECORD=RECORD, **pdl_options(seq_lens.device),
    )  # fmt: skip
    return DecodePlan(records, options)


def choose_options(
    num_requests: int, *, num_heads: int, num_kv_heads: int, head_dim: int, num_programs: int
) -> DecodeOptions:
    """What was best on an H200.

    An item takes as many KV heads as a tile of Q has rows for, since what they share is read in longer runs, if it is
    then cut into hardly more than one piece. Else it takes one: then there are more items, and less is merged.

    Args:
        num_requests: R.
        num_programs: that share the work.
    """
    most = 1
    while num_kv_heads % (2 * most) == 0 and 2 * most * (num_heads // num_kv_heads) <= MIN_ROWS:
        most *= 2
    # More requests leave their programs so much to read that the first blocks count for nothing.
    ahead = 2 if num_requests <= 64 else 0
    many = 4 * num_requests * (num_kv_heads // most) >= 3 * num_programs
    if num_programs // 8 < num_requests * num_kv_heads <= num_programs // 2:
        # An item for each multiprocessor, and some are free: nobody else is there to share it with.
        return DecodeOptions(heads=1, block_rows=block_rows(head_dim), num_stages=4, each=1, ahead=ahead)
    return DecodeOptions(heads=most if many else 1, block_rows=block_rows(head_dim), ahead=ahead)


def block_r(num_requests: int) -> int:
    """The same for most batches, so that a kernel is compiled once; to look at more requests takes no longer."""
    return max(256, triton.next_power_of_2(num_requests))


def block_rows(head_dim: int) -> int:
    """A tile of 16 KB in half precision."""
    return 64 if head_dim <= 128 else 32
