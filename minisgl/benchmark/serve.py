"""`minisgl bench serve`: requests that arrive by chance at a rate, whoever is still waiting, as those of many users do.

Chapter 1 shows it. A load whose clients wait for their answers before they ask again slows down with the server, and
hides what a user would feel; here arrivals are a Poisson process, drawn beforehand, and each latency counts from when
its request was due. Goodput is the rate of those that kept the limits.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from html import escape
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch

from minisgl.benchmark.load import Ask, Sample, run_load
from minisgl.benchmark.measure import engine_options
from minisgl.benchmark.report import table, write_report
from minisgl.benchmark.serving import Serving, cpu_seconds, engine_arguments, serving
from minisgl.benchmark.workload import Workload, mixed_lengths
from minisgl.figures.drawing import Drawing
from minisgl.figures.style import STATES

PERCENTILES = (50, 90, 99)
# Prompts are random ids below this, which every vocabulary has: a server does not tell how many it has.
VOCAB_SIZE = 256
WIDTH, MOST_LANES, AXIS = 720.0, 400, 26.0  # of the picture, in its user units


def bench_serve(
    *,
    url: str | None = None,
    options: dict[str, Any] | None = None,
    arguments: Sequence[str] = (),
    shape: str | None = None,
    workload: Workload | None = None,
    rate: float = 4.0,
    first_token_limit_s: float | None = None,
    token_limit_s: float | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    seed: int = 0,
    output: str | None = None,
    picture: str | None = None,
) -> dict[str, Any]:
    """Measure, print what came out, and return it.

    Args:
        url: of a running server, anybody's who speaks OpenAI's format; None: one is started,
        options: with these options of `LLM`,
        arguments: and these of ``minisgl serve``.
        shape: a published model's shape with random weights, instead of ``options["model"]``.
        workload: how many requests, and of what lengths; None: 100 of `mixed_lengths`.
        rate: requests a second; infinity: all at once.
        first_token_limit_s, token_limit_s: of time to the first token, and from one to the next in the mean; a request
            that keeps both counts for goodput.
        api_key: of the server.
        timeout_s: a request that takes longer is an error.
        seed: of arrivals and prompts.
        output: JSON file to write.
        picture: SVG file to write: each request's life.

    Raises:
        RuntimeError: no request was answered.
    """
    workload = workload or mixed_lengths(100)
    asks = draw_asks(workload, rate, seed)
    with ExitStack() as stack:
        server: Serving | None = None
        if url is None:
            changed = stack.enter_context(engine_options(options or {}, shape))
            server = stack.enter_context(serving([*engine_arguments(changed), *arguments]))
            url = server.url
        model = _model_of(url, api_key)
        before, client_s, start_s = _cpu(server), time.process_time(), time.perf_counter()
        samples = run_load(url, asks, api_key=api_key, timeout_s=timeout_s)
        wall_s = time.perf_counter() - start_s
        cores = {role: (seconds - before[role]) / wall_s for role, seconds in _cpu(server).items()}
        cores["client"] = (time.process_time() - client_s) / wall_s
    result = {
        "model": shape or model,
        "rate": rate if np.isfinite(rate) else "all at once",
        "workload": workload.summary(),
        "first token limit s": first_token_limit_s,
        "token limit s": token_limit_s,
        **summarise(samples, first_token_limit_s=first_token_limit_s, token_limit_s=token_limit_s),
        "cores": cores,
    }
    _print(result)
    if output is not None:
        write_report(output, "open-loop load", torch.device("cpu"), result)
    if picture is not None:
        draw(samples).save(picture)
    return result


def draw_asks(workload: Workload, rate: float, seed: int) -> list[Ask]:
    """The requests of ``workload``, arriving by chance at ``rate`` a second."""
    rng = random.Random(seed)
    asks, due_s = [], 0.0
    for prompt, num_output in zip(workload.draw(rng, VOCAB_SIZE), workload.output_lens, strict=True):
        body = {
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": workload.temperature,
            "ignore_eos": True,
        }
        asks.append(Ask(due_s, body))
        due_s += rng.expovariate(rate) if np.isfinite(rate) else 0.0
    return asks


def summarise(
    samples: Sequence[Sample], *, first_token_limit_s: float | None = None, token_limit_s: float | None = None
) -> dict[str, Any]:
    """Counts, rates and percentiles. Raises ``RuntimeError`` if no request was answered."""
    good = [s for s in samples if s.error is None]
    errors = Counter(s.error for s in samples if s.error is not None)
    if not good:
        raise RuntimeError(f"none of {len(samples)} requests was answered: {dict(errors)}")
    seconds = max(s.end_s for s in samples) - min(s.due_s for s in samples)
    within = [
        s
        for s in good
        if (first_token_limit_s is None or s.first_token_s <= first_token_limit_s)
        and (token_limit_s is None or s.token_s is None or s.token_s <= token_limit_s)
    ]
    token_s = [s.token_s for s in good if s.token_s is not None]
    return {
        "requests": len(samples),
        "answered": len(good),
        "errors": dict(errors),
        "seconds": seconds,
        "input tokens": sum(s.prompt_tokens for s in good),
        "cached tokens": sum(s.cached_tokens for s in good),
        "output tokens": sum(s.output_tokens for s in good),
        "answered/s": len(good) / seconds,
        "output tok/s": sum(s.output_tokens for s in good) / seconds,
        "goodput/s": len(within) / seconds,
        "goodput %": 100 * len(within) / len(samples),
        "first token ms": percentiles([1e3 * s.first_token_s for s in good]),
        "ms a token": percentiles([1e3 * s for s in token_s]),
        "pause ms": percentiles([1e3 * gap for s in good for gap in s.gaps_s]),
        "whole ms": percentiles([1e3 * s.whole_s for s in good]),
        "sent late ms": percentiles([1e3 * (s.sent_s - s.due_s) for s in good if s.sent_s is not None]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, `PERCENTILES` and the largest; empty if there are no values."""
    if not values:
        return {}
    points = dict(zip((f"p{p}" for p in PERCENTILES), np.percentile(values, PERCENTILES).tolist(), strict=True))
    return {"mean": float(np.mean(values)), **points, "max": max(values)}


