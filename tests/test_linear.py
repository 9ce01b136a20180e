"""Products for few tokens against float64 and their twins: compiled where there is a CUDA device, else interpreted.

Outputs are NaN before a kernel writes them, and so is what lies beside the tensors that it reads.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

# `conftest` makes it interpret where there is no CUDA device.
triton = pytest.importorskip("triton", reason="triton is there for Linux only")


def version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


if triton.knobs.runtime.interpret and version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4):
    pytest.skip("triton before 3.7 interprets loops only with numpy before 2.4", allow_module_level=True)

from minisgl.benchmark import gemm  # noqa: E402
from minisgl.benchmark.ceilings import Ceilings  # noqa: E402
from minisgl.benchmark.timing import Timing  # noqa: E402
from minisgl.kernels import activation, linear, norm, triton_elementwise  # noqa: E402
from minisgl.kernels.triton_linear import (  # noqa: E402
    BUCKETS,
    CUBLAS,
    LinearPath,
    SkinnyLinear,
    default_path,
    read_table,
    skinny,
    table_as_json,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
NAN, EPS = float("nan"), 1e-5
# Relative to the greatest value. float32: another order of additions. Half precision: one rounding of the result, one
# of what goes into the product; the interpreter cuts bfloat16 off where a device rounds.
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

GEMV = LinearPath("gemv", block_n=4, block_k=64, depth=2, num_warps=1)
GEMV_ROW = LinearPath("gemv", block_n=1, block_k=32, num_warps=1)
DOT = LinearPath("dot", block_n=32, block_k=32, depth=2)
DOT_SPLIT = LinearPath("dot", block_n=16, block_k=16, split=4, depth=2)
DOT_TOKENS_LEFT = LinearPath("dot", block_n=8, block_k=16, split=4, depth=2)
DOT_WHOLE = LinearPath("dot", block_n=16, block_k=32, split=4)  # rows of up to 128 in one block
DOT_PARTS = LinearPath("dot", block_n=16, block_k=16, split=2, parts=4, depth=2, num_warps=2)
PATHS = [GEMV, GEMV_ROW, DOT, DOT_SPLIT, DOT_TOKENS_LEFT, DOT_WHOLE]
KINDS = ["linear", "bias", "norm", "norm and bias", "add", "add and bias", "norm and silu", "norm and silu and bias"]


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose rows have a NaN on either side, 16 bytes from each other's start."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    wide = torch.full((*shape[:-1], -(-shape[-1] // 8) * 8 + 16), NAN)
    wide[..., 8 : 8 + shape[-1]] = values
    return wide.to(DEVICE, dtype)[..., 8 : 8 + shape[-1]]


class Product:
    """Arguments of one product, and its value in float64."""

    def __init__(self, kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.kind, self.dtype = kind, dtype
        self.x = randn(m, k, seed=m, dtype=dtype) * 2
        rows = 2 * n if "silu" in kind else n
        fenced = torch.full(((rows + 2) * k,), NAN)
        fenced[k:-k] = torch.randn(rows * k, generator=torch.Generator().manual_seed(n))
        self.weight = fenced.to(DEVICE, dtype)[k:-k].view(rows, k)
        self.norm_weight = randn(k, seed=3, dtype=dtype) + 1
        self.bias = randn(rows, seed=4, dtype=dtype) * 3 if "bias" in kind else None
        self.residual = randn(m, n, seed=5, dtype=dtype) * 3

    def exact(self) -> Tensor:
        x, weight = self.x.double(), self.weight.double()
        if "norm" in self.kind:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm_weight.double()
        y = x @ weight.t()
        if self.bias is not None:
            y = y + self.bias.double()
        if "silu" in self.kind:
            gate, up = y.chunk(2, dim=-1)
            y = gate * gate.sigmoid() * up
        return y + self.residual.double() if "add" in self.kind else y

    def by(self, functions: ModuleType | SkinnyLinear) -> Tensor:
        """By the four functions that a layer calls."""
        if "silu" in self.kind:
            return functions.norm_linear_silu(self.x, self.norm_weight, EPS, self.weight, self.bias)
        if "norm" in self.kind:
            return functions.norm_linear(self.x, self.norm_weight, EPS, self.weight, self.bias)
        if "add" in self.kind:
            assert functions.linear_add(self.x, self.weight, self.residual, self.bias) is None
            return self.residual
        return functions.linear(self.x, self.weight, self.bias)

    def by_kernel(self, path: LinearPath) -> Tensor:
        add = "add" in self.kind
        out = self.residual if add else torch.full_like(self.residual, NAN)
        norm_ = (self.norm_weight, EPS) if "norm" in self.kind else None
        got = skinny(path, self.x, self.weight, out, norm=norm_, silu="silu" in self.kind, bias=self.bias, add=add)
        assert got is out
        return out

    def check(self, got: Tensor, exact: Tensor) -> None:
        """With the activation two results are multiplied: they have two errors."""
        assert got.dtype == self.dtype and got.shape == exact.shape
        close = CLOSE[self.dtype] * (2 if "silu" in self.kind else 1)
        torch.testing.assert_close(got.double(), exact, atol=close * exact.abs().max().item(), rtol=0)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken from ``torch.empty`` is NaN until it is written."""
    true = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: true(*shape, **options).fill_(NAN))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS, ids=lambda p: f"{p.kind}{p.block_n}x{p.block_k}")
