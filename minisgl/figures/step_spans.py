"""When each step was launched and when its tokens were read, in one run below the other. Chapter 1 shows it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import LINE, WIDTH, cell, text
from minisgl.trace import Trace

LEFT = 72.0  # where time begins; before it stand the steps' names


def step_spans(traces: Mapping[str, Trace], *, num_steps: int = 6) -> Drawing:
    """A bar for each of the first steps of each run, from its launch to the moment when the host has read its tokens.
    Each run has a scale of its own, from its first launch to the end of the last bar.

    Raises:
        ValueError: a run has no steps.
    """
    parts, story, y = [], [], 0.0
    for name, trace in traces.items():
        steps = trace.steps[:num_steps]
        if not steps:
            raise ValueError(f"the run {name!r} has no steps")
        begin = steps[0].launched_s
        scale = (WIDTH - LEFT) / max(max(step.done_s for step in steps) - begin, 1e-9)
        parts.append(text(0, y + 17, name, weight=600))
        y += LINE
        for step in steps:
            x, width = LEFT + (step.launched_s - begin) * scale, (step.done_s - step.launched_s) * scale
            parts.append(text(0, y + 17, f"step {step.step_id}"))
            parts.append(cell("prefill" if step.num_prefill_tokens else "decode", x, y, max(width, 3), ""))
            y += LINE
        num_early = sum(after.launched_s < before.done_s for before, after in pairwise(steps))
        story.append(f"{name}: {num_early} of {len(steps) - 1} steps are launched before the one before them is read")
        y += 8
    alt = "Bars from the launch of each step to the reading of its tokens. " + "; ".join(story) + "."
    return Drawing("".join(parts), WIDTH, y, alt)
