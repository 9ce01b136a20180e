"""Mistral (Jiang et al., 2023): no biases. Its sliding window is not computed here: `load_model` refuses a context that
is longer than the window."""

from __future__ import annotations

from minisgl.config import ModelConfig
from minisgl.model.decoder import CausalLM, DecoderLayer
from minisgl.model.layers import Attention, GatedMLP
from minisgl.model.parallel import TensorParallel


def build_mistral(config: ModelConfig, parallel: TensorParallel, context_len: int) -> CausalLM:
    """``MistralForCausalLM`` with empty weights."""
    layers = [
        DecoderLayer(
            config,
            attention=Attention(config, parallel, qk_norm=False, qkv_bias=False, out_bias=False),
            mlp=GatedMLP(config, parallel, bias=False),
        )
        for _ in range(config.num_layers)
    ]
    return CausalLM(config, parallel, layers, context_len=context_len)
