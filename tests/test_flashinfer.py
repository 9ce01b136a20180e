"""FlashInfer's kernels behind our protocol, held against the torch backend. Needs a CUDA device and flashinfer."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_batch
from torch import Tensor

pytest.importorskip("flashinfer", reason="needs flashinfer")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from minisgl import LLM, SamplingParams
from minisgl.engine.attention import AttentionShape, choose_attention, flashinfer_backend, load_attention
from minisgl.engine.attention.split import SplitAttention
from minisgl.engine.attention.torch_backend import TorchAttention
from minisgl.forward import AttentionBackend, ForwardBatch

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SHAPE = AttentionShape(dtype=torch.bfloat16, num_heads=16, num_kv_heads=8, head_dim=128, page_size=64)
HOPPER = torch.cuda.get_device_capability() == (9, 0)
PREFILL = ("fa2", "fa3") if HOPPER else ("fa2",)
# Half a unit in the last place of a bfloat16 of size 2 for the result, and as much for the rounding of the weights.
TOLERANCE = 1.6e-2
# new tokens and computed tokens of each request, decodes first
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "decodes": ([1] * 8, [0, 15, 16, 63, 64, 65, 900, 2000]),
    "prompts": ([5, 64, 300, 1, 17], [0, 0, 0, 0, 0]),
    "chunks": ([128, 9, 64], [4000, 55, 64]),
    "mixed": ([1, 1, 1, 200, 33, 1], [77, 0, 1023, 0, 31, 0]),
}


def make_step(
    new: Sequence[int], computed: Sequence[int], shape: AttentionShape, *, num_pages: int, seed: int = 0
) -> ForwardBatch:
    """A batch whose pages are drawn from ``num_pages``; requests may share pages, which are only read."""
    rng = np.random.default_rng(seed)
    counts = [-(-(n + done) // shape.page_size) for n, done in zip(new, computed, strict=True)]
    pages = [(1 + rng.permutation(num_pages - 1)[:count]).tolist() for count in counts]
    # Token ids and slots play no part here.
    batch = make_batch([[0]] * len(new), computed=[n + d - 1 for n, d in zip(new, computed, strict=True)],
                       pages=make_distinct(pages), page_size=shape.page_size)  # fmt: skip
    starts = np.append(0, np.cumsum(new)).astype(np.int32)
    width = max(counts)
    table = torch.tensor([p + [0] * (width - len(p)) for p in pages], dtype=torch.int32)
    return replace(
        batch,
        input_ids=torch.zeros(sum(new), dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(sum(new), dtype=torch.int64, device=DEVICE),
        slot_mapping=torch.zeros(sum(new), dtype=torch.int64, device=DEVICE),
        cu_seqlens_q=torch.from_numpy(starts).to(DEVICE),
        seq_lens=batch.seq_lens.to(DEVICE),
        page_table=table.to(DEVICE),
        logits_indices=batch.logits_indices[:0].to(DEVICE),
        num_decodes=next((i for i, n in enumerate(new) if n != 1), len(new)),
        host_cu_seqlens_q=starts,
    )


def make_distinct(pages: list[list[int]]) -> list[list[int]]:
    ends = np.cumsum([len(p) for p in pages])
    return [list(range(1 + end - len(p), 1 + end)) for p, end in zip(pages, ends.tolist(), strict=True)]


def randn(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def make_kv(shape: AttentionShape, num_pages: int) -> Tensor:
    return randn(2, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim, seed=1, dtype=shape.dtype)


def run(backend: AttentionBackend, q: Tensor, kv: Tensor, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
    scale = q.shape[2] ** -0.5
    return backend.forward(q, kv, replace(batch, attn_metadata=backend.plan(batch)), scale=scale, out=out)


def check(backend: AttentionBackend, shape: AttentionShape, name: str, *, num_pages: int = 400) -> None:
    new, computed = STEPS[name]
    batch, kv = make_step(new, computed, shape, num_pages=num_pages), make_kv(shape, num_pages)
    q = randn(batch.num_tokens, shape.num_heads, shape.head_dim, seed=2, dtype=shape.dtype)
    out = torch.full_like(q, float("nan"))
    got = run(backend, q, kv, batch, out)
    assert got is out
    right = run(TorchAttention(), q, kv, batch)
    torch.testing.assert_close(got.float(), right.float(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (40, 8), (64, 8), (8, 1)])
@pytest.mark.parametrize("kernel", PREFILL)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_equals_torch(kernel: str, heads: tuple[int, int], page_size: int) -> None:
    shape = replace(SHAPE, num_heads=heads[0], num_kv_heads=heads[1], page_size=page_size)
    backend = flashinfer_backend.FlashInferPrefill(shape, DEVICE, kernel=kernel)
    for name in STEPS:
        check(backend, shape, name, num_pages=5000 if page_size == 1 else 400)


@pytest.mark.parametrize("kernel", PREFILL)
def test_prefill_of_head_dim_64_equals_torch(kernel: str) -> None:
    shape = replace(SHAPE, head_dim=64)
    check(flashinfer_backend.FlashInferPrefill(shape, DEVICE, kernel=kernel), shape, "chunks")


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (40, 8), (64, 8)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_equals_torch(heads: tuple[int, int], page_size: int) -> None:
    shape = replace(SHAPE, num_heads=heads[0], num_kv_heads=heads[1], page_size=page_size)
    check(flashinfer_backend.FlashInferDecode(shape, DEVICE), shape, "decodes")
    check(flashinfer_backend.XqaDecode(DEVICE), shape, "decodes")


def test_queries_may_be_a_view_of_the_merged_projection() -> None:
    for backend in backends(SHAPE):
        batch, kv = make_step(*STEPS["decodes"], SHAPE, num_pages=400), make_kv(SHAPE, 400)
        q = randn(batch.num_tokens, 2 * SHAPE.num_heads, SHAPE.head_dim, seed=2)[:, : SHAPE.num_heads]
        right = run(TorchAttention(), q, kv, batch)
        torch.testing.assert_close(run(backend, q, kv, batch).float(), right.float(), atol=TOLERANCE, rtol=TOLERANCE)


def backends(shape: AttentionShape) -> list[AttentionBackend]:
    prefills = [flashinfer_backend.FlashInferPrefill(shape, DEVICE, kernel=kernel) for kernel in PREFILL]
    return [*prefills, flashinfer_backend.FlashInferDecode(shape, DEVICE), flashinfer_backend.XqaDecode(DEVICE)]


def test_nothing_waits_for_the_device() -> None:
    """Neither ``plan`` nor ``forward``, once the kernels are loaded."""
    batch, kv = make_step(*STEPS["decodes"], SHAPE, num_pages=400), make_kv(SHAPE, 400)
    q = randn(batch.num_tokens, SHAPE.num_heads, SHAPE.head_dim)
    for backend in backends(SHAPE):
        run(backend, q, kv, batch)
        torch.cuda.synchronize()
        slow = torch.cuda.Event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(2_000_000_000)  # about a second
            slow.record()
            run(backend, q, kv, batch)
            assert not slow.query(), f"{type(backend).__name__} waited"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


class OneWrapper:
    """What `_Turns` is there to avoid."""

    def __init__(self, first: Any, second: Any) -> None:
        self.wrapper = first

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Plan at once, whatever is under way."""
        self.wrapper.plan(*args, **kwargs)
        return self.wrapper


