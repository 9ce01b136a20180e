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
        num_free_pages, num_cached_pages: pages free and in the prefix cache when it was planned.
    """

    step_id: int
    launched_s: float
    done_s: float
    request_ids: tuple[str, ...]
    num_tokens: Int32Array
    starts: Int32Array
    num_prompt_tokens: Int32Array
    samples: BoolArray
    num_free_pages: int
    num_cached_pages: int

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
