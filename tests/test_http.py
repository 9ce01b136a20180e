"""The HTTP front over a fake engine: formats, refusals, limits, keys, and clients that leave or dawdle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_client import FakeClient
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.request import FinishReason, Logprob
from minisgl.server.answers import ChatFormat, CompletionFormat, Head
from minisgl.server.client import Delta, EngineClient
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError
from minisgl.server.front import Front
from minisgl.server.http import ADMIN_PATHS, create_app
from minisgl.server.limits import FirstTokenModel, WaitingRoom
from minisgl.server.listener import Addresses, serve_http
from minisgl.server.openai_api import NEUTRAL, ChatRequest, CompletionRequest
from minisgl.server.security import OPEN_PATHS

HI = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(
    path: str, body: Any = None, *, client: FakeClient | None = None, config: ServerConfig | None = None,
    headers: dict[str, str] | None = None, content: bytes | None = None, **options: Any,
) -> httpx.Response:  # fmt: skip
    """One request to an app of its own."""

    async def go() -> httpx.Response:
        app = create_app(client or FakeClient(), config or ServerConfig(), **options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            if body is None and content is None:
                return await http.get(path, headers=headers)
            if content is not None:
                headers_ = {"content-type": "application/json", **(headers or {})}
                return await http.post(path, content=content, headers=headers_)
            return await http.post(path, json=body, headers=headers)

    return asyncio.run(go())


def events(answer: httpx.Response) -> list[Any]:
    """The JSON of a stream's events; its end must be there, once."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = answer.text.split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]" and "data: [DONE]" not in lines
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


# ------------------------------------------------------------------------------------------------ formats


