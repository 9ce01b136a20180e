"""`KVCacheManager`: the only owner of pages.

Every page but page 0 is in exactly one state: free, the tree's, private to a `Holding`, or in transit (given up while a
launched step may still touch it). `check` proves it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from minisgl.kv_cache.pages import PageAllocator
from minisgl.kv_cache.radix_tree import Match, Node, RadixTree
from minisgl.utils import Int32Array, ceil_div


@dataclass(slots=True, eq=False)
class Holding:
    """The pages that one request holds, written only by the manager.

    Args:
        node: the tree's node where the shared pages end; locked.
        num_shared_pages: the first so many pages are the tree's; the others are private.
        num_cached_tokens: tokens that were there when the holding was opened.
    """

    node: Node
    num_shared_pages: int
    num_cached_tokens: int
    _pages: Int32Array
    _num_pages: int

    @property
    def page_ids(self) -> Int32Array:
        """``[num_pages]`` int32, the request's pages in order: a view."""
        return self._pages[: self._num_pages]

    @property
    def num_pages(self) -> int:
        """How many pages it has."""
        return self._num_pages

    def _append(self, page_ids: Int32Array) -> None:
        need = self._num_pages + len(page_ids)
        if need > len(self._pages):
            pages = np.empty(max(need, 2 * len(self._pages)), np.int32)
            pages[: self._num_pages] = self.page_ids
            self._pages = pages
        self._pages[self._num_pages : need] = page_ids
        self._num_pages = need


