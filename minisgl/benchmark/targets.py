"""`minisgl bench all`: every figure that this engine is held to, on one device in one command.

What must be reached, and what is the goal, stands here beside each row and nowhere else. The figures are for one H200
whose roofline stands beside them: machines of one kind multiply at rates that differ by a seventh. So a row says, too,
whether it reaches as large a share of this machine's roofline as it must of that one's.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from minisgl.benchmark.ceilings import Ceilings
from minisgl.benchmark.measure import Bench, Count, as_report, ceilings_of, engine_options, open_bench
from minisgl.benchmark.profile import profile_steps
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.workload import Workload, equal_lengths, mixed_lengths
from minisgl.config import SchedulerConfig
from minisgl.launch import find_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A row: tokens a second that must be reached, and that are aimed at.

    Args:
        name: what the row is called.
        shape: of `minisgl.benchmark.shapes.SHAPES`; None: the model that the options name.
        workload: what is run.
        must, goal: tokens a second; None: none is set.
        roofline: serial, tokens a second, of the machine that these were set for; None: unknown.
        count: which tokens.
        repeats: measured runs.
    """

    name: str
    shape: str | None
    workload: Workload
    must: float | None
    goal: float | None
    roofline: float | None = None
    count: Count = "output"
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class StartUp:
    """A row: seconds from the start of a process to its first token.

    Args:
        shape, must, goal: as in `Target`, but seconds.
        kernels: "new" if Triton has none of them on disk, "on disk" if it has those of the row before.
    """

    shape: str | None
    must: float | None
    goal: float | None
    kernels: Literal["new", "on disk"] = "new"


# The longest are measured once: they take half a minute, and from run to run a thousandth more or less.
TARGETS: tuple[Target | StartUp, ...] = (
    Target("one request, 128 in, 512 out", "qwen3-0.6b", equal_lengths(1, 128, 512), 1200, 2000, 3790),
    Target("16 requests, 128 in, 512 out", "qwen3-0.6b", equal_lengths(16, 128, 512), 16_000, 22_000, 39_500),
    Target("64 requests, 512 in, 256 out", "qwen3-0.6b", equal_lengths(64, 512, 256), 24_000, 32_000),
    Target("prefill 32 x 1,024", "qwen3-0.6b", equal_lengths(32, 1024, 1), 480_000, 530_000, 789_000, "input", 7),
    Target("offline", "qwen3-0.6b", mixed_lengths(), 26_000, 32_000, 39_100),
    StartUp("qwen3-8b", 25, 12, "new"),
    StartUp("qwen3-8b", 25, 12, "on disk"),
    Target("one request, 128 in, 512 out", "qwen3-8b", equal_lengths(1, 128, 512), 225, 260, 308),
    Target("prefill 32 x 1,024", "qwen3-8b", equal_lengths(32, 1024, 1), 45_000, 47_000, 55_500, "input", 5),
    Target("offline", "qwen3-8b", mixed_lengths(), 10_000, 11_300, 13_300, repeats=1),
    Target("offline", "qwen3-14b", mixed_lengths(), 6400, 7200, 8440, repeats=1),
)  # fmt: skip


def bench_all(
    options: Mapping[str, Any],
    *,
    shapes: Sequence[str] = (),
    targets: Sequence[Target | StartUp] = TARGETS,
    output: str | None = None,
) -> list[dict[str, Any]]:
    """Measure each row of ``targets``, with one engine for all rows of a shape, and print one table.

    Args:
        options: of `LLM`.
        shapes: measure only these; none named: all.
        targets: rows.
        output: JSON file; it is written again after each shape, so that nothing measured is lost.

    Raises:
        RuntimeError: rows could not be measured; those that could are printed and written before.
    """
    chosen = [t for t in targets if not shapes or t.shape in shapes]
    if not chosen:
        raise ValueError(f"no row has a shape among {', '.join(shapes)}")
    device = find_device(options.get("device", "auto"))
    started = time.perf_counter()
    ceilings = ceilings_of(options)
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    failed: list[str] = []
    for shape in dict.fromkeys(t.shape for t in chosen):
        name = shape or str(options.get("model", "tiny"))
        try:
            for row, detail in _measure_shape(options, shape, [t for t in chosen if t.shape == shape], ceilings):
                rows.append(row)
                details.setdefault(name, {}).update(detail)
                print(f"{row['row']}, {row['shape']}: {row['measured']:,.4g}", file=sys.stderr, flush=True)
        except Exception as error:  # whatever it is, the other shapes are still to be measured
            logger.exception("%s could not be measured to the end", name)
            failed.append(f"{name}: {error}")
        if output is not None:
            report = {
                "ceilings": as_report(ceilings), "rows": rows, "failed": failed, "details": details,
                "total seconds": time.perf_counter() - started,
            }  # fmt: skip
            write_report(output, "all targets", device, report)
    if rows:
        print(table(rows))
    print(", ".join(f"{value:.4g} {key}" for key, value in as_report(ceilings).items()))
    if failed:
        raise RuntimeError(f"not everything could be measured: {'; '.join(failed)}")
    return rows


