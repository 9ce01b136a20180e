"""The layers that all architectures are made of.

Chapter 5 tells this module's story. A layer owns its share of the weights and nothing else; the step comes in as
arguments, and what computes is a set of `Kernels` that it was given. What runs through a model is the residual stream
``[N, E]``: each block reads it through a norm and adds to it in place, so norm and addition can be part of the products
beside them. The norm may be part of the product before it, too: a block is told which one comes next. Shape suffixes:
N tokens of the step, S tokens that get logits, H heads, D head_dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.config import ModelConfig
from minisgl.forward import AttentionBackend, ForwardBatch
from minisgl.kernels.kernel_set import Kernels
from minisgl.model.parallel import Shard, TensorParallel


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class RMSNorm(nn.Module):
    """Weight of a root-mean-square norm over the last dimension. Whoever reads through it applies it on the way."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps


@dataclass(slots=True, eq=False)
class ResidualStream:
    """What runs through the layers, changed in place by each block.

    Args:
        x: ``[N, E]``.
        normed: ``[N, E]``, what was added last, as the next reader sees it: ``x`` through that reader's norm. None: it
            has to apply the norm itself.
    """

    x: Tensor
    normed: Tensor | None = None


class ColumnParallelLinear(nn.Module):
    """``x W^T + b`` with the rows of W divided over the ranks; tensors of the checkpoint lie merged below each other.

    Args:
        in_features: size of the input, whole on every rank.
        columns: for each merged tensor its name in the checkpoint, all its outputs, and this rank's share of them.
        bias: whether each of them has a bias.
        kernels: what computes.
    """

    def __init__(
        self, in_features: int, columns: Sequence[tuple[str, int, slice]], *, bias: bool, kernels: Kernels
    ) -> None:
        super().__init__()
        self.kernels = kernels
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

    def forward(self, stream: ResidualStream, norm: RMSNorm) -> Tensor:
        """The normalised residual stream ``[N, in_features]`` to ``[N, sum of this rank's shares]``."""
        return self.kernels.norm_linear(stream.x, norm.weight, norm.eps, self.weight, self.bias, stream.normed)

    def gated(self, stream: ResidualStream, norm: RMSNorm) -> Tensor:
        """``silu(gate) * up`` of the two tensors that lie merged: to ``[N, this rank's share of one]``."""
        return self.kernels.norm_linear_silu(stream.x, norm.weight, norm.eps, self.weight, self.bias, stream.normed)


