"""One palette and one set of symbols for the whole book; `book/_static/book.css` repeats them, a test compares.

A state of a token or page keeps its colour, letter and name in every figure of every chapter. The colours keep a
contrast of 3 against both of the site's backgrounds and stay apart under protanopia and deuteranopia; the letter
carries the meaning where colour cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class State:
    """How one state is drawn: fill ``color``, the ``ink`` that is readable on it, a one-letter ``symbol``."""

    color: str
    ink: str
    symbol: str
    meaning: str


STATES: dict[str, State] = {
    "prefill": State("#4a88dd", "#000000", "P", "prompt tokens that this step computes"),
    "decode": State("#c98500", "#000000", "D", "one new token of a running request"),
    "cached": State("#2a9d72", "#000000", "C", "KV that came from the prefix cache"),
    "private": State("#7452ff", "#ffffff", "R", "a page that belongs to one running request"),
    "free": State("#717c88", "#000000", "·", "a page or slot that nobody owns"),
    "evicted": State("#bf3fb0", "#ffffff", "×", "a cached page given up for a new owner"),
    "preempted": State("#b9502f", "#ffffff", "!", "a running request sent back to wait; its KV is dropped"),
}


def color(state: str) -> str:
    """The colour of ``state`` for an SVG: the site's variable, and the same value where there is no style sheet."""
    return f"var(--sgl-{state}, {STATES[state].color})"


def ink(state: str) -> str:
    """The colour of text on ``color(state)``."""
    return f"var(--sgl-{state}-ink, {STATES[state].ink})"


@contextmanager
def matplotlib_style() -> Iterator[None]:
    """Draw with matplotlib in the book's style: transparent, real text, the states' colours in order."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context(
        {
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "axes.prop_cycle": cycler(color=[s.color for s in STATES.values()], marker=list("osD^vXP")),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.figsize": (7.0, 3.2),
            "font.size": 12,
            "legend.frameon": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "minisgl",
        }
    ):
        yield
