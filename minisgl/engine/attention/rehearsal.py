"""A kernel proves itself before it serves: FlashInfer compiles at first use, and that may fail, or bring nothing that
runs on this device. Better at the start, where another kernel can still be taken, than in the first step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from minisgl.engine.attention.choice import AttentionShape
from minisgl.engine.attention.torch_backend import TorchAttention
from minisgl.forward import AttentionBackend, ForwardBatch
from minisgl.utils import ceil_div

# bfloat16 rounds weights and result by 2**-9 each; values here are of size 1.
_TOLERANCE = 0.05


def rehearse(backend: AttentionBackend, shape: AttentionShape, device: torch.device, *, num_new: int) -> None:
    """Two requests over random pages, held against torch's attention. Waits for the device.

    Args:
        num_new: new tokens of each; 1 for a backend that decodes.

    Raises:
        RuntimeError: the result is wrong. A kernel that cannot be built raises whatever it raises.
    """
    batch = two_requests(num_new, shape.page_size, device)
    generator = torch.Generator().manual_seed(0)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(device, shape.dtype)

    q = randn(batch.num_tokens, shape.num_heads, shape.head_dim)
    kv = randn(2, int(batch.page_table.max()) + 1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    got, right = (
        b.forward(q, kv, replace(batch, attn_metadata=b.plan(batch)), scale=shape.head_dim**-0.5).float()
        for b in (backend, TorchAttention())
    )
    error = float((got - right).abs().max())
    if not error < _TOLERANCE:  # NaN too
        raise RuntimeError(f"{type(backend).__name__} is off by {error:.3g} on this device")


def two_requests(num_new: int, page_size: int, device: torch.device) -> ForwardBatch:
    """Of ``num_new`` new tokens each; the first has a page before them. Their pages lie in descending order."""
    lengths = [page_size + num_new, num_new]
    num_pages = [ceil_div(n, page_size) for n in lengths]
    pages = torch.zeros(2, num_pages[0], dtype=torch.int32)
    pages[0] = torch.arange(sum(num_pages), num_pages[1], -1)
    pages[1, : num_pages[1]] = torch.arange(num_pages[1], 0, -1)
    positions = torch.cat([torch.arange(n - num_new, n) for n in lengths])
    owners = torch.arange(2).repeat_interleave(num_new)
    slots = pages[owners, positions // page_size] * page_size + positions % page_size
    starts = np.array([0, num_new, 2 * num_new], np.int32)
    return ForwardBatch(
        step_id=0,
        input_ids=torch.zeros(2 * num_new, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=slots.to(device, torch.int64),
        cu_seqlens_q=torch.from_numpy(starts).to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=pages.to(device),
        logits_indices=torch.zeros(0, dtype=torch.int64, device=device),
        page_size=page_size,
        num_decodes=2 if num_new == 1 else 0,
        host_cu_seqlens_q=starts,
        host_seq_lens=np.array(lengths, np.int32),
    )
