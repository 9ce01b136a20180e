"""The library's door: what `LLM` promises to whoever calls it, on a tiny random model, with both loops.

The tokens themselves are test_parity.py's business; here it is what happens around them: order, ends, cancelling,
threads, Ctrl-C, errors, and that nothing is left behind. Every test that uses ``llm`` ends with an idle, empty engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Checkpoint

from minisgl import LLM, RequestOutput, SamplingParams
from minisgl.checkpoint import TINY
from minisgl.config import EngineConfig, ModelConfig
from minisgl.launch import MAX_GRAPH_REQUESTS, find_max_graph_requests, load_engine, size_pool
from minisgl.utils import ceil_div

NUM_PAGES, MAX_MODEL_LEN = 300, 128


@pytest.fixture(scope="session")
def folder(checkpoint_of: Callable[[str], Checkpoint]) -> Path:
    return checkpoint_of("qwen3").folder


@pytest.fixture(scope="session")
def prompts(checkpoint_of: Callable[[str], Checkpoint]) -> list[list[int]]:
    return checkpoint_of("qwen3").prompts


@pytest.fixture(scope="session")
def open_llm(folder: Path) -> Callable[..., LLM]:
    """`LLM` of the tiny model with small pages, checked after every step."""
    options = dict(page_size=4, num_pages=NUM_PAGES, max_model_len=MAX_MODEL_LEN, strict=True, device="cpu")
    return lambda **changes: LLM(str(folder), **{**options, **changes})


@pytest.fixture(scope="module", params=["plain", "overlap"])
def shared_llm(open_llm: Callable[..., LLM], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(overlap=request.param == "overlap") as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert_idle(shared_llm)
    shared_llm.engine.kv.flush()


def assert_idle(llm: LLM) -> None:
    """Nobody runs or waits, all pages are free or the cache's, and no text is kept."""
    engine = llm.engine
    assert not engine.has_work and not engine.scheduler.requests and engine.failure is None
    assert engine.kv.num_available_pages == engine.kv.num_pages - 1
    assert not len(llm._assembler) and not llm._assembler._parents and not llm._watches and not llm._cancelled
    engine.scheduler.check()


def greedy(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **changes})


