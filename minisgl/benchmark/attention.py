"""`minisgl bench attention`: every attention kernel that runs on this device, on the same batches, in one run.

What it finds out goes into the table of `minisgl.engine.attention.choice`. Keys and values are random and cold, as they
are in a step: the calls go round several layers that together are far larger than the caches. Pages are shuffled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from minisgl.benchmark.ceilings import Ceilings, measure_ceilings
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.timing import Timing, time_calls
from minisgl.engine.attention import AttentionShape, load_attention
from minisgl.engine.attention.choice import DECODE, PREFILL
from minisgl.engine.attention.rehearsal import random_batch
from minisgl.engine.attention.split import SplitAttention
from minisgl.forward import AttentionBackend, ForwardBatch
from minisgl.launch import find_device
from minisgl.utils import ceil_div

logger = logging.getLogger(__name__)

Part = Literal["decode", "prefill"]
Sizes = Sequence[tuple[int, int]]

DECODE_SIZES: Sizes = (
    (1, 512), (1, 8192), (4, 1024), (8, 4096), (16, 512), (32, 800), (64, 512), (64, 2048), (128, 800), (256, 800),
)  # fmt: skip
PREFILL_SIZES: Sizes = ((1, 512), (4, 512), (8, 1024), (2, 4096), (8, 4096))
HEADS: Sizes = ((16, 8), (32, 8), (40, 8))
# An H200 has 60 MB of L2; the layers that the calls go round have several times as much.
_COLD_BYTES = 400 << 20
# torch's attention gathers what it reads and writes every score down, so it is measured on small batches only.
_MOST_FOR_TORCH = 1 << 24


@dataclass(frozen=True, slots=True)
class _Case:
    """A batch of one kind and what it is to be measured on."""

    part: Part
    shape: AttentionShape
    lengths: tuple[int, ...]

    @property
    def num_new(self) -> list[int]:
        """New tokens of each request."""
        return [1] * len(self.lengths) if self.part == "decode" else list(self.lengths)

    @property
    def num_scores(self) -> int:
        """Pairs of a query and a token that it sees, of one head."""
        return sum(n if self.part == "decode" else n * (n + 1) // 2 for n in self.lengths)

    @property
    def num_bytes(self) -> int:
        """Least traffic: K, V and queries read, results written, once each."""
        kv = 2 * sum(self.lengths) * self.shape.num_kv_heads
        return (kv + 2 * sum(self.num_new) * self.shape.num_heads) * self.shape.head_dim * self.shape.dtype.itemsize

    @property
    def num_flops(self) -> int:
        """Of both products, a multiplication and an addition each."""
        return 4 * self.num_scores * self.shape.num_heads * self.shape.head_dim


def bench_attention(
    *,
    device: str = "auto",
    decode: Sizes | None = None,
    prefill: Sizes | None = None,
    heads: Sizes | None = None,
    page_sizes: Sequence[int] | None = None,
    head_dim: int | None = None,
    spread: float = 0.0,
    repeats: int = 7,
    output: str | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure decode and prefill attention and print a table of each. On a CPU it prints ratios within the run only.

    Args:
        device: as an engine's.
        decode, prefill: (requests, tokens of each); a prompt's tokens are all new. By default what a step of the
            offline workload and its edges look like on CUDA, two tiny batches elsewhere.
        heads: (query heads, KV heads).
        page_sizes: tokens in a page.
        head_dim: of all.
        spread: lengths are drawn from ``length * (1 - spread)`` to ``length * (1 + spread)``.
        repeats: measured runs of each; medians count.
        output: JSON file to write.
        seed: of lengths and pages.

    Returns:
        A row for each batch and kernel: seconds a layer ("us"), share of the bandwidth (decode) or of the matrix rate
        (prefill) measured in the same run, time against the fastest, host time of a plan, greatest difference from the
        first kernel's result.
    """
    where = find_device(device)
    cuda = where.type == "cuda"
    ceilings = measure_ceilings(where) if cuda else None
    dtype = torch.float32
    if cuda:
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(where) >= (8, 0) else torch.float16
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for num_heads, num_kv_heads in heads or (HEADS if cuda else ((4, 2),)):
        for page_size in page_sizes or ((16, 64) if cuda else (16,)):
            shape = AttentionShape(
                dtype=dtype,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim or (128 if cuda else 16),
                page_size=page_size,
            )
            sizes: dict[Part, Sizes] = {
                "decode": decode if decode is not None else DECODE_SIZES if cuda else ((3, 40),),
                "prefill": prefill if prefill is not None else PREFILL_SIZES if cuda else ((2, 20),),
            }
            for part, its_sizes in sizes.items():
                backends = dict(_backends(part, shape, where))
                for batch, length in its_sizes:
                    factors = 1 + spread * (2 * torch.rand(batch, generator=generator) - 1)
                    lengths = tuple(max(1, round(length * f)) for f in factors.tolist())
                    case = _Case(part, shape, lengths)
                    rows += _measure(case, f"{batch} x {length}", backends, where, ceilings, repeats, seed)
    for part in ("decode", "prefill"):
        own = [{k: v for k, v in row.items() if k not in ("part", "group")} for row in rows if row["part"] == part]
        if own:
            print(f"{part}\n{table(own)}\n")
    for line in fastest(rows):
        print(line)
    if output is not None:
        results: dict[str, Any] = {"rows": rows, "fastest": fastest(rows), "spread": spread}
        if ceilings is not None:
            results["ceilings"] = {name: getattr(ceilings, name) for name in Ceilings.__slots__}
        write_report(output, "attention kernels", where, results)
    return rows


