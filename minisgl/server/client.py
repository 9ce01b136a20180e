"""`EngineClient`: what the HTTP front needs of an engine, wherever that runs.

Chapter 1 tells this module's story. Behind the protocol there is an engine in this process, one behind sockets, or an
echo that needs no model: the front cannot tell. It speaks of texts and answers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from minisgl.request import FinishReason, Logprob, SamplingParams, Timings, Usage


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt on its way in; exactly one of the three is given.

    Args:
        request_id: unique among the requests that have not ended.
        params: how to sample; ``n`` completions come of it.
        text: a prompt to encode.
        token_ids: a prompt that is encoded already.
        messages: a conversation for the model's chat template,
        tools: with tools that the template is told of.
    """

    request_id: str
    params: SamplingParams
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one completion has gained since its last delta. Made for the wire, as `Update` is: there are very many.

    Args:
        index: which of the ``n`` completions.
        text: new text, never taken back.
        token_ids: new tokens.
        logprobs: an entry for each of them, if asked for.
        finish_reason: set in the last delta of the completion,
        stop_reason: with the stop string or token id that ended it, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Update(msgspec.Struct, frozen=True, array_like=True):
    """News of one request. Deltas of a slow reader are merged, so there is one a completion at most.

    Args:
        request_id: of the `GenerateRequest`.
        deltas: what is new.
        usage: so far; final in the last update.
        prompt_token_ids: in the first update, what the prompt was encoded to; else None.
        prompt_logprobs: in the update that completes them, one entry a prompt token (None for the first); else None.
        timings: in the last update; else None. That there are timings means that this update is the last.
    """

    request_id: str
    deltas: tuple[Delta, ...]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the front tells clients about the model."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state at one moment, for metrics, readiness and the live page.

    Args:
        num_running, num_waiting: requests.
        num_pages, num_free_pages, num_cached_pages: of the pool; cached ones are free to be evicted.
        num_steps, num_preemptions: since the start.
        num_failed_checks: integrity checks that failed, since the start; an engine that is not strict goes on.
        prompt_tokens, cached_tokens, output_tokens: since the start.
        heartbeat_age_s: seconds since the engine's loop last turned.
        detail: printable running batch, page map and radix tree, if they were asked for; else empty.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_failed_checks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    heartbeat_age_s: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


class RequestRefused(ValueError):
    """The request cannot be served as it is: its sender's mistake. Nothing was computed."""


class EngineDied(RuntimeError):
    """The engine, or a process on the way to it, is gone: no fault of the request."""


class EngineClient(Protocol):
    """An engine as the front sees it. All methods belong to one event loop."""

    @property
    def info(self) -> ModelInfo:
        """The model."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine is gone for good, or None."""
        ...

    @property
    def not_ready(self) -> str | None:
        """Why requests had better go elsewhere now, or None: what `failure` says, or the engine is starting, its loop
        has not turned for long, or its answer to a known prompt was not the known one."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        """Answer a request. The first update comes once it is accepted, the last one has ``timings``.

        Closing the iterator early, in whatever way, aborts the request: its rows and pages come free.

        Raises:
            RequestRefused: from the first ``anext``, with what is wrong and what is allowed.
            EngineDied: at any time.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request; its iterator ends with finish reason "abort". False if there is none of that id."""
        ...

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids. Raises as `generate` does."""
        ...

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of ids. Raises as `generate` does."""
        ...

    async def flush_cache(self) -> int:
        """Forget cached prefixes that nobody uses; returns how many pages that freed."""
        ...

    async def stats(self, *, detail: bool = False) -> EngineStats:
        """The engine's state now."""
        ...

    async def close(self) -> None:
        """End what runs and give everything back. A second call does nothing."""
        ...
