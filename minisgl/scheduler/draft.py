"""`Draft`: a plan in the making. It lives for one call of `Scheduler.schedule`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minisgl.utils import Int32Array


class Draft:
    """Rows and their tokens, and what is left of the budget.

    Args:
        budget: tokens that the step may compute.

    Attributes:
        rows, num_tokens: int32 arrays, the same number of each, in the order in which they were added.
        admitted: rows that were given out for this step.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Int32Array] = []
        self.num_tokens: list[Int32Array] = []
        self.admitted: list[int] = []

    def add(self, rows: Int32Array, num_tokens: Int32Array) -> None:
        """Take in rows, ``[k]`` int32, and the tokens of each."""
        if len(rows):
            self.rows.append(rows)
            self.num_tokens.append(num_tokens)
            self.budget -= int(num_tokens.sum())

    def columns(self) -> tuple[Int32Array, Int32Array]:
        """``[R]`` int32 each: all rows, and their tokens."""
        return np.concatenate(self.rows), np.concatenate(self.num_tokens)

    def drop_unless(self, keep: Callable[[int], bool]) -> None:
        """Leave out rows that were preempted after they were added."""
        if not self.rows:
            return
        rows, num_tokens = self.columns()
        kept = np.array([keep(row) for row in rows.tolist()], np.bool_)
        self.budget += int(num_tokens[~kept].sum())
        self.rows, self.num_tokens = [rows[kept]], [num_tokens[kept]]
        if not kept.any():
            self.rows, self.num_tokens = [], []
