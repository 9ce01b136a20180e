"""Products and attention of a decode step, tried inside the step: `python -m minisgl.benchmark.tune_step --help`.

What is fastest by itself need not be so in a step. There a kernel's programs come while the kernel before still runs,
if its registers and shared memory leave them room, and each finds in the caches what the others left there. So one
variant is put in, the step's graph is recorded anew, and whole steps are timed. A product's variant that makes the step
faster stays for those that follow, and goes into the table that `minisgl.kernels.triton_linear` chooses by. Attention's
are only printed: whoever finds a better one changes `choose_options`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from minisgl.benchmark.gemm import Product, ProductCase, describe, products, right_paths
from minisgl.benchmark.measure import Bench, open_bench
from minisgl.benchmark.profile import StepDriver
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.shapes import SHAPES
from minisgl.benchmark.tune_decode import describe as describe_attention
from minisgl.benchmark.tune_decode import fits
from minisgl.engine.attention import triton_backend
from minisgl.engine.graphs import GraphCapture, Graphs
from minisgl.kernels.triton_line import DecodeOptions, choose_options
from minisgl.kernels.triton_linear import BUCKETS, MAX_TOKENS, LinearPath, read_table, table_as_json

NOISE = 0.006
"""Of a step's time: what a variant has to gain, twice, before it is believed."""

Paths = dict[tuple[int, int], dict[int, LinearPath]]
T = TypeVar("T")


def climb(first: T, others: Sequence[T], seconds: Callable[[T], float]) -> tuple[T, list[tuple[T, float, bool]]]:
    """The fastest, as far as can be told, and of each how long it took and whether it was kept.

    Args:
        first: what is there; measured twice.
        others: tried in turn against the fastest so far.
        seconds: of a step with it.
    """
    best, best_s = first, min(seconds(first), seconds(first))
    tried = [(first, best_s, True)]
    for other in others:
        needed = (1 - NOISE) * best_s
        other_s = seconds(other)
        if other_s < needed:
            other_s = max(other_s, seconds(other))
        tried.append((other, other_s, other_s < needed))
        if other_s < needed:
            best, best_s = other, other_s
    return best, tried


class Step:
    """A decode step of an engine, which can be timed again and again.

    Args:
        bench: the engine.
        batch: requests.
        context: tokens of each.
        steps: that are timed.
    """

    def __init__(self, bench: Bench, batch: int, context: int, steps: int) -> None:
        self._bench, self._batch, self._context, self._steps = bench, batch, context, steps
        self._runner = bench.llm.engine.runner
        self._capture = None
        if batch in self._runner.graphs.decodes:
            self._capture = GraphCapture(self._runner, max_seq_len=bench.llm.engine.scheduler.config.max_model_len)

    def seconds(self) -> float:
        """Of a step with what the kernels are now."""
        if self._capture is not None:
            graphs = self._runner.graphs
            self._runner.graphs = Graphs(
                {**graphs.decodes, self._batch: self._capture.decode(self._batch)}, graphs.tokens
            )
        with StepDriver(self._bench, "decode", self._batch, self._context, self._steps) as driver:
            return min(driver.timed(), driver.timed())

    def seconds_if_it_fits(self, variant: str) -> float:
        """The same; infinite, and said so, if the device cannot run what the kernels are now."""
        try:
            return self.seconds()
        except Exception as error:  # Triton has many ways to say that something does not fit
            print(f"left out: {variant}: {str(error).splitlines()[:1]}")
            return float("inf")


def tune_product(
    step: Step, product: Product, paths: Paths, batch: int, max_candidates: int
) -> Iterator[dict[str, Any]]:
    """Try the paths of one product; the fastest is in ``paths`` afterwards. A row for each."""
    bucket = next(bucket for bucket in BUCKETS if bucket >= batch)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    right = right_paths(ProductCase(product, device, torch.bfloat16), [bucket], max_candidates)[bucket]
    of_shape = paths.setdefault((product.n, product.k), {})
    before = of_shape.get(bucket)

    def path_name(path: LinearPath | None) -> str:
        return "as it is" if path is before or path is None else describe(path)

    def seconds(path: LinearPath | None) -> float:
        of_shape.pop(bucket, None)
        if path is not None:  # None: what is used where nothing was measured
            of_shape[bucket] = path
        return step.seconds_if_it_fits(path_name(path))

    best, tried = climb(before, [path for path in right if path != before], seconds)
    of_shape.pop(bucket, None)
    if best is not None:
        of_shape[bucket] = best
    for path, took, is_kept in tried:
        row = {"part": f"{product.place} {product.n}x{product.k}", "variant": path_name(path)}
        yield {**row, "us": _microseconds(took), "kept": is_kept}


def _microseconds(seconds: float) -> float | None:
    """None where the device could not run it: JSON knows no infinity."""
    return 1e6 * seconds if seconds < math.inf else None


