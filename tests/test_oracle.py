"""The content oracle over all axes, its counts, and its own proof: planted faults turn it red."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import oracle
import pytest

from minisgl.kv_cache import Holding, KVCacheManager, Match, Node
from minisgl.request import FinishedRequest, Request, StepOutput
from minisgl.scheduler import Scheduler, SchedulerOutput, StepResult
from minisgl.utils import Int32Array, ceil_div

SCHEDULES_PER_AXES = 150


@cache
def sweep(page_size: int, prefix_cache: bool, overlap: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES_PER_AXES):
        counts += oracle.run(oracle.Case.draw(page_size, prefix_cache, overlap, seed))
    return counts


@pytest.mark.parametrize(("page_size", "prefix_cache", "overlap"), oracle.AXES)
def test_oracle(page_size: int, prefix_cache: bool, overlap: bool) -> None:
    """C01, C02, C03, C04, C06, C07, S03, S04, A03: every read finds the request's own tokens, and every request gets
    exactly what it would have got alone."""
    counts = sweep(page_size, prefix_cache, overlap)
    assert counts["steps"] > 20 * SCHEDULES_PER_AXES
    assert counts["preemptions"] > (0 if page_size == 64 else 5)
    assert prefix_cache == (counts["cached tokens"] > 200) == (counts["evicted pages"] > 100)


def test_the_oracle_went_everywhere() -> None:
    """A random test proves nothing about what it never met."""
    counts: Counter[str] = Counter()
    for axes in oracle.AXES:
        counts += sweep(*axes)
    print(*(f"{count:10,} {name}" for name, count in sorted(counts.items())), sep="\n")
    least = {
        "schedules": 2_000,
        "steps": 80_000,
        "preemptions": 300,
        "copies": 700,
        "remaps": 500,
        "evicted pages": 10_000,
        "flushes": 500,
        "aborts: queued": 500,
        "aborts: half a prompt": 50,
        "aborts: half a prompt, in flight": 200,
        "aborts: decoding": 100,
        "aborts: decoding, in flight": 300,
        "aborts: preempted": 5,
        "aborts: ended": 300,
        "aborts: unknown": 100,
    }
    assert {name: counts[name] for name, n in least.items() if counts[name] < n} == {}


# ----------------------------------------------------------------------------------------------- the oracle's own proof


class DuplicatesNotRemapped(Scheduler):
    """C01: duplicate pages are freed, but the device's page table keeps pointing to them."""

    def _share(self, row: int, num_computed: int) -> None:
        unsent = self.rows.first_unsent_page[row]
        super()._share(row, num_computed)
        self.rows.first_unsent_page[row] = unsent


class RowBackAtOnce(Scheduler):
    """C02: the row of a request that ended is given back while a step that names it is under way."""

    def _leave(self, request: Request) -> None:
        if request.finish_reason in ("stop", "length"):
            self.rows.last_step[request.row] = 0
        super()._leave(request)


class OneTokenEarly(Scheduler):
    """S03: the length is tested against what was launched, not against what has been seen."""

    def update(self, plan: SchedulerOutput, result: StepResult) -> StepOutput:
        for row in plan.rows[plan.samples].tolist():
            request = self.rows.request(row)
            if self.rows.num_tokens[row] == self.rows.limit[row] and not request.is_finished:
                request.max_tokens = request.num_output_tokens + 1
        return super().update(plan, result)


class SurplusTokenSent(Scheduler):
    """S04: the token of the step that was under way when a request ended is sent out too."""

    def update(self, plan: SchedulerOutput, result: StepResult) -> StepOutput:
        sampled = [self.rows.request(row) for row in plan.rows[plan.samples].tolist()]
        surplus = [i for i, request in enumerate(sampled) if request.is_finished]
        out = super().update(plan, result)
        ids = (*out.request_ids, *(sampled[i].request_id for i in surplus))
        tokens = np.concatenate([out.token_ids, result.token_ids[surplus]])
        return StepOutput(out.step_id, out.time_s, ids, tokens, out.finished, out.logprobs, out.prompt_logprobs)


class AbortFreesAtOnce(Scheduler):
    """A03: an abort gives row and pages back though a launched step still names them."""

    def abort(self, request_id: str, **why: Any) -> FinishedRequest | None:
        request = self.requests.get(request_id)
        if request is not None and request.row is not None:
            self.rows.last_step[request.row] = 0
        return super().abort(request_id, **why)


