"""Decisions as pure functions: numbers in, numbers out. No clock, no state, no I/O; chapter 2 calls them by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from minisgl.config import Admission, Order
from minisgl.request import Request
from minisgl.utils import Int32Array

Kind = Literal["decode", "prefill", "admit"]

# An order is a list of stages; a step holds the first stage that has any work. Within it the kinds of work share the
# token budget in this order: the next token of running requests, the next chunk of half-computed prompts, new requests.
STAGES: dict[Order, tuple[tuple[Kind, ...], ...]] = {
    "mixed": (("decode", "prefill", "admit"),),
    "prefill_first": (("prefill", "admit"), ("decode",)),
    "decode_first": (("decode",), ("prefill", "admit")),
}


def choose_victim(candidates: Sequence[Request]) -> Request:
    """Who is preempted when pages run out: the youngest of the lowest priority."""
    return min(candidates, key=lambda r: (r.sampling_params.priority, -r.arrival))


def expected_new_tokens(admission: Admission, max_new_tokens: int, recent_mean: float) -> int:
    """Tokens for which pages are counted when a request asks to enter: all that it may bring ("reserve"), or as many as
    recent ones did on average ("estimate")."""
    if admission == "reserve":
        return max_new_tokens
    return min(max_new_tokens, int(recent_mean) + 1)


def promised_pages(expected_tokens: Int32Array, num_pages: Int32Array, page_size: int) -> int:
    """Pages that running requests are still expected to take: ``expected_tokens`` and ``num_pages`` are ``[R]``."""
    return int(np.maximum(-(-expected_tokens // page_size) - num_pages, 0).sum())
