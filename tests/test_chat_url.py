"""``minisgl chat --url``: the same conversation as with a model of one's own, with a server that was really started."""

from __future__ import annotations

import io
import itertools
import json
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from urllib.request import urlopen

import pytest

from minisgl import LLM, SamplingParams, cli
from minisgl.benchmark.serving import Serving, serving
from minisgl.server.remote import RemoteServer, changes

KEY = "sesame"
ENGINE = ["--model", "tiny", "--device", "cpu", "--num-pages", "100", "--max-model-len", "512"]
PARAMS = ["--temperature", "0", "--max-tokens", "24", "--stop", "the end"]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving([*ENGINE, "--api-key", KEY, "--admin-port", "0"]) as server:
        yield server


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", device="cpu", num_pages=100, max_model_len=512) as llm:
        yield llm


def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *options: str
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of ``minisgl chat`` with this input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    try:
        code = cli.main(["chat", *options])
    except SystemExit as exit:
        code = int(exit.code or 0)
    return (code, *capsys.readouterr())


def test_a_conversation_is_the_local_one(
    server: Serving, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same answers as by the library, each given the answers before; the URL may have a slash or the API's path."""
    says = ["What is 2 + 3?", "Tell me a story"]
    for path in ("", "/", "/v1"):
        code, out, err = chat(
            monkeypatch, capsys, "\n".join([*says, ""]), "--url", server.url + path, "--api-key", KEY, *PARAMS
        )
        messages: list[dict[str, str]] = []
        want = ""
        for text in says:
            messages.append({"role": "user", "content": text})
            answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24, stop="the end"), use_tqdm=False)
            messages.append({"role": "assistant", "content": answer[0].text})
            want += f"> {answer[0].text}\n"
        assert (code, out) == (0, want + "> ") and "Ctrl-C" in err


def test_ctrl_c_cuts_an_answer_short_and_the_server_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(["--echo", "--echo-rate", "20", "--in-process", "--admin-port", "0"]) as parrot:
        assert parrot.admin_url is not None
        count = itertools.count()

        def interrupt(*parts: object, **options: object) -> None:
            if options.get("flush") and next(count) == 2:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr("builtins.print", interrupt)
        code, _, _ = chat(monkeypatch, capsys, "over and over " * 50 + "\n\n", "--url", parrot.url)
        assert code == 0 and next(count) < 10
        for _ in range(100):
            if not json.load(urlopen(f"{parrot.admin_url}/live"))["num_running"]:
                break
            threading.Event().wait(0.02)
        else:
            pytest.fail("it still runs")


def test_what_the_server_says_is_what_the_user_reads(
    server: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, capsys, "hello\n", "--url", server.url)[::2] == (
        1, "An empty line or Ctrl-D ends the conversation, Ctrl-C an answer.\n"
           "minisgl: this server needs a valid key: Authorization: Bearer KEY\n",
    )  # fmt: skip
    code, _, err = chat(monkeypatch, capsys, "x " * 3000 + "\n", "--url", server.url, "--api-key", KEY)
    assert code == 1 and "512" in err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--url", "nowhere"], 1, "url must be like http://HOST:PORT, got 'nowhere'"),
        (["--url", "http://127.0.0.1:1", "--num-pages", "5"], 2, "--num-pages: not with --url"),
        (["--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1: [Errno 111] Connection refused"),
    ],
)
def test_bad_usage_is_one_line(
    options: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = chat(monkeypatch, capsys, "hello\n", *options)
    assert found == code and message in err.splitlines()[-1] and "Traceback" not in err


@contextmanager
def answers(parts: Sequence[bytes]) -> Iterator[str]:
    """A server that sends these bytes to whoever comes first, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                request = b""
                while b'"messages"' not in request:  # what is not read would be answered by a reset
                    request += connection.recv(65536)
                for part in parts:
                    connection.sendall(part)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNK = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'


@pytest.mark.parametrize(
    ("parts", "texts", "problem"),
    [
        ([HEAD, CHUNK[:20], CHUNK[20:], b'data: {"choices":[]}\n\n: note\n\n', b"data: [DONE]\n\n"], ["hi"], None),
        ([HEAD, CHUNK], ["hi"], "broke off"),
        ([HEAD, CHUNK, b'data: {"error":{"message":"the engine is gone"}}\n\n'], ["hi"], "the engine is gone"),
        ([b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>"], [], "status 502 Bad Gateway"),
        ([b"nonsense\r\n\r\n"], [], "nonsense"),
    ],
)
def test_streams_of_all_kinds(parts: list[bytes], texts: list[str], problem: str | None) -> None:
    """An answer that breaks off is told from one that ends."""
    found = []

    def read() -> None:
        for text in RemoteServer(url).stream_chat([{"role": "user", "content": "x"}], SamplingParams()):
            found.append(text)

    with answers(parts) as url:
        if problem is None:
            read()
        else:
            with pytest.raises((RuntimeError, ValueError), match=problem):
                read()
    assert found == texts


def test_only_what_differs_from_the_default_is_sent() -> None:
    assert changes(SamplingParams()) == {}
    params = SamplingParams(temperature=0.5, stop=["a", "b"], max_tokens=3, ignore_eos=True)
    assert changes(params) == {"temperature": 0.5, "stop": ["a", "b"], "max_tokens": 3, "ignore_eos": True}
    assert {f.name for f in fields(SamplingParams)} >= changes(params).keys()
