"""From a plan to the tensors of its step, on the device: what the host need not know, and so need not wait for.

Chapter 4 tells this module's story. The host packs a plan into one int32 buffer, `PackedPlan`, sent by one copy; the
device's table knows the rest: each row's length, last token and pages. Owns nothing: the table and the step's tensors
are the caller's, and in a graph they are the same ones at every step.

R requests of the step, padding included; N tokens; W pages that a row can have, P that the step's table can have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PackedPlan(NamedTuple):
    """The columns of a packed plan, as views of it, in this order. Behind them lie the token ids and pages that the
    offsets point at: these are positions in the whole buffer, which may be longer than what is used of it.

    ``rows`` ``[R]``: the request's row, all different but for -1: padding. ``fresh`` ``[R]``: for a request that got
    its row in this step, how many of its tokens are computed already; else -1. ``page_starts`` ``[R]``: where in the
    row's page table the new pages go. ``cu_seqlens_q`` ``[R + 1]``: each request's new tokens in N, from 0 to N.
    ``token_offsets`` ``[R + 1]``: the tokens that the host knows; a request has either all of its new tokens there, or
    none: then it has one new token, the row's last one. ``page_offsets`` ``[R + 1]``: new pages.
    """

    rows: Tensor
    fresh: Tensor
    page_starts: Tensor
    cu_seqlens_q: Tensor
    token_offsets: Tensor
    page_offsets: Tensor

    @classmethod
    def of(cls, packed: Tensor, num_requests: int) -> PackedPlan:
        """The columns of ``packed``, int32, for R requests."""
        n = num_requests
        return cls(*packed[: 6 * n + 3].split((n, n, n, n + 1, n + 1, n + 1)))


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
    """Bring the table up to date with a plan and write the step's tensors. Never waits for the device.

    Padding leaves the table alone; it has length 1 and page 0, and each of its tokens, of which it may have any number,
    is token 0 at position 0 and slot 0.

    Args:
        packed: int32, a `PackedPlan` and what its offsets point at.
        num_requests: R.
        seq_lens_by_row: ``[max_running]`` int32, grows by the new tokens.
        last_tokens_by_row: ``[max_running]`` int64.
        page_table_by_row: ``[max_running, W]`` int32, gets the new pages; of a fresh row all others become 0.
        input_ids, positions, slot_mapping: ``[N]`` int64, written.
        seq_lens: ``[R]`` int32, written: lengths after the step.
        page_table: ``[R, P]`` int32, written: the rows' pages. Behind those that a request uses anything may stand.
        page_size: tokens in a page.
    """
    plan, device = PackedPlan.of(packed, num_requests), packed.device
    real, rows = plan.rows >= 0, plan.rows.clamp(min=0).to(torch.int64)
    fresh, starts = plan.fresh >= 0, plan.page_starts[:, None]

    old_lens, old_pages = seq_lens_by_row[rows], page_table_by_row[rows]
    begin = plan.fresh.where(fresh, old_lens).where(real, 0)
    lens = (begin + plan.cu_seqlens_q.diff()).where(real, 1)
    place = torch.arange(old_pages.shape[1], device=device) - starts  # [R, W]
    new = (place >= 0) & (place < plan.page_offsets.diff()[:, None])
    pages = packed[(plan.page_offsets[:-1, None] + place).where(new, 0)].where(
        new, old_pages.masked_fill(fresh[:, None], 0)
    )
    pages = pages.where(real[:, None], 0)
    # Differences, because padding shares its index with row 0, and adds nothing to it.
    seq_lens_by_row.index_add_(0, rows, (lens - old_lens).where(real, 0))
    page_table_by_row.index_add_(0, rows, (pages - old_pages).where(real[:, None], 0))
    seq_lens.copy_(lens)
    page_table.copy_(pages[:, : page_table.shape[1]])

    tokens = torch.arange(len(input_ids), device=device)
    owner = torch.searchsorted(plan.cu_seqlens_q[1:], tokens, right=True)  # which request each token belongs to
    nth = tokens - plan.cu_seqlens_q[owner]
    known = (plan.token_offsets.diff() > 0)[owner]
    ids = packed[(plan.token_offsets[owner] + nth).where(known, 0)].where(known, last_tokens_by_row[rows[owner]])
    input_ids.copy_(ids.where(real[owner], 0))
    positions.copy_((begin[owner] + nth).where(real[owner], 0))
    slot_mapping.copy_(pages[owner, positions // page_size] * page_size + positions % page_size)
