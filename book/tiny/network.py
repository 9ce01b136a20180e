"""The Qwen3 network by hand, for training: a few plain modules with the names that checkpoints use.

Weights are kept in float32 and cast by autocast. `tests/test_tiny.py` holds it equal to `transformers`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "dtype": "bfloat16",
}


class RMSNorm(nn.Module):
    """Scales vectors to a root mean square of one, and then each coordinate by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with fewer key and value heads than query heads; queries and keys are normed, then rotated."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        hidden, self.dim = c["hidden_size"], c["head_dim"]
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.dim, c["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.dim).transpose(1, 2)

        def rotated(y: Tensor) -> Tensor:
            a, b = y.chunk(2, dim=-1)
            return (y * cos + torch.cat((-b, a), dim=-1) * sin).to(y.dtype)

        q = rotated(self.q_norm(heads(self.q_proj(x))))
        k = rotated(self.k_norm(heads(self.k_proj(x))))
        v = heads(self.v_proj(x))
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """The gated network between the attentions."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and network, each with a norm before it and the input added after it."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """The whole model; output and input share the embedding."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(c["vocab_size"], c["hidden_size"]),
                "layers": nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"])),
                "norm": RMSNorm(c["hidden_size"], c["rms_norm_eps"]),
            }
        )
        inverse = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2).double() / c["head_dim"])
        angles = torch.outer(torch.arange(c["max_position_embeddings"]).double(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        depth = (2 * c["num_hidden_layers"]) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=c["initializer_range"] * (depth if small else 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[batch, length, vocab]` of token ids `[batch, length]`."""
        x = self.model["embed_tokens"](ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model["layers"]:
            x = layer(x, cos, sin)
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of each next token in rows of ids `[batch, length + 1]`."""
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
