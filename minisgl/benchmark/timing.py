"""How long things take on a device: medians over several runs, by events on CUDA, by the host's clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call.

    Args:
        median_s: median over the runs.
        spread_s: the slowest run's less the fastest's.
        in_graph: whether it was replayed from a CUDA graph, so that the host's share does not count.
    """

    median_s: float
    spread_s: float
    in_graph: bool = False


def time_calls(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    repeats: int = 7,
    run_s: float = 0.02,
    graph: bool = False,
) -> Timing:
    """Seconds of one call, when ``calls`` are made in turn, over and over.

    Several calls on different memory find it cold, as the layers of a model do: give as many as together touch far more
    than the caches hold.

    Args:
        calls: launch work and return.
        device: where the work is done.
        repeats: measured runs.
        run_s: least length of a run in seconds, about.
        graph: capture the calls in a CUDA graph and time its replays; without effect elsewhere.
    """
    in_graph = graph and device.type == "cuda"
    for call in calls:  # compiles, allocates
        call()
    once = _capture(calls, device) if in_graph else lambda: [call() for call in calls]
    rounds = max(1, round(run_s / max(_run(once, 1, device), 1e-9)))
    rounds = max(1, round(run_s / max(_run(once, rounds, device) / rounds, 1e-9)))
    seconds = [_run(once, rounds, device) / (rounds * len(calls)) for _ in range(repeats)]
    return Timing(statistics.median(seconds), max(seconds) - min(seconds), in_graph)


def _run(once: Callable[[], object], rounds: int, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(rounds):
            once()
        return time.perf_counter() - started
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(rounds):
            once()
        end.record()
        torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _capture(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    return graph.replay
