"""Tensor parallelism: who this rank is, which share of a weight is its own, and the two collectives that layers need.

Chapter 5 tells this module's story. A `TensorParallel` is handed to every layer; nothing here is process-wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.utils import ceil_div


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ranks that share one model.

    Args:
        rank: 0 to size - 1.
        size: number of ranks; at 1 the collectives do nothing and no process group is needed.
        group: process group of the ranks. Raises ``ValueError`` if it is missing or of another size.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in 0..{self.size - 1}, got {self.rank}")
        if self.size > 1 and (self.group is None or self.group.size() != self.size):
            raise ValueError(f"tensor parallelism over {self.size} ranks needs a process group of {self.size}")

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of ``x`` (any shape) over the ranks, written into ``x``, which is returned."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x_SV: Tensor) -> Tensor:
        """The ranks' ``[S, V]`` side by side: ``[S, size * V]``."""
        if self.size == 1:
            return x_SV
        parts = [torch.empty_like(x_SV) for _ in range(self.size)]
        dist.all_gather(parts, x_SV.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def split(self, total: int, what: str) -> slice:
        """This rank's share of ``total`` things. Raises ``ValueError``, naming ``what``, if they do not divide."""
        if total % self.size:
            raise ValueError(f"{what} {total} cannot be divided over {self.size} tensor-parallel ranks")
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def split_padded(self, total: int) -> slice:
        """This rank's share of ``total`` rows, padded to be equal on all ranks: it may end behind ``total``."""
        share = ceil_div(total, self.size)
        return slice(self.rank * share, (self.rank + 1) * share)

    def split_kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's KV heads. With more ranks than heads, neighbouring ranks hold the same head."""
        if num_kv_heads >= self.size:
            return self.split(num_kv_heads, "num_key_value_heads")
        if self.size % num_kv_heads:
            raise ValueError(f"num_key_value_heads {num_kv_heads} does not divide {self.size} tensor-parallel ranks")
        head = self.rank * num_kv_heads // self.size
        return slice(head, head + 1)


@dataclass(frozen=True)
class Shard:
    """Which part of a checkpoint's tensor fills which rows of a parameter.

    Args:
        shape: of the whole tensor in the checkpoint.
        source: what this rank takes of it, one slice a dimension.
        rows: rows of the parameter that it fills; rows that no shard fills are zero.
        sibling: module whose tensor it is, beside the one that holds the parameter: "q_proj" beside ``qkv_proj``.
            None: the same module.
    """

    shape: tuple[int, ...]
    source: tuple[slice, ...]
    rows: slice
    sibling: str | None = None
