"""`minisgl bench offline`: a batch of random prompts, all there at once; tokens a second, and what a variant costs.

Variants of an engine are compared within one run: each is measured several times, in turns, so that what else the
machine does meets all of them alike. The figures are medians. Transformers' continuous batching may stand beside them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from minisgl.benchmark.compare import run_transformers
from minisgl.benchmark.measure import Run, ceilings_of, engine_options, open_bench
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.workload import Workload, mixed_lengths
from minisgl.launch import find_device

# name -> options that differ from the engine that was asked for
VARIANTS: dict[str, dict[str, Any]] = {
    "as asked": {},
    "plain loop": {"overlap": False},
    "recorded": {"record": "a file"},
    "no prefix cache": {"prefix_cache": False},
}
# New tokens of each request in the warm-up of an engine that is opened for a single run.
_WARM_UP = 16


def bench_offline(
    options: dict[str, Any],
    *,
    workload: Workload | None = None,
    shape: str | None = None,
    repeats: int = 3,
    variants: tuple[str, ...] = ("as asked",),
    transformers: bool = False,
    output: str | None = None,
) -> list[dict[str, Any]]:
    """Measure offline throughput and print a table of the variants.

    Args:
        options: of `LLM`.
        workload: None: that of `mixed_lengths`.
        shape: a published model's shape with random weights, instead of ``options["model"]``.
        repeats: measured runs of each variant, after a warm-up.
        variants: keys of `VARIANTS`.
        transformers: also run the workload, once, on transformers with the same weights.
        output: JSON file to write.

    Returns:
        A row for each variant, see `Bench.row`, with its time against the first's.
    """
    workload = workload or mixed_lengths()
    ceilings = ceilings_of(options)
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    rows: dict[str, dict[str, Any]] = {}
    facts: dict[str, Any] = {}
    # One variant keeps its engine; several take turns, and two engines do not fit on one device.
    turns = 1 if len(variants) == 1 else repeats
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for name in variants:
                changed = {k: str(Path(folder) / "record") if k == "record" else v for k, v in VARIANTS[name].items()}
                with open_bench({**options, **changed}, shape=shape, ceilings=ceilings) as bench:
                    bench.run(workload if turns == 1 else workload.shortened(_WARM_UP))
                    runs[name] += [bench.run(workload) for _ in range(repeats // turns)]
                    rows[name] = bench.row(name, workload, runs[name])
                    facts = facts or bench.facts()
    base = rows[variants[0]]["seconds"]
    table_rows = [{**row, "time ratio": row["seconds"] / base} for row in rows.values()]
    print(table(table_rows))
    others = []
    if transformers:
        with engine_options(options, shape) as changed:
            others.append(run_transformers(changed, workload, seconds_here=base))
        print(table(others))
    if output is not None:
        results = {**facts, "workload": workload.summary(), "repeats": repeats, "rows": table_rows, "others": others}
        write_report(output, "offline throughput", find_device(options.get("device", "auto")), results)
    return table_rows
