"""How much may wait: a bound on requests without a token, on their prompts, and on the time they would wait.

Chapter 1 tells this module's story. A queue without an end only turns refusals into time-outs, so a request that would
wait too long is refused at once, with the time after which it is worth another try. Plain arithmetic; the clock comes
in from outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minisgl.server.errors import ApiError

_DECAY = 0.98  # weight of the past at each new observation: the last fifty count
_MIN_OBSERVATIONS = 8.0


class FirstTokenModel:
    """Predicts the time to the first token as ``a + b * tokens ahead``: least squares over what was seen lately."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A request whose prompt and those before it had ``num_tokens`` took so long to its first token."""
        x, y = float(num_tokens), seconds
        sums = (self._weight, 1.0), (self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)
        self._weight, self._x, self._y, self._xx, self._xy = (_DECAY * past + new for past, new in sums)

    def predict(self, num_tokens: int) -> float | None:
        """Seconds to the first token behind so many tokens; None before there is enough to go by."""
        if self._weight < _MIN_OBSERVATIONS * _DECAY**_MIN_OBSERVATIONS:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        # Without spread there is no slope; a negative one is chance.
        slope = max(self._xy / self._weight - mean_x * mean_y, 0.0) / spread if spread > 1e-9 * mean_x**2 else 0.0
        return max(mean_y + slope * (num_tokens - mean_x), 0.0)


class Ticket:
    """The place of one prompt among those that wait. Leaves it once, by whichever of the two ways comes first."""

    def __init__(self, waiting: WaitingRoom, num_tokens: int, num_ahead: int, now_s: float) -> None:
        self._waiting = waiting
        self._num_tokens = num_tokens
        self._num_ahead = num_ahead
        self._since_s = now_s
        self._inside = True

    def correct(self, num_tokens: int) -> None:
        """The prompt turned out to have so many tokens."""
        if self._inside:
            self._waiting.num_tokens += num_tokens - self._num_tokens
            self._num_tokens = num_tokens

    def first_token(self, now_s: float) -> None:
        """It has its first token: the wait is over, and a lesson."""
        if self._inside:
            self._waiting.model.observe(self._num_ahead + self._num_tokens, now_s - self._since_s)
        self.close()

    def close(self) -> None:
        """It waits no more, for whatever reason."""
        if self._inside:
            self._inside = False
            self._waiting.num_requests -= 1
            self._waiting.num_tokens -= self._num_tokens


class WaitingRoom:
    """Counts the prompts that have no token yet. Invariant: both counts are the sums over the open tickets.

    Args:
        max_requests, max_tokens: bounds of the two counts.
        max_first_token_s: bound of the predicted wait; None: none.
    """

    def __init__(self, *, max_requests: int, max_tokens: int, max_first_token_s: float | None = None) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.model = FirstTokenModel()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._max_first_token_s = max_first_token_s

    def enter(self, prompts: Sequence[int], now_s: float) -> list[Ticket]:
        """A ticket for each of a request's prompts, given their lengths in tokens (estimates will do).

        Raises:
            ApiError: 429 with ``Retry-After``, if one of the bounds would be broken. A request that waits alone is
                never refused: nothing would be gained by its coming back.
        """
        self._check(len(prompts), sum(prompts))
        tickets = []
        for num_tokens in prompts:
            tickets.append(Ticket(self, num_tokens, self.num_tokens, now_s))
            self.num_requests += 1
            self.num_tokens += num_tokens
        return tickets

    def _check(self, num_requests: int, num_tokens: int) -> None:
        if not self.num_requests:
            return
        wait_s = self.model.predict(self.num_tokens + num_tokens)
        if self.num_requests + num_requests > self._max_requests:
            raise _busy(f"{self.num_requests} requests wait already, of at most {self._max_requests}", wait_s)
        if self.num_tokens + num_tokens > self._max_tokens:
            raise _busy(f"{self.num_tokens} tokens wait already, of at most {self._max_tokens}", wait_s)
        limit_s = self._max_first_token_s
        if limit_s is not None and wait_s is not None and wait_s > limit_s:
            raise _busy(f"the first token would take {wait_s:.1f} s, more than {limit_s:g} s", wait_s - limit_s)


def _busy(reason: str, wait_s: float | None) -> ApiError:
    retry_s = min(max(math.ceil(wait_s or 1.0), 1), 60)
    return ApiError(429, f"too busy: {reason}; try again later", code="too_busy", headers={"retry-after": str(retry_s)})
