"""The Triton kernels against float64 and their plain twins: compiled where there is a CUDA device, else interpreted.

Outputs are NaN before a kernel writes them, and so is whatever it has no business to read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from builders import make_batch, make_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

# `conftest` makes it interpret where there is no CUDA device.
triton = pytest.importorskip("triton", reason="triton is there for Linux only")


def version(module: ModuleType) -> tuple[int, int]:
    major, minor = module.__version__.split(".")[:2]
    return int(major), int(minor)


if triton.knobs.runtime.interpret and version(triton) < (3, 7) and version(np) >= (2, 4):
    pytest.skip("triton before 3.7 interprets loops only with numpy before 2.4", allow_module_level=True)

from minisgl import LLM, SamplingParams  # noqa: E402
from minisgl.engine.attention import load_attention  # noqa: E402
from minisgl.engine.attention.triton_backend import TritonAttention  # noqa: E402
from minisgl.forward import ForwardBatch  # noqa: E402
from minisgl.kernels import philox, sampling, triton_elementwise, triton_sampling  # noqa: E402
from minisgl.kernels.kv import store_kv  # noqa: E402
from minisgl.kernels.rotary import apply_rotary  # noqa: E402
from minisgl.kernels.triton_attention import choose_heads, decode_attention, lay_out, prefill_attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
NAN = float("nan")
# Rounding of the result (half a unit in the last place), and of the weights before they meet V.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Of one request, in float64."""
    (num_q, heads, _), num_k = q.shape, k.shape[0]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    hidden = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).triu(num_k - num_q + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class Step:
    """A batch with random queries, a cache that is NaN wherever no request has a token, and the float64 result."""

    def __init__(
        self,
        new: Sequence[int],
        computed: Sequence[int],
        *,
        page_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        scale: float = 0.3,
    ) -> None:
        lengths = [n + done for n, done in zip(new, computed, strict=True)]
        pages = make_pages(len(new), pages_each=-(-max(lengths) // page_size), seed=4)
        self.batch = make_batch(
            [[0] * n for n in new], computed=computed, pages=pages, page_size=page_size, device=DEVICE
        )
        self.scale = scale
        self.q = randn(self.batch.num_tokens, heads, dim, seed=9, dtype=dtype)
        self.kv = torch.full((2, 1 + sum(map(len, pages)), page_size, kv_heads, dim), NAN, dtype=dtype, device=DEVICE)
        exact, start = [], 0
        for i, length in enumerate(lengths):
            own = randn(2, length, kv_heads, dim, seed=100 + i, dtype=dtype)
            where = torch.arange(length)
            self.kv[:, torch.tensor(pages[i])[where // page_size], where % page_size] = own
            exact.append(exact_attention(self.q[start : start + new[i]], *own, scale))
            start += new[i]
        self.exact = torch.cat(exact)

    def new_out(self) -> Tensor:
        return torch.full_like(self.q, NAN)

    def check(self, out: Tensor) -> None:
        assert out.dtype == self.q.dtype
        tolerance = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), self.exact, atol=tolerance, rtol=tolerance)


def decode(step: Step, lengths: Tensor | None = None, *, num_programs: int, **options: int) -> Tensor:
    """Twice: the second launch finds the counters as the first one did. What is not written stays NaN."""
    page_table, seq_lens = step.batch.page_table, step.batch.seq_lens if lengths is None else lengths
    counters, out = torch.zeros(num_programs, dtype=torch.int32, device=DEVICE), step.new_out()
    for _ in range(2):
        out.fill_(NAN)
        decode_attention(
            step.q, step.kv, out, page_table, seq_lens, lay_out(seq_lens), counters,
            scale=step.scale, num_programs=num_programs, **options,
        )  # fmt: skip
        assert not counters.any()
    return out


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize(("num_programs", "heads"), [(1, 1), (3, 2), (8, 1), (64, 1), (64, 2)])
def test_decode_at_the_edges_of_pages_and_stretches(
    monkeypatch: pytest.MonkeyPatch, page_size: int, num_programs: int, heads: int
) -> None:
    """One program for all, one for a block or less, and between."""
    poison(monkeypatch)
    lengths = [130, 1, 15, 16, 17, 1, 1, 23, 24, 25, 63, 64, 65]
    step = Step([1] * len(lengths), [n - 1 for n in lengths], page_size=page_size, heads=6)
    step.check(decode(step, num_programs=num_programs, heads=heads, block_rows=16))


@pytest.mark.parametrize("num_programs", [2, 3, 4, 5, 40])
@pytest.mark.parametrize("lengths", [[32, 32], [32] * 6, [128], [100], [16], [3], [1, 95, 32]])
def test_stretches_that_end_with_an_item_or_in_its_first_block(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], num_programs: int
) -> None:
    poison(monkeypatch)
    step = Step([1] * len(lengths), [n - 1 for n in lengths], page_size=16)
    step.check(decode(step, num_programs=num_programs, heads=1, block_rows=16))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(1, 30), st.sampled_from([1, 2]))
def test_any_lengths_over_any_number_of_programs(lengths: list[int], num_programs: int, heads: int) -> None:
    step = Step([1] * len(lengths), [n - 1 for n in lengths])
    step.check(decode(step, num_programs=num_programs, heads=heads, block_rows=16))


@pytest.mark.parametrize("block_p_warps", [1, 4])
def test_one_request_over_all_programs(monkeypatch: pytest.MonkeyPatch, block_p_warps: int) -> None:
    """More pieces than are merged at a time."""
    poison(monkeypatch)
    step = Step([1], [1000], dim=128, heads=8, kv_heads=1, scale=0.1)
    step.check(decode(step, num_programs=40, block_rows=16, num_warps=block_p_warps))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_with_and_without_a_prefix(page_size: int) -> None:
    """Chunks and prefixes that end before, at and behind a page's end; single tokens among them."""
    step = Step([1, 15, 16, 17, 1, 33, 5], [0, 0, 1, 15, 64, 16, 111], page_size=page_size)
    out = step.new_out()
    tables = step.batch.page_table, step.batch.cu_seqlens_q, step.batch.seq_lens
    prefill_attention(step.q, step.kv, out, *tables, scale=step.scale, block_m=32, block_k=32)
    step.check(out)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_any_head_dim_and_dtype(dim: int, dtype: torch.dtype) -> None:
    step = Step([1, 19], [40, 3], dim=dim, dtype=dtype, scale=dim**-0.5, kv_heads=1, heads=2)
    attention = TritonAttention(DEVICE)
    step.check(run(attention, step))


@pytest.mark.parametrize("group", range(1, 9))
def test_any_group(group: int) -> None:
    """Also groups that do not divide a tile: some of its rows are then empty."""
    step = Step([1, 19, 1], [40, 3, 7], heads=2 * group, kv_heads=2)
    step.check(run(TritonAttention(DEVICE), step))


def run(attention: TritonAttention, step: Step, batch: ForwardBatch | None = None) -> Tensor:
    batch = step.batch if batch is None else batch
    return attention.forward(step.q, step.kv, replace(batch, attn_metadata=attention.plan(batch)), scale=step.scale)


@pytest.mark.parametrize("new", [[1, 1], [3, 3], [1, 4], [1, 1, 4, 1, 2]])
def test_decodes_and_prompts_of_a_step_have_a_kernel_each(new: list[int]) -> None:
    step = Step(new, [70, 600, 3, 4, 0][: len(new)])
    step.check(run(TritonAttention(DEVICE), step))


def test_queries_may_be_a_view_of_the_merged_projection() -> None:
    step = Step([1, 5], [3, 20])
    merged = torch.cat((step.q, randn(step.q.shape[0], 4, 16)), dim=1)
    step.q = merged[:, :4]
    step.check(run(TritonAttention(DEVICE), step))


@pytest.mark.parametrize("num_programs", [1, 4, 20])
def test_a_request_of_length_0_gets_zeros(monkeypatch: pytest.MonkeyPatch, num_programs: int) -> None:
    """As padding of a graph: one new token on paper, none in the cache."""
    poison(monkeypatch)
    step = Step([1] * 6, [0, 20, 0, 30, 0, 0])
    lengths = torch.tensor([0, 21, 0, 31, 0, 0], dtype=torch.int32, device=DEVICE)
    out = decode(step, lengths, num_programs=num_programs, heads=1, block_rows=16)
    assert not out[[0, 2, 4, 5]].any()
    torch.testing.assert_close(out[[1, 3]].double(), step.exact[[1, 3]], atol=2e-6, rtol=2e-6)


def test_a_launch_of_padding_only() -> None:
    step = Step([1, 1], [0, 0])
    assert not decode(step, torch.zeros_like(step.batch.seq_lens), num_programs=3).any()


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_heads_of_an_item_do_not_mix(heads: int) -> None:
    step = Step([1] * 3, [40, 3, 70], heads=16, kv_heads=8, page_size=8)
    step.check(decode(step, num_programs=5, heads=heads, block_rows=32))


def test_a_plan_holds_for_a_graph_whose_requests_grow() -> None:
    """`plan` and `forward` with the lengths of a step's first tokens on the host; the device knows the true ones."""
    step = Step([1, 1, 1], [70, 600, 3])
    short = replace(step.batch, host_seq_lens=np.ones(3, np.int32))
    step.check(run(TritonAttention(DEVICE), step, short))


def test_neither_plan_nor_forward_reads_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    step, attention, reads = Step([1, 5], [3, 20]), TritonAttention(DEVICE), []
    planned = replace(step.batch, attn_metadata=attention.plan(step.batch))
    attention.forward(step.q, step.kv, planned, scale=1.0)  # compiles
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    else:  # the interpreter itself reads, so only plan can be watched
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
            monkeypatch.setattr(Tensor, name, lambda *a, _n=name, **k: reads.append(_n))
    try:
        attention.plan(step.batch)
        if DEVICE == "cuda":
            attention.forward(step.q, step.kv, planned, scale=1.0)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert not reads


def test_an_item_takes_heads_that_cost_nothing_and_is_cut_into_few_pieces() -> None:
    def chosen(num_requests: int, num_kv_heads: int = 8, group: int = 2) -> int:
        return choose_heads(num_requests, num_kv_heads, group, num_programs=400)

    assert [chosen(r) for r in (1, 25, 50, 100, 1000)] == [1, 2, 4, 8, 8]
    assert [chosen(1000, group=g) for g in (1, 2, 3, 4, 5, 8, 16)] == [8, 8, 4, 4, 2, 2, 1]
    assert [chosen(1000, num_kv_heads=n, group=1) for n in (1, 2, 5, 6)] == [1, 2, 1, 2]


def test_the_backend_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load_attention("triton", device=DEVICE), TritonAttention)
    assert not isinstance(load_attention("auto", device=DEVICE), TritonAttention)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"attention 'triton' needs a CUDA device \(or TRITON_INTERPRET=1\)"):
        load_attention("triton", device="cpu")


