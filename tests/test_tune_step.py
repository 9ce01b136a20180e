"""Variants tried inside a step, on a CPU: who wins is made up, what is put in and left there is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from minisgl import LLM
from minisgl.benchmark import tune_decode, tune_small
from minisgl.benchmark import tune_step as module
from minisgl.benchmark.ceilings import Ceilings
from minisgl.benchmark.gemm import Product
from minisgl.benchmark.measure import Bench
from minisgl.benchmark.tune_step import (
    Step,
    attention_variants,
    climb,
    paths_of,
    tune_attention,
    tune_product,
    tune_step,
)
from minisgl.engine.attention import triton_backend
from minisgl.kernels.triton_line import DecodeOptions, choose_options
from minisgl.kernels.triton_linear import LinearPath

SIZES: dict[str, Any] = dict(device="cpu", max_running=4, max_model_len=64, page_size=16, num_pages=24)


def test_only_what_gains_twice_is_kept() -> None:
    measured = {"a": [100, 100], "lucky": [90, 100], "little": [99.7], "b": [95, 96], "c": [95.8], "d": [90, 91]}
    times = {name: iter(list_) for name, list_ in measured.items()}
    best, tried = climb("a", ["lucky", "little", "b", "c", "d"], lambda name: next(times[name]))
    assert best == "d" and [(name, kept) for name, _, kept in tried if kept] == [("a", True), ("b", True), ("d", True)]
    assert [us for _, us, _ in tried] == [100, 100, 99.7, 96, 95.8, 91]
    assert all(next(rest, None) is None for rest in times.values())


class FakeStep(Step):
    """Notes what is in place whenever it is timed. A time of 0: the device cannot run it."""

    def __init__(self, look: Callable[[], Any], times: list[float]) -> None:
        self.look, self.times, self.seen = look, iter(times), []

    def seconds(self) -> float:
        self.seen.append(self.look())
        found = next(self.times)
        if found == 0:
            raise RuntimeError("out of resource: shared memory\nReduce it")
        return found


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_product_keeps_what_made_the_step_faster(is_measured: bool) -> None:
    old = LinearPath("gemv", block_n=2, block_k=64)
    paths: module.Paths = {(48, 32): {2: old}} if is_measured else {}
    step = FakeStep(lambda: paths[48, 32].get(2), [3, 3, 2, 2, 4, 4, 4])
    rows = list(tune_product(step, Product("small", "o", 48, 32, "add", 1), paths, 2, 3))
    assert [row["kept"] for row in rows][:2] == [True, True] and rows[0]["variant"] == "as it is"
    assert len(rows) >= 3 and not any(row["kept"] for row in rows[2:])
    kept = paths[48, 32][2]
    assert kept == step.seen[2] == step.seen[3] != old and step.seen[:2] == ([old, old] if is_measured else [None] * 2)


def test_what_the_device_cannot_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    paths: module.Paths = {}
    step = FakeStep(lambda: paths[48, 32].get(2), [3, 3, 0, 2, 2, 4])
    rows = list(tune_product(step, Product("small", "o", 48, 32, "add", 1), paths, 2, 3))
    assert [row["kept"] for row in rows] == [True, False, True, False] and rows[1]["us"] is None
    assert paths[48, 32][2] == step.seen[3]
    out = capsys.readouterr().out
    assert f"left out: {rows[1]['variant']}: ['out of resource: shared memory']" in out


def test_attention_is_what_it_was_when_all_has_been_tried() -> None:
    with LLM("tiny", attention="triton", **SIZES) as llm:
        bench = Bench(llm, "tiny", Ceilings(1e10, 1e10, 1e10, 1e-6, "float32"))
        step = FakeStep(lambda: triton_backend.choose_options(3), [2.0] * 99)
        rows = list(tune_attention(step, bench, 3))
    assert triton_backend.choose_options is choose_options
    assert len(rows) > 5 and len(set(step.seen)) == len(rows) and sum(row["kept"] for row in rows) == 1


def test_variants_of_attention_fit_the_device() -> None:
    default = DecodeOptions(heads=1)
    found = attention_variants(default, 6)
    assert default not in found and len(set(found)) == len(found)
    assert {options.heads for options in found} == {1, 2}
    assert replace(default, each=4, block_rows=32, num_warps=2) in found or not module.fits(
        replace(default, each=4, block_rows=32, num_warps=2)
    )


def test_real_steps_are_timed_and_the_engine_is_left_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "attention_variants", lambda default, heads: [replace(default, each=1)])
    with LLM("tiny", attention="triton", **SIZES) as llm:
        bench = Bench(llm, "tiny", Ceilings(1e10, 1e10, 1e10, 1e-6, "float32"))
        rows, paths = tune_step(bench, [(2, 5)], parts=["attention"], steps=1)
        assert not paths and not llm.engine.has_work
        assert tune_step(bench, [(2, 5)], parts=["attention"], seconds=-1)[0] == []
    assert [row["step"] for row in rows] == ["2 x 5"] * 2 and all(row["us"] > 0 for row in rows)
    with LLM("tiny", kernels="triton", **SIZES) as llm:
        assert (4096, 1024) not in paths_of(Bench(llm, "tiny", Ceilings(1e10, 1e10, 1e10, 1e-6, "float32")))
    with LLM("tiny", **SIZES) as llm, pytest.raises(ValueError, match="only kernels 'triton'"):
        paths_of(Bench(llm, "tiny", Ceilings(1e10, 1e10, 1e10, 1e-6, "float32")))


@pytest.mark.parametrize("tuner", [module, tune_small, tune_decode])
def test_without_a_device_that_is_said_at_once(
    tuner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tuner.main(["--output", "nowhere.json"])
    assert "there is no CUDA device here" in capsys.readouterr().err
