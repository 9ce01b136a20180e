"""Layers, architectures and weights.

Chapter 5 tells this room's story. A model is a plain `nn.Module` that is called with a `ForwardBatch`; it owns its
weights and nothing else.
"""

from minisgl.model.decoder import CausalLM
from minisgl.model.parallel import TensorParallel
from minisgl.model.registry import load_model

__all__ = ["CausalLM", "TensorParallel", "load_model"]
