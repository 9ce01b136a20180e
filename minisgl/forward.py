"""`ForwardBatch` and `AttentionBackend`: the contract between engine and model.

Chapters 4 and 5 tell this module's story. The engine makes a `ForwardBatch` for each step; model and kernels only read
it. Sizes: N tokens of the step, R requests of the step, P page-table width, S rows that get logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.utils import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One step on the device, complete when made. All tensors lie on one device.

    Args:
        step_id: the step of the plan that this was made from.
        input_ids: ``[N]`` int64, the requests' new tokens one request behind the other.
        positions: ``[N]`` int64, position of each token in its request.
        slot_mapping: ``[N]`` int64, where its K and V go: ``page_id * page_size + offset``; padding goes to page 0.
        cu_seqlens_q: ``[R + 1]`` int32, where each request's tokens begin in N.
        seq_lens: ``[R]`` int32, tokens of the request whose KV is there after this step.
        page_table: ``[R, P]`` int32, the request's pages in order; behind its last page the entries are 0.
        logits_indices: ``[S]`` int64, tokens of N whose logits are wanted.
        page_size: tokens in a page.
        num_decodes: the first so many requests have a single new token each; what stands behind them are prompts.
        host_cu_seqlens_q, host_seq_lens: the two of these names, as the host knows them: int32 arrays.
        attn_metadata: what the attention backend's ``plan`` returned for this batch.
    """

    step_id: int
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_table: Tensor
    logits_indices: Tensor
    page_size: int
    num_decodes: int
    host_cu_seqlens_q: Int32Array
    host_seq_lens: Int32Array
    attn_metadata: Any = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.input_ids.shape[0]

    @property
    def num_requests(self) -> int:
        """R."""
        return self.seq_lens.shape[0]

    @property
    def max_seqlen_q(self) -> int:
        """Largest number of new tokens of a request."""
        return int(np.diff(self.host_cu_seqlens_q).max())

    @property
    def max_seqlen_k(self) -> int:
        """Tokens of the longest request."""
        return int(self.host_seq_lens.max())

    def part(self, begin: int, end: int) -> ForwardBatch:
        """Requests ``begin`` to ``end`` as a batch of their own, on the same memory: for an attention backend that
        serves some of them. It has no logits: these are asked of the whole step."""
        first, last = int(self.host_cu_seqlens_q[begin]), int(self.host_cu_seqlens_q[end])
        starts = self.cu_seqlens_q[begin : end + 1]
        return replace(
            self,
            input_ids=self.input_ids[first:last],
            positions=self.positions[first:last],
            slot_mapping=self.slot_mapping[first:last],
            cu_seqlens_q=starts - first if first else starts,
            seq_lens=self.seq_lens[begin:end],
            page_table=self.page_table[begin:end],
            logits_indices=self.logits_indices[:0],
            num_decodes=min(max(self.num_decodes - begin, 0), end - begin),
            host_cu_seqlens_q=self.host_cu_seqlens_q[begin : end + 1] - first,
            host_seq_lens=self.host_seq_lens[begin:end],
            attn_metadata=None,
        )

    def validate(self) -> None:
        """The table above, executed: assert shapes, dtypes and the relations between the tensors. Reads from the
        device, so it is for tests and debugging."""
        n, r, p = self.num_tokens, self.num_requests, self.page_table.shape[1]
        for name, shape, dtype in (
            ("input_ids", (n,), torch.int64),
            ("positions", (n,), torch.int64),
            ("slot_mapping", (n,), torch.int64),
            ("cu_seqlens_q", (r + 1,), torch.int32),
            ("seq_lens", (r,), torch.int32),
            ("page_table", (r, p), torch.int32),
            ("logits_indices", tuple(self.logits_indices.shape), torch.int64),
        ):
            tensor = getattr(self, name)
            assert tuple(tensor.shape) == shape and tensor.dtype == dtype, (name, tensor.shape, tensor.dtype)
            assert tensor.device == self.input_ids.device, (name, tensor.device)
        starts, lengths = self.cu_seqlens_q.tolist(), self.seq_lens.tolist()
        assert starts[0] == 0 and starts[-1] == n
        assert starts == self.host_cu_seqlens_q.tolist() and lengths == self.host_seq_lens.tolist()
        assert self.num_decodes <= r and starts[: self.num_decodes + 1] == list(range(self.num_decodes + 1))
        assert max(lengths, default=0) <= p * self.page_size
        for i, length in enumerate(lengths):
            new = starts[i + 1] - starts[i]
            assert 0 < new <= length, (i, new, length)
            positions = self.positions[starts[i] : starts[i + 1]]
            assert positions.tolist() == list(range(length - new, length)), (i, positions)
            pages = self.page_table[i].to(torch.int64)[positions // self.page_size]
            assert bool((pages > 0).all()), (i, "a token would be written to the reserved page 0")
            slots = pages * self.page_size + positions % self.page_size
            assert torch.equal(slots, self.slot_mapping[starts[i] : starts[i + 1]]), i
        assert len(set(self.slot_mapping.tolist())) == n, "two tokens share a slot"
        if self.logits_indices.numel():
            first, last = int(self.logits_indices.min()), int(self.logits_indices.max())
            assert 0 <= first <= last < n


class AttentionBackend(Protocol):
    """Paged attention. A layer writes K and V of the step's tokens to the cache, then calls `forward`."""

    @property
    def serves_graphs(self) -> bool:
        """Whether a step of decodes can be captured in a CUDA graph and replayed at other lengths: neither `plan` nor
        `forward` then depends on what the host knows of them."""
        ...

    def plan(self, batch: ForwardBatch) -> Any:
        """What `forward` needs to know about ``batch``, worked out once before layer 0."""
        ...

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """Causal attention of the step's queries over each request's cached tokens.

        Args:
            q: ``[N, num_heads, head_dim]``; the heads of a token lie side by side.
            kv: the layer's cache, ``[2, num_pages, page_size, num_kv_heads, head_dim]`` (K, then V).
            scale: factor of the scores.
            out: where the result goes, contiguous; None: into new memory.

        Returns:
            ``[N, num_heads, head_dim]``, dtype of ``q``.
        """
        ...
