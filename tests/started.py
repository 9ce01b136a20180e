"""``python -m minisgl serve``, really started: what its tests and the trace fuzzer share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from minisgl import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Started:
    """A server in processes of its own, ready when this is constructed.

    Args:
        options: of the command line; a free port is taken.
        environment: what it finds there beside our own.
    """

    def __init__(self, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile("w", suffix=".log")  # noqa: SIM115 (lives as long as the server)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", "--port", "0", *options],
            stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.client = httpx.Client(timeout=60)
        try:
            assert self.process.stdout is not None
            num_lines = 2 if "--admin-port" in options else 1
            urls = [self.process.stdout.readline().strip().rpartition(" at ")[2] for _ in range(num_lines)]
            assert urls[0], self.log
            self.url, self.admin_url = urls[0], urls[-1]
            self.client.base_url = self.url
            self.wait(lambda: self.client.get("/ready").status_code == 200, 20)
        except BaseException:
            self.close()
            raise

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        return Path(self._log.name).read_text(errors="replace")

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of front, worker and engine."""
        pids = {"front": self.process.pid}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            line = Path(f"/proc/{pid}/cmdline").read_text()
            pids.update({role: int(pid) for role in ("worker", "engine") if f"'{role}'" in line})
        return pids

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of each process."""
        pages = {role: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for role, pid in self.pids.items()}
        return {role: n * os.sysconf("SC_PAGE_SIZE") / 2**20 for role, n in pages.items()}

    def post(self, body: Mapping[str, Any], path: str | None = None) -> httpx.Response:
        """An answer, whole."""
        return self.client.post(path or (CHAT if "messages" in body else COMPLETIONS), json=body)

    def metrics(self) -> dict[str, float]:
        """All of ``/metrics`` without labels, by name without the prefix."""
        lines = [line.rsplit(" ", 1) for line in self.client.get("/metrics").text.splitlines()]
        return {
            name.removeprefix("minisgl_"): float(value) for name, value in lines if name[0] != "#" and "{" not in name
        }

    @property
    def leftovers(self) -> str | None:
        """What an idle server should not have, or None."""
        now = self.metrics()
        for name in ("requests_running", "requests_waiting", "requests_in_flight"):
            if now[name]:
                return f"{name} is {now[name]:g}"
        missing = now["kv_pages"] - now["kv_pages_free"] - now["kv_pages_cached"]
        return f"{missing:g} pages are neither free nor cached" if missing else None

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Nothing runs and no page is lost; AssertionError if that takes longer."""
        end_s = time.monotonic() + timeout_s
        while (problem := self.leftovers) is not None:
            assert time.monotonic() < end_s, f"after {timeout_s:g} s {problem}"
            time.sleep(0.02)

    def wait(self, is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Until it is so; AssertionError if that takes longer or the server has ended."""
        end_s = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end_s, "it did not come to be so"
            time.sleep(0.02)

    def end(self, timeout_s: float = 20.0) -> tuple[int, str]:
        """Wait for its end; exit code and stderr. AssertionError, and its death, if it does not come."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {timeout_s:g} s") from None
        finally:
            self.close()
        return code, self.log

    def close(self) -> None:
        """Kill it, if it lives."""
        self.client.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def started(*options: str, environment: Mapping[str, str] | None = None) -> Iterator[Started]:
    """A server for as long as the block lasts, which it must outlive in good order."""
    server = Started(*options, environment=environment)
    try:
        yield server
        server.wait_idle()
        server.process.terminate()
        code, log = server.end()
        assert code == 0 and "Traceback" not in log and "level=error" not in log, log
    finally:
        server.close()


def events(lines: Any) -> list[dict[str, Any]]:
    """The JSON of a stream's events; ``[DONE]`` comes last and once."""
    found = [line.removeprefix("data: ") for line in lines if line]
    assert found.count("[DONE]") == 1 and found.pop() == "[DONE]", found[-3:]
    return [json.loads(line) for line in found]


def join(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that the chunks of a stream with usage make up."""
    usage = chunks.pop()
    assert usage["choices"] == [] and len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices = fold(chunks)
    assert all(choice["reason"] for choice in choices.values()), "a text without an end"
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage["usage"]}


def fold(chunks: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What some chunks of a stream say of each text: nothing after its end."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for news in chunk["choices"]:
            choice = choices.setdefault(news["index"], {"text": "", "reason": None, "logprobs": {}})
            assert choice["reason"] is None, "something came after the reason"
            choice["text"] += news["text"] if "text" in news else news["delta"].get("content") or ""
            choice["reason"] = news["finish_reason"]
            for name, column in (news["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(column)
    return choices


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """An unstreamed answer in the same form."""
    return {
        "choices": [
            {
                "text": choice["text"] if "text" in choice else choice["message"]["content"],
                "reason": choice["finish_reason"],
                "logprobs": choice["logprobs"] or {},
            }
            for choice in body["choices"]
        ],
        "usage": body["usage"],
    }


def params_of(body: dict[str, Any]) -> SamplingParams:
    """The sampling of a body, for the library."""
    options = {name: value for name, value in body.items() if name not in ("prompt", "messages", "top_logprobs")}
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    if "messages" in body and "logprobs" in options:
        options["logprobs"] = body["top_logprobs"]
    return SamplingParams(**options)
