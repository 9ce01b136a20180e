"""`describe`: the whole state of a scheduler, in text, for `minisgl replay` and for readers."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.kv_cache import KVCacheManager, Node
from minisgl.scheduler.scheduler import Scheduler


def describe(scheduler: Scheduler) -> str:
    """Queue, rows, pages and tree, one thing a line."""
    return "\n".join([*_requests(scheduler), *_pages(scheduler.kv), *_tree(scheduler.kv)])


def _requests(scheduler: Scheduler) -> Iterator[str]:
    rows = scheduler.rows
    yield f"waiting: {len(scheduler.waiting)}"
    for request in scheduler.waiting:
        yield f"  {request!r}"
    for name, requests in (("running", scheduler.running), ("retiring", scheduler.retiring)):
        yield f"{name}: {len(requests)}"
        for request in requests:
            row = request.row
            assert row is not None
            holding = rows.holding(row)
            shared = holding.page_ids[: holding.num_shared_pages].tolist()
            private = holding.page_ids[holding.num_shared_pages :].tolist()
            yield (
                f"  {request!r} computed={rows.num_computed[row]}/{rows.num_tokens[row]} "
                f"pages: shared={shared} private={private}"
            )


def _pages(kv: KVCacheManager) -> Iterator[str]:
    yield (
        f"pages of {kv.page_size}: {kv.num_pages - 1} in the pool, {kv.allocator.num_free} free, "
        f"{kv.tree.num_pages} in the tree ({kv.tree.num_locked_pages} locked), {kv.num_in_transit_pages} in transit"
    )


def _tree(kv: KVCacheManager, most_tokens: int = 8) -> Iterator[str]:
    yield "tree:"
    stack: list[tuple[Node, int]] = [(node, 1) for node in kv.tree.nodes() if node.parent is None]
    while stack:
        node, depth = stack.pop()
        ids = node.tokens[:most_tokens].tolist()
        more = f" and {len(node.tokens) - most_tokens} more" if len(node.tokens) > most_tokens else ""
        label = f"root, salt {node.salt!r}" if node.parent is None else f"{ids}{more} on {node.pages.tolist()}"
        yield f"{'  ' * depth}{label} refs={node.ref_count}"
        stack += [(child, depth + 1) for child in reversed(node.children.values())]
