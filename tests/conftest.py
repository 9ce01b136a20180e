"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from checkpoints import Checkpoint, make_checkpoint

# Tensors here are tiny: a second thread would mostly wait, most of all where other processes want the cores too.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A checkpoint by name (`checkpoints.NAMES`), made when it is first asked for."""
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp(name)))
