"""An engine under measurement: loaded once, run several times, each figure beside what the device allows.

`offline`, `latency`, `prefill` and `targets` differ in what they ask; how it is timed, and what a row says, is here.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from minisgl.benchmark.ceilings import Ceilings, measure_ceilings
from minisgl.benchmark.roofline import ModelCosts, lines, plan_steps
from minisgl.benchmark.shapes import shape_folder
from minisgl.benchmark.workload import Workload
from minisgl.launch import find_device, find_dtype
from minisgl.llm import LLM

Count = Literal["input", "output"]
_WARM_UP = 64  # new tokens of each request, at most


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload.

    Args:
        seconds: from the first request to the last token.
        steps: of the engine.
        first_token_s: for each request, from its arrival to its first token.
        token_s: for each request with at least two tokens, the mean from one to the next.
    """

    seconds: float
    steps: int
    first_token_s: tuple[float, ...]
    token_s: tuple[float, ...]


class Bench:
    """An engine, and the ceilings of the device it runs on.

    Args:
        llm: the engine.
        name: what to call the model in reports.
        ceilings: measured by the same command.
        load_s: seconds that the engine took to load.
        seed: of the prompts' tokens.
    """

    def __init__(self, llm: LLM, name: str, ceilings: Ceilings, *, load_s: float = 0.0, seed: int = 0) -> None:
        self.llm = llm
        self.name = name
        self.ceilings = ceilings
        self.load_s = load_s
        self.device = find_device(llm.engine_config.device)
        self.costs = ModelCosts.of(llm.config, find_dtype(llm.engine_config, llm.config, self.device).itemsize)
        self._rng = random.Random(seed)

    def run(self, workload: Workload) -> Run:
        """Run it once, with fresh random prompts and an empty prefix cache."""
        prompts, params = workload.draw(self._rng, self.llm.config.vocab_size), workload.params()
        scheduler = self.llm.engine.scheduler
        self.llm.engine.flush_cache()
        before = scheduler.num_steps
        self._synchronize()
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self._synchronize()
        seconds = time.perf_counter() - started
        first_token_s, token_s = [], []
        for output in outputs:
            timings, n = output.timings, len(output.token_ids)
            assert timings.first_token_s is not None and timings.finished_s is not None
            first_token_s.append(timings.first_token_s - timings.arrival_s)
            if n > 1:
                token_s.append((timings.finished_s - timings.first_token_s) / (n - 1))
        return Run(seconds, scheduler.num_steps - before, tuple(first_token_s), tuple(token_s))

    def measure(self, workload: Workload, repeats: int) -> list[Run]:
        """Run it ``repeats`` times, after a run that is no longer, and does not count."""
        self.run(workload.shortened(_WARM_UP))
        return [self.run(workload) for _ in range(repeats)]

    def row(self, label: str, workload: Workload, runs: Sequence[Run], *, count: Count = "output") -> dict[str, Any]:
        """The figures of these runs: medians, the spread (slowest less fastest, of the median), the three lines in
        tokens a second, and what share of the first the engine reaches."""
        seconds = statistics.median(run.seconds for run in runs)
        num_tokens = workload.num_output if count == "output" else workload.num_input
        all_lines = lines(self.costs, plan_steps(workload, self.llm.engine.scheduler.config), self.ceilings)
        token_s = [s for run in runs for s in run.token_s]
        return {
            "row": label,
            f"{count} tok/s": num_tokens / seconds,
            "spread %": 100 * (max(r.seconds for r in runs) - min(r.seconds for r in runs)) / seconds,
            "seconds": seconds,
            "steps": runs[-1].steps,
            "first token ms": 1e3 * statistics.median(s for run in runs for s in run.first_token_s),
            "ms a token": 1e3 * statistics.median(token_s) if token_s else None,
            "serial roofline": num_tokens / all_lines.serial_s,
            "share %": 100 * all_lines.serial_s / seconds,
            "overlap bound": num_tokens / all_lines.overlap_s,
            "launch-aware": num_tokens / all_lines.launch_aware_s,
        }

    def facts(self) -> dict[str, Any]:
        """Model, ceilings and seconds to load, for a report."""
        config = self.llm.engine.scheduler.config
        return {
            "model": self.name,
            "load seconds": self.load_s,
            "page size": config.page_size,
            "pages": config.num_pages,
            "max_model_len": config.max_model_len,
            "ceilings": as_report(self.ceilings),
        }

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def engine_options(options: Mapping[str, Any], shape: str | None = None) -> Iterator[dict[str, Any]]:
    """Options of `LLM` for as long as the block lasts; ``shape``, one of `minisgl.benchmark.shapes.SHAPES`, takes the
    model's place, with random weights. Raises ``ValueError`` for a shape that there is not."""
    with ExitStack() as stack:
        changed = dict(options)
        if shape is not None:
            changed.update(model=stack.enter_context(shape_folder(shape)), load_format="dummy")
            if changed.get("dtype", "auto") == "auto":
                changed["dtype"] = "bfloat16"
        yield changed


@contextmanager
def open_bench(
    options: Mapping[str, Any], *, shape: str | None = None, ceilings: Ceilings | None = None
) -> Iterator[Bench]:
    """Load an engine for as long as the block lasts.

    Args:
        options: of `LLM`.
        shape: see `engine_options`.
        ceilings: of the device; None: measured now, before the engine takes its memory.
    """
    with engine_options(options, shape) as changed:
        if ceilings is None:
            ceilings = ceilings_of(changed)
        started = time.perf_counter()
        with LLM(**changed) as llm:
            load_s = time.perf_counter() - started
            yield Bench(llm, shape or str(changed.get("model", "tiny")), ceilings, load_s=load_s)
        free_memory()


def ceilings_of(options: Mapping[str, Any]) -> Ceilings:
    """Measure those of the device that an engine with these options would use; the memory is given back."""
    ceilings = measure_ceilings(find_device(options.get("device", "auto")))
    free_memory()
    return ceilings


def free_memory() -> None:
    """Give unused device memory back to the device, for an engine that asks how much is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def as_report(ceilings: Ceilings) -> dict[str, Any]:
    """The ceilings with their units in the names."""
    return {
        "read TB/s": ceilings.read_bytes_per_s / 1e12,
        "copy TB/s": ceilings.copy_bytes_per_s / 1e12,
        f"{ceilings.matmul_dtype} TFLOP/s": ceilings.matmul_flops_per_s / 1e12,
        "launch us": ceilings.launch_s * 1e6,
    }
