"""Llama 2 and 3 (Meta, 2023 and 2024): the plain form, with biases where the configuration asks for them."""

from __future__ import annotations

from minisgl.config import ModelConfig
from minisgl.kernels.kernel_set import Kernels
from minisgl.model.decoder import CausalLM, DecoderLayer
from minisgl.model.layers import Attention, GatedMLP
from minisgl.model.parallel import TensorParallel


def build_llama(config: ModelConfig, parallel: TensorParallel, kernels: Kernels, context_len: int) -> CausalLM:
    """``LlamaForCausalLM`` with empty weights."""
    bias = config.attention_bias
    layers = [
        DecoderLayer(
            config,
            attention=Attention(
                config, qk_norm=False, qkv_bias=bias, out_bias=bias, parallel=parallel, kernels=kernels
            ),
            mlp=GatedMLP(config, bias=config.mlp_bias, parallel=parallel, kernels=kernels),
        )
        for _ in range(config.num_layers)
    ]
    return CausalLM(config, layers, context_len=context_len, parallel=parallel, kernels=kernels)
