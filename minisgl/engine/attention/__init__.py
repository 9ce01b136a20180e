"""Attention backends behind one protocol, the torch reference first."""

from __future__ import annotations

from importlib import import_module

import torch

from minisgl.engine.attention.torch_backend import TorchAttention
from minisgl.forward import AttentionBackend

__all__ = ["load_attention"]

_BACKENDS = ("auto", "torch", "triton")


def load_attention(name: str = "auto", *, device: torch.device | str = "cpu") -> AttentionBackend:
    """The attention backend called ``name`` for ``device``; "auto" is the torch backend until another is measured.

    A backend's module is imported when it is asked for: triton is heavy, and not to be had everywhere.

    Raises:
        ValueError: no such backend (the message lists them), its package is not installed, or it cannot run on
            ``device``.
    """
    if name not in _BACKENDS:
        raise ValueError(f"attention must be one of {', '.join(map(repr, _BACKENDS))}, got {name!r}")
    if name != "triton":
        return TorchAttention()
    try:
        module = import_module("minisgl.engine.attention.triton_backend")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise ValueError("attention 'triton' needs the package triton, which is there for Linux only") from error
    backend: AttentionBackend = module.TritonAttention(device)
    return backend
