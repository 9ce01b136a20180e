"""What goes from the scheduler to the engine and back: the plan of a step, and its result.

Both are columns, not objects: one entry a request, in arrays. R requests of the step, S of them sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minisgl.request import LogprobColumns, SamplingParams
from minisgl.utils import BoolArray, Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedRow:
    """A request that got a row in this step: all that the device's table needs to know about it.

    ``output_token_ids`` is not empty when a preempted request comes back; ``num_computed`` tokens came from the cache.
    """

    row: int
    request_id: str
    sampling_params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    num_computed: int


class PromptLogprobs(NamedTuple):
    """A request of a plan that wants the log-probabilities of its prompt.

    ``place``: in R; ``next_token_ids`` int32: the prompt's tokens that follow those of the step, for the last chunk one
    fewer than that has; ``num_top``: how many alternatives.
    """

    place: int
    next_token_ids: Int32Array
    num_top: int


class RowView(NamedTuple):
    """One request of a plan in printable form."""

    row: int
    start: int
    num_tokens: int
    token_ids: list[int] | None
    new_pages: list[int]
    first_page: int
    samples: bool


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutput:
    """The plan of one step: who runs, which tokens, on which pages. Frozen; made by `Scheduler.schedule`.

    Args:
        step_id: counts up from 1.
        rows: ``[R]`` int32, row of each request: first those with a single token to compute, then the longer ones (so
            that a step is decodes, then prompts, and each part has its own attention kernel); both in order of arrival.
        num_tokens: ``[R]`` int32, tokens to compute.
        starts: ``[R]`` int32, position of the first of them.
        samples: ``[R]`` bool, whether the step ends with a new token for this request.
        token_offsets: ``[R + 1]`` int32, and
        token_ids: int32: the tokens that the host knows, as CSR. A request has either all of its ``num_tokens`` here or
            none: then it continues with the token that the device sampled last.
        page_starts: ``[R]`` int32, index in the request's page table where
        page_offsets: ``[R + 1]`` int32, and
        page_ids: int32: its new entries go (CSR). They may overwrite older ones: duplicates that gave way to the prefix
            cache's pages.
        page_copies: ``[C, 2]`` int32, source and destination of pages to copy before the forward pass.
        admitted: requests that got their row in this step.
        prompt_logprobs: requests that want the log-probabilities of their prompt.
        preempted: ids of requests that lost their row before this step.
    """

    step_id: int
    rows: Int32Array
    num_tokens: Int32Array
    starts: Int32Array
    samples: BoolArray
    token_offsets: Int32Array
    token_ids: Int32Array
    page_starts: Int32Array
    page_offsets: Int32Array
    page_ids: Int32Array
    page_copies: Int32Array
    admitted: tuple[AdmittedRow, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.rows)

    @property
    def num_decodes(self) -> int:
        """Requests with a single token to compute; they come first."""
        return int((self.num_tokens == 1).sum())

    @property
    def total_tokens(self) -> int:
        """N, tokens of the step."""
        return int(self.num_tokens.sum())

    def rows_view(self) -> Iterator[RowView]:
        """The plan request by request, for readers and tests."""
        for i, row in enumerate(self.rows.tolist()):
            known = self.token_ids[self.token_offsets[i] : self.token_offsets[i + 1]].tolist()
            pages = self.page_ids[self.page_offsets[i] : self.page_offsets[i + 1]].tolist()
            yield RowView(
                row=row,
                start=int(self.starts[i]),
                num_tokens=int(self.num_tokens[i]),
                token_ids=known or None,
                new_pages=pages,
                first_page=int(self.page_starts[i]),
                samples=bool(self.samples[i]),
            )


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What the device answers to a plan: one entry for each request that samples, in the plan's order.

    Args:
        token_ids: ``[S]`` int32.
        finite: ``[S]`` bool, False where the logits held NaN or were all excluded: that request ends.
        logprobs: of the sampled tokens, ``[S]``, if any request of the step asked.
        prompt_logprobs: place in R -> columns, an entry for each of the plan's ``next_token_ids``.
    """

    token_ids: Int32Array
    finite: BoolArray
    logprobs: LogprobColumns | None = None
    prompt_logprobs: dict[int, LogprobColumns] | None = None


def empty_plan() -> SchedulerOutput:
    """A step of no requests: what a graph is recorded with, where all is padding."""
    none, offsets = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return SchedulerOutput(
        step_id=0,
        rows=none,
        num_tokens=none,
        starts=none,
        samples=np.zeros(0, np.bool_),
        token_offsets=offsets,
        token_ids=none,
        page_starts=none,
        page_offsets=offsets,
        page_ids=none,
        page_copies=np.zeros((0, 2), np.int32),
    )
