"""How evenly tokens come: the time between one token of a request and its next, by the clock of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import LINE, WIDTH, axis, cell, line, text
from minisgl.figures.source import Engine, Recorded, find_trace, name_all
from minisgl.figures.style import color
from minisgl.trace import Trace

HEIGHT = 44  # of the longest gap
ROW = LINE + HEIGHT + 6


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two tokens of a request, clock readings in seconds.

    ``is_recomputed``: in between, the request computed tokens that it had computed before, for it was preempted.
    """

    request_id: str
    start_s: float
    end_s: float
    is_recomputed: bool

    @property
    def duration_s(self) -> float:
        """How long its reader waited."""
        return self.end_s - self.start_s


def find_gaps(trace: Trace) -> tuple[list[Gap], dict[str, float]]:
    """All gaps, in the order of their ends, and each request's first token. What was sampled counts, an end-of-text
    token too; what came after the request's end does not."""
    gaps: list[Gap] = []
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    num_computed: dict[str, int] = {}
    recomputed: set[str] = set()
    for step in trace.steps:
        ends = (step.starts + step.num_tokens).tolist()
        for request_id, start, end, samples in zip(
            step.request_ids, step.starts.tolist(), ends, step.samples.tolist(), strict=True
        ):
            if start < num_computed.get(request_id, 0):
                recomputed.add(request_id)
            num_computed[request_id] = end
            if not samples or step.done_s > trace.finished_s.get(request_id, math.inf):
                continue
            if request_id in last_s:
                gaps.append(Gap(request_id, last_s[request_id], step.done_s, request_id in recomputed))
                recomputed.discard(request_id)
            first_s.setdefault(request_id, step.done_s)
            last_s[request_id] = step.done_s
    return gaps, first_s


def token_gaps(
    source: Trace | Engine | Recorded, names: Mapping[str, str] | None = None, *, most_requests: int = 8
) -> Drawing:
    """A row for each request, a bar for each of its tokens but the first: where it stands is when the token came, how
    high it is, how long after the one before; heights are logarithmic, from a tenth of the median to the longest gap.
    The dashed lines are the 50th and 99th percentile of all gaps.

    Args:
        source: what has steps.
        names: replace request ids.
        most_requests: of more requests, those with the longest gaps are drawn; the numbers are always those of all.

    Raises:
        ValueError: there are no steps, or no request has two tokens.
    """
    trace = find_trace(source)
    gaps, first_s = find_gaps(trace)
    if not gaps:
        raise ValueError("no request of this trace has two tokens")
    by_request: dict[str, list[Gap]] = {}
    for gap in gaps:
        by_request.setdefault(gap.request_id, []).append(gap)
    longest = {r: max(gap.duration_s for gap in mine) for r, mine in by_request.items()}
    drawn = sorted(longest, key=lambda r: -longest[r])[:most_requests]
    drawn.sort(key=lambda r: (trace.arrivals_s.get(r, first_s[r]), first_s[r]))
    names = name_all(drawn, names)
    p50, p99 = _percentiles(gaps)
    most = max(longest.values())

    def height(seconds: float) -> float:
        low = p50 / 10 or 1e-9
        return HEIGHT * math.log(max(seconds / low, 1)) / math.log(max(most / low, 2))

    begin = min(trace.arrivals_s.get(r, first_s[r]) for r in drawn)
    end = max(by_request[r][-1].end_s for r in drawn)
    num_recomputed = sum(gap.is_recomputed for gap in gaps)

    parts = [_legend(has_recomputed=num_recomputed > 0)]
    numbers = f"p50 {_ms(p50)}, p99 {_ms(p99)}, longest {_ms(most)}"
    parts.append(text(0, LINE + 17, f"log scale; dashed: {numbers}"))
    top = 2 * LINE + 8
    if len(drawn) < len(by_request):
        parts.append(text(0, top + 9, f"{len(drawn)} of {len(by_request)} requests, those with the longest gaps"))
        top += LINE
    across = (WIDTH - 2) / ((end - begin) or 1.0)
    for row, request_id in enumerate(drawn):
        y, base = top + row * ROW, top + row * ROW + LINE + HEIGHT
        mine = by_request[request_id]
        parts.append(text(0, y + 17, names[request_id], weight=600))
        parts.append(text(WIDTH, y + 17, "p50 {}, p99 {}".format(*map(_ms, _percentiles(mine))), anchor="end"))
        for level in (base - height(p50), base - height(p99)):
            parts.append(f'<g opacity=".5">{line(0, level, WIDTH, level, dash="2 5")}</g>')
        arrival = (trace.arrivals_s.get(request_id, begin) - begin) * across
        parts.append(line(arrival, base, (mine[-1].end_s - begin) * across + 2, base))
        parts.append(_bar("prefill", (first_s[request_id] - begin) * across - 3, base, 18, width=5))
        for gap in mine:
            state = "preempted" if gap.is_recomputed else "decode"
            parts.append(_bar(state, (gap.end_s - begin) * across, base, height(gap.duration_s)))
    base = top + len(drawn) * ROW
    parts.append(axis("0", _ms(end - begin), base, WIDTH))
    alt = f"Gaps between the tokens of {len(by_request)} requests over {_ms(end - begin)}: {len(gaps)} gaps, {numbers}"
    alt += f"; in {num_recomputed} of them the request was preempted." if num_recomputed else "."
    if len(drawn) < len(by_request):
        alt += f" {len(drawn)} requests are drawn."
    return Drawing("".join(parts), WIDTH, base + 26, alt)


def _percentiles(gaps: Sequence[Gap]) -> tuple[float, float]:
    p50, p99 = np.percentile([gap.duration_s for gap in gaps], [50, 99])
    return float(p50), float(p99)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _bar(state: str, x: float, base: float, height: float, width: float = 2) -> str:
    size = f'width="{width:g}" height="{max(height, 1):.1f}"'
    return f'<rect x="{x:.1f}" y="{base - max(height, 1):.1f}" {size} fill="{color(state)}"/>'


def _legend(*, has_recomputed: bool) -> str:
    entries = [("prefill", "first token"), ("decode", "gap"), ("preempted", "gap with a preemption")]
    parts, x = [], 0.0
    for state, words in entries[: 3 if has_recomputed else 2]:
        parts.append(cell(state, x, 2, 20, "") + text(x + 28, 17, words))
        x += 44 + 8 * len(words)
    return "".join(parts)
