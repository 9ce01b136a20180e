"""Paged attention by our own Triton kernels: the backend that the chapter teaches.

Chapter 4 tells this module's story; the kernels are in `minisgl.kernels.triton_attention`. Lengths and pages stay on
the device, and no launch depends on them: nothing waits, and a captured step stays right while its requests grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from minisgl.engine.attention.choice import AttentionShape
from minisgl.forward import ForwardBatch
from minisgl.kernels.triton_attention import decode_attention, prefill_attention
from minisgl.kernels.triton_line import DecodePlan, choose_options, lay_out

# Programs of a decode step for each multiprocessor: as many as run there at once.
PROGRAMS_EACH = 2
# Where Triton interprets, programs run one after the other; a few show how they share the work.
_INTERPRETED_PROGRAMS = 7


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """What the layers of a step share, on the device.

    Args:
        decodes: how the programs share them; None if the step has none.
        prompt_starts: ``[prompts + 1]`` int32, where the tokens of each prompt begin, which stand behind the decodes,
            counted from the first prompt's; None if the step has no prompts.
    """

    decodes: DecodePlan | None
    prompt_starts: Tensor | None


class TritonAttention:
    """Paged attention on CUDA, or in Triton's interpreter anywhere. Any head_dim, page size and group.

    Args:
        shape: of all layers.
        device: where the batches lie.

    Attributes:
        num_programs: that share the decodes of a step.
        counters: ``[num_programs]`` int32, 0 between launches: how many pieces of a request are done. Its launches
            must not overlap, so a backend serves one stream.

    Raises:
        ValueError: the device is a CPU and Triton does not interpret.
    """

    serves_graphs = True

    def __init__(self, shape: AttentionShape, device: torch.device | str) -> None:
        device = torch.device(device)
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError("attention 'triton' needs a CUDA device (or TRITON_INTERPRET=1)")
        self.shape = shape
        self.num_programs = _INTERPRETED_PROGRAMS
        if device.type == "cuda":
            self.num_programs = PROGRAMS_EACH * torch.cuda.get_device_properties(device).multi_processor_count
        self.counters = torch.zeros(self.num_programs, dtype=torch.int32, device=device)

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """Lay out the decodes, on the device; so a graph that captured this does it anew with each replay."""
        d, shape, decodes = batch.num_decodes, self.shape, None
        if d:
            options = choose_options(
                d, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
                num_programs=self.num_programs,
            )  # fmt: skip
            decodes = lay_out(
                batch.seq_lens[:d], batch.page_table[:d], options,
                num_programs=self.num_programs * options.each // PROGRAMS_EACH,
                num_kv_heads=shape.num_kv_heads, page_size=shape.page_size,
            )  # fmt: skip
        return TritonPlan(
            decodes=decodes,
            prompt_starts=batch.cu_seqlens_q[d:] - d if d < batch.num_requests else None,
        )

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        plan: TritonPlan = batch.attn_metadata
        out_NHD = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        d = batch.num_decodes
        if plan.prompt_starts is not None:
            prefill_attention(
                q[d:], kv, out_NHD[d:], batch.page_table[d:], plan.prompt_starts, batch.seq_lens[d:], scale=scale
            )
        if plan.decodes is not None:
            decode_attention(
                q[:d],
                kv,
                out_NHD[:d],
                batch.page_table[:d],
                batch.seq_lens[:d],
                plan.decodes,
                self.counters,
                scale=scale,
            )
        return out_NHD
