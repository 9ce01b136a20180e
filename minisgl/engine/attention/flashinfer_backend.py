"""Paged attention by FlashInfer's kernels: `FlashInferPrefill`, `FlashInferDecode`, `XqaDecode`.

Chapter 4 tells this module's story. The first two divide a step's work among the multiprocessors on the host, in
``plan``; the third needs no plan, so that a launch of it can be captured in a CUDA graph and replayed at other lengths.

Source: Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", 2025. Written
for flashinfer-python 0.6.8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from torch import Tensor

from minisgl.engine.attention.choice import AttentionShape
from minisgl.forward import ForwardBatch
from minisgl.kernels.compile_ahead import is_dry

# The kernel keeps semaphores in the first 8 MiB, partial results of at most one split a multiprocessor behind them.
_XQA_WORKSPACE_BYTES = 32 << 20


class _Turns:
    """Two wrappers that are planned in turn: E01.

    ``plan`` writes into pinned memory of its wrapper and launches a copy of it. Step k+1 is planned before step k is
    done, and its copy may still wait behind other work of the stream: writing that memory again would change the plan
    that step k is yet to read. With two wrappers it is step k-1's memory that is written, and that copy is done as a
    rule: the host has seen step k-1's tokens before it plans step k+1. The event makes it certain, whoever calls.
    """

    def __init__(self, first: Any, second: Any) -> None:
        self._wrappers = (first, second)
        self._copied = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Plan with the wrapper whose turn it is, and return it."""
        self._turn = 1 - self._turn
        wrapper, copied = self._wrappers[self._turn], self._copied[self._turn]
        copied.synchronize()  # at once where it was never recorded
        wrapper.plan(*args, **kwargs)
        copied.record()
        return wrapper


class FlashInferPrefill:
    """Causal attention of requests with any number of new tokens, over their pages.

    Args:
        shape: float16 or bfloat16; head_dim 64, 128 or 256; any page size.
        device: where the batches lie.
        kernel: "fa2", or "fa3" for Hopper.

    Attributes:
        workspace: partial results of requests that are divided; both wrappers use it, since their launches follow each
            other in one stream.
    """

    serves_graphs = False

    def __init__(self, shape: AttentionShape, device: torch.device, *, kernel: str) -> None:
        self.shape = shape
        self.workspace = torch.empty(_workspace_bytes(shape, device), dtype=torch.uint8, device=device)
        self._turns = _Turns(
            *(BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend=kernel) for _ in range(2))
        )

    def plan(self, batch: ForwardBatch) -> Any:
        """The planned wrapper. Nothing is waited for: the host knows the lengths."""
        shape, pages = self.shape, _list_pages(batch)
        return self._turns.plan(
            pages.starts,
            pages.offsets,
            pages.page_ids,
            pages.last_lens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            sm_scale=1.0,  # `forward` brings the scale
            q_data_type=shape.dtype,
            seq_lens=pages.seq_lens,
            max_token_per_sequence=batch.max_seqlen_q,
        )

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        return _run(q, kv, batch, scale, out)


class FlashInferDecode:
    """Attention of requests with one new token each, planned on the host.

    Args:
        shape: float16 or bfloat16; head_dim 64, 128 or 256; any page size.
        device: where the batches lie.
        tensor_cores: use them. They were made for products with more rows, but a group of query heads is some.
    """

    serves_graphs = False

    def __init__(self, shape: AttentionShape, device: torch.device, *, tensor_cores: bool = True) -> None:
        self.shape = shape
        self.workspace = torch.empty(_workspace_bytes(shape, device), dtype=torch.uint8, device=device)
        self._turns = _Turns(
            *(
                BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=tensor_cores, backend="fa2")
                for _ in range(2)
            )
        )

    def plan(self, batch: ForwardBatch) -> Any:
        """The planned wrapper. Nothing is waited for: the host knows the lengths."""
        shape, pages = self.shape, _list_pages(batch)
        return self._turns.plan(
            pages.offsets,
            pages.page_ids,
            pages.last_lens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            sm_scale=1.0,  # `forward` brings the scale
            q_data_type=shape.dtype,
            seq_lens=pages.seq_lens,
        )

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        return _run(q, kv, batch, scale, out)


class XqaDecode:
    """Attention of requests with one new token each; lengths and pages are read on the device, at each launch.

    Args:
        device: where the batches lie: float16 or bfloat16, page size 16, 32, 64 or 128.

    Attributes:
        workspace: counters, 0 between launches, and partial results; so a backend serves one stream.
    """

    serves_graphs = True

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.zeros(_XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def plan(self, batch: ForwardBatch) -> Tensor:
        """The page table, gapless: the kernel gets an address and no strides."""
        return batch.page_table.contiguous()

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        out_NHD = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        if is_dry():
            return out_NHD
        trtllm_batch_decode_with_kv_cache(
            q.contiguous(),
            (kv[0], kv[1]),
            self.workspace,
            batch.attn_metadata,
            batch.seq_lens,
            batch.page_table.shape[1] * batch.page_size,
            bmm1_scale=scale,
            bmm2_scale=1.0,
            out=out_NHD,
            kv_layout="NHD",
            backend="xqa",
        )
        return out_NHD


def _run(q: Tensor, kv: Tensor, batch: ForwardBatch, scale: float, out: Tensor | None) -> Tensor:
    out_NHD = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    # The factor is the wrapper's scale, 1, times that of the queries.
    batch.attn_metadata.run(q, (kv[0], kv[1]), q_scale=scale, out=out_NHD)
    return out_NHD


class _Pages(NamedTuple):
    """A batch's pages as FlashInfer wants them. All but ``page_ids`` are int32 in pinned memory of this batch alone, so
    that their copies to the device wait for nothing and nobody writes there before they are done.

    Args:
        starts: ``[R + 1]``, where each request's tokens begin.
        offsets: ``[R + 1]``, where its pages begin.
        seq_lens: ``[R]``, its tokens.
        last_lens: ``[R]``, tokens in its last page.
        page_ids: ``[offsets[-1]]`` int32 on the device, the requests' pages one behind the other.
    """

    starts: Tensor
    offsets: Tensor
    seq_lens: Tensor
    last_lens: Tensor
    page_ids: Tensor


def _list_pages(batch: ForwardBatch) -> _Pages:
    lengths, size, table = batch.host_seq_lens, batch.page_size, batch.page_table
    num_pages = -(-lengths // size)
    columns = (batch.host_cu_seqlens_q, np.append(0, np.cumsum(num_pages)), lengths, lengths - (num_pages - 1) * size)
    pinned = torch.empty(sum(map(len, columns)), dtype=torch.int32, pin_memory=True)
    np.concatenate(columns, out=pinned.numpy(), casting="same_kind")
    starts, offsets, seq_lens, last_lens = pinned.split([len(column) for column in columns])
    # The table is on the device, the number of pages on the host: so nothing waits.
    begins = offsets.to(table.device, non_blocking=True)
    places = torch.arange(int(num_pages.sum()), dtype=torch.int32, device=table.device)
    owners = torch.searchsorted(begins, places, right=True) - 1
    return _Pages(starts, offsets, seq_lens, last_lens, table[owners, places - begins[owners]])


def _workspace_bytes(shape: AttentionShape, device: torch.device) -> int:
    """Enough for any plan: work is divided into at most two blocks a multiprocessor, each of at most 128 rows in
    float32 and their sums; the constant of 128 MiB in the documentation is too little for groups of 8."""
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    group = shape.num_heads // shape.num_kv_heads
    return group * blocks * 128 * (shape.head_dim + 1) * 4 + (1 << 20)