def sampled(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    return greedy(max_tokens, temperature=1.0, **changes)


def ask(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@contextlib.contextmanager
def counted_steps(llm: LLM) -> Iterator[list[int]]:
    """The number of steps that the block launches, known when it ends."""
    count, forward = [0], llm.engine.runner.forward

    def counting(plan: Any) -> Any:
        count[0] += 1
        return forward(plan)

    llm.engine.runner.forward = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        del llm.engine.runner.forward


# ---------------------------------------------------------------------------------------------------- what comes back


def test_an_answer_in_full(llm: LLM) -> None:
    before = llm.engine.now()
    output = llm.generate("Once upon a time", greedy(6, logprobs=2, prompt_logprobs=1))[0]
    assert output.prompt == "Once upon a time" and output.finished
    assert output.prompt_token_ids == llm.tokenizer.encode("Once upon a time").tolist()
    assert output.text == llm.tokenizer.decode(output.token_ids) == output.outputs[0].text
    assert (output.finish_reason, output.outputs[0].stop_reason, output.outputs[0].index) == ("length", None, 0)
    usage, times = output.usage, output.timings
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(output.prompt_token_ids), 6)
    assert before <= times.arrival_s < times.first_token_s < times.finished_s <= llm.engine.now()
    assert len(output.logprobs) == 6 and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token_id and entry[token_id].rank == 1
        assert entry[token_id].decoded_token == llm.tokenizer.decode([token_id])
        assert all(math.isfinite(item.logprob) and item.logprob <= 0 for item in entry.values())


def test_one_prompt_or_many_text_or_ids(llm: LLM, prompts: list[list[int]]) -> None:
    text = "Once upon a time"
    ids = llm.tokenizer.encode(text)
    one = ask(llm, text, greedy())
    for same in (ids.tolist(), ids, [text], (ids,), [ids.tolist()]):
        assert ids_of(ask(llm, same, greedy())) == ids_of(one)
    mixed = ask(llm, [prompts[0], text, np.array(prompts[1], np.int64)], greedy())
    assert [o.prompt for o in mixed] == [None, text, None]
    assert mixed[1].token_ids == one[0].token_ids
    assert len(ask(llm, text)[0].token_ids) > 0  # default parameters


def test_L05_ten_thousand_prompts_keep_their_order(open_llm: Callable[..., LLM]) -> None:
    """More than any step takes, of 1 to 50 tokens, each with its own parameters: all answered, in order."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(0.3, 10_000), 50)
    lengths[::500] = 50
    prompts = [[i % 4096, i // 4096, *rng.integers(0, 4096, n)][:n] for i, n in enumerate(lengths.tolist())]
    params = [greedy(1 + i % 2) for i in range(len(prompts))]
    with open_llm(strict=False, page_size=16, num_pages=4096) as llm:
        outputs = ask(llm, prompts, params)
        assert [o.prompt_token_ids for o in outputs] == [list(map(int, prompt)) for prompt in prompts]
        assert [len(o.token_ids) for o in outputs] == [p.max_tokens for p in params]
        some = range(0, 10_000, 333)
        assert ids_of(ask(llm, [prompts[i] for i in some], greedy(1))) == [outputs[i].token_ids[:1] for i in some]
        assert_idle(llm)


def test_each_prompt_has_its_own_parameters(llm: LLM, prompts: list[list[int]]) -> None:
    """S03: exactly ``max_tokens`` in both loops, alone and among others; P01: greedy stays greedy."""
    params = [greedy(n) if n % 2 else greedy(n, top_p=0.5, top_k=40, seed=n) for n in (1, 2, 3, 5, 8, 13)]
    whole = ids_of(ask(llm, prompts[:6], greedy(13)))
    outputs = ask(llm, prompts[:6], params)
    assert ids_of(outputs) == [ids[: p.max_tokens] for ids, p in zip(whole, params, strict=True)]
    assert [o.finish_reason for o in outputs] == ["length"] * 6
    for prompt, p, ids in zip(prompts, params, whole, strict=False):
        assert ids_of(ask(llm, prompt, p)) == [ids[: p.max_tokens]]


def test_nothing_of_the_callers_is_changed(llm: LLM, prompts: list[list[int]]) -> None:
    stop, bias = ["zzz"], {5: 1.0}
    params = [sampled(4, stop=stop, logit_bias=bias, n=2, seed=1), greedy(3)]
    mine = [list(prompts[0]), list(prompts[1])]
    copies = [dataclasses.asdict(p) for p in params], [list(prompt) for prompt in mine], list(params)
    first = ask(llm, mine, params)
    assert ([dataclasses.asdict(p) for p in params], mine, params) == copies
    stop[0], bias[5] = "e", -100.0  # ... nor are the engine's when the caller changes what it gave
    assert ids_of(ask(llm, mine, params)) == ids_of(first)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params[0].max_tokens = 9  # type: ignore[misc]
    first[0].token_ids.clear()
    assert first[1].token_ids and ask(llm, mine, params)[0].token_ids


def test_usage_tells_what_came_from_the_cache(llm: LLM, prompts: list[list[int]]) -> None:
    """The second time all but the last token comes from the cache, a partly filled page included."""
    prompt = prompts[0]
    cached = [ask(llm, prompt, greedy(2))[0].usage.cached_tokens for _ in range(2)]
    assert cached == [0, len(prompt) - 1]
    longer = ask(llm, [*prompt, 7, 8, 9], greedy(2))[0].usage
    assert (longer.cached_tokens, longer.prompt_tokens) == (len(prompt), len(prompt) + 3)


def test_cache_salt_separates_tenants(llm: LLM, prompts: list[list[int]]) -> None:
    used = [ask(llm, prompts[0], greedy(1, cache_salt=salt))[0].usage.cached_tokens for salt in ("a", "b", None) * 2]
    assert used == [0, 0, 0] + [len(prompts[0]) - 1] * 3


def test_short_work_prints_no_progress(llm: LLM, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(prompts, greedy(2))
    assert capsys.readouterr() == ("", "")


def test_chat_is_generate_behind_the_template(llm: LLM) -> None:
    """L04."""
    talks = [[{"role": "user", "content": text}] for text in ("Hello!", "What is 2 + 3?")]
    both = llm.chat(talks, [greedy(4), greedy(6)], use_tqdm=False)
    assert [len(o.token_ids) for o in both] == [4, 6]
    for talk, output in zip(talks, both, strict=True):
        assert output.prompt == llm.tokenizer.render_chat(talk)
        ids = llm.tokenizer.encode_chat(talk)
        assert output.prompt_token_ids == ids.tolist()
        assert output.token_ids == ask(llm, ids, greedy(6))[0].token_ids[: len(output.token_ids)]
    assert ids_of(llm.chat(talks[0], greedy(4), tools=[{"type": "function"}])) == [both[0].token_ids]
    assert llm.chat([], use_tqdm=False) == []


# ----------------------------------------------------------------------------------------------------------- checking

TOO_LONG = [1] * MAX_MODEL_LEN
BAD_PROMPTS: list[Any] = [
    "", [], [4096], [-1], [2**40], [1.5], ["a"], [1, [2]], [True], [[1]], TOO_LONG, None, 7, {"a": 1}, "\ud83d",
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_PROMPTS, ids=lambda bad: "too long" if bad is TOO_LONG else repr(bad))
def test_L03_a_bad_prompt_stops_all_before_any_work(llm: LLM, prompts: list[list[int]], bad: Any) -> None:
    with counted_steps(llm) as steps, pytest.raises(ValueError):
        ask(llm, [prompts[0], bad], greedy())
    assert steps == [0] and not llm.engine.scheduler.requests


@pytest.mark.parametrize("bad", [None, 7, b"abc", {"a": 1}, [None], [True], [[]], [1, "a"], [1.5], ""], ids=repr)
def test_L03_bad_prompts_as_a_whole(llm: LLM, bad: Any) -> None:
    with pytest.raises(ValueError):
        ask(llm, bad, greedy())


def test_L03_one_parameter_set_or_one_for_each(llm: LLM, prompts: list[list[int]]) -> None:
    assert ask(llm, [], greedy()) == [] == ask(llm, [], [])
    for params in ([greedy()] * 2, [greedy()] * 4, [], [greedy(), greedy(), None], 5, {"n": 1}, "abc"):
        with counted_steps(llm) as steps, pytest.raises(ValueError, match="one for each of the 3 prompts"):
            ask(llm, prompts[:3], params)
        assert steps == [0]


def test_C09_too_long_is_refused_with_both_numbers_and_the_rest_goes_on(llm: LLM, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"128 tokens.*127.*max_model_len 128"):
        ask(llm, TOO_LONG)
    longest = ask(llm, [TOO_LONG[1:], prompts[0]], greedy(5))
    assert [len(o.token_ids) for o in longest] == [1, 5] and longest[0].finish_reason == "length"


def test_C09_the_pool_bounds_the_length(open_llm: Callable[..., LLM]) -> None:
    """Nothing that is let in can be larger than the pool, whose page 0 is reserved."""
    with pytest.raises(ValueError, match=r"max_model_len 64 .* 48 tokens \(3 pages of 16\)"):
        open_llm(page_size=16, num_pages=4, max_model_len=64)
    with open_llm(page_size=16, num_pages=4, max_model_len=None) as llm:
        with pytest.raises(ValueError, match=r"48 tokens.*47"):
            ask(llm, [1] * 48)
        outputs = ask(llm, [[1] * 40, [2] * 47, [3]], greedy(1000))
        assert [len(o.token_ids) for o in outputs] == [8, 1, 47]
        assert_idle(llm)


@pytest.mark.parametrize(
    "bad",
    [
        dict(max_tokens=0), dict(max_tokens=-1), dict(max_tokens="5"), dict(max_tokens=1.5), dict(max_tokens=True),
        dict(temperature=-1.0), dict(temperature=math.nan), dict(temperature=math.inf), dict(temperature="1"),
        dict(top_p=7), dict(top_p=0), dict(top_p=math.nan), dict(top_k=-5), dict(top_k=1.5), dict(min_p=2.0),
        dict(n=0), dict(seed=-1), dict(logprobs=21), dict(prompt_logprobs=-1), dict(min_tokens=-1), dict(stop=[""]),
        dict(logit_bias={"abc": 1}), dict(logit_bias={5: 101}), dict(logit_bias={-1: 1}), dict(stop=["x"] * 17),
        dict(max_tokens=3, min_tokens=4), dict(stop_token_ids=[-1]), dict(allowed_token_ids=[]), dict(priority="a"),
        dict(ignore_eos=1), dict(cache_salt=5), dict(repetition_penalty=0), dict(presence_penalty=3),
        dict(stop=5), dict(stop_token_ids=5), dict(allowed_token_ids=5), dict(logit_bias=[5]),
        dict(logit_bias={1.5: 1}), dict(stop="\ud83d"), dict(cache_salt="\ud83d"), dict(stop_token_ids=""),
        dict(stop=np.array("x")), dict(stop_token_ids=np.array(5)), dict(top_p=np.float32(7)),
    ],
    ids=repr,
)  # fmt: skip
def test_V04_V06_V11_bad_parameters(bad: dict[str, Any]) -> None:
    """The message names the parameter, so that whoever made a hundred knows which."""
    with pytest.raises(ValueError, match=list(bad)[-1]):
        SamplingParams(**bad)


def test_V06_ids_outside_the_vocabulary(llm: LLM, prompts: list[list[int]]) -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=0)  # type: ignore[call-arg]
    for bad in (dict(logit_bias={99999999: 5}), dict(stop_token_ids=[4096]), dict(allowed_token_ids=[1, 4096])):
        with counted_steps(llm) as steps:
            for call in (partial(ask, llm), llm.stream, llm.async_generate):
                with pytest.raises(ValueError, match=rf"{next(iter(bad))}.*0\.\.4095"):
                    call(prompts[0], greedy(2, **bad))
            with pytest.raises(ValueError):
                ask(llm, prompts[:2], [greedy(), greedy(2, **bad)])
        assert steps == [0]


def test_V04_max_tokens_one_huge_and_none(llm: LLM, prompts: list[list[int]]) -> None:
    room = MAX_MODEL_LEN - len(prompts[0])
    lengths = [len(ask(llm, prompts[0], greedy(n))[0].token_ids) for n in (1, 2, 10**12, None)]
    assert lengths == [1, 2, room, room]


@pytest.mark.parametrize(
    "bad",
    [
        dict(page_size=0), dict(num_pages=1), dict(max_running=0), dict(order="fifo"), dict(dtype="int8"),
        dict(device="tpu"), dict(device="cuda:99"), dict(attention="none"), dict(tp=2), dict(chunk_size=0),
        dict(device=None), dict(attention=5), dict(record=1), dict(record=True), dict(num_pages=2**31 - 1),
        dict(num_pages=10**400), dict(max_model_len=10**30), dict(memory_fraction=1.5), dict(max_model_len=100_000),
        dict(max_num_batched_tokens=0), dict(overlap="yes"),
    ],
    ids=repr,
)  # fmt: skip
def test_bad_engine_options(open_llm: Callable[..., LLM], bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        open_llm(**bad)


def test_numbers_may_be_numpys(open_llm: Callable[..., LLM], prompts: list[list[int]], tmp_path: Path) -> None:
    """They are Python's inside, so that a flight record and JSON can hold them."""
    params = SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(3), seed=np.int32(7), logprobs=np.int64(1),
        stop_token_ids=np.array([5, 6]), logit_bias={np.int64(5): np.float32(1)}, ignore_eos=np.bool_(True),
        stop=np.array(["a", "b"]),
    )  # fmt: skip
    assert json.loads(json.dumps(dataclasses.asdict(params)))["temperature"] == 0.5
    with open_llm(page_size=np.int64(4), memory_fraction=np.float32(0.5), record=str(tmp_path / "flight")) as llm:
        assert len(ask(llm, prompts[0], params)[0].token_ids) == 3


