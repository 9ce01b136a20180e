"""``python -m minisgl serve``, really started: what its tests and the trace fuzzer share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

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
        assert self.process.stdout is not None
        urls = [self.process.stdout.readline().strip().rpartition(" at ")[2]]
        if "--admin-port" in options:
            urls.append(self.process.stdout.readline().strip().rpartition(" at ")[2])
        assert urls[0], self.log
        self.url, self.admin_url = urls[0], urls[-1]
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.wait(lambda: self.client.get("/ready").status_code == 200, 20)

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
