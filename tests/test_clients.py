"""`Client`: every request has one end, whatever its caller does. Here with engines in threads of this process."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import (
    ENGINE,
    GREEDY,
    Loop,
    ask,
    check_equal_to_offline,
    completions,
    echo,
    idle,
    read,
    read_some,
    until,
    write_template,
)

from minisgl import SamplingParams
from minisgl.backend import load, start_client, tokenizer_of
from minisgl.launch import TINY
from minisgl.request import StepOutput, Usage
from minisgl.server import clients
from minisgl.server.client import Delta, EngineDied, GenerateRequest, ModelInfo, RequestRefused, Update
from minisgl.server.clients import MOST_PARTS, Client, ThreadLink, merge
from minisgl.server.config import ServerConfig
from minisgl.server.echo import EchoEngine
from minisgl.utils import as_token_ids

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def slow(loop: Loop) -> Iterator[Client]:
    """An echo of 200 tokens a second."""
    client = loop.run(start_client(ENGINE, echo(in_process=True, echo_rate=200)))
    yield client
    loop.run(client.close())


@pytest.fixture(scope="module")
def tiny(loop: Loop) -> Iterator[Client]:
    client = loop.run(start_client(ENGINE, ServerConfig(in_process=True)))
    yield client
    loop.run(client.close())


def worker_of(client: Client) -> Any:
    link = client._link
    assert isinstance(link, ThreadLink) and link.worker is not None
    return link.worker


# ------------------------------------------------------------------------------------------------ answers


def test_an_echo_answers_with_its_prompt(loop: Loop, slow: Client) -> None:
    [answer] = completions(loop.run(read(slow, ask("a", SamplingParams(), "Once upon a time"))))
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("Once upon a time", "stop", 4)
    [answer] = completions(loop.run(read(slow, ask("a", SamplingParams(max_tokens=3)))))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 3)
    three = completions(loop.run(read(slow, ask("a", SamplingParams(max_tokens=3, n=3)))))
    assert [(c.index, c.text) for c in three] == [(i, answer.text) for i in range(3)]
    [answer] = completions(loop.run(read(slow, ask("a", SamplingParams(stop="up")))))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("Once ", "stop", "up")


def test_a_stop_string_ends_the_request_in_the_engine_too(loop: Loop, slow: Client) -> None:
    """S12: at once, not when all tokens are there."""

    async def scenario() -> None:
        before = (await slow.stats()).output_tokens
        [answer] = completions(await read(slow, ask("a", SamplingParams(max_tokens=400, ignore_eos=True, stop="time"))))
        assert (answer.text, answer.stop_reason, len(answer.token_ids)) == ("Once upon a ", "time", 4)
        await idle(slow)
        assert (await slow.stats()).output_tokens - before < 20

    loop.run(scenario())


def test_tokens_and_texts(loop: Loop, tiny: Client) -> None:
    ids = loop.run(tiny.tokenize(ask("t", text="Once upon a time")))
    assert loop.run(tiny.detokenize(ids)) == "Once upon a time"
    chat = loop.run(tiny.tokenize(ask("t", messages=[{"role": "user", "content": "hi"}])))
    assert chat[-1:] == loop.run(tiny.tokenize(ask("t", messages=[{"role": "user", "content": "hi there"}])))[-1:]
    assert tiny.info.name == "tiny" and tiny.info.max_model_len == 512 and tiny.info.has_chat_template


def test_a_huge_max_tokens_is_the_rest_of_the_context(loop: Loop, tiny: Client) -> None:
    """V04."""
    params = SamplingParams(temperature=0, max_tokens=10**30, min_tokens=3, top_k=10**20, ignore_eos=True)
    [answer] = completions(loop.run(read(tiny, ask("a", params, token_ids=[5] * 500))))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 12)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (ask("a", text=""), "the prompt is empty"),  # V03
        (ask("a", token_ids=[]), "the prompt is empty"),
        (ask("a", token_ids=[5] * 513), "513 tokens.*511.*512"),  # V01
        (ask("a", token_ids=[5] * 5000), "5000 tokens.*511.*512"),
        (ask("a", text="x" * 10**6), "far too long: more than 512 tokens"),
        (ask("a", messages=[{"role": "user", "content": "x" * 10**6}]), "far too long: more than 512 tokens"),
        (ask("a", token_ids=[4096]), "4096 is outside the vocabulary 0..4095"),
        (ask("a", token_ids=[-1]), "-1 is outside"),
        (ask("a", token_ids=[2**70]), "cannot be sent"),
        (ask("a", SamplingParams(logit_bias={99999: 1})), "99999 is outside the vocabulary"),  # V06
        (ask("a", text="half a pair \ud83d"), "surrogates|cannot be sent"),
        (ask("a", messages=[]), "at least one message"),
        (ask("a", messages=[{"role": "user", "content": "x", "more": object()}]), "cannot be sent"),
        (GenerateRequest("a", GREEDY), "one prompt"),
        (GenerateRequest("a", GREEDY, text="x", token_ids=[1]), "one prompt"),
    ],
)
def test_bad_requests_are_refused_and_harm_nobody(
    loop: Loop, tiny: Client, request_: GenerateRequest, complaint: str
) -> None:
    """V01, V03, V06."""

    async def both() -> None:
        other = asyncio.create_task(read(tiny, ask("other")))
        with pytest.raises(RequestRefused, match=complaint):
            await read(tiny, request_)
        assert len(completions(await other)[0].token_ids) == 8

    loop.run(both())
    loop.run(idle(tiny))


def test_to_count_tokens_is_bounded_too(loop: Loop, tiny: Client) -> None:
    """One text of megabytes would hold up the worker, and with it everybody."""
    with pytest.raises(RequestRefused, match="far too long: more than 512 tokens"):
        loop.run(tiny.tokenize(ask("a", text="x" * 10**6)))
    assert len(loop.run(tiny.tokenize(ask("a", text="word " * 600)))) > 600  # beyond the context it may be
    assert len(worker_of(tiny)) == 0


def test_a_template_that_raises_is_its_requests_error_alone(loop: Loop, tmp_path: Path) -> None:
    """V12."""
    template = write_template(
        tmp_path, "{{ raise_exception('two in a row') if messages|length > 1 else messages[0].content }}"
    )

    async def scenario() -> None:
        client = await start_client(ENGINE, echo(in_process=True, chat_template=template))
        one = [{"role": "user", "content": "Once upon a time"}]
        with pytest.raises(RequestRefused, match=r"^the chat template raised: two in a row$"):
            await read(client, ask("a", SamplingParams(), messages=one * 2))
        assert completions(await read(client, ask("a", SamplingParams(), messages=one)))[0].text == "Once upon a time"
        await client.close()

    loop.run(scenario())


def test_a_model_without_a_template_says_so(loop: Loop) -> None:
    """V13."""

    def without_template() -> Any:
        tokenizer = tokenizer_of(ServerConfig(), TINY)
        tokenizer._hf.chat_template = None
        return EchoEngine(ModelInfo("echo", 64, 4096, True)), tokenizer

    async def scenario() -> None:
        client = Client(ThreadLink(without_template))
        await client.start()
        assert not client.info.has_chat_template
        with pytest.raises(RequestRefused, match=r"no chat template.*/v1/completions"):
            await read(client, ask("a", messages=[{"role": "user", "content": "hi"}]))
        assert completions(await read(client, ask("a", text="hi")))
        await client.close()

    loop.run(scenario())


def test_the_engine_may_refuse_what_the_worker_let_pass(loop: Loop, slow: Client) -> None:
    for params in (SamplingParams(logprobs=1), SamplingParams(logprobs=1, n=3)):
        with pytest.raises(RequestRefused, match="log-probabilities"):
            loop.run(read(slow, ask("a", params)))
    loop.run(idle(slow))
    assert len(worker_of(slow)) == 0


def test_an_id_in_use_is_refused(loop: Loop, slow: Client) -> None:
    async def scenario() -> None:
        first = slow.generate(ask("same", LONG))
        await anext(first)
        with pytest.raises(RequestRefused, match="in use"):
            await read(slow, ask("same"))
        await first.aclose()
        await idle(slow)
        assert await read(slow, ask("same"))

    loop.run(scenario())


# ------------------------------------------------------------------------------------------------ leaving


@pytest.mark.parametrize("num_updates", [0, 1, 2, 5])
def test_closing_the_iterator_ends_the_request(loop: Loop, tiny: Client, num_updates: int) -> None:
    """A01, A02, A05, A07, A08: before it is sent, before its first token, and later."""

    async def scenario() -> None:
        await read_some(tiny, ask("a", LONG), num_updates)
        await idle(tiny, 1.0)

    loop.run(scenario())
    assert len(worker_of(tiny)) == 0


def test_a_cancelled_reader_ends_the_request(loop: Loop, slow: Client) -> None:
    """A08."""

    async def scenario() -> None:
        for wait_s in (0.0, 0.001, 0.02):
            reader = asyncio.create_task(read(slow, ask("a", LONG)))
            await asyncio.sleep(wait_s)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await idle(slow, 1.0)

    loop.run(scenario())
    assert len(worker_of(slow)) == 0


def test_an_iterator_that_is_dropped_ends_the_request(loop: Loop, slow: Client) -> None:
    """A08."""

    async def scenario() -> None:
        updates = slow.generate(ask("a", LONG))
        await anext(updates)
        del updates
        await idle(slow, 1.0)

    loop.run(scenario())


def test_abort_by_id(loop: Loop, tiny: Client) -> None:
    """A05: each is a no-op or a clean end."""

    async def scenario() -> None:
        assert not await tiny.abort("nobody")
        reader = asyncio.create_task(read(tiny, ask("a", SamplingParams(max_tokens=400, n=2, ignore_eos=True))))
        await until(lambda: running(tiny, 2))
        assert await tiny.abort("a")
        answers = completions(await reader)
        assert [c.finish_reason for c in answers] == ["abort", "abort"]
        assert all(len(c.token_ids) < 400 for c in answers)
        assert not await tiny.abort("a")
        await idle(tiny, 1.0)

    loop.run(scenario())
    assert len(worker_of(tiny)) == 0


async def running(client: Client, count: int) -> bool:
    return (await client.stats()).num_running == count


def test_overlapping_requests_that_come_and_go_leave_nothing(loop: Loop, tiny: Client) -> None:
    """S16, A03, A07: 120 requests in random order, a third of which leave early. The engine checks itself each step."""
    chance = random.Random(1)

    async def one(number: int) -> str | None:
        await asyncio.sleep(chance.random() / 4)
        if number % 3 == 0:
            how = chance.randrange(3)
            params = SamplingParams(max_tokens=60, n=1 + number % 2, ignore_eos=True)
            if how == 0:
                await read_some(tiny, ask(f"r{number}", params), chance.randrange(6))
                return None
            reader = asyncio.create_task(read(tiny, ask(f"r{number}", params)))
            await asyncio.sleep(chance.random() / 4)
            if how == 1:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            else:
                await tiny.abort(f"r{number}")
                await reader
            return None
        return completions(await read(tiny, ask(f"r{number}")))[0].text

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*(one(number) for number in range(120)))

    texts = loop.run(all_of_them())
    assert len({text for text in texts if text is not None}) == 1
    loop.run(idle(tiny))
    assert len(worker_of(tiny)) == 0
    assert tiny.failure is None


# ------------------------------------------------------------------------------------------------ slow readers


def test_a_reader_that_is_behind_gets_one_merged_update(loop: Loop, slow: Client) -> None:
    """S17: what waits for it is bounded, and others do not wait."""

    async def scenario() -> None:
        updates = slow.generate(ask("a", SamplingParams(max_tokens=100, ignore_eos=True)))
        first = await anext(updates)
        entry, most = slow._entries["a"], 0
        while slow._entries:
            most = max(most, len(entry.news))
            await asyncio.sleep(0.001)
        [other] = completions(await read(slow, ask("b")))
        assert len(other.token_ids) == 8
        second = await anext(updates)
        with pytest.raises(StopAsyncIteration):
            await anext(updates)
        [answer] = completions([first, second])
        assert len(answer.token_ids) == 100 and second.timings is not None and second.usage.completion_tokens == 100
        assert 20 < most <= MOST_PARTS + 1

    loop.run(scenario())


def test_a_front_that_is_behind_gets_joined_news(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """S17: the worker stops telling, and what it then tells is everything."""
    monkeypatch.setattr(clients, "WINDOW", 4)

    async def scenario() -> None:
        client = await start_client(ENGINE, echo(in_process=True))
        link: Any = client._link
        reader = asyncio.create_task(read(client, ask("a", LONG)))
        while "a" not in client._entries:
            await asyncio.sleep(0)
        before = link._num_sent
        blocked_until = asyncio.get_running_loop().time() + 0.5
        while asyncio.get_running_loop().time() < blocked_until:
            pass  # the loop of the front stands still
        assert link._num_sent - before <= 4
        updates = await reader
        assert len(updates) <= 10 and len(completions(updates)[0].token_ids) == 400
        await client.close()

    loop.run(scenario())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.booleans()), min_size=1, max_size=30), st.data())
def test_merging_in_any_grouping_is_the_same(parts: list[tuple[int, str, bool]], data: st.DataObject) -> None:
    updates = [
        Update("a", (Delta(index, text, (i,), finish_reason="stop" if end else None),), Usage(1, 0, i))
        for i, (index, text, end) in enumerate(parts)
    ]
    cut = data.draw(st.integers(0, len(updates)))
    halves = [merge(half) for half in (updates[:cut], updates[cut:]) if half]
    whole = merge(updates)
    assert merge(halves) == whole
    for delta in whole.deltas:
        mine = [d for u in updates for d in u.deltas if d.index == delta.index]
        assert delta.text == "".join(d.text for d in mine)
        assert delta.token_ids == tuple(t for d in mine for t in d.token_ids)


# ------------------------------------------------------------------------------------------------ failures


class Broken(EchoEngine):
    """An echo that breaks after so many steps; each request repeats a wrong token from ``wrong_after`` on."""

    def __init__(self, *, num_good_steps: int = 10**9, wrong_after: int = 10**9) -> None:
        super().__init__(ModelInfo("broken", 512, 4096, True))
        self._num_good_steps, self._wrong_after = num_good_steps, wrong_after

    def step(self) -> StepOutput:
        output = super().step()
        if output.step_id > self._num_good_steps:
            raise RuntimeError("the device is on fire")
        if output.step_id > self._wrong_after:
            return StepOutput(
                output.step_id, output.time_s, output.request_ids, np.zeros_like(output.token_ids), output.finished
            )
        return output


def test_an_engine_that_fails_ends_all_requests(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        client = Client(ThreadLink(lambda: (Broken(num_good_steps=60), tokenizer_of(ServerConfig(), TINY))))
        await client.start()
        assert client.not_ready is None and client.failure is None
        readers = [asyncio.create_task(read(client, ask(f"r{i}", LONG))) for i in range(5)]
        call = asyncio.create_task(client.wait_failure())
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDied] * 5 and "on fire" in str(ends[0])
        assert "on fire" in await call and "on fire" in str(client.failure) and client.not_ready == client.failure
        for late in (read(client, ask("late")), client.stats(), client.tokenize(ask("late"))):
            with pytest.raises(EngineDied, match="on fire"):
                await late
        assert not await client.abort("r0")
        await client.close()
        await client.close()

    loop.run(scenario())


def test_an_engine_that_gives_other_tokens_than_it_did_does_not_start(loop: Loop) -> None:
    async def scenario() -> None:
        client = Client(ThreadLink(lambda: (Broken(wrong_after=8), tokenizer_of(ServerConfig(), TINY))))
        with pytest.raises(EngineDied, match="a known prompt brought"):
            await client.start()

    loop.run(scenario())


def test_an_engine_that_cannot_be_loaded_says_why(loop: Loop) -> None:
    async def scenario() -> None:
        config = ServerConfig(in_process=True)
        with pytest.raises(EngineDied, match="does not fit into the pool") as error:
            await start_client(ENGINE.__class__(device="cpu", num_pages=2, max_model_len=100), config)
        assert "\n" not in str(error.value)

    loop.run(scenario())


def test_closing_ends_what_runs(loop: Loop) -> None:
    async def scenario() -> None:
        client = await start_client(ENGINE, echo(in_process=True, echo_rate=100))
        reader = asyncio.create_task(read(client, ask("a", LONG)))
        await until(lambda: running(client, 1))
        await client.close()
        with pytest.raises(EngineDied, match="ended"):
            await reader

    loop.run(scenario())


def test_prompts_are_logged_only_if_asked(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(log_prompts: bool) -> None:
        client = await start_client(ENGINE, echo(in_process=True, log_prompts=log_prompts))
        await read(client, ask("req-17", SamplingParams(), "a secret fox"))
        await client.close()

    for log_prompts in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="minisgl"):
            loop.run(scenario(log_prompts))
        values = [record.values for record in caplog.records if hasattr(record, "values")]
        mine = [v for v in values if v.get("request_id") == "req-17"]
        assert [len(mine), mine[-1]["reasons"]] == [2, "stop"]
        assert ("secret" in str(values) + caplog.text) == log_prompts


# ------------------------------------------------------------------------------------------------ the echo


def test_the_echo_keeps_its_pace() -> None:
    now, naps = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        naps.append(seconds)
        now += seconds

    engine = EchoEngine(ModelInfo("echo", 64, 99, True), rate=10, clock=lambda: now, sleep=sleep)
    engine.add("a", as_token_ids([1, 2, 3]), SamplingParams(ignore_eos=True, max_tokens=30))
    times = [engine.step().time_s for _ in range(5)]
    assert np.allclose(np.diff(times), 0.1)
    now += 10  # it was idle: no burst to catch up
    times = [engine.step().time_s for _ in range(3)]
    assert np.allclose(np.diff(times), 0.1)


def test_the_echo_ends_as_an_engine_does() -> None:
    engine = EchoEngine(ModelInfo("echo", 6, 99, True))
    engine.add("stop", as_token_ids([1, 2, 3]), SamplingParams(stop_token_ids=[2]))
    engine.add("room", as_token_ids([1, 2, 3]), SamplingParams(ignore_eos=True))
    engine.add("left", as_token_ids([1, 2, 3]), SamplingParams())
    with pytest.raises(ValueError, match="in use"):
        engine.add("left", as_token_ids([1]), SamplingParams())
    assert engine.abort("left", reason="abort") is not None and engine.abort("left") is None
    ends, tokens = [], dict[str, list[int]]()
    while engine.has_work:
        output = engine.step()
        ends += [(f.request_id, f.reason, f.stop_reason, f.usage.completion_tokens) for f in output.finished]
        for request_id, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            tokens.setdefault(request_id, []).append(token)
    assert ends == [("stop", "stop", 2, 1), ("room", "length", None, 3)]
    assert tokens == {"stop": [1], "room": [1, 2, 3]}


# ------------------------------------------------------------------------------------------------ the same answers


def test_answers_within_one_process_are_those_of_the_library(loop: Loop, tiny: Client) -> None:
    check_equal_to_offline(loop, tiny, overlap=True)


def test_what_runs_is_what_was_asked_for() -> None:
    engine = load(ENGINE, echo(echo_rate=3.0, served_model_name="parrot"), TINY)
    assert engine.info == ModelInfo("parrot", 512, 4096, True)


def test_the_live_state_accounts_for_every_page(loop: Loop, tiny: Client) -> None:
    async def scenario() -> None:
        updates = tiny.generate(ask("a", SamplingParams(max_tokens=300, ignore_eos=True, n=2), "Once upon a time " * 8))
        while not (update := await anext(updates)).deltas:
            pass
        stats = await tiny.stats(detail=True)
        detail = stats.detail
        assert [r["id"] for r in detail["running"]] == ["a/0", "a/1"] and not detail["waiting"]
        assert all(r["num_prompt_tokens"] == update.usage.prompt_tokens for r in detail["running"])
        shown = [p for r in detail["running"] for p in r["pages"][r["num_shared_pages"] :]]
        shown += [p for node in detail["tree"] for p in node["pages"]] + detail["in_transit"]
        assert len(shown) == len(set(shown)) == stats.num_pages - stats.num_free_pages
        await updates.aclose()

    loop.run(scenario())