class TokensCountedNotPages(Scheduler):
    """C08: admission adds up tokens, so requests share pages that cannot be shared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kv = self.kv

        def grow(holding: Holding, num_tokens: int) -> bool:
            missing = ceil_div(num_tokens, kv.page_size) - holding.num_pages
            left = kv.num_available_pages * kv.page_size + holding.num_pages * kv.page_size - num_tokens
            if missing > 0 and left >= -kv.page_size:
                holding._append(kv._allocate(missing))
            return left >= -kv.page_size

        kv.grow = grow  # type: ignore[method-assign]


class PreemptedFreesAtOnce(Scheduler):
    """A preempted request's row and pages are given back though a launched step still names them."""

    def _preempt(self, request: Request) -> None:
        self.rows.last_step[request.row] = 0
        super()._preempt(request)


class PagesSharedTooEarly(Scheduler):
    """Pages enter the prefix cache when they are planned, not when they are computed."""

    def schedule(self) -> SchedulerOutput | None:
        plan = super().schedule()
        for view in plan.rows_view() if plan else ():
            if view.token_ids and self.config.prefix_cache:
                self._share(view.row, view.start + view.num_tokens)
        return plan


class LastTokenCached(Scheduler):
    """The last token of an output enters the prefix cache though no step computed it."""

    def _retire(self) -> None:
        for request in self.retiring:
            self.rows.num_computed[request.row] = request.num_tokens
        super()._retire()


class OneWaitsForever(Scheduler):
    """Who cannot get a page keeps the budget of the step."""

    def _make_room(self, row: int, num_tokens: int) -> bool:
        return self._grow(row, num_tokens)


class SaltForgotten(Scheduler):
    """All tenants share one prefix cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        match = self.kv.match
        self.kv.match = lambda token_ids, *, salt=None: match(token_ids)  # type: ignore[method-assign]


class DuplicatesFreedAtOnce(KVCacheManager):
    """Duplicates are free while a launched step still reads them."""

    def register(self, holding: Holding, token_ids: Int32Array, num_computed: int, *, in_use_until: int) -> int | None:
        return super().register(holding, token_ids, num_computed, in_use_until=0)


class SourceNotLocked(KVCacheManager):
    """The source of a copy may be evicted, and written, by the step that copies it."""

    def _copy_on_write(self, holding: Holding, source: Node, num_tokens: int, missing: int) -> None:
        super()._copy_on_write(holding, source, num_tokens, missing)
        while self._copy_sources:
            self.tree.unlock(self._copy_sources.pop())


class CopyNotMade(KVCacheManager):
    """The partly matched page counts as computed and is never copied."""

    def take_copies(self) -> Int32Array:
        return super().take_copies()[:0]


class OneTokenTooManyMatched(KVCacheManager):
    """The partial match is a token longer than what is alike."""

    def match(self, token_ids: Int32Array, *, salt: str | None = None) -> Match:
        m = super().match(token_ids, salt=salt)
        longer = min(m.num_partial_tokens + 1, len(token_ids) - m.num_tokens) if m.partial_node else 0
        return Match(m.node, m.page_ids, m.num_tokens, m.partial_node, longer)


FAULTS = {
    "C01": DuplicatesNotRemapped,
    "C02": RowBackAtOnce,
    "S03": OneTokenEarly,
    "S04": SurplusTokenSent,
    "A03": AbortFreesAtOnce,
    "C08": TokensCountedNotPages,
    "preempted": PreemptedFreesAtOnce,
    "last token": LastTokenCached,
    "livelock": OneWaitsForever,
    "salt": SaltForgotten,
    "no copy": CopyNotMade,
    "copied too much": OneTokenTooManyMatched,
}
# These show only if a copy on the second stream meets a step that is still under way.
RACES = {"shared too early": PagesSharedTooEarly, "duplicates": DuplicatesFreedAtOnce, "source": SourceNotLocked}
RACY_AXES = [(page_size, True, True) for page_size in (4, 16)]


@pytest.mark.parametrize("name", [*FAULTS, *RACES])
def test_a_planted_fault_turns_the_oracle_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's own proof. Where it is not the first to notice, an assertion of the code under test is."""
    fault: type = {**FAULTS, **RACES}[name]
    if issubclass(fault, KVCacheManager):
        monkeypatch.setattr("minisgl.scheduler.scheduler.KVCacheManager", fault)
    make = fault if issubclass(fault, Scheduler) else Scheduler
    with pytest.raises(AssertionError) as red:
        for seed, axes in product(range(1_000), RACY_AXES if name in RACES else oracle.AXES):
            oracle.run(oracle.Case.draw(*axes, seed), make)
    print(red.value)