def fastest(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For each part, group and page size one line: the fastest kernel of each batch."""
    best: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        if row["time ratio"] == 1:
            key = row["part"], row["group"], row["page"]
            best.setdefault(key, []).append(f"{row['batch']} {row['kernel']}")
    return [f"{part}, group {group}, page {page}: {', '.join(b)}" for (part, group, page), b in best.items()]


def _backends(part: Part, shape: AttentionShape, device: torch.device) -> Iterator[tuple[str, AttentionBackend]]:
    """Those that serve ``shape`` on ``device``."""
    for kernel in DECODE if part == "decode" else PREFILL:
        name = f"torch,{kernel}" if part == "decode" else f"{kernel},torch"
        try:
            backend = load_attention(name, device=device, shape=shape)
        except ValueError as error:
            logger.warning("%s is left out: %s", kernel, error)
            continue
        if isinstance(backend, SplitAttention):
            backend = getattr(backend, part)
        if kernel == "fa2" and part == "decode":
            module = import_module("minisgl.engine.attention.flashinfer_backend")
            yield "fa2, no tensor cores", module.FlashInferDecode(shape, device, tensor_cores=False)
        yield kernel, backend


def _measure(
    case: _Case,
    size: str,
    backends: dict[str, AttentionBackend],
    device: torch.device,
    ceilings: Ceilings | None,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
    shape = case.shape
    batch = random_batch(case.num_new, case.lengths, shape.page_size, device, seed=seed)
    num_pages = 1 + sum(ceil_div(n, shape.page_size) for n in case.lengths)
    layer = (2, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    num_layers = max(2, ceil_div(_COLD_BYTES, case.num_bytes)) if ceilings is not None else 2
    layers = [torch.randn(layer, device=device, dtype=shape.dtype) for _ in range(num_layers)]
    q = torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim, device=device, dtype=shape.dtype)
    first: Tensor | None = None
    found: list[tuple[str, Timing, float, float]] = []
    for name, backend in backends.items():
        if name == "torch" and case.num_scores * shape.num_heads > _MOST_FOR_TORCH:
            continue
        planned = replace(batch, attn_metadata=backend.plan(batch))
        out = torch.full_like(q, float("nan"))
        calls = [_call(backend, q, kv, planned, out) for kv in layers]
        calls[0]()
        result = out.double()  # a copy: `out` is written again
        first = result if first is None else first
        off = float((result - first).abs().max())
        timing = _time(name, calls, device, repeats)
        found.append((name, timing, _plan_seconds(backend, batch, device), off))
    best = min(timing.median_s for _, timing, _, _ in found)
    rows = []
    for name, timing, plan_s, off in found:
        row: dict[str, Any] = {
            "part": case.part, "group": shape.group, "heads": f"{shape.num_heads}/{shape.num_kv_heads}",
            "page": shape.page_size, "batch": size, "kernel": name,
        }  # fmt: skip
        if ceilings is not None:
            row["us"] = timing.median_s * 1e6
            row["spread us"] = timing.spread_s * 1e6
            if case.part == "decode":
                row["% of bandwidth"] = 100 * case.num_bytes / timing.median_s / ceilings.read_bytes_per_s
            else:
                row["TFLOP/s"] = case.num_flops / timing.median_s / 1e12
                row["% of matrix rate"] = 100 * case.num_flops / timing.median_s / ceilings.matmul_flops_per_s
            row["plan us"] = plan_s * 1e6
            row["graph"] = timing.in_graph
        row["time ratio"] = timing.median_s / best
        row["off by"] = off
        rows.append(row)
    return rows


def _time(name: str, calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> Timing:
    """In a CUDA graph where it can be captured, so that the host's share does not count."""
    run_s = 0.02 if device.type == "cuda" else 0.002
    try:
        return time_calls(calls, device, repeats=repeats, run_s=run_s, graph=True)
    except RuntimeError as error:
        logger.warning("%s is measured outside a graph: %s", name, str(error).splitlines()[0])
        return time_calls(calls, device, repeats=repeats, run_s=run_s)


def _call(backend: AttentionBackend, q: Tensor, kv: Tensor, batch: ForwardBatch, out: Tensor) -> Callable[[], object]:
    scale = q.shape[2] ** -0.5
    return lambda: backend.forward(q, kv, batch, scale=scale, out=out)


def _plan_seconds(backend: AttentionBackend, batch: ForwardBatch, device: torch.device, *, repeats: int = 9) -> float:
    """What a plan costs the host: median, the device idle before each."""
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        backend.plan(batch)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[repeats // 2]