def test_every_kernel_with_every_prologue_and_epilogue(path: LinearPath, kind: str, dtype: torch.dtype) -> None:
    """N and K are multiples of no block: the last program has rows, the last round columns, that are not there."""
    product = Product(kind, 3, 45, 88, dtype)
    exact = product.exact()
    product.check(product.by_kernel(path), exact)


@pytest.mark.parametrize("kind", ["norm", "add", "norm and silu"])
@pytest.mark.parametrize("n,k", [(1, 1), (7, 37), (64, 64), (33, 128)])
@pytest.mark.parametrize("path", PATHS, ids=lambda p: f"{p.kind}{p.block_n}x{p.block_k}")
def test_odd_and_even_sizes(path: LinearPath, n: int, k: int, kind: str) -> None:
    product = Product(kind, 2, n, k, torch.float32)
    exact = product.exact()
    product.check(product.by_kernel(path), exact)


@pytest.mark.parametrize("kind", ["norm", "add"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64])
def test_every_number_of_tokens(m: int, kind: str) -> None:
    for path in (DOT, DOT_SPLIT, DOT_TOKENS_LEFT, DOT_WHOLE, *([GEMV] if m <= 16 else [])):
        product = Product(kind, m, 40, 64, torch.bfloat16)
        exact = product.exact()
        product.check(product.by_kernel(path), exact)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [0, 1, 20, 65])
def test_the_functions_of_a_layer_equal_their_twins(
    monkeypatch: pytest.MonkeyPatch, m: int, kind: str, dtype: torch.dtype
) -> None:
    """Whatever path they take: the default's, cuBLAS, a kernel with and without the norm or activation inside."""
    n, k = 48, 96
    unfused = LinearPath("dot", block_n=16, block_k=16, split=2, num_warps=2, fused=False)
    poison(monkeypatch)
    for functions in (
        SkinnyLinear(),
        SkinnyLinear(native=False),
        SkinnyLinear({(n, k): dict.fromkeys(BUCKETS, unfused)}),
        SkinnyLinear({(n, k): dict.fromkeys(BUCKETS, DOT)}),
    ):
        product, twin = Product(kind, m, n, k, dtype), Product(kind, m, n, k, dtype)
        expected = twin.by(linear).double()
        if m:
            product.check(product.by(functions), expected)
        else:
            assert product.by(functions).shape == expected.shape == (0, n)


def test_twins_are_what_a_layer_computes_without_them() -> None:
    """To the bit: in float32, and in bfloat16, where the product is rounded before it is added."""
    for dtype in (torch.float32, torch.bfloat16):
        for kind in KINDS:
            product = Product(kind, 3, 40, 48, dtype)
            before, x = product.residual.clone(), product.x
            if "norm" in kind:
                x = norm.rms_norm(x, product.norm_weight, EPS)
            y = F.linear(x, product.weight, product.bias)
            y = activation.silu_and_mul(y) if "silu" in kind else y
            assert torch.equal(product.by(linear), y + before if "add" in kind else y)
            assert torch.equal(product.residual, y + before if "add" in kind else before)


