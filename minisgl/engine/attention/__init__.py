"""Attention backends behind one protocol, the torch reference first."""

from __future__ import annotations

import torch

from minisgl.engine.attention.torch_backend import TorchAttention
from minisgl.forward import AttentionBackend

__all__ = ["load_attention"]

_BACKENDS = ("auto", "torch")


def load_attention(name: str = "auto", *, device: torch.device | str = "cpu") -> AttentionBackend:
    """The attention backend called ``name``; "auto" takes the fastest one for ``device``, which is the torch backend
    so far. Raises ``ValueError``, listing the backends, for an unknown name."""
    if name not in _BACKENDS:
        raise ValueError(f"attention must be one of {', '.join(map(repr, _BACKENDS))}, got {name!r}")
    return TorchAttention()
