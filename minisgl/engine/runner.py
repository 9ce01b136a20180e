"""`ModelRunner`: carries out plans on the device, in two halves: `forward`, then `sample`.

Chapter 4 tells this module's story. The halves are apart because the second needs what the first does not: masks of a
grammar and penalties depend on the token before, the forward pass only on its place on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.engine.graphs import DecodeGraph, Graphs
from minisgl.engine.kv_storage import KVStorage
from minisgl.engine.pending import PendingStep
from minisgl.engine.request_table import RequestTable
from minisgl.engine.sampler import SampledTokens, Sampler
from minisgl.forward import AttentionBackend, ForwardBatch
from minisgl.kernels.kernel_set import on_device
from minisgl.kernels.sampling import LogprobTensors
from minisgl.model.decoder import CausalLM
from minisgl.scheduler.plan import SchedulerOutput

# Rows of a prompt whose logits are held at once: 1,024 rows of 150,000 float32 numbers are 0.6 GB.
PROMPT_LOGPROB_SLICE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class PendingLogits:
    """A plan whose forward pass was launched.

    Args:
        plan: the plan.
        batch: what the model saw. A graph's tensors are overwritten by its next step: ``batch.step_id`` says whose
            they were when this was made.
        logits: ``[S, at least vocab_size]``, of the last token of each request that samples; of a graph, good until its
            next step.
        rows: ``[S]`` int32, their rows, on the device.
        prompt_logprobs: place in R -> log-probabilities of its prompt's tokens.
        graph: the graph that computed them, or None.
    """

    plan: SchedulerOutput
    batch: ForwardBatch
    logits: Tensor
    rows: Tensor
    prompt_logprobs: dict[int, LogprobTensors]
    graph: DecodeGraph | None = None


class ModelRunner:
    """The device side of an engine: everything is launched here, nothing is waited for.

    Args:
        model: holds the weights.
        attention: how the cache is read.
        kv: the pages' memory.
        table: the rows' state.
        sampler: the rows' sampling state.

    Attributes:
        graphs: captured steps; none until `capture`.
    """

    def __init__(
        self, *, model: CausalLM, attention: AttentionBackend, kv: KVStorage, table: RequestTable, sampler: Sampler
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv = kv
        self.table = table
        self.sampler = sampler
        self.graphs = Graphs()
        # Results travel beside the work of the next step, not before it.
        self._copies = torch.cuda.Stream(table.device) if table.device.type == "cuda" else None

    def forward(self, plan: SchedulerOutput) -> PendingLogits:
        """Launch the forward pass: page copies, deltas to the table, batch, model, logits."""
        with on_device(self.table.device), torch.no_grad():
            return self._forward(plan)

    def sample(self, pending: PendingLogits) -> PendingStep:
        """Launch the draw of the next tokens, and their way to the host."""
        with on_device(self.table.device), torch.no_grad():
            return self._sample(pending)

    def _forward(self, plan: SchedulerOutput) -> PendingLogits:
        self.kv.copy_pages(plan.page_copies)
        self.sampler.admit(plan.admitted)
        graph = self.graphs.for_decodes(plan)
        if graph is not None:
            batch, logits = graph.replay(plan, self.table)
            return PendingLogits(plan, batch, logits, graph.rows[: plan.num_requests], {}, graph)
        pieces = self.graphs.for_tokens(plan)
        if pieces is not None:
            batch, rows, stream = pieces.replay(plan, self.table, self.attention)
        else:
            batch, rows = self.table.prepare(plan)
            batch = replace(batch, attn_metadata=self.attention.plan(batch))
            stream = self.model(batch, self.kv.layers, self.attention)
        logits = self.model.logits(stream[batch.logits_indices])
        return PendingLogits(plan, batch, logits, rows, self._prompt_logprobs(plan, stream))

    def _sample(self, pending: PendingLogits) -> PendingStep:
        plan, rows = pending.plan, pending.plan.rows[pending.plan.samples]
        if self._copies is not None:
            # A graph draws into the same memory at every step: the tokens of the step before must have left it.
            torch.cuda.current_stream(self._copies.device).wait_stream(self._copies)
        if pending.graph is not None and self.sampler.takes_one_pass(rows):
            sampled = SampledTokens(pending.graph.replay_draw(plan.num_requests))
            self.sampler.launched(rows)
        else:
            sampled = self.sampler.sample(pending.logits, rows, pending.rows, self.table.last_tokens)
        return PendingStep(sampled, pending.prompt_logprobs, stream=self._copies)

    def _prompt_logprobs(self, plan: SchedulerOutput, stream: Tensor) -> dict[int, LogprobTensors]:
        result = {}
        for place, next_token_ids, num_top in plan.prompt_logprobs:
            begin = int(plan.num_tokens[:place].sum())
            next_ids = torch.from_numpy(next_token_ids.copy()).to(stream.device, torch.int64)
            parts = []
            for at in range(0, len(next_ids), PROMPT_LOGPROB_SLICE):
                ids = next_ids[at : at + PROMPT_LOGPROB_SLICE]
                logits = self.model.logits(stream[begin + at : begin + at + len(ids)])
                parts.append(self.sampler.prompt_logprobs(logits, ids, num_top))
            result[place] = LogprobTensors(
                logprobs=_join(parts, lambda p: p.logprobs),
                ranks=_join(parts, lambda p: p.ranks),
                top_ids=_join(parts, lambda p: p.top_ids),
                top_logprobs=_join(parts, lambda p: p.top_logprobs),
            )
        return result


def _join(parts: list[LogprobTensors], column: Callable[[LogprobTensors], Tensor]) -> Tensor:
    return torch.cat([column(part) for part in parts])
