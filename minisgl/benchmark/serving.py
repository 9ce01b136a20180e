"""A server of our own for as long as it is measured, and what its processes cost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig

_END_S = 20.0  # between SIGTERM and SIGKILL
# `minisgl`, which does not outlive the process that started it, however that ends.
_COMMAND = """
from minisgl.server.processes import live_with_parent
live_with_parent()
import sys
from minisgl.cli import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server.

    Args:
        url: of its API.
        admin_url: of its admin's listener, if it was asked for one.
        pid: of its parent process, the front.
    """

    url: str
    admin_url: str | None
    pid: int


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[Serving]:
    """``minisgl serve`` on a free port, ready to answer, for as long as the block lasts, and no longer than this
    process, even if that is killed. To be entered in the main thread: Linux ends the server with the thread.

    Args:
        arguments: further options of the command line.

    Raises:
        RuntimeError: it could not start, with its own last line.
    """
    command = [sys.executable, "-c", _COMMAND, "serve", "--port", "0", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            urls = []
            for _ in range(2 if "--admin-port" in arguments else 1):
                line = process.stdout.readline().strip()
                if not line:
                    process.wait()
                    log.seek(0)
                    raise RuntimeError(
                        f"the server did not start: {(log.read().splitlines() or ['it says nothing'])[-1]}"
                    )
                urls.append(line.split(" at ")[-1])
            yield Serving(urls[0], urls[1] if len(urls) > 1 else None, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def engine_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options of `LLM` as those of the command line; what is as by default is left out."""
    arguments = []
    for each in fields(EngineConfig):
        value = options.get(each.name, each.default)
        flag = each.name.replace("_", "-")
        if value == each.default or each.name == "seed":
            continue
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                arguments += [f"--{flag}", str(one)]
    return arguments


def cpu_seconds(serving: Serving) -> dict[str, float]:
    """CPU time so far of a server's processes: "front", "worker", "engine". Empty where there is no ``/proc``."""
    pids = {"front": serving.pid}
    try:
        for child in Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_text()
            pids.update({role: int(child) for role in ("worker", "engine") if f"'{role}'" in command})
        return {role: _cpu_seconds(pid) for role, pid in pids.items()}
    except OSError:
        return {}


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