@pytest.mark.parametrize("m", [1, 20, 64, 65])
@pytest.mark.parametrize("kind", ["linear", "bias"])
@pytest.mark.parametrize("functions", [linear, SkinnyLinear(), SkinnyLinear(native=False)])
def test_linear_writes_where_it_is_told(functions: ModuleType | SkinnyLinear, kind: str, m: int) -> None:
    product = Product(kind, m, 40, 64, torch.bfloat16)
    out = torch.full_like(product.residual, NAN)
    assert functions.linear(product.x, product.weight, product.bias, out) is out
    product.check(out, product.exact())


@pytest.mark.parametrize("kind", ["linear", "bias", "add", "add and bias"])
@pytest.mark.parametrize("m,k", [(1, 128), (20, 128), (33, 72)])
def test_programs_that_share_k(kind: str, m: int, k: int) -> None:
    """Their parts, of one block or several, are summed the same way every time."""
    for path in (DOT_PARTS, replace(DOT_PARTS, block_n=8), replace(DOT_PARTS, parts=2, split=1)):
        product = Product(kind, m, 45, k, torch.bfloat16)
        exact, again = product.exact(), Product(kind, m, 45, k, torch.bfloat16)
        product.check(product.by_kernel(path), exact)
        assert torch.equal(product.residual, again.by_kernel(path)) or "add" not in kind
    product = Product(kind, m, 45, k, torch.bfloat16)
    exact = product.exact()
    product.check(product.by(SkinnyLinear({(45, k): dict.fromkeys(BUCKETS, DOT_PARTS)})), exact)


def a_norm_of(residual: Tensor) -> tuple[Tensor, float]:
    return randn(residual.shape[1], seed=6, dtype=residual.dtype) + 1, EPS


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", ["linear", "add and bias"])
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64])
def test_the_sum_of_parts_takes_the_next_norm_along(
    monkeypatch: pytest.MonkeyPatch, m: int, kind: str, dtype: torch.dtype
) -> None:
    """It writes the same sum as without, and of what it has written, rounded, what the norm's own kernel would make."""
    poison(monkeypatch)
    for parts, n in ((2, 300), (4, 45), (8, 45)):
        path = replace(DOT_PARTS, parts=parts)
        product, alone = (Product(kind, m, n, 128, dtype) for _ in range(2))
        weight, eps = a_norm_of(product.residual)
        exact, normed = product.exact(), torch.empty(product.residual.shape, dtype=dtype, device=DEVICE)
        add = "add" in kind
        out = product.residual if add else torch.full_like(product.residual, NAN)
        skinny(path, product.x, product.weight, out, bias=product.bias, add=add, then=(weight, eps, normed))
        product.check(out, exact)
        assert torch.equal(out, alone.by_kernel(path))
        seen = out.double()
        seen = seen * (seen.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        product.check(normed, seen)
        product.check(normed, norm.rms_norm(out, weight, eps).double())
        if DEVICE == "cpu":  # on a device sums may come in another order
            assert torch.equal(normed, triton_elementwise.rms_norm(out, weight, eps))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [0, 1, 20, 64, 65])
def test_a_layer_hands_the_norm_on_where_it_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, m: int, dtype: torch.dtype
) -> None:
    """The paths without parts leave it to the reader, which takes what it is given, and does not norm it again."""
    poison(monkeypatch)
    n, k = 45, 96
    for path, handed_on in ((DOT_PARTS, 0 < m <= 64), (DOT, False), (CUBLAS, False)):
        functions = SkinnyLinear({(n, k): dict.fromkeys(BUCKETS, path)})
        product, twin = (Product("add and bias", m, n, k, dtype) for _ in range(2))
        norm_ = a_norm_of(product.residual)
        normed = functions.linear_add(product.x, product.weight, product.residual, product.bias, norm_)
        expected = linear.linear_add(twin.x, twin.weight, twin.residual, twin.bias, norm_)
        assert expected is not None and torch.equal(expected, norm.rms_norm(twin.residual, *norm_))
        assert (normed is not None) == handed_on
        if m:
            product.check(product.residual, twin.residual.double())
        if normed is not None:
            product.check(normed, expected.double())


