"""Llama 2 and 3 (Meta, 2023 and 2024): the plain form, with biases where the configuration asks for them."""

from __future__ import annotations

from minisgl.config import ModelConfig
from minisgl.model.decoder import CausalLM, DecoderLayer
from minisgl.model.layers import Attention, GatedMLP
from minisgl.model.parallel import TensorParallel


def build_llama(config: ModelConfig, parallel: TensorParallel, context_len: int) -> CausalLM:
    """``LlamaForCausalLM`` with empty weights."""
    bias = config.attention_bias
    layers = [
        DecoderLayer(
            config,
            attention=Attention(config, parallel, qk_norm=False, qkv_bias=bias, out_bias=bias),
            mlp=GatedMLP(config, parallel, bias=config.mlp_bias),
        )
        for _ in range(config.num_layers)
    ]
    return CausalLM(config, parallel, layers, context_len=context_len)
