"""`minisgl profile`: where the time of a step goes, kernel by kernel, and how near each place is to what it must cost.

Steps of one kind are run under torch's profiler, which sees kernels inside a replayed CUDA graph too (on a CPU: torch's
operations). Each kernel is put to its place in the model by its name, the products by their order, and each place has a
floor: its bytes at the reading rate, or its arithmetic at the multiplying rate. How long a step takes is measured
without the profiler; what the kernels do not account for is printed, not hidden. Chapter 4 shows such tables.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from minisgl.benchmark.ceilings import Ceilings
from minisgl.benchmark.measure import Bench, open_bench
from minisgl.benchmark.report import table, write_report
from minisgl.config import ModelConfig
from minisgl.request import Request, SamplingParams
from minisgl.utils import as_token_ids, ceil_div

Kind = Literal["decode", "prefill"]
# The four products of a layer, in the order in which it makes them.
LAYER_PRODUCTS = ("QKV product", "O product", "gate and up product", "down product")
HEAD = "head product"
_PRODUCT = "products"
# The first pattern that is found in a kernel's name says where it belongs; one that none fits keeps its name.
PLACES: tuple[tuple[str, str], ...] = (
    ("QK norm, rotary, KV write", r"rotary|rope|store_kv"),
    ("norm", r"rms_?norm|layer_?norm"),
    ("activation", r"silu|act_and_mul|swiglu"),
    ("page copies", r"copy_pages"),
    ("prepare", r"prepare"),
    ("attention", r"attention|_prefill_kernel|_decode_kernel|_line_kernel|with(paged)?kvcache|mergestates|xqa|mha|flash"
                  r"|aten::bmm|aten::_scaled_dot"),
    ("sampling", r"sampl|candidates|choose|philox|argmax|softmax|topk|sort"),
    ("embedding", r"embedding|indexselect|index_select"),
    (_PRODUCT, r"gemv|gemm|_dot_kernel|nvjet|cutlass|xmma|cublas|splitk|aten::(add)?mm$|mkldnn_linear"),
    ("copies to and from the host", r"memcpy|aten::_to_copy"),
)  # fmt: skip
_REDUCTION = "splitk.*reduce|reduce.*splitk"  # the second half of a product


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel that ran, or one operation of torch without those inside it.

    Args:
        name: as the profiler has it.
        start_us, duration_us: on the profiler's clock, in microseconds.
    """

    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a profiled step computes, as a mean over the profiled steps.

    Args:
        num_tokens: tokens.
        num_samples: tokens that get logits.
        decode_pairs: tokens whose KV decodes read.
        prefill_pairs: query tokens of prompts times the tokens that each sees.
    """

    num_tokens: float
    num_samples: float
    decode_pairs: float = 0.0
    prefill_pairs: float = 0.0


def profile(
    options: dict[str, Any],
    *,
    kind: Kind = "decode",
    batch: int = 64,
    context: int = 512,
    steps: int = 8,
    shape: str | None = None,
    output: str | None = None,
    perfetto: str | None = None,
) -> dict[str, Any]:
    """Profile steps of one kind; print the table and what it sums to.

    Args:
        options: of `LLM`.
        kind: "decode": every request computes one token; "prefill": as many whole prompts as the token budget holds.
        batch: requests, for "prefill" at most.
        context: tokens of each prompt.
        steps: steps that are profiled; as many are timed without the profiler.
        shape: a published model's shape with random weights, instead of ``options["model"]``.
        output: JSON file to write.
        perfetto: file for the profiler's own trace.

    Returns:
        The report: ``rows`` as printed, ``step us``, ``kernels us`` (their sum, in which no moment counts twice),
        ``kernels % of step``.

    Raises:
        ValueError: so many requests of that length do not fit into the engine.
    """
    with open_bench(options, shape=shape) as bench:
        report = profile_steps(bench, kind=kind, batch=batch, context=context, steps=steps, perfetto=perfetto)
        num_requests = f"{report['requests a step']:,.4g}"
        print(f"a {kind} step of {num_requests} requests, context {context}, {bench.name}, seen by {report['seen by']}")
        print(table(_printed(report["rows"])))
        print(
            f"the step takes {report['step us']:,.1f} us without the profiler; the kernels sum to "
            f"{report['kernels us']:,.1f} us, {report['kernels % of step']:.1f} % of it; "
            f"{report['remainder us']:,.1f} us are not in the table"
        )
        if output is not None:
            write_report(output, f"profile of a {kind} step", bench.device, {**bench.facts(), **report})
    return report


def profile_steps(
    bench: Bench, *, kind: Kind, batch: int, context: int, steps: int = 8, perfetto: str | None = None
) -> dict[str, Any]:
    """The report of `profile`, for an engine that is there already and idle; it is left idle."""
    with StepDriver(bench, kind, batch, context, steps) as driver:
        step_s = driver.timed()
        events, source = _profiled(driver.run, bench.device, perfetto)
        model, costs = bench.llm.config, bench.costs
        floors = place_floors(model, costs.dtype_bytes, driver.shape, bench.ceilings)
        return {
            "kind": kind, "context": context, "steps": driver.num_steps, "seen by": source,
            "tokens a step": driver.shape.num_tokens, "requests a step": driver.shape.num_samples,
            **summarise(events, steps=driver.num_steps, step_s=step_s, num_layers=model.num_layers, floors=floors),
        }  # fmt: skip


def summarise(
    events: Sequence[Event],
    *,
    steps: int,
    step_s: float,
    num_layers: int,
    floors: dict[str, tuple[float, float]],
) -> dict[str, Any]:
    """Events of ``steps`` steps as rows, one a place, largest first, and what they sum to.

    Args:
        events: what ran.
        steps: in how many steps.
        step_s: seconds of a step without the profiler.
        num_layers: of the model.
        floors: place -> bytes that it must move and seconds that it must take in a step.
    """
    calls: Counter[str] = Counter()
    microseconds: dict[str, float] = defaultdict(float)
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    for event, place in zip(events, find_places(events, steps=steps, num_layers=num_layers), strict=True):
        calls[place] += 1
        microseconds[place] += event.duration_us
        kernels[place][event.name] += 1
    step_us = 1e6 * step_s
    if _PRODUCT in microseconds:  # their order did not tell them apart: one floor for all
        sums = [floors[p] for p in (*LAYER_PRODUCTS, HEAD) if p in floors]
        floors = {**floors, _PRODUCT: (sum(b for b, _ in sums), sum(s for _, s in sums))}
    rows = []
    for place, total_us in sorted(microseconds.items(), key=lambda item: -item[1]):
        us = total_us / steps
        num_bytes, floor_s = floors.get(place, (None, None))
        rows.append(
            {
                "place": place,
                "calls": calls[place] / steps,
                "us": us,
                "% of step": 100 * us / step_us,
                "MB": num_bytes and num_bytes / 1e6,
                "floor us": floor_s and 1e6 * floor_s,
                "floor / time %": floor_s and us and 100 * 1e6 * floor_s / us,
                "kernel": _short(kernels[place].most_common(1)[0][0]),
                "kernels": {name: count / steps for name, count in kernels[place].most_common()},
            }
        )
    total = sum(microseconds.values()) / steps
    return {
        "rows": rows,
        "step us": step_us,
        "kernels us": total,
        "kernels % of step": 100 * total / step_us,
        "remainder us": step_us - total,
    }


def find_places(events: Sequence[Event], *, steps: int, num_layers: int) -> list[str]:
    """Where in the model each event belongs. Products are told apart by their order, if there are as many as ``steps``
    steps must have: four a layer, and the head's; else they stay together as "products"."""
    places = [find_place(event.name) for event in events]
    products = [
        i for i in sorted(range(len(events)), key=lambda i: events[i].start_us)
        if places[i] == _PRODUCT and not re.search(_REDUCTION, events[i].name, re.I)
    ]  # fmt: skip
    order = [*LAYER_PRODUCTS * num_layers, HEAD] * steps
    if len(products) == len(order):
        starts = [events[i].start_us for i in products]
        for i, place in enumerate(places):
            if place == _PRODUCT:  # a reduction belongs to the product before it
                before = sum(start <= events[i].start_us for start in starts)
                places[i] = order[max(before - 1, 0)]
    return places


