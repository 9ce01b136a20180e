"""The vocabulary of one request: how it is to be sampled, what it is while it lives, what comes back.

Chapter 1 tells this module's story. `SamplingParams` belongs to the user and is never changed; `Request` is written
only by the scheduler; `RequestOutput` is a snapshot for the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from minisgl.utils import Int32Array, as_plain, check_int, check_range

Float32Array = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "abort"]
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Frozen; checked when made.

    Args:
        temperature: 0 takes the most likely token whatever else is set; below 1e-5 counts as 0.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this; the one that crosses stays.
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this share as likely as the most likely one.
        repetition_penalty: 0.01..100; divides positive and multiplies negative logits of tokens seen before.
        presence_penalty: subtracted once from logits of tokens seen in the output.
        frequency_penalty: subtracted from a logit once for each time the token was output.
        logit_bias: token id -> number in -100..100 added to its logit.
        allowed_token_ids: if given, only these can be sampled.
        seed: the same seed gives the same tokens whatever shares the batch. None: drawn by the engine.
        n: number of completions of the one prompt.
        max_tokens: at most this many new tokens; None: the rest of the context.
        min_tokens: no EOS or stop token before this many.
        stop: a string or strings that end the text.
        include_stop_str_in_output: keep the stop string at the end of the text, which it is otherwise cut from.
        stop_token_ids: token ids that end the text like an EOS.
        ignore_eos: go on to exactly ``max_tokens``.
        logprobs: also return the log-probability of each token and of this many most likely ones (0..20).
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text (their ids stay in ``token_ids``).
        priority: lower is preempted first.
        cache_salt: requests share cached prefixes only with requests of the same salt.

    Raises:
        ValueError: a value is outside its range; the message names the range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, as_plain(getattr(self, f.name)))
        check_range("temperature", self.temperature, low=0)
        check_range("top_p", self.top_p, low=0, high=1, open_low=True)
        check_int("top_k", self.top_k, low=-1)
        check_range("min_p", self.min_p, low=0, high=1)
        check_range("repetition_penalty", self.repetition_penalty, low=0.01, high=100)
        check_range("presence_penalty", self.presence_penalty, low=-2, high=2)
        check_range("frequency_penalty", self.frequency_penalty, low=-2, high=2)
        check_int("n", self.n, low=1, high=128)
        if self.seed is not None:
            check_int("seed", self.seed, low=0, high=2**63 - 1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, low=1)
        check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        check_int("priority", self.priority, low=-(2**31), high=2**31 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.cache_salt is not None and not _is_text(self.cache_salt):
            raise ValueError(f"cache_salt must be a string of Unicode text, got {self.cache_salt!r}")
        # Collections are copied into immutable ones, so that nobody changes them behind the engine's back.
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        if not all(_is_text(s) and s for s in stop):
            raise ValueError("stop must be a string or strings of Unicode text, none of them empty")
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        object.__setattr__(self, "stop", stop)
        stop_token_ids = _tuple("stop_token_ids", self.stop_token_ids)
        for token_id in stop_token_ids:
            check_int("stop_token_ids", token_id, low=0, high=2**31 - 1)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        if self.allowed_token_ids is not None:
            allowed = _tuple("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids must name at least one token")
            for token_id in allowed:
                check_int("allowed_token_ids", token_id, low=0, high=2**31 - 1)
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            bias: dict[int, float] = {}
            for key, value in self.logit_bias.items():
                # JSON has no keys but strings.
                token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
                check_int("logit_bias token id", token_id, low=0, high=2**31 - 1)
                check_range(f"logit_bias of token {token_id}", as_plain(value), low=-100, high=100)
                bias[int(token_id)] = float(value)
            object.__setattr__(self, "logit_bias", bias)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken: temperature 0, or too small to divide by."""
        return self.temperature < 1e-5

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``ValueError`` if a token id named here is not below ``vocab_size``."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise ValueError(f"{name}: token id {token_id} is outside the vocabulary 0..{vocab_size - 1}")


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    """The values of a collection, none of which is checked yet; None is an empty one."""
    if isinstance(values, (str, bytes)):
        raise ValueError(f"{name} must be a list, got {values!r}")
    try:
        return tuple(as_plain(value) for value in (() if values is None else values))
    except TypeError:
        raise ValueError(f"{name} must be a list, got {values!r}") from None


