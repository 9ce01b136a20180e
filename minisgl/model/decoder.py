"""The decoder that Llama and its descendants share. What differs between them is what a layer is made of.

Chapter 5 tells this module's story. Modules are named as in the checkpoints, so that weights find their place by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from minisgl.config import ModelConfig
from minisgl.forward import AttentionBackend, ForwardBatch
from minisgl.model.layers import AddRMSNorm, Attention, LMHead, VocabEmbedding
from minisgl.model.parallel import TensorParallel
from minisgl.model.rotary import RotaryEmbedding


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward block; each reads the normalised residual stream and adds to it."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = AddRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x_NE: Tensor,
        residual_NE: Tensor | None,
        cos_NF: Tensor,
        sin_NF: Tensor,
        batch: ForwardBatch,
        kv: Tensor,
        backend: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """What the layer before added and the stream without it, to the same of this layer."""
        x_NE, residual_NE = self.input_layernorm(x_NE, residual_NE)
        x_NE = self.self_attn(x_NE, cos_NF, sin_NF, batch, kv, backend)
        x_NE, residual_NE = self.post_attention_layernorm(x_NE, residual_NE)
        return self.mlp(x_NE), residual_NE


class Decoder(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, layers: Iterable[DecoderLayer], context_len: int
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.rotary = RotaryEmbedding(config.rope, config.max_position_embeddings, context_len)
        self.layers = nn.ModuleList(layers)
        self.norm = AddRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[Tensor], backend: AttentionBackend) -> Tensor:
        """Hidden states ``[N, E]`` of the step's tokens."""
        cos_NF, sin_NF = self.rotary(batch.positions)
        x_NE, residual_NE = self.embed_tokens(batch.input_ids), None
        for layer, kv in zip(self.layers, kv_layers, strict=True):
            x_NE, residual_NE = layer(x_NE, residual_NE, cos_NF, sin_NF, batch, kv, backend)
        x_NE, _ = self.norm(x_NE, residual_NE)
        return x_NE


class CausalLM(nn.Module):
    """A decoder with a head that scores the next token. It holds weights only: batch and KV cache are arguments.

    Args:
        config: shape of the model.
        parallel: this rank's place.
        layers: the decoder's layers in order.
        context_len: longest sequence that will be asked for.
    """

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, layers: Iterable[DecoderLayer], *, context_len: int
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.model = Decoder(config, parallel, layers, context_len)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, parallel, tied=config.tie_word_embeddings)

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[Tensor], attention: AttentionBackend) -> Tensor:
        """One step.

        Args:
            batch: the step's tokens; ``batch.attn_metadata`` comes from ``attention.plan``.
            kv_layers: for each layer its cache, ``kv_shape``; written at ``batch.slot_mapping``.
            attention: backend that reads the cache.

        Returns:
            Hidden states ``[N, hidden_size]``, dtype of the weights.
        """
        return self.model(batch, kv_layers, attention)

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Scores of the next token, ``[S, vocab_size]``, dtype of the weights, whole on every rank."""
        return self.lm_head(hidden_SE, self.model.embed_tokens.weight)

    def kv_shape(self, num_pages: int, page_size: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's KV cache on this rank: ``[2, num_pages, page_size, num_kv_heads, head_dim]``."""
        heads = self.parallel.split_kv_heads(self.config.num_kv_heads)
        return (2, num_pages, page_size, heads.stop - heads.start, self.config.head_dim)