@pytest.mark.parametrize("kind", ["norm", "norm and bias", "norm and silu", "norm and silu and bias"])
@pytest.mark.parametrize("m", [1, 20, 65])
def test_a_norm_that_was_made_already_is_not_made_again(m: int, kind: str) -> None:
    """What it would be made of is NaN."""
    n, k, dtype = 48, 96, torch.bfloat16
    unfused = LinearPath("dot", block_n=16, block_k=16, split=2, num_warps=2, fused=False)
    shapes = [(rows, k) for rows in (n, 2 * n)]
    for functions in (
        linear,
        SkinnyLinear(native=False),
        SkinnyLinear({shape: dict.fromkeys(BUCKETS, unfused) for shape in shapes}),
        SkinnyLinear({shape: dict.fromkeys(BUCKETS, DOT) for shape in shapes}),
    ):
        product = Product(kind, m, n, k, dtype)
        exact, normed = product.exact(), norm.rms_norm(product.x, product.norm_weight, EPS)
        function = functions.norm_linear_silu if "silu" in kind else functions.norm_linear
        x = torch.full_like(product.x, NAN)
        product.check(function(x, product.norm_weight, EPS, product.weight, product.bias, normed), exact)


@pytest.mark.parametrize("kind", ["norm", "norm and silu"])
def test_a_norm_of_float16_does_not_overflow(kind: str) -> None:
    """1e4 times a weight of 100 has no place in float16, though the norm of it has."""
    product = Product(kind, 5, 32, 64, torch.float16)
    product.x *= 1e4 / product.x.abs().max()
    product.norm_weight.fill_(100)
    product.weight *= 0.01
    table = {(rows, 64): dict.fromkeys(BUCKETS, DOT) for rows in (32, 64)}
    product.check(product.by(SkinnyLinear(table)), product.exact())


def test_the_table_goes_by_shape_and_the_next_bucket() -> None:
    paths = {bucket: LinearPath("gemv", block_n=2**i, block_k=64) for i, bucket in enumerate(BUCKETS)}
    functions = SkinnyLinear({(8, 16): paths})
    weight = torch.empty(8, 16, dtype=torch.bfloat16)
    for m, bucket in [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 48), (48, 48), (49, 64), (64, 64)]:
        assert functions.path(m, weight) == paths[bucket]
    assert functions.path(0, weight) == functions.path(65, weight) == CUBLAS
    assert functions.path(1, weight.float()) == CUBLAS
    assert functions.path(3, weight[:, :8]) == default_path(3, 8, 8)
    assert SkinnyLinear(native=False).path(1, weight) == CUBLAS
    assert SkinnyLinear({(8, 16): {1: GEMV}}).path(2, weight) == default_path(2, 8, 16)


def test_the_default_leaves_large_matrices_to_cublas() -> None:
    assert default_path(1, 151936, 4096).kind == "gemv"
    assert default_path(16, 1024, 3072).kind == "dot"
    assert default_path(16, 24576, 4096) == default_path(64, 1024, 3072) == CUBLAS


def test_the_table_survives_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = {"one": {(8, 16): {1: GEMV, 64: CUBLAS}, (4, 4): {1: DOT_SPLIT}}, "another": {}}
    (tmp_path / "linear_table.json").write_text(table_as_json(table), encoding="utf-8")
    monkeypatch.setattr("minisgl.kernels.triton_linear.files", lambda package: tmp_path)
    assert read_table() == table


def test_the_table_that_is_shipped_can_be_read() -> None:
    for shapes in read_table().values():
        for paths in shapes.values():
            assert set(paths) <= set(BUCKETS)
    assert isinstance(SkinnyLinear.load(DEVICE), SkinnyLinear)


