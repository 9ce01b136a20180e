"""minisgl: a compact LLM serving engine that is also an executable book.

The public names are loaded on first use, so that importing a torch-free room does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.request import Completion, Logprob, RequestOutput, SamplingParams, Timings, Usage

__version__ = "0.1.0"

_HOMES = {
    "LLM": "minisgl.llm",
    "SamplingParams": "minisgl.request",
    "RequestOutput": "minisgl.request",
    "Completion": "minisgl.request",
    "Logprob": "minisgl.request",
    "Timings": "minisgl.request",
    "Usage": "minisgl.request",
}

__all__ = ["LLM", "Completion", "Logprob", "RequestOutput", "SamplingParams", "Timings", "Usage"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
