"""Pages and prefixes: the allocator and the radix tree against slow twins, the manager's rules one by one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.kv_cache import Holding, KVCacheManager, NaivePrefixCache, Node, PageAllocator, RadixTree, radix_tree
from minisgl.utils import Int32Array

MACHINE = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def ints(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)


# ----------------------------------------------------------------------------------------------------------- allocator


class AllocatorMachine(RuleBasedStateMachine):
    """`PageAllocator` against two sets."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(9)
        self.free, self.held = set(range(1, 9)), list[int]()

    @rule(n=st.integers(0, 8))
    def allocate(self, n: int) -> None:
        if n > len(self.free):
            with pytest.raises(AssertionError):
                self.allocator.allocate(n)
            return
        pages = self.allocator.allocate(n).tolist()
        assert len(pages) == n and set(pages) <= self.free  # page 0 is never among them
        self.free -= set(pages)
        self.held += pages

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        self.allocator.free(ints(pages))
        self.free |= set(pages)
        self.held = [page for page in self.held if page not in pages]

    @rule(data=st.data())
    def refuse_what_is_not_held(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([0, *sorted(self.free)]))
        with pytest.raises(AssertionError):
            self.allocator.free(ints([page, *self.held]))

    @rule()
    def refuse_a_page_named_twice(self) -> None:
        for page in self.held:
            with pytest.raises(AssertionError):
                self.allocator.free(ints([page, page]))

    @invariant()
    def agree(self) -> None:
        assert set(self.allocator.free_pages.tolist()) == self.free
        assert self.allocator.num_free == len(self.free)


TestPageAllocator = AllocatorMachine.TestCase
TestPageAllocator.settings = MACHINE


# ---------------------------------------------------------------------------------------------------------- radix tree

Prefix = tuple[str | None, tuple[int, ...]]
TOKENS = st.lists(st.integers(0, 2), max_size=13).map(tuple)
SALTS = st.sampled_from([None, "a"])


