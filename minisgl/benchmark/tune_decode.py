"""Variants of our Triton attention kernels on a device: `python -m minisgl.benchmark.tune_decode --output FILE`.

Chapter 4's kernels have a few numbers that a device decides: the size of a tile, warps, stages, programs on a
multiprocessor, heads that are read together. Here each choice is first held against the plain twin, where everything
foreign is NaN, then timed in a CUDA graph over many layers' KV, so that no layer finds its own in the cache. What a
variant reaches counts as a share of the bandwidth that the same command measured, bytes of K and V only.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.benchmark.ceilings import Ceilings, measure_ceilings
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.timing import time_calls
from minisgl.engine.attention.torch_backend import attend
from minisgl.engine.attention.triton_backend import PROGRAMS_EACH
from minisgl.kernels.triton_attention import choose_heads, decode_attention, lay_out, prefill_attention, registers_of

NAN = float("nan")
PAGE_SIZE, HEAD_DIM, SCALE = 64, 128, 128**-0.5
# Of the result's norm: bfloat16 rounds the weights and the result. A token too many or too few is far above.
TOLERANCE = 1e-2
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for all of its programs (Hopper)


@dataclass(frozen=True, slots=True)
class Variant:
    """Options of `decode_attention`; ``each`` programs on a multiprocessor."""

    heads: int
    block_rows: int
    num_warps: int
    num_stages: int
    each: int

    @property
    def shared_bytes(self) -> int:
        """Of a program, about: a stage less than there are is in memory at a time."""
        return (self.num_stages - 1) * 2 * 2 * HEAD_DIM * self.block_rows + (6 << 10)

    def fits(self) -> bool:
        """Whether all programs run at once, as far as shared memory goes."""
        return self.each * (self.shared_bytes + 1024) <= _SHARED_BYTES

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.block_rows} rows, {self.num_warps} w, {self.num_stages} st, x{self.each}"


def shapes(quick: bool) -> dict[str, tuple[list[int], int]]:
    """Name -> lengths and query heads; there are 8 KV heads."""
    uneven = np.random.default_rng(0).triangular(100, 300, 2000, 256).astype(int).tolist()
    lengths = {
        "256 x ~800": uneven,
        "64 x 640": [640] * 64,
        "16 x 400": [400] * 16,
        "1 x 384": [384],
        "1 x 8192": [8192],
    }
    return {f"{name}, {heads}/8": (n, heads) for heads in ((16,) if quick else (16, 32)) for name, n in lengths.items()}


def variants(group: int, quick: bool) -> Iterator[Variant]:
    """The fewest and the most heads that cost nothing, with all tiles; the heads between with the usual tile."""
    tiles = [(32, 2, 4), (32, 4, 4), (64, 4, 3), (64, 4, 4), (64, 2, 3), (128, 8, 3)]
    if not quick:
        tiles += [(32, 1, 4), (32, 2, 3), (32, 2, 5), (32, 4, 3), (64, 4, 5), (64, 8, 3), (128, 4, 3)]
    most = max(1, 16 // group)
    for heads, tile in itertools.product((1, 2, 4, 8), tiles):
        if heads in (1, most) or (heads < most and tile in ((64, 4, 3), (32, 4, 4))):
            for each in (1, 2, 3, 4, 5, 6):
                variant = Variant(heads, *tile, each)
                larger = Variant(heads, *tile, each + 1)
                # With many warps or programs that do not fill the device there is little to learn.
                if variant.fits() and (each >= 2 or not larger.fits()):
                    yield variant


class Case:
    """One shape: layers of random KV on shuffled pages, of which the first is NaN wherever no request has a token."""

    def __init__(self, lengths: Sequence[int], num_heads: int, device: torch.device) -> None:
        self.device, self.num_requests = device, len(lengths)
        self.kv_bytes = sum(lengths) * 2 * 8 * HEAD_DIM * 2
        pages_each = [-(-n // PAGE_SIZE) for n in lengths]
        num_pages = 1 + sum(pages_each)
        pages = np.random.default_rng(1).permutation(num_pages - 1) + 1
        page_table = np.zeros((len(lengths), max(pages_each)), np.int32)
        for i, (count, end) in enumerate(zip(pages_each, np.cumsum(pages_each), strict=True)):
            page_table[i, :count] = pages[end - count : end]
        self.page_table = torch.from_numpy(page_table).to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.line = lay_out(self.seq_lens)
        self.q = torch.randn(len(lengths), num_heads, HEAD_DIM, device=device).bfloat16()
        shape = (2, num_pages, PAGE_SIZE, 8, HEAD_DIM)
        # Together many times the cache (60 MB on an H200).
        num_layers = min(64, max(2, -(-(600 << 20) // self.kv_bytes)))
        self.layers = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(num_layers)]
        self.poisoned = torch.full_like(self.layers[0], NAN)
        exact = []
        for i, length in enumerate(lengths):
            places = torch.arange(length, device=device)
            slots = self.page_table[i, places // PAGE_SIZE].long() * PAGE_SIZE + places % PAGE_SIZE
            k, v = (x.flatten(0, 1)[slots] for x in self.layers[0])
            for own, x in zip((k, v), self.poisoned, strict=True):
                x.flatten(0, 1)[slots] = own
            exact.append(attend(self.q[i : i + 1].float(), k.float(), v.float(), scale=SCALE))
        self.exact = torch.cat(exact)
        self.out = torch.empty_like(self.q)
        count = torch.cuda.get_device_properties(device).multi_processor_count
        self.counters = torch.zeros(8 * count, dtype=torch.int32, device=device)
        self.num_multiprocessors = count
        each = PROGRAMS_EACH
        heads = choose_heads(len(lengths), 8, num_heads // 8, num_programs=each * count)
        self.default = Variant(heads, 64, 4, 3, each)

    def run(self, variant: Variant, kv: Tensor, out: Tensor) -> None:
        """Launch it once, on one layer's ``kv``."""
        decode_attention(
            self.q, kv, out, self.page_table, self.seq_lens, self.line, self.counters, scale=SCALE,
            num_programs=variant.each * self.num_multiprocessors, heads=variant.heads, block_rows=variant.block_rows,
            num_warps=variant.num_warps, num_stages=variant.num_stages,
            max_registers=registers_of(variant.each, variant.num_warps),
        )  # fmt: skip

    def error(self, variant: Variant) -> float:
        """Of the norm, the worse of two launches; NaN if something foreign was read or something was not written."""
        errors = []
        for _ in range(2):
            # What the kernel gets for its pieces is likely this.
            waste = torch.full((2 * variant.each * self.num_multiprocessors, 16, 130), NAN, device=self.device)
            del waste
            out = torch.full_like(self.q, NAN)
            self.run(variant, self.poisoned, out)
            errors.append(float((out.double() - self.exact).norm() / self.exact.norm()))
        assert not self.counters.any(), "counters must be 0 again"
        return float(np.max(errors))

    def seconds(self, variant: Variant) -> float:
        """Of one layer, launch included."""
        calls = [functools.partial(self.run, variant, kv, self.out) for kv in self.layers]
        return time_calls(calls, self.device, repeats=3, run_s=0.004, graph=True).median_s


