"""``python -m minisgl serve --model tiny`` as people run it: the rows V, S, A and O of the fault list, over HTTP.

`test_http` and `test_processes` show the parts; here everything is really started, nothing is reached into, and what is
left behind is asked of ``/metrics``. Each server must also end in good order (`started`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fuzz_serve import Flight
from started import CHAT, COMPLETIONS, Started, events, join, params_of, started, whole

from minisgl import LLM, SamplingParams
from minisgl.benchmark.load import Ask, run_load
from minisgl.checkpoint import TINY
from minisgl.request import Completion
from minisgl.server.tokenizer import load_tokenizer

ONCE = "Once upon a time"
ENGINE: dict[str, Any] = {"device": "cpu", "num_pages": 400, "max_model_len": 512, "chunk_size": 64, "strict": True}
OPTIONS = ("--model", "tiny", "--device", "cpu", "--num-pages", "400", "--max-model-len", "512", "--chunk-size", "64",
           "--strict")  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Iterator[Started]:
    with started(*OPTIONS, "--admin-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Started]:
    with started(*OPTIONS, "--no-overlap") as server:
        yield server


@pytest.fixture(params=["tiny", "plain"])
def each_loop(request: pytest.FixtureRequest) -> Started:
    """A server of the overlapped loop, and one of the plain loop."""
    server: Started = request.getfixturevalue(request.param)
    return server


def greedy(prompt: Any = ONCE, max_tokens: int = 8, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **options}


# ------------------------------------------------------------------------------------------------ the same answers

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20},
    {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "stop": ["the", " and"]},
    {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "stop": "a", "include_stop_str_in_output": True, "n": 2},
    {"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 8, "max_tokens": 24, "n": 3},
    {"temperature": 1.0, "seed": 9, "max_tokens": 12, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0, "max_tokens": 9, "min_tokens": 5, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 1.0, "seed": 3, "max_tokens": 8, "logit_bias": {"5": 3.5, "7": -100}, "logprobs": 0},
    {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "allowed_token_ids": [40, 41, 42], "stop_token_ids": [43]},
]
PROMPTS: list[Any] = [
    ONCE, "One day, a girl named Lily " * 20, [300, 301, 302], [{"role": "user", "content": "Tell me of a fox."}]
]  # fmt: skip
BODIES = [
    {"messages" if isinstance(prompt[0], dict) else "prompt": prompt, **params}
    for i, params in enumerate(PARAMS)
    for prompt in (PROMPTS[i % 4], PROMPTS[(i + 1 + i // 4) % 4])
]


def as_asked(body: dict[str, Any]) -> dict[str, Any]:
    """Chats ask for log-probabilities by two fields."""
    if "messages" in body and "logprobs" in body:
        return {**body, "logprobs": True, "top_logprobs": body["logprobs"]}
    return body


@cache
def offline(overlap: bool) -> list[tuple[list[Completion], Any]]:
    """What the library answers to `BODIES`."""
    answers = []
    with LLM("tiny", overlap=overlap, **ENGINE) as llm:
        for body in map(as_asked, BODIES):
            answer, prompt = (llm.chat, body["messages"]) if "messages" in body else (llm.generate, body["prompt"])
            (output,) = answer(prompt, params_of(body), use_tqdm=False)
            answers.append((list(output.outputs), output.usage))
    return answers


def check(found: dict[str, Any], expected: tuple[list[Completion], Any]) -> None:
    """An answer over HTTP is one of the library, up to the rounding of log-probabilities in another batch."""
    completions, usage = expected
    assert [(c["text"], c["reason"]) for c in found["choices"]] == [(c.text, c.finish_reason) for c in completions]
    assert found["usage"]["prompt_tokens"] == usage.prompt_tokens
    assert found["usage"]["completion_tokens"] == usage.completion_tokens
    for choice, completion in zip(found["choices"], completions, strict=True):
        assert bool(choice["logprobs"]) == (completion.logprobs is not None)
        if completion.logprobs is None:
            continue
        own = [entry[token] for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        if "content" in choice["logprobs"]:
            values = [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
        else:
            values = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True))
        assert [value[0] for value in values] == [each.decoded_token for each in own]
        assert [value[1] for value in values] == pytest.approx([each.logprob for each in own], abs=1e-3)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    path = CHAT if "messages" in body else COMPLETIONS
    if not stream:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return whole(answer.json())
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return join(events([line async for line in answer.aiter_lines()]))


@pytest.mark.parametrize("at_once", [1, 100])
def test_answers_are_those_of_the_library(each_loop: Started, plain: Started, at_once: int) -> None:
    """S01, S02, S03, S04, S12, S18, S19, V10: with the same seed and options, streamed and not, alone and among a
    hundred, with both loops: text, reasons, usage, log-probabilities."""
    server = each_loop
    expected = offline(server is not plain)
    numbers = range(len(BODIES)) if at_once == 1 else [i % len(BODIES) for i in range(6 * len(BODIES))]

    async def all_of_them() -> None:
        # Clients of their own connections, so that there are as many as are said to be.
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

            async def one(place: int, i: int) -> None:
                for stream in (False, True) if at_once == 1 else ((place // len(BODIES)) % 2 == 0,):
                    check(await ask(client, as_asked(BODIES[i]), stream), expected[i])

            gate = asyncio.Semaphore(at_once)

            async def bounded(place: int, i: int) -> None:
                async with gate:
                    await one(place, i)

            await asyncio.gather(*(bounded(place, i) for place, i in enumerate(numbers)))

    asyncio.run(all_of_them())
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_exactly_max_tokens_alone_and_among_others(each_loop: Started, count: int, stream: bool) -> None:
    """S03, V04."""

    async def go() -> None:
        async with httpx.AsyncClient(base_url=each_loop.url, timeout=60) as client:
            alone = await ask(client, greedy(max_tokens=count), stream)
            others = [asyncio.create_task(ask(client, greedy(max_tokens=12, n=2), stream)) for _ in range(4)]
            among = await ask(client, greedy(max_tokens=count), stream)
            await asyncio.gather(*others)
            assert alone["choices"] == among["choices"] and alone["choices"][0]["reason"] == "length"
            assert alone["usage"]["completion_tokens"] == among["usage"]["completion_tokens"] == count

    asyncio.run(go())


def test_a_stop_string_ends_the_work_too(each_loop: Started) -> None:
    """S12: cut before it, whether it comes within a token or over several; and the engine computes no further."""
    text = each_loop.post(greedy(max_tokens=40)).json()["choices"][0]["text"]
    before = each_loop.metrics()["output_tokens_total"]
    for stop in (text[7:9], text[11:18], [text[20:23], text[11:18], "never"]):
        first = min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
        answer = each_loop.post(greedy(max_tokens=480, stop=stop)).json()
        assert answer["choices"][0]["text"] == text[:first] and answer["choices"][0]["finish_reason"] == "stop"
    each_loop.wait_idle()
    assert each_loop.metrics()["output_tokens_total"] - before < 3 * 40


def test_special_tokens_are_not_text(tiny: Started) -> None:
    """S13."""
    body = greedy(max_tokens=3, allowed_token_ids=[1])
    texts = [tiny.post({**body, **more}).json()["choices"][0]["text"] for more in ({}, {"skip_special_tokens": False})]
    assert texts == ["", "<|im_start|>" * 3]


def test_logprobs_are_numbers_whatever_is_masked(tiny: Started) -> None:
    """S19: one entry a token, the chosen one among them, and the prompt's with echo."""
    for asked in (0, 1, 5, 20):
        body = greedy(max_tokens=4, top_k=1, allowed_token_ids=[40, 41], logprobs=asked, echo=True)
        answer = tiny.post(body)
        assert answer.status_code == 200, answer.text
        columns = answer.json()["choices"][0]["logprobs"]
        num_prompt = answer.json()["usage"]["prompt_tokens"]
        assert {len(column) for column in columns.values()} == {num_prompt + 4}
        assert columns["token_logprobs"][0] is None and all(-1e38 < p <= 0 for p in columns["token_logprobs"][1:])
        assert "".join(columns["tokens"]) == answer.json()["choices"][0]["text"]
    chat = tiny.post({"messages": PROMPTS[3], "max_tokens": 3, "logprobs": True, "top_logprobs": 20, "temperature": 0})
    assert all(len(entry["top_logprobs"]) == 20 for entry in chat.json()["choices"][0]["logprobs"]["content"])


