"""`SplitAttention`: one backend for a step's decodes, another for its prompts.

Chapter 4 tells this module's story. Decoding reads much and computes little, a prompt the other way round: no kernel is
the best for both. A step is decodes first, then prompts, so each kind is a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.forward import AttentionBackend, ForwardBatch


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """The two parts of a step, each planned by its own backend; None if the step has no such requests."""

    decodes: ForwardBatch | None
    prompts: ForwardBatch | None


class SplitAttention:
    """Attention by two backends.

    Args:
        prefill: takes the prompts.
        decode: takes the requests with a single new token.
        reason: why these two, for people.
    """

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, *, reason: str = "") -> None:
        self.prefill = prefill
        self.decode = decode
        self.reason = reason

    @property
    def serves_graphs(self) -> bool:
        """Decodes are captured, prompts never."""
        return self.decode.serves_graphs

    def plan(self, batch: ForwardBatch) -> SplitPlan:
        """Each part's plan."""
        d, r = batch.num_decodes, batch.num_requests
        return SplitPlan(
            decodes=_planned(self.decode, batch.part(0, d)) if d else None,
            prompts=_planned(self.prefill, batch.part(d, r)) if d < r else None,
        )

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        plan: SplitPlan = batch.attn_metadata
        out_NHD = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        d = batch.num_decodes
        if plan.prompts is not None:
            self.prefill.forward(q[d:], kv, plan.prompts, scale=scale, out=out_NHD[d:])
        if plan.decodes is not None:
            self.decode.forward(q[:d], kv, plan.decodes, scale=scale, out=out_NHD[:d])
        return out_NHD


class BySize:
    """Attention by the number of requests: which decode kernel is the fastest depends on it.

    Args:
        backends: bounds, ascending, and who serves batches up to there; the last bound is None.
    """

    def __init__(self, backends: Sequence[tuple[int | None, AttentionBackend]]) -> None:
        assert backends and backends[-1][0] is None
        self.backends = tuple(backends)

    @property
    def serves_graphs(self) -> bool:
        """Whether all do."""
        return all(backend.serves_graphs for _, backend in self.backends)

    def plan(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch, planned by the one that serves it."""
        return _planned(self._serving(batch), batch)

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        return self._serving(batch).forward(q, kv, batch.attn_metadata, scale=scale, out=out)

    def _serving(self, batch: ForwardBatch) -> AttentionBackend:
        return next(b for bound, b in self.backends if bound is None or batch.num_requests <= bound)


def _planned(backend: AttentionBackend, part: ForwardBatch) -> ForwardBatch:
    return replace(part, attn_metadata=backend.plan(part))
