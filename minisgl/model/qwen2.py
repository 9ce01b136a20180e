"""Qwen2 and Qwen2.5 (Qwen team, 2024): queries, keys and values always have a bias, the output never."""

from __future__ import annotations

from minisgl.config import ModelConfig
from minisgl.model.decoder import CausalLM, DecoderLayer
from minisgl.model.layers import Attention, GatedMLP
from minisgl.model.parallel import TensorParallel


def build_qwen2(config: ModelConfig, parallel: TensorParallel, context_len: int) -> CausalLM:
    """``Qwen2ForCausalLM`` with empty weights."""
    layers = [
        DecoderLayer(
            config,
            attention=Attention(config, parallel, qk_norm=False, qkv_bias=True, out_bias=False),
            mlp=GatedMLP(config, parallel, bias=False),
        )
        for _ in range(config.num_layers)
    ]
    return CausalLM(config, parallel, layers, context_len=context_len)