def test_a_whole_chat_answer() -> None:
    """S01, S02: without stream there is one JSON body with everything."""
    answer = ask(CHAT, {"model": "fake", "messages": HI, "max_tokens": 3})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["object"] == "chat.completion" and body["model"] == "fake" and body["id"].startswith("chatcmpl-")
    assert abs(body["created"] - time.time()) < 60 and answer.headers["x-request-id"] == body["id"]
    [choice] = body["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 3
    assert body["usage"] == {
        "prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


@pytest.mark.parametrize("usage", [False, True])
def test_a_streamed_chat_answer(usage: bool) -> None:
    """S02: the role first, one reason in the last chunk of the text, then usage without choices if asked for."""
    chunks = events(
        ask(CHAT, {"messages": HI, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": usage}})
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    last = chunks.pop() if usage else None
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    if last is not None:
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert all(("usage" in chunk) == usage and chunk.get("usage") is None for chunk in chunks)


def join(chunks: list[Any], chat: bool) -> list[dict[str, Any]]:
    """Choices of a stream as a whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for news in chunk["choices"]:
            choice = choices.setdefault(news["index"], {"text": "", "logprobs": {}, "finish_reason": None})
            assert choice["finish_reason"] is None, "nothing comes after the reason"
            choice["text"] += (news["delta"].get("content") or "") if chat else news["text"]
            choice["finish_reason"] = news["finish_reason"]
            for name, column in (news["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(column)
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("options", [
    {"prompt": "ab"}, {"prompt": [1, 2]}, {"prompt": ["ab", "c"], "n": 2},
    {"prompt": [[1], "ab", [2, 3]], "echo": True},
    {"prompt": "ab", "echo": True, "logprobs": 2, "n": 2}, {"prompt": "ab", "logprobs": 0},
    {"prompt": ["ab", [3]], "logprobs": 3, "echo": True}, {"prompt": "ab", "seed": 1, "stop": ["s"], "n": 3},
    {"messages": HI, "n": 3}, {"messages": HI, "logprobs": True, "top_logprobs": 5}, {"messages": HI, "logprobs": True},
])  # fmt: skip
def test_streamed_equals_whole(options: dict[str, Any]) -> None:
    """S18, S19: whatever was asked for, the chunks put together are the whole answer."""
    chat = "messages" in options
    path = CHAT if chat else COMPLETIONS
    whole = ask(path, {"max_tokens": 4, **options}).json()
    chunks = events(ask(path, {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, **options}))
    assert chunks.pop()["usage"] == whole["usage"]
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
    for one, other in zip(join(chunks, chat), whole["choices"], strict=True):
        text = other["message"]["content"] if chat else other["text"]
        assert text and (one["text"], one["finish_reason"]) == (text, other["finish_reason"])
        assert one["logprobs"] == (other["logprobs"] or {})


def test_choices_of_several_prompts_are_numbered_by_prompt() -> None:
    """S18: n texts of the first prompt, then those of the second; each prompt counts once."""
    whole = ask(COMPLETIONS, {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 3, "echo": True}).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert [c["text"][:-3] for c in whole["choices"]] == ["ab", "ab", "xyz", "xyz"]
    assert whole["usage"]["prompt_tokens"] == 5 and whole["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
def test_chat_logprobs(asked: int) -> None:
    """S19: an entry a token, the token's own value whatever its rank, the asked number of alternatives by rank."""
    body = {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": asked}
    choice = ask(CHAT, body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert entry["logprob"] == -1.5 and entry["bytes"] == list(entry["token"].encode())
        top = entry["top_logprobs"]
        assert len(top) == asked and [t["logprob"] for t in top] == sorted((t["logprob"] for t in top), reverse=True)
        assert (entry["token"] in [t["token"] for t in top]) == (asked >= 2), "the fake's token is the second"


def test_completion_logprobs_with_echo_align_with_the_text() -> None:
    """S19: columns over prompt and answer; nothing for the first token; offsets point into the text."""
    choice = ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 2, "logprobs": 1, "echo": True}).json()["choices"][0]
    columns, text = choice["logprobs"], choice["text"]
    assert len(text) == 5 and columns["tokens"] == list(text)
    assert columns["text_offset"] == [0, 1, 2, 3, 4]
    assert columns["token_logprobs"] == [None, -1.5, -1.5, -1.5, -1.5] and columns["top_logprobs"][0] is None
    assert columns["top_logprobs"][4] == {"!": -1.0, text[4]: -1.5}


texts = st.text(max_size=8)
reasons: st.SearchStrategy[FinishReason | None] = st.sampled_from([None, "stop", "length", "abort"])


@given(text=texts, index=st.integers(0, 3), reason=reasons, usage=st.booleans(), model=texts)
@settings(max_examples=60, deadline=None)
def test_a_fast_chunk_equals_its_slow_twin(
    text: str, index: int, reason: FinishReason | None, usage: bool, model: str
) -> None:
    delta = Delta(index, text, (1,), None, reason)
    for make in (ChatFormat, CompletionFormat):
        form = make(Head("id", 1, model), include_usage=usage)
        for _ in range(2):  # parts are learnt by the first
            fast = form.chunk(index, delta)
            assert fast == (form.slow_chunk(index, delta) if text or reason else None)


def test_half_a_character_has_no_bytes_of_its_own() -> None:
    entry = {7: Logprob(-0.5, 1, "\ufffd")}
    [choice] = json.loads(ChatFormat(Head("i", 1, "m"), num_top=1).chunk(0, Delta(0, "", (7,), (entry,))))["choices"]
    assert choice["logprobs"]["content"][0]["bytes"] is None


# ------------------------------------------------------------------------------------------------ what is asked

SAMPLING = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.25, "logit_bias": {"65": 5.0}, "allowed_token_ids": [65, 66], "seed": 3, "n": 2,
    "max_tokens": 5, "min_tokens": 1, "stop": ["x", "y"], "stop_token_ids": [9], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "priority": -3, "cache_salt": "s",
}  # fmt: skip


@pytest.mark.parametrize(("path", "start"), [(COMPLETIONS, {"prompt": "ab"}), (CHAT, {"messages": HI})])
def test_every_option_reaches_the_engine(path: str, start: dict[str, Any]) -> None:
    """V10: none is dropped on the way."""
    client = FakeClient()
    assert ask(path, {**start, **SAMPLING}, client=client).status_code == 200
    params = client.seen[0].params
    for name, value in SAMPLING.items():
        expected = {65: 5.0} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected, name
    model = CompletionRequest if path == COMPLETIONS else ChatRequest
    other = {"model", "prompt", "messages", "stream", "stream_options", "echo", "logprobs", "top_logprobs", "tools",
             "tool_choice", "max_completion_tokens", *NEUTRAL}  # fmt: skip
    ignored = {
        name for name, info in model.model_fields.items() if info.description == "Accepted, and changes nothing."
    }
    assert set(model.model_fields) <= set(SAMPLING) | other | ignored, "a field that nothing looks at"


def test_null_means_the_default() -> None:
    """V04: and without max_tokens the answer goes to the end of the context."""
    client = FakeClient()
    answer = ask(COMPLETIONS, {"prompt": "ab", **dict.fromkeys(SAMPLING)}, client=client)
    assert answer.status_code == 200 and client.seen[0].params.max_tokens is None
    assert answer.json()["usage"]["total_tokens"] == client.info.max_model_len


def test_newer_names_and_tools() -> None:
    """V14, V09: max_completion_tokens, a plain string as stop, text parts, tools for the template."""
    client = FakeClient()
    tool = {"type": "function", "function": {"name": "f"}}
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    body = {"messages": parts, "max_completion_tokens": 5, "stop": "q", "tools": [tool], "tool_choice": "auto"}
    assert ask(CHAT, body, client=client).status_code == 200
    assert ask(CHAT, body | {"tool_choice": "none"}, client=client).status_code == 200
    first, second = client.seen
    assert first.params.max_tokens == 5 and first.params.stop == ("q",)
    assert first.messages == [{"role": "developer", "content": "ab"}]
    assert first.tools == [tool] and second.tools is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": [256]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"), ({"prompt": [10**30]}, "prompt"), ({"prompt": [True]}, "prompt"),
    ({"prompt": [1] * 64}, "prompt"), ({"prompt": ["a"] * 257}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"), ({"min_tokens": 9}, "min_tokens"),
    ({"logit_bias": {"99999999": 5}}, "logit_bias"), ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"), ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [256]}, "allowed_token_ids"), ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"stop": [str(i) for i in range(17)]}, "stop"), ({"stop": ""}, "stop"), ({"stop": [5]}, "stop"),
    ({"temperature": -1}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": 7}, "top_p"),
    ({"top_p": 0}, "top_p"), ({"top_k": -5}, "top_k"), ({"min_p": 2}, "min_p"), ({"n": 0}, "n"), ({"n": 129}, "n"),
    ({"seed": -1}, "seed"), ({"seed": 2**63}, "seed"), ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"priority": 2**31}, "priority"), ({"stream": "yes"}, "stream"),
    ({"stream_options": {"usage": 1}}, "stream_options"), ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"), ({"suffix": "x"}, "suffix"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"nonsense": 1}, "nonsense"), ({"messages": HI}, "messages"), ({"cache_salt": 5}, "cache_salt"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "param"), BAD)
def test_bad_completions_are_400_and_say_what_is_wrong(bad: dict[str, Any], param: str) -> None:
    """V01, V03, V04, V06, V07, V09, V10, V11: with stream and without; and the engine hears nothing of it."""
    client = FakeClient()
    for stream in (False, True):
        body = {"model": "fake", "prompt": "ab", "max_tokens": 4, "stream": stream} | bad
        error = error_of(ask(COMPLETIONS, body, client=client), 400)
        assert error["param"] == param and param in error["message"], error
    assert not client.seen


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, "king"), ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"), ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "template"),
    ({"messages": [{"role": "user", "content": "a" * 99}]}, "105 tokens; the context is 64"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": ["f"]}, "tools"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logprobs": 2}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"response_format": {"type": "json_schema"}}, "response_format"), ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"), ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"), ({"reasoning_effort": "low"}, "reasoning_effort"), ({"prediction": {}}, "prediction"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"), ({"echo": True}, "echo"), ({"prompt": "x"}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "text"), BAD_CHATS)
def test_bad_chats_are_400_and_say_what_is_wrong(bad: dict[str, Any], text: str) -> None:
    """V01, V07, V10, V12, V13: what the template or the engine refuses comes the same way."""
    for stream in (False, True):
        error = error_of(ask(CHAT, {"messages": HI, "max_tokens": 4, "stream": stream} | bad), 400)
        assert text in error["message"] and error["type"] == "invalid_request_error"


def test_what_changes_nothing_is_accepted() -> None:
    body = {"messages": HI, "max_tokens": 2, "user": "u", "metadata": {"a": "b"}, "store": False, "n": 1,
            "service_tier": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True, "audio": None,
            "modalities": ["text"], "stream_options": None, "tool_choice": "none", "logprobs": False}  # fmt: skip
    assert ask(CHAT, body).status_code == 200
    assert ask(COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "best_of": 1, "suffix": None}).status_code == 200


