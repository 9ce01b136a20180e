"""What runs the tests on a GPU, run without one: over a file that needs none."""

from __future__ import annotations

import time
from pathlib import Path

from run_gpu import finish, read_log, start

FILES = ["tests/test_compile_ahead.py", "tests/test_choice.py"]


def test_shares_are_all_tests_once(tmp_path: Path) -> None:
    shares = ["0/2", "1/2", "alone"]
    finish([start(share, tmp_path / share, FILES) for share in shares], time.monotonic() + 100)
    logs = {share: read_log(tmp_path / share / "log.txt") for share in shares}
    names = [name for ended, _ in logs.values() for same in ended.values() for name in same]
    finish([start("0/1", tmp_path / "all", FILES)], time.monotonic() + 100)
    everything, count = read_log(tmp_path / "all" / "log.txt")
    assert sorted(names) == sorted(name for same in everything.values() for name in same) and count == len(names) > 20
    assert logs["0/2"][1] - logs["1/2"][1] in (0, 1) and logs["alone"][1] == 0


def test_a_process_that_crashes_or_is_slow_tells_what_it_did(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "collected 9 items / 4 deselected / 5 selected\n\n"
        "tests/test_a.py::test_b[1 and 2-x] PASSED      [ 20%]\n"
        "tests/test_a.py::test_c SKIPPED (needs more)   [ 40%]\n"
        "tests/test_a.py::test_d FAILED                 [ 60%]\n"
        "notebooks/01-a.ipynb::01-a.ipynb PASSED        [ 80%]\n"
        "tests/test_a.py::test_e Fatal Python error: Aborted\n"
    )
    ended, selected = read_log(log)
    passed = ["tests/test_a.py::test_b[1 and 2-x]", "notebooks/01-a.ipynb::01-a.ipynb"]
    assert selected == 5 and ended == {
        "passed": passed, "failed": ["tests/test_a.py::test_d"], "error": [], "skipped": ["tests/test_a.py::test_c"],
    }  # fmt: skip
    slow = start("0/1", tmp_path / "slow", ["tests/test_parity.py"])
    finish([slow], time.monotonic() + 0.5)
    assert slow.poll() not in (None, 0)
