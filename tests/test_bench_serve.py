"""What `bench serve` and `bench front` say: known streams counted right, errors told apart, processes found."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from minisgl import cli
from minisgl.benchmark import front
from minisgl.benchmark.front import _lateness_ms, bench_front
from minisgl.benchmark.load import Ask, Sample, run_load
from minisgl.benchmark.serve import bench_serve, draw, draw_asks, percentiles, summarise
from minisgl.benchmark.serving import Serving, cpu_seconds, engine_arguments, serving
from minisgl.benchmark.workload import equal_lengths
from minisgl.config import EngineConfig

SMALL = equal_lengths(6, 7, 5)


@pytest.fixture(scope="module")
def parrot() -> Iterator[Serving]:
    with serving(["--echo", "--max-waiting-tokens", "1000", "--device", "cpu"]) as server:
        yield server


def sample(due: float, *times: float, tokens: int | None = None, error: str | None = None) -> Sample:
    num = len(times) if tokens is None else tokens
    return Sample(due, due, list(times), [1] * len(times), (times or (due + 1,))[-1], 7, 2, num, error)


# ------------------------------------------------------------------------------------------------ the client


@contextmanager
def wire(parts: Sequence[bytes], pause_s: float = 0.03) -> Iterator[str]:
    """A server that sends these parts, one by one, to whoever comes first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection:
                connection.recv(65536)
                for part in parts:
                    connection.sendall(part)
                    time.sleep(pause_s)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


HEAD = b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,'
    b'"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
)
END = b"data: [DONE]\n\n"


def test_events_are_counted_however_they_are_cut() -> None:
    parts = [HEAD[:9], HEAD[9:], EVENT[:-1], EVENT[-1:] + EVENT + EVENT[:11], EVENT[11:], USAGE + END]
    with wire(parts) as url:
        (got,) = run_load(url, [Ask(0.0, {"prompt": "x"})])
    assert got.error is None and got.num_events == [2, 1] and len(got.times_s) == 2
    assert (got.prompt_tokens, got.cached_tokens, got.output_tokens) == (9, 3, 4)
    assert 0 < got.first_token_s < got.whole_s <= got.end_s
    assert got.token_s == pytest.approx((got.times_s[1] - got.times_s[0]) / 3) and got.gaps_s[0] > 0.01


def test_the_last_events_are_not_text_wherever_they_come() -> None:
    with wire([HEAD + EVENT + EVENT + USAGE, END]) as url:
        (got,) = run_load(url, [Ask(0.0, {"prompt": "x"})])
    assert got.num_events == [2] and got.error is None


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}"], "status 429"),
        ([HEAD + EVENT], "the stream broke off"),
        ([HEAD + EVENT + b'data: {"error":{"message":"gone"}}\n\n'], "an error in the stream"),
        ([HEAD + USAGE + END], "no token came"),
        ([], "the stream broke off"),
    ],
)
def test_an_error_is_told_by_its_kind(parts: list[bytes], error: str) -> None:
    with wire(parts) as url:
        (got,) = run_load(url, [Ask(0.0, {"prompt": "x"})])
    assert got.error == error and got.end_s > 0


def test_a_server_that_is_silent_or_not_there_is_an_error_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        (got,) = run_load(url, [Ask(0.0, {})], timeout_s=0.2)
    assert got.error == "not done within 0.2 s"
    (got,) = run_load(url, [Ask(0.0, {})])
    assert got.error == "Connection refused"
    with pytest.raises(ValueError, match="must be like http"):
        run_load("ftp://x", [])


