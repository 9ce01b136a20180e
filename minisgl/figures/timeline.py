"""What an engine did, step by step, drawn from its `Trace`. Chapter 1 shows these pictures."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from minisgl.figures.drawing import Drawing, from_matplotlib
from minisgl.figures.style import STATES, color, ink, matplotlib_style
from minisgl.trace import Trace

WIDTH = 480  # user units; a phone shows them at three quarters of a pixel, a desk at a little more than one
WIDE = 40  # a cell with a number in it
ROW, STRIP = 48, 22  # height of a request's row, and of its strip of cells
BARS = 92  # height of the panel of bars


def timeline(trace: Trace, names: Mapping[str, str] | None = None) -> Drawing:
    """One row for each request, one column for each step: what was computed when, and how much.

    Columns with prompt tokens are wide enough for their number; a step of decodes only is narrow, each of its cells is
    one token. The bars at the bottom are the step's tokens, all requests together. ``names`` replaces request ids.
    """
    steps = trace.steps
    if not steps:
        raise ValueError("the trace is empty; was the engine made with trace=True?")
    first_step: dict[str, int] = {}
    for k, step in enumerate(steps):
        for request_id in step.request_ids:
            first_step.setdefault(request_id, k)
    order = sorted(first_step, key=lambda r: (trace.arrivals_s.get(r, 0.0), first_step[r]))
    names = {r: r for r in order} | dict(names or {})
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
    parts = [_legend(["prefill", "decode", "cached"] if cached else ["prefill", "decode"])]
    story = []
    for i, request_id in enumerate(order):
        y = top + i * ROW
        parts.append(_text(0, y + 14, names[request_id], weight=600))
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
                parts.append(_cell("decode", x, y, width, str(num_tokens) if width > 14 else ""))
                continue
            prompt += num_tokens
            if k == first_step[request_id] and request_id in cached:
                parts.append(_cell("cached", x, y, unit, str(cached[request_id])))
                x, width = x + unit, width - unit
            parts.append(_cell("prefill", x, y, width, str(num_tokens)))
        known = f" after {cached[request_id]} cached ones" if request_id in cached else ""
        since = steps[first_step[request_id]].step_id
        story.append(f"{names[request_id]}: {prompt} prompt tokens{known} from step {since} on, {new} new")

    base = top + len(order) * ROW + BARS
    most = max(int(step.num_tokens.sum()) for step in steps)
    parts.append(_text(0, base - BARS + 14, "tokens in the step, all requests", weight=600))
    for k, step in enumerate(steps):
        x, y, width = edges[k], float(base), edges[k + 1] - edges[k]
        for state, n in (("decode", step.num_decode_tokens), ("prefill", step.num_prefill_tokens)):
            if n:
                height = max(n / most * (BARS - 44), 1)
                y -= height
                size = f'width="{width - 1:.1f}" height="{height:.1f}"'
                parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color(state)}"/>')
        if step.num_prefill_tokens:
            parts.append(_text(x + width / 2, y - 4, str(int(step.num_tokens.sum())), anchor="middle"))
    parts.append(f'<path d="M0 {base}H{edges[-1]:g}" stroke="currentColor"/>')
    parts.append(_text(0, base + 18, f"step {steps[0].step_id}"))
    parts.append(_text(edges[-1], base + 18, f"step {steps[-1].step_id}", anchor="end"))
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
    parts = [_legend(["prefill", "decode"]), _text(WIDTH, 17, "position →", anchor="end")]
    for row, ((step, j), end) in enumerate(zip(mine, ends, strict=True)):
        y, start = top + row * 22, int(step.starts[j])
        parts.append(_text(0, y + 15, f"step {step.step_id}"))
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


def _legend(states: list[str]) -> str:
    parts, x = [], 0.0
    for name in states:
        parts.append(_cell(name, x, -18, 20, STATES[name].symbol) + _text(x + 28, 17, name))
        x += 44 + 9 * len(name)
    return "".join(parts)


def _cell(state: str, x: float, y: float, width: float, text: str) -> str:
    rect = f'<rect x="{x:.1f}" y="{y + 20}" width="{width - 1:.1f}" height="{STRIP}" rx="2" fill="{color(state)}"/>'
    return rect + (_text(x + (width - 1) / 2, y + 36, text, anchor="middle", fill=ink(state)) if text else "")


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: int = 400, fill: str = "currentColor"
) -> str:
    style = f'font-size="15" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:g}" {style}>{escape(text)}</text>'
