"""Published models as shapes: their ``config.json`` and nothing else.

Speed does not depend on what the weights say, so a benchmark fills these with random ones and needs no download.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minisgl.checkpoint import TINY

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "head_dim": 128,
    "num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "attention_bias": False, "dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        **_QWEN3, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 17_408,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "head_dim": 128,
        "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5, "attention_bias": False, "dtype": "bfloat16", "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14_336, "tie_word_embeddings": False,
    },
}  # fmt: skip


@contextmanager
def shape_folder(name: str) -> Iterator[str]:
    """A folder that lives as long as the block and that an engine with ``load_format="dummy"`` can open: the shape's
    ``config.json`` and the bundled tokenizer. Token ids beyond the tokenizer's have no text.

    Raises:
        ValueError: there is no such shape.
    """
    if name not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}")
    with tempfile.TemporaryDirectory() as folder:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(TINY / file, folder)
        with open(f"{folder}/config.json", "w", encoding="utf-8") as file_:
            json.dump(SHAPES[name], file_)
        yield folder
