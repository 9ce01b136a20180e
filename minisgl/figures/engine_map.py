"""The map of the engine on the book's home page: one box for each room of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Box:
    """A room, what it does, the chapter that tells its story, and its place on the map."""

    room: str
    does: str
    chapter: str
    x: int
    y: int
    width: int


WIDTH, HEIGHT, BOX_HEIGHT = 480, 656, 76
BOXES = (
    Box("cluster", "many engines: routing, prefill/decode split", "chapters 6–10", 10, 10, 460),
    Box("server", "text to token ids and back; HTTP", "chapter 1", 10, 122, 460),
    Box("scheduler", "who runs in this step", "chapter 2", 10, 234, 215),
    Box("kv_cache", "who owns which page", "chapter 3", 255, 234, 215),
    Box("engine", "the plan becomes device work", "chapter 4", 10, 346, 460),
    Box("model", "layers, weights, ranks", "chapter 5", 10, 458, 215),
    Box("kernels", "plain torch first", "chapter 5", 255, 458, 215),
    Box("figures", "pictures of real runs", "every chapter", 10, 570, 215),
    Box("benchmark", "measurements", "every chapter", 255, 570, 215),
)
# (x1, y1, x2, y2, label): what crosses the border between two rooms.
ARROWS = (
    (117, 86, 117, 120, "requests"),
    (117, 198, 117, 232, "token ids"),
    (225, 272, 253, 272, ""),
    (117, 310, 117, 344, "plan"),
    (117, 422, 117, 456, "batch"),
    (225, 496, 253, 496, ""),
    (440, 344, 440, 312, ""),
    (440, 232, 440, 200, "new tokens"),
    (440, 120, 440, 88, "text"),
)


def engine_map(links: Mapping[str, str]) -> str:
    """The map as inline SVG. ``links`` gives a room's or a chapter's address; what has none is not a link."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sgl-figure sgl-map" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="group" aria-label="Map of the engine: one box for each room of the package" '
        f'style="max-width:{WIDTH + 80}px" fill="currentColor" font-family="system-ui, sans-serif">'
        '<defs><marker id="sgl-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>'
    ]
    for x1, y1, x2, y2, label in ARROWS:
        parts.append(f'<path d="M{x1} {y1}L{x2} {y2}" stroke="currentColor" marker-end="url(#sgl-tip)"/>')
        if label:
            anchor, x = ("start", x1 + 10) if x1 < WIDTH / 2 else ("end", x1 - 10)
            y = (y1 + y2) / 2 + 5
            parts.append(f'<text x="{x}" y="{y:g}" font-size="15" text-anchor="{anchor}">{label}</text>')
    for box in BOXES:
        parts.append(
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{BOX_HEIGHT}" rx="6"/>'
            + _text(box, box.room, 25, "sgl-room", links.get(box.room))
            + _text(box, box.does, 46, "", None)
            + _text(box, box.chapter, 66, "sgl-chapter", links.get(box.chapter))
        )
    return "".join(parts) + "</svg>"


def _text(box: Box, text: str, down: int, style: str, link: str | None) -> str:
    svg = f'<text x="{box.x + 12}" y="{box.y + down}" font-size="15" class="{style}">{escape(text)}</text>'
    return f'<a href="{escape(link)}">{svg}</a>' if link else svg