def test_paths_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        LinearPath("magic", block_n=4, block_k=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="powers of 2"):
        LinearPath("dot", block_n=24, block_k=64)


def test_the_benchmark_writes_a_table_that_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a tiny model; every kernel that may be chosen was right. What is in the table already stays there."""
    config = {
        "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 40,
    }  # fmt: skip
    old = {"another": {(8, 16): {1: GEMV}}}
    monkeypatch.setattr(gemm, "SHAPES", {"small": config})
    monkeypatch.setattr(gemm, "read_table", lambda: old)
    monkeypatch.setattr(gemm, "_COLD_BYTES", 1 << 16)  # on a device: so few kilobytes a copy would be 10,000s of them
    if DEVICE == "cpu":  # each time is less than the one before: cuBLAS, the first, is never the fastest
        times = itertools.count(1)

        def time_calls(calls: Sequence[Callable[[], object]], *args: object, **options: object) -> Timing:
            calls[0]()
            return Timing(1 / next(times), 0)

        monkeypatch.setattr(gemm, "time_calls", time_calls)
    rows = gemm.bench_gemm(
        shapes=["small"], buckets=[2, 16], max_candidates=1, device=DEVICE,
        ceilings=Ceilings(1e12, 1e12, 1e12, 1e-6, "bfloat16"),
        output=tmp_path / "report.json", table_output=tmp_path / "linear_table.json",
    )  # fmt: skip
    assert [(row["product"], row["kind"]) for row in rows[::2]] == [
        ("qkv 64x32", "norm"), ("o 32x32", "add"), ("gate_up 96x32", "norm silu"), ("down 32x48", "add"),
        ("head 40x32", "norm"),
    ]  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"][0]["ms"] > 0
    assert [(row["model"], row["tokens"]) for row in report["chains"]] == [("small", 16)]
    num_bytes = 2 * 3 * (64 * 32 + 32 * 32 + 96 * 32 + 32 * 48)
    assert report["chains"][0]["floor us"] == pytest.approx(num_bytes / 1e6)
    monkeypatch.setattr("minisgl.kernels.triton_linear.files", lambda package: tmp_path)
    table = read_table()
    assert table.pop("another") == old["another"]
    (measured,) = table.values()
    assert set(measured) == {(64, 32), (32, 32), (96, 32), (32, 48), (40, 32)}
    assert all(set(paths) == {2, 16} for paths in measured.values())
    assert DEVICE == "cuda" or CUBLAS not in [path for paths in measured.values() for path in paths.values()]


def test_the_benchmark_leaves_out_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    case = gemm.ProductCase(gemm.Product("small", "o", 32, 64, "add", 1), torch.device(DEVICE), torch.bfloat16)
    assert gemm.right_paths(case, [2], 2)[2] == gemm.candidates(2, 32, 64)[:2]
    case.exact[1, 31] += 1
    assert gemm.right_paths(case, [2], 2)[2] == []
    assert capsys.readouterr().out.count("left out, 2 tokens") == 2


# The interpreter runs what a compiler may refuse.
COMPILE = r"""
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl.kernels import triton_linear

POINTERS = ("x", "norm_weight", "weight", "bias", "out", "normed", "parts")

def check(kernel, warps, kind, **constants):
    constants |= {name: name in kind for name in ("NORM", "SILU", "BIAS", "ADD")}
    constants |= {"PDL": True, "THREADS": 32 * warps}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(POINTERS, "*bf16") | {"parts": "*fp32", "eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in POINTERS or "stride" in n}
    source = ASTSource(kernel, signature, constants, even)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]

# Weights before the wait, everything else behind it.
def around_the_wait(ptx):
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")
    return ptx.split("griddepcontrol.wait")

gemv = dict(BLOCK_M=4, BLOCK_N=4, BLOCK_K=1024, VECTOR=8, DEPTH=2)
for kind in (["NORM", "BIAS"], ["SILU", "NORM"], ["ADD"]):
    ptx = check(triton_linear._gemv_kernel, 4, kind, N=1024, K=3072, AHEAD=3072, **gemv)
    loads = re.findall(r"ld\.global\S*v4\.b32", ptx)
    assert len(loads) >= 16 and ptx.rindex("ld.global") < ptx.index("bar.sync"), kind
    before, behind = around_the_wait(ptx)
    assert len(re.findall(r"ld\.global\S*v4\.b32", before)) == 4 and "evict_first" in before, kind
    assert before.count("cp.async.bulk.prefetch.L2") == 1 and "prefetch" not in behind, kind
    assert "st.global" not in before and "st.global" in behind
