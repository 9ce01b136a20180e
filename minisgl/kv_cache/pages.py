"""`PageAllocator`: which pages of the pool are free."""

from __future__ import annotations

import numpy as np

from minisgl.utils import Int32Array


class PageAllocator:
    """A stack of free pages. Page 0 is never given out: padding writes there.

    Args:
        num_pages: pages in the pool, page 0 among them.
    """

    def __init__(self, num_pages: int) -> None:
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # page 1 lies on top
        self._num_free = num_pages - 1
        self._is_free = np.ones(num_pages, np.bool_)
        self._is_free[0] = False

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could give."""
        return self._num_free

    @property
    def free_pages(self) -> Int32Array:
        """``[num_free]`` int32, a copy."""
        return self._stack[: self._num_free].copy()

    def allocate(self, num_pages: int) -> Int32Array:
        """``[num_pages]`` int32, no longer free. The caller has made sure that there are so many."""
        assert num_pages <= self._num_free, (num_pages, self._num_free)
        pages = self._stack[self._num_free - num_pages : self._num_free][::-1].copy()
        self._num_free -= num_pages
        self._is_free[pages] = False
        return pages

    def free(self, page_ids: Int32Array) -> None:
        """Take pages back. A page that is free already, named twice or reserved is a fault of ours."""
        if not len(page_ids):
            return
        assert not self._is_free[page_ids].any(), f"double free among {page_ids.tolist()}"
        assert page_ids.min() > 0 and len(np.unique(page_ids)) == len(page_ids), page_ids.tolist()
        self._is_free[page_ids] = True
        self._stack[self._num_free : self._num_free + len(page_ids)] = page_ids[::-1]
        self._num_free += len(page_ids)
