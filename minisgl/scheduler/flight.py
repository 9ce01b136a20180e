"""The flight recorder: what went into the scheduler, a line a step, and the fold that plays it back.

Scheduler state is a fold over its inputs: arrivals, aborts, flushes, clock readings and sampled tokens. So these are
all that is recorded, and `Replay` rebuilds queue, rows, pages and tree at any step, in another process, on a machine
without the model. A checksum of each plan proves that it is the same flight.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.request import FinishedRequest, FinishReason, Request, SamplingParams, StepOutput
from minisgl.scheduler.plan import SchedulerOutput, StepResult
from minisgl.scheduler.scheduler import Scheduler
from minisgl.trace import StepRecord, Trace
from minisgl.utils import as_token_ids

FORMAT = 1
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


class Header(msgspec.Struct, tag="header", tag_field="kind", frozen=True):
    """First line: what the scheduler was made of."""

    format: int
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    seed: int
    versions: dict[str, str] = {}


class Arrival(msgspec.Struct, tag="add", tag_field="kind", frozen=True):
    """A request was queued. ``params`` holds the sampling parameters that are not the default."""

    id: str
    t: float
    tokens: list[int]
    params: dict[str, Any] = {}


class Abort(msgspec.Struct, tag="abort", tag_field="kind", frozen=True, omit_defaults=True):
    """Somebody ended a request: a client, or the text layer on a stop string."""

    id: str
    t: float
    reason: FinishReason = "abort"
    stop_reason: str | None = None


class Flush(msgspec.Struct, tag="flush", tag_field="kind", frozen=True):
    """The prefix cache was emptied."""


class Step(msgspec.Struct, tag="step", tag_field="kind", frozen=True, omit_defaults=True):
    """One turn of the loop: a plan was made (or none), and a result taken in (or none).

    ``plan``: step id of the plan, 0 for none; ``crc``: its checksum; ``launched``: clock reading when it was handed to
    the device; ``done``: step id of the result, 0 for none; ``t``: clock reading when it came; ``ids``: its tokens;
    ``bad``: places in ``ids`` whose logits were not finite.
    """

    plan: int = 0
    crc: int = 0
    launched: float = 0.0
    done: int = 0
    t: float = 0.0
    ids: list[int] = []
    bad: list[int] = []


class Failure(msgspec.Struct, tag="failure", tag_field="kind", frozen=True):
    """Last line of a flight that ended badly."""

    error: str


Record = Header | Arrival | Abort | Flush | Step | Failure
_decoder = msgspec.json.Decoder(Record)


def checksum(plan: SchedulerOutput) -> int:
    """CRC-32 of a plan's columns."""
    crc = 0
    for column in (plan.rows, plan.num_tokens, plan.starts, plan.samples, plan.token_ids, plan.page_starts,
                   plan.page_ids, plan.page_copies):  # fmt: skip
        crc = zlib.crc32(column.tobytes(), crc)
    return crc


