"""Builders for tests: every parameter has a default, so that a test names only what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from minisgl.forward import AttentionBackend, ForwardBatch


def make_pages(num_requests: int = 1, *, pages_each: int = 8, seed: int = 0) -> list[list[int]]:
    """Scattered pages for each request: no order, no gaps shared, never page 0."""
    shuffled = 1 + np.random.default_rng(seed).permutation(num_requests * pages_each)
    return shuffled.reshape(num_requests, pages_each).tolist()


def make_batch(
    tokens: Sequence[Sequence[int]] = ((1, 2, 3),),
    *,
    computed: Sequence[int] | None = None,
    pages: Sequence[Sequence[int]] | None = None,
    page_size: int = 4,
    logits: Literal["all", "last"] = "all",
    device: str = "cpu",
    step_id: int = 1,
    attention: AttentionBackend | None = None,
) -> ForwardBatch:
    """A valid batch: ``tokens[i]`` are the new tokens of request i, which has ``computed[i]`` tokens in the cache."""
    computed = [0] * len(tokens) if computed is None else list(computed)
    lengths = [done + len(new) for done, new in zip(computed, tokens, strict=True)]
    pages = make_pages(len(tokens)) if pages is None else pages
    used = [list(p[: -(-n // page_size)]) for p, n in zip(pages, lengths, strict=True)]
    width = max(map(len, used))
    positions = [range(done, n) for done, n in zip(computed, lengths, strict=True)]
    slots = [
        p[t // page_size] * page_size + t % page_size for p, where in zip(used, positions, strict=True) for t in where
    ]
    ends = np.cumsum([len(new) for new in tokens])

    def ints(values: Sequence[object], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = ForwardBatch(
        step_id=step_id,
        input_ids=ints([t for new in tokens for t in new]),
        positions=ints([t for where in positions for t in where]),
        slot_mapping=ints(slots),
        cu_seqlens_q=ints([0, *ends.tolist()], torch.int32),
        seq_lens=ints(lengths, torch.int32),
        page_table=ints([p + [0] * (width - len(p)) for p in used], torch.int32),
        logits_indices=ints(list(range(ends[-1])) if logits == "all" else (ends - 1).tolist()),
        page_size=page_size,
        num_decodes=next((i for i, new in enumerate(tokens) if len(new) != 1), len(tokens)),
        host_cu_seqlens_q=np.array([0, *ends.tolist()], np.int32),
        host_seq_lens=np.array(lengths, np.int32),
    )
    batch.validate()
    return batch if attention is None else replace(batch, attn_metadata=attention.plan(batch))
