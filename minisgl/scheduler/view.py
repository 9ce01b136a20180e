"""The whole state of a scheduler: in text for `minisgl replay` and for readers, as plain values for the live page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from minisgl.kv_cache import KVCacheManager, Node
from minisgl.request import Request
from minisgl.scheduler.scheduler import Scheduler

MOST_TOKENS = 8  # of a node that are shown
MOST_SHOWN = 1000  # requests of a kind, and nodes


def describe(scheduler: Scheduler) -> str:
    """Queue, rows, pages and tree, one thing a line."""
    return "\n".join([*_requests(scheduler), *_pages(scheduler.kv), *_tree(scheduler.kv)])


def snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """The same as values that any encoder knows, at most `MOST_SHOWN` of each kind.

    ``waiting``, ``running`` and ``retiring`` requests with their rows and pages; ``tree``: its nodes, each a child of
    the last one before it whose ``depth`` is less by one; ``in_transit``: page ids. Pages named nowhere are free.
    """
    kv = scheduler.kv
    return {
        "page_size": kv.page_size,
        "num_pages": kv.num_pages - 1,
        **{
            name: [_request(scheduler, request) for request in requests[:MOST_SHOWN]]
            for name, requests in (
                ("waiting", scheduler.waiting),
                ("running", scheduler.running),
                ("retiring", scheduler.retiring),
            )
        },
        "tree": [
            {
                "depth": depth,
                "salt": node.salt if node.parent is None else None,
                "token_ids": node.tokens[:MOST_TOKENS].tolist(),
                "num_tokens": len(node.tokens),
                "pages": node.pages.tolist(),
                "refs": node.ref_count,
            }
            for node, depth in islice(_nodes(kv), MOST_SHOWN)
        ],
        "in_transit": kv.in_transit_page_ids.tolist(),
    }


def _request(scheduler: Scheduler, request: Request) -> dict[str, Any]:
    values = {
        "id": request.request_id,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens or 0,
        "num_output_tokens": request.num_output_tokens,
        "max_tokens": request.max_tokens,
        "status": request.status.value,
    }
    if request.row is None:
        return values
    holding = scheduler.rows.holding(request.row)
    return {
        **values,
        "row": request.row,
        "num_computed": int(scheduler.rows.num_computed[request.row]),
        "pages": holding.page_ids.tolist(),
        "num_shared_pages": holding.num_shared_pages,
    }


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


def _tree(kv: KVCacheManager) -> Iterator[str]:
    yield "tree:"
    for node, depth in _nodes(kv):
        ids = node.tokens[:MOST_TOKENS].tolist()
        more = f" and {len(node.tokens) - MOST_TOKENS} more" if len(node.tokens) > MOST_TOKENS else ""
        label = f"root, salt {node.salt!r}" if node.parent is None else f"{ids}{more} on {node.pages.tolist()}"
        yield f"{'  ' * (depth + 1)}{label} refs={node.ref_count}"


def _nodes(kv: KVCacheManager) -> Iterator[tuple[Node, int]]:
    """All nodes, each before its children, with their depths; roots have 0."""
    stack = [(node, 0) for node in kv.tree.nodes() if node.parent is None]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack += [(child, depth + 1) for child in reversed(node.children.values())]