def find_place(name: str) -> str:
    """The place of a kernel by its name; its own short name if no pattern of `PLACES` fits."""
    for text in (_short(name), name):  # what stands between a template's brackets counts only if need be
        for place, pattern in PLACES:
            if re.search(pattern, text, re.I):
                return place
    return _short(name)


def place_floors(
    config: ModelConfig, dtype_bytes: int, shape: StepShape, ceilings: Ceilings
) -> dict[str, tuple[float, float]]:
    """For each place of the model the bytes that it must move in a step, and the seconds that it must take.

    What is fused away costs nothing: a norm's floor, say, counts only where norms are kernels of their own.
    """
    n, layers, hidden, inner = shape.num_tokens, config.num_layers, config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {
        "QKV product": (layers * hidden * (q + 2 * kv), n),
        "O product": (layers * q * hidden, n),
        "gate and up product": (layers * 2 * hidden * inner, n),
        "down product": (layers * hidden * inner, n),
        HEAD: (config.vocab_size * hidden, shape.num_samples),
    }
    read, copy, rate = ceilings.read_bytes_per_s, ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s
    floors = {}
    for place, (count, rows) in weights.items():
        num_bytes = float(count * dtype_bytes)
        floors[place] = (num_bytes, max(num_bytes / read, 2.0 * count * rows / rate))
    kv_bytes = config.kv_bytes_per_token(dtype_bytes) * (shape.decode_pairs or n)
    floors["attention"] = (kv_bytes, max(kv_bytes / read, 4.0 * layers * q * shape.prefill_pairs / rate))
    moved = {
        "norm": (2 * layers * 4 + 2) * hidden * n,
        "QK norm, rotary, KV write": layers * 2 * (q + 2 * kv) * n,
        "activation": layers * 3 * inner * n,
        "embedding": 2 * hidden * n,
        "sampling": config.vocab_size * shape.num_samples,
    }
    for place, numbers in moved.items():
        floors[place] = (numbers * dtype_bytes, numbers * dtype_bytes / copy)
    return floors