def test_other_models_do_not_exist() -> None:
    """V14."""
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI}), ("/tokenize", {"prompt": "a"})):
        error = error_of(ask(path, body | {"model": "zzz"}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"
    error_of(ask("/v1/models/zzz"), 404)


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b"\xff", b'{"messages": []}', b'"x"', b"[" * 100_000, b'{"prompt": "\\ud83d"}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "a", "\\ud83d": 1}', b'{"prompt": "a", "stop": "\\ud83d"}', b'{"prompt": "a", "user": "\\ud83d"}',
])  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_malformed_bodies_are_400(content: bytes, path: str) -> None:
    """V07: never 500, and always in the same shape."""
    if path == COMPLETIONS and b"user" in content:
        assert ask(path, content=content).status_code == 200  # ignored fields are ignored
    else:
        error_of(ask(path, content=content), 400)


def test_an_error_can_tell_of_what_is_no_text() -> None:
    """V07: a template may raise with half a surrogate pair of its input in the message."""
    assert json.loads(ApiError(400, "a\ud83d", param="\ud83d").body)["error"] == {
        "message": "a?", "type": "invalid_request_error", "param": "?", "code": None,
    }  # fmt: skip


def test_a_body_must_call_itself_json() -> None:
    """A page of another site can send text without asking first; JSON it cannot."""
    answer = ask(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert "Content-Type: application/json" in error_of(answer, 400)["message"]


def test_what_is_no_json_is_told_as_such() -> None:
    """The place in the body is no name of a parameter."""
    error = error_of(ask(COMPLETIONS, content=b'{"prompt": "a",}'), 400)
    assert error["message"].startswith("body: not JSON, from position 15 on: ") and error["param"] is None


def test_unknown_paths_and_methods() -> None:
    for path in ("/nix", "/docs", "/redoc", "/v1/completions/", *ADMIN_PATHS):
        error_of(ask(path), 404)
    answer = ask(COMPLETIONS)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


# ------------------------------------------------------------------------------------------------ the other routes


def test_models_and_tokens() -> None:
    assert [m["id"] for m in ask("/v1/models").json()["data"]] == ["fake"]
    assert ask("/v1/models/fake").json()["max_model_len"] == 64
    assert ask("/tokenize", {"prompt": "ab"}).json() == {"tokens": [97, 98], "count": 2, "max_model_len": 64}
    assert ask("/tokenize", {"messages": HI}).json()["count"] == 8
    assert ask("/detokenize", {"tokens": [97, 98]}).json() == {"prompt": "ab"}
    for path, body in (
        ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": HI}), ("/tokenize", {"prompt": "a", "tools": []}),
        ("/tokenize", {"messages": []}), ("/detokenize", {"tokens": [256]}), ("/detokenize", {"tokens": "ab"}),
        ("/detokenize", {"tokens": [97] * 65}),
    ):  # fmt: skip
        error_of(ask(path, body), 400)


def test_live_is_not_ready() -> None:
    """O08: a front whose engine is gone is alive, and nothing should be sent to it."""
    client = FakeClient(not_ready="the engine is gone: killed")
    assert ask("/health", client=client).json() == {"status": "ok"}
    answer = ask("/ready", client=client)
    assert answer.status_code == 503 and "killed" in answer.json()["status"]
    assert ask("/ready").status_code == 200


def test_metrics() -> None:
    """O12: load, throughput, hit rate, pages, latencies."""

    async def go() -> str:
        app = create_app(FakeClient(), ServerConfig())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            await http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 3})
            await http.post(COMPLETIONS, json={"prompt": ""})
            return (await http.get("/metrics")).text

    lines = asyncio.run(go()).splitlines()
    for line in (
        "minisgl_up 1.0", "minisgl_requests_running 0.0", "minisgl_requests_waiting 0.0", "minisgl_kv_used_ratio 0.25",
        "minisgl_prefix_hit_ratio 0.5", "minisgl_prompt_tokens_total 10.0", 'minisgl_refused_total{status="400"} 1.0',
        'minisgl_requests_total{outcome="length",route="completions"} 1.0', "minisgl_first_token_seconds_count 1.0",
        "minisgl_update_seconds_count 2.0", "minisgl_request_seconds_count 1.0", "minisgl_requests_in_flight 0.0",
    ):  # fmt: skip
        assert line in lines, line


