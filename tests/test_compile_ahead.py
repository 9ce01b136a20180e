"""Kernels are compiled before they are needed, once each, by a run that launches and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from minisgl import LLM, SamplingParams
from minisgl.engine import graphs
from minisgl.engine.graphs import GraphCapture
from minisgl.engine.runner import ModelRunner
from minisgl.kernels.compile_ahead import Compilation, compile_ahead, dry_run, is_dry

triton = pytest.importorskip("triton")


@torch.no_grad()
def test_a_dry_run_makes_zeros_and_leaves_products_out_in_this_thread_only() -> None:
    """Every way in which an engine asks for them; each right hand side is NaN."""
    x, weight, three = torch.ones(2, 3), torch.full((4, 3), torch.nan), torch.full((5, 3, 4), torch.nan)
    stream = torch.full((2, 4), 7.0)
    out = stream.clone()
    with dry_run() as missing, ThreadPoolExecutor(1) as pool:
        for product in (F.linear(x, weight), F.linear(x, weight, stream[0]), x @ weight.t()):
            assert torch.equal(product, torch.zeros(2, 4))
        assert torch.equal(torch.ones(5, 2, 3) @ three, torch.zeros(5, 2, 4))
        assert F.linear(torch.ones(5, 2, 3), weight).shape == (5, 2, 4)
        torch.mm(x, weight.t(), out=out)
        torch.addmm(out, x, weight.t(), out=out)
        out.addmm_(x, weight.t())
        assert torch.equal(out, stream), "what is there stays"
        assert torch.equal(out + 1, stream + 1), "everything else is computed"
        for new in (torch.empty(50), torch.empty_like(out), out.new_empty(9), torch.empty_strided((4,), (2,))):
            assert not new.any()
        assert is_dry() and not pool.submit(is_dry).result()
        assert pool.submit(F.linear, x, weight).result().isnan().all()
    assert not is_dry() and not missing and F.linear(x, weight).isnan().all()


class Capture(GraphCapture):
    """One that only compiles, and needs no CUDA device for that."""

    def __init__(self, runner: ModelRunner, max_seq_len: int) -> None:
        self.runner, self.max_seq_len = runner, max_seq_len


def test_dry_steps_change_nothing() -> None:
    """In the interpreter, which has nothing to compile."""
    prompts, params = [[5, 6, 7], [8]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM("tiny", device="cpu", max_running=4, page_size=16, num_pages=24, max_model_len=64, kernels="triton",
             attention="triton") as llm:  # fmt: skip
        runner = llm.engine.runner
        right = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        kept = [*runner.kv.layers, runner.table.page_table, runner.table.last_tokens, runner.attention.counters]
        before = [tensor.clone() for tensor in kept]
        Capture(runner, 64).compile(4, 20)
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
        assert [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == right


def test_what_cannot_be_compiled_ahead_is_said_and_costs_only_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise errors.pop()

    errors: list[Exception] = [torch.OutOfMemoryError("full"), AttributeError("no preload in this version")]
    monkeypatch.setattr(graphs, "compile_ahead", fail)
    capture = Capture(SimpleNamespace(table=SimpleNamespace(device=torch.device("cpu"))), 64)  # type: ignore[arg-type]
    capture.compile(4, 20)
    assert "no preload in this version" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        capture.compile(4, 20)


def test_steps_of_every_size_that_kernels_may_go_by_are_run_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes of graphs, and the largest step; nothing above it."""
    kv, device = SimpleNamespace(copy_pages=lambda copies: pages.append(len(copies))), torch.device("cpu")
    capture = Capture(SimpleNamespace(kv=kv, table=SimpleNamespace(device=device)), 64)  # type: ignore[arg-type]
    pages: list[int] = []
    tokens: list[int] = []
    decodes: list[int] = []
    monkeypatch.setattr(graphs, "compile_ahead", lambda steps, device: steps())
    monkeypatch.setattr(capture, "_two_layers", nullcontext, raising=False)
    monkeypatch.setattr(capture, "_step_of_tokens", tokens.append, raising=False)
    monkeypatch.setattr(capture, "_step_of_decodes", decodes.append, raising=False)
    capture.compile(40, 700)
    assert pages == [16, 32, 64] and decodes == graphs.decode_buckets(40)
    few = graphs.decode_buckets(graphs.FEW_TOKENS)
    assert sorted(tokens) == [*few, 128, 192, 256, 384, 512, 700]


