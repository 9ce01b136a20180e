"""`minisgl bench host`: does the host keep up? What it does in a step, beside what the device does in one.

Chapter 4 shows its table. With overlap the host plans and launches step k+1 while the device computes step k, so it is
off the critical path as long as it has to wait for the device in the end: the time that it waits is the proof.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.benchmark.measure import open_bench
from minisgl.benchmark.report import table, write_report
from minisgl.engine.core import EngineCore
from minisgl.engine.pending import PendingStep
from minisgl.request import SamplingParams
from minisgl.utils import as_token_ids

BATCHES = (1, 4, 16, 64, 128, 256, 512)


class _Stopwatch:
    """A `PendingStep` whose wait is timed."""

    def __init__(self, pending: PendingStep, waits: list[float]) -> None:
        self._pending = pending
        self._waits = waits

    def wait(self) -> Any:
        """`PendingStep.wait`."""
        started = time.perf_counter()
        result = self._pending.wait()
        self._waits.append(time.perf_counter() - started)
        return result


def bench_host(
    options: dict[str, Any],
    *,
    batches: Sequence[int] = BATCHES,
    shape: str | None = None,
    context: int = 128,
    num_steps: int = 64,
    output: str | Path | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Time steady decode steps of the engine, and the host's part of them.

    Args:
        options: of `LLM`; ``max_running`` becomes the largest batch.
        batches: numbers of requests.
        shape: a published model's shape with random weights, instead of ``options["model"]``.
        context: tokens of each prompt.
        num_steps: that are timed, after as many to warm up.
        output: JSON file to write.
        seed: of the tokens.

    Returns:
        A row for each batch: medians of the step, of what the host did in it, and of how long it waited.
    """
    rng, rows = random.Random(seed), []
    with open_bench({**options, "max_running": max(batches)}, shape=shape) as bench:
        llm = bench.llm
        engine, device = llm.engine, llm.engine.runner.table.device
        for batch in batches:
            params = SamplingParams(temperature=0.6, max_tokens=3 * num_steps, ignore_eos=True)
            for i in range(batch):
                ids = [rng.randrange(llm.config.vocab_size) for _ in range(context)]
                engine.add(f"{batch}/{i}", as_token_ids(ids), params)
            steps, waits = _timed_steps(engine, batch, num_steps)
            rows.append(
                {
                    "batch": batch,
                    "step us": 1e6 * statistics.median(steps),
                    "host us": 1e6 * statistics.median(s - w for s, w in zip(steps, waits, strict=True)),
                    "waits us": 1e6 * statistics.median(waits),
                }
            )
            for i in range(batch):
                engine.abort(f"{batch}/{i}")
            while engine.has_work:
                engine.step()
            engine.flush_cache()
        print(table(rows))
        if output is not None:
            facts = {**bench.facts(), "context": context, "rows": rows}
            write_report(output, "the host's part of a decode step", device, facts)
    return rows


def _timed_steps(engine: EngineCore, batch: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of the wait in it, once all requests decode."""
    while len(engine.scheduler.running) < batch or engine.scheduler.waiting:
        engine.step()
    waits: list[float] = []
    sample = engine.runner.sample
    engine.runner.sample = lambda logits: _Stopwatch(sample(logits), waits)  # type: ignore[method-assign,assignment,return-value]
    try:
        steps = []
        for _ in range(2 * num_steps):
            started = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - started)
    finally:
        del engine.runner.sample
    # The first step waits for one that was launched before the stopwatch was there.
    return steps[-num_steps:], waits[-num_steps:]
