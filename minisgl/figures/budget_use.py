"""How full the steps were: tokens of each against the budget of a step. Chapter 2 shows this picture."""

from __future__ import annotations

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import WIDTH, axis, legend, line, step_bar, text
from minisgl.figures.source import Engine, Recorded, find_scheduler, find_trace
from minisgl.trace import Trace

HEIGHT = 150  # of the budget


def budget_use(source: Trace | Engine | Recorded, *, budget: int | None = None) -> Drawing:
    """A bar for each step, its prompt tokens on top of its decodes, below the line of the budget.

    ``budget`` is ``max_num_batched_tokens``; None: the source's own. A bar is at least one unit high, so that a decode
    can be seen.

    Raises:
        ValueError: the source has no steps, or is a trace and ``budget`` is not given.
    """
    if budget is None:
        if isinstance(source, Trace):
            raise ValueError("a trace does not know the budget of a step; give budget")
        budget = find_scheduler(source).config.max_num_batched_tokens
    steps = find_trace(source).steps
    prefill = sum(step.num_prefill_tokens for step in steps)
    decode = sum(step.num_decode_tokens for step in steps)
    used = (prefill + decode) / (budget * len(steps))

    top = 58
    base, width = top + HEIGHT, min(WIDTH / len(steps), 24.0)
    parts = [legend(["prefill", "decode"]), text(WIDTH, 17, f"{used:.0%} of the budget used", anchor="end")]
    parts.append(text(0, top - 6, f"budget: {budget} tokens a step"))
    for k, step in enumerate(steps):
        parts.append(step_bar(step, k * width, width, base, HEIGHT / budget)[0])
    parts.append(line(0, top, len(steps) * width, top, dash="6 4"))
    parts.append(axis(f"step {steps[0].step_id}", f"step {steps[-1].step_id}", base, len(steps) * width))
    fullest = max(steps, key=lambda step: int(step.num_tokens.sum()))
    alt = f"Bars of {len(steps)} steps under a budget of {budget} tokens. In all {prefill} prompt tokens and {decode} "
    alt += f"decode tokens, {used:.0%} of the budget; the fullest is step {fullest.step_id} with "
    alt += f"{int(fullest.num_tokens.sum())} tokens."
    return Drawing("".join(parts), WIDTH, base + 26, alt)