def _attempt(name: object, work: Callable[[], Any]) -> Any:
    """A variant that the device cannot run is told, and left out."""
    try:
        return work()
    except Exception as error:  # Triton has many ways to say that something does not fit
        print(f"left out: {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        return None


def tune_shape(case: Case, candidates: Sequence[Variant], ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each variant that is right, best first."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compile first, several at a time
        list(pool.map(lambda v: _attempt(v, functools.partial(case.run, v, case.poisoned, case.out)), candidates))
    floor_s = case.kv_bytes / ceilings.read_bytes_per_s
    rows = []
    for v in candidates:
        error = _attempt(v, functools.partial(case.error, v))
        if error is None:
            continue
        if not error < TOLERANCE:
            print(f"WRONG: {v}: error {error}")
            continue
        seconds = case.seconds(v)
        rows.append({
            "variant": str(v), "us": 1e6 * seconds, "share %": 100 * floor_s / seconds,
            "beyond us": 1e6 * (seconds - floor_s), "error": error, "default": v == case.default,
        })  # fmt: skip
    return sorted(rows, key=lambda row: row["us"])


def tune_decode(device: torch.device, ceilings: Ceilings, *, quick: bool) -> list[dict[str, Any]]:
    """Rows of all shapes and variants, best first within a shape."""
    rows: list[dict[str, Any]] = []
    for name, (lengths, num_heads) in shapes(quick).items():
        case = Case(lengths, num_heads, device)
        rows += [{"shape": name, **row} for row in tune_shape(case, list(variants(num_heads // 8, quick)), ceilings)]
    return rows


def tune_prefill(device: torch.device, ceilings: Ceilings) -> list[dict[str, Any]]:
    """8 prompts of 4096 tokens, 16/8 heads, causal."""
    num_requests, length, heads = 8, 4096, 16
    num_pages = num_requests * length // PAGE_SIZE
    q = torch.randn(num_requests * length, heads, HEAD_DIM, device=device).bfloat16()
    kv = torch.randn(2, 1 + num_pages, PAGE_SIZE, 8, HEAD_DIM, device=device).bfloat16()
    page_table = (1 + torch.randperm(num_pages, device=device)).int().view(num_requests, -1)
    seq_lens = torch.full((num_requests,), length, dtype=torch.int32, device=device)
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * length
    k, v = (x[page_table[0].long()].flatten(0, 1) for x in kv)
    exact = attend(q[:length].float(), k.float(), v.float(), scale=SCALE)
    tiles = [(128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (128, 64, 8, 2, 2), (128, 128, 8, 2, 1), (128, 128, 8, 3, 1)]
    tiles += [(128, 64, 4, 2, 2), (64, 64, 4, 2, 2), (64, 64, 4, 2, 3)]
    rows = []
    for block_m, block_k, num_warps, num_stages, each in tiles:
        out = torch.full_like(q, NAN)
        run = functools.partial(
            prefill_attention, q, kv, out, page_table, starts, seq_lens, scale=SCALE,
            block_m=block_m, block_k=block_k, num_warps=num_warps, num_stages=num_stages,
            max_registers=registers_of(each, num_warps),
        )  # fmt: skip
        name = f"{block_m} x {block_k}, {num_warps} w, {num_stages} st, x{each}"

        def measure(run: Callable[[], None] = run, out: Tensor = out) -> tuple[float, float]:
            run()
            error = float((out[:length].double() - exact).norm() / exact.norm())
            assert not out.isnan().any(), "not all was written"
            return error, time_calls([run], device, repeats=3, run_s=0.02).median_s

        if (result := _attempt(name, measure)) is not None:
            error, seconds = result
            flops = 4 * HEAD_DIM * heads * num_requests * length * (length + 1) / 2
            rows.append({
                "shape": "prefill 8 x 4096, 16/8", "variant": name, "us": 1e6 * seconds,
                "TFLOP/s": flops / seconds / 1e12, "share %": 100 * flops / seconds / ceilings.matmul_flops_per_s,
                "error": error,
            })  # fmt: skip
    return sorted(rows, key=lambda row: row["us"])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the best of each shape and what the defaults reach, write all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", required=True, help="JSON file")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and variants")
    args = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    ceilings = measure_ceilings(device)
    decode = tune_decode(device, ceilings, quick=args.quick)
    prefill = tune_prefill(device, ceilings)
    facts = {
        "read TB/s": ceilings.read_bytes_per_s / 1e12,
        "matmul TFLOP/s": ceilings.matmul_flops_per_s / 1e12,
        "launch us": 1e6 * ceilings.launch_s,
    }
    write_report(args.output, "variants of the Triton attention kernels", device, {**facts, "rows": decode + prefill})
    if prefill:
        print(table(prefill))
    shown = []
    for _, same in itertools.groupby(decode, key=lambda row: row["shape"]):
        group = list(same)
        shown += [row for i, row in enumerate(group) if i < 4 or row["default"]]
    print(facts)
    if shown:
        print(table([{k: v for k, v in row.items() if k != "error"} for row in shown]))


if __name__ == "__main__":
    main()