COMPILE = """
import collections, sys, time
from dataclasses import replace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from minisgl import LLM
from minisgl.kernels.compile_ahead import dry_run

class Device:  # that is not there
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def launcher_cls(self, source, metadata):  # as modules of one name are imported: what was there is changed
        self.launch = source.fn.__name__
        time.sleep(0.001)
        launchers[source] = self.launch
    utils = property(lambda self: self)
    def get_device_properties(self, device): return {"max_shared_mem": 232_448}
    def load_binary(self, name, binary, shared, device):
        loaded.append(name)
        return "module", "function", 0, 0, 1024

loaded, launchers = [], {}
driver.set_active(Device())
import minisgl.engine.attention.triton_backend, minisgl.kernels.triton_set  # as kernels to be compiled
triton.knobs.runtime.interpret = True  # only as long as it is asked whether there is a device
llm = LLM("tiny", device="cpu", max_running=4, page_size=16, num_pages=24, max_model_len=64, kernels="triton",
          attention="triton", dtype="bfloat16")
triton.knobs.runtime.interpret = False
compiled = collections.Counter()
triton.knobs.runtime.jit_post_compile_hook = lambda fn, key, **_: compiled.update([f"{fn.name} {key}"])
from concurrent.futures import ThreadPoolExecutor
from test_compile_ahead import Capture
capture = Capture(llm.engine.runner, 64)
with ThreadPoolExecutor() as pool:  # two engines that load at once
    list(pool.map(lambda _: capture.compile(4, 20), range(2)))
names = {name.split()[0].rsplit(".")[-1] for name in compiled}
assert {"_plan_kernel", "_decode_kernel", "_norm_rotary_store_kernel", "_candidates_kernel"} <= names, names
assert set(compiled.values()) == {1} and len(compiled) > 8, compiled
assert sorted(loaded) == sorted(name.split()[0].rsplit(".")[-1] for name in compiled), loaded
assert all(name == source.fn.__name__ for source, name in launchers.items()), "another kernel's launcher"
assert "torch._dynamo" not in sys.modules, "seconds"
kv = llm.engine.runner.kv
with torch.no_grad(), dry_run() as missing:  # all of them are found now
    for size in range(1, 21):
        capture._step_of_tokens(size)
    for size in (1, 2, 4):
        capture._step_of_decodes(size)
        for pages in (kv._all, kv._all.new_zeros(2, 2, 32, *kv._all.shape[3:])):  # of the trial's pool, of the real one
            kv.kernels.copy_pages(pages, torch.zeros(size, 2, dtype=torch.int32))
assert not missing, list(missing)

# No variants for widths of the page table, or for where a step's prompts begin.
from builders import make_batch, make_pages
runner, sampled = llm.engine.runner, torch.zeros(40, llm.config.vocab_size, dtype=torch.bfloat16)
for first, new, computed in ((True, [1, 1, 5], [3, 20, 0]), (False, [1, 1, 7, 9, 2], [70, 3, 0, 33, 1])):
    pages = make_pages(len(new), pages_each=-(-max(n + c for n, c in zip(new, computed)) // 16), seed=1)
    batch = make_batch([[0] * n for n in new], computed=computed, pages=pages, page_size=16, device="cpu")
    q = torch.zeros(sum(new), llm.config.num_heads, llm.config.head_dim, dtype=torch.bfloat16)
    with torch.no_grad(), dry_run() as missing:
        for last in (True, False):
            places = torch.zeros(41, dtype=torch.int32)[first:]
            runner.sampler.launch(sampled[: len(new)], places[: len(new)], runner.table.last_tokens, all_greedy=last)
        plan = runner.attention.plan(batch)
        runner.attention.forward(q, runner.kv.layers[0], replace(batch, attn_metadata=plan), scale=1.0)
    assert {fn for _, fn, _ in missing} == ({"_prefill_kernel"} if first else set()), missing
    for compilation in missing.values():
        compilation()
"""


