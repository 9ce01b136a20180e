"""Paged attention by our own Triton kernels: the backend that the chapter teaches.

Chapter 4 tells this module's story; the kernels are in `minisgl.kernels.triton_attention`. Lengths and pages stay on
the device: the host decides only what its upper bounds allow, so nothing waits, and a launch can be captured in a
graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from minisgl.forward import ForwardBatch
from minisgl.kernels.triton_attention import choose_num_splits, decode_attention, prefill_attention

# Programs of a decode step are split up to this many: about four for each multiprocessor of a large device (132 on an
# H200). A batch that has as many by itself is not split, so no more counters than these are needed.
NUM_PROGRAMS = 512


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """The prompts of a step, which stand behind its decodes.

    Args:
        prompt_starts: ``[prompts + 1]`` int32, where each prompt's tokens begin, counted from the first prompt's; None
            if the step has no prompts.
    """

    prompt_starts: Tensor | None


class TritonAttention:
    """Paged attention on CUDA, or in Triton's interpreter anywhere. Any head_dim, page size and group.

    Args:
        device: where the batches lie.

    Attributes:
        counters: ``[NUM_PROGRAMS]`` int32, 0 between launches: how many splits of a request are done. Its launches must
            not overlap, so a backend serves one stream.

    Raises:
        ValueError: the device is a CPU and Triton does not interpret.
    """

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError("attention 'triton' needs a CUDA device (or TRITON_INTERPRET=1)")
        self.counters = torch.zeros(NUM_PROGRAMS, dtype=torch.int32, device=device)

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """Which kernels the step needs, as the host knows."""
        d = batch.num_decodes
        return TritonPlan(batch.cu_seqlens_q[d:] - d if d < batch.num_requests else None)

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        plan: TritonPlan = batch.attn_metadata
        out_NHD = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        d = batch.num_decodes
        if plan.prompt_starts is not None:
            prefill_attention(
                q[d:], kv, out_NHD[d:], batch.page_table[d:], plan.prompt_starts, batch.seq_lens[d:], scale=scale
            )
        if d:
            num_splits = choose_num_splits(
                d * kv.shape[3], int(batch.host_seq_lens[:d].max()), num_programs=NUM_PROGRAMS
            )
            decode_attention(
                q[:d], kv, out_NHD[:d], batch.page_table[:d], batch.seq_lens[:d], self.counters,
                scale=scale, num_splits=num_splits,
            )  # fmt: skip
        return out_NHD