def _is_text(value: object) -> bool:
    """Whether it is a string that has a UTF-8 form; half of a surrogate pair has none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    COMPILING = "compiling"  # a grammar
    LOADING = "loading"  # KV from elsewhere
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """One request while it lives on the host. Facts are set when it is made; what changes is written only by the
    scheduler. How far a running request is computed stands in the scheduler's columns at `row`.

    Args:
        request_id: unique among the living.
        prompt_token_ids: ``[n]`` int32, not empty.
        sampling_params: as the user gave them.
        arrival: sequence number, the order of the queue.
        arrival_time_s: clock reading.
        max_tokens: most new tokens, clamped to the context.
        seed: of its random numbers.
        end_token_ids: ids that end it: EOS unless ignored, and its stop tokens.

    Attributes:
        status: see `RequestStatus`.
        finish_reason: None until it has ended.
        stop_reason: the stop string or stop token that ended it, or what went wrong.
        row: its row in the device tables, None when it has none.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache at first admission.
        first_token_time_s: clock reading, None before.
    """

    __slots__ = (
        "_num_tokens", "_tokens", "arrival", "arrival_time_s", "end_token_ids", "finish_reason",
        "first_token_time_s", "max_tokens", "num_cached_tokens", "num_prompt_tokens", "request_id", "row",
        "sampling_params", "seed", "status", "stop_reason",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Int32Array,
        sampling_params: SamplingParams,
        *,
        arrival: int = 0,
        arrival_time_s: float = 0.0,
        max_tokens: int = 16,
        seed: int = 0,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.arrival = arrival
        self.arrival_time_s = arrival_time_s
        self.max_tokens = max_tokens
        self.seed = seed
        self.end_token_ids = tuple(end_token_ids)
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.row: int | None = None
        self.num_cached_tokens: int | None = None
        self.first_token_time_s: float | None = None
        self.num_prompt_tokens = len(prompt_token_ids)
        self._num_tokens = len(prompt_token_ids)
        self._tokens = np.asarray(prompt_token_ids, np.int32)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that the host knows."""
        return self._num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows."""
        return self._num_tokens - self.num_prompt_tokens

    @property
    def token_ids(self) -> Int32Array:
        """``[num_tokens]`` int32, prompt and output: a view."""
        return self._tokens[: self._num_tokens]

    @property
    def prompt_token_ids(self) -> Int32Array:
        """``[num_prompt_tokens]`` int32: a view."""
        return self._tokens[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> Int32Array:
        """``[num_output_tokens]`` int32: a view."""
        return self._tokens[self.num_prompt_tokens : self._num_tokens]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def append(self, token_id: int) -> None:
        """Add an output token. The buffer doubles when full, so that appending costs the same however long the text
        is."""
        if self._num_tokens == len(self._tokens):
            # At most doubled, never beyond the longest that it can become.
            size = min(max(2 * self._num_tokens, 64), self.num_prompt_tokens + self.max_tokens)
            tokens = np.empty(max(size, self._num_tokens + 1), np.int32)
            tokens[: self._num_tokens] = self._tokens
            self._tokens = tokens
        self._tokens[self._num_tokens] = token_id
        self._num_tokens += 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}/{self.max_tokens}, row={self.row})"
        )


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural logarithm, always finite), its rank (1: most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; ``cached_tokens`` of the prompt's came from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the engine's monotonic clock; None where it has not happened yet."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the ``n`` texts of a request, so far."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one prompt has brought so far. ``text``, ``token_ids``, ``finish_reason`` and ``logprobs`` are those of the
    first completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: tuple[Completion, ...]
    finished: bool
    usage: Usage
    timings: Timings
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended, or None."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Log-probabilities of the first completion's tokens, one entry a token, or None."""
        return self.outputs[0].logprobs


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """Log-probabilities of M tokens with their K most likely alternatives.

    Args:
        logprobs: ``[M]`` float32 of the tokens themselves.
        ranks: ``[M]`` int32, 1 for the most likely one.
        top_ids: ``[M, K]`` int32.
        top_logprobs: ``[M, K]`` float32, falling.
    """

    logprobs: Float32Array
    ranks: Int32Array
    top_ids: Int32Array
    top_logprobs: Float32Array

    def take(self, indices: Int32Array) -> LogprobColumns:
        """The entries at ``indices``."""
        return LogprobColumns(
            self.logprobs[indices], self.ranks[indices], self.top_ids[indices], self.top_logprobs[indices]
        )


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The end of one request, told exactly once."""

    request_id: str
    reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a step brought to its requests.

    Args:
        step_id: the step.
        time_s: clock reading when its result came.
        request_ids: requests that got a token, and
        token_ids: ``[len(request_ids)]`` int32, that token. An EOS or stop token is not among them.
        finished: requests that ended.
        logprobs: ``[len(request_ids)]`` columns, if any request of the step asked.
        prompt_logprobs: (request id, position in its prompt, columns of the tokens from there on).
    """

    step_id: int
    time_s: float
    request_ids: tuple[str, ...]
    token_ids: Int32Array
    finished: tuple[FinishedRequest, ...]
    logprobs: LogprobColumns | None = None
    prompt_logprobs: tuple[tuple[str, int, LogprobColumns], ...] = ()
