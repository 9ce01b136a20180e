"""`Rows`: how far the requests that have a row are, in columns. The scheduler owns and writes them."""

from __future__ import annotations

import heapq

import numpy as np

from minisgl.kv_cache import Holding
from minisgl.request import Request


class Rows:
    """One entry a row; arrays are ``[max_running]`` int32 unless said otherwise.

    A request computes the tokens ``num_computed .. num_tokens - 1``: there is no prefill phase and no decode phase,
    only one number that catches up with the other. ``num_tokens`` also counts tokens that the device has sampled and
    the host has not seen (placeholders); those that it has seen are `Request.num_tokens`.

    Attributes:
        num_tokens: prompt and output tokens, placeholders among them.
        num_computed: tokens whose KV launched steps have computed.
        limit: most tokens that the request may come to.
        expected: tokens that it is expected to come to, for admission.
        num_pages: pages that it holds.
        first_unsent_page: index of the first page that the device's table does not have yet.
        last_step: last launched step that names the row.
        arrival: int64, order of the queue.
        on_device: bool, whether its last token was sampled since it got this row, so that the device knows it.
    """

    def __init__(self, max_running: int) -> None:
        self.num_tokens = np.zeros(max_running, np.int32)
        self.num_computed = np.zeros(max_running, np.int32)
        self.limit = np.zeros(max_running, np.int32)
        self.expected = np.zeros(max_running, np.int32)
        self.num_pages = np.zeros(max_running, np.int32)
        self.first_unsent_page = np.zeros(max_running, np.int32)
        self.last_step = np.zeros(max_running, np.int32)
        self.arrival = np.zeros(max_running, np.int64)
        self.on_device = np.zeros(max_running, np.bool_)
        self.requests: list[Request | None] = [None] * max_running
        self.holdings: list[Holding | None] = [None] * max_running
        self._free = list(range(max_running))

    @property
    def num_free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def take(self, request: Request, holding: Holding, *, expected: int) -> int:
        """Give ``request`` the lowest free row."""
        row = heapq.heappop(self._free)
        self.requests[row], self.holdings[row] = request, holding
        self.num_tokens[row] = request.num_tokens
        self.num_computed[row] = holding.num_cached_tokens
        self.limit[row] = request.num_prompt_tokens + request.max_tokens
        self.expected[row] = expected
        self.num_pages[row] = holding.num_pages
        self.first_unsent_page[row] = 0
        self.last_step[row] = 0
        self.arrival[row] = request.arrival
        self.on_device[row] = False
        return row

    def give_back(self, row: int) -> None:
        """The row is free again."""
        self.requests[row] = self.holdings[row] = None
        heapq.heappush(self._free, row)

    def request(self, row: int) -> Request:
        """Whose row it is."""
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def holding(self, row: int) -> Holding:
        """The pages of the request in this row."""
        holding = self.holdings[row]
        assert holding is not None, f"row {row} is free"
        return holding
