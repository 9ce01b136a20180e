"""`RequestTable`: what the device knows about each row, and how a plan becomes a `ForwardBatch`.

The table owns each row's length, last token and pages. The host sends only what changed, packed into one int32 buffer:
one copy a step. What a step needs beyond that (positions, slots, lengths) the device works out itself, so the host need
not know a token before it schedules the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl.forward import ForwardBatch
from minisgl.scheduler.plan import SchedulerOutput
from minisgl.utils import Int32Array, ceil_div


class RequestTable:
    """One entry a row, all on the device.

    Args:
        max_running: number of rows.
        table_width: pages that the longest request can have.
        page_size: tokens in a page.

    Attributes:
        seq_lens: ``[max_running]`` int32, tokens whose KV launched steps have computed.
        last_tokens: ``[max_running]`` int64, the token sampled last: the input of the next decode.
        page_table: ``[max_running, table_width]`` int32, pages in order, 0 behind the last.
    """

    def __init__(self, *, max_running: int, table_width: int, page_size: int, device: torch.device | str) -> None:
        self.page_size = page_size
        self.device = torch.device(device)
        self.seq_lens = torch.zeros(max_running, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_running, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(max_running, table_width, dtype=torch.int32, device=device)

    def prepare(self, plan: SchedulerOutput) -> ForwardBatch:
        """Bring the table up to date with ``plan`` and make its batch, without ``attn_metadata``."""
        cu_seqlens_q = np.zeros(plan.num_requests + 1, np.int32)
        np.cumsum(plan.num_tokens, out=cu_seqlens_q[1:])
        num_tokens = int(cu_seqlens_q[-1])
        num_known, num_pages = np.diff(plan.token_offsets), np.diff(plan.page_offsets)
        (
            rows, new_lens, cu, known_at, known_ids, page_rows, page_columns, page_ids, admitted_rows, admitted_lens,
            logits_indices,
        ) = self._send(
            plan.rows,
            plan.num_tokens,
            cu_seqlens_q,
            _places(cu_seqlens_q[:-1], num_known),
            plan.token_ids,
            np.repeat(plan.rows, num_pages),
            _places(plan.page_starts, num_pages),
            plan.page_ids,
            np.array([a.row for a in plan.admitted], np.int32),
            np.array([a.num_computed for a in plan.admitted], np.int32),
            (cu_seqlens_q[1:] - 1)[plan.samples],
        )  # fmt: skip
        if plan.admitted:
            self.page_table[admitted_rows] = 0
            self.seq_lens[admitted_rows] = admitted_lens
        if len(plan.page_ids):
            self.page_table[page_rows, page_columns] = page_ids

        starts = self.seq_lens[rows]
        lens = starts + new_lens
        self.seq_lens[rows] = lens
        # Which request each of the N tokens belongs to.
        owner = torch.repeat_interleave(torch.arange(len(rows), device=self.device), new_lens, output_size=num_tokens)
        positions = (starts - cu[:-1])[owner] + torch.arange(num_tokens, device=self.device)
        input_ids = self.last_tokens[rows[owner]]
        if len(plan.token_ids):
            input_ids[known_at] = known_ids.to(torch.int64)
        host_seq_lens = plan.starts + plan.num_tokens
        page_table = self.page_table[rows, : ceil_div(int(host_seq_lens.max()), self.page_size)]
        pages = page_table[owner, positions // self.page_size]
        return ForwardBatch(
            step_id=plan.step_id,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=pages * self.page_size + positions % self.page_size,
            cu_seqlens_q=cu,
            seq_lens=lens,
            page_table=page_table,
            logits_indices=logits_indices.to(torch.int64),
            page_size=self.page_size,
            num_decodes=plan.num_decodes,
            host_cu_seqlens_q=cu_seqlens_q,
            host_seq_lens=host_seq_lens,
        )

    def remember(self, rows: Int32Array, token_ids: Tensor) -> None:
        """The rows' newest tokens, ``[S]`` int64 on the device: inputs of their next step."""
        (indices,) = self._send(rows)
        self.last_tokens[indices] = token_ids

    def _send(self, *columns: Int32Array) -> Sequence[Tensor]:
        """The columns on the device, by one copy. Each step packs into memory of its own: a buffer that is written
        again while its copy may still be under way would be a race."""
        sizes = [len(column) for column in columns]
        if self.device.type != "cuda":
            return torch.from_numpy(np.concatenate(columns)).to(self.device).split(sizes)
        pinned = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
        np.concatenate(columns, out=pinned.numpy())
        return pinned.to(self.device, non_blocking=True).split(sizes)


def _places(starts: Int32Array, counts: Int32Array) -> Int32Array:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` of each, one behind the other."""
    before = np.cumsum(counts) - counts
    return (np.repeat(starts - before, counts) + np.arange(counts.sum())).astype(np.int32)
