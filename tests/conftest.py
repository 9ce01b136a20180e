"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

# Triton decides when it is imported whether it interprets, and transformers, which the next line brings, imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from checkpoints import Checkpoint, make_checkpoint

from minisgl.benchmark.report import source_digest, write_report

# Tensors here are tiny: a second thread would mostly wait, most of all where other processes want the cores too.
torch.set_num_threads(1)

# A run that was started in the background ignores Ctrl-C, and so would everything that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A checkpoint by name (`checkpoints.NAMES`), made when it is first asked for."""
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp(name)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What the tests of kernels and engine gave on a GPU, where there is a place for it; `.ci/run` looks at it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not torch.cuda.is_available() or "OUT" not in os.environ or reporter is None:
        return
    counts = {kind: len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
    facts = {**counts, "source": source_digest()}
    write_report(Path(os.environ["OUT"]) / "gpu-tests.json", "tests on a GPU", torch.device("cuda"), facts)