def overlapped(
    split: SplitAttention, batches: Sequence[ForwardBatch], qs: Sequence[Tensor], kv: Tensor
) -> list[Tensor]:
    """The steps as the overlapped loop launches them: step k+1 before step k is done, step k-1 is. The device is kept
    busy, so that copies wait in the stream."""
    outs, done = [], [torch.cuda.Event() for _ in batches]
    for k, (batch, q) in enumerate(zip(batches, qs, strict=True)):
        torch.cuda._sleep(5_000_000)  # 2 or 3 ms: longer than the host takes for a step
        outs.append(run(split, q, kv, batch))
        done[k].record()
        if k:
            done[k - 1].synchronize()
    torch.cuda.synchronize()
    return outs


def changing(num_steps: int, shape: AttentionShape, num_pages: int) -> tuple[list[ForwardBatch], list[Tensor]]:
    rng = np.random.default_rng(7)
    batches = []
    for k in range(num_steps):
        decodes, prompts = int(rng.integers(0, 24)), int(rng.integers(0, 4))
        if not decodes + prompts:
            decodes = 1
        new = [1] * decodes + rng.integers(2, 90, prompts).tolist()
        computed = rng.integers(0, 700, decodes + prompts).tolist()
        batches.append(make_step(new, computed, shape, num_pages=num_pages, seed=k))
    qs = [randn(b.num_tokens, shape.num_heads, shape.head_dim, seed=k) for k, b in enumerate(batches)]
    return batches, qs


