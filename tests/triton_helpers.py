"""What the tests of Triton kernels share: they are compiled where there is a CUDA device, else interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

# `conftest` makes it interpret where there is no CUDA device.
triton = pytest.importorskip("triton", reason="triton is there for Linux only")


def _version(module: ModuleType) -> tuple[int, int]:
    major, minor = module.__version__.split(".")[:2]
    return int(major), int(minor)


if triton.knobs.runtime.interpret and _version(triton) < (3, 7) and _version(np) >= (2, 4):
    pytest.skip("triton before 3.7 interprets loops only with numpy before 2.4", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARKS = [pytest.mark.gpu] if DEVICE == "cuda" else []
NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels get from ``torch.empty`` is NaN, or a number out of any range, until they write it."""
    true = torch.empty

    def empty(*shape: object, **options: object) -> Tensor:
        tensor = true(*shape, **options)
        return tensor.fill_(NAN if tensor.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", empty)


# The interpreter runs what a compiler may refuse. Pointers by name, int32 for every other argument.
_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = dict.fromkeys("eps scale".split(), "fp32") | dict.fromkeys(["v_offset"], "i64")
TYPES |= dict.fromkeys("q k v qkv kv out q_out q_weight k_weight weight cos sin x residual total".split(), "*bf16")
TYPES |= dict.fromkeys(["logits"], "*bf16") | dict.fromkeys("pieces peaks keys temperature best_keys".split(), "*fp32")
TYPES |= dict.fromkeys("page_table cu_seqlens_q seq_lens line counters page_copies token_ids rows".split(), "*i32")
TYPES |= dict.fromkeys("packed seq_lens_by_row page_table_by_row".split(), "*i32")
TYPES |= dict.fromkeys("slot_mapping seeds positions best_ids last_tokens last_tokens_by_row".split(), "*i64")
TYPES |= dict.fromkeys("input_ids words".split(), "*i64")

def check(kernel, *, next_waits=False, even=(), **constants):
    if "PDL" in kernel.arg_names:
        constants["PDL"] = True
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in even}
    compiled = triton.compile(ASTSource(kernel, signature, constants, attrs), target=GPUTarget("cuda", 90, 32))
    assert "cubin" in compiled.asm
    ptx = compiled.asm["ptx"]
    if "PDL" in constants:  # no program ends, and nothing is stored, before the wait
        before = ptx[: ptx.index("griddepcontrol.wait")]
        assert "st.global" not in before and "ret;" not in before
        assert next_waits != ("griddepcontrol.launch_dependents" in ptx)
    return ptx
"""


def check_compilation(script: str, tmp_path: Path) -> None:
    """Run ``script``, which calls ``check(kernel, **constants)``, without an interpreter, for a device that need not be
    there."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", f"{_COMPILE}\n{script}\nprint('compiled')"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "compiled", done.stderr
