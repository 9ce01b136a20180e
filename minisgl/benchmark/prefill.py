"""`minisgl bench prefill`: prompts that are to bring a single token each: prompt tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.benchmark.measure import open_bench
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.workload import equal_lengths

# Prompts, tokens of each.
ROWS = ((32, 1024),)


def bench_prefill(
    options: dict[str, Any],
    *,
    rows: Sequence[tuple[int, int]] = ROWS,
    shape: str | None = None,
    repeats: int = 5,
    output: str | None = None,
) -> list[dict[str, Any]]:
    """Measure, print a table, and return its rows (`Bench.row`).

    Args:
        options: of `LLM`.
        rows: for each the number of prompts and the tokens of each.
        shape: a published model's shape with random weights, instead of ``options["model"]``.
        repeats: measured runs of each row, after a warm-up.
        output: JSON file to write.
    """
    with open_bench(options, shape=shape) as bench:
        results = []
        for num_requests, num_input in rows:
            workload = equal_lengths(num_requests, num_input, 1)
            runs = bench.measure(workload, repeats)
            results.append(bench.row(f"{num_requests}x{num_input}", workload, runs, count="input"))
        print(table(results))
        if output is not None:
            write_report(output, "prefill", bench.device, {**bench.facts(), "repeats": repeats, "rows": results})
    return results
