"""Paged attention in plain torch: the meaning of every other backend.

Chapter 4 tells this module's story. `attend` is the definition, for one request; `TorchAttention` calls it request by
request, or (`grouped`) computes requests of like shape together, which is what makes decoding on a CPU bearable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.forward import ForwardBatch


def attend(q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, *, scale: float) -> Tensor:
    """Causal attention of one request: its last Q tokens over all its K tokens.

    Args:
        q_QHD: ``[Q, num_heads, head_dim]``.
        k_KGD, v_KGD: ``[K, num_kv_heads, head_dim]``, ``K >= Q``; a KV head serves ``num_heads / num_kv_heads``
            neighbouring query heads.
        scale: factor of the scores.

    Returns:
        ``[Q, num_heads, head_dim]``, computed in float32 and rounded to the dtype of ``q_QHD`` at the end.
    """
    (num_q, num_heads, _), (num_k, num_kv_heads, _) = q_QHD.shape, k_KGD.shape
    k_KHD = k_KGD.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    v_KHD = v_KGD.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores_HQK = torch.einsum("qhd,khd->hqk", q_QHD.float(), k_KHD) * scale
    # Query i is token K - Q + i of its request: it sees itself and what came before.
    sees_QK = torch.ones(num_q, num_k, dtype=torch.bool, device=q_QHD.device).tril(num_k - num_q)
    weights_HQK = scores_HQK.masked_fill(~sees_QK, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights_HQK, v_KHD).to(q_QHD.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """B requests of one step that are computed together: all have Q new tokens, and at most K in all.

    Args:
        tokens: ``[B * Q]`` int64, their tokens among the step's N.
        slots: ``[B * K]`` int64, cache slots of their tokens. Behind a request's end stands its first token's slot,
            never a foreign one: what lies there might be NaN, and NaN times a weight of 0 is NaN.
        sees: ``[B, 1, Q, K]`` bool, which of its tokens each query attends to.
    """

    tokens: Tensor
    slots: Tensor
    sees: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TorchPlan:
    """What `TorchAttention.forward` knows of a step: with grouping the groups, without it host copies of the lengths.

    Args:
        starts: ``cu_seqlens_q`` on the host.
        lengths: ``seq_lens`` on the host.
        groups: together all requests of the step; empty without grouping.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    groups: tuple[Group, ...]


class TorchAttention:
    """Attention for any device, dtype and head_dim. It keeps no state between steps.

    Args:
        grouped: compute requests of like shape together. False is the slow twin: one request after the other.
    """

    serves_graphs = False  # the groups depend on the lengths

    def __init__(self, *, grouped: bool = True) -> None:
        self.grouped = grouped

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        """Form the groups, from the lengths on the host."""
        starts, lengths = batch.host_cu_seqlens_q.tolist(), batch.host_seq_lens.tolist()
        if not self.grouped:
            return TorchPlan(starts, lengths, ())
        # Lengths within a factor of two share a group, so that padding at most doubles the work.
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, length in enumerate(lengths):
            members[starts[i + 1] - starts[i], length.bit_length()].append(i)
        groups = [_group(batch, rows, num_new, max(lengths[i] for i in rows)) for (num_new, _), rows in members.items()]
        return TorchPlan(starts, lengths, tuple(groups))

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """See `minisgl.forward.AttentionBackend`."""
        plan: TorchPlan = batch.attn_metadata
        out_NHD = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        if plan.groups:
            k_slots, v_slots = kv.flatten(1, 2)
            for group in plan.groups:
                out_NHD.index_copy_(0, group.tokens, _attend_group(q, k_slots, v_slots, group, scale))
            return out_NHD
        for i, length in enumerate(plan.lengths):
            tokens = slice(plan.starts[i], plan.starts[i + 1])
            k, v = kv[:, batch.page_table[i]].flatten(1, 2)[:, :length]
            out_NHD[tokens] = attend(q[tokens], k, v, scale=scale)
        return out_NHD


def _group(batch: ForwardBatch, rows: list[int], num_new: int, max_len: int) -> Group:
    device = batch.input_ids.device
    rows_B = torch.tensor(rows, device=device)
    lengths_B = batch.seq_lens[rows_B].to(torch.int64)
    new_Q, all_K = torch.arange(num_new, device=device), torch.arange(max_len, device=device)
    tokens_BQ = batch.cu_seqlens_q[rows_B].to(torch.int64)[:, None] + new_Q
    places_BK = torch.where(all_K < lengths_B[:, None], all_K, 0)
    pages_BK = batch.page_table[rows_B[:, None], places_BK // batch.page_size].to(torch.int64)
    slots_BK = pages_BK * batch.page_size + places_BK % batch.page_size
    positions_BQ = lengths_B[:, None] - num_new + new_Q
    sees_BQK = all_K <= positions_BQ[:, :, None]
    return Group(tokens_BQ.flatten(), slots_BK.flatten(), sees_BQK[:, None])


def _attend_group(q_NHD: Tensor, k_slots: Tensor, v_slots: Tensor, group: Group, scale: float) -> Tensor:
    """The same as `attend` for B requests at once; returns ``[B * Q, num_heads, head_dim]``.

    The query heads that share a KV head are laid out as more queries of it, so K and V are not repeated.
    """
    num_b, _, num_q, num_k = group.sees.shape
    num_kv_heads, dim = k_slots.shape[1:]
    q = q_NHD.index_select(0, group.tokens).view(num_b, num_q, num_kv_heads, -1, dim)
    repeat = q.shape[3]
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
    k = k_slots.index_select(0, group.slots).view(num_b, num_k, num_kv_heads, dim).transpose(1, 2)
    v = v_slots.index_select(0, group.slots).view(num_b, num_k, num_kv_heads, dim).transpose(1, 2)
    sees = group.sees[:, :, None].expand(-1, -1, repeat, -1, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)
    out = out.view(num_b, num_kv_heads, repeat, num_q, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_b * num_q, num_kv_heads * repeat, dim)
