"""The small kernels of a step on a device: `python -m minisgl.benchmark.tune_small --output FILE`.

Each is first held against its plain twin, then timed in a CUDA graph over copies of its data that together are more
than the caches hold (with few tokens there are as many as is practical). What a variant reaches counts as a share of
the bandwidth that the same command measured: reading only for sampling, copying for all others. With few tokens only
the microseconds count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.ceilings import Ceilings, measure_ceilings
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.timing import time_calls
from minisgl.kernels import (
    activation,
    norm,
    rotary,
    sampling,
    triton_elementwise,
    triton_prepare,
    triton_sampling,
)
from minisgl.kernels.compile_ahead import compile_ahead

SIZES = (1, 16, 64, 256, 8192)
_COLD_BYTES = 256 << 20
_MOST_COPIES = 64
# Of a result's norm: bfloat16, rounded once more or less.
_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel at one shape.

    Args:
        kernel, shape: their names.
        num_bytes: that it has to read and write.
        variants: name -> kernel; the first is what is used by default. Called with one of ``copies``.
        twin: None where a result says nothing after the first call.
        copies: arguments.
        reads_only: which bandwidth it is measured by.
    """

    kernel: str
    shape: str
    num_bytes: int
    variants: dict[str, Callable[..., Any]]
    copies: list[tuple[Any, ...]]
    twin: Callable[..., Any] | None = None
    reads_only: bool = field(default=False)


