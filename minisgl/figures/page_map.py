"""The pool of KV pages: who has which. Chapter 3 shows this picture, and whoever looks for a leak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import LINE, PAGE_LOOKS, WIDTH, page_cells, page_ink, page_legend, text
from minisgl.figures.source import Engine, Recorded, find_scheduler, name_all
from minisgl.scheduler.scheduler import Scheduler

CELL = 22
MANY_OWNERS = 8  # beyond these there are no letters
LOWEST, SMALLEST = 640, 2.0  # a larger pool has smaller cells, until it is as high as this


def page_states(scheduler: Scheduler) -> tuple[list[str], list[list[str]]]:
    """The state of each page, a key of `PAGE_LOOKS`, and the ids of the requests that hold it, by arrival.

    It is found from what allocator, tree and holdings say, so a page that none or two of them claim is ``"lost"``.
    """
    kv = scheduler.kv
    claims: list[list[str]] = [[] for _ in range(kv.num_pages)]
    owners: list[list[str]] = [[] for _ in range(kv.num_pages)]
    for page in kv.allocator.free_pages.tolist():
        claims[page].append("free")
    for node in kv.tree.nodes():
        for page in node.pages.tolist():
            claims[page].append("locked" if node.ref_count else "cached")
    for request in sorted((*scheduler.running, *scheduler.retiring), key=lambda r: r.arrival):
        assert request.row is not None
        holding = scheduler.rows.holding(request.row)
        for i, page in enumerate(holding.page_ids.tolist()):
            owners[page].append(request.request_id)
            if i >= holding.num_shared_pages:
                claims[page].append("private")
    for page in kv.in_transit_page_ids.tolist():
        claims[page].append("in transit")
    states = [claim[0] if len(claim) == 1 else "lost" for claim in claims]
    states[0] = "lost" if claims[0] else "reserved"
    return states, owners


def page_map(
    source: Scheduler | Engine | Recorded, *, step: int | None = None, names: Mapping[str, str] | None = None
) -> Drawing:
    """A cell for each page of the pool, in the order of their numbers; ``step`` chooses a state of a flight record.

    Filled cells are in use, hollow ones can be given out. With few requests, letters tell whose a page is, and a number
    how many share it. ``names`` replaces request ids.

    Raises:
        ValueError: as `find_scheduler`.
    """
    scheduler = find_scheduler(source, step)
    states, owners = page_states(scheduler)
    holders = list(dict.fromkeys(owner for page in owners for owner in page))
    holders.sort(key=lambda r: min(q.arrival for q in (*scheduler.running, *scheduler.retiring) if q.request_id == r))
    names = name_all(holders, names)
    letters = dict(zip(holders, "ABCDEFGH", strict=False)) if len(holders) <= MANY_OWNERS else {}

    counts = Counter(states)
    parts, top = [], 0
    head, height = page_legend([(state, f"{counts[state]} {state}") for state in PAGE_LOOKS if counts[state]])
    parts.append(head)
    top += height + 10

    left = 12 + 10 * len(str(len(states) - 1))  # room for the number of a line's first page
    unit = float(CELL)
    while unit > SMALLEST and -(-len(states) // int((WIDTH - left) / unit)) * unit > LOWEST:
        unit -= 0.5
    columns = int((WIDTH - left) / unit)
    places = [(left + page % columns * unit, top + page // columns * unit) for page in range(len(states))]
    for state in PAGE_LOOKS:
        if counts[state]:
            mine = [place for place, its in zip(places, states, strict=True) if its == state]
            parts.append(page_cells(state, mine, unit, unit))
    lines_apart = max(1, round(LINE / unit))
    for first in range(0, len(states), columns * lines_apart):
        parts.append(text(left - 6, top + first // columns * unit + min(unit, CELL) / 2 + 5, str(first), anchor="end"))
    if unit == CELL:
        for (x, y), state, holding in zip(places, states, owners, strict=True):
            mark = PAGE_LOOKS[state].symbol
            if holding and letters:
                mark = letters[holding[0]] if len(holding) == 1 else str(len(holding))
            parts.append(text(x + CELL / 2, y + 16, mark, anchor="middle", fill=page_ink(state)))
    y = top + -(-len(states) // columns) * unit + 8

    story = []
    for request_id in holders:
        held = [state for state, holding in zip(states, owners, strict=True) if request_id in holding]
        what = f"{held.count('private')} private and {len(held) - held.count('private')} shared"
        is_leaving = any(r.request_id == request_id for r in scheduler.retiring)
        what += ", leaving" if is_leaving else ""
        story.append(f"{names[request_id]}: {what}")
        if letters:
            parts.append(text(0, y + 17, letters[request_id], weight=600))
            parts.append(text(22, y + 17, story[-1]))
            y += LINE
    if letters and any(len(holding) > 1 for holding in owners):
        parts.append(text(0, y + 17, "2, 3, … on a page: so many of them share it"))
        y += LINE
    alt = f"Map of the pool, {len(states)} pages of {scheduler.kv.page_size} tokens: "
    alt += ", ".join(f"{counts[state]} {state}" for state in PAGE_LOOKS if counts[state]) + "."
    if letters:
        alt += " Pages held by " + "; ".join(story) + "."
    elif holders:
        alt += f" {len(holders)} requests hold pages."
    return Drawing("".join(parts), WIDTH, y + 6, alt)
