"""`minisgl bench gemm`: the products of a decode step, by cuBLAS and by every kernel that might beat it.

Chapter 4 shows its table. Each product is timed as the model calls it, with the norm, activation or addition that
belongs to it, and with cold weights: as many copies as together are several times the cache take turns in a CUDA graph.
Only a norm that one product makes for the next is left to the chain of all layers, which hands it on as the model does.
What wins for a number of tokens goes into the table that `minisgl.kernels.triton_linear` chooses by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from minisgl.benchmark.ceilings import Ceilings, measure_ceilings
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.shapes import SHAPES
from minisgl.benchmark.timing import time_calls
from minisgl.kernels.compile_ahead import compile_ahead
from minisgl.kernels.triton_elementwise import rms_norm
from minisgl.kernels.triton_linear import (
    BUCKETS,
    CUBLAS,
    MAX_TOKENS,
    LinearPath,
    SkinnyLinear,
    read_table,
    skinny,
    table_as_json,
)

Kind = Literal["norm", "norm silu", "add"]

MAX_ERROR = 1e-2
"""Greatest ``|result - exact| / |exact|`` of a kernel that may be chosen. Rounding to bfloat16 two or three times gives
2e-3, cutting off, as the interpreter does, up to 9e-3."""

_COLD_BYTES = 256 << 20  # of copies of a weight: several times the largest cache
_GRAPH_BYTES = 1 << 30  # of weights read in a graph, but no more than 64 calls: beside that, starting it is nothing
_EPS = 1e-6


@dataclass(frozen=True)
class Product:
    """A product that a decode step has.

    Args:
        model: a key of `SHAPES`.
        place: where in the model.
        n, k: shape of the weight.
        kind: what belongs to it: a norm before it, the addition to the residual stream behind it, ...
        count: how often a step has it.
    """

    model: str
    place: str
    n: int
    k: int
    kind: Kind
    count: int


def products(model: str, config: dict[str, Any]) -> list[Product]:
    """Those of a model, by its ``config.json``."""
    hidden, layers, size = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    q, kv = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    return [
        Product(model, "qkv", q + 2 * kv, hidden, "norm", layers),
        Product(model, "o", hidden, q, "add", layers),
        Product(model, "gate_up", 2 * size, hidden, "norm silu", layers),
        Product(model, "down", hidden, size, "add", layers),
        Product(model, "head", config["vocab_size"], hidden, "norm", 1),
    ]


def candidates(num_tokens: int, n: int, k: int) -> list[LinearPath]:
    """Paths that may be the fastest for this many tokens and this shape, the likelier first. Which it is, is for the
    clock to say."""
    if num_tokens <= 4:
        found = [_gemv(4, 4, 2), _gemv(2, 4, 2), _gemv(4, 2, 4), _gemv(8, 4, 1), _gemv(4, 8, 1), _gemv(2, 8, 2)]
        if k <= 4096:  # all weights of a program at once, in its registers
            found += [_row(2, k, 2), _row(4, k, 2)] if k <= 1024 else [_row(2, k, 4), _row(4, k, 4), _row(2, k, 2)]
        if num_tokens == 1:
            return [*found, _gemv(1, 4, 4), _gemv(1, 8, 2), _gemv(2, 2, 4)]
        return [*found, _split(16, 4, 4), _split(8, 4, 4), _whole(64, 128, 4)]
    found = []
    if k <= 2048 and num_tokens <= 32:
        found = [_block(16, k, 8), _block(32, k, 8), _block(16, k, 4)] if n > 2048 else [_block(8, k, 8)]
    if n <= 5120:
        found += _shared(num_tokens, n, k)
    if num_tokens <= 16:
        found += [_split(16, 4, 4), _split(32, 4, 3), _whole(64, 128, 4), _split(8, 4, 4), _split(16, 8, 3)]
        found += [_split(8, 8, 4), _split(32, 8, 4), _split(8, 4, 4, 256 if num_tokens <= 8 else 128)]
        if num_tokens <= 8:
            return [*found, _gemv(4, 4, 1), _gemv(2, 4, 1), _gemv(8, 4, 1), _whole(32, 128, 4)]
        return [*found, _whole(64, 64, 6), _whole(128, 64, 4), _whole(32, 128, 4), *_padded(n, k)]
    if num_tokens <= 32:
        found += _padded(n, k)
    return [
        *found, _whole(64, 128, 3), _whole(32, 128, 6), _whole(64, 128, 5), _whole(32, 256, 4), _whole(16, 128, 6),
        _split(32, 4, 3), _whole(64, 64, 4), _whole(128, 64, 4), _whole(128, 64, 4, num_warps=8),
        _whole(128, 128, 3, num_warps=8), _split(16, 4, 3),
    ]  # fmt: skip


def _padded(n: int, k: int) -> list[LinearPath]:
    """What is likeliest for 64 tokens."""
    shared = _shared(MAX_TOKENS, n, k)[:2] if n <= 5120 else []
    return [replace(path, tokens=MAX_TOKENS) for path in (*shared, _whole(32, 128, 6), _whole(64, 128, 4))]


def _row(block_n: int, k: int, num_warps: int) -> LinearPath:
    """A block is as long as a row."""
    return LinearPath("gemv", block_n=block_n, block_k=1 << (k - 1).bit_length(), num_warps=num_warps)


def _block(block_n: int, k: int, num_warps: int) -> LinearPath:
    """A block is as long as a row, and each warp has its part of it."""
    block_k = max((1 << (k - 1).bit_length()) // num_warps, 16)
    return LinearPath("dot", block_n=block_n, block_k=block_k, split=num_warps, num_warps=num_warps)


def _shared(num_tokens: int, n: int, k: int) -> list[LinearPath]:
    """Programs share K: about as many as a large GPU has multiprocessors."""
    found = []
    for block_n in (64, 32):
        parts = min(8, 1 << max(128 * block_n // n, 1).bit_length() - 1)
        if parts > 1 and k % (128 * parts) == 0:
            if num_tokens > 32:
                found.append(replace(_whole(block_n, 128, 5), parts=parts))
            elif k // parts <= 512:
                found.append(replace(_block(block_n, k // parts, 4), parts=parts))
            else:
                found.append(replace(_split(block_n, 4, 4), parts=parts))
    return found


def _gemv(block_n: int, num_warps: int, depth: int) -> LinearPath:
    """Each thread takes 16 bytes of a row at once."""
    return LinearPath("gemv", block_n=block_n, block_k=256 * num_warps, depth=depth, num_warps=num_warps)


def _split(block_n: int, num_warps: int, depth: int, block_k: int = 64) -> LinearPath:
    return LinearPath("dot", block_n=block_n, block_k=block_k, split=num_warps, depth=depth, num_warps=num_warps)


def _whole(block_n: int, block_k: int, depth: int, num_warps: int = 4) -> LinearPath:
    return LinearPath("dot", block_n=block_n, block_k=block_k, depth=depth, num_warps=num_warps)


class ProductCase:
    """Tensors of one product, for any number of tokens up to `MAX_TOKENS`."""

    def __init__(self, product: Product, device: torch.device, dtype: torch.dtype) -> None:
        self.product, self.device = product, device
        n, k, silu = product.n, product.k, "silu" in product.kind

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.float32).mul_(scale).to(dtype)

        self.x = randn(MAX_TOKENS, k)
        self.norm_weight = randn(k, scale=0.2) + 1
        self.before = randn(MAX_TOKENS, n // 2 if silu else n)
        self.out = self.before.clone()
        copies = max(2, -(-_COLD_BYTES // (n * k * dtype.itemsize))) if device.type == "cuda" else 2
        self.weights = [torch.empty((n, k), device=device, dtype=dtype).normal_(std=k**-0.5) for _ in range(copies)]
        x = self.x.double()
        if "norm" in product.kind:
            x = x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt() * self.norm_weight.double()
        self.exact = x @ self.weights[0].double().t()
        if silu:
            gate, up = self.exact.chunk(2, dim=-1)
            self.exact = gate * gate.sigmoid() * up
        if "add" in product.kind:
            self.exact += self.before.double()

    def error(self, path: LinearPath, num_tokens: int) -> float:
        """Of a kernel, whose output is NaN before it is written."""
        kind, x = self.product.kind, self.x[:num_tokens]
        out = (
            self.before[:num_tokens].clone() if "add" in kind else torch.full_like(self.before[:num_tokens], torch.nan)
        )
        norm: tuple[Tensor, float] | None = (self.norm_weight, _EPS) if "norm" in kind else None
        if norm is not None and not path.fused:
            x, norm = rms_norm(x, *norm), None
        skinny(path, x, self.weights[0], out, norm=norm, silu="silu" in kind, add="add" in kind)
        exact = self.exact[:num_tokens]
        return float((out.double() - exact).norm() / exact.norm())

    def calls(self, functions: SkinnyLinear, num_tokens: int) -> list[Callable[[], object]]:
        """As the model calls it, with each copy of the weight in turn."""
        num_calls = min(64, -(-_GRAPH_BYTES // self.weights[0].nbytes)) if self.device.type == "cuda" else 1
        rounds = max(1, -(-num_calls // len(self.weights)))
        return [self._call(functions, num_tokens, weight) for weight in self.weights] * rounds

    def _call(self, functions: SkinnyLinear, num_tokens: int, weight: Tensor) -> Callable[[], object]:
        x, out = self.x[:num_tokens], self.out[:num_tokens]
        match self.product.kind:
            case "norm":
                return lambda: functions.norm_linear(x, self.norm_weight, _EPS, weight)
            case "add":
                return lambda: functions.linear_add(x, weight, out)
            case "norm silu":
                return lambda: functions.norm_linear_silu(x, self.norm_weight, _EPS, weight)

    def seconds(self, path: LinearPath, num_tokens: int, run_s: float) -> float:
        """Median of one call."""
        functions = SkinnyLinear({(self.product.n, self.product.k): {_bucket(num_tokens): path}})
        calls = self.calls(functions, num_tokens)
        return time_calls(calls, self.device, repeats=5, run_s=run_s, graph=True).median_s


def _bucket(num_tokens: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= num_tokens)


def bench_gemm(
    *,
    shapes: Sequence[str] = ("qwen3-0.6b", "qwen3-8b", "qwen3-14b"),
    buckets: Sequence[int] = BUCKETS,
    max_candidates: int = 16,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    ceilings: Ceilings | None = None,
    output: str | Path | None = None,
    table_output: str | Path | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure the products of models for few tokens, and print what is fastest and how far it is from the floor.

    Args:
        shapes: keys of `SHAPES`.
        buckets: numbers of tokens, of `BUCKETS`.
        max_candidates: kernels to try for each product and number of tokens, beside cuBLAS; fewer take less time.
        device: a CUDA device. Elsewhere kernels are interpreted, and times mean nothing.
        dtype: of 2 bytes.
        ceilings: of the device; measured if None.
        output: JSON file for the report.
        table_output: file for the table of paths: that of the package, with what was measured put in its place.
        seed: of the data.

    Returns:
        A row for each product and number of tokens.
    """
    device = torch.device(device)
    torch.manual_seed(seed)
    read = (ceilings or measure_ceilings(device)).read_bytes_per_s
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    paths = read_table()
    rows: list[dict[str, Any]] = []
    all_products = [product for shape in shapes for product in products(shape, SHAPES[shape])]
    for product in all_products:
        case = ProductCase(product, device, dtype)
        floor_s = product.n * product.k * dtype.itemsize / read
        chosen = paths.setdefault(name, {}).setdefault((product.n, product.k), {})
        right = right_paths(case, buckets, max_candidates)
        for m in buckets:
            path, best_s, cublas_s = _fastest(case, m, right[m])
            chosen[m] = path
            rows.append(
                {
                    "model": product.model, "product": f"{product.place} {product.n}x{product.k}", "kind": product.kind,
                    "tokens": m, "path": describe(path), "us": best_s * 1e6, "cuBLAS us": cublas_s * 1e6,
                    "floor us": floor_s * 1e6, "share %": 100 * floor_s / best_s, "cuBLAS %": 100 * floor_s / cublas_s,
                }
            )  # fmt: skip
        print(table(rows[-len(buckets) :]), flush=True)
        del case
    steps = list(_steps(all_products, buckets, rows))
    print(f"\nAll products of a step; reading at {read / 1e12:.3g} TB/s is the floor")
    print(table(steps))
    chains = [
        _chain(shape, SHAPES[shape], m, paths[name], device, dtype, read)
        for shape in shapes for m in (1, 16, 64) if m in buckets
    ]  # fmt: skip
    print("\nThe products of all layers, one behind the other; without dependent launches, and by cuBLAS")
    print(table(chains))
    if output is not None:
        report = {"read TB/s": read / 1e12, "steps": steps, "chains": chains, "rows": rows}
        write_report(output, "products of a decode step", device, report)
    if table_output is not None:
        Path(table_output).write_text(table_as_json(paths), encoding="utf-8")
    return rows


