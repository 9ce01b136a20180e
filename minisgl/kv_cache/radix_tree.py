"""`RadixTree`: which prefixes are cached, and on which pages.

An edge holds a run of tokens as an int32 array, and their pages. Edges are whole pages long, so a prefix is shared page
by page; the one exception is a *tail*, a leaf with a single page that is not full. Children are found by the bytes of
their first page. The tree owns the pages on its edges; nodes on the path of a running request are locked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from minisgl.utils import Int32Array

_EMPTY: Int32Array = np.zeros(0, np.int32)
# How many siblings are looked at for a page that begins alike: a bound on the work of one match.
MAX_PARTIAL_CANDIDATES = 32


@dataclass(slots=True, eq=False)
class Node:
    """The edge that leads here, and what lies below.

    Args:
        tokens: ``[n]`` int32; a multiple of the page size, or less than one page in a tail.
        pages: int32, the pages that hold them.
        parent: None in a root.
        ref_count: locks on this node or below it.
        last_used: the tree's clock when it was last locked or unlocked.
        salt: of a root, its cache salt.
        children: by the bytes of their first page's tokens.
    """

    tokens: Int32Array
    pages: Int32Array
    parent: Node | None
    ref_count: int = 0
    last_used: int = 0
    salt: str | None = None
    children: dict[bytes, Node] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Node({len(self.tokens)} tokens, pages={self.pages.tolist()}, refs={self.ref_count})"


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest cached prefix of some tokens.

    Args:
        node: where it ends.
        page_ids: int32, the full pages of it.
        num_tokens: tokens on these pages.
        partial_node: a node whose first page begins like the tokens that follow, or None.
        num_partial_tokens: how many tokens of that page are the same.
    """

    node: Node
    page_ids: Int32Array
    num_tokens: int
    partial_node: Node | None = None
    num_partial_tokens: int = 0


def _is_evictable(node: Node) -> bool:
    return not node.ref_count and not node.children and len(node.pages) > 0


