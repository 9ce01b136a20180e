"""What the tests of clients and processes share: an event loop of their own, and how to read an answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from minisgl import LLM
from minisgl.config import EngineConfig
from minisgl.request import Completion, RequestOutput, SamplingParams
from minisgl.server.client import GenerateRequest, Update
from minisgl.server.clients import Client, merge
from minisgl.server.config import ServerConfig

T = TypeVar("T")
ENGINE = EngineConfig(model="tiny", device="cpu", num_pages=400, max_model_len=512, seed=0, strict=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Loop:
    """An event loop in a thread, so that several tests can share a client, which belongs to one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
        """The result of ``work``; `TimeoutError` if it takes too long."""

        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await work

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result(timeout_s + 5)

    def close(self) -> None:
        """Nothing may run any more."""

        async def leftovers() -> set[Any]:
            return asyncio.all_tasks() - {asyncio.current_task()}

        try:
            assert not self.run(leftovers())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()


def ask(request_id: str, params: SamplingParams = GREEDY, text: str | None = "Once upon a time", **fields: Any) -> Any:
    """A request."""
    prompt = {} if "token_ids" in fields or "messages" in fields else {"text": text}
    return GenerateRequest(request_id, params, **prompt, **fields)


async def read(client: Client, request: GenerateRequest, *, pause_s: float = 0.0) -> list[Update]:
    """All updates of a request; exactly the last has timings."""
    updates = []
    async for update in client.generate(request):
        updates.append(update)
        if pause_s:
            await asyncio.sleep(pause_s)
    assert [u.timings is not None for u in updates] == [False] * (len(updates) - 1) + [True]
    assert updates[0].prompt_token_ids is not None and all(u.prompt_token_ids is None for u in updates[1:])
    return updates


async def read_some(client: Client, request: GenerateRequest, num_updates: int) -> None:
    """Read some updates and leave."""
    async with aclosing(client.generate(request)) as updates:
        while num_updates:
            await anext(updates)
            num_updates -= 1


def completions(updates: list[Update]) -> list[Completion]:
    """The answer that the updates make up, as `LLM.generate` would give it."""
    for index in {d.index for u in updates for d in u.deltas}:
        ends = [d.finish_reason for u in updates for d in u.deltas if d.index == index and d.finish_reason]
        assert len(ends) == 1, f"completion {index} ended {len(ends)} times"
    return [
        Completion(
            d.index, d.text, list(d.token_ids), d.finish_reason, d.stop_reason,
            None if d.logprobs is None else list(d.logprobs),
        )
        for d in merge(updates).deltas
    ]  # fmt: skip


async def until(is_so: Callable[[], Coroutine[Any, Any, bool]], timeout_s: float = 5.0) -> None:
    """Wait until it is so; `TimeoutError` if it does not become so."""
    async with asyncio.timeout(timeout_s):
        while not await is_so():
            await asyncio.sleep(0.02)


async def idle(client: Client, timeout_s: float = 5.0) -> None:
    """Wait until nothing runs and all pages are free or only cached, which they must be soon after the last request."""

    async def is_idle() -> bool:
        stats = await client.stats()
        return (stats.num_running, stats.num_waiting, len(client)) == (0, 0, 0) and (
            stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        )

    await until(is_idle, timeout_s)


def echo(**options: Any) -> ServerConfig:
    """A server without a model."""
    return ServerConfig(echo=True, **options)


def write_template(folder: Path, text: str) -> str:
    """A file with a chat template."""
    (folder / "template.jinja").write_text(text)
    return str(folder / "template.jinja")


CASES = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=1, seed=7, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=8, max_tokens=30, n=3),
    SamplingParams(temperature=1, seed=9, max_tokens=15, logprobs=3, prompt_logprobs=2, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=["the", "and"]),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=["a"], include_stop_str_in_output=True, n=2),
    SamplingParams(temperature=0, max_tokens=5, min_tokens=5, logit_bias={5: 3.5}, frequency_penalty=0.5, logprobs=0),
]
PROMPTS = ["Once upon a time", "The little dog was", "One day, a girl named Lily " * 8]


PAIRS = [(prompt, params) for params in CASES for prompt in PROMPTS]


@cache
def offline(overlap: bool) -> list[RequestOutput]:
    """What the library answers to `PAIRS`."""
    with LLM(**{f.name: getattr(ENGINE, f.name) for f in fields(ENGINE)} | {"overlap": overlap}) as llm:
        return llm.generate([prompt for prompt, _ in PAIRS], [params for _, params in PAIRS], use_tqdm=False)


def check_equal_to_offline(loop: Loop, client: Client, *, overlap: bool) -> None:
    """Answers of ``client`` are those of the library, with the same loop."""

    async def online() -> list[list[Update]]:
        return await asyncio.gather(
            *(read(client, ask(f"r{i}", params, prompt)) for i, (prompt, params) in enumerate(PAIRS))
        )

    answers = loop.run(online())
    for expected, updates in zip(offline(overlap), answers, strict=True):
        for a, b in zip(expected.outputs, completions(updates), strict=True):
            assert (a.index, a.text, a.token_ids) == (b.index, b.text, b.token_ids)
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
            check_logprobs(a.logprobs, b.logprobs)
        merged = merge(updates)
        assert list(merged.prompt_token_ids or ()) == expected.prompt_token_ids
        assert merged.usage.completion_tokens == expected.usage.completion_tokens
        check_logprobs(expected.prompt_logprobs, merged.prompt_logprobs)
    loop.run(idle(client))


def check_logprobs(expected: Any, found: Any) -> None:
    """The same tokens with the same log-probabilities, up to the rounding of another batch."""
    assert (expected is None) == (found is None)
    for a, b in zip(expected or (), found or (), strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert next(iter(a)) == next(iter(b))  # the token itself
        for token_id in a.keys() & b.keys():
            assert a[token_id].logprob == pytest.approx(b[token_id].logprob, abs=1e-3)
            assert a[token_id].decoded_token == b[token_id].decoded_token
