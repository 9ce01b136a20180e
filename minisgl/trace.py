"""`Trace`: what happened, step by step, for the book's figures.

Chapter 1 tells this module's story. Off unless asked for; then one `StepRecord` a step, made from the plan that was
executed, so a figure shows what ran and not what was meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.utils import BoolArray, Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One executed step.

    Args:
        step_id: counts up from 1.
        launched_s, done_s: clock readings when it was handed to the device and when its tokens were read.
        request_ids: the R requests in it.
        num_tokens: ``[R]`` int32, tokens computed.
        starts: ``[R]`` int32, position of the first of them.
        num_prompt_tokens: ``[R]`` int32, so that prefill and decode can be told apart.
        samples: ``[R]`` bool, whether the step gave the request a token.
    """

    step_id: int
    launched_s: float
    done_s: float
    request_ids: tuple[str, ...]
    num_tokens: Int32Array
    starts: Int32Array
    num_prompt_tokens: Int32Array
    samples: BoolArray

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of this step that belong to prompts."""
        return int(self.num_tokens[self.starts < self.num_prompt_tokens].sum())

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of this step that were generated before."""
        return int(self.num_tokens.sum()) - self.num_prefill_tokens


@dataclass(slots=True)
class Trace:
    """The records of an engine's life, oldest first.

    Args:
        steps: one a step.
        arrivals_s: request id -> clock reading when it was queued.
        cached_tokens: request id -> prompt tokens that came from the prefix cache, once it was admitted.
        finished_s: request id -> clock reading when it ended.
    """

    steps: list[StepRecord] = field(default_factory=list)
    arrivals_s: dict[str, float] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    finished_s: dict[str, float] = field(default_factory=dict)

    def to_chrome(self) -> dict[str, list[dict[str, object]]]:
        """The trace in Chrome's event format, which https://ui.perfetto.dev and ``chrome://tracing`` open: a track of
        steps, and one for each request with its wait, its chunks and its decodes. Times in microseconds."""
        if not self.steps:
            return {"traceEvents": []}
        begin = min([self.steps[0].launched_s, *self.arrivals_s.values()])
        events: list[dict[str, object]] = [
            _name(0, 0, "process_name", "engine"),
            _name(1, 0, "process_name", "requests"),
        ]
        threads: dict[str, int] = {}
        busy_until = begin
        for step in self.steps:
            started, busy_until = max(step.launched_s, busy_until), step.done_s
            what = f"step {step.step_id}: {step.num_prefill_tokens} prefill + {step.num_decode_tokens} decode"
            events.append(_span(0, 0, what, started - begin, step.done_s - started))
            for i, request_id in enumerate(step.request_ids):
                if request_id not in threads:
                    threads[request_id] = len(threads)
                    events.append(_name(1, threads[request_id], "thread_name", request_id))
                    arrival = self.arrivals_s.get(request_id, started)
                    events.append(_span(1, threads[request_id], "waiting", arrival - begin, started - arrival))
                is_prompt = step.starts[i] < step.num_prompt_tokens[i]
                what = f"prefill {step.num_tokens[i]}" if is_prompt else "decode"
                events.append(_span(1, threads[request_id], what, started - begin, step.done_s - started))
        return {"traceEvents": events}


def _span(process: int, thread: int, name: str, start_s: float, duration_s: float) -> dict[str, object]:
    micro = {"ts": round(start_s * 1e6, 3), "dur": round(max(duration_s, 0.0) * 1e6, 3)}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **micro}


def _name(process: int, thread: int, kind: str, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
