"""What a figure may be drawn from: a living engine, a flight record, its replay, a trace."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from minisgl.scheduler.flight import Record, Replay, read_records
from minisgl.scheduler.scheduler import Scheduler
from minisgl.trace import Trace


class Engine(Protocol):
    """What an `EngineCore` and a `Replay` have in common."""

    @property
    def scheduler(self) -> Scheduler:
        """As it is now."""

    @property
    def trace(self) -> Trace:
        """The steps so far."""


Recorded = str | os.PathLike[str] | Sequence[Record]
"""A flight record: its file, or the records themselves."""
_RECORDED = (str, os.PathLike, Sequence)


def find_scheduler(source: Scheduler | Engine | Recorded, step: int | None = None) -> Scheduler:
    """The scheduler to look at: as it is now, or, of a record, as it was after ``step`` (None: at the end).

    Raises:
        ValueError: a record without such a step, or ``step`` given for something that has only one state.
    """
    if not isinstance(source, _RECORDED):
        if step is not None:
            raise ValueError("step needs a flight record; what lives can only be drawn as it is")
        return source if isinstance(source, Scheduler) else source.scheduler
    replay = _play(source, step)
    if step is not None and replay.step_id != step:
        raise ValueError(f"the flight has no step {step}; its last is {replay.step_id}")
    return replay.scheduler


def find_trace(source: Trace | Engine | Recorded) -> Trace:
    """The steps to draw.

    Raises:
        ValueError: there are none.
    """
    if isinstance(source, _RECORDED):
        source = _play(source)
    trace = source if isinstance(source, Trace) else source.trace
    if not trace.steps:
        raise ValueError("the trace is empty; was the engine made with trace=True?")
    return trace


def name_all(request_ids: Iterable[str], names: Mapping[str, str] | None) -> dict[str, str]:
    """A name for each request: that of ``names``, else its id."""
    return {request_id: (names or {}).get(request_id, request_id) for request_id in request_ids}


def _play(source: Recorded, step: int | None = None) -> Replay:
    replay = Replay(read_records(source) if isinstance(source, str | os.PathLike) else source)
    for _ in replay.play(step):
        pass
    return replay
