"""Steps that are run by several threads for nothing but the compilation of their kernels.

Chapter 4 tells this module's story. Triton compiles a kernel when it is first launched, and keeps it in memory and on
disk. Threads that launch the same new kernel at the same time would each compile it: most of a start's time, since
engines warm up many sizes of step together, and these share most of their kernels. And cuBLAS, which has nothing to
compile, would keep 32 MiB for every thread that it has seen. Owns nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# A kernel takes a second or two. Who waits longer than this compiles it too: the other one may have failed.
_PATIENCE_S = 60.0

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.addmm.out, _aten.addmm_.default,
             _aten.bmm.default, _aten.bmm.out, _aten.baddbmm.default, _aten.baddbmm.out}  # fmt: skip


class WithoutProducts(TorchDispatchMode):
    """As long as the block lasts, this thread's matrix products are not computed: new results are zeros, others stay
    what they were."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        if func is _aten.addmm_.default:
            return args[0]
        left, right = args[-2:]
        out: Tensor | None = kwargs.get("out")
        return left.new_zeros(*left.shape[:-1], right.shape[-1]) if out is None else out


@contextmanager
def compile_once() -> Iterator[None]:
    """As long as the block lasts, a thread that launches a kernel which another one is compiling waits, and finds it in
    Triton's cache. Without Triton: nothing."""
    if find_spec("triton") is None:
        yield
        return
    runtime = import_module("triton.knobs").runtime
    lock, under_way = threading.Lock(), dict[str, threading.Event]()

    def name(fn: Any, key: Any) -> str:
        return f"{fn.module}.{fn.name} {key}"

    def before(*, fn: Any, key: Any, **_: Any) -> bool:
        with lock:
            is_first = name(fn, key) not in under_way
            done = under_way.setdefault(name(fn, key), threading.Event())
        if not is_first:
            done.wait(_PATIENCE_S)
        return False  # True would mean: do not compile

    def after(*, fn: Any, key: Any, **_: Any) -> bool:
        under_way[name(fn, key)].set()
        return False

    hooks = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook, runtime.jit_post_compile_hook = before, after
    try:
        yield
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = hooks