class KVCacheManager:
    """Gives pages to requests, remembers what the pages of ended requests hold, and takes those back when it must.

    Args:
        num_pages: pages in the pool, the reserved page 0 among them.
        page_size: tokens in a page.
        prefix_cache: whether pages outlive their request.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTree(page_size)
        self._holdings: set[Holding] = set()
        self._in_transit: deque[tuple[int, Int32Array]] = deque()  # (last launched step that may touch them, pages)
        self._copies: list[tuple[int, int]] = []
        self._copy_sources: list[Node] = []  # locked until their copy is launched

    @property
    def num_available_pages(self) -> int:
        """Pages that `grow` could still give: free ones and those that the tree would let go."""
        return self.allocator.num_free + self.tree.num_evictable_pages

    @property
    def in_transit_page_ids(self) -> Int32Array:
        """int32, pages given up that a launched step may still touch."""
        return np.concatenate([np.zeros(0, np.int32), *(pages for _, pages in self._in_transit)])

    @property
    def num_in_transit_pages(self) -> int:
        """Pages given up that a launched step may still touch."""
        return sum(len(pages) for _, pages in self._in_transit)

    def num_pages_held_by(self, holdings: Iterable[Holding]) -> int:
        """Pages that become available when all these are closed: private ones, and shared ones that no other holds."""
        num_private, refs = 0, dict[Node, int]()
        for holding in holdings:
            num_private += holding.num_pages - holding.num_shared_pages
            at: Node | None = holding.node
            while at is not None:
                refs[at] = refs.get(at, at.ref_count) - 1
                at = at.parent
        return num_private + sum(len(node.pages) for node, others in refs.items() if not others)

    def match(self, token_ids: Int32Array, *, salt: str | None = None) -> Match:
        """The longest cached prefix of ``token_ids``; nothing is held by asking, so `open` must follow at once."""
        if not self.prefix_cache:
            return Match(self.tree.root(salt), np.zeros(0, np.int32), 0)
        return self.tree.match(token_ids, salt=salt)

    def open(self, match: Match, num_tokens: int, *, min_available: int = 0) -> Holding | None:
        """Hold the matched pages and room for ``num_tokens`` tokens in all. None, and nothing held, if that does not
        fit, or if fewer than ``min_available`` pages are available once the matched ones are locked.

        A page that begins like the tokens behind the match is copied (`take_copies`), if there is a page for the copy.
        """
        self.tree.lock(match.node)
        holding = Holding(match.node, len(match.page_ids), match.num_tokens, match.page_ids.copy(), len(match.page_ids))
        missing = max(0, ceil_div(num_tokens, self.page_size) - holding.num_pages)
        if max(missing, min_available) > self.num_available_pages:
            self.tree.unlock(match.node)
            return None
        self._holdings.add(holding)
        if match.partial_node is not None:
            self._copy_on_write(holding, match.partial_node, match.num_partial_tokens, missing)
        fits = self.grow(holding, num_tokens)
        assert fits
        return holding

    def _copy_on_write(self, holding: Holding, source: Node, num_tokens: int, missing: int) -> None:
        """Begin the next page as a copy. The source stays locked until `take_copies`; where that leaves too little for
        the request itself, there is no copy."""
        self.tree.lock(source)
        if max(missing, 1) > self.num_available_pages:
            self.tree.unlock(source)
            return
        page = self._allocate(1)
        self._copies.append((int(source.pages[0]), int(page[0])))
        self._copy_sources.append(source)
        holding._append(page)
        holding.num_cached_tokens += num_tokens

    def take_copies(self) -> Int32Array:
        """``[C, 2]`` int32, source and destination of the copies that the step planned now must make first. Called once
        a step, when its plan is complete: from here on the order of launches protects the sources."""
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        for node in self._copy_sources:
            self.tree.unlock(node)
        self._copies, self._copy_sources = [], []
        return copies

    def grow(self, holding: Holding, num_tokens: int) -> bool:
        """Room for ``num_tokens`` tokens in all. False, and nothing changed, if the pool has too few pages."""
        missing = ceil_div(num_tokens, self.page_size) - holding.num_pages
        if missing <= 0:
            return True
        if missing > self.num_available_pages:
            return False
        holding._append(self._allocate(missing))
        return True

    def _allocate(self, num_pages: int) -> Int32Array:
        missing = num_pages - self.allocator.num_free
        if missing > 0:
            self.allocator.free(self.tree.evict(missing))
        return self.allocator.allocate(num_pages)

    def register(self, holding: Holding, token_ids: Int32Array, num_computed: int, *, in_use_until: int) -> int | None:
        """Share the full pages among the first ``num_computed`` tokens. Where another request computed the same at the
        same time, the tree's pages take the place of this one's.

        Args:
            token_ids: the request's tokens, at least ``num_computed`` of them.
            in_use_until: last launched step that names this request: until then its duplicates are in transit.

        Returns:
            Index of the first page that changed, or None.
        """
        first, end, size = holding.num_shared_pages, num_computed // self.page_size, self.page_size
        if not self.prefix_cache or end <= first:
            return None
        node, existing = self.tree.insert(
            holding.node, token_ids[first * size : end * size], holding.page_ids[first:end]
        )
        self.tree.lock(node)
        self.tree.unlock(holding.node)
        holding.node, holding.num_shared_pages = node, end
        if not len(existing):
            return None
        mine = holding.page_ids[first : first + len(existing)]
        self._in_transit.append((in_use_until, mine.copy()))
        mine[:] = existing
        return first

    def close(self, holding: Holding, token_ids: Int32Array, num_computed: int) -> None:
        """Give everything back, once no launched step names the request. What its first ``num_computed`` tokens left in
        full pages is shared, and the last page as a tail."""
        self.register(holding, token_ids, num_computed, in_use_until=0)
        private = holding.page_ids[holding.num_shared_pages :]
        begin = holding.num_shared_pages * self.page_size
        if self.prefix_cache and len(private) and begin < num_computed:
            tail = token_ids[begin:num_computed]
            if self.tree.insert_tail(holding.node, tail, int(private[0])):
                private = private[1:]
        self.allocator.free(private)
        self.tree.unlock(holding.node)
        self._holdings.remove(holding)
        self.step_done(0)

    def step_done(self, step_id: int) -> None:
        """Step ``step_id``, and with it all before it, is done on the device: what waited for it is free."""
        waiting: deque[tuple[int, Int32Array]] = deque()
        for last_step, pages in self._in_transit:
            if last_step <= step_id:
                self.allocator.free(pages)
            else:
                waiting.append((last_step, pages))
        self._in_transit = waiting

    def flush(self) -> int:
        """Forget every cached prefix that no running request uses; returns how many pages that freed."""
        pages = self.tree.evict(self.tree.num_evictable_pages)
        self.allocator.free(pages)
        return len(pages)

    def check(self) -> None:
        """Assert the invariants: each page but page 0 is in exactly one state, sums agree, and a node's ``ref_count``
        is the number of locks below it."""
        self.tree.check()
        states = [self.allocator.free_pages, *(pages for _, pages in self._in_transit)]
        states += [node.pages for node in self.tree.nodes()]
        states += [holding.page_ids[holding.num_shared_pages :] for holding in self._holdings]
        count = np.bincount(np.concatenate(states), minlength=self.num_pages)
        assert len(count) == self.num_pages and count[0] == 0 and (count[1:] == 1).all(), (
            f"pages in no state: {np.flatnonzero(count[1:] == 0) + 1}, in more than one: {np.flatnonzero(count > 1)}"
        )
        refs: dict[int, int] = {}
        for locked in [*(h.node for h in self._holdings), *self._copy_sources]:
            at: Node | None = locked
            while at is not None:
                refs[id(at)] = refs.get(id(at), 0) + 1
                at = at.parent
        for node in self.tree.nodes():
            assert node.ref_count == refs.pop(id(node), 0), f"{node}: wrong ref_count"
        assert not refs, "a lock on a node that is not in the tree"
        for holding in self._holdings:
            shared: list[int] = []
            at = holding.node
            while at is not None:
                shared[:0] = at.pages.tolist()
                at = at.parent
            assert shared == holding.page_ids[: holding.num_shared_pages].tolist(), "a holding strayed from its path"