def read_trace(path: str | Path, *, cuda: bool) -> list[Event]:
    """The events of a trace that torch's profiler wrote, each with its own time only. On CUDA these are kernels and
    copies; a moment in which several run counts for the one that began first: the others were launched dependently, and
    wait for it. On a CPU they are operations, without what they called."""
    entries = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"} if cuda else {"cpu_op"}
    found = [e for e in entries if e.get("ph") == "X" and e.get("cat") in wanted]
    found.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
    own = [float(e["dur"]) for e in found]
    if cuda:
        reached = float("-inf")
        for i, e in enumerate(found):
            end = float(e["ts"]) + float(e["dur"])
            own[i] = max(0.0, end - max(float(e["ts"]), reached))
            reached = max(reached, end)
    else:
        stacks: dict[Any, list[int]] = defaultdict(list)  # of each thread: operations that are under way
        for i, e in enumerate(found):
            stack = stacks[e["tid"]]
            while stack and float(found[stack[-1]]["ts"]) + float(found[stack[-1]]["dur"]) <= float(e["ts"]):
                stack.pop()
            if stack:
                own[stack[-1]] -= float(e["dur"])
            stack.append(i)
    return [Event(str(e["name"]), float(e["ts"]), max(us, 0.0)) for e, us in zip(found, own, strict=True)]


