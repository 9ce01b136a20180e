"""Measurements at a size that a CPU bears: that they run and hold together, never how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from minisgl.benchmark import attention
from minisgl.benchmark.ceilings import measure_ceilings
from minisgl.benchmark.timing import time_calls
from minisgl.engine.attention import AttentionShape

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


def test_every_kernel_of_this_device_is_measured_and_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = attention.bench_attention(
        device="cpu", decode=[(2, 20)], prefill=[(2, 9)], spread=0.5, repeats=2, output=str(tmp_path / "r.json")
    )
    measured = {(row["part"], row["kernel"]) for row in rows}
    assert {("decode", "torch"), ("prefill", "torch")} <= measured
    if importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET"):
        assert {("decode", "triton"), ("prefill", "triton")} <= measured
    assert all(row["off by"] < 1e-5 for row in rows)
    assert all(min(r["time ratio"] for r in rows if r["part"] == part) == 1 for part in ("decode", "prefill"))
    printed = capsys.readouterr().out
    assert "us" not in printed.split() and "time ratio" in printed  # absolute times of a CPU mean nothing
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["rows"] == rows and report["fastest"] == attention.fastest(rows) and len(report["fastest"]) == 2


def test_bytes_and_flops_of_a_case() -> None:
    shape = AttentionShape(dtype=torch.bfloat16, num_heads=4, num_kv_heads=2, head_dim=8, page_size=16)
    decode, prefill = (attention._Case(part, shape, (3, 5)) for part in ("decode", "prefill"))
    assert decode.num_bytes == (2 * 8 * 2 * 8 + 2 * 2 * 4 * 8) * 2
    assert decode.num_flops == 4 * 8 * 4 * 8
    # Of 3 queries the first sees 1 token, the last 3; of 5 likewise.
    assert prefill.num_flops == 4 * (1 + 2 + 3 + 1 + 2 + 3 + 4 + 5) * 4 * 8
