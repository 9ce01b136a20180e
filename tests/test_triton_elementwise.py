"""The small kernels of a layer and sampling in Triton, against float64 and their plain twins.

Outputs are NaN before a kernel writes them, and so is whatever it has no business to read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_helpers import DEVICE, MARKS, NAN, check_compilation, poison, randn, triton

from minisgl.kernels import philox, rotary, sampling, triton_elementwise, triton_sampling

pytestmark = MARKS
tl = triton.language

# float32: sums in another order. Half precision: each rounding by one unit in the last place, since the interpreter
# cuts bfloat16 off where a device rounds.
CLOSE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


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
@pytest.mark.parametrize("many", [2, 3])
def test_silu_and_mul_equals_float64(monkeypatch: pytest.MonkeyPatch, many: int, size: int, dtype: torch.dtype) -> None:
    """Three rows, few or many."""
    monkeypatch.setattr(triton_elementwise, "_MANY", many)
    x = randn(3, 2 * size, dtype=dtype) * 4
    gate, up = x[:, :size].double(), x[:, size:].double()
    poison(monkeypatch)
    close(triton_elementwise.silu_and_mul(x), gate * gate.sigmoid() * up, dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("dim", "pairs"), [(16, 8), (80, 40), (80, 20), (96, 48), (256, 32)])
@pytest.mark.parametrize("norm", [True, False])
def test_norm_rotary_store_equals_its_twin(
    monkeypatch: pytest.MonkeyPatch, dim: int, pairs: int, dtype: torch.dtype, norm: bool
) -> None:
    """A view of wider rows; heads that do not divide a tile. The twin runs in float64; slots that nobody names stay as
    they are."""
    heads, kv_heads, tokens = 5, 3, 4
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim + 8, dtype=dtype)[:, :-8]
    weights = [randn(dim, seed=seed, dtype=dtype) if norm else None for seed in (1, 2)]
    angles = randn(tokens, pairs, seed=3) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([4 * 3 + 1, 4 * 1 + 3, 4 * 4, 5], device=DEVICE)
    kv = torch.full((2, 5, 4, kv_heads, dim), NAN, dtype=dtype, device=DEVICE)

    expected_kv = kv.double()
    expected_q = rotary.norm_rotary_store(
        qkv.double(), *(w if w is None else w.double() for w in weights), 1e-5, cos.double(), sin.double(), expected_kv,
        slots, num_heads=heads,
    )  # fmt: skip
    poison(monkeypatch)
    out = triton_elementwise.norm_rotary_store(
        qkv, *weights, 1e-5, cos, sin, kv, slots, num_heads=heads, tile=2 * triton.next_power_of_2(dim)
    )
    assert out.is_contiguous() and out.dtype == dtype
    # Up to three roundings of products of three factors: errors are relative to the factors, not to their sum.
    tolerance = 4 * CLOSE[dtype]
    torch.testing.assert_close(out.double(), expected_q, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kv.double(), expected_kv, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(kv[1].flatten(0, 1)[slots].flatten(1), qkv[:, -kv_heads * dim :])


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_norm_rotary_store_of_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Few and more are divided in different ways; a single KV head."""
    monkeypatch.setattr(triton_elementwise, "_FEW", 4)
    heads, dim, ones = 2, 8, torch.ones(8, device=DEVICE)
    qkv, turns = randn(tokens, (heads + 2) * dim), randn(2, tokens, 4, seed=1)
    slots = torch.arange(tokens, device=DEVICE) + 1
    kv, right_kv = torch.full((2, 2, 9, 1, 1, dim), NAN, device=DEVICE)
    arguments = ones, 2 * ones, 1e-5, *turns
    right = rotary.norm_rotary_store(qkv, *arguments, right_kv, slots, num_heads=heads)
    poison(monkeypatch)
    out = triton_elementwise.norm_rotary_store(qkv, *arguments, kv, slots, num_heads=heads)
    close(out, right, torch.float32)
    torch.testing.assert_close(kv, right_kv, equal_nan=True, atol=3e-6, rtol=3e-6)


