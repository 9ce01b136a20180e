"""How much of a device's memory steps and graphs need, measured before the rest is given to KV: E05.

Chapter 4 tells this module's story. A pool sized by an estimate is either too small or fails at the first long prompt.
So the largest steps that the limits allow are run once over a small pool, and the largest graphs recorded.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from minisgl.config import SchedulerConfig
from minisgl.engine.graphs import GraphCapture, decode_buckets
from minisgl.engine.runner import ModelRunner
from minisgl.request import SamplingParams
from minisgl.scheduler import Scheduler
from minisgl.utils import ceil_div

logger = logging.getLogger(__name__)

# Between what the allocator hands out and what it takes from the device lie fragments.
FRAGMENTS = 1.1


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What has to be left free for an engine's work, in bytes.

    Args:
        step_bytes: of the largest step.
        graph_bytes: of all graphs.
        token_buckets: sizes for which graphs of pieces are worth their memory.
    """

    step_bytes: int
    graph_bytes: int
    token_buckets: tuple[int, ...]


def rehearsal_sizes(sizes: SchedulerConfig) -> SchedulerConfig:
    """The smallest pool in which the largest step of ``sizes`` runs."""
    num_pages = 1 + ceil_div(sizes.max_num_batched_tokens, sizes.page_size) + sizes.max_running
    num_pages = min(num_pages, sizes.num_pages)
    pool = (num_pages - 1) * sizes.page_size
    return replace(sizes, num_pages=num_pages, max_model_len=min(sizes.max_model_len, pool), prefix_cache=False)


def measure(runner: ModelRunner, sizes: SchedulerConfig, *, max_graph_requests: int) -> MemoryNeed:
    """Run the largest steps, then record the largest graphs, on a runner that is thrown away afterwards.

    Args:
        runner: over a pool of `rehearsal_sizes`.
        sizes: those.
        max_graph_requests: largest batch that is to be captured; 0: none.
    """
    device = runner.table.device
    capture = GraphCapture(runner, max_seq_len=sizes.max_model_len)
    started = time.monotonic()
    capture.compile(sizes.max_running, sizes.max_num_batched_tokens)
    logger.info("compiled kernels in %.1f s", time.monotonic() - started)
    step_bytes = max(
        _peak_bytes(runner, sizes, prompt_len, params)
        for prompt_len in (sizes.max_num_batched_tokens, sizes.max_num_batched_tokens // sizes.max_running)
        for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, top_p=0.9, logprobs=20))
    )
    buckets = decode_buckets(max_graph_requests)
    graph_bytes, token_buckets = 0, ()
    if buckets:
        token_buckets = capture.worthwhile_token_buckets(sizes.max_num_batched_tokens)
        kept = []
        for record, wanted in ((capture.decode, buckets), (capture.pieces, token_buckets)):
            used = []
            for size in wanted[:-3:-1]:  # the largest two: what the second one adds, each smaller one adds at most
                before = torch.cuda.mem_get_info(device)[0]
                kept.append(record(size))
                used.append(before - torch.cuda.mem_get_info(device)[0])
            graph_bytes += sum(used[:1]) + (len(wanted) - 1) * sum(used[1:])
        del kept
    del capture
    gc.collect()
    torch.cuda.empty_cache()
    return MemoryNeed(int(step_bytes * FRAGMENTS), max(graph_bytes, 0), token_buckets)


def _peak_bytes(runner: ModelRunner, sizes: SchedulerConfig, prompt_len: int, params: SamplingParams) -> int:
    """Most memory that a step of as many such prompts as it can take needs, beyond what there was before."""
    device = runner.table.device
    scheduler = Scheduler(sizes, seed=0)
    prompt_len, left = max(min(prompt_len, sizes.max_model_len - 1), 1), sizes.max_num_batched_tokens
    for i in range(sizes.max_running):
        if left <= 0:
            break
        scheduler.add(str(i), np.zeros(min(prompt_len, left), np.int32), params)
        left -= prompt_len
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    plan = scheduler.schedule()
    assert plan is not None
    runner.sample(runner.forward(plan)).wait()
    return torch.cuda.max_memory_allocated(device) - before
