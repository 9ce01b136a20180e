"""`minisgl info`: what a model is, and how much of it fits on this machine. Nothing is loaded."""

from __future__ import annotations

import os

import torch

from minisgl.config import EngineConfig, ModelConfig
from minisgl.engine.attention import choose_attention
from minisgl.launch import (
    CPU_POOL_SHARE,
    find_attention_shape,
    find_context,
    find_device,
    find_dtype,
    find_model,
)
from minisgl.model.registry import count_parameters


def info(config: EngineConfig) -> str:
    """Architecture, sizes, KV bytes a token, attention kernels, and what fits, as text.

    Raises:
        ValueError: the model cannot be found or is not supported.
    """
    folder = find_model(config.model)
    model = ModelConfig.from_folder(folder)
    device = find_device(config.device)
    dtype = find_dtype(config, model, device)
    num_parameters = count_parameters(model)
    weight_bytes = num_parameters * dtype.itemsize
    token_bytes = model.kv_bytes_per_token(dtype.itemsize)
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        pool, where = total * config.memory_fraction - weight_bytes, torch.cuda.get_device_name(device)
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        pool, where = total * config.memory_fraction * CPU_POOL_SHARE, "CPU"
    context = find_context(config, model)
    num_tokens = max(0, int(pool // token_bytes))
    name = str(dtype).removeprefix("torch.")
    rope = model.rope
    lines = {
        "architecture": model.architecture,
        "layers": f"{model.num_layers}, hidden {model.hidden_size}, intermediate {model.intermediate_size}",
        "heads": f"{model.num_heads} query, {model.num_kv_heads} KV, of {model.head_dim}",
        "vocabulary": f"{model.vocab_size}, {'tied' if model.tie_word_embeddings else 'untied'}",
        "context": f"{model.max_position_embeddings} tokens, rotary {rope.rope_type}, theta {rope.theta:g}",
        "parameters": f"{num_parameters:,}",
        "weights": f"{_size(weight_bytes)} in {name}",
        "KV cache": f"{token_bytes:,} bytes a token in {name}",
        "attention": choose_attention(
            config.attention, find_attention_shape(config, model, device, dtype), device=device
        ).reason,
        "machine": f"{where}, {_size(total)}",
        "fits": f"about {num_tokens:,} tokens of KV in {_size(max(pool, 0))}: "
        f"{num_tokens / context:.1f} requests of {context} tokens",
    }
    return "\n".join(f"{key:14}{value}" for key, value in lines.items())


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
