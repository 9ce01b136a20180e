"""`KVStorage`: the memory behind the pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl.kernels.kv import copy_pages
from minisgl.utils import Int32Array


class KVStorage:
    """Keys and values of all layers, page by page. Which page is whose is the KV manager's business.

    Args:
        shape: of one layer: ``[2, num_pages, page_size, num_kv_heads, head_dim]``.
    """

    def __init__(
        self, shape: Sequence[int], *, num_layers: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        # Zeros: what was never written is read by nobody, but a NaN there would outlive a mask that multiplies.
        self.layers: list[Tensor] = [_zeros(tuple(shape), dtype, torch.device(device)) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def copy_pages(self, page_copies: Int32Array) -> None:
        """Copy pages in every layer; ``page_copies`` is ``[C, 2]`` int32 on the host: sources and destinations."""
        if len(page_copies):
            device = self.layers[0].device
            copy_pages(self.layers, torch.from_numpy(page_copies).to(device, non_blocking=True))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU they are numpy's, which take up no memory until they are written: pages that nobody needs cost
    nothing there."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
