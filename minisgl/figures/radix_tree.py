"""The prefix cache as it stands: a line for each edge of the radix tree. Chapter 3 shows this picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import LINE, WIDTH, page_cells, page_ink, page_legend, text
from minisgl.figures.source import Engine, Recorded, find_scheduler
from minisgl.kv_cache import Node
from minisgl.scheduler.scheduler import Scheduler
from minisgl.utils import Int32Array

INDENT, DEEPEST = 20, 8  # of a level; levels below this one are not moved further
CELL_WIDTH, CELL_HEIGHT = 36, 22
CHARACTER = 9.1  # width of one of code
MOST_PAGES = 24  # of one edge; the others are a number


class Decoder(Protocol):
    """What a `Tokenizer` is here."""

    def decode(self, token_ids: Int32Array, skip_special_tokens: bool = True) -> str:
        """The text of these ids."""


def radix_tree(
    source: Scheduler | Engine | Recorded,
    *,
    step: int | None = None,
    tokenizer: Decoder | None = None,
    most_nodes: int = 24,
) -> Drawing:
    """Each node with the tokens of the edge that leads to it, their pages, and how many locks lie on it or below it.

    Filled pages are locked, for a running request uses them; hollow ones may be evicted.

    Args:
        source: what has a tree.
        step: of a flight record: the step after which to look; None: the end.
        tokenizer: shows the tokens as text; without one they are numbers.
        most_nodes: further ones are only counted.

    Raises:
        ValueError: as `find_scheduler`.
    """
    tree = find_scheduler(source, step).kv.tree
    nodes = [(node, depth) for root in tree.nodes() if root.parent is None for node, depth in _walk(root)]
    inner = [node for node, _ in nodes if node.parent is not None]
    tails = [node for node in inner if len(node.tokens) % tree.page_size]

    counts = {"locked": tree.num_locked_pages, "cached": tree.num_evictable_pages}
    head, y = page_legend([(state, f"{n} {state}") for state, n in counts.items() if n])
    parts = [head] if tree.num_pages else []
    y = y + 6 if parts else 0
    below: dict[Node, float] = {}  # where the line from a node to its next child begins
    for node, depth in nodes[:most_nodes]:
        x = INDENT * min(depth, DEEPEST)
        note = f"{node.ref_count} {'lock' if node.ref_count == 1 else 'locks'}"
        if node.parent is None:
            parts.append(text(x, y + 17, "root" if node.salt is None else f"root of salt {node.salt!r}", weight=600))
        else:
            corner = f"M{x - INDENT + 7.5} {below[node.parent] - 0.5}V{y + 11.5}H{x - 3}"
            parts.append(f'<path d="{corner}" stroke="currentColor" fill="none"/>')
            below[node.parent] = y + 12
            note = f"{'tail, ' if len(node.tokens) % tree.page_size else ''}{len(node.tokens)} tokens, {note}"
            room = int((WIDTH - x - 8.2 * len(note) - 8) / CHARACTER)
            parts.append(text(x, y + 17, _run(node.tokens, tokenizer, room), is_code=True))
        parts.append(text(WIDTH, y + 17, note, anchor="end"))
        cells, height = _pages(node, x, y + LINE)
        parts.append(cells)
        y += LINE + height
        below[node] = y
        y += 4
    left_out = [node for node, _ in nodes[most_nodes:]]
    if left_out:
        num_pages = sum(len(node.pages) for node in left_out)
        parts.append(text(0, y + 17, f"and {len(left_out)} more nodes with {num_pages} pages"))
        y += LINE
    if not nodes:
        parts.append(text(0, y + 17, "nothing is cached"))
        y += LINE
    alt = f"Radix tree of {len(inner)} nodes: {tree.num_pages} pages of {tree.page_size} tokens, "
    alt += f"{tree.num_locked_pages} of them locked and {tree.num_evictable_pages} that may be evicted; "
    alt += f"{len(tails)} of the nodes are tails."
    return Drawing("".join(parts), WIDTH, y + 6, alt)


def _walk(node: Node, depth: int = 0) -> Iterator[tuple[Node, int]]:
    """The node and all below it, each before its children."""
    stack = [(node, depth)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack += [(child, depth + 1) for child in reversed(node.children.values())]


def _run(token_ids: Int32Array, tokenizer: Decoder | None, room: int) -> str:
    """A run of tokens; where there is no room for all of it, its beginning and its end."""
    if tokenizer is None:
        words = " ".join(map(str, token_ids.tolist()))
    else:
        words = tokenizer.decode(token_ids, skip_special_tokens=False).replace("\n", "⏎").replace("\t", " ")
    if len(words) <= room:
        return words
    end = max(room // 3, 1)
    return f"{words[: max(room - end - 1, 0)]}…{words[-end:]}"


def _pages(node: Node, x: float, y: float) -> tuple[str, int]:
    """The cells of a node's pages, with their numbers, and the height of these lines."""
    state = "locked" if node.ref_count else "cached"
    pages = node.pages.tolist()
    columns = int((WIDTH - x) / CELL_WIDTH)
    shown = pages if len(pages) <= MOST_PAGES else pages[: MOST_PAGES - 1]
    places = [(x + i % columns * CELL_WIDTH, y + i // columns * CELL_HEIGHT) for i in range(len(shown) + 1)]
    parts = [page_cells(state, places[:-1], CELL_WIDTH, CELL_HEIGHT)] if shown else []
    for page, (at, down) in zip(shown, places, strict=False):
        parts.append(text(at + CELL_WIDTH / 2, down + 16, str(page), anchor="middle", fill=page_ink(state)))
    if len(shown) < len(pages):
        at, down = places[-1]
        parts.append(text(at + 4, down + 16, f"and {len(pages) - len(shown)} more"))
    return "".join(parts), -(-len(shown) // columns) * CELL_HEIGHT