def launches(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[dict[str, Any]]:
    """What ``call`` would launch: its grid and its options."""
    found: list[dict[str, Any]] = []

    def launch(kernel: Any, *grid: int) -> Callable[..., None]:
        return lambda *args, **options: found.append({"grid": grid, **options})

    with monkeypatch.context() as patch:
        patch.setattr(triton_elementwise, "launch", launch)
        call()
    return found


def test_how_work_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of tokens, as `minisgl.benchmark.tune_small` measured it, or as one is told. 16 query heads of 128:
    a tile of 512 has four heads, so four programs for Q and two each for K and V; one of 2,048 has 16."""
    kv, dim = torch.zeros(2, 1, 1, 8, 128, device=DEVICE), torch.ones(128, device=DEVICE)

    def rotate(tokens: int, **options: int) -> tuple[int, int, int]:
        qkv, turns = torch.zeros(tokens, 32 * 128, device=DEVICE), torch.zeros(2, tokens, 64, device=DEVICE)
        slots = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
        (one,) = launches(monkeypatch, lambda: triton_elementwise.norm_rotary_store(
            qkv, dim, dim, 1e-5, *turns, kv, slots, num_heads=16, **options))  # fmt: skip
        return one["grid"][0] // tokens, one["HEADS"], one["num_warps"]

    assert rotate(64) == (8, 4, 1) and rotate(65) == rotate(513) == (3, 16, 2)
    assert rotate(65, tile=1024, num_warps=4) == (4, 8, 4) and rotate(1, tile=128) == (32, 1, 1)

    def activate(rows: int, **options: int) -> tuple[int, int]:
        x = torch.zeros(rows, 2 * 3000, device=DEVICE)
        (one,) = launches(monkeypatch, lambda: triton_elementwise.silu_and_mul(x, **options))
        return one["grid"][1], one["BLOCK"]

    assert activate(512) == (3, 1024) and activate(513) == (2, 2048) and activate(513, block=512) == (6, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 3])
def test_copy_pages_reads_before_it_writes(page_size: int, ids: torch.dtype, dtype: torch.dtype) -> None:
    """1 -> 2 -> 3 in one call, in all layers; odd sizes of pages."""
    kv = randn(3, 2, 6, page_size, 1, 37, dtype=dtype)
    before = kv.clone()
    triton_elementwise.copy_pages(kv, torch.tensor([[1, 2], [2, 3], [4, 1]], dtype=ids, device=DEVICE))
    assert torch.equal(kv, before[:, :, [0, 4, 1, 2, 4, 5]])


def test_copy_pages_of_nothing_and_of_many() -> None:
    kv = randn(1, 2, 600, 2, 2, 8)
    before = kv.clone()
    triton_elementwise.copy_pages(kv, torch.empty((0, 2), dtype=torch.int32, device=DEVICE))
    assert torch.equal(kv, before)
    ring = torch.stack((torch.arange(300), (torch.arange(300) + 1) % 300), dim=1).to(DEVICE)
    triton_elementwise.copy_pages(kv, ring)
    assert torch.equal(kv[:, :, :300].roll(-1, dims=2), before[:, :, :300])
    assert torch.equal(kv[:, :, 300:], before[:, :, 300:])


# -- sampling --

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, 12345]


def columns(num_rows: int) -> tuple[Tensor, Tensor]:
    """Seeds and positions."""
    seeds = torch.tensor((SEEDS * num_rows)[:num_rows], dtype=torch.int64, device=DEVICE)
    positions = torch.tensor(([0, 7, 2**32 - 1, 2**31, 3, 4] * num_rows)[:num_rows], dtype=torch.int64, device=DEVICE)
    return seeds, positions


@triton.jit
def _philox_kernel(seeds, positions, out, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, ids = tl.program_id(0), tl.arange(0, BLOCK)
    position = tl.load(positions + row).to(tl.uint32)
    zero = tl.zeros([BLOCK], tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), (ids // 4).to(tl.uint32), zero + position, zero, zero)
    word = tl.where(ids % 4 == 0, w0, tl.where(ids % 4 == 1, w1, tl.where(ids % 4 == 2, w2, w3)))
    number = tl.minimum(word.to(tl.float32) * 2**-32 + 2**-33, 1 - 2**-24)
    tl.store(out + row * vocab_size + ids, number, mask=ids < vocab_size)


def test_the_documented_call_of_triton_has_the_same_numbers() -> None:
    """The mapping that `minisgl.kernels.philox` documents, to the bit."""
    seeds, positions = columns(7)
    out = torch.empty(7, 1000, device=DEVICE)
    _philox_kernel[(7,)](seeds, positions, out, 1000, BLOCK=1024)
    assert torch.equal(out, philox.philox(seeds, positions, 1000))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 1002, 5000])
def test_uniforms_equal_the_twin_to_the_bit(vocab_size: int, pairs: bool) -> None:
    seeds, positions = columns(7)
    got = triton_sampling.philox(seeds, positions, vocab_size, pairs=pairs)
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
    positions[0] = 3016  # found by search: with seed 0, token 357 gets a u that 1 - u has nothing left of
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


def test_sampled_rows_equal_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and random rows, broken ones and padding; columns behind the vocabulary are poisoned; the tables learn of
    the tokens, and other rows do not notice."""
    vocab_size, max_running = 301, 12
    for seed in range(6):
        logits = (randn(9, vocab_size + 3, seed=seed) * 3).bfloat16()
        logits[:, vocab_size:] = NAN
        logits[2, 77 * seed % vocab_size], logits[3], logits[4, 5:9] = NAN, float("-inf"), 40.0  # the last: a tie
        rows = torch.randperm(max_running, generator=torch.Generator().manual_seed(seed))[:9].to(DEVICE, torch.int32)
        rows[seed], rows[8] = -1, -1
        heat = randn(max_running, seed=seed).clamp(min=0)  # half of them greedy
        seeds, positions = columns(max_running)
        last = torch.full((max_running,), -5, device=DEVICE)
        tables = positions.clone(), last.clone()
        right_tables = positions.clone(), last.clone()
        right = sampling.sample_rows(logits, rows, heat, seeds, *right_tables, vocab_size)
        with monkeypatch.context() as patch:
            poison(patch)
            out = triton_sampling.sample_rows(logits, rows, heat, seeds, *tables, vocab_size, tile=64)
        assert out.dtype == torch.int32 and torch.equal(out, right)
        for table, right_table in zip(tables, right_tables, strict=True):
            assert torch.equal(table, right_table)


@pytest.mark.parametrize("all_greedy", [False, True])
def test_greedy_rows_are_the_most_likely_however_they_are_asked_for(all_greedy: bool) -> None:
    logits = torch.zeros(3, 130, device=DEVICE)
    logits[0, [70, 129]], logits[1, 0], logits[2, 3] = 1.0, 1e-30, float("inf")
    rows, heat = torch.arange(3, dtype=torch.int32, device=DEVICE), torch.zeros(3, device=DEVICE)
    (seeds, positions), last, out = columns(3), torch.ones_like(rows).long(), torch.full_like(rows, -1).repeat(2, 1)
    result = triton_sampling.sample_rows(
        logits, rows, heat, seeds, positions, last, 130, out, all_greedy=all_greedy, tile=64
    )
    assert result is out and out.tolist() == [[70, 0, 0], [1, 1, 0]] and last.tolist() == [70, 0, 0]
    assert torch.equal(positions, columns(3)[1] + 1)


# -- compilation --

COMPILE = """
from minisgl.kernels import triton_elementwise, triton_sampling

check(triton_elementwise._rms_norm_kernel, SIZE=96, BLOCK=128, ADD=True)
check(triton_elementwise._silu_and_mul_kernel, BLOCK=1024)
check(triton_elementwise._norm_rotary_store_kernel, NUM_HEADS=24, NUM_KV_HEADS=8, HEAD_DIM=80, PAIRS=20, NORM=True,
      HEADS=4, BLOCK_F=32, BLOCK_REST=64, BLOCK_D=128)
check(triton_elementwise._copy_pages_kernel, BLOCK_C=4, BLOCK_W=1024)
check(triton_sampling._candidates_kernel, ROWS=False, NOISE=True, TILE=1024)
check(triton_sampling._candidates_kernel, ROWS=True, NOISE=True, TILE=1024)
for dtype in "*bf16", "*fp32":  # what threads hand to each other must not grow with the tile: only reductions' results
    TYPES["logits"] = dtype
    even = "logits", "stride", "vocab_size"
    small, large = (
        check(triton_sampling._candidates_kernel, even=even, ROWS=True, NOISE=True, TILE=tile) for tile in (1024, 4096)
    )
    assert small.count("st.shared") == large.count("st.shared") and "ld.global.v4" in large
    assert large.count("mul.wide.u32") < 6 * 4096 // 128  # a call's ten rounds are for four tokens
check(triton_sampling._choose_kernel, NOISE=True, BLOCK=64)
TYPES["out"] = "*i32"
check(triton_sampling._choose_rows_kernel, NOISE=True, BLOCK=64)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="there every test compiles")
def test_kernels_compile_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    check_compilation(COMPILE, tmp_path)
