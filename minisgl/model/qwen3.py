"""Qwen3 (Qwen team, 2025): each head of q and k is normalised before the rotation; head_dim stands apart from
hidden_size / num_heads."""

from __future__ import annotations

from minisgl.config import ModelConfig
from minisgl.kernels.kernel_set import Kernels
from minisgl.model.decoder import CausalLM, DecoderLayer
from minisgl.model.layers import Attention, GatedMLP
from minisgl.model.parallel import TensorParallel


def build_qwen3(config: ModelConfig, parallel: TensorParallel, kernels: Kernels, context_len: int) -> CausalLM:
    """``Qwen3ForCausalLM`` with empty weights."""
    bias = config.attention_bias
    layers = [
        DecoderLayer(
            config,
            attention=Attention(config, qk_norm=True, qkv_bias=bias, out_bias=bias, parallel=parallel, kernels=kernels),
            mlp=GatedMLP(config, bias=False, parallel=parallel, kernels=kernels),
        )
        for _ in range(config.num_layers)
    ]
    return CausalLM(config, layers, context_len=context_len, parallel=parallel, kernels=kernels)
