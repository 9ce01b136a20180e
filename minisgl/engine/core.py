"""`EngineCore`: the loop that everything else is for. `LLM` holds one, and so does a server's engine process.

Two loops stand side by side, so that the difference is the lesson: the plain one waits for each step's tokens before it
plans the next step; the overlapped one plans and launches step k+1 before it reads step k.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from minisgl.engine.pending import PendingStep
from minisgl.engine.runner import ModelRunner
from minisgl.kv_cache import KVCacheManager
from minisgl.request import FinishedRequest, FinishReason, Request, SamplingParams, StepOutput
from minisgl.scheduler import Scheduler, SchedulerOutput
from minisgl.scheduler.flight import FlightRecorder, Replay
from minisgl.trace import Trace
from minisgl.utils import Int32Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    plan: SchedulerOutput
    pending: PendingStep


class EngineCore:
    """Scheduler and runner, and the loop that joins them. Not thread-safe: one caller at a time.

    Args:
        scheduler: decides.
        runner: acts.
        overlap: which of the two loops.
        recorder: takes down what goes into the scheduler, or None.
        strict: check all invariants after every step, and raise when one fails. Otherwise they are checked when the
            engine runs out of work, and a failure is logged.
        clock: seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        overlap: bool = True,
        recorder: FlightRecorder | None = None,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.overlap = overlap
        self.recorder = recorder
        self.strict = strict
        self.failure: BaseException | None = None
        self.num_failed_checks = 0  # that were logged
        self._clock = clock
        self._in_flight: _Launched | None = None
        self._next_check_s = -math.inf  # the idle check is not made before this reading of the clock

    @property
    def kv(self) -> KVCacheManager:
        """The owner of the pages."""
        return self.scheduler.kv

    def now(self) -> float:
        """The engine's clock, in seconds: arrivals and results are stamped with it."""
        return self._clock()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or self._in_flight is not None

    def add(self, request_id: str, prompt_token_ids: Int32Array, sampling_params: SamplingParams) -> Request:
        """Queue a request. Raises ``ValueError`` as `Scheduler.add` does."""
        request = self.scheduler.add(request_id, prompt_token_ids, sampling_params)
        if self.recorder is not None:
            self.recorder.arrived(request)
        return request

    def abort(
        self, request_id: str, *, reason: FinishReason = "abort", stop_reason: str | None = None
    ) -> FinishedRequest | None:
        """End a request in whatever state it is; None if it has ended or never was."""
        finished = self.scheduler.abort(request_id, reason=reason, stop_reason=stop_reason)
        if finished is not None and self.recorder is not None:
            self.recorder.ended(finished)
        return finished

    def flush_cache(self) -> int:
        """Forget every cached prefix that no running request uses; returns how many pages that freed."""
        if self.recorder is not None:
            self.recorder.flushed()
        return self.kv.flush()

    @property
    def trace(self) -> Trace:
        """What happened so far, for figures: derived from the flight record, so it shows what ran.

        Raises:
            ValueError: no record is kept in memory; the engine was not made with ``trace=True``.
        """
        if self.recorder is None or not self.recorder.records:
            raise ValueError("there is no trace; make the engine with trace=True")
        replay = Replay(self.recorder.records)
        for _ in replay.play():
            pass
        return replay.trace

    def step(self) -> StepOutput | None:
        """One turn of the loop; None when it brought no result.

        Raises:
            RuntimeError: an earlier step failed, so that the state of the device is unknown.
        """
        if self.failure is not None:
            raise RuntimeError(f"the engine has failed: {self.failure!r}") from self.failure
        try:
            output = self._step_overlapped() if self.overlap else self._step_plain()
            assert output or self._in_flight or not self.has_work, "requests wait, and none of them can run"
            if self.strict:
                self.scheduler.check()
        except BaseException as error:
            self.failure = error
            if self.recorder is not None:
                self.recorder.end_turn(error)
            raise
        if self.recorder is not None:
            self.recorder.end_turn()
        if not self.strict and not self.has_work:
            self._check_when_idle()
        return output

    def _step_plain(self) -> StepOutput | None:
        plan = self.scheduler.schedule()
        return None if plan is None else self._finish(self._launch(plan))

    def _step_overlapped(self) -> StepOutput | None:
        plan = self.scheduler.schedule()
        launched = None if plan is None else self._launch(plan)
        previous, self._in_flight = self._in_flight, launched
        return None if previous is None else self._finish(previous)

    def _launch(self, plan: SchedulerOutput) -> _Launched:
        if self.recorder is not None:
            self.recorder.planned(plan, self._clock())
        logits = self.runner.forward(plan)
        return _Launched(plan, self.runner.sample(logits))

    def _finish(self, launched: _Launched) -> StepOutput:
        result = launched.pending.wait()
        output = self.scheduler.update(launched.plan, result)
        if self.recorder is not None:
            self.recorder.done(output.step_id, result, output.time_s)
        return output

    def _check_when_idle(self) -> None:
        """O13: a failure is logged and the engine goes on. The check walks all pages and the whole tree, so it is made
        no more often than leaves it a hundredth of the time."""
        started = self._clock()
        if started < self._next_check_s:
            return
        try:
            self.scheduler.check()
        except AssertionError:
            self.num_failed_checks += 1
            logger.exception("the integrity check failed; the engine goes on")
        done = self._clock()
        self._next_check_s = done + 100 * (done - started)
