"""What an engine did, step by step, drawn from its `Trace`. Chapter 1 shows these pictures."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl.figures.drawing import Drawing, from_matplotlib
from minisgl.figures.marks import WIDTH, axis, cell, legend, step_bar, text
from minisgl.figures.source import Engine, Recorded, find_trace, name_all
from minisgl.figures.style import color, matplotlib_style
from minisgl.trace import Trace

WIDE = 40  # a cell with a number in it
ROW = 48  # height of a request's row: its name, and below it a strip of cells
BARS = 92  # height of the panel of bars


def timeline(source: Trace | Engine | Recorded, names: Mapping[str, str] | None = None) -> Drawing:
    """One row for each request, one column for each step: what was computed when, and how much.

    Columns with prompt tokens are wide enough for their number; a step of decodes only is narrow, each of its cells is
    one token. The bars at the bottom are the step's tokens, all requests together. ``names`` replaces request ids.
    """
    trace = find_trace(source)
    steps = trace.steps
    first_step: dict[str, int] = {}
    for k, step in enumerate(steps):
        for request_id in step.request_ids:
            first_step.setdefault(request_id, k)
    order = sorted(first_step, key=lambda r: (trace.arrivals_s.get(r, 0.0), first_step[r]))
    names = name_all(order, names)
    cached = {r: n for r, n in trace.cached_tokens.items() if n and r in first_step}

    # A column's left edge and width.
    cells = [bool(step.num_prefill_tokens) + any(first_step[r] == k for r in cached) for k, step in enumerate(steps)]
    num_wide, num_narrow = sum(cells), cells.count(0)
    unit = min(WIDE, (WIDTH - 4 * num_narrow) / max(num_wide, 1))
    narrow = min((WIDTH - unit * num_wide) / max(num_narrow, 1), 20)
    edges = [0.0]
    for count in cells:
        edges.append(edges[-1] + (unit * count or narrow))

    top = 34
    parts = [legend(["prefill", "decode", "cached"] if cached else ["prefill", "decode"])]
    story = []
    for i, request_id in enumerate(order):
        y = top + i * ROW
        parts.append(text(0, y + 14, names[request_id], weight=600))
        begin = edges[first_step[request_id]]
        if begin:
            parts.append(f'<path d="M0 {y + 31}H{begin:g}" stroke="currentColor" stroke-dasharray="2 4" fill="none"/>')
        prompt, new = 0, 0
        for k, step in enumerate(steps):
            if request_id not in step.request_ids:
                continue
            j = step.request_ids.index(request_id)
            num_tokens, x, width = int(step.num_tokens[j]), edges[k], edges[k + 1] - edges[k]
            new += bool(step.samples[j])
            if step.starts[j] >= step.num_prompt_tokens[j]:
                parts.append(cell("decode", x, y + 20, width, str(num_tokens) if width > 14 else ""))
                continue
            prompt += num_tokens
            if k == first_step[request_id] and request_id in cached:
                parts.append(cell("cached", x, y + 20, unit, str(cached[request_id])))
                x, width = x + unit, width - unit
            parts.append(cell("prefill", x, y + 20, width, str(num_tokens)))
        known = f" after {cached[request_id]} cached ones" if request_id in cached else ""
        since = steps[first_step[request_id]].step_id
        story.append(f"{names[request_id]}: {prompt} prompt tokens{known} from step {since} on, {new} new")

    base = top + len(order) * ROW + BARS
    most = max(int(step.num_tokens.sum()) for step in steps)
    parts.append(text(0, base - BARS + 14, "tokens in the step, all requests", weight=600))
    for k, step in enumerate(steps):
        x, width = edges[k], edges[k + 1] - edges[k]
        bar, bar_top = step_bar(step, x, width, base, (BARS - 44) / most)
        parts.append(bar)
        if step.num_prefill_tokens:
            parts.append(text(x + width / 2, bar_top - 4, str(int(step.num_tokens.sum())), anchor="middle"))
    parts.append(axis(f"step {steps[0].step_id}", f"step {steps[-1].step_id}", base, edges[-1]))
    alt = f"Timeline of {len(order)} requests over {len(steps)} steps. " + "; ".join(story) + "."
    return Drawing("".join(parts), WIDTH, base + 26, alt)


def positions(trace: Trace, request_id: str) -> Drawing:
    """One request token by token: a row for each of its steps, a column for each position. Filled cells were computed
    in that step; outlined ones were there already, and the step reads their KV."""
    mine = [(step, step.request_ids.index(request_id)) for step in trace.steps if request_id in step.request_ids]
    if not mine:
        raise ValueError(f"the trace has no step of request {request_id!r}")
    ends = [int(step.starts[j] + step.num_tokens[j]) for step, j in mine]
    left, top = 72, 40
    unit = min((WIDTH - left) / ends[-1], 22)
    parts = [legend(["prefill", "decode"]), text(WIDTH, 17, "position →", anchor="end")]
    for row, ((step, j), end) in enumerate(zip(mine, ends, strict=True)):
        y, start = top + row * 22, int(step.starts[j])
        parts.append(text(0, y + 15, f"step {step.step_id}"))
        state = "prefill" if start < step.num_prompt_tokens[j] else "decode"
        for position in range(end):
            box = f'x="{left + position * unit + 1:.1f}" y="{y + 1}" width="{unit - 2:.1f}" height="20" rx="2"'
            fill = f'fill="{color(state)}"' if position >= start else 'fill="none" stroke="currentColor" opacity=".45"'
            parts.append(f"<rect {box} {fill}/>")
    first, prompt = ends[0] - int(mine[0][0].starts[mine[0][1]]), int(mine[0][0].num_prompt_tokens[mine[0][1]])
    alt = f"Grid of {len(mine)} steps by {ends[-1]} positions. The first step computes {first} of {prompt} prompt "
    alt += "tokens; each later one adds to the right end and reads all positions before it."
    return Drawing("".join(parts), WIDTH, top + len(mine) * 22 + 6, alt)


def work_per_step(trace: Trace) -> Drawing:
    """Tokens that each step computed, and tokens whose KV it read; the axis is logarithmic."""
    import matplotlib.pyplot as plt

    computed = [int(step.num_tokens.sum()) for step in trace.steps]
    read = [int((step.starts + step.num_tokens).sum()) for step in trace.steps]
    steps = [step.step_id for step in trace.steps]
    with matplotlib_style():
        figure, axes = plt.subplots(figsize=(4.8, 3))
        axes.step(steps, read, where="mid", color="black", marker="", linestyle="--", label="KV read")
        axes.step(steps, computed, where="mid", color="black", marker="", label="computed")
        axes.set(xlabel="step", ylabel="tokens", yscale="log")
        axes.legend()
        alt = f"Two lines over {len(steps)} steps: tokens computed fall from {computed[0]} to {computed[-1]}, "
        return from_matplotlib(figure, alt + f"tokens of KV read go from {read[0]} to {read[-1]}.")