# ------------------------------------------------------------------------------------------------ what is refused

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("V01", {"prompt": [5] * 513}, "513 512"), ("V01", {"prompt": [5] * 5000}, "5000 512"),
    ("V01", {"prompt": "the fox " * 2000}, "512"), ("V03", {"prompt": ""}, "prompt"), ("V03", {"prompt": []}, "prompt"),
    ("V04", {"max_tokens": -1}, "max_tokens"), ("V04", {"max_tokens": 0}, "max_tokens"),
    ("V04", {"max_tokens": "5"}, "max_tokens"), ("V06", {"logit_bias": {"99999999": 5}}, "99999999"),
    ("V06", {"logit_bias": {"abc": 1}}, "logit_bias"), ("V06", {"stop_token_ids": [4096]}, "4096"),
    ("V07", {"prompt": {"a": 1}}, "prompt"), ("V07", {"messages": []}, "messages"),
    ("V07", {"messages": [{"role": "king", "content": "x"}]}, "king"), ("V07", {"messages": [5]}, "messages"),
    ("V09", {"stop": [str(i) for i in range(17)]}, "16"), ("V10", {"best_of": 3}, "best_of"),
    ("V10", {"suffix": "x"}, "suffix"), ("V10", {"response_format": {"type": "json_object"}}, "response_format"),
    ("V10", {"use_beam_search": True}, "use_beam_search"),
    ("V10", {"messages": PROMPTS[3], "tool_choice": "required"}, "tool_choice"),
    ("V11", {"temperature": -1}, "temperature"), ("V11", {"top_p": 7}, "top_p"), ("V11", {"top_p": 0}, "top_p"),
    ("V11", {"top_k": -5}, "top_k"), ("V11", {"min_p": 1.5}, "min_p"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_at_once_and_harms_nobody(tiny: Started, stream: bool) -> None:
    """V01, V03, V04, V06, V07, V09, V10, V11: 400 within a second, in OpenAI's form, with what is allowed; what is
    being answered meanwhile is answered."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(tiny.post, greedy(max_tokens=150))
        for row, bad, words in REFUSED:
            start = {"messages": PROMPTS[3]} if "messages" in bad else {"prompt": ONCE}
            start_s = time.monotonic()
            answer = tiny.post({**start, "max_tokens": 4, "stream": stream, **bad})
            assert answer.status_code == 400 and time.monotonic() - start_s < 1, (row, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, row
            assert all(word in error["message"] for word in words.split()), (row, error)
        assert other.result().json()["usage"]["completion_tokens"] == 150
    tiny.wait_idle()


def test_bodies_that_are_none(tiny: Started) -> None:
    """V07, V11: never 500, and never a stack."""
    for path in (COMPLETIONS, CHAT):
        for content in (b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"prompt": "a", "temperature": NaN}'):
            answer = tiny.client.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and answer.json()["error"]["message"], content


def test_defaults_and_other_names(tiny: Started) -> None:
    """V04, V09, V14."""
    context = {"temperature": 0, "ignore_eos": True, "prompt": [5] * 500}
    for huge in ({"max_tokens": 10**12}, {"max_tokens": None}, {}):
        assert tiny.post({**context, **huge}).json()["usage"]["completion_tokens"] == 12
    chat = {"messages": PROMPTS[3], "ignore_eos": True}
    assert tiny.post({**chat, "max_completion_tokens": 5}).json()["usage"]["completion_tokens"] == 5
    assert tiny.post(greedy(stop=[])).json()["usage"]["completion_tokens"] == 8
    for body in (greedy(model="zzz"), {**chat, "model": "zzz"}):
        answer = tiny.post(body)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert tiny.client.get("/v1/models").json()["data"][0]["id"] == "tiny"


# ------------------------------------------------------------------------------------------------ clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_rows_and_pages_within_a_second(each_loop: Started, stream: bool) -> None:
    """A01, A02."""

    def leave(number: int) -> None:
        body = greedy(f"{number} {ONCE}", 490, stream=stream)
        try:
            with httpx.stream(
                "POST", each_loop.url + COMPLETIONS, json=body, timeout=0.3 if not stream else 20
            ) as answer:
                lines = answer.iter_lines()
                for _ in range(6):
                    next(lines)
        except httpx.TimeoutException:
            assert not stream

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(8)))
    each_loop.wait_idle(1.0)


def test_who_leaves_between_chunks_of_a_prompt(each_loop: Started) -> None:
    """A03, A04: 450 tokens take seven steps here; the client leaves in any of them, or after it was never heard."""
    chance = random.Random(4)

    def leave(number: int) -> None:
        body = json.dumps(greedy([300 + number] * 450, 20, stream=number % 2 == 0)).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", int(each_loop.url.rpartition(":")[2]))) as sock:
            sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(chance.random() * 0.25)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(leave, range(40)))
    each_loop.wait_idle(2.0)
    assert each_loop.post(greedy()).status_code == 200


def test_aborts_in_every_state(tiny: Started) -> None:
    """A05, A07: of one that runs, twice, of one that has ended, of one that never was."""

    def abort(answer_id: str) -> bool:
        answer = httpx.post(tiny.admin_url + "/abort", json={"request_id": answer_id}, timeout=20)
        return bool(answer.json()["aborted"])

    assert not abort("nobody")
    with tiny.client.stream("POST", COMPLETIONS, json=greedy(max_tokens=490, n=2, stream=True)) as answer:
        lines = answer.iter_lines()
        answer_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert abort(answer_id)
        abort(answer_id)  # it may have ended by now
        rest = events(lines)
        reasons = [c["finish_reason"] for chunk in rest for c in chunk["choices"] if c["finish_reason"]]
        assert reasons == ["abort", "abort"]
    assert not abort(answer_id)
    tiny.wait_idle(1.0)


def test_a_client_that_is_killed(tiny: Started) -> None:
    """A08."""
    code = f"import httpx, sys; r = httpx.post({tiny.url + COMPLETIONS!r}, json={greedy(max_tokens=490, n=3)!r})"
    client = subprocess.Popen([sys.executable, "-c", code])
    tiny.wait(lambda: tiny.metrics()["requests_running"] == 3, 20)
    client.kill()
    client.wait()
    tiny.wait_idle(1.0)


def test_many_short_requests_leave_nothing(tiny: Started) -> None:
    """S16, A07, O10: no process grows with what it has answered, and no request of hundreds at once is lost."""

    def batch(count: int) -> dict[str, float]:
        samples = run_load(tiny.url, [Ask(0.0, greedy(f"{i} times", 2)) for i in range(count)])
        assert {(s.error, s.output_tokens) for s in samples} == {(None, 2)}
        tiny.wait_idle()
        return tiny.rss_mib()

    # How many run at once is chance, and more than ever before need more memory once. A leak comes each time.
    sizes = [batch(300)]
    while len(sizes) < 20:
        sizes.append(batch(300))
        if all(after - before < 1 for before, after in zip(*(size.values() for size in sizes[-2:]), strict=True)):
            return
    raise AssertionError(f"each time somebody has grown: {sizes}")


def test_metrics_tell_what_was_done(tiny: Started) -> None:
    """O12."""
    before = tiny.metrics()
    tiny.post(greedy("a prompt of its own, long enough for a page or two of sixteen tokens, or even three", 7))
    tiny.post(greedy("a prompt of its own, long enough for a page or two of sixteen tokens, or even three", 7))
    gained = {name: value - before[name] for name, value in tiny.metrics().items()}
    assert gained["output_tokens_total"] == 14 and gained["first_token_seconds_count"] == 2
    assert gained["request_seconds_count"] == 2 and 0 < gained["request_seconds_sum"] < 10
    assert 16 <= gained["cached_tokens_total"] < gained["prompt_tokens_total"] and gained["steps_total"] >= 14
    assert before["up"] == 1 and 0 < tiny.metrics()["prefix_hit_ratio"] < 1


# ------------------------------------------------------------------------------------------------ another folder

BOS, FAMILY = 1, "👩‍👩‍👧‍👦 你好 naïve ไทย سلام"
RAISING = (
    "{{ bos_token }}{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('two in a row') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Started, Path]]:
    """An echo whose tokenizer begins every text with BOS and whose template writes it too, and may raise."""
    folder = tmp_path_factory.mktemp("odd") / "model"
    shutil.copytree(TINY, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    piece = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [BOS], "tokens": ["<|im_start|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|im_start|>"}))
    (folder / "chat_template.jinja").write_text(RAISING)
    with started("--model", str(folder), "--echo", "--max-model-len", "1000000", "--reader-timeout-s", "1",
                 "--max-waiting", "50") as server:  # fmt: skip
        yield server, folder


def test_one_bos_however_the_prompt_comes(odd: tuple[Started, Path]) -> None:
    """S14."""
    server, _ = odd
    for body in (
        {"prompt": "a fox"},
        {"prompt": "<|im_start|>a fox"},
        {"messages": [{"role": "user", "content": "a fox"}]},
    ):
        ids = server.client.post("/tokenize", json=body).json()["tokens"]
        assert ids[0] == BOS and ids.count(BOS) == 1


def test_a_template_that_raises_is_one_request_s_error(odd: tuple[Started, Path]) -> None:
    """V12."""
    server, _ = odd
    turn = {"role": "user", "content": "a fox"}
    for stream in (False, True):
        answer = server.post({"messages": [turn, turn], "stream": stream})
        assert answer.status_code == 400 and "two in a row" in answer.json()["error"]["message"]
    assert server.post({"messages": [turn]}).json()["choices"][0]["message"]["content"] == "a fox"


@pytest.mark.parametrize("text", [FAMILY, "سلام" * 5])
def test_letters_over_several_tokens(odd: tuple[Started, Path], text: str) -> None:
    """S06, S08: whatever the length, the stream is the text of all tokens: every whole letter, and U+FFFD for a broken
    one only at the end."""
    server, folder = odd
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert len(ids) > len(text), "its letters are not spread over tokens"
    for count in range(1, len(ids) + 1):
        body = {"prompt": text, "max_tokens": count, "stream": True}
        with server.client.stream("POST", COMPLETIONS, json=body) as answer:
            chunks = events(answer.iter_lines())
        streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert streamed == tokenizer.decode(ids[:count])
        assert text.startswith(streamed.rstrip("�")) and "�" not in streamed.rstrip("�")
    assert streamed == text == server.post({"prompt": text}).json()["choices"][0]["text"]


def test_a_reader_that_never_reads_is_cut_off_and_others_are_not(odd: tuple[Started, Path]) -> None:
    """S17: what waits for it is bounded, and it for its patience."""
    server, _ = odd
    body = json.dumps({"prompt": "the fox " * 50, "max_tokens": 900_000, "ignore_eos": True, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    before = server.rss_mib()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        server.wait(lambda: server.metrics()["requests_running"] == 1)
        for _ in range(4):
            assert server.post({"prompt": ONCE}).json()["choices"][0]["text"] == ONCE
        server.wait(lambda: server.metrics()["requests_running"] == 0, 20)
        grown = server.rss_mib()
        assert all(grown[role] - before[role] < 60 for role in grown), (before, grown)
    server.wait_idle()


def test_a_flood_is_refused_beyond_the_bound(odd: tuple[Started, Path]) -> None:
    """O10: 429 with when to come back; who was accepted is answered."""
    server, _ = odd
    samples = run_load(server.url, [Ask(0.0, {"prompt": "the fox " * 1000, "max_tokens": 3})] * 400)
    errors = [sample.error for sample in samples]
    assert set(errors) == {None, "status 429"} and errors.count(None) >= 50
    server.wait_idle()
    assert server.post({"prompt": ONCE}).status_code == 200


# ------------------------------------------------------------------------------------------------ frozen and killed

SITE = """
import sys
if any("'engine'" in argument for argument in sys.orig_argv):
    from minisgl.scheduler import Scheduler
    def check(self):
        raise AssertionError("a page is in no state")
    Scheduler.check = check
"""


@pytest.fixture
def plain_folder(tmp_path: Path) -> tuple[Path, str]:
    """A model without a chat template, of which one more token is an EOS, by its generation_config alone; and the
    greedy answer that this token ends."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").unlink()
    with LLM("tiny", device="cpu", num_pages=40, max_model_len=64) as llm:
        (output,) = llm.generate(ONCE, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
        end = next(i for i, token in enumerate(output.token_ids) if i >= 4 and token not in output.token_ids[:i])
        text = llm.tokenizer.decode(output.token_ids[:end])
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"].append(output.token_ids[end])
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder, text


def test_a_life_with_every_trouble(plain_folder: tuple[Path, str], tmp_path: Path) -> None:
    """V13, S11, O13, then O08, then O05 and O07: a model of another kind whose accounting is broken, an engine that is
    frozen and thaws, and is killed."""
    folder, text = plain_folder
    (tmp_path / "sitecustomize.py").write_text(SITE)
    options = ("--model", str(folder), "--device", "cpu", "--num-pages", "100", "--max-model-len", "512",
               "--heartbeat-s", "1")  # fmt: skip
    server = Started(*options, environment={"PYTHONPATH": str(tmp_path)})
    try:
        answer = server.post({"messages": PROMPTS[3]})
        assert answer.status_code == 400 and COMPLETIONS in answer.json()["error"]["message"]  # V13
        (choice,) = server.post({"prompt": ONCE, "temperature": 0, "max_tokens": 50}).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")  # S11
        server.wait(lambda: "integrity check failed" in server.log)  # O13: it is told, and the engine lives
        assert server.metrics()["failed_checks_total"] >= 1

        os.kill(server.pids["engine"], signal.SIGSTOP)
        server.wait(lambda: server.client.get("/ready").status_code == 503)
        assert server.client.get("/health").status_code == 200
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(httpx.post, server.url + COMPLETIONS, json=greedy(max_tokens=3), timeout=20)
            assert server.metrics()["heartbeat_age_seconds"] > 1
            os.kill(server.pids["engine"], signal.SIGCONT)
            assert late.result().json()["usage"]["completion_tokens"] == 3
        server.wait(lambda: server.client.get("/ready").status_code == 200)

        pids = list(server.pids.values())
        ends: list[tuple[float, Any]] = []

        def wait_for_end(stream: bool) -> None:
            body = greedy(max_tokens=490, stream=stream)
            answer = httpx.post(server.url + COMPLETIONS, json=body, timeout=20)
            ends.append((time.monotonic(), answer.text))

        threads = [threading.Thread(target=wait_for_end, args=(stream,)) for stream in (False, True, True)]
        for thread in threads:
            thread.start()
        server.wait(lambda: server.metrics()["requests_running"] == 3)
        os.kill(server.pids["engine"], signal.SIGKILL)
        killed_s = time.monotonic()
        for thread in threads:
            thread.join()
        assert all(end_s - killed_s < 2 and "SIGKILL" in said for end_s, said in ends), ends
        with_probe = httpx.get(server.url + "/ready", timeout=5)
        assert with_probe.status_code == 503 and "SIGKILL" in with_probe.json()["status"]
        code, log = server.end(10)
        assert code == 1 and log.splitlines()[-1] == "minisgl: the engine process was killed by SIGKILL"
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        server.close()


def test_a_start_that_fails_in_a_child_is_one_line() -> None:
    """V15, O06."""
    options = ("--port", "0", "--num-pages", "2", "--max-model-len", "100")
    command = [sys.executable, "-m", "minisgl", "serve", "--model", "tiny", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "level=info" not in line]
    assert len(lines) == 1 and "does not fit into the pool" in lines[0], done.stderr


def test_sigterm_lets_a_real_answer_end() -> None:
    """O07, A08: and a start again at once, on the same port, works."""
    server = Started("--model", "tiny", "--device", "cpu", "--num-pages", "100", "--max-model-len", "512")
    port = server.url.rpartition(":")[2]
    try:
        with server.client.stream("POST", COMPLETIONS, json=greedy(max_tokens=100, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert events(lines)[-1]["choices"][0]["finish_reason"] == "length"
        code, log = server.end(10)
        assert code == 0 and "Traceback" not in log, log
    finally:
        server.close()
    with started("--echo", "--port", port) as again:
        assert again.url.endswith(port)


def test_a_trace_of_requests_that_overlap_and_leave(tmp_path: Path) -> None:
    """A03, A04, A07, S16: a short flight of the fuzzer; `fuzz_serve` tells what is asked after each round."""
    flight = Flight(5, tmp_path)
    flight.fly(1)
    assert flight.num_left >= 5 and flight.num_aborted >= 1