def _chain(
    model: str,
    config: dict[str, Any],
    num_tokens: int,
    paths: dict[tuple[int, int], dict[int, LinearPath]],
    device: torch.device,
    dtype: torch.dtype,
    read_bytes_per_s: float,
) -> dict[str, Any]:
    """The four products of every layer as a step has them, each working on what the one before it wrote: only so does
    it show what a product can do before the one before has ended."""
    shapes = {product.place: (product.n, product.k) for product in products(model, config)[:4]}
    layers = [
        {place: torch.empty(shape, device=device, dtype=dtype).normal_(std=shape[1] ** -0.5)
         for place, shape in shapes.items()}
        for _ in range(config["num_hidden_layers"])
    ]  # fmt: skip
    hidden, q_size = shapes["o"]
    norm_weight = torch.ones(hidden, device=device, dtype=dtype)
    stream = torch.randn((num_tokens, hidden), device=device, dtype=torch.float32).to(dtype)

    norm = (norm_weight, _EPS)

    def chain(functions: SkinnyLinear) -> None:
        normed = None
        for weights in layers:
            qkv = functions.norm_linear(stream, *norm, weights["qkv"], None, normed)
            normed = functions.linear_add(qkv[:, :q_size], weights["o"], stream, None, norm)
            h = functions.norm_linear_silu(stream, *norm, weights["gate_up"], None, normed)
            normed = functions.linear_add(h, weights["down"], stream, None, None if weights is layers[-1] else norm)

    run_s = 0.02 if device.type == "cuda" else 0.0
    us = {
        name: 1e6 * time_calls([partial(chain, functions)], device, repeats=5, run_s=run_s, graph=True).median_s
        for name, functions in {
            "us": SkinnyLinear(paths),
            "one by one us": SkinnyLinear(paths, pdl=False),
            "cuBLAS us": SkinnyLinear(native=False, pdl=False),
        }.items()
    }  # fmt: skip
    num_bytes = sum(weight.nbytes for weights in layers for weight in weights.values())
    floor_us = 1e6 * num_bytes / read_bytes_per_s
    return {"model": model, "tokens": num_tokens, **us, "floor us": floor_us, "share %": 100 * floor_us / us["us"]}