def num_wrong(make_split: Callable[[], SplitAttention], shape: AttentionShape, num_steps: int) -> int:
    """Of so many steps: a tenth as many different ones, in random order, since what is right takes long to compute."""
    num_pages = 300
    kv = make_kv(shape, num_pages)
    batches, qs = changing(num_steps // 10, shape, num_pages)
    order = np.random.default_rng(8).integers(0, len(batches), num_steps).tolist()
    outs = overlapped(make_split(), [batches[i] for i in order], [qs[i] for i in order], kv)
    rights = [run(TorchAttention(), q, kv, batch).float() for batch, q in zip(batches, qs, strict=True)]
    errors = []
    for i, out in zip(order, outs, strict=True):
        errors.append(((out.float() - rights[i]).abs() / (1 + rights[i].abs())).nan_to_num(nan=9.0).max())
    return int((torch.stack(errors) > TOLERANCE).sum())


SMALL = replace(SHAPE, num_heads=4, num_kv_heads=2, page_size=16)


@pytest.mark.alone  # a thousand small steps: beside others each would wait for its turn
@pytest.mark.parametrize("kernel", PREFILL)
def test_E01_a_thousand_changing_steps_launched_ahead(kernel: str) -> None:
    """E01: no plan is overwritten before the device has it."""

    def make_split() -> SplitAttention:
        prefill = flashinfer_backend.FlashInferPrefill(SMALL, DEVICE, kernel=kernel)
        return SplitAttention(prefill, flashinfer_backend.FlashInferDecode(SMALL, DEVICE))

    assert num_wrong(make_split, SMALL, 1000) == 0


def race() -> None:
    """Print how many steps go wrong with one wrapper."""
    flashinfer_backend._Turns = OneWrapper  # type: ignore[misc,assignment]

    def make_split() -> SplitAttention:
        prefill = flashinfer_backend.FlashInferPrefill(SMALL, DEVICE, kernel="fa2")
        return SplitAttention(prefill, flashinfer_backend.FlashInferDecode(SMALL, DEVICE))

    print("wrong:", num_wrong(make_split, SMALL, 100))


@pytest.mark.alone
def test_E01_the_race_is_real() -> None:
    """E01: with one wrapper the same steps go wrong; so the test above can fail. In a process of its own, since a plan
    that is half another's may send a kernel anywhere, and then the device is lost to the process."""
    command = [sys.executable, "-c", "import test_flashinfer; test_flashinfer.race()"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    wrong = re.search(r"wrong: (\d+)", done.stdout)
    killed = done.returncode < 0 or "illegal memory access" in done.stderr
    assert int(wrong[1]) > 0 if wrong else killed, (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("page_size", [16, 64])
def test_xqa_in_a_graph_reads_lengths_and_pages_at_each_replay(page_size: int) -> None:
    shape = replace(SHAPE, page_size=page_size)
    num_pages, num_requests, width = 400, 12, 2048 // page_size
    kv, backend = make_kv(shape, num_pages), flashinfer_backend.XqaDecode(DEVICE)
    first = make_step([1] * num_requests, [2047] * num_requests, shape, num_pages=num_pages)
    static = replace(first, seq_lens=first.seq_lens.clone(), page_table=first.page_table.clone())
    q = randn(num_requests, shape.num_heads, shape.head_dim)
    out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
    run(backend, q, kv, static, out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(backend, q, kv, static, out)
    rng = np.random.default_rng(0)
    for k in range(20):
        computed = rng.integers(0, 2047, num_requests).tolist()
        batch = make_step([1] * num_requests, computed, shape, num_pages=num_pages, seed=k)
        static.seq_lens.copy_(batch.seq_lens)
        static.page_table.zero_()
        static.page_table[:, : batch.page_table.shape[1]] = batch.page_table
        assert static.page_table.shape[1] == width
        q.copy_(randn(num_requests, shape.num_heads, shape.head_dim, seed=k))
        out.fill_(float("nan"))
        graph.replay()
        right = run(TorchAttention(), q, kv, batch)
        torch.testing.assert_close(out.float(), right.float(), atol=TOLERANCE, rtol=TOLERANCE)


def test_auto_takes_what_the_table_says_and_it_works(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="minisgl"):
        backend = load_attention("auto", device=DEVICE, shape=SHAPE)
    choice = choose_attention("auto", SHAPE, device=DEVICE)
    assert [r.levelname for r in caplog.records] == ["INFO"] and choice.reason in caplog.text
    if HOPPER:
        assert choice.prefill == "fa3" and isinstance(backend, SplitAttention) and backend.reason == choice.reason
    for name in STEPS:
        check(backend, SHAPE, name)


@pytest.mark.parametrize("name", ["flashinfer", "fa2,fa2", "fa2,triton", "triton,fa2"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_of_the_bundled_model(name: str, overlap: bool) -> None:
    """Whole texts, mostly: bfloat16 rounds differently in each kernel, so near ties may fall the other way."""
    prompts = ["Once upon a time", "The little fox", "What is 7 + 5?"] * 4
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    tokens = []
    for attention in ("torch", name):
        try:
            llm = LLM("tiny", device="cuda", dtype="bfloat16", attention=attention, overlap=overlap, page_size=16)
        except ValueError as error:
            pytest.skip(f"the bundled model has no such kernel: {error}")
        with llm:
            tokens.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    firsts = [a[:4] == b[:4] for a, b in zip(*tokens, strict=True)]
    assert sum(firsts) > 0.7 * len(prompts)
