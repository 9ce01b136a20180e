"""`NaivePrefixCache`: the slow twin of the radix tree, a dictionary of every prefix.

Obviously right, and obviously too large: a prefix of n tokens costs n tuples of up to n numbers. Tests hold the tree to
it; chapter 3 begins with it.
"""

from __future__ import annotations

from minisgl.utils import Int32Array


class NaivePrefixCache:
    """What is cached, prefix by prefix.

    Args:
        page_size: tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[tuple[str | None, tuple[int, ...]], int] = {}

    def match(self, token_ids: Int32Array, *, salt: str | None = None) -> list[int]:
        """Pages of the longest cached prefix that is whole pages long."""
        pages: list[int] = []
        for end in range(self.page_size, len(token_ids) + 1, self.page_size):
            page = self.pages.get((salt, tuple(token_ids[:end].tolist())))
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, token_ids: Int32Array, page_ids: Int32Array, *, salt: str | None = None) -> None:
        """Remember full pages; the first to come stays."""
        for i, page in enumerate(page_ids.tolist()):
            prefix = tuple(token_ids[: (i + 1) * self.page_size].tolist())
            self.pages.setdefault((salt, prefix), page)

    def forget(self, page_id: int) -> None:
        """The page was evicted."""
        self.pages = {key: page for key, page in self.pages.items() if page != page_id}