class RowParallelLinear(nn.Module):
    """Adds ``x W^T + b`` to the residual stream, with the columns of W, and x, divided over the ranks.

    Args:
        in_features: columns of W in the checkpoint.
        share: this rank's columns.
        out_features: size of the stream, whole on every rank.
        bias: added once, after the sum over the ranks.
        parallel, kernels: this rank's place, and what computes.
    """

    def __init__(
        self,
        in_features: int,
        share: slice,
        out_features: int,
        *,
        bias: bool,
        parallel: TensorParallel,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.kernels = kernels
        self.weight = _parameter(out_features, share.stop - share.start)
        self.bias = _parameter(out_features) if bias else None
        source = (slice(None), share)
        self.shards = {"weight": [Shard((out_features, in_features), source, slice(0, out_features))]}

    def forward(self, x: Tensor, stream: ResidualStream, next_norm: RMSNorm | None) -> None:
        """``[N, share]`` is multiplied and added to the stream, in place; ``next_norm`` is what reads it next."""
        if self.parallel.size == 1:
            norm = None if next_norm is None else (next_norm.weight, next_norm.eps)
            stream.normed = self.kernels.linear_add(x, self.weight, stream.x, self.bias, norm)
            return
        # The ranks' parts meet before they are added: the stream is the same on all.
        part_NE = torch.zeros_like(stream.x)
        self.kernels.linear_add(x, self.weight, part_NE, None, None)
        stream.x.add_(self.parallel.all_reduce(part_NE))
        if self.bias is not None:
            stream.x.add_(self.bias)
        stream.normed = None


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
            return self.weight[ids_N]  # 2 us for up to 16 rows on an H200, where `F.embedding` takes 12
        mine_N = (ids_N >= self.share.start) & (ids_N < self.share.stop)
        x_NE = F.embedding(torch.where(mine_N, ids_N - self.share.start, 0), self.weight)
        return self.parallel.all_reduce(x_NE * mine_N[:, None])


class LMHead(nn.Module):
    """The last norm, and scores of the whole vocabulary, divided over the ranks like `VocabEmbedding`.

    With ``tied`` it has no weight of its own: the embedding's is the one that it is called with.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied: bool, parallel: TensorParallel, kernels: Kernels
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.kernels = kernels
        self.vocab_size = vocab_size
        share = parallel.split_padded(vocab_size)
        self.weight = None if tied else _parameter(share.stop - share.start, hidden_size)
        self.shards = _vocab_shards(vocab_size, hidden_size, share)

    def forward(self, stream_SE: Tensor, norm: RMSNorm, embedding_VE: Tensor) -> Tensor:
        """The residual stream ``[S, E]`` to ``[S, vocab_size]``; padding is cut off behind the last rank's share."""
        weight_VE = embedding_VE if self.weight is None else self.weight
        scores = self.kernels.norm_linear(stream_SE, norm.weight, norm.eps, weight_VE, None, None)
        return self.parallel.all_gather(scores)[:, : self.vocab_size]


class Attention(nn.Module):
    """Queries, keys and values; optional norm of each head; rotation; paged attention; output.

    Args:
        config: shape of the model.
        qk_norm: normalise each head of q and k before the rotation.
        qkv_bias, out_bias: whether these projections have a bias.
        parallel: heads are divided over its ranks; KV heads are held twice where there are fewer heads than ranks.
        kernels: what computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        qk_norm: bool,
        qkv_bias: bool,
        out_bias: bool,
        parallel: TensorParallel,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        dim, heads = config.head_dim, parallel.split(config.num_heads, "num_attention_heads")
        kv_heads = parallel.split_kv_heads(config.num_kv_heads)
        q = slice(heads.start * dim, heads.stop * dim)
        kv = slice(kv_heads.start * dim, kv_heads.stop * dim)
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        columns = [("q_proj", q_size, q), ("k_proj", kv_size, kv), ("v_proj", kv_size, kv)]
        self.num_heads = heads.stop - heads.start
        self.scale, self.eps = dim**-0.5, config.rms_norm_eps
        self.kernels = kernels
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, columns, bias=qkv_bias, kernels=kernels)
        self.o_proj = RowParallelLinear(
            q_size, q, config.hidden_size, bias=out_bias, parallel=parallel, kernels=kernels
        )
        self.q_norm = RMSNorm(dim, self.eps) if qk_norm else None
        self.k_norm = RMSNorm(dim, self.eps) if qk_norm else None

    def forward(
        self,
        stream: ResidualStream,
        norm: RMSNorm,
        next_norm: RMSNorm,
        cos_NF: Tensor,
        sin_NF: Tensor,
        batch: ForwardBatch,
        kv: Tensor,
        backend: AttentionBackend,
    ) -> None:
        """Read the stream through ``norm``, write the step's keys and values into the layer's cache ``kv``, and add
        what the queries find there to the stream, which is read through ``next_norm`` then."""
        qkv = self.qkv_proj(stream, norm)
        q_weight, k_weight = (None if n is None else n.weight for n in (self.q_norm, self.k_norm))
        q_NHD = self.kernels.norm_rotary_store(
            qkv, q_weight, k_weight, self.eps, cos_NF, sin_NF, kv, batch.slot_mapping, num_heads=self.num_heads
        )
        out_NHD = backend.forward(q_NHD, kv, batch, scale=self.scale)
        self.o_proj(out_NHD.flatten(1), stream, next_norm)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, *, bias: bool, parallel: TensorParallel, kernels: Kernels) -> None:
        super().__init__()
        size = config.intermediate_size
        share = parallel.split(size, "intermediate_size")
        columns = [("gate_proj", size, share), ("up_proj", size, share)]
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, columns, bias=bias, kernels=kernels)
        self.down_proj = RowParallelLinear(
            size, share, config.hidden_size, bias=bias, parallel=parallel, kernels=kernels
        )

    def forward(self, stream: ResidualStream, norm: RMSNorm, next_norm: RMSNorm | None) -> None:
        """Read the stream through ``norm``, and add to it; ``next_norm`` is what reads it next."""
        self.down_proj(self.gate_up_proj.gated(stream, norm), stream, next_norm)
