"""Attention backends behind one protocol, the torch reference first."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from minisgl.engine.attention.choice import AttentionShape, Capability, Choice, choose, flashinfer_problem, parse
from minisgl.engine.attention.rehearsal import rehearse
from minisgl.engine.attention.split import BySize, SplitAttention
from minisgl.engine.attention.torch_backend import TorchAttention
from minisgl.forward import AttentionBackend

__all__ = ["AttentionShape", "choose_attention", "load_attention", "parse"]

logger = logging.getLogger(__name__)


def choose_attention(
    name: str, shape: AttentionShape, *, device: torch.device, no_flashinfer: str | None = None
) -> Choice:
    """`choose` for this machine, as it is found. Nothing heavy is imported.

    Raises:
        ValueError: as `choose`.
    """
    parse(name)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if no_flashinfer is None:
        no_flashinfer = _flashinfer_problem(capability)
    return choose(name, capability, shape, no_triton=_triton_problem(), no_flashinfer=no_flashinfer)


def load_attention(
    name: str = "auto", *, device: torch.device | str = "cpu", shape: AttentionShape | None = None
) -> AttentionBackend:
    """The attention backend called ``name`` for ``device`` and ``shape``.

    A backend's module is imported when it is needed: triton and flashinfer are heavy, and not to be had everywhere.

    Args:
        name: "auto", "torch", "triton", "flashinfer", or "PREFILL,DECODE", such as "fa3,xqa".
        shape: by default a float32 one: enough for torch, which takes any.

    Raises:
        ValueError: no such backend (the message lists them), its package is not installed, or it cannot serve ``shape``
            on ``device``. Not for "auto", which takes what can.
    """
    device = torch.device(device)
    if shape is None:
        shape = AttentionShape(dtype=torch.float32, num_heads=1, num_kv_heads=1, head_dim=64, page_size=16)
    choice = choose_attention(name, shape, device=device)
    try:
        backend = _build(choice, shape, device)
    except _FlashInferFailed as error:
        if name != "auto":
            raise ValueError(f"attention {name!r} is not possible: {error}") from error
        logger.warning("attention: %s", error)
        choice = choose_attention(name, shape, device=device, no_flashinfer=str(error))
        backend = _build(choice, shape, device)
    logger.info("attention: %s", choice.reason)
    return backend


class _FlashInferFailed(Exception):
    pass


def _build(choice: Choice, shape: AttentionShape, device: torch.device) -> AttentionBackend:
    """The backends of ``choice``; FlashInfer's have rehearsed."""
    decodes = [(bound, _load("decode", kernel, shape, device)) for bound, kernel in choice.decode]
    if len(decodes) == 1 and choice.decode[0][1] == choice.prefill and choice.prefill in ("torch", "triton"):
        return decodes[0][1]  # serves whole steps
    decode = decodes[0][1] if len(decodes) == 1 else BySize(decodes)
    return SplitAttention(_load("prefill", choice.prefill, shape, device), decode, reason=choice.reason)


def _load(part: str, kernel: str, shape: AttentionShape, device: torch.device) -> AttentionBackend:
    backend: AttentionBackend
    if kernel == "torch":
        return TorchAttention()
    if kernel == "triton":
        backend = import_module("minisgl.engine.attention.triton_backend").TritonAttention(shape, device)
        return backend
    try:
        return _load_flashinfer(part, kernel, shape, device)
    except Exception as error:  # compilers and drivers raise all kinds of errors
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise _FlashInferFailed(f"FlashInfer's {kernel} failed: {reason}") from error


def _load_flashinfer(part: str, kernel: str, shape: AttentionShape, device: torch.device) -> AttentionBackend:
    module = import_module("minisgl.engine.attention.flashinfer_backend")
    backend: AttentionBackend
    if part == "prefill":
        backend = module.FlashInferPrefill(shape, device, kernel=kernel)
    elif kernel == "xqa":
        backend = module.XqaDecode(device)
    else:
        backend = module.FlashInferDecode(shape, device)
    rehearse(backend, shape, device, num_new=1 if part == "decode" else 3)
    return backend


def _triton_problem() -> str | None:
    return "it needs the package triton, which is there for Linux only" if find_spec("triton") is None else None


def _flashinfer_problem(capability: Capability | None) -> str | None:
    package = find_spec("flashinfer")
    prebuilt = package is not None and (
        find_spec("flashinfer_jit_cache") is not None or (Path(str(package.origin)).parent / "data" / "aot").is_dir()
    )
    nvcc = None if package is None or prebuilt else _nvcc_version()
    return flashinfer_problem(capability, installed=package is not None, prebuilt=prebuilt, nvcc=nvcc)


def _nvcc_version() -> tuple[int, int] | None:
    """Of the compiler that FlashInfer would take; None if there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    path = os.environ.get("FLASHINFER_NVCC") or shutil.which("nvcc") or f"{home}/bin/nvcc"
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
