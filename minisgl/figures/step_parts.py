"""What a step is made of on the device: launches of a layer, padding of a graph, stretches of attention, steps in time.

Chapter 4 shows these pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import LINE, WIDTH, cell, legend, line, text
from minisgl.trace import StepRecord, Trace
from minisgl.utils import Int32Array, ceil_div


def fusion(kernels: Sequence[tuple[str, Sequence[str]]]) -> Drawing:
    """Two stacks: on the right the kernels of a layer, on the left the parts that each of them does in one launch.

    Args:
        kernels: in their order, name and parts of each.

    Raises:
        ValueError: there are none.
    """
    if not kernels:
        raise ValueError("there are no kernels to draw")
    num_parts = sum(len(parts) for _, parts in kernels)
    row, top, wide = 30.0, 34.0, 214.0
    parts = [text(0, 17, f"{num_parts} launches", weight=600)]
    parts.append(text(WIDTH - wide, 17, f"{len(kernels)} launches", weight=600))
    y = top
    for name, its_parts in kernels:
        height = row * len(its_parts)
        middle = y + height / 2
        for k, part in enumerate(its_parts):
            parts.append(_box(0, y + k * row, wide, part, row - 4))
            parts.append(line(wide, y + k * row + row / 2 - 2, WIDTH - wide, middle - 2))
        parts.append(cell("decode", WIDTH - wide, y, wide, name, height=height - 4))
        y += height
    story = "; ".join(f"{' and '.join(its_parts)} become {name}" for name, its_parts in kernels if len(its_parts) > 1)
    alt = f"Two stacks: {num_parts} launches of a layer on the left become {len(kernels)} on the right: {story}."
    return Drawing("".join(parts), WIDTH, y + 4, alt)


def padding(slots: Int32Array | Sequence[int], *, num_real: int, page_size: int) -> Drawing:
    """The tokens of a padded decode step and the slots that their KV is written to.

    Args:
        slots: slot of each token, as on the device.
        num_real: how many come first that belong to requests.
        page_size: tokens in a page.
    """
    names = [int(slot) for slot in slots]
    width, top = WIDTH / max(len(names), 4), 34.0
    parts = [legend(["decode", "free"]), text(WIDTH, 17, "free: padding", anchor="end")]
    for i, slot in enumerate(names):
        x = i * width
        parts.append(cell("decode" if i < num_real else "free", x, top, width, str(i), height=26))
        parts.append(line(x + width / 2, top + 26, x + width / 2, top + 48))
        parts.append(text(x + width / 2, top + 64, f"{slot // page_size}:{slot % page_size}", anchor="middle"))
    parts.append(text(0, top + 88, "page : offset that the token's KV is written to"))
    pages = sorted({slot // page_size for slot in names[num_real:]})
    alt = f"A step of {len(names)} tokens, {num_real} of them real; the padding is written to page "
    own = ", ".join(str(slot // page_size) for slot in names[:num_real])
    alt += f"{', '.join(map(str, pages)) or 'none'}, the others to pages {own}."
    return Drawing("".join(parts), WIDTH, top + 98, alt)


def work_line(lengths: Sequence[int], *, num_sets: int, num_programs: int, block: int) -> Drawing:
    """The line of a decode step's attention: above its items, a request and a set of KV heads each, below the equal
    stretches that the programs take.

    Args:
        lengths: tokens of each request.
        num_sets: sets of KV heads.
        num_programs: that share the work.
        block: tokens that a program takes at once: a stretch is at least as long.
    """
    end = num_sets * sum(lengths)
    share = max(ceil_div(end, num_programs), block)
    unit, top = WIDTH / end, 34.0
    parts, x, edges = [text(0, 17, "requests and their heads", weight=600)], 0.0, set()
    for request, length in enumerate(lengths):
        for head_set in range(num_sets):
            width = length * unit
            parts.append(cell("decode", x, top, width, f"{request}.{head_set}" if width > 26 else "", height=26))
            x += width
            edges.add(round(x / unit))
    parts.append(text(0, top + 50, "programs", weight=600))
    num_used = ceil_div(end, share)
    for program in range(num_used):
        begin, stop = program * share, min((program + 1) * share, end)
        width = (stop - begin) * unit
        parts.append(_box(begin * unit, top + 60, width, str(program) if width > 14 else "", 26))
        if stop < end:
            parts.append(line(stop * unit, top, stop * unit, top + 60, dash="3 3"))
    cut = sum(program * share not in edges for program in range(1, num_used))
    alt = f"A line of {len(lengths) * num_sets} items, {end} tokens in all, shared by {num_used} programs in equal "
    return Drawing("".join(parts), WIDTH, top + 94, f"{alt}stretches; {cut} of their borders cut an item.")


def overlap(loops: Sequence[tuple[str, Trace]], *, num_steps: int = 7, skip: int = 4) -> Drawing:
    """Steps in time, from launch to the reading of their tokens, of engines with one loop or the other.

    Args:
        loops: name and trace of each.
        num_steps: of each that are drawn.
        skip: first steps that are not: they hold prompts.

    Raises:
        ValueError: a trace is too short.
    """
    windows: list[tuple[str, list[StepRecord]]] = []
    for name, trace in loops:
        steps = trace.steps[skip : skip + num_steps]
        if len(steps) < 2:
            raise ValueError(f"{name}: {len(trace.steps)} steps are too few to draw")
        windows.append((name, steps))
    span = max(steps[-1].done_s - steps[0].launched_s for _, steps in windows)
    parts, y, story = [], 0.0, []
    for name, steps in windows:
        period = (steps[-1].launched_s - steps[0].launched_s) / (len(steps) - 1)
        ahead = sum(b.launched_s < a.done_s for a, b in pairwise(steps))
        parts.append(text(0, y + 17, name, weight=600))
        parts.append(text(WIDTH, y + 17, f"{1e3 * period:,.1f} ms a step", anchor="end"))
        for k, step in enumerate(steps):
            x = WIDTH * (step.launched_s - steps[0].launched_s) / span
            width = WIDTH * (step.done_s - step.launched_s) / span
            lane = y + 26 + (k % 2) * 28
            label = str(step.step_id) if width > 9 * len(str(step.step_id)) + 6 else ""
            parts.append(cell("decode", x, lane, max(width, 2), label, height=24))
        story.append(f"{name}: {ahead} of {len(steps) - 1} steps were launched before the one before them was read")
        y += 26 + 56 + LINE
    alt = f"Bars of {num_steps} steps in time, from launch to the reading of the tokens. {'; '.join(story)}."
    return Drawing("".join(parts), WIDTH, y, alt)


def _box(x: float, y: float, width: float, words: str, height: float) -> str:
    """A hollow cell, a gap of one unit behind it."""
    rect = f'<rect x="{x + 0.5:.1f}" y="{y + 0.5:g}" width="{max(width - 2, 1):.1f}" height="{height - 1:g}" rx="2" '
    rect += 'fill="none" stroke="currentColor"/>'
    return rect + (text(x + (width - 1) / 2, y + height / 2 + 5, words, anchor="middle") if words else "")