def test_a_hook_of_somebody_else_is_asked_by_other_threads_and_put_back() -> None:
    runtime, asked = triton.knobs.runtime, []
    facts = dict(key="k", repr="", compile={}, is_manual_warmup=False, already_compiled=False)

    def hook(*, fn: Any, **_: Any) -> str:
        asked.append(fn)
        return "theirs"

    runtime.jit_cache_hook, before = hook, runtime.jit_cache_hook
    try:
        with pytest.raises(KeyError), dry_run() as missing, ThreadPoolExecutor(1) as pool:
            assert runtime.jit_cache_hook is not hook
            assert pool.submit(runtime.jit_cache_hook, fn="a", **facts).result() == "theirs"
            assert asked == ["a"] and not missing
            raise KeyError
        assert runtime.jit_cache_hook is hook and not is_dry()
        with dry_run() as missing:
            fn = SimpleNamespace(module="m", name="n", jit_function=SimpleNamespace(preload=asked.append))
            for data in ("x", "y"):
                assert runtime.jit_cache_hook(fn=fn, **{**facts, "key": data, "compile": {"specialization_data": data}})
        assert list(missing) == [("m", "n", "x"), ("m", "n", "y")]
        for compilation in missing.values():
            compilation()
        assert asked == ["a", "x", "y"]
    finally:
        runtime.jit_cache_hook = before


def test_kernels_of_all_steps_are_compiled_once_and_then_found(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_kernel_that_cannot_be_made_costs_no_other_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that does not compile, one that has no launcher, one that does not fit the device."""
    loaded: list[str] = []

    class Kernel(SimpleNamespace):
        src = metadata = property(lambda self: self.name)

        @property
        def run(self) -> None:
            if self.name == "no fit":
                raise MemoryError("shared")
            loaded.append(self.name)

    def preload(name: str) -> Kernel:
        if name == "no syntax":
            raise SyntaxError("kernel")
        return Kernel(name=name)

    def launcher(name: str, metadata: str) -> None:
        if name == "no launcher":
            raise OSError("gcc")

    @contextmanager
    def dry() -> Iterator[dict[Any, Compilation]]:
        names = ("no syntax", "fine", "no launcher", "no fit", "fine, too")
        functions = [SimpleNamespace(src=name, __name__=name, preload=preload) for name in names]
        yield {fn.src: Compilation(fn, fn.src) for fn in functions}

    monkeypatch.setattr("minisgl.kernels.compile_ahead.dry_run", dry)
    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
    monkeypatch.setattr("triton.runtime.driver", driver)
    here, inside = threading.get_ident(), Counter[bool]()  # where the device was made the current one, and how often

    def on_device(device: torch.device) -> AbstractContextManager[None]:
        inside[threading.get_ident() == here] += 1
        return nullcontext()

    monkeypatch.setattr("minisgl.kernels.compile_ahead.on_device", on_device)
    assert compile_ahead(lambda: None, torch.device("cpu")) == 5
    # In this thread: for the dry run, the kernel that goes first, and the loading of the three that could be compiled.
    assert inside == {True: 5, False: 4}
    assert sorted(loaded) == ["fine", "fine, too"]
    messages = sorted(record.getMessage() for record in caplog.records)
    assert messages == [
        "no fit cannot be made ahead: MemoryError: shared", "no launcher cannot be made ahead: OSError: gcc",
        "no syntax cannot be made ahead: SyntaxError: kernel",
    ]  # fmt: skip


def test_steps_of_few_tokens_are_all_that_products_have_kernels_for() -> None:
    """The engine's room works without Triton, and so has a number of its own."""
    assert import_module("minisgl.kernels.triton_linear").MAX_TOKENS == graphs.FEW_TOKENS


def test_without_triton_there_is_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.kernels.compile_ahead.find_spec", lambda name: None)
    assert compile_ahead(pytest.fail, torch.device("cpu")) == 0


def test_what_a_dry_run_leaves_behind_can_be_written_later() -> None:
    """Which an inference tensor cannot, outside inference mode."""
    with torch.inference_mode(), dry_run():
        kept = torch.empty(3)
    assert not kept.is_inference()
