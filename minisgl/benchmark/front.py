"""`minisgl bench front`: what the server costs around the engine, with an echo in its place.

Chapter 1 shows it. An echo that keeps time tells how many events a second come through one a token, and how late; one
that does not wait tells how many tokens a second do when a stream that is behind gets several at once. CPU time is
counted for each process, in cores: on a machine that others use too, it says what the clock cannot.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minisgl.benchmark.load import Ask, Sample, run_load
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.serve import percentiles
from minisgl.benchmark.serving import Serving, cpu_seconds, engine_arguments, serving

PROMPT = "Once upon a time there was a little dog, and the dog had a friend. "
ROLES = ("front", "worker", "engine", "client")
FLAT_OUT_TOKENS = 3000  # of each stream
GOAL_EVENTS, GOAL_TOKENS = 15_000, 40_000  # a second, on two cores


def bench_front(
    options: dict[str, Any] | None = None,
    *,
    streams: Sequence[int] = (100, 200, 300, 400),
    rate: float = 50.0,
    seconds: float = 5.0,
    arguments: Sequence[str] = (),
    output: str | None = None,
) -> list[dict[str, Any]]:
    """Measure, print a table, and return its rows.

    Args:
        options: of `LLM`; an echo takes tokenizer and context from them.
        streams: how many at once, a row each.
        rate: tokens a second of each stream.
        seconds: that a stream takes.
        arguments: further options of ``minisgl serve``.
        output: JSON file to write.

    Returns:
        A row for each number of streams, and one flat out with as many as the last. ``tokens an event``: 1 means that
        nothing was joined. ``late ms``: how much later a token came than the most punctual of its stream
        in the same second.
    """
    common = ["--echo", "--max-model-len", "100000", "--max-waiting", "10000", *engine_arguments(options or {})]
    rows = []
    # Others may use the machine too.
    circumstances = {"cores": os.cpu_count(), "load average before": os.getloadavg()[0], "niceness": os.nice(0)}
    with serving([*common, "--echo-rate", str(rate), *arguments]) as server:
        _ask_all(server, 4, 8)
        for num in streams:
            rows.append(_measure(server, f"{num} at {rate:g}/s", num, int(rate * seconds), rate))
    with serving([*common, *arguments]) as server:
        _ask_all(server, 4, 8)
        alone = percentiles([1e3 * _one_token(server).first_token_s for _ in range(50)])
        rows.append(_measure(server, f"{streams[-1]} flat out", streams[-1], FLAT_OUT_TOKENS, None))
    print(table(rows))
    print(f"an answer of one token, alone: {alone['p50']:.2f} ms (p99 {alone['p99']:.2f})")
    if output is not None:
        results = {
            **circumstances,
            "goal": {"events/s, one a token": GOAL_EVENTS, "tok/s": GOAL_TOKENS},
            "an answer of one token, alone, ms": alone,
            "rows": rows,
        }
        write_report(output, "the server without a model", torch.device("cpu"), results)
    return rows


def _one_token(server: Serving) -> Sample:
    (sample,) = run_load(server.url, [Ask(0.0, {"prompt": PROMPT, "max_tokens": 1})])
    assert sample.error is None, sample.error
    return sample


def _ask_all(server: Serving, num_streams: int, num_tokens: int) -> None:
    """Some answers that nobody looks at: a warm-up."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True}
    run_load(server.url, [Ask(0.0, body)] * num_streams)


def _measure(server: Serving, label: str, num_streams: int, num_tokens: int, rate: float | None) -> dict[str, Any]:
    """All streams at once; counted is from when the last has begun to when the first ends."""
    marks: list[tuple[float, dict[str, float]]] = []

    def watch(num_started: int, num_ended: int) -> None:
        if (num_started == num_streams and not marks) or (num_ended == 1 and len(marks) == 1):
            marks.append((time.perf_counter(), {**cpu_seconds(server), "client": time.process_time()}))

    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True}
    samples = run_load(server.url, [Ask(0.0, body)] * num_streams, watch=watch)
    errors = {s.error for s in samples} - {None}
    if errors or len(marks) < 2:
        raise RuntimeError(f"{label}: {errors or 'streams ended before all had begun: give them more tokens'}")
    (first_s, before), (last_s, after) = marks
    wall_s = last_s - first_s
    inside = (max(s.times_s[0] for s in samples), min(s.end_s for s in samples))
    events = sum(n for s in samples for t, n in zip(s.times_s, s.num_events, strict=True) if inside[0] < t <= inside[1])
    # Which event brought how many tokens cannot be seen; how long a stream's tokens took can.
    tokens = wall_s * sum(1 / s.token_s for s in samples if s.token_s)
    late = [late for s in samples for late in _lateness_ms(s, rate, inside)] if rate else []
    return {
        "streams": label,
        "events/s": events / wall_s,
        "tok/s": tokens / wall_s,
        "tokens an event": tokens / max(events, 1),
        "late ms p50": float(np.median(late)) if late else None,
        "late ms p99": float(np.percentile(late, 99)) if late else None,
        **{f"{role} cores": (after[role] - before[role]) / wall_s for role in ROLES if role in before},
        "us an event": 1e6 * sum(after[role] - before[role] for role in ROLES[:3] if role in before) / max(events, 1),
    }


def _lateness_ms(sample: Sample, rate: float, inside: tuple[float, float]) -> list[float]:
    """How much later each came than the most punctual token of the stream in the same second, for an echo that was held
    up goes on from there; nothing if any were joined to one event."""
    times = np.repeat(sample.times_s, sample.num_events)
    times = times[(times > inside[0]) & (times <= inside[1])]
    if abs(len(times) - rate * (inside[1] - inside[0])) > 1 or not len(times):
        return []
    late = 1e3 * (times - np.arange(len(times)) / rate)
    second = max(1, int(rate))
    return [
        ms for k in range(0, len(late), second) for ms in (late[k : k + second] - late[k : k + second].min()).tolist()
    ]