class TreeMachine(RuleBasedStateMachine):
    """`RadixTree` against dictionaries of whole prefixes: full pages in a `NaivePrefixCache`, tails beside it."""

    @initialize(page_size=st.integers(1, 4))
    def begin(self, page_size: int) -> None:
        self.size = page_size
        self.tree = RadixTree(page_size)
        self.naive = NaivePrefixCache(page_size)
        self.tails: dict[Prefix, int] = {}
        self.held: list[tuple[Node, Prefix | None]] = []  # locked nodes; the prefix where it may be gone on from
        self.last_used: dict[int, int] = {}
        self.clock = self.num_pages = 0

    # The slow twin.

    @property
    def entries(self) -> dict[Prefix, int]:
        return {**self.naive.pages, **self.tails}

    def parent(self, prefix: Prefix) -> Prefix:
        return prefix[0], prefix[1][: (len(prefix[1]) - 1) // self.size * self.size]

    def children(self, parent: Prefix) -> list[Prefix]:
        return [prefix for prefix in self.entries if self.parent(prefix) == parent]

    def locked(self) -> set[int]:
        return {page for node, _ in self.held for page in path(node)}

    def use(self, node: Node) -> None:
        self.clock += 1
        self.last_used |= dict.fromkeys(path(node), self.clock)

    def evict_one(self) -> int | None:
        """A tail if there is one, else a full page: the one unused longest among those with nothing behind them."""
        locked, inner = self.locked(), {self.parent(prefix) for prefix in self.entries}
        leaves = {prefix: p for prefix, p in self.entries.items() if prefix not in inner and p not in locked}
        if not leaves:
            return None
        prefix = min(leaves, key=lambda prefix: (prefix not in self.tails, self.last_used[leaves[prefix]]))
        self.tails.pop(prefix, None)
        self.naive.forget(leaves[prefix])
        return leaves[prefix]

    # What may be done.

    def new_pages(self, n: int) -> Int32Array:
        self.num_pages += n
        return np.arange(self.num_pages - n + 1, self.num_pages + 1, dtype=np.int32)

    def hold(self, node: Node, prefix: Prefix | None) -> None:
        self.tree.lock(node)
        self.use(node)
        self.held.append((node, prefix))

    @rule(tokens=TOKENS, salt=SALTS)
    def insert(self, tokens: tuple[int, ...], salt: str | None) -> None:
        tokens = tokens[: len(tokens) // self.size * self.size]
        pages = self.new_pages(len(tokens) // self.size)
        node, existing = self.tree.insert(self.tree.root(salt), ints(tokens), pages)
        assert existing.tolist() == self.naive.match(ints(tokens), salt=salt)
        self.naive.insert(ints(tokens), np.concatenate([existing, pages[len(existing) :]]), salt=salt)
        self.hold(node, (salt, tokens))

    @rule(tokens=TOKENS, salt=SALTS, hold=st.booleans())
    def match(self, tokens: tuple[int, ...], salt: str | None, hold: bool) -> None:
        match = self.tree.match(ints(tokens), salt=salt)
        assert match.page_ids.tolist() == self.naive.match(ints(tokens), salt=salt) == path(match.node)
        assert match.num_tokens == len(match.page_ids) * self.size
        rest = tokens[match.num_tokens : match.num_tokens + self.size]
        alike = {
            self.entries[child]: common(child[1][match.num_tokens :], rest)
            for child in self.children((salt, tokens[: match.num_tokens]))
        }
        assert match.num_partial_tokens == max(alike.values(), default=0)
        assert (match.partial_node is not None) == (match.num_partial_tokens > 0)
        if match.partial_node is not None:
            assert alike[int(match.partial_node.pages[0])] == match.num_partial_tokens
            if hold:
                self.hold(match.partial_node, None)
        if hold:
            self.hold(match.node, (salt, tokens[: match.num_tokens]))

    @precondition(lambda self: self.held)
    @rule(tokens=TOKENS, which=st.integers(0, 99))
    def insert_tail(self, tokens: tuple[int, ...], which: int) -> None:
        node, prefix = self.held[which % len(self.held)]
        tokens = tokens[: self.size - 1]
        if prefix is None or not tokens:
            return
        page = self.new_pages(1)
        known = any(child[1][len(prefix[1]) :][: len(tokens)] == tokens for child in self.children(prefix))
        assert self.tree.insert_tail(node, ints(tokens), int(page[0])) == (not known)
        if not known:
            self.tails[prefix[0], prefix[1] + tokens] = int(page[0])
            self.clock += 1
            self.last_used[int(page[0])] = self.clock

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        node, _ = self.held.pop(which % len(self.held))
        self.tree.unlock(node)
        self.use(node)

    @rule(n=st.integers(0, 5))
    def evict(self, n: int) -> None:
        pages = [page for _ in range(n) if (page := self.evict_one()) is not None]
        assert sorted(self.tree.evict(n).tolist()) == sorted(pages)

    @invariant()
    def agree(self) -> None:
        self.tree.check()
        pages = sorted(page for node in self.tree.nodes() for page in node.pages.tolist())
        assert pages == sorted(self.entries.values())
        assert self.tree.num_evictable_pages == len(pages) - len(self.locked())


def path(node: Node | None) -> list[int]:
    """Pages from the root to ``node``."""
    return [] if node is None else [*path(node.parent), *node.pages.tolist()]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TestRadixTree = TreeMachine.TestCase
TestRadixTree.settings = MACHINE


def test_a_tail_that_is_there_already_is_found_among_many() -> None:
    """A match looks at few siblings; an insert must not overwrite the one that it did not look at."""
    tree = RadixTree(4)
    root = tree.root()
    tree.lock(root)
    for token in range(2 * radix_tree.MAX_PARTIAL_CANDIDATES):
        assert tree.insert_tail(root, ints([token, 1]), token + 1)
    assert not tree.insert_tail(root, ints([0, 1]), 999)
    tree.check()


def test_a_salt_is_forgotten_with_its_last_page() -> None:
    tree = RadixTree(1)
    for i in range(50):
        node, _ = tree.insert(tree.root(f"tenant {i}"), ints([1, 2]), ints([2 * i + 1, 2 * i + 2]))
        tree.lock(node)
        tree.unlock(node)
    assert len(list(tree.nodes())) == 100
    assert tree.evict(100).tolist() == [page for i in range(50) for page in (2 * i + 1, 2 * i + 2)]
    assert list(tree.nodes()) == []


@pytest.mark.parametrize("num_leaves", [100, 10_000])
def test_c15_an_eviction_does_not_look_at_the_other_leaves(num_leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C15 as a count: pops and pushes a page, whatever the size of the tree."""
    tree = RadixTree(1)
    for i in range(num_leaves):
        node, _ = tree.insert(tree.root(), ints([i, i]), ints([2 * i + 1, 2 * i + 2]))
        tree.lock(node)
        tree.unlock(node)
    work: list[Any] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [work.append(args), function(*args)][1]

    for name in ("heappop", "heappush", "heapify"):
        monkeypatch.setattr(radix_tree.heapq, name, counted(getattr(heapq, name)))
    monkeypatch.setattr(RadixTree, "nodes", lambda self: pytest.fail("the whole tree is walked"))
    for _ in range(90):
        assert len(tree.evict(1)) == 1
    assert len(work) <= 2 * 90


# ------------------------------------------------------------------------------------------------------------- manager


def make_manager(num_pages: int = 9, page_size: int = 4, prefix_cache: bool = True) -> KVCacheManager:
    return KVCacheManager(num_pages, page_size, prefix_cache=prefix_cache)


def hold(kv: KVCacheManager, tokens: Sequence[int], *, salt: str | None = None) -> Holding:
    """Room for a prompt: all but its last token may come from the cache."""
    holding = kv.open(kv.match(ints(tokens[:-1]), salt=salt), len(tokens))
    assert holding is not None
    return holding


def serve(kv: KVCacheManager, tokens: Sequence[int], *, salt: str | None = None) -> int:
    """A request from its beginning to its end; how many of its tokens were cached."""
    holding = hold(kv, tokens, salt=salt)
    kv.take_copies()
    kv.close(holding, ints(tokens), len(tokens))
    kv.check()
    return holding.num_cached_tokens


def test_a_prefix_outlives_its_request() -> None:
    kv = make_manager()
    assert serve(kv, range(10)) == 0
    assert kv.tree.num_pages == 3  # two full pages and a tail
    assert serve(kv, range(10)) == 9  # the last token is always computed
    assert serve(kv, [*range(6), 99, 99]) == 6  # a page, and half of another


def test_without_prefix_cache_nothing_outlives_its_request() -> None:
    kv = make_manager(prefix_cache=False)
    assert serve(kv, range(10)) == serve(kv, range(10)) == 0
    assert kv.allocator.num_free == 8


def test_salts_do_not_meet() -> None:
    kv = make_manager(num_pages=20)
    for salt in ("a", "b", None):
        assert serve(kv, range(10), salt=salt) == 0
        assert serve(kv, range(10), salt=salt) == 9


def test_what_does_not_fit_holds_nothing() -> None:
    kv = make_manager()
    first = hold(kv, range(21))
    assert kv.open(kv.match(ints(range(100, 112))), 13) is None
    assert kv.open(kv.match(ints(range(100, 103))), 4, min_available=3) is None
    assert not kv.grow(first, 33)
    kv.check()
    assert kv.num_available_pages == 2
    assert kv.grow(first, 32) and kv.num_available_pages == 0
    kv.check()


def test_duplicates_give_way_to_the_trees_pages() -> None:
    """C01: two requests computed the same at the same time."""
    kv, tokens = make_manager(), ints(range(10))
    a, b = hold(kv, tokens.tolist()), hold(kv, tokens.tolist())
    assert not set(a.page_ids.tolist()) & set(b.page_ids.tolist())
    duplicates, tail = b.page_ids[:2].tolist(), int(b.page_ids[2])
    assert kv.register(a, tokens, 10, in_use_until=2) is None
    assert kv.register(b, tokens, 10, in_use_until=2) == 0  # the first page that changed
    assert b.page_ids.tolist() == [*a.page_ids[:2].tolist(), tail]
    kv.check()
    kv.step_done(1)
    assert kv.num_in_transit_pages == 2  # step 2 may still read them
    kv.step_done(2)
    assert kv.num_in_transit_pages == 0 and set(duplicates) <= set(kv.allocator.free_pages.tolist())
    kv.check()


def test_a_chunk_is_visible_as_soon_as_it_is_computed() -> None:
    kv, tokens = make_manager(), ints(range(16))
    holding = hold(kv, tokens.tolist())
    for num_computed, num_visible in ((3, 0), (7, 4), (8, 8), (15, 12)):
        kv.register(holding, tokens, num_computed, in_use_until=1)
        assert kv.match(tokens).num_tokens == num_visible
        assert kv.match(tokens).partial_node is None  # a page that is not full is nobody else's yet


def test_copy_on_write_locks_its_source_until_the_copy_is_planned() -> None:
    kv = make_manager(num_pages=5)
    serve(kv, range(6))
    source = int(kv.tree.match(ints(range(6))).partial_node.pages[0])  # type: ignore[union-attr]
    holding = hold(kv, [*range(6), 99])
    assert holding.num_cached_tokens == 6
    assert kv.num_available_pages == 1  # four, less a shared page, the copy and its source
    destination = int(holding.page_ids[1])
    assert kv.take_copies().tolist() == [[source, destination]]
    assert kv.take_copies().tolist() == []
    assert kv.num_available_pages == 2
    kv.check()


def test_there_is_no_copy_where_its_source_is_needed() -> None:
    """A pool of exactly one request: with the source locked, the request would not fit."""
    kv = make_manager(num_pages=3)
    serve(kv, range(6))
    holding = hold(kv, [*range(6), 99])
    assert holding.num_cached_tokens == 4 and len(kv.take_copies()) == 0
    kv.check()


def test_tails_go_first_then_what_was_unused_longest() -> None:
    kv = make_manager(num_pages=10, page_size=2)
    for first in (10, 20, 30):
        serve(kv, [first, 0, 0, 0, first])  # two full pages and a tail each
    serve(kv, [10, 0, 0, 0, 99])  # the oldest is used again; its other tail pushes one tail out
    assert kv.allocator.num_free == 0
    hold(kv, range(100, 105))  # three pages: the tails
    assert [len(kv.match(ints([first, 0, 0, 0])).page_ids) for first in (10, 20, 30)] == [2, 2, 2]
    hold(kv, range(200, 203))  # two pages: of 20, used before 30, from the end
    assert [len(kv.match(ints([first, 0, 0, 0])).page_ids) for first in (10, 20, 30)] == [2, 0, 2]
    kv.check()


def test_flush_forgets_what_nobody_uses() -> None:
    kv = make_manager()
    serve(kv, range(10))
    serve(kv, range(50, 54))
    holding = hold(kv, range(10))
    kv.take_copies()
    assert kv.flush() == 2  # the tail, whose copy is planned, and the page of 50..53
    assert kv.match(ints(range(10))).num_tokens == 8
    kv.close(holding, ints(range(10)), 9)
    assert kv.flush() == 3
    assert kv.allocator.num_free == 8
    kv.check()


def test_pages_that_leaving_requests_will_give_back() -> None:
    """Shared pages count if no other request holds them."""
    kv, tokens = make_manager(num_pages=20), ints(range(10))
    a, b = hold(kv, range(10)), hold(kv, range(10))
    for holding in (a, b):
        kv.register(holding, tokens, 10, in_use_until=0)
    kv.step_done(0)
    assert kv.num_pages_held_by([a]) == kv.num_pages_held_by([b]) == 1
    assert kv.num_pages_held_by([a, b]) == 4
    before = kv.num_available_pages
    for holding in (a, b):
        kv.close(holding, tokens, 10)
    assert kv.num_available_pages == before + 4


def _wrong_ref_count(kv: KVCacheManager, holding: Holding) -> None:
    holding.node.ref_count += 1


def _page_leaked(kv: KVCacheManager, holding: Holding) -> None:
    kv.allocator.allocate(1)


def _page_in_two_states(kv: KVCacheManager, holding: Holding) -> None:
    kv.allocator.free(holding.page_ids[-1:])


def _page_shared_and_private(kv: KVCacheManager, holding: Holding) -> None:
    holding.num_shared_pages -= 1


def _holding_lost(kv: KVCacheManager, holding: Holding) -> None:
    kv._holdings.clear()


def _holding_strayed(kv: KVCacheManager, holding: Holding) -> None:
    holding.page_ids[0] = holding.page_ids[1]


def _sum_wrong(kv: KVCacheManager, holding: Holding) -> None:
    kv.tree.num_pages += 1


def _leaf_never_evicted(kv: KVCacheManager, holding: Holding) -> None:
    kv.tree._heap.clear()


def _reserved_page_given_out(kv: KVCacheManager, holding: Holding) -> None:
    holding.page_ids[-1] = 0


@pytest.mark.parametrize(
    "corrupt",
    [
        _wrong_ref_count, _page_leaked, _page_in_two_states, _page_shared_and_private, _holding_lost,
        _holding_strayed, _sum_wrong, _leaf_never_evicted, _reserved_page_given_out,
    ],
)  # fmt: skip
def test_c18_check_notices(corrupt: Callable[[KVCacheManager, Holding], None]) -> None:
    """C18: one wrong number anywhere makes `check` raise."""
    kv = make_manager()
    serve(kv, range(50, 54))
    holding = hold(kv, range(10))
    kv.register(holding, ints(range(10)), 10, in_use_until=0)
    kv.check()
    corrupt(kv, holding)
    with pytest.raises(AssertionError):
        kv.check()
