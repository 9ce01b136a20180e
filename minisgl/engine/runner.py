"""`ModelRunner`: carries out plans on the device, in two halves: `forward`, then `sample`.

The halves are apart because the second needs what the first does not: masks of a grammar and penalties depend on the
token before, the forward pass only on its place on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl.engine.kv_storage import KVStorage
from minisgl.engine.pending import PendingStep
from minisgl.engine.request_table import RequestTable
from minisgl.engine.sampler import Sampler
from minisgl.forward import AttentionBackend, ForwardBatch
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
        batch: what the model saw.
        logits: ``[S, vocab_size]``, of the last token of each request that samples.
        prompt_logprobs: place in R -> log-probabilities of its prompt's tokens.
    """

    plan: SchedulerOutput
    batch: ForwardBatch
    logits: Tensor
    prompt_logprobs: dict[int, LogprobTensors]


class ModelRunner:
    """The device side of an engine: everything is launched here, nothing is waited for.

    Args:
        model: holds the weights.
        attention: how the cache is read.
        kv: the pages' memory.
        table: the rows' state.
        sampler: the rows' sampling state.
    """

    def __init__(
        self, *, model: CausalLM, attention: AttentionBackend, kv: KVStorage, table: RequestTable, sampler: Sampler
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv = kv
        self.table = table
        self.sampler = sampler

    @torch.no_grad()
    def forward(self, plan: SchedulerOutput) -> PendingLogits:
        """Launch the forward pass: page copies, deltas to the table, batch, model, logits."""
        self.kv.copy_pages(plan.page_copies)
        self.sampler.admit(plan.admitted)
        batch = self.table.prepare(plan)
        batch = replace(batch, attn_metadata=self.attention.plan(batch))
        hidden = self.model(batch, self.kv.layers, self.attention)
        logits = self.model.logits(hidden[batch.logits_indices])
        return PendingLogits(plan, batch, logits, self._prompt_logprobs(plan, hidden))

    @torch.no_grad()
    def sample(self, pending: PendingLogits) -> PendingStep:
        """Launch the draw of the next tokens, and their way to the host."""
        plan = pending.plan
        rows = plan.rows[plan.samples]
        sampled = self.sampler.sample(pending.logits, rows)
        self.table.remember(rows, sampled.token_ids)
        return PendingStep(sampled, pending.prompt_logprobs)

    def _prompt_logprobs(self, plan: SchedulerOutput, hidden: Tensor) -> dict[int, LogprobTensors]:
        result = {}
        for place, next_token_ids, num_top in plan.prompt_logprobs:
            begin = int(plan.num_tokens[:place].sum())
            next_ids = torch.from_numpy(next_token_ids.copy()).to(hidden.device, torch.int64)
            parts = []
            for at in range(0, len(next_ids), PROMPT_LOGPROB_SLICE):
                ids = next_ids[at : at + PROMPT_LOGPROB_SLICE]
                logits = self.model.logits(hidden[begin + at : begin + at + len(ids)])
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