def draw(samples: Sequence[Sample]) -> Drawing:
    """A line for each request, in the order of arrival: it waits and is computed, its tokens come; or it fails."""
    shown = sorted(samples, key=lambda s: s.due_s)[:MOST_LANES]
    end_s = max(max(s.end_s for s in shown), 1e-3)
    lane = max(2.0, min(14.0, 420.0 / len(shown)))
    height = AXIS + lane * len(shown)

    def bar(start_s: float, stop_s: float, y: float, state: str, title: str) -> str:
        x, width = WIDTH * start_s / end_s, max(0.8, WIDTH * (stop_s - start_s) / end_s)
        return (
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{0.8 * lane:.2f}" '
            f'fill="{STATES[state].color}"><title>{title}</title></rect>'
        )

    parts = []
    for k, s in enumerate(shown):
        y = AXIS + k * lane
        if s.error is not None:
            parts.append(bar(s.due_s, s.end_s, y, "preempted", f"request {k}: {escape(s.error)}"))
            continue
        parts.append(bar(s.due_s, s.times_s[0], y, "prefill", f"request {k}: {1e3 * s.first_token_s:.0f} ms"))
        parts.append(bar(s.times_s[0], s.times_s[-1], y, "decode", f"request {k}: {s.output_tokens} tokens"))
    for k in range(5):
        x, anchor = WIDTH * k / 4, ("start", "middle", "middle", "middle", "end")[k]
        parts.append(f'<text x="{x:g}" y="14" font-size="12" text-anchor="{anchor}">{end_s * k / 4:.1f} s</text>')
    good = [s for s in shown if s.error is None]
    median_ms = 1e3 * float(np.median([s.first_token_s for s in good])) if good else float("nan")
    alt = (
        f"{len(shown)} requests over {end_s:.1f} s, a line each: waiting for its first token "
        f"(median {median_ms:.0f} ms), then its tokens; {len(shown) - len(good)} failed."
    )
    return Drawing("".join(parts), WIDTH, height, alt)


def _cpu(server: Serving | None) -> dict[str, float]:
    return {} if server is None else cpu_seconds(server)


def _model_of(url: str, api_key: str | None) -> str:
    """The model's name. Raises ``ValueError``, in words for users, if nobody answers there."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(f"{url.rstrip('/')}/v1/models", headers=headers), timeout=20) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"{url} does not tell which models it serves: {error}") from error


def _print(result: dict[str, Any]) -> None:
    names = ("first token ms", "ms a token", "pause ms", "whole ms", "sent late ms")
    print(table([{"": name, **result[name]} for name in names if result[name]]))
    plain = ("requests", "answered", "seconds", "output tokens", "answered/s", "output tok/s", "goodput/s", "goodput %")
    print(table([{name: result[name] for name in plain}]))
    for error, count in result["errors"].items():
        print(f"{count} failed: {error}")
    print("cores: " + ", ".join(f"{role} {share:.2f}" for role, share in result["cores"].items()))