@pytest.mark.parametrize("bad", [None, 5, "Hello", {}, {"role": "user", "content": "Hello"}, [5]], ids=repr)
def test_V07_bad_messages(llm: LLM, bad: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        llm.chat(bad)


def test_unknown_options_and_models(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="page_sise"):
        open_llm(page_sise=4)
    for model in (str(tmp_path), tmp_path):
        with pytest.raises(ValueError, match=r"config\.json"):
            LLM(model)
    for bad in (None, 5, b"tiny"):
        with pytest.raises(ValueError, match=f"model must be a string, got {bad!r}"):
            LLM(bad)


def test_engines_load_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measures what is free on the device meanwhile."""
    inside, together = [], []

    def load(*_: Any) -> None:
        inside.append(1)
        together.append(len(inside))
        time.sleep(0.01)
        inside.pop()

    monkeypatch.setattr("minisgl.launch._load", load)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load_engine, [EngineConfig(device="cpu")] * 4))
    assert together == [1] * 4


# ------------------------------------------------------------------------------------------------------------- streams


def test_a_stream_grows_to_the_whole(llm: LLM, prompts: list[list[int]]) -> None:
    """L04: every output is a snapshot that the next one continues; the last is what `generate` gives."""
    whole = ask(llm, prompts[0], greedy(9, logprobs=1))[0]
    parts = list(llm.stream(prompts[0], greedy(9, logprobs=1)))
    assert [len(part.token_ids) for part in parts] == list(range(1, 10))
    for part, later in itertools.pairwise(parts):
        assert later.text.startswith(part.text) and later.token_ids[: len(part.token_ids)] == part.token_ids
        assert not part.finished and part.finish_reason is None and len(part.logprobs) == len(part.token_ids)
    assert parts[-1].finished and parts[-1].finish_reason == "length"
    assert (parts[-1].text, parts[-1].token_ids) == (whole.text, whole.token_ids)


@pytest.mark.parametrize("num_taken", [0, 1, 3, 8, 9])
def test_a_stream_closed_early_gives_its_pages_back(llm: LLM, prompts: list[list[int]], num_taken: int) -> None:
    """A01, A03, A05: before the first token, in the middle, with its last output taken, and after its end. Twice."""
    stream = llm.stream(prompts[0], greedy(8))
    for _ in range(num_taken):
        next(stream, None)
    with counted_steps(llm) as steps:
        stream.close()
        stream.close()
    assert steps == [0], "it was computed to its end"
    assert_idle(llm)


def test_a_stream_left_by_an_error_or_a_break(llm: LLM, prompts: list[list[int]]) -> None:
    for _ in llm.stream(prompts[0], greedy(8)):
        break
    stream = llm.stream(prompts[1], greedy(8))
    next(stream)
    with pytest.raises(KeyError):
        stream.throw(KeyError("the caller's"))
    assert_idle(llm)


def test_streams_side_by_side(llm: LLM, prompts: list[list[int]]) -> None:
    """Whoever asks makes a step for all, and `generate` between two of them disturbs nobody."""
    whole = ids_of(ask(llm, prompts, greedy(8)))
    streams = [llm.stream(prompt, greedy(8)) for prompt in prompts[:4]]
    with counted_steps(llm) as steps:
        last = [next(stream) for stream in streams]
        assert ids_of(ask(llm, prompts[4:], greedy(8))) == whole[4:]
        streams.pop(0).close()
        while not all(output.finished for output in last[1:]):
            last[1:] = [next(stream, output) for stream, output in zip(streams, last[1:], strict=True)]
    assert ids_of(last[1:]) == whole[1:4]
    assert steps[0] < 30  # not 4 times 8, and 8
    for stream in streams:
        stream.close()


def test_a_stream_collected_in_the_middle_of_a_step(open_llm: Callable[..., LLM], prompts: list[list[int]]) -> None:
    """A08: the garbage collector closes a forgotten stream whenever it likes, also inside somebody's turn."""
    llm = open_llm()
    stream = llm.stream(prompts[0], greedy(20))
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    forward = llm.engine.runner.forward

    def collecting(plan: Any) -> Any:
        gc.collect()
        return forward(plan)

    gc.disable()
    try:
        del stream, cycle
        llm.engine.runner.forward = collecting  # type: ignore[method-assign]
        outputs = with_deadline(lambda: ask(llm, prompts[1], greedy(4)))
    finally:
        gc.enable()
    assert len(outputs[0].token_ids) == 4
    assert_idle(llm)
    llm.close()


def with_deadline(work: Callable[[], Any], seconds: float = 60) -> Any:
    """The result of ``work``, which runs in a thread of its own: a hang fails the test instead of hanging it."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def test_many_threads_at_once(llm: LLM, prompts: list[list[int]]) -> None:
    """Threads that generate and threads that stream share the steps; each gets its own answer."""
    whole = ids_of(ask(llm, prompts, greedy(12)))
    got: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        mine = [(i + k) % len(prompts) for k in range(3)]
        if i % 2:
            got[i] = ids_of(ask(llm, [prompts[k] for k in mine], greedy(12)))
        else:
            got[i] = [list(llm.stream(prompts[k], greedy(12)))[-1].token_ids for k in mine]

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {i: [whole[(i + k) % len(prompts)] for k in range(3)] for i in range(8)}


def test_many_asynchronous_answers_with_cancellation(llm: LLM, prompts: list[list[int]]) -> None:
    """More at once than there are threads to wait in; every third is cancelled, some at once, some on the way."""
    whole = ids_of(ask(llm, prompts, greedy(12)))

    async def one(i: int) -> list[int]:
        last: list[int] = []
        async for output in llm.async_generate(prompts[i % len(prompts)], greedy(12)):
            assert output.token_ids[: len(last)] == last
            last = output.token_ids
        return last

    async def everything() -> list[Any]:
        tasks = [asyncio.create_task(one(i)) for i in range(60)]
        for i, task in enumerate(tasks):
            if i % 3 == 0:
                await asyncio.sleep(0.001 * (i % 4))
                task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = with_deadline(lambda: asyncio.run(everything()))  # its end waits for the threads: none may spin
    for i, result in enumerate(results):
        if i % 3 or not isinstance(result, asyncio.CancelledError):
            assert result == whole[i % len(prompts)]
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) > 10


def test_an_asynchronous_answer_left_early(llm: LLM, prompts: list[list[int]]) -> None:
    async def leave() -> None:
        answer = llm.async_generate(prompts[0], greedy(30))
        async for output in answer:
            if len(output.token_ids) >= 2:
                break
        await answer.aclose()  # type: ignore[attr-defined]
        assert_idle(llm)

    with_deadline(lambda: asyncio.run(leave()))


def test_cancelled_while_its_thread_waits_for_a_first_token(
    open_llm: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    """A04: the thread that was sent to wait finds out that nobody waits any more."""

    async def leave(llm: LLM) -> None:
        answer = llm.async_generate(prompts[0] * 2, greedy(20))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(answer), 0.005)  # of a hundred steps
        while llm.engine.has_work:
            await asyncio.sleep(0.001)

    for overlap in (False, True):
        with open_llm(chunk_size=1, overlap=overlap) as llm:
            with counted_steps(llm) as steps:
                with_deadline(partial(asyncio.run, leave(llm)), 20)
            assert steps[0] < 90
            assert_idle(llm)


@pytest.mark.parametrize("state", ["queued", "between chunks", "decoding", "just ended", "unknown"])
@pytest.mark.parametrize("chunk", [4, 5, 7])
def test_A04_A05_abort_in_every_state(open_llm: Callable[..., LLM], state: str, chunk: int) -> None:
    """After any number of steps, also with the last chunk in flight, an abort frees everything once; a second one and
    one of an unknown id do nothing."""
    prompt = np.arange(20, dtype=np.int32)
    for num_steps in {"queued": [0], "between chunks": range(1, 7), "decoding": range(6, 12)}.get(state, [30]):
        with open_llm(chunk_size=chunk, max_model_len=40, num_pages=30) as llm:
            engine = llm.engine
            engine.add("a", prompt, greedy(9))
            for _ in range(num_steps):
                engine.step()
            ended = engine.abort("unknown" if state == "unknown" else "a")
            assert (ended is None) == (state in ("just ended", "unknown"))
            assert engine.abort("a") is None
            while engine.has_work:
                step = engine.step()
                assert step is None or not (step.finished or step.request_ids)
            assert_idle(llm)


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_waits_for_the_end_of_the_step(
    llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step, of taking a request in, of making text: nothing is torn, all is given back."""
    whole = ids_of(ask(llm, prompts, greedy(8)))
    places = (
        (llm.engine.runner, "sample"), (llm.engine.scheduler, "update"), (llm.engine, "add"),
        (llm._assembler, "process"), (llm._assembler, "output"),
    )  # fmt: skip
    for owner, name in places:
        original, calls = getattr(owner, name), itertools.count(1)

        def interrupted(*args: Any, original: Any = original, calls: Any = calls, **options: Any) -> Any:
            if next(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, prompts, greedy(8))
        monkeypatch.undo()
        assert_idle(llm)
        assert ids_of(ask(llm, prompts, greedy(8))) == whole
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_any_moment_leaves_a_usable_engine(llm: LLM, prompts: list[list[int]]) -> None:
    whole = ids_of(ask(llm, prompts, greedy(8)))
    rng, main = random.Random(3), threading.main_thread().ident
    num_interrupted = 0
    for turn in range(40):
        timer = threading.Timer(rng.random() * 0.06, signal.pthread_kill, (main, signal.SIGINT))
        try:
            timer.start()
            if turn % 2:
                for _ in range(100):
                    ask(llm, prompts, greedy(8))
            else:
                for _ in range(100):
                    list(llm.stream(prompts[0], greedy(8)))
        except KeyboardInterrupt:
            num_interrupted += 1
        timer.join()
        assert ids_of(ask(llm, prompts[:1], greedy(8))) == whole[:1]
        assert_idle(llm)
    assert num_interrupted == 40


def test_ctrl_c_goes_to_whoever_was_there_to_take_it(llm: LLM, prompts: list[list[int]]) -> None:
    """A program with a handler of its own, as asyncio's, gets the signal; one that ignores it goes on."""
    taken: list[int] = []
    sample, previous = llm.engine.runner.sample, signal.getsignal(signal.SIGINT)

    def interrupted(logits: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return sample(logits)

    llm.engine.runner.sample = interrupted  # type: ignore[method-assign]
    try:
        for handler in (lambda number, frame: taken.append(number), signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            assert len(ask(llm, prompts[0], greedy(3))[0].token_ids) == 3
    except KeyboardInterrupt:
        pytest.fail("nobody asked for KeyboardInterrupt")
    finally:
        signal.signal(signal.SIGINT, previous)
        del llm.engine.runner.sample
    assert 3 <= len(taken) <= 4 and set(taken) == {signal.SIGINT}


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_row_that_is_not_finite_ends_alone(llm: LLM, prompts: list[list[int]]) -> None:
    """The others go on as if nothing had been, and so does the same prompt later."""
    whole = ids_of(ask(llm, prompts[:4], greedy(8)))
    calls, model = itertools.count(), llm.engine.runner.model
    logits_of = model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        if next(calls) == 3:
            logits[1] = math.nan
        return logits

    model.logits = poisoned  # type: ignore[method-assign]
    try:
        outputs = ask(llm, prompts[:4], greedy(8))
    finally:
        del model.logits
    assert outputs[1].finish_reason == "abort" and "not finite" in outputs[1].outputs[0].stop_reason
    assert outputs[1].token_ids == whole[1][:3]
    assert [o.token_ids for i, o in enumerate(outputs) if i != 1] == [ids for i, ids in enumerate(whole) if i != 1]
    assert ids_of(ask(llm, prompts[:4], greedy(8))) == whole


def test_a_poisoned_page_harms_nobody_who_gets_it_next(open_llm: Callable[..., LLM], prompts: list[list[int]]) -> None:
    """NaN in the KV of a dead request stays in its pages, which others then fill only in part."""
    good = [[i for i in prompt if i != 77] for prompt in prompts]
    with open_llm(page_size=16, num_pages=18, max_model_len=64) as llm:
        whole = ids_of(ask(llm, good, greedy(8)))
        llm.engine.runner.model.model.embed_tokens.weight[77] = math.nan
        llm.engine.runner.model.logits = partial(without_column, llm.engine.runner.model.logits, 77)
        for _ in range(3):
            outputs = ask(llm, [[77, 5, 6] * 20, *good, [5, 77] * 15], greedy(8))
            assert ids_of(outputs[1:-1]) == whole
            assert [outputs[i].finish_reason for i in (0, -1)] == ["abort", "abort"]
        assert_idle(llm)


def without_column(logits_of: Callable[[torch.Tensor], torch.Tensor], column: int, hidden: Any) -> torch.Tensor:
    """The head is tied to the embedding: keep the poison out of it."""
    logits = logits_of(hidden)
    logits[:, column] = logits[:, column - 1] - 1e9
    return logits


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("half", ["forward", "sample"])
def test_a_failing_step_ends_everything_clearly(
    open_llm: Callable[..., LLM], prompts: list[list[int]], overlap: bool, half: str
) -> None:
    """E06: memory that runs out, or whatever it is. Whoever waits and whoever comes later gets an error; nobody hangs,
    and `close` works. (A server ends such a process, and says so: test_clients.py.)"""
    llm = open_llm(overlap=overlap)
    original, calls = getattr(llm.engine.runner, half), itertools.count()

    def failing(argument: Any) -> Any:
        if next(calls) == 4:
            raise torch.OutOfMemoryError("boom")
        return original(argument)

    setattr(llm.engine.runner, half, failing)
    stream = llm.stream(prompts[1], greedy(20))
    next(stream)
    with pytest.raises(RuntimeError, match="boom"):
        with_deadline(lambda: ask(llm, prompts[0], greedy(20)))

    async def asynchronous() -> None:
        async for _ in llm.async_generate(prompts[0], greedy(2)):
            pass

    later: list[Callable[[], Any]] = [
        lambda: ask(llm, prompts[0], greedy(2)), lambda: list(stream), lambda: next(llm.stream(prompts[0])),
        lambda: asyncio.run(asynchronous()), llm.engine.step,
    ]  # fmt: skip
    for call in later:
        with pytest.raises(RuntimeError, match=r"the engine has failed.*boom"):
            with_deadline(call)
    assert not len(llm._assembler) and not llm.engine.scheduler.requests
    llm.close()


# ------------------------------------------------------------------------------------------------------------- opening


def copy_of_tiny(folder: Path) -> Path:
    shutil.copytree(TINY, folder)
    return folder


def test_a_tokenizer_that_cannot_be_had_ends_the_start(tmp_path: Path) -> None:
    """Though it is read by another thread, beside the weights."""
    folder = copy_of_tiny(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot load a tokenizer"):
        LLM(str(folder), device="cpu")


def test_a_start_that_fails_does_not_wait_for_the_tokenizer(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "model")
    next(folder.glob("*.safetensors")).write_bytes(b"broken")
    code = (
        "import minisgl.launch as launch, time, sys\n"
        "launch.load_tokenizer = lambda folder: time.sleep(60)\n"
        "from minisgl import LLM\n"
        f"LLM({str(folder)!r}, device='cpu')\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1 and time.monotonic() - started < 45
    assert done.stderr.count("Traceback") <= 2 and "safetensors" in done.stderr.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------------- closing


def test_close_gives_everything_back(open_llm: Callable[..., LLM], prompts: list[list[int]]) -> None:
    """At once, not when the garbage collector comes; also with a stream left open. Twice is once."""
    llm = open_llm()
    ask(llm, prompts, greedy(3))
    stream = llm.stream(prompts[0], greedy(20))
    next(stream)
    engine = llm.engine
    things = [engine, engine.scheduler, engine.runner, engine.runner.model, engine.kv, engine.runner.sampler]
    references = [
        weakref.ref(thing) for thing in [*things, *engine.runner.kv.layers, *engine.runner.model.parameters()]
    ]
    del engine, things
    gc.disable()
    try:
        llm.close()
        assert [reference() for reference in references if reference() is not None] == []
    finally:
        gc.enable()
    llm.close()
    for call in (partial(ask, llm), llm.stream, llm.async_generate):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call(prompts[0], greedy())
    for late in (lambda: next(stream), lambda: llm.engine, lambda: llm.chat([{"role": "user", "content": "a"}])):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            late()
    stream.close()


def test_closed_between_the_call_and_the_first_step(open_llm: Callable[..., LLM], prompts: list[list[int]]) -> None:
    with open_llm() as llm:
        stream = llm.stream(prompts[0])
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        next(stream)


def test_E14_engines_one_after_another_and_side_by_side(open_llm: Callable[..., LLM], prompts: list[list[int]]) -> None:
    with open_llm(page_size=16, overlap=False) as a, open_llm(page_size=1, num_pages=1000) as b:
        streams = [a.stream(prompts[0], greedy()), b.stream(prompts[0], greedy())]
        sides = [[o.token_ids for o in pair] for pair in zip(*streams, strict=True)]
        assert all(x == y for x, y in sides) and len(sides) == 8
        a.close()
        assert ids_of(ask(b, prompts[0], greedy())) == [sides[-1][0]]
    with open_llm() as c:
        assert ids_of(ask(c, prompts[0], greedy())) == [sides[-1][0]]


def test_a_large_pool_takes_memory_only_where_it_is_used(open_llm: Callable[..., LLM]) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    before = resident()
    with open_llm(num_pages=500_000, page_size=16, max_model_len=None, strict=False) as llm:
        assert llm.engine.runner.kv.num_bytes > 5e9
        ask(llm, [1, 2, 3], greedy(4))
        assert resident() - before < 500e6


# ------------------------------------------------------------------------------------------------ several completions


def test_n_completions(llm: LLM, prompts: list[list[int]]) -> None:
    """S18: indices in order, the prompt counted once, each its own seed, and the same again for the same seed."""
    one, three = (ask(llm, prompts[0], sampled(8, seed=3, n=n, logprobs=1))[0] for n in (1, 3))
    assert [c.index for c in three.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in three.outputs}) == 3
    assert (three.usage.prompt_tokens, three.usage.completion_tokens) == (len(prompts[0]), 24)
    assert [c.finish_reason for c in three.outputs] == ["length"] * 3
    assert [len(c.logprobs) for c in three.outputs] == [8, 8, 8]
    assert (three.text, three.token_ids) == (one.text, one.token_ids)
    again = ask(llm, [prompts[1], prompts[0]], [sampled(5, n=2), sampled(8, seed=3, n=3, logprobs=1)])[1]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in three.outputs]
    assert len({tuple(c.token_ids) for c in ask(llm, prompts[0], sampled(8, n=4))[0].outputs}) == 4
    assert len({tuple(c.token_ids) for c in ask(llm, prompts[0], greedy(8, n=4))[0].outputs}) == 1


def test_n_completions_end_each_in_its_own_time(llm: LLM, prompts: list[list[int]]) -> None:
    """A stop string that only one of them meets ends that one; the others go on, and the stream ends with the last."""
    free = ask(llm, prompts[0], sampled(10, seed=3, n=3))[0].outputs
    texts = [c.text for c in free]
    stop = next(
        texts[1][i : i + 3] for i in range(4, len(texts[1]) - 3) if texts[1][i : i + 3] not in texts[0] + texts[2]
    )
    params = sampled(10, seed=3, n=3, stop=stop)
    *_, last = llm.stream(prompts[0], params)
    assert [c.finish_reason for c in last.outputs] == ["length", "stop", "length"] and last.finished
    assert [c.text for c in last.outputs] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    assert ask(llm, prompts[0], params)[0].outputs == last.outputs
    stream = llm.stream(prompts[0], params)
    next(stream)
    stream.close()


# --------------------------------------------------------------------------------------------------------------- ends


def test_S12_stop_strings_across_tokens(llm: LLM, prompts: list[list[int]]) -> None:
    """Wherever they lie, the text ends before them, nothing of them is streamed, and the engine stops at once."""
    whole = ask(llm, prompts[0], greedy(24))[0]
    overlapped = llm.engine.overlap
    for begin, length in itertools.product(range(2, 40, 7), (1, 3, 9)):
        stop = whole.text[begin : begin + length]
        cut = whole.text[: whole.text.index(stop)]
        with counted_steps(llm) as steps:
            output = ask(llm, prompts[0], greedy(24, stop=["no such text", stop]))[0]
        completion = output.outputs[0]
        assert (output.text, output.finish_reason, completion.stop_reason) == (cut, "stop", stop)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert output.usage.completion_tokens == len(output.token_ids) < 24
        assert stop not in llm.tokenizer.decode(output.token_ids[:-1]), "it went on too long"
        assert steps[0] == len(output.token_ids) + overlapped
        seen = [part.text for part in llm.stream(prompts[0], greedy(24, stop=stop))]
        assert all(cut.startswith(text) for text in seen) and seen[-1] == cut
        kept = ask(llm, prompts[0], greedy(24, stop=stop, include_stop_str_in_output=True))[0]
        assert kept.text == cut + stop and kept.token_ids == output.token_ids


def test_a_stop_string_complete_with_the_last_token(llm: LLM, prompts: list[list[int]]) -> None:
    whole = ask(llm, prompts[0], greedy(10))[0]
    output = ask(llm, prompts[0], greedy(10, stop=whole.text[-2:]))[0]
    assert output.finish_reason == "stop" and output.text == whole.text[: whole.text.index(whole.text[-2:])]


def test_min_tokens_before_a_stop_string_and_a_stop_token(llm: LLM, prompts: list[list[int]]) -> None:
    whole = ask(llm, prompts[0], greedy(12))[0]
    third = llm.tokenizer.decode(whole.token_ids[:3])
    stop = third[-2:]
    assert len(ask(llm, prompts[0], greedy(12, stop=stop))[0].token_ids) <= 3
    late = ask(llm, prompts[0], greedy(12, stop=stop, min_tokens=4))[0]
    assert len(late.token_ids) >= 4 and late.token_ids == whole.token_ids[: len(late.token_ids)]
    held = ask(llm, prompts[0], greedy(12, stop_token_ids=[whole.token_ids[2]], min_tokens=4))[0]
    assert held.token_ids[:2] == whole.token_ids[:2] and held.token_ids[2] != whole.token_ids[2]
    assert whole.token_ids[2] not in held.token_ids[:4] and len(held.token_ids) >= 4


def test_a_stop_token_ends_the_text_and_is_not_in_it(llm: LLM, prompts: list[list[int]]) -> None:
    """S04: the step that had been launched already brings nothing."""
    whole = ask(llm, prompts[0], greedy(12, logprobs=0))[0]
    for at in (0, 3, 11):
        stop = whole.token_ids[at]
        output = ask(llm, prompts[0], greedy(12, stop_token_ids=[stop], logprobs=0))[0]
        first = whole.token_ids.index(stop)
        assert output.token_ids == whole.token_ids[:first] and len(output.logprobs) == first
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("overlap", [False, True])
def test_S11_S04_eos_ids_of_the_generation_config(
    folder: Path, prompts: list[list[int]], tmp_path: Path, overlap: bool
) -> None:
    """Ids that only generation_config.json names end the text; the step behind them brings nothing (S04); without any
    id only the length ends it."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))

    def answer(eos: Any, params: SamplingParams) -> RequestOutput:
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            content = json.loads((copy / name).read_text())
            content["eos_token" if name.startswith("tok") else "eos_token_id"] = None if name[0] in "ct" else eos
            (copy / name).write_text(json.dumps(content))
        with LLM(str(copy), device="cpu", page_size=4, num_pages=100, overlap=overlap, strict=True) as llm:
            output = ask(llm, [prompts[0], prompts[1]], [params, greedy(9)])[0]
            assert_idle(llm)
            return output

    whole = answer(None, greedy(9, ignore_eos=False))
    assert len(whole.token_ids) == 9 and whole.finish_reason == "length"
    eos = whole.token_ids[4]
    at = whole.token_ids.index(eos)
    for ids in (eos, [4000, eos]):
        output = answer(ids, greedy(9, ignore_eos=False))
        assert output.token_ids == whole.token_ids[:at]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert answer([eos], greedy(9)).token_ids == whole.token_ids
    held = answer([eos], greedy(9, ignore_eos=False, min_tokens=at + 2)).token_ids
    assert held[:at] == whole.token_ids[:at] and held[at] != eos and len(held) >= at + 2


def test_S13_special_tokens_are_left_out_of_the_text(llm: LLM, prompts: list[list[int]]) -> None:
    special = sorted(llm.tokenizer.special_token_ids)[0]
    forced = greedy(3, allowed_token_ids=[special])
    hidden, shown = ask(llm, [prompts[0]] * 2, [forced, dataclasses.replace(forced, skip_special_tokens=False)])
    assert hidden.token_ids == shown.token_ids == [special] * 3
    assert hidden.text == "" and shown.text == llm.tokenizer.decode([special], skip_special_tokens=False) * 3 != ""


# ----------------------------------------------------------------------------------------------- the same whatever else


def test_P01_P04_greedy_among_random_ones(llm: LLM, prompts: list[list[int]]) -> None:
    alone = ask(llm, prompts[0], greedy())[0].token_ids
    for top_p, top_k in ((0.5, 0), (1.0, 40), (0.1, 3)):
        crowd = [sampled(8, top_k=50, logit_bias={9: 5.0}, frequency_penalty=1.0) for _ in range(7)]
        mixed = ask(llm, [prompts[0]] * 8, [*crowd[:3], greedy(8, top_p=top_p, top_k=top_k), *crowd[3:]])
        assert mixed[3].token_ids == alone


def test_P05_seeds(llm: LLM, prompts: list[list[int]]) -> None:
    """The same seed gives the same tokens, alone and in any company; no seed gives others each time."""
    one = sampled(8, seed=7)
    alone = ask(llm, prompts[0], one)[0].token_ids
    assert ask(llm, prompts[0], one)[0].token_ids == alone
    crowd = ask(llm, [prompts[3], prompts[0], prompts[1], prompts[0]] * 2, [sampled(5), one, greedy(9), one] * 2)
    assert all(crowd[i].token_ids == alone for i in (1, 3, 5, 7))
    assert len({tuple(ask(llm, prompts[0], sampled())[0].token_ids) for _ in range(4)}) == 4


def test_P05_a_restart_repeats_only_with_an_engine_seed(open_llm: Callable[..., LLM], prompts: list[list[int]]) -> None:
    def start(seed: int | None) -> list[list[int]]:
        with open_llm(seed=seed) as llm:
            return ids_of(ask(llm, prompts[:3], sampled()))

    assert start(None) != start(None)
    assert start(5) == start(5) != start(6)


@pytest.fixture(scope="session")
def sharers(prompts: list[list[int]]) -> list[list[int]]:
    """200 prompts of which many begin alike."""
    rng = random.Random(1)
    return [prompts[rng.randrange(4)][: rng.randint(1, 30)] + [rng.randrange(4096)] for _ in range(200)]


def test_P06_C03_C04_the_same_alone_together_and_from_the_cache(
    open_llm: Callable[..., LLM], sharers: list[list[int]]
) -> None:
    """Batch size, cache and chunks change nothing, in three passes."""
    with open_llm(prefix_cache=False, num_pages=600) as llm:
        want = ids_of(ask(llm, sharers, greedy(5)))
        assert [ask(llm, prompt, greedy(5))[0].token_ids for prompt in sharers[:64]] == want[:64]
    with open_llm(chunk_size=3, max_num_batched_tokens=50) as llm:
        for _ in range(3):
            outputs = ask(llm, sharers, greedy(5))
            assert ids_of(outputs) == want
        assert sum(o.usage.cached_tokens for o in outputs) > 0.5 * sum(map(len, sharers))
        assert_idle(llm)


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (4, False), (4, True), (16, True)])
def test_C06_C07_preempted_and_as_good_as_new(
    open_llm: Callable[..., LLM], sharers: list[list[int]], page_size: int, overlap: bool
) -> None:
    """50 requests in a pool for two: preempted ones come back with the same tokens and log-probabilities."""
    params = [
        sampled(
            7 + page_size // 2 + i % 9,
            seed=i,
            n=1 + (i % 7 == 0),
            logprobs=2,
            prompt_logprobs=1 if i % 5 == 0 else None,
            priority=i % 2,
        )
        for i in range(50)
    ]
    results = []
    for num_tokens in (4000, 64):
        pages = 1 + ceil_div(num_tokens, page_size)
        with open_llm(page_size=page_size, num_pages=pages, max_model_len=64, overlap=overlap, max_running=9) as llm:
            llm.engine.scheduler._mean_output = 0.0  # admits too many
            results.append(ask(llm, sharers[:50], params))
            assert (llm.engine.scheduler.num_preemptions > 2) == (num_tokens == 64)
            assert_idle(llm)
    for large, small in zip(*results, strict=True):
        assert [c.token_ids for c in large.outputs] == [c.token_ids for c in small.outputs]
        for a, b in zip(large.outputs, small.outputs, strict=True):
            assert_same_logprobs(a.logprobs, b.logprobs)
        assert_same_logprobs((large.prompt_logprobs or [])[1:], (small.prompt_logprobs or [])[1:])


def assert_same_logprobs(a: Any, b: Any) -> None:
    """Of the tokens themselves, and the best alternative's: which one that is may hang on the last bit."""
    values = [
        [(next(iter(e.values())).logprob, max(x.logprob for x in e.values())) for e in entries] for entries in (a, b)
    ]
    np.testing.assert_allclose(*values, atol=1e-4, rtol=0)


def test_C08_pages_are_counted_whole(open_llm: Callable[..., LLM]) -> None:
    with open_llm(page_size=16, num_pages=5, max_model_len=64) as llm:
        outputs = ask(llm, [[i, i + 1, i + 2] for i in range(12)], greedy(2))
        assert [len(o.token_ids) for o in outputs] == [2] * 12
        assert_idle(llm)


def test_C20_borders_of_chunks_pages_and_budget(open_llm: Callable[..., LLM], prompts: list[list[int]]) -> None:
    """Chunks smaller than a page, prompts at, below and above whole chunks, and a budget of one token."""
    asked = [prompts[0][:n] for n in (1, 15, 16, 17, 33)]
    with open_llm() as llm:
        want = ids_of(ask(llm, asked, greedy(4)))
    for chunk, page_size, budget in [*itertools.product((1, 2, 5, 16), (1, 4, 16), (8192,)), (None, 4, 1), (2, 16, 1)]:
        options = dict(chunk_size=chunk, page_size=page_size, max_num_batched_tokens=budget)
        with open_llm(max_model_len=40, num_pages=3 * ceil_div(40, page_size), **options) as llm:
            assert ids_of(ask(llm, asked, greedy(4))) == want, options
            assert_idle(llm)


def test_time_waits_for_nobody(llm: LLM, prompts: list[list[int]]) -> None:
    """Timings of many follow their order of arrival, and lie within the call."""
    begin = llm.engine.now()
    time.sleep(0.01)
    outputs = ask(llm, prompts, greedy(4))
    arrivals = [o.timings.arrival_s for o in outputs]
    assert begin < arrivals[0] and arrivals == sorted(arrivals)
    for times in (o.timings for o in outputs):
        assert times.arrival_s <= times.first_token_s < times.finished_s <= llm.engine.now()


def test_E04_graphs_are_for_no_more_than_can_run() -> None:
    """E04; and where there can be none, whoever asks is told, and whoever does not gets none."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    yes, no = SimpleNamespace(serves_graphs=True), SimpleNamespace(serves_graphs=False)

    def most(device: torch.device, attention: Any, asked: int | None, max_running: int = 24) -> int:
        config = EngineConfig(model="tiny", cuda_graph_max_bs=asked, max_running=max_running)
        return find_max_graph_requests(config, attention, device)

    assert [most(cuda, yes, asked) for asked in (None, 160, 3, 0)] == [24, 24, 3, 0]
    assert most(cuda, yes, None, 10_000) == MAX_GRAPH_REQUESTS
    for device, attention in ((cpu, yes), (cuda, no)):
        assert most(device, attention, None) == most(device, attention, 0) == 0
        with pytest.raises(ValueError, match="CUDA graphs"):
            most(device, attention, 8)


def test_a_pool_is_no_larger_than_all_requests_need() -> None:
    """And page 0 is nobody's; one page more than that is the least."""
    shape, cpu = ModelConfig.from_folder(TINY), torch.device("cpu")
    config = EngineConfig(model="tiny", page_size=16, max_running=3)
    page_bytes, most = shape.kv_bytes_per_token(4) * 16, 3 * ceil_div(shape.max_position_embeddings, 16) + 1
    sizes = [size_pool(config, shape, cpu, torch.float32, n * page_bytes).num_pages for n in (2, 9.5, most, 10**6)]
    assert sizes == [2, 9, most, most]
    with pytest.raises(ValueError, match="no memory for KV"):
        size_pool(config, shape, cpu, torch.float32, 1.9 * page_bytes)


def test_prompt_logprobs_of_a_long_prompt_are_computed_in_slices(
    llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = greedy(1, prompt_logprobs=1)
    llm.engine.kv.flush()
    (want,) = ask(llm, [prompts[0]], params)
    llm.engine.kv.flush()
    monkeypatch.setattr("minisgl.engine.runner.PROMPT_LOGPROB_SLICE", 3)
    (found,) = ask(llm, [prompts[0]], params)
    assert len(prompts[0]) > 4
    assert_same_logprobs(found.prompt_logprobs[1:], want.prompt_logprobs[1:])
