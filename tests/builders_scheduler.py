"""Builders for tests of the scheduler: every parameter has a default, so that a test names only what it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import oracle

from minisgl.config import SchedulerConfig
from minisgl.request import FinishedRequest, Request, SamplingParams, StepOutput
from minisgl.scheduler import Scheduler, SchedulerOutput, StepResult
from minisgl.utils import Int32Array

EOS = 0
TOKEN = 7


def make_config(**changes: Any) -> SchedulerConfig:
    """99 pages of 4, room for 64 tokens a request, nothing else in the way."""
    return SchedulerConfig(**{"page_size": 4, "num_pages": 100, "max_model_len": 64, **changes})


def make_scheduler(
    config: SchedulerConfig | None = None, *, mean_output: float | None = None, seed: int = 0, **changes: Any
) -> Scheduler:  # fmt: skip
    """``changes`` are those of `make_config`; time goes by one second a reading."""
    ticks = count()
    config = config or make_config(**changes)
    scheduler = Scheduler(config, eos_token_ids=[EOS], seed=seed, clock=lambda: float(next(ticks)))
    if mean_output is not None:
        scheduler._mean_output = mean_output
    return scheduler


def make_prompt(num_tokens: int = 10, *, first: int = 100) -> Int32Array:
    """Prompts of different ``first`` have no token in common (up to 100 tokens)."""
    return np.arange(first, first + num_tokens, dtype=np.int32)


def make_params(max_tokens: int | None = 4, **changes: Any) -> SamplingParams:
    """A request that goes on to exactly ``max_tokens``."""
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **changes})


def make_case(
    prompts: Sequence[Sequence[int]] = ((1, 2, 3),), *, overlap: bool = True, timing: oracle.Timing = "late",
    mean_output: float = 0.0, max_tokens: int = 6, arrivals: Sequence[int] | None = None,
    config: SchedulerConfig | None = None, params: dict[str, Any] | None = None, **changes: Any,
) -> oracle.Case:  # fmt: skip
    """A case for the content oracle, by hand."""
    how = make_params(max_tokens, **(params or {}))
    return oracle.Case(
        name=f"make_case({changes})",
        config=config or make_config(**changes),
        overlap=overlap,
        timing=timing,
        mean_output=mean_output,
        disturbance=0.0,
        arrivals=tuple((a, tuple(p), how) for a, p in zip(arrivals or [0] * len(prompts), prompts, strict=True)),
    )


class Loop:
    """Drives a scheduler, by either loop, with a device that always says ``token``, or what ``script`` says.

    Args:
        script: (request id, number of output tokens so far) -> the next token; a negative one is not finite.
    """

    def __init__(
        self, scheduler: Scheduler | None = None, *, overlap: bool = False, token: int = TOKEN,
        script: Callable[[str, int], int] | None = None, **changes: Any,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler or make_scheduler(**changes)
        self.overlap = overlap
        self.plans: list[SchedulerOutput] = []
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishedRequest] = {}
        self._script = script or (lambda request_id, n: token)
        self._num_sampled: dict[str, int] = {}
        self._pending: tuple[SchedulerOutput, StepResult] | None = None

    def add(
        self, prompt: int | Sequence[int] | Int32Array = 10, params: SamplingParams | None = None, **changes: Any
    ) -> Request:
        """Queue a prompt, or one of so many tokens that has nothing in common with the others."""
        request_id = f"r{len(self.outputs)}"
        tokens = make_prompt(prompt, first=100 * (1 + len(self.outputs))) if isinstance(prompt, int) else prompt
        request = self.scheduler.add(request_id, np.asarray(tokens, np.int32), params or make_params(**changes))
        self.outputs[request_id] = []
        return request

    def abort(self, request_id: str) -> bool:
        """Whether there was anything to end."""
        finished = self.scheduler.abort(request_id)
        if finished is not None:
            self._end(finished)
        return finished is not None

    def step(self) -> SchedulerOutput | None:
        """One turn of the loop; the plan that it launched."""
        plan = self.scheduler.schedule()
        launched = None if plan is None else (plan, self._result(plan))
        if plan is not None:
            self.plans.append(plan)
        if self.overlap:
            launched, self._pending = self._pending, launched
        if launched is not None:
            self._receive(self.scheduler.update(*launched))
        self.scheduler.check()
        return plan

    def run(self) -> dict[str, list[int]]:
        """Until nothing is left; the outputs."""
        self.run_until(lambda: not self.scheduler.has_work and self._pending is None)
        return self.outputs

    def run_until(self, done: Callable[[], object]) -> None:
        """Steps until ``done()``."""
        for _ in range(2_000):
            if done():
                return
            self.step()
        raise AssertionError(f"still not so: {self.scheduler.requests}")

    @property
    def num_pages_lost(self) -> int:
        """Pages that are neither free nor could be evicted; 0 when nothing runs."""
        return self.scheduler.config.num_pages - 1 - self.scheduler.kv.num_available_pages

    def _result(self, plan: SchedulerOutput) -> StepResult:
        tokens = []
        for row in plan.rows[plan.samples].tolist():
            request_id = self.scheduler.rows.request(row).request_id
            n = self._num_sampled.get(request_id, 0)
            self._num_sampled[request_id] = n + 1
            tokens.append(self._script(request_id, n))
        token_ids = np.array(tokens, np.int32)
        return StepResult(token_ids=np.maximum(token_ids, 0), finite=token_ids >= 0)

    def _receive(self, output: StepOutput) -> None:
        for request_id, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            assert request_id not in self.finished, f"{request_id} got a token after its end"
            self.outputs[request_id].append(token)
        for finished in output.finished:
            self._end(finished)

    def _end(self, finished: FinishedRequest) -> None:
        assert finished.request_id not in self.finished, "ended twice"
        self.finished[finished.request_id] = finished
