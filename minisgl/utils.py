"""Small arithmetic and checks that every room uses. Chapter 1 names them in passing; they own nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below ``a / b``, for non-negative ``a`` and positive ``b``."""
    return -(-a // b)


def as_token_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> Int32Array:
    """``ids`` as a fresh int32 array ``[n]``. Raises ``ValueError`` for anything but a flat sequence of integers
    that fit in 31 bits and are not negative."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError("token ids must be a flat list of integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**31:
        raise ValueError(f"token id {low if low < 0 else high} is outside 0..{2**31 - 1}")
    return array.astype(np.int32)


def as_plain(value: Any) -> Any:
    """A numpy scalar as Python's own, which every encoder knows; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def check_range(
    name: str, value: float, *, low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False
) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number between the limits; the message states them."""
    finite = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        finite = finite and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        finite = False
    if not finite or value < low or value > high or (open_low and value == low) or (open_high and value == high):
        left = f"{'>' if open_low else '>='} {low:g}" if low != -math.inf else ""
        right = f"{'<' if open_high else '<='} {high:g}" if high != math.inf else ""
        raise ValueError(f"{name} must be a finite number {' and '.join(p for p in (left, right) if p)}, got {value!r}")


def check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    """Raise ``ValueError`` unless ``value`` is an integer (not a bool) in ``low..high``; the message states them."""
    if (
        not isinstance(value, (int, np.integer))
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        limits = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}")
