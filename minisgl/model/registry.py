"""From a checkpoint's configuration to a loaded model: the one place that names the architectures.

Chapter 5 tells this module's story.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from minisgl.config import LoadFormat, ModelConfig
from minisgl.kernels.kernel_set import PLAIN, Kernels
from minisgl.model.decoder import CausalLM
from minisgl.model.llama import build_llama
from minisgl.model.mistral import build_mistral
from minisgl.model.parallel import TensorParallel
from minisgl.model.qwen2 import build_qwen2
from minisgl.model.qwen3 import build_qwen3
from minisgl.model.weights import fill_with_dummies, load_weights

_ARCHITECTURES: dict[str, Callable[[ModelConfig, TensorParallel, Kernels, int], CausalLM]] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_mistral,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen3ForCausalLM": build_qwen3,
}


def load_model(
    config: ModelConfig,
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    parallel: TensorParallel | None = None,
    kernels: Kernels = PLAIN,
    load_format: LoadFormat = "auto",
    max_model_len: int | None = None,
    progress: bool = False,
) -> CausalLM:
    """Build the model that ``config`` describes and load its weights from ``folder``.

    Args:
        config: what the folder's ``config.json`` says.
        folder: checkpoint with safetensors files; not read for ``load_format="dummy"``.
        device: where the weights go.
        dtype: what the weights are converted to.
        parallel: this rank's place; None: the only rank.
        kernels: what computes: plain torch, or the fused ones.
        load_format: "dummy" fills in random weights of the true shapes.
        max_model_len: longest sequence in tokens; None: the checkpoint's ``max_position_embeddings``.
        progress: show a bar.

    Raises:
        ValueError: for an architecture, rotary kind, option or checkpoint that is not supported, naming it.
    """
    context_len = max_model_len or config.max_position_embeddings
    check_supported(config, context_len)
    with torch.device("meta"):  # shapes only; each weight is allocated when it is read
        model = _ARCHITECTURES[config.architecture](config, parallel or TensorParallel(), kernels, context_len)
    if load_format == "dummy":
        fill_with_dummies(model, device=device, dtype=dtype, seed=model.parallel.rank)
    else:
        load_weights(model, folder, device=device, dtype=dtype, progress=progress)
    return model.eval()


def count_parameters(config: ModelConfig) -> int:
    """Weights of the model that ``config`` describes, tied ones once. Nothing is allocated. Raises ``ValueError`` as
    `load_model` does."""
    check_supported(config, config.max_position_embeddings)
    with torch.device("meta"):
        model = _ARCHITECTURES[config.architecture](config, TensorParallel(), PLAIN, config.max_position_embeddings)
    return sum(parameter.numel() for parameter in model.parameters())


def check_supported(config: ModelConfig, context_len: int) -> None:
    """Raise ``ValueError``, saying what is supported, for what would otherwise be computed wrongly or not at all."""
    if config.architecture not in _ARCHITECTURES:
        raise ValueError(
            f"architecture {config.architecture!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    activation = config.raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; supported is 'silu'")
    if config.raw.get("quantization_config"):
        method = config.raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantised checkpoints (quant_method {method!r}) are not supported")
    if config.sliding_window is not None and config.sliding_window < context_len:
        raise ValueError(
            f"sliding_window {config.sliding_window} is not supported for a context of {context_len} tokens; "
            f"max_model_len can be at most {config.sliding_window}"
        )