def right_paths(case: ProductCase, buckets: Sequence[int], max_candidates: int) -> dict[int, list[LinearPath]]:
    """For each number of tokens, candidates that compile, fit the device and give the right numbers."""
    trials = [(m, path) for m in buckets for path in _paths(case.product, m, max_candidates)]

    def error(trial: tuple[int, LinearPath]) -> float | str:
        try:
            return case.error(trial[1], trial[0])
        except Exception as refused:  # by the compiler or the driver: too much shared memory, most of all
            return f"{type(refused).__name__}: {refused}".partition("\n")[0]

    compile_ahead(lambda: [error(trial) for trial in trials], case.device)
    errors = [error(trial) for trial in trials]
    right: dict[int, list[LinearPath]] = {m: [] for m in buckets}
    for (m, path), found in zip(trials, errors, strict=True):
        if not isinstance(found, str) and found <= MAX_ERROR:
            right[m].append(path)
        else:
            print(f"left out, {m} tokens: {describe(path)}: {found}")
    return right


def _paths(product: Product, num_tokens: int, max_candidates: int) -> list[LinearPath]:
    """With more tokens every program does more of a prologue that a kernel of its own would do once: the likeliest are
    also tried without it."""
    paths = candidates(num_tokens, product.n, product.k)
    paths = [path for path in paths if path.parts == 1 or product.kind == "add"][:max_candidates]
    if num_tokens > 4 and "norm" in product.kind:
        paths += [replace(path, fused=False) for path in (*paths[:3], _whole(64, 128, 4))]
    return paths