def test_admins() -> None:
    """With a key of their own, or where only they come."""
    config = ServerConfig(api_key="user", admin_key="admin")
    admin, user = ({"authorization": f"Bearer {key}"} for key in ("admin", "user"))
    assert ask("/flush_cache", {}, config=config, headers=admin).json() == {"num_pages": 3}
    for path in ADMIN_PATHS:
        error_of(ask(path, {}, config=config, headers=user), 401)
    assert ask("/v1/models", config=config, headers=admin).status_code == 200
    assert ask("/live", admin=True).json()["detail"] == {"batch": []}
    assert ask("/abort", {"request_id": "nobody"}, admin=True).json() == {"aborted": False}
    error_of(ask("/live", admin=True, config=ServerConfig(api_key="user")), 401)
    assert ask("/v1/models", config=ServerConfig(admin_key="admin")).status_code == 200  # the rest is open, as before


# ------------------------------------------------------------------------------------------------ the door


@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3crét"]
)
def test_without_the_key_every_route_but_the_probes_is_closed(key: str | None) -> None:
    config = ServerConfig(api_key="s3cret")
    headers = {} if key is None else {"authorization": key.encode()}
    paths = [route.path for route in create_app(FakeClient(), config).routes]
    assert len(paths) > 8
    for path in (*paths, "/nix"):
        answer = ask(path, config=config, headers=headers)
        if path in OPEN_PATHS:
            assert answer.status_code == 200
        else:
            assert error_of(answer, 401)["code"] == "invalid_api_key"
    assert ask("/v1/models", config=config, headers={"authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "my.host"])
def test_beyond_loopback_there_is_a_key_or_the_word_that_there_is_none(host: str) -> None:
    with pytest.raises(ValueError, match=r"give an api_key, or .none. to let everybody$"):
        ServerConfig(host=host)
    paths = {key: ask("/v1/models", config=ServerConfig(host=host, api_key=key)).status_code for key in ("k", "none")}
    assert paths == {"k": 401, "none": 200}
    assert all(ServerConfig(host=here).api_key is None for here in ("localhost", "127.0.0.1", "127.1.2.3", "::1"))


@pytest.mark.parametrize(("host", "passes"), [
    ("127.0.0.1:8000", True), ("localhost", True), ("[::1]:8000", True), ("10.1.2.3", True), ("my.host:80", True),
    ("evil.example", False), ("evil.example:8000", False), ("", False), ("[x", False),
    ("localhost.evil.example", False),
])  # fmt: skip
def test_hosts(host: str, passes: bool) -> None:
    """A name that somebody else's DNS points here is not ours."""
    answer = ask("/health", config=ServerConfig(allowed_hosts=["My.host"]), headers={"host": host})
    assert answer.status_code == (200 if passes else 403), answer.text
    assert ask("/health", config=ServerConfig(allowed_hosts=["*"]), headers={"host": host}).status_code == 200


def test_pages_of_other_sites_may_not_call() -> None:
    config = ServerConfig(allowed_origins=["https://good.example"])
    for origin, status in (("https://good.example", 200), ("https://evil.example", 403), ("null", 403),
                           ("http://127.0.0.1:8000", 200), ("http://127.0.0.1:8001", 403)):  # fmt: skip
        answer = ask("/health", config=config, headers={"origin": origin})
        assert answer.status_code == status
        assert not [name for name in answer.headers if name.startswith("access-control")], "CORS is off"


def test_long_bodies_are_not_read() -> None:
    config = ServerConfig(max_body_bytes=1024)
    long = json.dumps({"prompt": "a" * 1100}).encode()
    assert error_of(ask(COMPLETIONS, content=long, config=config), 413)["code"] == "body_too_large"
    call = Call(create_app(FakeClient(), config))

    async def endless() -> None:
        for _ in range(5):
            call.inbox.put_nowait({"type": "http.request", "body": b"a" * 500, "more_body": True})
        await call.run(COMPLETIONS, None)

    asyncio.run(endless())
    assert call.status == 413 and call.inbox.qsize() == 2, "it stopped reading when it knew"


# ------------------------------------------------------------------------------------------------ ends of all kinds


class Call:
    """One request by hand, over ASGI: the client can leave when it likes."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def run(self, path: str, body: Any) -> None:
        if body is not None:
            self.inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": headers, "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"}}  # fmt: skip
        await self.app(scope, self.inbox.get, send)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def run(go: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(go, 20))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True], ids=["midway", "before the first token"])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd", "ef"]], ids=["one", "several"])
def test_a_client_that_leaves_ends_its_requests(stream: bool, waits: bool, prompt: Any) -> None:
    """A01, A02, A05, A08: in every state, whole or streamed, the engine is told at once."""

    async def go() -> None:
        client = FakeClient(delay_s=0.02, gate=asyncio.Event() if waits else None)
        front = Front(client, ServerConfig())
        call = Call(create_app(client, front.config, front=front))
        task = asyncio.create_task(call.run(COMPLETIONS, {"prompt": prompt, "stream": stream}))
        num = 1 if prompt == "ab" else 3
        await until(lambda: len(client.running) == num and (waits or not stream or len(call.sent) > 3))
        assert (front.running and front.waiting.num_requests == (num if waits else 0)) or not stream
        left_s = time.monotonic()
        call.leave()
        await asyncio.wait_for(task, 5)
        assert not client.running and time.monotonic() - left_s < 1
        assert not front.running and front.waiting.num_requests == front.waiting.num_tokens == 0
        assert b"DONE" not in call.body
        assert 'outcome="left"' in front.metrics.render(None).decode()

    run(go())


def test_an_answer_that_is_cancelled_from_above_ends_its_requests() -> None:
    """A08: as when the server is stopped the hard way."""

    async def go() -> None:
        client = FakeClient(delay_s=0.02)
        call = Call(create_app(client, ServerConfig()))
        task = asyncio.create_task(call.run(COMPLETIONS, {"prompt": ["ab", "cd"], "stream": True}))
        await until(lambda: len(call.sent) > 2)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and not client.running

    run(go())


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"]])
def test_an_engine_that_dies_midway(prompt: Any) -> None:
    """O05, in front: an error for those whose answer has not begun, an event for those who read already."""
    error = error_of(ask(COMPLETIONS, {"prompt": prompt}, client=FakeClient(dies_after=2)), 503)
    assert error["code"] == "engine_died" and error["type"] == "server_error"
    answer = ask(COMPLETIONS, {"prompt": prompt, "stream": True}, client=FakeClient(dies_after=2))
    *chunks, last, nothing = answer.text.split("\n\n")
    assert answer.status_code == 200 and len(chunks) >= 2 and nothing == "" and "DONE" not in answer.text
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_died"


def test_an_answer_without_an_end_is_an_error() -> None:
    """S16: that there is a last update is the client's promise; without it nothing is passed off as whole."""

    class Forgetful(FakeClient):
        async def _generate(self, request: Any) -> Any:
            async for update in super()._generate(request):
                if update.timings is None:
                    yield update

    assert "without an end" in error_of(ask(COMPLETIONS, {"prompt": "ab"}, client=Forgetful()), 503)["message"]
    answer = ask(COMPLETIONS, {"prompt": "ab", "stream": True}, client=Forgetful())
    assert "DONE" not in answer.text and "without an end" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_one_refused_prompt_refuses_the_request(stream: bool) -> None:
    """Its status cannot be sent before every prompt has been accepted; the others are given up."""

    async def go() -> None:
        client = FakeClient()
        call = Call(create_app(client, ServerConfig()))
        await call.run(COMPLETIONS, {"prompt": ["ab", "a" * 99, "cd"], "stream": stream})
        assert call.status == 400 and len(client.seen) == 2 and not client.running

    run(go())


def test_a_bug_is_a_500_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeClient):
        async def tokenize(self, request: Any) -> list[int]:
            raise KeyError("secret")

        async def detokenize(self, token_ids: list[int]) -> str:
            raise KeyError("secret")

    answer = ask("/tokenize", {"prompt": "a"}, client=Broken())
    assert "secret" not in answer.text and error_of(answer, 500)["type"] == "server_error"
    with caplog.at_level(logging.ERROR):
        late = ask(COMPLETIONS, {"prompt": ["ab", [1]], "echo": True, "stream": True}, client=Broken())
    assert ("secret" not in late.text and late.status_code == 500) or "error" in late.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline(stream: bool) -> None:
    """The client is told, and told that another try is of no use."""
    client = FakeClient(delay_s=0.05)
    answer = ask(
        COMPLETIONS, {"prompt": "ab", "stream": stream}, client=client, config=ServerConfig(request_timeout_s=0.3)
    )
    assert not client.running
    if stream:
        assert answer.status_code == 200 and "DONE" not in answer.text
        assert json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "deadline"
    else:
        assert error_of(answer, 504)["code"] == "deadline" and answer.headers["x-should-retry"] == "false"


def test_an_admin_ends_an_answer() -> None:
    """It ends for its client as an answer, with what there is of it."""

    async def go() -> None:
        client = FakeClient(delay_s=0.02)
        front = Front(client, ServerConfig())
        app = create_app(client, front.config, front=front, admin=True)
        call, admin = Call(app), Call(app)
        task = asyncio.create_task(call.run(COMPLETIONS, {"prompt": "ab", "stream": True}))
        await until(lambda: len(call.sent) > 2)
        await admin.run("/abort", {"request_id": next(iter(front.running))})
        await task
        assert json.loads(admin.body) == {"aborted": True}
        assert b'"finish_reason":"abort"' in call.body and call.body.endswith(b"data: [DONE]\n\n")

    run(go())


# ------------------------------------------------------------------------------------------------ limits


def test_too_many_waiting_requests() -> None:
    """O10: at the bound, more are told to come back, and when."""

    async def go() -> None:
        client = FakeClient(gate=asyncio.Event())
        front = Front(client, ServerConfig(max_waiting=2))
        app = create_app(client, front.config, front=front)
        calls = [Call(app) for _ in range(3)]
        tasks = [asyncio.create_task(c.run(COMPLETIONS, {"prompt": "ab", "max_tokens": 2})) for c in calls[:2]]
        await until(lambda: len(client.running) == 2)
        await calls[2].run(COMPLETIONS, {"prompt": "ab"})
        headers = dict(calls[2].sent[0]["headers"])
        assert calls[2].status == 429 and int(headers[b"retry-after"]) >= 1
        assert json.loads(calls[2].body)["error"]["type"] == "rate_limit_error"
        client.gate.set()
        await asyncio.gather(*tasks)
        assert [c.status for c in calls[:2]] == [200, 200]
        again = Call(app)
        await again.run(COMPLETIONS, {"prompt": "ab", "max_tokens": 1})
        assert again.status == 200

    run(go())


def test_the_waiting_room_counts_tokens_and_predicts() -> None:
    room = WaitingRoom(max_requests=100, max_tokens=1000, max_first_token_s=2.0)
    [alone] = room.enter([5000], 0.0)  # longer than allowed, but nobody waits
    with pytest.raises(ApiError, match="5000 tokens wait already, of at most 1000"):
        room.enter([1], 0.0)
    alone.correct(10)
    alone.first_token(0.0)
    assert room.num_tokens == room.num_requests == 0
    for n in range(1, 20):  # a hundred tokens a second, and a tenth of a second for anything
        [ticket] = room.enter([n * 10], 0.0)
        ticket.first_token(0.1 + n * 0.1)
    [_] = room.enter([150], 0.0)
    room.enter([20], 0.0)
    with pytest.raises(ApiError, match="more than 2 s") as refused:
        room.enter([500], 0.0)
    assert refused.value.status == 429 and 4 <= int(refused.value.headers["retry-after"]) <= 6


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["enter", "correct", "first", "close"])), max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_waiting_room_is_the_sum_of_its_tickets(moves: list[tuple[int, str]]) -> None:
    room, inside = WaitingRoom(max_requests=5, max_tokens=100), {}
    tickets: list[Any] = []
    for number, move in moves:
        if move == "enter":
            fits = not inside or (len(inside) < 5 and sum(inside.values()) + number <= 100)
            with contextlib.nullcontext() if fits else pytest.raises(ApiError):
                tickets += room.enter([number], 0.0)
                inside[len(tickets) - 1] = number
        elif tickets:
            index = number % len(tickets)
            if move == "correct":
                tickets[index].correct(number)
                inside.update({index: number} if index in inside else {})
            else:
                tickets[index].first_token(1.0) if move == "first" else tickets[index].close()
                inside.pop(index, None)
        assert (room.num_requests, room.num_tokens) == (len(inside), sum(inside.values()))


