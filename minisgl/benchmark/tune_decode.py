"""Variants of our Triton attention kernels on a device: `python -m minisgl.benchmark.tune_decode --output FILE`.

Chapter 4's kernels have a few numbers that a device decides: the size of a tile, warps, stages, programs on a
multiprocessor, heads that are read together. Here each choice is first held against the plain twin, where everything
foreign is NaN, then timed in a CUDA graph over many layers' KV, so that no layer finds its own in the cache. What a
variant reaches counts as a share of the bandwidth that the same command measured, bytes of K and V only.

Where the time beyond those bytes goes, copies of the kernel tell that lack a part of it, or do one thing otherwise: see
`ALTERED`. Most of them compute nothing useful.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.benchmark.ceilings import Ceilings, measure_ceilings
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.timing import time_calls
from minisgl.engine.attention.torch_backend import attend
from minisgl.engine.attention.triton_backend import PROGRAMS_EACH
from minisgl.kernels import triton_attention
from minisgl.kernels.compile_ahead import compile_ahead
from minisgl.kernels.triton_attention import prefill_attention
from minisgl.kernels.triton_line import DecodeOptions, DecodePlan, choose_options, lay_out

NAN = float("nan")
NUM_KV_HEADS, HEAD_DIM, SCALE = 8, 128, 128**-0.5
NEVER, ALWAYS = -(10**6), 10**6  # patience with whole items
# Of the result's norm: bfloat16 rounds the weights and the result. A token too many or too few is far above.
TOLERANCE = 1e-2
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for all of its programs (Hopper)


_BLOCKS = "for token in range(start, stop, BLOCK_K):"
_FIRST_PAGES, _NEXT_PAGES = (
    "pages = page\n",
    "pages = _find_pages(page_row, token + BLOCK_K, places, stop, PAGE_SIZE, BLOCK_K)\n",
)
# Name -> what of the module's text is put otherwise. Each stands there once.
ALTERED: dict[str, dict[str, str]] = {
    "records only": {"while item <= last_item:": "while item < 0:"},
    "one block of each item": {_BLOCKS: "for token in range(start, tl.minimum(stop, start + BLOCK_K), BLOCK_K):"},
    "K and V in L2": {  # always page 0
        _FIRST_PAGES: "pages = page * 0\n",
        _NEXT_PAGES: _NEXT_PAGES.replace("\n", " * 0\n"),
    },
    "no merge": {"if num_before == last - first:": "if num_before < 0:"},
    "no pieces": {"if (start == 0) & (stop == length):": "if stop >= 0:"},
    "Q before K and V": {"there = q_mask & (token + tl.zeros_like(rows) < stop)[:, None]": "there = q_mask"},
    "page not in the record": {
        _FIRST_PAGES: "pages = _find_pages(page_row, start, places, stop, PAGE_SIZE, BLOCK_K)\n"
    },
    "no dependent launch": {"pdl = pdl_options(q.device, True)": "pdl = pdl_options(q.device, False)"},
    "nothing in L2 ahead": {"can_prefetch = pdl": "can_prefetch = False and pdl"},
}  # fmt: skip


def altered(name: str, folder: Path) -> ModuleType:
    """A copy of `minisgl.kernels.triton_attention` in ``folder``, altered as `ALTERED` says."""
    text = Path(str(triton_attention.__file__)).read_text()
    for old, new in ALTERED[name].items():
        assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    path = folder / f"altered_{name.replace(' ', '_')}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def describe(options: DecodeOptions) -> str:
    """For tables."""
    patience = {NEVER: ", cut", ALWAYS: ", whole"}.get(options.patience, "")
    return (
        f"{options.heads} heads, {options.block_rows} rows, {options.num_warps} w, {options.num_stages} st, "
        f"x{options.each}{patience}"
    )


def fits(options: DecodeOptions) -> bool:
    """Whether all programs run at once, as far as shared memory goes: of a program's stages all but one are in memory
    at a time."""
    program_bytes = (options.num_stages - 1) * 2 * (2 * options.block_rows + 16) * HEAD_DIM + (4 << 10)
    return options.each * (program_bytes + 1024) <= _SHARED_BYTES


def shapes(quick: bool) -> dict[str, tuple[list[int], int, int]]:
    """Name -> lengths, query heads, page size; there are 8 KV heads."""
    uneven = np.random.default_rng(0).triangular(100, 300, 2000, 256).astype(int).tolist()
    lengths = {
        "256 x ~800": uneven,
        "64 x 640": [640] * 64,
        "16 x 400": [400] * 16,
        "1 x 384": [384],
        "1 x 8192": [8192],
    }
    cases = {f"{name}, {heads}/8": (n, heads, 64) for heads in (16, 32) for name, n in lengths.items()}
    for name in ("256 x ~800",) if quick else lengths:
        cases[f"{name}, 16/8, page 16"] = (lengths[name], 16, 16)
    return cases


def variants(default: DecodeOptions, num_requests: int, group: int, quick: bool) -> Iterator[DecodeOptions]:
    """The default with another patience or number of programs; one head and as many as cost nothing, with all tiles."""
    yield default
    for options in (
        replace(default, patience=NEVER), replace(default, patience=ALWAYS), replace(default, each=3),
        replace(default, num_stages=4, each=1), replace(default, num_stages=5, each=1),
        replace(default, block_rows=128, num_warps=8, each=1), replace(default, block_rows=128, each=1),
        replace(default, block_rows=32, num_warps=2, each=4), replace(default, block_rows=32, num_warps=2, each=3),
    ):  # fmt: skip
        if fits(options):
            yield options
    tiles = [(32, 2, 4), (64, 4, 3), (64, 2, 3), (128, 4, 2), (128, 8, 2)]
    if not quick:
        tiles += [(16, 1, 4), (32, 1, 4), (32, 2, 3), (32, 2, 5), (64, 4, 2), (64, 4, 4), (128, 8, 3)]
    for heads, tile, each in itertools.product((1, 16 // group), tiles, (2,) if quick else (1, 2, 3, 4)):
        options = DecodeOptions(heads=heads, block_rows=tile[0], num_warps=tile[1], num_stages=tile[2], each=each)
        # A few requests with many heads together are cut into many pieces: known to be slow.
        if fits(options) and options != default and (heads == 1 or num_requests >= 64):
            yield options


class Case:
    """One shape: layers of random KV on shuffled pages, of which the first is NaN wherever no request has a token."""

    def __init__(self, lengths: Sequence[int], num_heads: int, page_size: int, device: torch.device) -> None:
        self.device, self.page_size, self.group = device, page_size, num_heads // NUM_KV_HEADS
        self.kv_bytes = sum(lengths) * 2 * NUM_KV_HEADS * HEAD_DIM * 2
        pages_each = [-(-n // page_size) for n in lengths]
        num_pages = 1 + sum(pages_each)
        pages = np.random.default_rng(1).permutation(num_pages - 1) + 1
        page_table = np.zeros((len(lengths), max(pages_each)), np.int32)
        for i, (count, end) in enumerate(zip(pages_each, np.cumsum(pages_each), strict=True)):
            page_table[i, :count] = pages[end - count : end]
        self.page_table = torch.from_numpy(page_table).to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.q = torch.randn(len(lengths), num_heads, HEAD_DIM, device=device).bfloat16()
        shape = (2, num_pages, page_size, NUM_KV_HEADS, HEAD_DIM)
        # Together many times the cache (60 MB on an H200).
        num_layers = min(64, max(2, -(-(600 << 20) // self.kv_bytes)))
        self.layers = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(num_layers)]
        self.poisoned = torch.full_like(self.layers[0], NAN)
        exact = []
        for i, length in enumerate(lengths):
            places = torch.arange(length, device=device)
            slots = self.page_table[i, places // page_size].long() * page_size + places % page_size
            k, v = (x.flatten(0, 1)[slots] for x in self.layers[0])
            for own, x in zip((k, v), self.poisoned, strict=True):
                x.flatten(0, 1)[slots] = own
            exact.append(attend(self.q[i : i + 1].float(), k.float(), v.float(), scale=SCALE))
        self.exact = torch.cat(exact)
        self.out = torch.empty_like(self.q)
        count = torch.cuda.get_device_properties(device).multi_processor_count
        self.counters = torch.zeros(8 * count, dtype=torch.int32, device=device)
        self.num_multiprocessors = count
        self.default = choose_options(
            len(lengths), num_heads=num_heads, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM,
            num_programs=PROGRAMS_EACH * count,
        )  # fmt: skip

    def plan(self, options: DecodeOptions) -> DecodePlan:
        """As the step's first kernel makes it."""
        return lay_out(
            self.seq_lens, self.page_table, options, num_programs=options.each * self.num_multiprocessors,
            num_kv_heads=NUM_KV_HEADS, page_size=self.page_size,
        )  # fmt: skip

    def run(self, plan: DecodePlan, kv: Tensor, out: Tensor, module: ModuleType = triton_attention) -> None:
        """Launch it once, on one layer's ``kv``."""
        module.decode_attention(
            self.q, kv, out, self.page_table, self.seq_lens, plan, self.counters, scale=SCALE
        )  # fmt: skip

    def error(self, options: DecodeOptions) -> float:
        """Of the norm, the worse of two launches; NaN if something foreign was read or something was not written."""
        errors = []
        for _ in range(2):
            # What the kernel gets for its pieces is likely this.
            waste = torch.full((2 * options.each * self.num_multiprocessors, 16, 130), NAN, device=self.device)
            del waste
            out = torch.full_like(self.q, NAN)
            self.run(self.plan(options), self.poisoned, out)
            errors.append(float((out.double() - self.exact).norm() / self.exact.norm()))
        assert not self.counters.any(), "counters must be 0 again"
        return float(np.max(errors))

    def seconds(self, options: DecodeOptions, module: ModuleType = triton_attention) -> float:
        """Of one layer, launch included."""
        plan = self.plan(options)
        calls = [functools.partial(self.run, plan, kv, self.out, module) for kv in self.layers]
        seconds = time_calls(calls, self.device, repeats=3, run_s=0.004, graph=True).median_s
        self.counters.zero_()  # an altered kernel may leave them otherwise
        return seconds

    def plan_seconds(self) -> float:
        """Of `lay_out`, once in a step."""
        calls = [functools.partial(self.plan, self.default)] * 16
        return time_calls(calls, self.device, repeats=3, run_s=0.002, graph=True).median_s