def attention_variants(default: DecodeOptions, num_kv_heads: int) -> list[DecodeOptions]:
    """Others than the default, which the device can run."""
    changes: list[dict[str, int]] = [
        {"each": 1}, {"each": 1, "num_stages": 4}, {"each": 1, "block_rows": 128, "num_warps": 8}, {"each": 2},
        {"each": 4, "block_rows": 32, "num_warps": 2}, {"num_stages": 2}, {"block_rows": 128, "num_stages": 2},
        {"ahead": 0}, {"ahead": 1}, {"ahead": 2}, {"ahead": 4}, {"patience": 0}, {"patience": 8},
        {"item_cost": 0}, {"item_cost": 2}, {"item_cost": 4},
        *({"heads": heads} for heads in (1, 2, 4, 8) if num_kv_heads % heads == 0),
    ]  # fmt: skip
    found = [replace(default, **change) for change in changes]
    return [options for options in dict.fromkeys(found) if options != default and fits(options)]


@contextmanager
def _attention(options: DecodeOptions) -> Iterator[None]:
    triton_backend.choose_options = lambda *args, **kwargs: options
    try:
        yield
    finally:
        triton_backend.choose_options = choose_options


def tune_attention(step: Step, bench: Bench, batch: int) -> Iterator[dict[str, Any]]:
    """Try ways to cut and compute the decodes. A row for each."""
    config = bench.llm.config
    multiprocessors = (
        torch.cuda.get_device_properties(bench.device).multi_processor_count if bench.device.type == "cuda" else 4
    )
    default = choose_options(
        batch, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        num_programs=triton_backend.PROGRAMS_EACH * multiprocessors,
    )  # fmt: skip

    def seconds(options: DecodeOptions) -> float:
        with _attention(options):
            return step.seconds_if_it_fits(describe_attention(options))

    _, tried = climb(default, attention_variants(default, config.num_kv_heads), seconds)
    for options, took, is_kept in tried:
        more = f"{options.ahead} ahead, patience {options.patience}, item cost {options.item_cost}"
        name = f"{describe_attention(options)}, {more}"
        yield {"part": "attention", "variant": name, "us": _microseconds(took), "kept": is_kept}


def paths_of(bench: Bench) -> Paths:
    """The table that the engine's kernels look into at each recording, to be changed. Raises ``ValueError`` if its
    kernels have none."""
    products = getattr(bench.llm.engine.runner.model.lm_head.kernels.norm_linear, "__self__", None)
    if not isinstance(getattr(products, "table", None), dict):
        raise ValueError("only kernels 'triton' go by a table")
    return cast(Paths, products.table)  # type: ignore[union-attr]


def tune_step(
    bench: Bench,
    sizes: Sequence[tuple[int, int]],
    *,
    parts: Sequence[str] = ("products", "attention"),
    max_candidates: int = 6,
    steps: int = 24,
    seconds: float = float("inf"),
) -> tuple[list[dict[str, Any]], Paths]:
    """Tune steps of so many requests and tokens of each; nothing more is begun after so many seconds.

    Returns:
        A row for each variant; and the table of paths as it is then, empty if products were not asked for.
    """
    started, rows = time.monotonic(), []
    paths = paths_of(bench) if "products" in parts else {}
    for batch, context in sizes:
        step = Step(bench, batch, context, steps)
        works: list[Iterator[dict[str, Any]]] = []
        if "products" in parts and batch <= MAX_TOKENS and bench.name in SHAPES:
            own = products(bench.name, SHAPES[bench.name])
            works += [tune_product(step, product, paths, batch, max_candidates) for product in own]
        if "attention" in parts:
            works.append(tune_attention(step, bench, batch))
        for work in works:
            if time.monotonic() - started > seconds:
                print("there is no time left for the rest")
                return rows, paths
            new = [{"step": f"{batch} x {context}", **row} for row in work]
            print(table(new), flush=True)
            rows += new
    return rows, paths


def _size(text: str) -> tuple[int, int]:
    batch, context = text.split("x")
    return int(batch), int(context)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, print as it goes, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--step", action="append", type=_size, metavar="NxLEN", help="requests, tokens of each")
    parser.add_argument("--part", action="append", choices=["products", "attention"], help="default: both")
    parser.add_argument("--max-candidates", type=int, default=6, metavar="N", help="paths of each product (default: 6)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing more after so long")
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON report")
    parser.add_argument("--table-output", metavar="FILE", help="the table, with what was found in its place")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    sizes = args.step or [(1, 384), (16, 400), (64, 640), (256, 820)]
    with open_bench({}, shape=args.shape) as bench:
        rows, paths = tune_step(
            bench, sizes, parts=args.part or ("products", "attention"), max_candidates=args.max_candidates,
            seconds=args.seconds,
        )  # fmt: skip
        write_report(args.output, "variants inside a decode step", bench.device, {**bench.facts(), "rows": rows})
        if args.table_output is not None and paths:
            everything = read_table() | {torch.cuda.get_device_name(bench.device): paths}
            Path(args.table_output).write_text(table_as_json(everything), encoding="utf-8")


if __name__ == "__main__":
    main()
