"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache

import pytest
import torch

# Triton decides when it is imported whether it interprets, and transformers, which the next line brings, imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from checkpoints import Checkpoint, make_checkpoint

# Tensors here are tiny: a second thread would mostly wait, most of all where other processes want the cores too.
torch.set_num_threads(1)

# A run that was started in the background ignores Ctrl-C, and so would everything that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A checkpoint by name (`checkpoints.NAMES`), made when it is first asked for."""
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp(name)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A share of the tests, where `run_gpu.py` asks for one: "i/n", or "alone"."""
    share = os.environ.get("MINISGL_TEST_SHARE")
    if share is None:
        return
    alone = [item for item in items if item.get_closest_marker("alone")]
    if share != "alone":
        nth, count = map(int, share.split("/"))
        alone = [item for item in items if item not in alone][nth::count]
    config.hook.pytest_deselected(items=[item for item in items if item not in alone])
    items[:] = alone
