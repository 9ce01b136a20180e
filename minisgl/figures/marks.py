"""The marks that all drawings are made of: text, cells, bars, the legend. Each function returns SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from minisgl.figures.style import STATES, color, ink
from minisgl.trace import StepRecord

WIDTH = 480  # user units; a phone shows them at three quarters of a pixel, a desk at a little more than one
LINE = 24  # from one line of text to the next


@dataclass(frozen=True, slots=True)
class PageLook:
    """How a page in some state is drawn: filled where a request uses it, hollow where it does not.

    ``state`` names the colour in the palette, None: the text's; ``symbol`` stands in the cell where no owner does.
    """

    state: str | None
    symbol: str
    is_filled: bool = False
    stroke: float = 1.5
    dash: str = ""


PAGE_LOOKS: dict[str, PageLook] = {
    "private": PageLook("private", "R", is_filled=True),
    "locked": PageLook("cached", "C", is_filled=True),
    "cached": PageLook("cached", "C", stroke=3),
    "free": PageLook("free", "·"),
    "in transit": PageLook(None, "→", dash="3 2"),
    "reserved": PageLook(None, "0", stroke=0.5),
    "lost": PageLook(None, "?", stroke=3),
}
"""Of a page: one request's own; cached and in use; cached, given up when pages run out; free; given up while a launched
step may touch it; page 0; and, which must not be, in no state or in two."""


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    weight: int = 400,
    fill: str = "currentColor",
    is_code: bool = False,
) -> str:
    """A line of text; code keeps its spaces and has characters 9 units wide."""
    style = f'font-size="15" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    code = ' font-family="ui-monospace, monospace" style="white-space: pre"' if is_code else ""
    return f'<text x="{x:.1f}" y="{y:g}" {style}{code}>{escape(words)}</text>'


def cell(state: str, x: float, y: float, width: float, words: str, *, height: float = 22) -> str:
    """A cell in a state's colour, a gap of one unit behind it, with ``words`` in its middle."""
    rect = f'<rect x="{x:.1f}" y="{y:g}" width="{width - 1:.1f}" height="{height:g}" rx="2" fill="{color(state)}"/>'
    middle = x + (width - 1) / 2
    return rect + (text(middle, y + height / 2 + 5, words, anchor="middle", fill=ink(state)) if words else "")


def page_cells(state: str, places: Iterable[tuple[float, float]], width: float, height: float) -> str:
    """Pages in one state, as a single path: a square at each of ``places``, its upper left corner."""
    look = PAGE_LOOKS[state]
    paint = "currentColor" if look.state is None else color(look.state)
    inset = 0.5 if look.is_filled else 0.5 + min(look.stroke, width / 4) / 2
    w, h = width - 2 * inset, height - 2 * inset
    d = "".join(f"M{x + inset:.4g} {y + inset:.4g}h{w:.3g}v{h:.3g}h-{w:.3g}z" for x, y in places)
    if look.is_filled:
        style = f'fill="{paint}"'
    else:
        dash = f' stroke-dasharray="{look.dash}"' if look.dash and width > 10 else ""
        style = f'fill="none" stroke="{paint}" stroke-width="{min(look.stroke, width / 4):g}"{dash}'
    return f'<path data-state="{state}" {style} d="{d}"/>'


def page_ink(state: str) -> str:
    """The colour of text in a page's cell."""
    look = PAGE_LOOKS[state]
    return ink(look.state) if look.is_filled and look.state else "currentColor"


def legend(states: Sequence[str]) -> str:
    """One line: what the colours of these states mean."""
    parts, x = [], 0.0
    for name in states:
        parts.append(cell(name, x, 2, 20, STATES[name].symbol) + text(x + 28, 17, name))
        x += 44 + 9 * len(name)
    return "".join(parts)


def page_legend(entries: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Each (state, words) behind a cell of that state, in as many lines as they need, and the height of these."""
    parts, x, y = [], 0.0, 0
    for state, words in entries:
        width = 36 + 8 * len(words)
        if x and x + width > WIDTH:
            x, y = 0.0, y + LINE
        parts.append(f"<g>{page_cells(state, [(x, y + 1)], 22, 22)}</g>")
        parts.append(text(x + 11, y + 17, PAGE_LOOKS[state].symbol, anchor="middle", fill=page_ink(state)))
        parts.append(text(x + 28, y + 17, words))
        x += width + 6
    return "".join(parts), y + LINE


def step_bar(step: StepRecord, x: float, width: float, base: float, scale: float) -> tuple[str, float]:
    """A step's tokens, decodes below prompts, ``scale`` units each on the line ``base``; and where the bar ends."""
    parts, y = [], float(base)
    for state, n in (("decode", step.num_decode_tokens), ("prefill", step.num_prefill_tokens)):
        if n:
            height = max(n * scale, 1)
            y -= height
            size = f'width="{max(width - 1, 0.8 * width):.1f}" height="{height:.1f}"'
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color(state)}"/>')
    return "".join(parts), y


def line(x1: float, y1: float, x2: float, y2: float, *, dash: str = "") -> str:
    """A thin line in the text's colour."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="currentColor" fill="none"{dashes}/>'


def axis(begin: str, end: str, base: float, width: float) -> str:
    """The line under bars, and what stands at its two ends."""
    ends = text(0, base + 18, begin) + text(width, base + 18, end, anchor="end")
    return f'<path d="M0 {base:g}H{width:g}" stroke="currentColor"/>' + ends