def _attempt(name: object, work: Callable[[], Any]) -> Any:
    """A variant that the device cannot run is told, and left out."""
    try:
        return work()
    except Exception as error:  # Triton has many ways to say that something does not fit
        print(f"left out: {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        return None


def tune_shape(
    case: Case, candidates: Sequence[DecodeOptions], modules: dict[str, ModuleType], ceilings: Ceilings
) -> list[dict[str, Any]]:
    """A row for each variant that is right, best first, then one for each altered kernel."""
    kernels = [(options, triton_attention) for options in candidates]
    kernels += [(case.default, module) for module in modules.values()]

    def run_all() -> None:
        for options, module in kernels:
            plan = case.plan(options)
            _attempt(module.__name__, functools.partial(case.run, plan, case.layers[0], case.out, module))

    compile_ahead(run_all, case.device)
    floor_s = case.kv_bytes / ceilings.read_bytes_per_s

    def row(name: str, seconds: float, **more: Any) -> dict[str, Any]:
        beyond = 1e6 * (seconds - floor_s)
        return {"variant": name, "us": 1e6 * seconds, "share %": 100 * floor_s / seconds, "beyond us": beyond, **more}

    rows = []
    for options in candidates:
        name = describe(options)
        error = _attempt(name, functools.partial(case.error, options))
        if error is None:
            continue
        if not error < TOLERANCE:
            print(f"WRONG: {name}: error {error}")
            continue
        rows.append(row(name, case.seconds(options), error=error, default=options == case.default))
    rows.sort(key=lambda row: row["us"])
    for name, module in modules.items():
        seconds = _attempt(name, functools.partial(case.seconds, case.default, module))
        if seconds is not None:
            rows.append(row(f"default: {name}", seconds, altered=True))
    rows.append({"variant": "lay_out", "us": 1e6 * case.plan_seconds(), "altered": True})
    return rows


def tune_decode(device: torch.device, ceilings: Ceilings, *, quick: bool) -> list[dict[str, Any]]:
    """Rows of all shapes: the variants, best first, and the altered kernels."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        modules = {name: altered(name, Path(folder)) for name in ALTERED}
        for name, (lengths, num_heads, page_size) in shapes(quick).items():
            case = Case(lengths, num_heads, page_size, device)
            candidates = list(variants(case.default, len(lengths), case.group, quick))
            # Where the time goes is asked once for each length.
            asked = modules if not quick or (num_heads == 16 and page_size == 64) else {}
            rows += [{"shape": name, **row} for row in tune_shape(case, candidates, asked, ceilings)]
    return rows


def tune_prefill(device: torch.device, ceilings: Ceilings) -> list[dict[str, Any]]:
    """8 prompts of 4096 tokens, 16/8 heads, causal."""
    num_requests, length, heads, page_size = 8, 4096, 16, 64
    num_pages = num_requests * length // page_size
    q = torch.randn(num_requests * length, heads, HEAD_DIM, device=device).bfloat16()
    kv = torch.randn(2, 1 + num_pages, page_size, NUM_KV_HEADS, HEAD_DIM, device=device).bfloat16()
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
            each=each,
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
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
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
        shown += [row for i, row in enumerate(group) if i < 4 or row.get("default") or row.get("altered")]
    print(facts)
    if shown:
        print(
            table(
                [
                    {k: row.get(k, "") for k in ("shape", "variant", "us", "share %", "beyond us", "default")}
                    for row in shown
                ]
            )
        )


if __name__ == "__main__":
    main()
