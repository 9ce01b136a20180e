"""`minisgl bench offline`: a batch of random prompts, all there at once; tokens a second, and what a variant costs.

Variants of an engine are compared within one run: each is measured several times, in turns, so that what else the
machine does meets all of them alike. The figures are medians.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from minisgl.benchmark.report import table, write_report
from minisgl.llm import LLM
from minisgl.request import SamplingParams

# name -> options that differ from the engine that was asked for
VARIANTS: dict[str, dict[str, Any]] = {
    "as asked": {},
    "plain loop": {"overlap": False},
    "recorded": {"record": "a file"},
    "no prefix cache": {"prefix_cache": False},
}


def bench_offline(
    options: dict[str, Any],
    *,
    num_requests: int = 64,
    input_len: tuple[int, int] = (100, 1024),
    output_len: tuple[int, int] = (100, 1024),
    temperature: float = 0.6,
    repeats: int = 3,
    variants: tuple[str, ...] = ("as asked",),
    output: str | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure offline throughput and print a table of the variants.

    Args:
        options: of `LLM`.
        num_requests: prompts, of random tokens.
        input_len, output_len: shortest and longest, in tokens; EOS is ignored.
        temperature: of all requests.
        repeats: measured runs of each variant; the first of all is a warm-up and does not count.
        variants: keys of `VARIANTS`.
        output: JSON file to write.
        seed: of lengths and tokens.

    Returns:
        A row for each variant: median seconds, spread, output tokens a second, and its time against the first's.
    """
    rng = random.Random(seed)
    lengths = [(rng.randint(*input_len), rng.randint(*output_len)) for _ in range(num_requests)]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    steps: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(-1, repeats):
            for name in variants if repeat >= 0 else variants[:1]:
                changed = {k: str(Path(folder) / "record") if k == "record" else v for k, v in VARIANTS[name].items()}
                with LLM(**{**options, **changed}) as llm:
                    # Fresh random tokens each time: nothing is cached before.
                    prompts = [[rng.randrange(llm.config.vocab_size) for _ in range(n)] for n, _ in lengths]
                    params = [
                        SamplingParams(temperature=temperature, max_tokens=m, ignore_eos=True) for _, m in lengths
                    ]
                    device = llm.engine.runner.table.device
                    took, steps[name] = _timed(llm, prompts, params)
                if repeat >= 0:
                    seconds[name].append(took)
    num_output = sum(m for _, m in lengths)
    base = statistics.median(seconds[variants[0]])
    rows = [
        {
            "variant": name,
            "seconds": statistics.median(took),
            "spread": max(took) - min(took),
            "output tok/s": num_output / statistics.median(took),
            "steps": steps[name],
            "time ratio": statistics.median(took) / base,
        }
        for name, took in seconds.items()
    ]
    print(table(rows))
    if output is not None:
        workload = {
            "model": options.get("model", "tiny"), "requests": num_requests, "repeats": repeats,
            "input tokens": sum(n for n, _ in lengths), "output tokens": num_output,
        }  # fmt: skip
        write_report(output, "offline throughput", device, {"workload": workload, "rows": rows})
    return rows


def _timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, int]:
    llm.generate(prompts[:1], SamplingParams(max_tokens=2), use_tqdm=False)  # the first call allocates
    llm.engine.flush_cache()
    before = llm.engine.scheduler.num_steps
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, llm.engine.scheduler.num_steps - before
