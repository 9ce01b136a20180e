"""`minisgl replay`: look into a recorded flight.

Chapter 2 tells this module's story. It only prints; the fold is `minisgl.scheduler.flight.Replay`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from minisgl.scheduler.flight import Record, Replay, read_records
from minisgl.scheduler.view import describe
from minisgl.scheduler.what_if import parse_changes, what_if


def replay(
    file: str,
    *,
    step: int | None = None,
    changes: Sequence[str] = (),
    bisect: bool = False,
    perfetto: str | None = None,
) -> int:
    """Play a flight record and print what was asked for; returns the exit code.

    Args:
        file: the record.
        step: print the state after this step.
        changes: ``FIELD=VALUE``: fly again under another policy, and compare.
        bisect: find the first step after which an invariant does not hold.
        perfetto: file to write the trace to, in Chrome's format.

    Raises:
        ValueError: the file is no flight record, or does not replay.
    """
    records = read_records(file)
    if changes:
        _compare(what_if(records).summary(), what_if(records, **parse_changes(changes)).summary())
        return 0
    flight = Replay(records)
    if bisect:
        return _bisect(records)
    num_tokens = sum(int(plan.num_tokens.sum()) for plan, _ in flight.play(step))
    if step is not None and flight.step_id != step:
        raise ValueError(f"the flight has no step {step}; its last is {flight.step_id}")
    if perfetto is not None:
        Path(perfetto).write_text(json.dumps(flight.trace.to_chrome()), encoding="utf-8")
    print(
        f"{flight.step_id} steps, {num_tokens} tokens computed for {len(flight.trace.arrivals_s)} requests, "
        f"{flight.scheduler.num_preemptions} preemptions; every plan is the recorded one"
    )
    if step is not None:
        print(describe(flight.scheduler))
    if flight.failure is not None:
        print(f"the flight ended with {flight.failure}")
    return 0


def _bisect(records: list[Record]) -> int:
    flight = Replay(records)
    fault = None
    try:
        for _ in flight.play():
            flight.scheduler.check()
    except AssertionError as error:
        fault = error
    if fault is None:
        print(f"every invariant held after each of the {flight.step_id} steps")
        return 0
    print(f"first broken by step {flight.step_id}: {fault}")
    before = Replay(records)
    for _ in before.play(flight.step_id - 1):
        pass
    print(f"before it:\n{describe(before.scheduler)}")
    return 1


def _compare(baseline: dict[str, float], changed: dict[str, float]) -> None:
    print(f"{'':24}{'as recorded':>14}{'what if':>14}")
    for name, value in baseline.items():
        print(f"{name:24}{value:14.6g}{changed[name]:14.6g}")