def test_requests_are_sent_when_due_whoever_still_waits() -> None:
    """To a server that never answers: the last was sent before any ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        got = run_load(url, [Ask(due, {"prompt": "x"}) for due in (0.2, 0.0, 0.1)], timeout_s=1.0)
    assert [s.due_s for s in got] == [0.2, 0.0, 0.1]
    sent = [s.sent_s for s in got if s.sent_s is not None]
    assert all(at >= s.due_s for at, s in zip(sent, got, strict=True)) and max(sent) < min(s.end_s for s in got)


def test_who_watches_hears_of_each_beginning_and_end(parrot: Serving) -> None:
    asks = [Ask(due, {"prompt": "a b c d", "max_tokens": 4, "ignore_eos": True}) for due in (0.1, 0.0, 0.05)]
    seen: list[tuple[int, int]] = []
    got = run_load(parrot.url, asks, watch=lambda *counts: seen.append(counts))
    assert {(s.error, s.output_tokens) for s in got} == {(None, 4)}
    assert seen[-1] == (3, 3) and len(seen) == len(set(seen)) == 6 and seen == sorted(seen)


# ------------------------------------------------------------------------------------------------ what is said


def test_arrivals_are_by_chance_at_the_rate_and_the_same_for_a_seed() -> None:
    many = equal_lengths(4000, 2, 3)
    dues = [ask.due_s for ask in draw_asks(many, 50.0, seed=1)]
    gaps = [b - a for a, b in pairwise(dues)]
    mean = sum(gaps) / len(gaps)
    assert dues[0] == 0 and mean == pytest.approx(1 / 50, rel=0.06)
    assert sum(g > 1 / 50 for g in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # exp(-1): Poisson's
    assert draw_asks(SMALL, 5.0, 1) == draw_asks(SMALL, 5.0, 1) != draw_asks(SMALL, 5.0, 2)
    assert {ask.due_s for ask in draw_asks(SMALL, float("inf"), 1)} == {0.0}
    body = draw_asks(SMALL, 5.0, 1)[0].body
    assert len(body["prompt"]) == 7 and body["max_tokens"] == 5 and body["ignore_eos"]


def test_the_figures_worked_out_by_hand() -> None:
    samples = [
        sample(0.0, 0.1, 0.2, 0.3),  # first 100 ms, 100 ms a token
        sample(1.0, 1.4, 1.5, 1.6),  # first 400 ms
        sample(2.0, 2.1, 2.6, 3.1),  # 500 ms a token
        sample(3.0, 3.1),  # one token: no time from one to the next
        sample(4.0, error="status 429"),
    ]
    got = summarise(samples, first_token_limit_s=0.3, token_limit_s=0.2)
    assert (got["requests"], got["answered"], got["errors"]) == (5, 4, {"status 429": 1})
    assert got["seconds"] == 5.0 and got["output tok/s"] == 2.0 and got["answered/s"] == 0.8
    assert got["goodput/s"] == pytest.approx(0.4) and got["goodput %"] == pytest.approx(40)
    assert got["first token ms"]["p50"] == pytest.approx(100) and got["first token ms"]["max"] == pytest.approx(400)
    assert got["ms a token"]["max"] == pytest.approx(500) and got["pause ms"]["p50"] == pytest.approx(100)
    assert summarise(samples)["goodput %"] == 80
    assert percentiles([]) == {} and percentiles([1.0, 3.0])["mean"] == 2
    with pytest.raises(RuntimeError, match="429"):
        summarise(samples[-1:])


def test_lateness_is_counted_from_the_punctual_token() -> None:
    punctual = sample(0.0, *(1 + k / 10 for k in range(10)))
    assert _lateness_ms(punctual, 10.0, (0.95, 1.95)) == pytest.approx([0] * 10)
    punctual.times_s[4] += 0.03
    assert max(_lateness_ms(punctual, 10.0, (0.95, 1.95))) == pytest.approx(30)
    assert max(_lateness_ms(punctual, 10.0, (1.45, 1.95))) == pytest.approx(0)
    del punctual.times_s[6:8], punctual.num_events[6:8]  # they came with the next: which token is which is not known
    assert _lateness_ms(punctual, 10.0, (0.95, 1.95)) == []


def test_the_picture_has_a_line_for_each_request() -> None:
    picture = draw([sample(0.0, 0.5, 1.0), sample(0.5, error="a <b>")])
    assert picture.svg.count("<rect") == 3 and "a &lt;b&gt;" in picture.svg
    assert "2 requests" in picture.alt and "1 failed" in picture.alt


# ------------------------------------------------------------------------------------------------ with a server


def test_a_server_is_started_measured_and_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"model": "tiny", "device": "cpu", "num_pages": 60, "prefix_cache": False}
    result = bench_serve(
        options=options, workload=SMALL, rate=float("inf"), first_token_limit_s=60.0,
        output=str(tmp_path / "a.json"), picture=str(tmp_path / "a.svg"),
    )  # fmt: skip
    assert result["answered"] == 6 and result["input tokens"] == 42 and result["output tokens"] == 30
    assert result["goodput %"] == 100 and result["model"] == "tiny"
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["rate"] == "all at once" and report["workload"]["requests"] == 6 and "commit" in report
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "first token ms" in capsys.readouterr().out


def test_a_running_server_by_the_command(parrot: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--num-requests", "5", "--input-len", "3", "6", "--output-len", "2", "4"]
    assert cli.main(["bench", "serve", "--url", parrot.url, "--rate", "100", *few]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n +5 +5 ", out) and "client" in out and "worker" not in out
    # 20 prompts of 300 tokens at once are more than may wait there.
    crowd = ["--num-requests", "20", "--input-len", "300", "300", "--output-len", "9", "9"]
    assert cli.main(["bench", "serve", "--url", parrot.url, "--rate", "inf", *crowd]) == 0
    assert re.search(r"\d+ failed: status 429", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--url", "http://127.0.0.1:1"], 1, "does not tell which models it serves"),
        (["--url", "http://127.0.0.1:1", "--num-pages", "4"], 2, "--num-pages: not with --url"),
        (["--rate", "0"], 2, "--rate: must be a number above 0"),
        (["--input-len", "5", "4"], 2, "MIN must be at most MAX"),
        (["--model", "no/such folder"], 1, "the server did not start: "),
    ],
)
def test_bad_usage_is_one_line(options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = cli.main(["bench", "serve", *options])
    except SystemExit as exit:
        found = int(exit.code or 0)
    err = capsys.readouterr().err
    assert found == code and message in err and err.count("\n") == 1


def test_the_front_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "FLAT_OUT_TOKENS", 4000)
    rows = bench_front({"model": "tiny"}, streams=(3, 5), rate=40.0, seconds=1.0, output=str(tmp_path / "front.json"))
    assert [row["streams"] for row in rows] == ["3 at 40/s", "5 at 40/s", "5 flat out"]
    for row in rows:
        assert row["events/s"] > 0 and row["tokens an event"] == pytest.approx(row["tok/s"] / row["events/s"])
        assert {"front cores", "worker cores", "engine cores", "client cores"} <= row.keys()
    assert rows[-1]["late ms p50"] is None
    report = json.loads((tmp_path / "front.json").read_text())
    assert len(report["rows"]) == 3 and report["an answer of one token, alone, ms"]["p50"] > 0
    assert "alone" in capsys.readouterr().out


def test_the_cost_is_that_of_the_servers_own_processes(parrot: Serving) -> None:
    before = cpu_seconds(parrot)
    assert before.keys() == {"front", "worker", "engine"} and all(seconds > 0 for seconds in before.values())
    body = {"prompt": "a b c d", "max_tokens": 1500, "ignore_eos": True}
    assert {s.error for s in run_load(parrot.url, [Ask(0.0, body)] * 20)} == {None}
    after = cpu_seconds(parrot)
    assert all(after[role] > before[role] for role in before)


def test_engine_options_are_those_of_the_command_line() -> None:
    options = {
        "model": "tiny",
        "prefix_cache": False,
        "strict": True,
        "num_pages": 50,
        "max_model_len": None,
        "seed": 5,
    }
    assert sorted(engine_arguments(options)) == ["--no-prefix-cache", "--num-pages", "--strict", "50"]
    assert engine_arguments({}) == [] and EngineConfig().model == "tiny"


def test_a_server_ends_with_who_started_it() -> None:
    """O07: even if that is killed and can say nothing, as the kernel of a notebook may be."""
    code = "from minisgl.benchmark.serving import serving\n"
    code += "with serving(['--echo']) as server: print(server.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        os.kill(pid, 0)
        starter.kill()
        starter.wait()
        deadline_s = time.monotonic() + 10
        while runs(pid):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether this process lives; one that has ended and that nobody has asked for its exit code does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
