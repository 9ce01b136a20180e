"""Writing to the paged KV cache. A layer's cache is ``[2, num_pages, page_size, num_kv_heads, head_dim]``, K then V."""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values of the step's tokens into their slots.

    Args:
        k, v: ``[N, num_kv_heads, head_dim]``, dtype of ``kv``.
        kv: ``[2, num_pages, page_size, num_kv_heads, head_dim]``, contiguous; written in place.
        slot_mapping: ``[N]`` int64, ``page_id * page_size + offset``. Where a slot is named twice (padding: page 0)
            any of the tokens may win.
    """
    slots = kv.view(2, -1, *kv.shape[3:])
    slots[0].index_copy_(0, slot_mapping, k)
    slots[1].index_copy_(0, slot_mapping, v)


def copy_pages(kv: Tensor, page_copies: Tensor) -> None:
    """Copy whole pages in every layer. All sources are read before any destination is written.

    Args:
        kv: ``[num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]``; written in place.
        page_copies: ``[C, 2]`` int32 or int64, source and destination, on the device of ``kv``. The destinations
            differ.
    """
    source, destination = page_copies.to(torch.int64).unbind(1)
    kv.index_copy_(2, destination, kv.index_select(2, source))
