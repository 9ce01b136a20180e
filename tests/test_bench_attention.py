"""Measurements at a size that a CPU bears: that they run and hold together, never how fast anything is."""

from __future__ import annotations

import torch

from minisgl.benchmark.ceilings import measure_ceilings
from minisgl.benchmark.timing import time_calls

DEVICE = torch.device("cpu")


def test_time_of_a_call_does_not_depend_on_how_many_there_are() -> None:
    x, few, many = torch.randn(128, 128), [], []
    one = time_calls([lambda: few.append(x @ x)], DEVICE, repeats=3, run_s=0.005)
    four = time_calls([lambda: many.append(x @ x)] * 4, DEVICE, repeats=3, run_s=0.005)
    assert 0.1 < one.median_s / four.median_s < 10 and one.spread_s >= 0 and not one.in_graph
    assert len(many) % 4 == 0


def test_ceilings_count_bytes_and_flops_of_a_run() -> None:
    """Twice the work takes about twice the time, so the rates do not depend on the size."""
    small = measure_ceilings(DEVICE, num_bytes=16 << 20, size=128)
    large = measure_ceilings(DEVICE, num_bytes=32 << 20, size=256)
    for name in ("read_bytes_per_s", "copy_bytes_per_s", "matmul_flops_per_s"):
        assert 0.1 < getattr(small, name) / getattr(large, name) < 10, name
    assert 1e-8 < small.launch_s < 1e-2 and small.matmul_dtype == "float32"
