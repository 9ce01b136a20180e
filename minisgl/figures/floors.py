"""Times beside the time that the device must take. Chapter 4 shows these pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import LINE, WIDTH, line, text
from minisgl.figures.style import color

# Name -> (least time, time): None where no floor is known.
Bars = Sequence[tuple[str, float | None, float]]


def floor_bars(bars: Bars, *, state: str = "decode", unit: str = "µs", note: str = "") -> Drawing:
    """A bar for each entry, in their order: filled as far as its floor, hollow beyond it.

    Args:
        bars: name, floor (None: unknown), time; of one unit.
        state: whose colour.
        unit: of the times.
        note: under the picture: device and date.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not bars:
        raise ValueError("there are no bars to draw")
    most = max(time for _, _, time in bars)
    parts = [_key(state)]
    room = WIDTH - 124  # behind a bar stands its number
    story = []
    for i, (name, floor, time) in enumerate(bars):
        y = 36 + i * 2 * LINE
        width, filled = room * time / most, room * min(floor or 0, time) / most
        parts.append(text(0, y + 14, name))
        parts.append(
            f'<rect x="0" y="{y + 20}" width="{filled:.1f}" height="18" fill="{color(state)}"/>'
            f'<rect x="{filled:.1f}" y="{y + 20.75}" width="{max(width - filled, 0):.1f}" height="16.5" '
            f'fill="none" stroke="{color(state)}" stroke-width="1.5"/>'
        )
        share = f" ({floor / time:.0%})" if floor else ""
        parts.append(text(width + 6, y + 34, f"{_number(time)}{share}"))
        story.append(
            f"{name} {_number(time)} {unit}{share and f', {floor / time:.0%} of it its floor' if floor else ''}"
        )
    height = 36 + len(bars) * 2 * LINE + 6
    parts.append(text(WIDTH, 17, f"{unit} (floor / time)", anchor="end"))
    if note:
        parts.append(text(0, height + 14, note))
        height += LINE
    return Drawing("".join(parts), WIDTH, height, f"Bars of time, filled as far as the floor. {'; '.join(story)}.")


def _key(state: str) -> str:
    return (
        f'<rect x="0" y="3" width="20" height="18" fill="{color(state)}"/>{text(26, 17, "floor")}'
        f'<rect x="86" y="3.75" width="20" height="16.5" fill="none" stroke="{color(state)}" stroke-width="1.5"/>'
        f"{text(112, 17, 'beyond it')}"
    )


def step_bars(report: Mapping[str, Any], *, most: int = 9) -> Drawing:
    """The places of a profiled step, largest first, as `minisgl.benchmark.profile` reports them.

    Args:
        report: of `minisgl.benchmark.profile.profile`.
        most: places that are drawn; the others are one bar.
    """
    rows = report["rows"]
    shown = [(f"{row['place']} ({row['calls']:.3g})", row["floor us"], row["us"]) for row in rows[:most]]
    if rest := rows[most:]:
        shown.append((f"{len(rest)} other places", None, sum(row["us"] for row in rest)))
    state = "prefill" if report.get("kind") == "prefill" else "decode"
    note = f"step {_number(report['step us'])} µs, its kernels {_number(report['kernels us'])} µs"
    return floor_bars(shown, state=state, note=note)


def roofline(
    points: Sequence[tuple[float, float]], *, bytes_per_weight: float, read: float, rate: float, note: str = ""
) -> Drawing:
    """Products of M tokens with weights that are read once: operations a second against M, both axes logarithmic, under
    the roof that memory and arithmetic leave.

    Args:
        points: (M, operations a second), measured.
        bytes_per_weight: of the weights' dtype.
        read: bytes a second of memory.
        rate: operations a second.
        note: under the picture.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("there are no points to draw")
    ridge = rate * bytes_per_weight / (2 * read)
    left, top, bottom = 62.0, 34.0, 254.0
    low_x, high_x = math.log10(0.8), math.log10(max(*(m for m, _ in points), 4 * ridge) * 1.3)
    low_y = math.log10(min(min(v for _, v in points), 2 * read / bytes_per_weight) * 0.7)
    high_y = math.log10(max(max(v for _, v in points), rate) * 1.5)

    def at(m: float, value: float) -> tuple[float, float]:
        x = left + (math.log10(m) - low_x) / (high_x - low_x) * (WIDTH - left)
        return x, bottom - (math.log10(value) - low_y) / (high_y - low_y) * (bottom - top)

    first, last = 10**low_x, 10**high_x
    corners = [at(first, 2 * first * read / bytes_per_weight), at(ridge, rate), at(last, rate)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    parts = [line(left, bottom, WIDTH, bottom), line(left, top, left, bottom)]
    parts.append(f'<path d="M{path}" fill="none" stroke="currentColor" stroke-width="2"/>')
    x, y = corners[1]
    parts.append(line(x, y, x, bottom, dash="4 4"))
    parts.append(text(x + 6, bottom - 8, f"M = {ridge:.3g}"))
    parts.append(text(0, 17, "operations a second") + text(WIDTH, 17, "slope memory, flat arithmetic", anchor="end"))
    for exponent in range(math.ceil(low_x), math.floor(high_x) + 1):
        parts.append(text(at(10**exponent, 1)[0], bottom + 18, f"{10**exponent:,}", anchor="middle"))
    for exponent in range(math.ceil(low_y), math.floor(high_y) + 1):
        parts.append(text(left - 6, at(1, 10**exponent)[1] + 5, _si(10.0**exponent), anchor="end"))
    for m, value in points:
        x, y = at(m, value)
        state = "decode" if m < ridge else "prefill"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color(state)}"/>')
    parts.append(text(WIDTH, bottom + 36, "tokens M →", anchor="end"))
    height = bottom + 44
    if note:
        parts.append(text(0, height + 8, note))
        height += LINE
    shares = [value / min(rate, 2 * m * read / bytes_per_weight) for m, value in points]
    alt = f"Roofline: rises with the tokens M up to {ridge:.3g}, then is flat at {_si(rate)} operations a second. "
    alt += f"{len(points)} measured points, from M = {points[0][0]:g} to {points[-1][0]:g}, reach {min(shares):.0%} to "
    return Drawing("".join(parts), WIDTH, height, f"{alt}{max(shares):.0%} of it.")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _si(value: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"