def _randn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def _copies(num_bytes: int, make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [make() for _ in range(min(max(-(-_COLD_BYTES // num_bytes), 1), _MOST_COPIES))]


def _norms(device: torch.device) -> Iterator[Case]:
    for size in (1024, 4096, 5120):
        weight = _randn(device, size)
        for n in SIZES:
            variants: dict[str, Callable[..., Any]] = {"default": triton_elementwise.rms_norm}
            for warps in (1, 2, 4, 8):
                if 512 <= size // warps <= 4096:
                    variants[f"{warps} warps"] = partial(triton_elementwise.rms_norm, num_warps=warps)

            def make(n: int = n, size: int = size, weight: Tensor = weight) -> tuple[Any, ...]:
                return _randn(device, n, size), weight, 1e-6

            copies = _copies(4 * n * size, make)
            yield Case("rms_norm", f"{n} x {size}", 4 * n * size, variants, copies, norm.rms_norm)


def _activations(device: torch.device) -> Iterator[Case]:
    for size in (3072, 12288, 17408):
        for n in SIZES:
            variants: dict[str, Callable[..., Any]] = {"default": triton_elementwise.silu_and_mul}
            for block, warps in ((512, 2), (1024, 2), (2048, 4), (4096, 8), (4096, 4)):
                name = f"{block} by {warps} warps"
                variants[name] = partial(triton_elementwise.silu_and_mul, block=block, num_warps=warps)
            copies = _copies(6 * n * size, lambda n=n, size=size: (_randn(device, n, 2 * size),))
            yield Case("silu_and_mul", f"{n} x {size}", 6 * n * size, variants, copies, activation.silu_and_mul)


def _rotations(device: torch.device) -> Iterator[Case]:
    dim, kv_heads, num_pages, page_size = 128, 8, 512, 64
    kv = torch.zeros(2, num_pages, page_size, kv_heads, dim, dtype=torch.bfloat16, device=device)
    for heads in (16, 32):
        weights = _randn(device, 2, dim)
        for n in SIZES:
            num_bytes = n * (4 * (heads + 2 * kv_heads) * dim + 2 * dim + 8)

            def make(n: int = n, heads: int = heads, weights: Tensor = weights) -> tuple[Any, ...]:
                qkv = _randn(device, n, (heads + 2 * kv_heads) * dim)
                slots = torch.randperm(num_pages * page_size, device=device)[:n]
                return qkv, *weights, 1e-6, _randn(device, n, dim // 2), _randn(device, n, dim // 2), kv, slots

            variants: dict[str, Callable[..., Any]] = {
                "default": partial(triton_elementwise.norm_rotary_store, num_heads=heads)
            }
            for tile, warps in ((128, 1), (256, 1), (512, 1), (1024, 1), (1024, 2), (2048, 2), (2048, 4)):
                variants[f"{tile} by {warps} warps"] = partial(
                    triton_elementwise.norm_rotary_store, num_heads=heads, tile=tile, num_warps=warps
                )
            twin = partial(rotary.norm_rotary_store, num_heads=heads)
            yield Case("norm_rotary_store", f"{n} x {heads}/8", num_bytes, variants, _copies(num_bytes, make), twin)


def _samples(device: torch.device) -> Iterator[Case]:
    vocab_size, max_running = 151_936, 256
    rows = torch.arange(max_running, dtype=torch.int32, device=device)
    seeds, last = torch.randint(2**62, (2, max_running), device=device)
    for name, heat, all_greedy in (("greedy", 0.0, True), ("greedy, one random", 0.0, False), ("random", 0.6, False)):
        temperature = torch.full((max_running,), heat, device=device)
        temperature[:1] = 0.0 if all_greedy else 0.6
        for n in SIZES[:4]:
            variants: dict[str, Callable[..., Any]] = {
                "default": partial(triton_sampling.sample_rows, all_greedy=all_greedy)
            }
            for tile, warps in ((1024, 2), (2048, 8), (4096, 8), (8192, 16)):
                variants[f"{tile} by {warps} warps"] = partial(
                    triton_sampling.sample_rows, all_greedy=all_greedy, tile=tile, num_warps=warps
                )

            def make(n: int = n, temperature: Tensor = temperature) -> tuple[Any, ...]:
                positions = torch.zeros(max_running, dtype=torch.int64, device=device)
                return _randn(device, n, vocab_size), rows[:n], temperature, seeds, positions, last, vocab_size

            num_bytes = 2 * n * vocab_size
            twin = partial(sampling.sample_rows, all_greedy=all_greedy)
            yield Case(f"sample_rows, {name}", f"{n}", num_bytes, variants, _copies(num_bytes, make), twin, True)


def _preparations(device: torch.device) -> Iterator[Case]:
    """The rows grow with each call: they have room for as many as are made here."""
    width, page_size = 2560, 64
    for num_requests, num_tokens in ((1, 1), (16, 16), (64, 64), (256, 256), (8, 8192)):
        each = num_tokens // num_requests
        head, known = 6 * num_requests + 3, num_tokens if each > 1 else 0
        count = torch.arange(num_requests + 1, dtype=torch.int32)
        columns = [count[:-1], count[:-1] * 0 + (100 if each > 1 else -1), count[:-1] * 0, count * each]
        columns += [head + count * (each if known else 0), (head + known) + count * 0, torch.arange(known).int()]
        packed = torch.cat(columns).to(device)
        seq_lens = torch.full((num_requests,), 800, dtype=torch.int32, device=device)
        last = torch.arange(num_requests, device=device)
        pages = torch.randint(1, 5000, (num_requests, width), dtype=torch.int32, device=device)
        tokens = torch.empty(3, num_tokens, dtype=torch.int64, device=device)
        run = partial(
            triton_prepare.prepare_step, input_ids=tokens[0], positions=tokens[1], slot_mapping=tokens[2],
            seq_lens=torch.empty_like(seq_lens), page_table=torch.empty_like(pages), page_size=page_size,
        )  # fmt: skip
        arguments = packed, num_requests, seq_lens, last, pages
        yield Case("prepare_step", f"{num_requests} x {each}", 24 * num_tokens, {"default": run}, [arguments])


def check(case: Case) -> None:
    """All variants against the twin, on a copy of what is changed. Raises ``AssertionError``."""
    if case.twin is None:
        return

    def run(kernel: Callable[..., Any]) -> list[Tensor]:
        arguments = [x.clone() if isinstance(x, Tensor) else x for x in case.copies[0]]
        return [kernel(*arguments), *(x for x in arguments if isinstance(x, Tensor))]

    right = run(case.twin)
    for name, kernel in case.variants.items():
        for mine, other in zip(run(kernel), right, strict=True):
            if case.kernel.startswith("sample_rows"):  # a tie up to rounding may fall the other way
                assert (mine == other).double().mean() > 0.99, f"{case.kernel} {case.shape} {name}"
            else:
                error = (mine.double() - other.double()).norm()
                assert error <= _TOLERANCE * other.double().norm(), f"{case.kernel} {case.shape} {name}: {error}"


def measure(case: Case, device: torch.device, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each variant, best first."""
    rate = ceilings.read_bytes_per_s if case.reads_only else ceilings.copy_bytes_per_s
    rows = []
    # The default comes twice, and its second time counts: the first graph of a large case is slower by a tenth, with
    # any variant, as if its memory were new.
    for name, kernel in [*list(case.variants.items())[:1], *case.variants.items()]:
        calls = [partial(kernel, *arguments) for arguments in case.copies]
        seconds = time_calls(calls, device, repeats=3, run_s=0.003, graph=True).median_s
        share = 100 * case.num_bytes / rate / seconds
        rows.append(
            {"kernel": case.kernel, "shape": case.shape, "variant": name, "us": 1e6 * seconds, "share %": share}
        )
    return sorted(rows[1:], key=lambda row: row["us"])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; print the default and the best of each shape; write all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", required=True, help="JSON file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    ceilings = measure_ceilings(device)
    rows: list[dict[str, Any]] = []
    for cases in (_preparations, _rotations, _samples, _norms, _activations):
        for case in cases(device):
            compile_ahead(lambda case=case: [kernel(*case.copies[0]) for kernel in case.variants.values()], device)
            check(case)
            rows += measure(case, device, ceilings)
    facts = {
        "read TB/s": ceilings.read_bytes_per_s / 1e12,
        "copy TB/s": ceilings.copy_bytes_per_s / 1e12,
        "launch us": 1e6 * ceilings.launch_s,
    }
    write_report(args.output, "the small kernels of a step", device, {**facts, "rows": rows})
    shown = []
    for _, same in groupby(rows, key=lambda row: (row["kernel"], row["shape"])):
        group = list(same)
        default, best = next(row for row in group if row["variant"] == "default"), group[0]
        shown.append({**default, "best": best["variant"], "best us": best["us"], "best share %": best["share %"]})
    print(facts)
    print(table([{k: v for k, v in row.items() if k != "variant"} for row in shown]))


if __name__ == "__main__":
    main()