def test_first_tokens_are_predicted_by_a_line() -> None:
    model = FirstTokenModel()
    for n in range(7):
        model.observe(n, 1.0)
    assert model.predict(10) is None, "too little to go by"
    for n in range(300):
        model.observe(n % 50, 0.2 + 0.01 * (n % 50))
    assert model.predict(0) == pytest.approx(0.2, abs=0.02) and model.predict(1000) == pytest.approx(10.2, abs=0.2)
    for _ in range(2000):
        model.observe(5, 0.3)  # the same again and again: no slope, no division by zero
    assert model.predict(10**6) == pytest.approx(0.3, abs=0.01)


# ------------------------------------------------------------------------------------------------ a real server


@contextlib.contextmanager
def serving(client: EngineClient, **options: Any) -> Iterator[tuple[Addresses, Callable[[], None]]]:
    """A started server, in a thread of its own, and what ends it."""
    started, at = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def up(addresses: Addresses) -> None:
        at.append(addresses)
        started.set()

    config = ServerConfig(port=0, **options)
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(serve_http(client, config, stop=stop, started=up)), daemon=True
    )
    thread.start()
    assert started.wait(10)

    def end() -> None:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()

    yield at[0], end
    if thread.is_alive():
        end()
    loop.close()


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def dawdler() -> Iterator[tuple[FakeClient, str, str]]:
    """A server of an engine that takes its time, with the addresses of its two listeners."""
    client = FakeClient(delay_s=0.01)
    options: dict[str, Any] = {"admin_port": 0, "header_timeout_s": 0.7, "reader_timeout_s": 0.7}
    with serving(client, **options) as (at, _):
        yield client, f"http://127.0.0.1:{at.port}", f"http://127.0.0.1:{at.admin_port}"