class StepDriver:
    """Makes an engine do steps of one kind, over and over.

    Attributes:
        batch: requests in a step.
        shape: what a step computes.
        num_steps: that the last `run` took.
    """

    def __init__(self, bench: Bench, kind: Kind, batch: int, context: int, steps: int) -> None:
        self._engine, self._bench, self._kind, self._steps = bench.llm.engine, bench, kind, steps
        self._context, self._rng, self._num_added = context, random.Random(0), 0
        config = self._engine.scheduler.config
        budget, at_most = config.max_num_batched_tokens, config.max_running
        if kind == "prefill":
            if context > budget:
                raise ValueError(f"context {context} does not fit into a step of {budget} tokens")
            batch, new = min(batch, budget // context, at_most), 1
        else:
            # Those who enter first decode while the others' prompts are computed.
            new = 2 * steps + 8 + 2 * ceil_div(batch * context, budget)
        pages = batch * ceil_div(context + new, config.page_size)
        if batch > at_most or context + new > config.max_model_len or pages > config.num_pages - 1:
            raise ValueError(
                f"{batch} requests of {context} + {new} tokens do not fit: max_running is {at_most}, max_model_len "
                f"{config.max_model_len}, the pool has {config.pool_tokens} tokens"
            )
        self.batch, self.num_steps, self._new = batch, steps, new
        if kind == "prefill":
            self.run()  # it counts the steps; where prompts do not fill the budget, there are fewer
            share = steps / self.num_steps
            tokens, pairs = batch * context, batch * context * (context + 1) / 2
            self.shape = StepShape(share * tokens, share * batch, prefill_pairs=share * pairs)
            return
        requests = self._add(batch)
        while min(r.num_output_tokens for r in requests) < 2:
            self._engine.step()
        # Each step reads a token more of each request than the one before; those in the middle of the second round.
        length = sum(r.num_tokens for r in requests) / batch + 1.5 * steps
        self.shape = StepShape(batch, batch, decode_pairs=batch * length)

    def __enter__(self) -> StepDriver:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the engine without requests."""
        for i in range(self._num_added):
            self._engine.abort(f"profile-{i}")
        while self._engine.has_work:
            self._engine.step()

    def run(self) -> None:
        """As many steps as are to be profiled; for prefill as many prompts as fit into so many."""
        before = self._engine.scheduler.num_steps
        if self._kind == "prefill":
            self._add(self._steps * self.batch)
            while self._engine.has_work:
                self._engine.step()
        else:
            for _ in range(self._steps):
                self._engine.step()
        self.num_steps = self._engine.scheduler.num_steps - before

    def timed(self) -> float:
        """Seconds of a step, by the host's clock over all of them."""
        self._synchronize()
        started = time.perf_counter()
        self.run()
        self._synchronize()
        return (time.perf_counter() - started) / self.num_steps

    def _add(self, count: int) -> list[Request]:
        params = SamplingParams(temperature=0.6, max_tokens=self._new, ignore_eos=True)
        requests = []
        for _ in range(count):
            ids = as_token_ids(self._rng.choices(range(self._bench.llm.config.vocab_size), k=self._context))
            requests.append(self._engine.add(f"profile-{self._num_added}", ids, params))
            self._num_added += 1
        return requests

    def _synchronize(self) -> None:
        if self._bench.device.type == "cuda":
            torch.cuda.synchronize(self._bench.device)


def _profiled(run: Callable[[], None], device: torch.device, perfetto: str | None) -> tuple[list[Event], str]:
    """Events of ``run``, and who saw them."""
    cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    if cuda:  # the first use takes seconds, which are not to fall between kernels
        with torch.profiler.profile(activities=[activity]):
            torch.zeros(1, device=device)
            torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profiler:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = perfetto or f"{folder}/trace.json"
        profiler.export_chrome_trace(path)
        events = read_trace(path, cuda=cuda)
    if not cuda:
        return events, "torch's profiler of CPU operations"
    if not events:
        return timed_by_events(run, device), "events around torch's operations: CUPTI is not to be had here"
    return events, "CUPTI"


def timed_by_events(run: Callable[[], None], device: torch.device) -> list[Event]:
    """What torch's older profiler sees of ``run``: on CUDA the time between events around each operation. It needs no
    CUPTI, but sees neither inside graphs nor kernels that torch did not launch. Raises ``RuntimeError`` if there is
    nothing to see."""
    cuda = device.type == "cuda"
    with torch.autograd.profiler.profile(use_device="cuda" if cuda else None, use_kineto=False) as profiler:
        run()
    events = []
    for event in profiler.function_events or ():
        own_us = event.self_device_time_total if cuda else event.self_cpu_time_total
        if own_us > 0:
            events.append(Event(event.name, event.time_range.start, own_us))
    if not events:
        raise RuntimeError("no operation was seen; without CUPTI a step can be profiled only with cuda_graph_max_bs 0")
    return events


def _printed(rows: Sequence[dict[str, Any]], least: float = 0.5) -> list[dict[str, Any]]:
    """The rows that take at least so many percent of the step, and one for all others."""
    large = [row for row in rows if row["% of step"] >= least]
    small = [row for row in rows if row["% of step"] < least]
    if small:
        sums = {key: sum(row[key] for row in small) for key in ("calls", "us", "% of step")}
        large.append({**dict.fromkeys(small[0]), "place": f"{len(small)} others", **sums})
    return [{key: value for key, value in row.items() if key != "kernels"} for row in large]


def _short(name: str) -> str:
    """A C++ kernel's name without its return type, arguments and namespaces, at most 48 characters."""
    name = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    name = re.split(r"[<(]", name, maxsplit=1)[0].strip() or name
    return (name if name.startswith("aten::") else name.rsplit("::", 1)[-1])[:48]