class FlightRecorder:
    """Takes down what goes into a scheduler: `records` keeps it in memory, or a file does, a line each.

    Args:
        header: what the scheduler was made of.
        path: file to write; None: memory.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, header: Header, path: str | os.PathLike[str] | None = None) -> None:
        self.records: list[Record] = []
        self._file: IO[bytes] | None = None
        self._encoder = msgspec.json.Encoder()
        self._turn: dict[str, Any] = {}
        self._is_over = False
        if path is not None:
            try:
                # Unbuffered: what was taken down survives whatever happens to the process.
                self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (lives as long as the engine)
            except OSError as error:
                raise ValueError(f"cannot write the flight record: {error}") from None
        self._add(header)

    def arrived(self, request: Request) -> None:
        """A request was queued."""
        params = {n: v for n, d in _DEFAULTS.items() if (v := getattr(request.sampling_params, n)) != d}
        self._add(Arrival(request.request_id, request.arrival_time_s, request.prompt_token_ids.tolist(), params))

    def ended(self, finished: FinishedRequest) -> None:
        """Somebody ended a request from outside."""
        stop_reason = finished.stop_reason if isinstance(finished.stop_reason, str) else None
        time_s = finished.timings.finished_s
        assert time_s is not None
        self._add(Abort(finished.request_id, time_s, finished.reason, stop_reason))

    def flushed(self) -> None:
        """The prefix cache was emptied."""
        self._add(Flush())

    def planned(self, plan: SchedulerOutput, launched_s: float) -> None:
        """This turn of the loop launched a plan."""
        self._turn.update(plan=plan.step_id, crc=checksum(plan), launched=launched_s)

    def done(self, step_id: int, result: StepResult, time_s: float) -> None:
        """This turn of the loop took in a result."""
        bad = np.flatnonzero(~result.finite).tolist()
        self._turn.update(done=step_id, t=time_s, ids=result.token_ids.tolist(), bad=bad)

    def end_turn(self, error: BaseException | None = None) -> None:
        """Take down the turn; if it ended with an error, that too, and nothing after it."""
        if self._turn or error is None:
            self._add(Step(**self._turn))
            self._turn = {}
        if error is not None:
            self._add(Failure(f"{type(error).__name__}: {error}"))
            self._is_over = True

    def close(self) -> None:
        """No more records."""
        self._is_over = True
        if self._file is not None:
            self._file.close()

    def _add(self, record: Record) -> None:
        if self._is_over:
            return
        if self._file is None:
            self.records.append(record)
        else:
            self._file.write(self._encoder.encode(record) + b"\n")


def make_header(config: SchedulerConfig, *, eos_token_ids: Iterable[int], seed: int) -> Header:
    """The header of a flight that begins now."""
    versions = {"python": platform.python_version(), "numpy": np.__version__, "msgspec": msgspec.__version__}
    return Header(FORMAT, dataclasses.asdict(config), tuple(sorted(eos_token_ids)), seed, versions)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file; a last line that was cut off by a crash is left out.

    Raises:
        ValueError: it cannot be read, or it is not a flight record.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read the flight record: {error}") from None
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(_decoder.decode(line))
        except msgspec.DecodeError as error:
            if number == len(lines):  # no newline behind it: the writer died here
                break
            raise ValueError(f"{path}, line {number}, is not a flight record: {error}") from None
    if not records or not isinstance(records[0], Header) or records[0].format != FORMAT:
        raise ValueError(f"{path} is not a flight record of format {FORMAT}")
    return records


class Replay:
    """The fold: a scheduler that lives through a recorded flight again.

    Args:
        records: a header, then what happened.

    Attributes:
        scheduler: as it was after the records that have been played.
        trace: the steps so far, for figures.
        step_id: last step whose result has been taken in.
        failure: how the flight ended, if it ended badly.
        aborts: the aborts so far.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = iter(records)
        header = next(self._records)
        assert isinstance(header, Header)
        self.header = header
        self._now = 0.0
        self.scheduler = Scheduler(
            _made(SchedulerConfig, header.config),
            eos_token_ids=header.eos_token_ids,
            seed=header.seed,
            clock=lambda: self._now,
        )
        self.trace = Trace()
        self.step_id = 0
        self.failure: str | None = None
        self.aborts: list[Abort] = []
        self._launched: list[tuple[SchedulerOutput, float]] = []

    def play(self, until: int | None = None) -> Iterator[tuple[SchedulerOutput, StepOutput]]:
        """Play on, yielding each step's plan and output, up to step ``until`` or the end.

        Raises:
            ValueError: a plan is not the recorded one: another version of the scheduler, or not a fold after all.
        """
        if until is not None and until <= self.step_id:
            return
        for record in self._records:
            step = self._play(record)
            if step is not None:
                yield step
                if step[0].step_id == until:
                    return

    def _play(self, record: Record) -> tuple[SchedulerOutput, StepOutput] | None:
        if isinstance(record, Arrival):
            self._now = record.t
            self.scheduler.add(record.id, as_token_ids(record.tokens), _made(SamplingParams, record.params))
            self.trace.arrivals_s[record.id] = record.t
        elif isinstance(record, Abort):
            self._now = record.t
            self.aborts.append(record)
            if self.scheduler.abort(record.id, reason=record.reason, stop_reason=record.stop_reason):
                self.trace.finished_s[record.id] = record.t
        elif isinstance(record, Flush):
            self.scheduler.kv.flush()
        elif isinstance(record, Failure):
            self.failure = record.error
        elif isinstance(record, Step):
            return self._play_step(record)
        return None

    def _play_step(self, record: Step) -> tuple[SchedulerOutput, StepOutput] | None:
        plan = self.scheduler.schedule()
        if (plan.step_id if plan else 0) != record.plan or (plan and checksum(plan) != record.crc):
            raise ValueError(f"the plan of step {record.plan} is not the recorded one")
        if plan is not None:
            self._launched.append((plan, record.launched))
        if not record.done:
            return None  # launched and not read yet, or the flight ended here
        if not self._launched or self._launched[0][0].step_id != record.done:
            raise ValueError(f"the record has a result of step {record.done}, which is not under way")
        plan, launched_s = self._launched.pop(0)
        num_sampled = int(plan.samples.sum())
        if len(as_token_ids(record.ids)) != num_sampled or not all(0 <= i < num_sampled for i in record.bad):
            raise ValueError(f"the record's result of step {record.done} is not one for its {num_sampled} requests")
        self._now, self.step_id = record.t, record.done
        finite = np.ones(len(record.ids), np.bool_)
        finite[record.bad] = False
        add_step(self.scheduler, plan, self.trace, launched_s=launched_s, done_s=record.t)
        output = self.scheduler.update(plan, StepResult(np.array(record.ids, np.int32), finite))
        self.trace.finished_s.update({f.request_id: output.time_s for f in output.finished})
        return plan, output


def _made(kind: Any, fields: dict[str, Any]) -> Any:
    """``kind(**fields)``, with a ``ValueError`` also for fields that it does not have, or lacks."""
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"the record does not suit this version: {error}") from None


def add_step(scheduler: Scheduler, plan: SchedulerOutput, trace: Trace, *, launched_s: float, done_s: float) -> None:
    """Add a step to ``trace``; called before its result is taken in, while its requests still have their rows."""
    requests = [scheduler.rows.request(row) for row in plan.rows]
    for request in requests:
        trace.cached_tokens.setdefault(request.request_id, request.num_cached_tokens or 0)
    trace.steps.append(
        StepRecord(
            step_id=plan.step_id,
            launched_s=launched_s,
            done_s=done_s,
            request_ids=tuple(r.request_id for r in requests),
            num_tokens=plan.num_tokens,
            starts=plan.starts,
            num_prompt_tokens=np.array([r.num_prompt_tokens for r in requests], np.int32),
            samples=plan.samples,
        )
    )
