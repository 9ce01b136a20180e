"""Threads that launch the same new kernel compile it once, and compute no products."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from minisgl.kernels import compile_once as module
from minisgl.kernels.compile_once import WithoutProducts, compile_once

triton = pytest.importorskip("triton")
runtime = triton.knobs.runtime
NUM_THREADS = 6


class Launches:
    """What Triton does when a kernel is launched: hook, a look into the cache on disk, compilation, hook."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.on_disk, self.compiled = fails, set[str](), Counter[str]()
        self._together = threading.Barrier(NUM_THREADS)

    def launch(self, key: str) -> None:
        self._together.wait()
        facts = dict(
            fn=SimpleNamespace(module="m", name="kernel"), key=key, repr="", compile={}, is_manual_warmup=False
        )
        if runtime.jit_cache_hook is not None:
            assert not runtime.jit_cache_hook(**facts, already_compiled=False)
        if key not in self.on_disk:
            time.sleep(0.1)
            self.compiled[key] += 1
            if self.fails:
                return
            self.on_disk.add(key)
        if runtime.jit_post_compile_hook is not None:
            runtime.jit_post_compile_hook(**facts, already_compiled=False)

    def run(self) -> Counter[str]:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(self.launch, ["a", "b"] * (NUM_THREADS // 2)))
        return self.compiled


def test_a_kernel_is_compiled_by_one_thread() -> None:
    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    with compile_once():
        assert Launches().run() == {"a": 1, "b": 1}
    assert (runtime.jit_cache_hook, runtime.jit_post_compile_hook) == hooks
    assert Launches().run()["a"] > 1


def test_nobody_waits_for_ever_for_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    with compile_once():
        assert Launches(fails=True).run() == {"a": 3, "b": 3}


@torch.no_grad()
def test_products_are_left_out_in_this_thread_only() -> None:
    """Every way in which an engine asks for one; each right hand side is NaN."""
    x, weight, three = torch.ones(2, 3), torch.full((4, 3), torch.nan), torch.full((5, 3, 4), torch.nan)
    stream = torch.full((2, 4), 7.0)
    out = stream.clone()
    with WithoutProducts():
        for product in (F.linear(x, weight), F.linear(x, weight, stream[0]), x @ weight.t()):
            assert torch.equal(product, torch.zeros(2, 4))
        assert torch.equal(torch.ones(5, 2, 3) @ three, torch.zeros(5, 2, 4))
        assert F.linear(torch.ones(5, 2, 3), weight).shape == (5, 2, 4)
        torch.mm(x, weight.t(), out=out)
        torch.addmm(out, x, weight.t(), out=out)
        out.addmm_(x, weight.t())
        assert torch.equal(out, stream), "what is there stays"
        assert torch.equal(out + 1, stream + 1), "everything else is computed"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(F.linear, x, weight).result().isnan().all()
    assert F.linear(x, weight).isnan().all()
