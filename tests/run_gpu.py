"""All tests that want a GPU, and the notebooks, in several processes side by side: `python tests/run_gpu.py`.

Most of their time is compilation, which is the host's. So each process takes every n-th test; those that look at the
device's memory come last, by themselves. The report says what passed and what was not reached in time; `.ci/run`
compares the sources with it. With a checkpoint in ``$MINISGL_REAL_MODEL`` its GPU tests are run, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from minisgl.benchmark.report import source_digest, write_report

ROOT = Path(__file__).parent.parent
REAL_MODEL_TESTS = "tests/test_real_model.py"
FILES = (
    REAL_MODEL_TESTS, "tests/test_gpu.py", "tests/test_triton.py", "tests/test_linear.py",
    "tests/test_triton_elementwise.py", "tests/test_sampler.py", "tests/test_prepare.py", "tests/test_flashinfer.py",
    "tests/test_model.py",
)  # fmt: skip
MARKS = "not full and (not real_model or gpu)"
KINDS = ("passed", "failed", "error", "skipped")


def start(share: str, folder: Path, files: Sequence[str] = FILES, **variables: str) -> subprocess.Popen[bytes]:
    """Start a process with its share of the tests, "i/n" or "alone"; what it says goes to ``folder/log.txt``."""
    folder.mkdir(parents=True)
    environment = os.environ | {"MINISGL_TEST_SHARE": share, **variables}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", MARKS, *files]
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finish(processes: list[subprocess.Popen[bytes]], end: float) -> None:
    """Wait for them until then; who is not done is interrupted, and killed if that does not help."""
    for stop in (None, signal.SIGINT, signal.SIGKILL):
        for process in processes:
            if stop is not None and process.poll() is None:
                process.send_signal(stop)
        limit = end if stop is None else time.monotonic() + 10
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0.1))


def read_log(path: Path) -> tuple[dict[str, list[str]], int]:
    """The tests of a process by how they ended, and how many there were: from its own words, since a process that
    crashes writes no report."""
    text = path.read_text(encoding="utf-8", errors="replace")
    ended: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, word in re.findall(r"^((?:tests|notebooks)/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", text, re.M):
        ended[word.lower()].append(name)
    selected = re.search(r"collected (\d+) items?(?: / .*?(\d+) selected)?", text)
    return ended, int(selected[2] or selected[1]) if selected else 0


def main() -> int:
    """Run them; the exit status is 0 if all were reached and none failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 4), metavar="N")
    parser.add_argument("--seconds", type=float, default=600, help="for all (default: 600)")
    parser.add_argument("--output", default="book/results/gpu-tests.json", metavar="FILE")
    parser.add_argument("--logs", metavar="FOLDER", help="keep what the processes said")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.logs or temporary)
        files = [name for name in FILES if name != REAL_MODEL_TESTS or "MINISGL_REAL_MODEL" in os.environ]
        works = {f"share-{i}": (f"{i}/{args.processes}", files) for i in range(args.processes)}
        works |= {path.stem: ("0/1", [f"notebooks/{path.name}"]) for path in ROOT.glob("notebooks/*.ipynb")}
        processes = {name: start(share, folder / name, own) for name, (share, own) in works.items()}
        finish(list(processes.values()), end - 0.3 * args.seconds)
        processes["alone"] = start("alone", folder / "alone", files, OUT=str(Path(args.output).absolute().parent))
        finish([processes["alone"]], end)
        counts, unreached = dict.fromkeys(KINDS, 0), 0
        bad: list[str] = []
        for name, process in processes.items():
            ended, selected = read_log(folder / name / "log.txt")
            for kind in KINDS:
                counts[kind] += len(ended[kind])
            left, own_bad = selected - sum(map(len, ended.values())), [*ended["failed"], *ended["error"]]
            if process.returncode not in (0, 5) and not left and not own_bad:  # 5: it had no tests
                own_bad = [f"{name}: exit status {process.returncode}"]
            unreached += left
            bad += own_bad
    facts = {**counts, "not reached": unreached, "bad": sorted(bad), "source": source_digest()}
    facts["real model"] = Path(os.environ["MINISGL_REAL_MODEL"]).name if "MINISGL_REAL_MODEL" in os.environ else None
    write_report(Path(args.output), "tests on a GPU", torch.device("cuda"), facts)
    print(json.dumps(facts, indent=1))
    return int(bool(bad or unreached))


if __name__ == "__main__":
    sys.exit(main())
