"""`minisgl bench latency`: few requests of one length: tokens a second, time to the first and to each further one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.benchmark.measure import open_bench
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.workload import equal_lengths

# Requests, tokens in, tokens out.
ROWS = ((1, 128, 512), (16, 128, 512), (64, 512, 256))


def bench_latency(
    options: dict[str, Any],
    *,
    rows: Sequence[tuple[int, int, int]] = ROWS,
    shape: str | None = None,
    repeats: int = 3,
    output: str | None = None,
) -> list[dict[str, Any]]:
    """Measure, print a table, and return its rows (`Bench.row`).

    Args:
        options: of `LLM`.
        rows: for each the number of requests, of tokens in and of tokens out.
        shape: a published model's shape with random weights, instead of ``options["model"]``.
        repeats: measured runs of each row, after a warm-up.
        output: JSON file to write.
    """
    with open_bench(options, shape=shape) as bench:
        results = []
        for num_requests, num_input, num_output in rows:
            workload = equal_lengths(num_requests, num_input, num_output)
            label = f"{num_requests}x{num_input}/{num_output}"
            results.append(bench.row(label, workload, bench.measure(workload, repeats)))
        print(table(results))
        if output is not None:
            write_report(output, "latency", bench.device, {**bench.facts(), "repeats": repeats, "rows": results})
    return results
