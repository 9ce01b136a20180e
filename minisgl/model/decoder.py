"""The decoder that Llama and its descendants share. What differs between them is what a layer is made of.

Chapter 5 tells this module's story. Modules are named as in the checkpoints, so that weights find their place by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from minisgl.config import ModelConfig
from minisgl.forward import AttentionBackend, ForwardBatch
from minisgl.kernels.kernel_set import Kernels
from minisgl.model.layers import Attention, GatedMLP, LMHead, ResidualStream, RMSNorm, VocabEmbedding
from minisgl.model.parallel import TensorParallel
from minisgl.model.rotary import RotaryEmbedding


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward block; each reads the residual stream through a norm and adds to it."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        stream: ResidualStream,
        next_norm: RMSNorm | None,
        cos_NF: Tensor,
        sin_NF: Tensor,
        batch: ForwardBatch,
        kv: Tensor,
        backend: AttentionBackend,
    ) -> None:
        """Changes the stream in place; ``next_norm`` is the next layer's, None behind the last."""
        self.self_attn(stream, self.input_layernorm, self.post_attention_layernorm, cos_NF, sin_NF, batch, kv, backend)
        self.mlp(stream, self.post_attention_layernorm, next_norm)


class Decoder(nn.Module):
    """Embedding and layers; the weight of the last norm is here too, where checkpoints have it."""

    def __init__(
        self, config: ModelConfig, layers: Iterable[DecoderLayer], *, context_len: int, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.rotary = RotaryEmbedding(config.rope, config.max_position_embeddings, context_len)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[Tensor], backend: AttentionBackend) -> Tensor:
        """The residual stream ``[N, E]`` behind the last layer."""
        cos_NF, sin_NF = self.rotary(batch.positions)
        stream = ResidualStream(self.embed_tokens(batch.input_ids))
        # The head reads some rows only, so the last layer leaves the last norm to it.
        next_norms = [*(layer.input_layernorm for layer in self.layers), None][1:]
        for layer, next_norm, kv in zip(self.layers, next_norms, kv_layers, strict=True):
            layer(stream, next_norm, cos_NF, sin_NF, batch, kv, backend)
        return stream.x


class CausalLM(nn.Module):
    """A decoder with a head that scores the next token. It holds weights only: batch and KV cache are arguments.

    Args:
        config: shape of the model.
        layers: the decoder's layers in order.
        context_len: longest sequence that will be asked for.
        parallel: this rank's place.
        kernels: what computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[DecoderLayer],
        *,
        context_len: int,
        parallel: TensorParallel,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.model = Decoder(config, layers, context_len=context_len, parallel=parallel)
        tied = config.tie_word_embeddings
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, tied=tied, parallel=parallel, kernels=kernels)

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[Tensor], attention: AttentionBackend) -> Tensor:
        """One step.

        Args:
            batch: the step's tokens; ``batch.attn_metadata`` comes from ``attention.plan``.
            kv_layers: for each layer its cache, ``kv_shape``; written at ``batch.slot_mapping``.
            attention: backend that reads the cache.

        Returns:
            The residual stream ``[N, hidden_size]`` behind the last layer, dtype of the weights. `logits` reads it
            through the last norm.
        """
        return self.model(batch, kv_layers, attention)

    def logits(self, stream_SE: Tensor) -> Tensor:
        """Scores of the next token, ``[S, vocab_size]``, dtype of the weights, whole on every rank."""
        return self.lm_head(stream_SE, self.model.norm, self.model.embed_tokens.weight)

    def kv_shape(self, num_pages: int, page_size: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's KV cache on this rank: ``[2, num_pages, page_size, num_kv_heads, head_dim]``."""
        heads = self.parallel.split_kv_heads(self.config.num_kv_heads)
        return (2, num_pages, page_size, heads.stop - heads.start, self.config.head_dim)
