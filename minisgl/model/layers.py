"""The layers that all architectures are made of.

Chapter 5 tells this module's story. A layer owns its share of the weights and nothing else; the step comes in as
arguments. Shape suffixes: N tokens of the step, S tokens that get logits, H heads, D head_dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config import ModelConfig
from minisgl.forward import AttentionBackend, ForwardBatch
from minisgl.kernels.activation import silu_and_mul
from minisgl.kernels.kv import store_kv
from minisgl.kernels.norm import add_rms_norm, rms_norm
from minisgl.kernels.rotary import apply_rotary
from minisgl.model.parallel import Shard, TensorParallel


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to the same."""
        return rms_norm(x, self.weight, self.eps)


class AddRMSNorm(RMSNorm):
    """RMSNorm fused with the addition to the residual stream that stands before it."""

    def forward(self, x_NE: Tensor, residual_NE: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum. At the start of the stream there is no residual yet."""
        if residual_NE is None:
            return rms_norm(x_NE, self.weight, self.eps), x_NE
        return add_rms_norm(x_NE, residual_NE, self.weight, self.eps)


class ColumnParallelLinear(nn.Module):
    """``x W^T + b`` with the rows of W divided over the ranks; tensors of the checkpoint lie merged below each other.

    Args:
        in_features: size of the input, whole on every rank.
        columns: for each merged tensor its name in the checkpoint, all its outputs, and this rank's share of them.
        bias: whether each of them has a bias.
    """

    def __init__(self, in_features: int, columns: Sequence[tuple[str, int, slice]], *, bias: bool) -> None:
        super().__init__()
        self.sizes = [share.stop - share.start for _, _, share in columns]
        self.weight = _parameter(sum(self.sizes), in_features)
        self.bias = _parameter(sum(self.sizes)) if bias else None
        weights, biases, start = [], [], 0
        for (name, total, share), size in zip(columns, self.sizes, strict=True):
            rows = slice(start, start + size)
            weights.append(Shard((total, in_features), (share, slice(None)), rows, name))
            biases.append(Shard((total,), (share,), rows, name))
            start += size
        self.shards = {"weight": weights, "bias": biases}

    def forward(self, x: Tensor) -> Tensor:
        """``[N, in_features]`` to ``[N, sum of this rank's shares]``."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """``x W^T + b`` with the columns of W, and the input, divided over the ranks; the output is whole on each."""

    def __init__(self, in_features: int, share: slice, out_features: int, *, bias: bool, parallel: TensorParallel):
        super().__init__()
        self.parallel = parallel
        self.weight = _parameter(out_features, share.stop - share.start)
        self.bias = _parameter(out_features) if bias else None
        source = (slice(None), share)
        self.shards = {"weight": [Shard((out_features, in_features), source, slice(0, out_features))]}

    def forward(self, x: Tensor) -> Tensor:
        """This rank's ``[N, share]`` to ``[N, out_features]``. The bias is added once, after the sum over the ranks."""
        if self.parallel.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = self.parallel.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def _vocab_shards(vocab_size: int, hidden_size: int, share: slice) -> dict[str, list[Shard]]:
    source = slice(min(share.start, vocab_size), min(share.stop, vocab_size))
    rows = slice(0, source.stop - source.start)
    return {"weight": [Shard((vocab_size, hidden_size), (source, slice(None)), rows)]}


class VocabEmbedding(nn.Module):
    """Token embedding with the vocabulary divided over the ranks, padded with zero rows to equal shares."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.share = parallel.split_padded(vocab_size)
        self.weight = _parameter(self.share.stop - self.share.start, hidden_size)
        self.shards = _vocab_shards(vocab_size, hidden_size, self.share)

    def forward(self, ids_N: Tensor) -> Tensor:
        """``[N]`` int64 to ``[N, E]``. Each rank looks up its own tokens; the sum puts them together."""
        if self.parallel.size == 1:
            return F.embedding(ids_N, self.weight)
        mine_N = (ids_N >= self.share.start) & (ids_N < self.share.stop)
        x_NE = F.embedding(torch.where(mine_N, ids_N - self.share.start, 0), self.weight)
        return self.parallel.all_reduce(x_NE * mine_N[:, None])


class LMHead(nn.Module):
    """Scores of the whole vocabulary, divided over the ranks like `VocabEmbedding`.

    With ``tied`` it has no weight of its own: the embedding's is the one that it is called with.
    """

    def __init__(self, vocab_size: int, hidden_size: int, parallel: TensorParallel, *, tied: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.vocab_size = vocab_size
        share = parallel.split_padded(vocab_size)
        self.weight = None if tied else _parameter(share.stop - share.start, hidden_size)
        self.shards = _vocab_shards(vocab_size, hidden_size, share)

    def forward(self, hidden_SE: Tensor, embedding_VE: Tensor) -> Tensor:
        """``[S, E]`` to ``[S, vocab_size]``; the padding is cut off behind the last rank's share."""
        weight_VE = embedding_VE if self.weight is None else self.weight
        return self.parallel.all_gather(F.linear(hidden_SE, weight_VE))[:, : self.vocab_size]


class Attention(nn.Module):
    """Queries, keys and values; optional norm of each head; rotation; paged attention; output.

    Args:
        config: shape of the model.
        parallel: heads are divided over its ranks; KV heads are held twice where there are fewer heads than ranks.
        qk_norm: normalise each head of q and k before the rotation.
        qkv_bias, out_bias: whether these projections have a bias.
    """

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, *, qk_norm: bool, qkv_bias: bool, out_bias: bool
    ) -> None:
        super().__init__()
        dim, heads = config.head_dim, parallel.split(config.num_heads, "num_attention_heads")
        kv_heads = parallel.split_kv_heads(config.num_kv_heads)
        q = slice(heads.start * dim, heads.stop * dim)
        kv = slice(kv_heads.start * dim, kv_heads.stop * dim)
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        columns = [("q_proj", q_size, q), ("k_proj", kv_size, kv), ("v_proj", kv_size, kv)]
        self.head_dim = dim
        self.scale = dim**-0.5
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, columns, bias=qkv_bias)
        self.o_proj = RowParallelLinear(q_size, q, config.hidden_size, bias=out_bias, parallel=parallel)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if qk_norm else None

    def forward(
        self, x_NE: Tensor, cos_NF: Tensor, sin_NF: Tensor, batch: ForwardBatch, kv: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """``[N, E]`` to the same; writes the step's keys and values into the layer's cache ``kv``."""
        q, k, v = self.qkv_proj(x_NE).split(self.qkv_proj.sizes, dim=-1)
        q_NHD, k_NHD, v_NHD = (x.view(x.shape[0], -1, self.head_dim) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q_NHD, k_NHD = self.q_norm(q_NHD), self.k_norm(k_NHD)
        q_NHD, k_NHD = apply_rotary(q_NHD, k_NHD, cos_NF, sin_NF)
        store_kv(k_NHD, v_NHD, kv, batch.slot_mapping)
        out_NHD = backend.forward(q_NHD, kv, batch, scale=self.scale)
        return self.o_proj(out_NHD.flatten(1))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, *, bias: bool) -> None:
        super().__init__()
        size = config.intermediate_size
        share = parallel.split(size, "intermediate_size")
        columns = [("gate_proj", size, share), ("up_proj", size, share)]
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, columns, bias=bias)
        self.down_proj = RowParallelLinear(size, share, config.hidden_size, bias=bias, parallel=parallel)

    def forward(self, x_NE: Tensor) -> Tensor:
        """``[N, E]`` to the same."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x_NE)))
