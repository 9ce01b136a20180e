"""`EchoEngine`: an engine without a model. It answers each prompt with the prompt's own tokens.

Chapter 1 tells this module's story: with it the server can be tried, tested and measured without a model's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minisgl.request import FinishedRequest, FinishReason, SamplingParams, StepOutput, Timings, Usage
from minisgl.server.client import EngineStats, ModelInfo
from minisgl.utils import Int32Array


@dataclass(slots=True, eq=False)
class _Echo:
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    arrival_s: float
    first_token_s: float | None = None
    num_tokens: int = 0


class EchoEngine:
    """All requests run at once, a token a step each. An answer ends with its prompt ("stop"), or goes round again if
    the request ignores EOS.

    Args:
        info: what to tell of the model that is not there.
        rate: steps a second; 0: as fast as they are asked for.
        clock, sleep: seconds.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        rate: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.info = info
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._requests: dict[str, _Echo] = {}
        self._num_steps = 0
        self._due_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def add(self, request_id: str, prompt_token_ids: Int32Array, sampling_params: SamplingParams) -> None:
        """Queue a request. Raises ``ValueError`` for an id in use, and for what an echo cannot do."""
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use")
        if sampling_params.logprobs is not None or sampling_params.prompt_logprobs is not None:
            raise ValueError("an echo has no log-probabilities")
        room = self.info.max_model_len - len(prompt_token_ids)
        most = min(sampling_params.max_tokens or room, room)
        self._requests[request_id] = _Echo(prompt_token_ids.tolist(), sampling_params, most, self._clock())

    def abort(
        self, request_id: str, *, reason: FinishReason = "abort", stop_reason: str | None = None
    ) -> FinishedRequest | None:
        """End a request; None if it has ended or never was."""
        return self._finish(request_id, reason, stop_reason) if request_id in self._requests else None

    def step(self) -> StepOutput:
        """The next token of every request; waits until it is due."""
        if self._rate:
            wait_s = self._due_s - self._clock()
            if wait_s > 0:
                self._sleep(wait_s)
            is_behind = self._clock() - self._due_s > 1 / self._rate  # there was nothing to do: do not catch up
            self._due_s = (self._clock() if is_behind else self._due_s) + 1 / self._rate
        self._num_steps += 1
        now = self._clock()
        ids: list[str] = []
        tokens: list[int] = []
        ends: list[tuple[str, FinishReason, int | None]] = []
        for request_id, echo in self._requests.items():
            token = echo.prompt[echo.num_tokens % len(echo.prompt)]
            if token in echo.params.stop_token_ids:
                ends.append((request_id, "stop", token))
                continue
            ids.append(request_id)
            tokens.append(token)
            echo.num_tokens += 1
            if echo.first_token_s is None:
                echo.first_token_s = now
            if echo.num_tokens == echo.max_tokens:
                ends.append((request_id, "length", None))
            elif echo.num_tokens == len(echo.prompt) and not echo.params.ignore_eos:
                ends.append((request_id, "stop", None))
        finished = tuple(self._finish(*end) for end in ends)
        return StepOutput(self._num_steps, now, tuple(ids), np.array(tokens, np.int32), finished)

    def flush_cache(self) -> int:
        """There is none."""
        return 0

    def stats(self, *, detail: bool = False) -> EngineStats:
        """Requests and steps."""
        running = [
            {
                "id": request_id,
                "num_prompt_tokens": len(echo.prompt),
                "num_output_tokens": echo.num_tokens,
                "max_tokens": echo.max_tokens,
            }
            for request_id, echo in (self._requests.items() if detail else ())
        ]
        return EngineStats(
            num_running=len(self._requests),
            num_steps=self._num_steps,
            detail={"running": running} if detail else {},
        )

    def close(self) -> None:
        """There is nothing to give back."""

    def _finish(self, request_id: str, reason: FinishReason, stop_reason: str | int | None) -> FinishedRequest:
        echo = self._requests.pop(request_id)
        return FinishedRequest(
            request_id,
            reason,
            stop_reason,
            Usage(len(echo.prompt), 0, echo.num_tokens),
            Timings(echo.arrival_s, echo.first_token_s, self._clock()),
        )