check(triton_linear._gemv_kernel, 4, ["NORM"], N=1001, K=1000, AHEAD=0, **gemv)
split = dict(BLOCK_M=16, BLOCK_K=64, SPLIT=4, PARTS=1, WIDEN=False)
for kind in (["NORM", "BIAS"], ["SILU", "NORM"], ["ADD"]):
    ptx = check(triton_linear._dot_kernel, 4, kind, N=1024, K=3072, BLOCK_N=16, SWAP=True, DEPTH=3, AHEAD=3072, **split)
    assert "mma.sync" in ptx and "cp.async" in ptx
    before, behind = around_the_wait(ptx)
    assert "ld.global" not in before.replace("ld.global.b16", "") and "cp.async.cg" not in before, kind
check(triton_linear._dot_kernel, 4, ["ADD"], N=1001, K=1000, BLOCK_N=8, SWAP=False, DEPTH=3, AHEAD=0, **split)
ptx = check(triton_linear._dot_kernel, 4, ["NORM"], N=1024, K=256, BLOCK_N=16, SWAP=True, DEPTH=3, AHEAD=0, **split)
before, behind = around_the_wait(ptx)
assert "mma.sync" in behind and before.count("L1::evict_first") == 4 and "evict_first" not in behind
split["PARTS"] = 4
ptx = check(triton_linear._dot_kernel, 4, [], N=1024, K=1024, BLOCK_N=32, SWAP=True, DEPTH=3, AHEAD=0, **split)
assert around_the_wait(ptx)[0].count("L1::evict_first") == 8
whole = dict(BLOCK_K=128, SPLIT=1, PARTS=1, DEPTH=3, WIDEN=False, N=6144, K=4096, AHEAD=256)
assert "wgmma" in check(triton_linear._dot_kernel, 4, ["NORM"], BLOCK_M=64, BLOCK_N=64, SWAP=True, **whole)
assert "wgmma" in check(triton_linear._dot_kernel, 4, ["NORM"], BLOCK_M=64, BLOCK_N=32, SWAP=False, **whole)
reduce = triton_linear._splitk_reduce_kernel
for n, parts, block, warps in ((1024, 4, 1024, 8), (4096, 2, 4096, 16), (5120, 2, 8192, 16)):
    ptx = check(reduce, warps, ["NORM", "ADD", "BIAS"], N=n, PARTS=parts, BLOCK=block)
    before, behind = around_the_wait(ptx)
    assert before.count("ld.global") >= 2 and "st.global" not in before and behind.count("st.global") >= 2, n
    assert behind.count("ld.global.v4.b32") >= parts and ptx.count("bar.sync") == 1, n
ptx = check(reduce, 2, ["ADD"], N=1024, PARTS=4, BLOCK=256)
assert "ld.global" not in around_the_wait(ptx)[0] and "bar.sync" not in ptx
print("compiled")
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="there every test compiles")
def test_kernels_compile_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    """And as they are meant to: loads of 16 bytes, no barrier between those of the GEMV, tensor cores, a pipeline."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "compiled", done.stderr


@pytest.mark.parametrize("num_tokens", [3, 16, 17])
def test_tokens_may_be_padded(num_tokens: int) -> None:
    """As many rows of tokens as there are not."""
    generator = torch.Generator().manual_seed(num_tokens)
    x, weight = (torch.randn(rows, 64, generator=generator).to(DEVICE) for rows in (num_tokens, 48))
    path = LinearPath("dot", block_n=16, block_k=32, depth=2, tokens=64)
    out = torch.full((num_tokens, 48), NAN, device=DEVICE)
    skinny(path, x, weight, out)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), atol=1e-4, rtol=1e-4)
