"""Mistral (Jiang et al., 2023): no biases. Its sliding window is not computed here: `load_model` refuses a context that
is longer than the window."""

from __future__ import annotations

from minisgl.config import ModelConfig
from minisgl.kernels.kernel_set import Kernels
from minisgl.model.decoder import CausalLM, DecoderLayer
from minisgl.model.layers import Attention, GatedMLP
from minisgl.model.parallel import TensorParallel


def build_mistral(config: ModelConfig, parallel: TensorParallel, kernels: Kernels, context_len: int) -> CausalLM:
    """``MistralForCausalLM`` with empty weights."""
    layers = [
        DecoderLayer(
            config,
            attention=Attention(
                config, qk_norm=False, qkv_bias=False, out_bias=False, parallel=parallel, kernels=kernels
            ),
            mlp=GatedMLP(config, bias=False, parallel=parallel, kernels=kernels),
        )
        for _ in range(config.num_layers)
    ]
    return CausalLM(config, layers, context_len=context_len, parallel=parallel, kernels=kernels)
