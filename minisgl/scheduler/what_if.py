"""The same requests under another policy: a recorded flight, flown again in simulated time.

What a request says does not depend on when it is computed, so its tokens are those that were recorded. How long a step
takes is a straight line over its tokens, fitted to the recorded steps. What remains is the policy.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.request import FinishReason, SamplingParams
from minisgl.scheduler.flight import Arrival, Record, Replay, add_step
from minisgl.scheduler.plan import SchedulerOutput, StepResult
from minisgl.scheduler.scheduler import Scheduler
from minisgl.trace import Trace
from minisgl.utils import as_token_ids


@dataclass(slots=True)
class _Script:
    """What a request said, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason = "abort"
    by_token: bool = False  # an EOS or stop token ended it


@dataclass(frozen=True, slots=True)
class Outcome:
    """One flight in simulated time.

    Args:
        trace: its steps.
        num_preemptions: how often a request lost its row.
        first_token_s: request id -> seconds from arrival to first token.
        finished_s: request id -> seconds from arrival to the end.
    """

    trace: Trace
    num_preemptions: int
    first_token_s: dict[str, float]
    finished_s: dict[str, float]

    def summary(self) -> dict[str, float]:
        """The numbers to compare: steps, tokens computed, preemptions, seconds in all, and percentiles of the waits."""
        first, finished = list(self.first_token_s.values()), list(self.finished_s.values())
        steps = self.trace.steps
        return {
            "steps": len(steps),
            "tokens computed": int(sum(int(s.num_tokens.sum()) for s in steps)),
            "preemptions": self.num_preemptions,
            "duration_s": steps[-1].done_s - min(self.trace.arrivals_s.values()) if steps else 0.0,
            "first token p50_s": float(np.percentile(first, 50)) if first else 0.0,
            "first token p99_s": float(np.percentile(first, 99)) if first else 0.0,
            "finished p50_s": float(np.percentile(finished, 50)) if finished else 0.0,
            "finished p99_s": float(np.percentile(finished, 99)) if finished else 0.0,
        }


def parse_changes(pairs: Sequence[str]) -> dict[str, Any]:
    """``["order=mixed", "chunk_size=256"]`` as fields of `SchedulerConfig`. Raises ``ValueError`` naming the fields."""
    fields = {f.name: f for f in dataclasses.fields(SchedulerConfig)}
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        name = name.replace("-", "_")
        if name not in fields or not value:
            raise ValueError(f"{pair!r}: give FIELD=VALUE, with a field among {', '.join(fields)}")
        kind = str(fields[name].type)
        if value.lower() == "none":
            changes[name] = None
        elif kind.startswith("bool"):
            if value.lower() not in ("true", "false"):
                raise ValueError(f"{name} must be true or false, got {value!r}")
            changes[name] = value.lower() == "true"
        elif kind.startswith("int"):
            try:
                changes[name] = int(value)
            except ValueError:
                raise ValueError(f"{name} must be an integer, got {value!r}") from None
        else:
            changes[name] = value
    return changes


def what_if(records: Sequence[Record], **changes: Any) -> Outcome:
    """Fly a recorded flight again, with some fields of its `SchedulerConfig` changed; with none, it is the baseline:
    the recorded policy under the same model of time.

    Raises:
        ValueError: a changed field is out of its range.
    """
    replay = Replay(records)
    scripts = _scripts(replay)
    base_s, token_s = _fit_step_time(replay.trace)
    now = 0.0
    scheduler = Scheduler(
        SchedulerConfig(**{**replay.header.config, **changes}),
        eos_token_ids=replay.header.eos_token_ids,
        seed=replay.header.seed,
        clock=lambda: now,
    )
    arrivals = sorted((r for r in records if isinstance(r, Arrival)), key=lambda r: r.t)
    trace = Trace()
    said: dict[str, int] = defaultdict(int)
    first_token_s: dict[str, float] = {}
    finished_s: dict[str, float] = {}
    while arrivals or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[0].t)
        while arrivals and arrivals[0].t <= now:
            arrival = arrivals.pop(0)
            now, at = arrival.t, now  # it is stamped with its own time
            scheduler.add(arrival.id, as_token_ids(arrival.tokens), SamplingParams(**arrival.params))
            now = at
            trace.arrivals_s[arrival.id] = arrival.t
            if not scripts[arrival.id].tokens and not scripts[arrival.id].by_token:
                scheduler.abort(arrival.id)  # it was given up before its first token
        plan = scheduler.schedule()
        if plan is None:
            continue
        launched_s = now
        now += base_s + token_s * plan.total_tokens
        add_step(scheduler, plan, trace, launched_s=launched_s, done_s=now)
        output = scheduler.update(plan, _say(scheduler, plan, scripts, said))
        for request_id in output.request_ids:
            first_token_s.setdefault(request_id, now - trace.arrivals_s[request_id])
            script = scripts[request_id]
            if said[request_id] == len(script.tokens) and not script.by_token and script.reason != "length":
                end = scheduler.abort(request_id, reason=script.reason)
                if end is not None:
                    finished_s[request_id] = now - trace.arrivals_s[request_id]
        for ended in output.finished:
            finished_s[ended.request_id] = now - trace.arrivals_s[ended.request_id]
    return Outcome(trace, scheduler.num_preemptions, first_token_s, finished_s)


def _scripts(replay: Replay) -> dict[str, _Script]:
    scripts: dict[str, _Script] = defaultdict(_Script)
    for _, output in replay.play():
        for request_id, token_id in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            scripts[request_id].tokens.append(token_id)
        for end in output.finished:
            scripts[end.request_id].reason = end.reason
            scripts[end.request_id].by_token = end.reason == "stop"
    for record in replay.aborts:
        script = scripts[record.id]
        if not script.by_token and script.reason == "abort":
            script.reason = record.reason
    return scripts


def _fit_step_time(trace: Trace) -> tuple[float, float]:
    """Seconds of an empty step and of a token, least squares over the recorded steps."""
    if not trace.steps:
        return 0.0, 0.0
    done = np.array([s.done_s for s in trace.steps])
    begun = np.maximum(np.array([s.launched_s for s in trace.steps]), np.concatenate([[0.0], done[:-1]]))
    tokens = np.array([int(s.num_tokens.sum()) for s in trace.steps], np.float64)
    seconds = done - begun
    if len(np.unique(tokens)) < 2:
        return float(seconds.mean()), 0.0
    slope, intercept = np.polyfit(tokens, seconds, 1)
    if slope < 0 or intercept < 0:  # noise: no step is cheaper than nothing
        return (0.0, float(seconds.sum() / tokens.sum())) if slope > 0 else (float(seconds.mean()), 0.0)
    return float(intercept), float(slope)


def _say(scheduler: Scheduler, plan: SchedulerOutput, scripts: dict[str, _Script], said: dict[str, int]) -> StepResult:
    """The step's tokens, as they were recorded."""
    ids = []
    for row in plan.rows[plan.samples]:
        request = scheduler.rows.request(row)
        script, k = scripts[request.request_id], said[request.request_id]
        said[request.request_id] += 1
        if k < len(script.tokens):
            ids.append(script.tokens[k])
        else:
            ids.append(request.end_token_ids[0] if script.by_token else 0)
    return StepResult(np.array(ids, np.int32), np.ones(len(ids), np.bool_))