def _fastest(case: ProductCase, num_tokens: int, paths: Sequence[LinearPath]) -> tuple[LinearPath, float, float]:
    """The fastest path, its seconds, and those of cuBLAS. The two best are measured again, for longer: the lowest of
    many measurements is one that was lucky."""
    run_s = 0.004 if case.device.type == "cuda" else 0.0
    seconds = {path: case.seconds(path, num_tokens, run_s) for path in (CUBLAS, *paths)}
    best = sorted(paths, key=seconds.__getitem__)[:2]
    again = {path: case.seconds(path, num_tokens, 4 * run_s) for path in (CUBLAS, *best)}
    path = min(again, key=again.__getitem__)
    return path, again[path], again[CUBLAS]


def describe(path: LinearPath) -> str:
    """For tables."""
    if path.kind == "cublas":
        return "cublas"
    split = f" / {path.split}" if path.split > 1 else ""
    parts = f", {path.parts} parts" if path.parts > 1 else ""
    return (
        f"{path.kind} {path.block_n}x{path.block_k}{split}{parts}, {path.num_warps} warps, depth {path.depth}"
        f"{'' if path.fused else ', not fused'}"
    )


def _steps(
    all_products: Sequence[Product], buckets: Sequence[int], rows: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What the products of a whole step take together, for each model and number of tokens."""
    of = {(row["model"], row["product"], row["tokens"]): row for row in rows}
    for model in dict.fromkeys(product.model for product in all_products):
        for m in buckets:
            own = [p for p in all_products if p.model == model]
            total = {
                key: sum(of[model, f"{p.place} {p.n}x{p.k}", m][f"{key}us"] * p.count for p in own) / 1e3
                for key in ("", "cuBLAS ", "floor ")
            }
            yield {
                "model": model, "tokens": m, "ms": total[""], "cuBLAS ms": total["cuBLAS "],
                "floor ms": total["floor "], "share %": 100 * total["floor "] / total[""],
            }  # fmt: skip
