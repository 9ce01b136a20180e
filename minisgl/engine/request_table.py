"""`RequestTable`: what the device knows about each row, and how a plan becomes a `ForwardBatch`.

Chapter 4 tells this module's story. The table owns each row's length, last token and pages. The host sends only what
changed, packed into one int32 buffer: one copy a step. What a step needs beyond that (positions, slots, lengths) the
device works out itself, so the host need not know a token before it schedules the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.forward import ForwardBatch
from minisgl.kernels.kernel_set import Kernels
from minisgl.kernels.prepare import PackedPlan
from minisgl.scheduler.plan import SchedulerOutput
from minisgl.utils import Int32Array, ceil_div


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """A plan as one int32 array: `minisgl.kernels.prepare.PackedPlan`, what its offsets point at, and last the tokens
    that get logits and their rows.

    Args:
        step_id: of the plan.
        values: int32.
        num_requests: R, with padding.
        num_decodes: how many of them, from the first on, have one new token.
        num_tokens: N, with padding.
        num_samples: S.
        cu_seqlens_q, seq_lens: int32, of all R, as in `ForwardBatch`.
    """

    step_id: int
    values: Int32Array
    num_requests: int
    num_decodes: int
    num_tokens: int
    num_samples: int
    cu_seqlens_q: Int32Array
    seq_lens: Int32Array


def pack_step(plan: SchedulerOutput, num_requests: int, num_tokens: int) -> PackedStep:
    """Pack ``plan``, padded to so many requests and tokens. Padding requests have one token each, and the last of them
    all that are left."""
    real, pad = plan.num_requests, num_requests - plan.num_requests
    num_decodes = num_requests if num_tokens == num_requests else plan.num_decodes
    assert pad or num_tokens == plan.total_tokens, "padding tokens need a padding request"
    cu_seqlens_q = np.zeros(num_requests + 1, np.int32)
    np.cumsum(plan.num_tokens, out=cu_seqlens_q[1 : real + 1])
    seq_lens = plan.starts + plan.num_tokens
    logits_indices, rows = cu_seqlens_q[1 : real + 1][plan.samples] - 1, plan.rows
    fresh, page_starts = np.full(num_requests, -1, np.int32), plan.page_starts
    for admitted in plan.admitted:
        fresh[np.flatnonzero(rows == admitted.row)[0]] = admitted.num_computed
    first = 6 * num_requests + 3  # of the tail, which begins with the tokens
    token_offsets, page_offsets = plan.token_offsets + first, plan.page_offsets + (first + len(plan.token_ids))
    if pad:
        cu_seqlens_q[real + 1 :] = cu_seqlens_q[real] + np.arange(1, pad + 1)
        cu_seqlens_q[-1] = num_tokens
        seq_lens = np.append(seq_lens, np.ones(pad, np.int32))
        rows = np.append(rows, np.full(pad, -1, np.int32))
        page_starts = np.append(page_starts, np.zeros(pad, np.int32))
        token_offsets = np.append(token_offsets, np.full(pad, token_offsets[-1], np.int32))
        page_offsets = np.append(page_offsets, np.full(pad, page_offsets[-1], np.int32))
    columns = (rows, fresh, page_starts, cu_seqlens_q, token_offsets, page_offsets)
    values = np.concatenate(
        (*columns, plan.token_ids, plan.page_ids, logits_indices, plan.rows[plan.samples]), dtype=np.int32
    )
    return PackedStep(
        plan.step_id, values, num_requests, num_decodes, num_tokens, len(logits_indices), cu_seqlens_q, seq_lens
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """Memory that the tensors of a step are written to. A graph has its own, which every replay overwrites.

    Args:
        packed: int32, at least as long as a `PackedStep`.
        input_ids, positions, slot_mapping: ``[N]`` int64.
        seq_lens: ``[R]`` int32.
        page_table: ``[R, P]`` int32.
    """

    packed: Tensor
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    page_table: Tensor

    @classmethod
    def new(
        cls, num_requests: int, num_tokens: int, *, table_width: int, packed_len: int, device: torch.device
    ) -> StepBuffers:
        """Buffers for steps of this size, zeroed."""
        ids, positions, slots = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
        return cls(
            packed=torch.zeros(packed_len, dtype=torch.int32, device=device),
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            seq_lens=torch.zeros(num_requests, dtype=torch.int32, device=device),
            page_table=torch.zeros(num_requests, table_width, dtype=torch.int32, device=device),
        )


class RequestTable:
    """One entry a row, all on the device.

    Args:
        max_running: number of rows.
        table_width: pages that the longest request can have.
        page_size: tokens in a page.
        kernels: what computes.

    Attributes:
        seq_lens: ``[max_running]`` int32, tokens whose KV launched steps have computed.
        last_tokens: ``[max_running]`` int64, the token sampled last: the input of the next decode. The sampler writes
            it.
        page_table: ``[max_running, table_width]`` int32, pages in order, 0 behind the last.
    """

    def __init__(
        self, *, max_running: int, table_width: int, page_size: int, device: torch.device | str, kernels: Kernels
    ) -> None:
        self.page_size = page_size
        self.device = torch.device(device)
        self.kernels = kernels
        self.seq_lens = torch.zeros(max_running, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_running, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(max_running, table_width, dtype=torch.int32, device=device)

    def send(self, step: PackedStep, into: Tensor | None = None) -> Tensor:
        """Launch the step's one copy to the device, into new memory or ``into``. On the host each step packs into
        memory of its own: a buffer that is written again while its copy may still be under way would be a race."""
        if self.device.type != "cuda":
            packed = torch.from_numpy(step.values).to(self.device)
            return packed if into is None else into[: len(packed)].copy_(packed)
        pinned = torch.empty(len(step.values), dtype=torch.int32, pin_memory=True)
        pinned.numpy()[:] = step.values
        if into is None:
            return pinned.to(self.device, non_blocking=True)
        return into[: len(pinned)].copy_(pinned, non_blocking=True)

    def batch(self, step: PackedStep, buffers: StepBuffers) -> ForwardBatch:
        """Launch the kernel that brings the table up to date and makes the step's tensors out of ``buffers.packed``.

        Returns the batch without ``attn_metadata``; its tensors are those of ``buffers``.
        """
        self.kernels.prepare_step(
            buffers.packed,
            step.num_requests,
            self.seq_lens,
            self.last_tokens,
            self.page_table,
            input_ids=buffers.input_ids,
            positions=buffers.positions,
            slot_mapping=buffers.slot_mapping,
            seq_lens=buffers.seq_lens,
            page_table=buffers.page_table,
            page_size=self.page_size,
        )
        end, num = len(step.values), step.num_samples
        return ForwardBatch(
            step_id=step.step_id,
            input_ids=buffers.input_ids,
            positions=buffers.positions,
            slot_mapping=buffers.slot_mapping,
            cu_seqlens_q=PackedPlan.of(buffers.packed, step.num_requests).cu_seqlens_q,
            seq_lens=buffers.seq_lens,
            page_table=buffers.page_table,
            logits_indices=buffers.packed[end - 2 * num : end - num].to(torch.int64),
            page_size=self.page_size,
            num_decodes=step.num_decodes,
            host_cu_seqlens_q=step.cu_seqlens_q,
            host_seq_lens=step.seq_lens,
        )

    def prepare(self, plan: SchedulerOutput) -> tuple[ForwardBatch, Tensor]:
        """Bring the table up to date with ``plan`` and make its batch, without ``attn_metadata``, in new memory; and
        the rows that sample, ``[S]`` int32."""
        step = pack_step(plan, plan.num_requests, plan.total_tokens)
        ids, positions, slots = torch.empty(3, step.num_tokens, dtype=torch.int64, device=self.device)
        buffers = self.new_buffers(step, input_ids=ids, positions=positions, slot_mapping=slots)
        return self.batch(step, buffers), sampled_rows(step, buffers)

    def new_buffers(
        self, step: PackedStep, *, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor
    ) -> StepBuffers:
        """Send a step to new memory. Only what is as long as its tokens is given: a graph may want it in its own."""
        width = ceil_div(int(step.seq_lens.max()), self.page_size)
        return StepBuffers(
            packed=self.send(step),
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            seq_lens=torch.empty(step.num_requests, dtype=torch.int32, device=self.device),
            page_table=torch.empty(step.num_requests, width, dtype=torch.int32, device=self.device),
        )


def sampled_rows(step: PackedStep, buffers: StepBuffers) -> Tensor:
    """Rows of the requests that sample, ``[S]`` int32 on the device."""
    end = len(step.values)
    return buffers.packed[end - step.num_samples : end]
