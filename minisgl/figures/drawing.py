"""A picture that the book shows: inline SVG that follows the page's theme, with the text that says what it shows."""

from __future__ import annotations

import io
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from minisgl.figures.style import STATES, color


@dataclass(frozen=True)
class Drawing:
    """An SVG of ``width`` x ``height`` user units and its alternative text ``alt``. Text and lines that set no colour
    take the page's (``currentColor``)."""

    body: str
    width: float
    height: float
    alt: str

    def __post_init__(self) -> None:
        if not self.alt.strip():
            raise ValueError("a drawing must say in alt what it shows")

    @property
    def svg(self) -> str:
        """The picture as one SVG element, to stand inside a page."""
        return self._svg("")

    def save(self, path: str | Path) -> None:
        """Write a file of its own, for `<img>`; it follows the reader's light or dark preference."""
        theme = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
        Path(path).write_text(self._svg(theme) + "\n", encoding="utf-8")

    def _svg(self, head: str) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="sgl-figure" role="img" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="system-ui, sans-serif" fill="currentColor" '
            f'style="max-width:{self.width:g}px"><title>{escape(self.alt)}</title>{head}{self.body}</svg>'
        )

    def _repr_html_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Drawing({self.alt!r})"


def from_matplotlib(figure: Any, alt: str) -> Drawing:
    """A matplotlib ``figure``, drawn under `matplotlib_style`, as a `Drawing`: black becomes the page's text colour
    and the states' colours become the site's variables. Closes the figure."""
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    svg = buffer.getvalue()
    start = svg.index("<svg")
    opening, body = svg[start : svg.index(">", start)], svg[svg.index(">", start) + 1 : svg.rindex("</svg>")]
    width, height = (float(n) for n in opening.split('viewBox="0 0 ')[1].split('"')[0].split())
    body = body.replace("#000000", "currentColor").replace("xlink:href", "href")
    for name, state in STATES.items():
        body = body.replace(state.color, color(name))
    scale = 4 / 3  # matplotlib's points to CSS pixels
    return Drawing(f'<g transform="scale({scale:.4f})">{body}</g>', width * scale, height * scale, alt)