def _measure_shape(
    options: Mapping[str, Any], shape: str | None, targets: Sequence[Target | StartUp], ceilings: Ceilings
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A row of the table and what the report knows beyond it, for each target."""
    with ExitStack() as stack:
        cache = None
        for target in targets:
            if not isinstance(target, StartUp):
                continue
            if cache is None or target.kernels == "new":
                cache = stack.enter_context(tempfile.TemporaryDirectory())
            with engine_options(options, shape) as changed:
                seconds, log = start_up(changed, triton_cache=cache)
            reached = None if target.must is None else "yes" if seconds <= target.must else "NO"
            name, title = shape or str(options.get("model", "tiny")), f"start-up, kernels {target.kernels}"
            row = _row(f"{title}, to first token, s", name, seconds, None, target, reached)
            yield row, {title: {"s": seconds, "log": log}}
    measured = [t for t in targets if isinstance(t, Target)]
    if measured:
        with open_bench(options, shape=shape, ceilings=ceilings) as bench:
            for target in measured:
                yield _measure(bench, target)


def _measure(bench: Bench, target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row, and its details: below the goal with the kernels of a step, that there may be no guessing why."""
    runs = bench.measure(target.workload, target.repeats)
    full = bench.row(target.name, target.workload, runs, count=target.count)
    measured = full[f"{target.count} tok/s"]
    reached = _reached(measured, full["share %"], target)
    row = _row(f"{target.name}, {target.count} tok/s", bench.name, measured, full, target, reached)
    all_runs = [{"seconds": run.seconds, "first token ms": 1e3 * statistics.median(run.first_token_s)} for run in runs]
    details = {**full, "runs": all_runs}
    if target.goal is not None and measured < target.goal:
        details["kernels"] = profile_steps(bench, **typical_step(target.workload, bench.llm.engine.scheduler.config))
    return row, {**bench.facts(), target.name: details}


def typical_step(workload: Workload, sizes: SchedulerConfig) -> dict[str, Any]:
    """What most steps of a workload are, as `profile_steps` takes it: whole prompts where each request brings one
    token, else decodes of as many requests as run together, half way through."""
    num = workload.num_requests
    if workload.num_output == num:
        context = min(workload.num_input // num, sizes.max_num_batched_tokens)
        return {"kind": "prefill", "batch": num, "context": context}
    context = (workload.num_input + workload.num_output // 2) // num
    return {"kind": "decode", "batch": min(num, sizes.max_running), "context": context}


def _row(
    name: str, shape: str, measured: float, full: dict[str, Any] | None, target: Target | StartUp, reached: str | None
) -> dict[str, Any]:
    return {
        "row": name,
        "shape": shape,
        "measured": measured,
        "spread %": full and full["spread %"],
        "serial roofline": full and full["serial roofline"],
        "share %": full and full["share %"],
        "launch-aware": full and full["launch-aware"],
        "must": target.must,
        "must %": must_share(target),
        "goal": target.goal,
        "reached": reached,
    }


def must_share(target: Target | StartUp) -> float | None:
    """Percent of the serial roofline that must be reached; None where it is not known."""
    if isinstance(target, StartUp) or target.must is None or target.roofline is None:
        return None
    return 100 * target.must / target.roofline


def _reached(measured: float, share: float, target: Target) -> str | None:
    if target.must is None:
        return None
    needed = must_share(target)
    return "yes" if measured >= target.must else "by share" if needed is not None and share >= needed else "NO"


_CHILD = """
import json, logging, sys
logging.basicConfig(level="INFO", format="%(relativeCreated)d ms: %(message)s")
from minisgl import LLM, SamplingParams
logging.info("imported")
with LLM(**json.loads(sys.argv[1])) as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    print("first token", flush=True)
    logging.info("first token")
"""


def start_up(options: Mapping[str, Any], *, triton_cache: str | None = None) -> tuple[float, list[str]]:
    """Seconds from the start of a new process, imports and all, to its first token; and what it said on the way, each
    line with milliseconds from almost its start. Raises ``RuntimeError`` with its last words if it brings none.

    Args:
        options: of `LLM`.
        triton_cache: folder where Triton's kernels are; None: where they always are.
    """
    environment = os.environ | ({} if triton_cache is None else {"TRITON_CACHE_DIR": triton_cache})
    started = time.perf_counter()
    command = [sys.executable, "-c", _CHILD, json.dumps(dict(options))]
    with (
        tempfile.TemporaryFile("w+") as said,  # a pipe would be full some time
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment) as child,
    ):
        assert child.stdout is not None
        line = child.stdout.readline()
        seconds = time.perf_counter() - started
        child.communicate()
        said.seek(0)
        errors = said.read()
    if line.strip() != "first token":
        raise RuntimeError(f"the process brought no token: {(errors.strip().splitlines() or ['no message'])[-1]}")
    return seconds, [line for line in errors.splitlines() if " ms: " in line]
