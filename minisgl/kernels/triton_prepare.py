"""From a packed plan to the tensors of its step in one launch, in Triton.

Chapter 4 tells this module's story. Twin: `minisgl.kernels.prepare`, whose sentences hold here too. Owns nothing.

A step waits for this kernel before it can do anything else, so what counts is how often a program waits for memory in
turn: for the columns of its request, for what the table says of the row, for the page of a token. New pages are looked
up in the plan, not in the table that they have just been written to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import launch, let_next_begin, pdl_options, wait_for_previous


# Nothing is specialised: sizes differ from step to step, and no step may wait for a compiler.
@triton.jit(
    do_not_specialize=["num_requests", "row_width", "width"],
    do_not_specialize_on_alignment=[
        "packed", "seq_lens_by_row", "last_tokens_by_row", "page_table_by_row", "input_ids", "positions",
        "slot_mapping", "seq_lens", "page_table",
    ],
)  # fmt: skip
def _prepare_step_kernel(
    packed, seq_lens_by_row, last_tokens_by_row, page_table_by_row,
    input_ids, positions, slot_mapping, seq_lens, page_table, num_requests, row_width, width,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each request."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    request = tl.program_id(0)
    row = tl.load(packed + request)
    fresh = tl.load(packed + num_requests + request)
    page_start = tl.load(packed + 2 * num_requests + request)
    first = tl.load(packed + 3 * num_requests + request)
    num_tokens = tl.load(packed + 3 * num_requests + request + 1) - first
    known_at = tl.load(packed + 4 * num_requests + 1 + request)
    num_known = tl.load(packed + 4 * num_requests + 2 + request) - known_at
    pages_at = tl.load(packed + 5 * num_requests + 2 + request)
    num_pages = tl.load(packed + 5 * num_requests + 3 + request) - pages_at

    if row < 0:
        tl.store(seq_lens + request, 1)
        tl.store(page_table + request * width, 0)
        for start in range(0, num_tokens, BLOCK_N):
            nth = start + tl.arange(0, BLOCK_N)
            zeros, mask = tl.zeros((BLOCK_N,), tl.int64), nth < num_tokens
            tl.store(input_ids + first + nth, zeros, mask=mask)
            tl.store(positions + first + nth, zeros, mask=mask)
            tl.store(slot_mapping + first + nth, zeros, mask=mask)
    else:
        own_pages = page_table_by_row + row.to(tl.int64) * row_width
        last_token = tl.load(last_tokens_by_row + row)
        begin = tl.load(seq_lens_by_row + row)
        num_old, num_cleared = row_width, 0  # columns whose pages count, and columns that become 0
        if fresh >= 0:
            begin, num_old, num_cleared = fresh, 0, row_width
        length, page_end = begin + num_tokens, page_start + num_pages
        num_columns = tl.maximum(tl.maximum(tl.cdiv(length, PAGE_SIZE), page_end), num_cleared)
        for start in range(0, num_columns, BLOCK_P):
            columns = start + tl.arange(0, BLOCK_P)
            new, mask = (columns >= page_start) & (columns < page_end), columns < num_columns
            page = tl.load(own_pages + columns, mask=mask & (columns < num_old) & (new == 0), other=0)
            page += tl.load(packed + pages_at + columns - page_start, mask=new, other=0)
            tl.store(own_pages + columns, page, mask=(columns < num_cleared) | new)
            tl.store(page_table + request * width + columns, page, mask=mask & (columns < width))
        for start in range(0, num_tokens, BLOCK_N):
            nth = start + tl.arange(0, BLOCK_N)
            mask = nth < num_tokens
            token_id = tl.load(packed + known_at + nth, mask=nth < num_known, other=0).to(tl.int64)
            if num_known == 0:
                token_id += last_token
            position = begin + nth
            column = position // PAGE_SIZE
            new = mask & (column >= page_start) & (column < page_end)
            page = tl.load(own_pages + column, mask=mask & (column < num_old) & (new == 0), other=0)
            page += tl.load(packed + pages_at + column - page_start, mask=new, other=0)
            tl.store(input_ids + first + nth, token_id, mask=mask)
            tl.store(positions + first + nth, position.to(tl.int64), mask=mask)
            tl.store(slot_mapping + first + nth, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
        # No thread may find its own program's length there.
        tl.debug_barrier()
        tl.store(seq_lens_by_row + row, length)
        tl.store(seq_lens + request, length)


def prepare_step(
    packed: Tensor,
    num_requests: int,
    seq_lens_by_row: Tensor,
    last_tokens_by_row: Tensor,
    page_table_by_row: Tensor,
    *,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    page_size: int,
) -> None:
    """`minisgl.kernels.prepare.prepare_step` in one launch; tensors are as there, and contiguous.

    Args:
        packed: int32, a `PackedPlan` and what its offsets point at.
        num_requests: R.
        seq_lens_by_row, last_tokens_by_row, page_table_by_row: the table: ``[max_running]`` int32, ``[max_running]``
            int64 and ``[max_running, W]`` int32.
        input_ids, positions, slot_mapping: ``[N]`` int64, written.
        seq_lens, page_table: ``[R]`` and ``[R, P]`` int32, written.
        page_size: tokens in a page.
    """
    table, tokens = (seq_lens_by_row, last_tokens_by_row, page_table_by_row), (input_ids, positions, slot_mapping)
    assert all(x.is_contiguous() for x in (packed, *table, *tokens, seq_lens, page_table))
    assert packed.dtype == seq_lens.dtype == page_table.dtype == torch.int32
    if not num_requests:
        return
    decodes = input_ids.shape[0] <= num_requests
    launch(_prepare_step_kernel, num_requests)(
        packed, *table, *tokens, seq_lens, page_table, num_requests, page_table_by_row.shape[1], page_table.shape[1],
        PAGE_SIZE=page_size, BLOCK_N=32 if decodes else 1024, BLOCK_P=128 if decodes else 512,
        num_warps=1 if decodes else 4, **pdl_options(packed.device),
    )  # fmt: skip
