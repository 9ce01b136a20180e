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


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Which kernels a step needs, as far as the host can tell.

    Args:
        prefill: a request may have several new tokens.
        decode: a request may have a single one.
    """

    prefill: bool
    decode: bool


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
        """From host numbers only. Requests with one new token among longer ones are found on the device."""
        one_each = batch.max_seqlen_q == 1
        alike = batch.num_tokens == batch.num_requests * batch.max_seqlen_q
        return TritonPlan(prefill=not one_each, decode=one_each or not alike)

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        plan: TritonPlan = batch.attn_metadata
        out_NHD = torch.empty_like(q, memory_format=torch.contiguous_format)
        step = (q, kv, out_NHD, batch.page_table, batch.cu_seqlens_q, batch.seq_lens)
        if plan.prefill:
            prefill_attention(*step, scale=scale, min_new=2 if plan.decode else 1)
        if plan.decode:
            num_items = batch.num_requests * kv.shape[3]
            num_splits = choose_num_splits(num_items, batch.max_seqlen_k, num_programs=NUM_PROGRAMS)
            decode_attention(*step, self.counters, scale=scale, num_splits=num_splits)
        return out_NHD