class RadixTree:
    """Prefixes of token ids and the pages that hold their KV. One root a cache salt, so that tenants never meet.

    Args:
        page_size: tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0  # on all edges
        self.num_locked_pages = 0  # on edges with ref_count > 0
        self._roots: dict[str | None, Node] = {}
        self._clock = 0
        self._num_nodes = 0
        # Leaves that may be evicted: (is no tail, last_used, serial, node). An entry whose node has changed since is
        # dropped when it comes up, so nothing is ever searched for.
        self._heap: list[tuple[bool, int, int, Node]] = []
        self._serial = 0

    @property
    def num_evictable_pages(self) -> int:
        """Pages that `evict` could free."""
        return self.num_pages - self.num_locked_pages

    def root(self, salt: str | None = None) -> Node:
        """The root of a salt's tree; made on first use."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(_EMPTY, _EMPTY, None, salt=salt)
        return node

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first, roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def match(self, token_ids: Int32Array, *, salt: str | None = None) -> Match:
        """The longest cached prefix of ``token_ids``. Splits an edge where the prefix ends inside it."""
        node, pages = self.root(salt), [_EMPTY]
        node, num_tokens = self._walk(node, token_ids, pages)
        rest = token_ids[num_tokens : num_tokens + self.page_size]
        partial, num_partial = self._most_alike(node, rest)
        return Match(node, np.concatenate(pages), num_tokens, partial, num_partial)

    def insert(self, node: Node, token_ids: Int32Array, page_ids: Int32Array) -> tuple[Node, Int32Array]:
        """Put full pages below ``node``. The tree takes over the pages it did not have.

        Args:
            token_ids: ``[k * page_size]`` int32.
            page_ids: ``[k]`` int32.

        Returns:
            The node where they end, and the tree's own pages for the first of them: those were there before, so the
            caller's pages for them are duplicates, and still the caller's.
        """
        pages = [_EMPTY]
        node, num_tokens = self._walk(node, token_ids, pages)
        existing = np.concatenate(pages)
        if num_tokens < len(token_ids):
            node = self._add(node, token_ids[num_tokens:].copy(), page_ids[len(existing) :].copy())
        return node, existing

    def insert_tail(self, node: Node, token_ids: Int32Array, page_id: int) -> bool:
        """Put a page that is not full below ``node``. False, and the page still the caller's, if one that begins so is
        there already."""
        _, num_alike = self._most_alike(node, token_ids)
        if num_alike == len(token_ids) or token_ids.tobytes() in node.children:  # the first looks at few siblings only
            return False
        tail = self._add(node, token_ids.copy(), np.array([page_id], np.int32))
        self._clock += 1
        tail.last_used = self._clock
        self._push_if_evictable(tail)
        return True

    def lock(self, node: Node) -> None:
        """Keep ``node`` and all above it from being evicted."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            if at.ref_count == 0:
                self.num_locked_pages += len(at.pages)
            at.ref_count += 1
            at.last_used = self._clock
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Take back one `lock`."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            assert at.ref_count > 0, at
            at.ref_count -= 1
            at.last_used = self._clock
            if at.ref_count == 0:
                self.num_locked_pages -= len(at.pages)
                self._push_if_evictable(at)
            at = at.parent

    def evict(self, num_pages: int) -> Int32Array:
        """Up to ``num_pages`` pages, int32, no longer the tree's: tails first, then what was unused longest, from the
        ends of the leaves."""
        evicted, missing = [_EMPTY], num_pages
        while missing > 0 and self._heap:
            _, last_used, _, node = heapq.heappop(self._heap)
            if node.last_used != last_used or not _is_evictable(node):
                continue
            keep = max(0, len(node.pages) - missing)
            evicted.append(node.pages[keep:])
            missing -= len(node.pages) - keep
            self.num_pages -= len(node.pages) - keep
            if keep:
                node.pages = node.pages[:keep]
                node.tokens = node.tokens[: keep * self.page_size]
                self._push_if_evictable(node)
            else:
                self._remove(node)
        return np.concatenate(evicted)

    def _walk(self, node: Node, token_ids: Int32Array, pages: list[Int32Array]) -> tuple[Node, int]:
        """Go down from ``node`` along full pages of ``token_ids``; collect their pages; return where it ends and how
        many tokens that is."""
        size, at = self.page_size, 0
        while len(token_ids) - at >= size:
            child = node.children.get(token_ids[at : at + size].tobytes())
            if child is None:
                break
            num_comparable = min(len(child.tokens), (len(token_ids) - at) // size * size)
            same = child.tokens[:num_comparable] == token_ids[at : at + num_comparable]
            num_same = num_comparable if same.all() else int(same.argmin()) // size * size
            node = child if num_same == len(child.tokens) else self._split(child, num_same)
            pages.append(node.pages)
            at += num_same
            if node is not child:
                break
        return node, at

    def _most_alike(self, node: Node, token_ids: Int32Array) -> tuple[Node | None, int]:
        """The child whose first page shares most tokens with the beginning of ``token_ids`` (less than a page)."""
        best, num_best = None, 0
        if not len(token_ids):
            return best, num_best
        for child in islice(reversed(node.children.values()), MAX_PARTIAL_CANDIDATES):
            if child.tokens[0] != token_ids[0]:
                continue
            n = min(len(child.tokens), len(token_ids), self.page_size)
            same = child.tokens[:n] == token_ids[:n]
            num_same = n if same.all() else int(same.argmin())
            if num_same > num_best:
                best, num_best = child, num_same
        return best, num_best

    def _add(self, parent: Node, token_ids: Int32Array, page_ids: Int32Array) -> Node:
        node = Node(token_ids, page_ids, parent)
        parent.children[token_ids[: self.page_size].tobytes()] = node
        self.num_pages += len(page_ids)
        self._num_nodes += 1
        return node

    def _split(self, node: Node, num_tokens: int) -> Node:
        """Cut an edge; the upper part is a new node, so that whoever holds ``node`` still holds the same end."""
        assert node.parent is not None
        k = num_tokens // self.page_size
        upper = Node(node.tokens[:num_tokens], node.pages[:k], node.parent, node.ref_count, node.last_used)
        node.parent.children[upper.tokens[: self.page_size].tobytes()] = upper
        node.tokens, node.pages, node.parent = node.tokens[num_tokens:], node.pages[k:], upper
        upper.children[node.tokens[: self.page_size].tobytes()] = node
        self._num_nodes += 1
        return upper

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens[: self.page_size].tobytes()]
        self._num_nodes -= 1
        node.pages = _EMPTY  # marks it as gone for entries in the heap
        self._push_if_evictable(node.parent)

    def _push_if_evictable(self, node: Node) -> None:
        if node.ref_count or node.children:
            return
        if node.parent is None:  # an unused root: its salt is forgotten
            del self._roots[node.salt]
            return
        if len(self._heap) > 4 * self._num_nodes + 64:
            self._heap = [e for e in self._heap if e[1] == e[3].last_used and _is_evictable(e[3])]
            heapq.heapify(self._heap)
        self._serial += 1
        is_full = len(node.tokens) >= self.page_size
        heapq.heappush(self._heap, (is_full, node.last_used, self._serial, node))

    def check(self) -> None:
        """Assert that the tree agrees with itself: edges, counts, sums, and that every evictable leaf is known."""
        num_pages = num_locked = 0
        waiting = {id(e[3]) for e in self._heap if e[1] == e[3].last_used}
        for node in self.nodes():
            num_pages += len(node.pages)
            num_locked += len(node.pages) if node.ref_count else 0
            assert node.ref_count >= 0, node
            for key, child in node.children.items():
                assert child.parent is node and key == child.tokens[: self.page_size].tobytes(), child
                assert len(child.pages) > 0 and child.ref_count <= node.ref_count, child
                if len(child.tokens) % self.page_size:
                    assert len(child.tokens) < self.page_size and len(child.pages) == 1, child
                    assert not child.children, child
                else:
                    assert len(child.tokens) == len(child.pages) * self.page_size, child
            if node.parent is not None and not node.children and not node.ref_count:
                assert id(node) in waiting, f"{node} can never be evicted"
        assert num_pages == self.num_pages, (num_pages, self.num_pages)
        assert num_locked == self.num_locked_pages, (num_locked, self.num_locked_pages)
