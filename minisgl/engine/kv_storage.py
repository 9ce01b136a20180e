"""`KVStorage`: the memory behind the pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl.kernels.kernel_set import Kernels
from minisgl.utils import Int32Array


class KVStorage:
    """Keys and values of all layers, page by page. Which page is whose is the KV manager's business.

    Args:
        shape: of one layer: ``[2, num_pages, page_size, num_kv_heads, head_dim]``.
        kernels: what copies pages.

    Attributes:
        layers: a tensor of that shape for each layer; together they are one piece of memory.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels,
    ) -> None:
        self.kernels = kernels
        # Zeros: what was never written is read by nobody, but a NaN there would outlive a mask that multiplies.
        self._all = _zeros((num_layers, *shape), dtype, torch.device(device))
        self.layers: list[Tensor] = list(self._all.unbind(0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return self._all.numel() * self._all.element_size()

    def copy_pages(self, page_copies: Int32Array) -> None:
        """Copy pages in every layer; ``page_copies`` is ``[C, 2]`` int32 on the host: sources and destinations."""
        if len(page_copies):
            copies = torch.from_numpy(page_copies)
            if self._all.is_cuda:
                copies = copies.pin_memory().to(self._all.device, non_blocking=True)
            self.kernels.copy_pages(self._all, copies)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU they are numpy's, which take up no memory until they are written: pages that nobody needs cost
    nothing there."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
