"""A kernel proves itself before it serves: FlashInfer compiles at first use, and that may fail, or bring nothing that
runs on this device. Better at the start, where another kernel can still be taken, than in the first step."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Two requests, one of more than a page, held against torch's attention. Waits for the device.

    Args:
        num_new: new tokens of each; 1 for a backend that decodes.

    Raises:
        RuntimeError: the result is wrong. A kernel that cannot be built raises whatever it raises.
    """
    batch = random_batch([num_new] * 2, [shape.page_size + num_new, num_new], shape.page_size, device)
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


def random_batch(
    num_new: Sequence[int], lengths: Sequence[int], page_size: int, device: torch.device, *, seed: int = 0
) -> ForwardBatch:
    """Requests with scattered pages, numbered from 1 to their number; the token ids mean nothing.

    Args:
        num_new: new tokens of each request.
        lengths: its tokens in all.
    """
    num_pages = [ceil_div(n, page_size) for n in lengths]
    shuffled = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(seed)).to(torch.int32) + 1
    pages = torch.zeros(len(lengths), max(num_pages), dtype=torch.int32)
    for row, own in zip(pages, shuffled.split(num_pages), strict=True):
        row[: len(own)] = own
    positions = torch.cat([torch.arange(n - new, n) for n, new in zip(lengths, num_new, strict=True)])
    owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(num_new))
    slots = pages[owners, positions // page_size].to(torch.int64) * page_size + positions % page_size
    starts = np.append(0, np.cumsum(num_new)).astype(np.int32)
    return ForwardBatch(
        step_id=0,
        input_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        cu_seqlens_q=torch.from_numpy(starts).to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=pages.to(device),
        logits_indices=torch.zeros(0, dtype=torch.int64, device=device),
        page_size=page_size,
        num_decodes=next((i for i, new in enumerate(num_new) if new != 1), len(num_new)),
        host_cu_seqlens_q=starts,
        host_seq_lens=np.array(lengths, np.int32),
    )