def test_the_openai_client(dawdler: tuple[FakeClient, str, str]) -> None:
    """S01, S02, S18, S19, V07: sync and async, whole and streamed, and its own exceptions."""
    _, base, _ = dawdler
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=10)
    model = client.models.list().data[0].id
    options: Any = {"model": model, "messages": HI, "max_tokens": 5, "n": 2, "extra_body": {"top_k": 3}}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[index].message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    scored = client.completions.create(model=model, prompt="ab", max_tokens=2, logprobs=2, echo=True)
    assert len(scored.choices[0].logprobs.tokens) == 4
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="zzz", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="ab", max_tokens=-1)
    assert refused.value.param == "max_tokens"

    async def go() -> str:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as other:
            stream = await other.chat.completions.create(**(options | {"n": 1}), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(go()) == whole.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_ends_the_request(dawdler: tuple[FakeClient, str, str], stream: bool) -> None:
    """A01, A02: over a real socket, within a second."""
    client, base, _ = dawdler
    body = {"prompt": "ab", "stream": stream, "n": 100}
    with (
        contextlib.suppress(httpx.TimeoutException),
        httpx.stream("POST", base + COMPLETIONS, json=body, timeout=0.3) as answer,
    ):
        next(answer.iter_lines())
    assert client.seen
    wait_for(lambda: not client.running, 1.0)


def test_the_two_listeners(dawdler: tuple[FakeClient, str, str]) -> None:
    _, base, admin = dawdler
    assert httpx.get(base + "/live").status_code == 404
    assert httpx.get(admin + "/live").json()["num_pages"] == 8
    assert httpx.get(admin + "/v1/models").status_code == httpx.get(base + "/ready").status_code == 200


def send_slowly(base: str, parts: list[bytes]) -> bytes:
    """What comes back from a client that sends its parts 0.3 s apart, and how the connection ends."""
    with socket.create_connection(("127.0.0.1", int(base.rsplit(":", 1)[1]))) as sock:
        sock.settimeout(5)
        for part in parts:
            time.sleep(0.3)
            try:
                sock.sendall(part)
            except OSError:
                return b"cut off"
        try:
            return sock.recv(65536) or b"closed"
        except ConnectionResetError:
            return b"cut off"


def test_slow_senders_are_cut_off(dawdler: tuple[FakeClient, str, str]) -> None:
    """Whether it is the head that does not come, or the body, or nothing at all."""
    _, base, _ = dawdler
    head = [b"GET /health HTTP/1.1\r\n", b"host: 127.0.0.1\r\n\r\n"]
    assert b"200 OK" in send_slowly(base, head)
    post = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n"
    for parts in ([], [b"GET /health HT", b"TP/1.1\r\n", b"a: b\r\n", b"c: d\r\n\r\n"], [post, b"{", b" ", b" ", b" "]):
        assert send_slowly(base, parts) in (b"cut off", b"closed")


def test_a_head_without_an_end_is_cut_off(dawdler: tuple[FakeClient, str, str]) -> None:
    """A client must not fill memory with headers; long bodies are another matter."""
    _, base, _ = dawdler
    host = ("127.0.0.1", int(base.rpartition(":")[2]))
    with socket.create_connection(host) as sock, pytest.raises(OSError):
        sock.settimeout(5)
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
        for _ in range(100):
            sock.sendall(b"a" * 10_000)
            time.sleep(0.001)
        raise AssertionError("a megabyte of headers was taken")
    with httpx.Client(base_url=base) as http:
        for _ in range(2):  # one connection
            assert http.get("/health", headers={"x": "a" * 40_000}).status_code == 200
            assert http.post("/tokenize", json={"prompt": "a" * 200_000}).status_code in (200, 400)


def test_requests_in_a_row_before_an_answer_are_cut_off(dawdler: tuple[FakeClient, str, str]) -> None:
    """A02: they would keep the server from seeing that the client has left."""
    client, base, _ = dawdler
    body = b'{"prompt": "ab"}'
    post = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    post += b"content-length: %d\r\n\r\n%s" % (len(body), body)
    assert send_slowly(base, [post, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"]) in (b"cut off", b"closed")
    wait_for(lambda: not client.running, 1.0)


def test_one_connection_too_many_is_told_to_come_back() -> None:
    """O10: whoever is connected is served, and who leaves makes room."""
    with serving(FakeClient(), max_connections=2) as (at, _), contextlib.ExitStack() as stack:
        base = f"http://127.0.0.1:{at.port}"
        first = stack.enter_context(httpx.Client())
        assert first.get(base + "/health").status_code == 200
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", at.port)))
        with socket.create_connection(("127.0.0.1", at.port)) as sock:
            sock.settimeout(5)
            answer = b"".join(iter(lambda: sock.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer
        assert first.get(base + "/health").status_code == 200
        idle.close()
        time.sleep(0.1)
        assert httpx.get(base + "/health").status_code == 200


def test_a_reader_that_never_reads_is_cut_off() -> None:
    """S17: its buffer is bounded, and others are served meanwhile."""

    class Flood(FakeClient):
        def _delta(self, *args: Any, **options: Any) -> Delta:
            delta = super()._delta(*args, **options)
            return Delta(delta.index, delta.text * 100_000, delta.token_ids, finish_reason=delta.finish_reason)

    client = Flood(delay_s=0.001)
    client.info = type(client.info)("fake", 100_000, 256, True)
    body = json.dumps({"prompt": "ab", "stream": True, "max_tokens": 10_000}).encode()
    with serving(client, reader_timeout_s=0.5) as (at, _), socket.create_connection(("127.0.0.1", at.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n")
        sock.sendall(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        wait_for(lambda: bool(client.running))
        assert httpx.get(f"http://127.0.0.1:{at.port}/health").status_code == 200
        wait_for(lambda: not client.running, 8.0)


def test_the_end_lets_answers_end() -> None:
    """O07: what runs comes to its end, what takes too long is ended, and nothing new is accepted."""
    client = FakeClient(delay_s=0.02)
    with serving(client, drain_s=0.6) as (at, end):
        base = f"http://127.0.0.1:{at.port}"
        answers: list[httpx.Response] = []

        def post(num: int) -> threading.Thread:
            body = {"prompt": "ab", "max_tokens": num, "stream": True}
            thread = threading.Thread(target=lambda: answers.append(httpx.post(base + COMPLETIONS, json=body)))
            thread.start()
            return thread

        threads = [post(10), post(60)]
        wait_for(lambda: len(client.running) == 2)
        end()
        for thread in threads:
            thread.join(10)
        reasons = [[c["finish_reason"] for chunk in events(a) for c in chunk["choices"]][-1] for a in answers]
        assert reasons == ["length", "abort"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(base + "/health")


def test_a_port_in_use_is_one_line() -> None:
    """V15."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1 port {config.port}: "):
            asyncio.run(serve_http(FakeClient(), config, stop=asyncio.Event()))
