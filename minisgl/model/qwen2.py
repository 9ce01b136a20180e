"""Qwen2 and Qwen2.5 (Qwen team, 2024): queries, keys and values always have a bias, the output never."""

from __future__ import annotations

from minisgl.config import ModelConfig
from minisgl.kernels.kernel_set import Kernels
from minisgl.model.decoder import CausalLM, DecoderLayer
from minisgl.model.layers import Attention, GatedMLP
from minisgl.model.parallel import TensorParallel


def build_qwen2(config: ModelConfig, parallel: TensorParallel, kernels: Kernels, context_len: int) -> CausalLM:
    """``Qwen2ForCausalLM`` with empty weights."""
    layers = [
        DecoderLayer(
            config,
            attention=Attention(
                config, qk_norm=False, qkv_bias=True, out_bias=False, parallel=parallel, kernels=kernels
            ),
            mlp=GatedMLP(config, bias=False, parallel=parallel, kernels=kernels),
        )
        for _ in range(config.num_layers)
    ]
    return CausalLM(config, layers, context_len=context_len, parallel=parallel, kernels=kernels)