def test_without_triton_only_its_backend_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "minisgl.engine.attention.triton_backend")
    monkeypatch.setitem(sys.modules, "triton", None)
    load_attention("auto", device=DEVICE)
    with pytest.raises(ValueError, match="needs the package triton"):
        load_attention("triton", device=DEVICE)


@pytest.mark.parametrize("page_size", [16, 64])
def test_greedy_tokens_equal_those_of_the_torch_backend(page_size: int) -> None:
    prompts = ["Once upon a time there was a little fox", "The", "What is 7 + 5?"]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    tokens = {}
    for name in ("torch", "triton"):
        with LLM(
            "tiny", attention=name, device=DEVICE, dtype="float32", page_size=page_size, num_pages=40, chunk_size=8
        ) as llm:
            tokens[name] = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert tokens["triton"] == tokens["torch"]


# -- the small kernels of a layer --

# float32: sums in another order. Half precision: each rounding by one unit in the last place, since the interpreter
# cuts bfloat16 off where a device rounds.
CLOSE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels get from ``torch.empty`` is NaN, or a number out of any range, until they write it."""
    true = torch.empty

    def empty(*shape: object, **options: object) -> Tensor:
        tensor = true(*shape, **options)
        return tensor.fill_(NAN if tensor.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", empty)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == exact.shape
    torch.testing.assert_close(got.double(), exact.double(), atol=CLOSE[dtype], rtol=CLOSE[dtype])


def exact_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (5, 1000), (3, 1024)])
def test_norms_equal_float64(monkeypatch: pytest.MonkeyPatch, rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = randn(rows, size + 3, dtype=dtype)[:, :size], randn(rows, size, seed=1, dtype=dtype)
    weight, before = randn(size, seed=2, dtype=dtype), residual.clone()
    poison(monkeypatch)
    close(triton_elementwise.rms_norm(x, weight, 1e-5), exact_norm(x, weight), dtype)
    normed, total = triton_elementwise.add_rms_norm(x, residual, weight, 1e-5)
    close(total, x.double() + residual.double(), dtype)
    close(normed, exact_norm(total, weight), dtype)
    assert torch.equal(residual, before)


def test_rms_norm_of_heads_and_of_nothing() -> None:
    x, weight = randn(3, 4, 16), randn(16, seed=1)
    close(triton_elementwise.rms_norm(x, weight, 1e-5), exact_norm(x, weight), torch.float32)
    assert triton_elementwise.rms_norm(x[:0], weight, 1e-5).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("size", [12, 1500])
def test_silu_and_mul_equals_float64(monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype) -> None:
    x = randn(3, 2 * size, dtype=dtype) * 4
    gate, up = x[:, :size].double(), x[:, size:].double()
    poison(monkeypatch)
    close(triton_elementwise.silu_and_mul(x), gate * gate.sigmoid() * up, dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("dim", "pairs"), [(16, 8), (80, 40), (80, 20), (96, 48), (256, 32)])
@pytest.mark.parametrize("norm", [True, False])
def test_norm_rotary_store_is_the_composition_of_its_twins(
    monkeypatch: pytest.MonkeyPatch, dim: int, pairs: int, dtype: torch.dtype, norm: bool
) -> None:
    """q, k, v as views of the merged projection. The twins run in float64; slots that nobody names stay as they are."""
    heads, kv_heads, tokens = 3, 1, 4
    merged = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype).view(tokens, -1, dim)
    q, k, v = merged.split((heads, kv_heads, kv_heads), dim=1)
    weights = [randn(dim, seed=seed, dtype=dtype) if norm else None for seed in (1, 2)]
    angles = randn(tokens, pairs, seed=3) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([4 * 3 + 1, 4 * 1 + 3, 4 * 4, 5], device=DEVICE)
    kv = torch.full((2, 5, 4, kv_heads, dim), NAN, dtype=dtype, device=DEVICE)

    expected_kv, turned = kv.double(), []
    for x, weight in zip((q, k), weights, strict=True):
        turned.append(x.double() if weight is None else exact_norm(x, weight))
    expected_q, expected_k = apply_rotary(*turned, cos.double(), sin.double())
    store_kv(expected_k, v.double(), expected_kv, slots)

    poison(monkeypatch)
    out = triton_elementwise.norm_rotary_store(q, k, v, *weights, 1e-5, cos, sin, kv, slots)
    # Up to three roundings of products of three factors: errors are relative to the factors, not to their sum.
    tolerance = 4 * CLOSE[dtype]
    torch.testing.assert_close(out.double(), expected_q, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kv.double(), expected_kv, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(kv[1].flatten(0, 1)[slots], v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 3])
def test_copy_pages_reads_before_it_writes(page_size: int, ids: torch.dtype, dtype: torch.dtype) -> None:
    """1 -> 2 -> 3 in one call, in all layers; odd sizes of pages."""
    layers = [randn(2, 6, page_size, 1, 37, seed=seed, dtype=dtype) for seed in range(3)]
    before = [kv.clone() for kv in layers]
    triton_elementwise.copy_pages(layers, torch.tensor([[1, 2], [2, 3], [4, 1]], dtype=ids, device=DEVICE))
    for kv, old in zip(layers, before, strict=True):
        assert torch.equal(kv, old[:, [0, 4, 1, 2, 4, 5]])


def test_copy_pages_of_nothing_and_of_many() -> None:
    kv = randn(2, 600, 2, 2, 8)
    before = kv.clone()
    triton_elementwise.copy_pages([kv], torch.empty((0, 2), dtype=torch.int32, device=DEVICE))
    assert torch.equal(kv, before)
    ring = torch.stack((torch.arange(1, 600), torch.arange(1, 600).roll(-1)), dim=1).to(DEVICE)
    triton_elementwise.copy_pages([kv], ring, addresses=triton_elementwise.layer_addresses([kv]))
    assert torch.equal(kv[:, 2:], before[:, 1:-1]) and torch.equal(kv[:, 1], before[:, -1])


# -- sampling --

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, 12345]


def columns(num_rows: int) -> tuple[Tensor, Tensor]:
    """Seeds and positions."""
    seeds = torch.tensor((SEEDS * num_rows)[:num_rows], dtype=torch.int64, device=DEVICE)
    positions = torch.tensor(([0, 7, 2**32 - 1, 2**31, 3, 4] * num_rows)[:num_rows], dtype=torch.int64, device=DEVICE)
    return seeds, positions


@pytest.mark.parametrize("vocab_size", [1, 1000, 5000])
def test_uniforms_equal_the_twin_to_the_bit(vocab_size: int) -> None:
    seeds, positions = columns(7)
    got = triton_sampling.philox(seeds, positions, vocab_size)
    assert torch.equal(got, philox.philox(seeds, positions, vocab_size))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000])
def test_most_likely_equals_its_twin(monkeypatch: pytest.MonkeyPatch, vocab_size: int, dtype: torch.dtype) -> None:
    """Rows of a wider tensor, as a padded vocabulary gives; ties, in one tile and across tiles, go to the lowest id."""
    wide = randn(6, vocab_size + 5, dtype=dtype)
    wide[:, vocab_size:] = 100
    wide[1, [vocab_size // 2, vocab_size - 1]] = 50
    wide[2] = 3
    wide[3] = -3e38 if dtype != torch.float16 else -6e4
    wide[4, : vocab_size - 1] = float("-inf")
    logits = wide[:, :vocab_size]
    poison(monkeypatch)
    values, ids = triton_sampling.most_likely(logits, tile=64)
    right_values, right_ids = sampling.most_likely(logits)
    assert values.dtype == dtype and ids.dtype == torch.int64
    assert torch.equal(values, right_values) and torch.equal(ids, right_ids)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 0.6, 1.0, 100.0])
@pytest.mark.parametrize("vocab_size", [1, 65, 300])
def test_draws_equal_the_twin(monkeypatch: pytest.MonkeyPatch, vocab_size: int, temperature: float) -> None:
    logits, (seeds, positions) = randn(12, vocab_size) * 5 - 60, columns(12)
    heat = torch.full((12,), temperature, device=DEVICE)
    right_values, right_ids = sampling.gumbel_argmax(sampling.apply_temperature(logits, heat), seeds, positions)
    poison(monkeypatch)
    values, ids = triton_sampling.gumbel_argmax(logits, heat, seeds, positions, tile=64)
    torch.testing.assert_close(values, right_values, atol=3e-6, rtol=3e-6)
    assert torch.equal(ids, right_ids)


def test_noise_is_exact_where_tokens_win() -> None:
    """Among equal logits the greatest noise wins: u near 0, where ``1 - u`` keeps few bits of it."""
    seeds, positions = columns(7)
    positions[0] = 2792  # found by search: with seed 0, token 1106 gets a u that 1 - u has nothing left of
    u = philox.philox(seeds, positions, 2048)
    assert (1 - u.min()) == 1
    values, ids = triton_sampling.gumbel_argmax(u * 0, torch.ones(7, device=DEVICE), seeds, positions)
    assert torch.equal(ids, u.argmin(-1))
    torch.testing.assert_close(values.double(), -(-torch.log1p(-u.double().amin(-1))).log(), atol=0, rtol=3e-7)


def test_rows_of_temperature_0_are_greedy_and_the_others_do_not_notice() -> None:
    logits, (seeds, positions) = randn(6, 300).bfloat16(), columns(6)
    heat = torch.tensor([0.0, 1.0, 0.0, 0.5, 2.0, 0.0], device=DEVICE)
    _, ids = triton_sampling.gumbel_argmax(logits, heat, seeds, positions, tile=64)
    _, drawn = sampling.gumbel_argmax(sampling.apply_temperature(logits, heat.clamp(min=0.5)), seeds, positions)
    assert torch.equal(ids, torch.where(heat == 0, sampling.most_likely(logits)[1], drawn))


def test_filtered_tokens_are_never_drawn() -> None:
    """Whole tiles of minus infinity, before and behind the only tokens left."""
    logits, (seeds, positions) = torch.full((12, 300), float("-inf"), device=DEVICE), columns(12)
    logits[:, 130:133] = randn(12, 3)
    for heat in (0.0, 1e-30, 1.0):
        values, ids = triton_sampling.gumbel_argmax(
            logits, torch.full((12,), heat, device=DEVICE), seeds, positions, tile=64
        )
        assert values.isfinite().all() and ((ids >= 130) & (ids < 133)).all()


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("place", [0, 70, 129])
def test_broken_rows_show(bad: float, place: int) -> None:
    """In any tile, and only those rows; a row of nothing but minus infinity is broken too. Ids stay in range."""
    logits, (seeds, positions) = randn(4, 130), columns(4)
    logits[1, place], logits[2] = bad, float("-inf")
    for heat in (0.0, 1.0):
        values, ids = triton_sampling.gumbel_argmax(
            logits, torch.full((4,), heat, device=DEVICE), seeds, positions, tile=64
        )
        assert values.isfinite().tolist() == [True, False, False, True] and ((ids >= 0) & (ids < 130)).all()
    values, ids = triton_sampling.most_likely(logits, tile=64)
    assert values.isfinite().tolist() == [True, False, False, True] and ((ids >= 0) & (ids < 130)).all()
    assert values[1].isnan() == (bad != bad)


# -- compilation --

# The interpreter runs what a compiler may refuse. Pointers by name, int32 for every other argument.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl.kernels import triton_attention, triton_elementwise, triton_sampling

TYPES = dict.fromkeys("eps scale".split(), "fp32") | dict.fromkeys(["v_offset"], "i64")
TYPES |= dict.fromkeys("q k v kv out q_out q_weight k_weight weight cos sin x residual total logits".split(), "*bf16")
TYPES |= dict.fromkeys("pieces peaks keys temperature best_keys".split(), "*fp32")
TYPES |= dict.fromkeys("page_table cu_seqlens_q seq_lens line counters page_copies token_ids".split(), "*i32")
TYPES |= dict.fromkeys("slot_mapping addresses seeds positions best_ids".split(), "*i64")

def check(kernel, **constants):
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert "cubin" in compiled.asm
    return compiled.asm["ptx"]

heads = dict(NUM_KV_HEADS=8, GROUP=3, HEAD_DIM=80)
tile = dict(PAGE_SIZE=64, BLOCK_K=64, BLOCK_D=128, WIDEN=False)
assert "mma" in check(triton_attention._prefill_kernel, **heads, **tile, BLOCK_R=8, BLOCK_M=64)
tile = dict(PAGE_SIZE=64, BLOCK_D=128, WIDEN=False, BLOCK_S=16, BLOCK_P=4, BLOCK_R=8)
ptx = check(triton_attention._decode_kernel, **heads, **tile, HEADS=4, BLOCK_K=16, BLOCK_M=16)
assert "mma" in ptx and "atom.global.gpu.acq_rel" in ptx
check(triton_attention._line_kernel, BLOCK_R=8)
check(triton_elementwise._rms_norm_kernel, SIZE=96, BLOCK=128, ADD=True)
check(triton_elementwise._silu_and_mul_kernel, BLOCK=1024)
check(triton_elementwise._norm_rotary_store_kernel, NUM_HEADS=24, NUM_KV_HEADS=8, HEAD_DIM=80, PAIRS=20, NORM=True,
      BLOCK_F=32, BLOCK_REST=64, BLOCK_D=128)
check(triton_elementwise._copy_pages_kernel, WORD=triton.language.int64, BLOCK_C=4, BLOCK_W=1024)
check(triton_sampling._candidates_kernel, NOISE=True, TILE=1024)
check(triton_sampling._choose_kernel, NOISE=True, BLOCK=64)
print("compiled")
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="there every test compiles")
def test_kernels_compile_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "compiled", done.stderr
