"""The kernels of an engine, compiled before its first step, many at a time.

Chapter 4 tells this module's story. Triton compiles a kernel when it is first launched, which takes a second or so. An
engine has some fifty, and steps of different sizes share most of them. So steps of all kinds are first run *dry*:
nothing is launched, what they compute is zeros, and Triton says which kernels it would have to compile. These are then
compiled side by side, each once. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_is_dry = ContextVar("is_dry", default=False)  # of this thread
_one_at_a_time = RLock()  # Triton has one hook for all threads

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.mm.out, _aten.addmm.default, _aten.addmm.out, _aten.addmm_.default,
             _aten.bmm.default, _aten.bmm.out, _aten.baddbmm.default, _aten.baddbmm.out}  # fmt: skip
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default,
          _aten.new_empty.default, _aten.new_empty_strided.default}  # fmt: skip


def is_dry() -> bool:
    """Whether this thread runs steps for nothing but their kernels' names: then `minisgl.kernels.triton_launch.launch`
    launches nothing."""
    return _is_dry.get()


class _Zeros(TorchDispatchMode):
    """This thread's new memory is zeros, since no kernel will write it and indices are read from it; and its matrix
    products are not computed, since cuBLAS has nothing to compile: new ones are zeros, others stay what they were."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _EMPTY:
            return func(*args, **kwargs).zero_()
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        if func is _aten.addmm_.default:
            return args[0]
        left, right = args[-2:]
        out: Tensor | None = kwargs.get("out")
        return left.new_zeros(*left.shape[:-1], right.shape[-1]) if out is None else out


@contextmanager
def dry_run() -> Iterator[dict[Any, Callable[[], object]]]:
    """As long as the block lasts, this thread launches nothing. Yields how to compile what it would have had to, by
    kernel and variant. Other threads launch and compile as ever, but wait here."""
    runtime = import_module("triton.knobs").runtime
    missing: dict[Any, Callable[[], object]] = {}

    def note(*, fn: Any, key: Any, compile: dict[str, Any], **others: Any) -> Any:
        if not is_dry():
            return before(fn=fn, key=key, compile=compile, **others) if before is not None else None
        data = compile["specialization_data"]
        missing[fn.module, fn.name, str(key)] = lambda: fn.jit_function.preload(data)
        return True  # do not compile it now

    with _one_at_a_time:
        before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
        token = _is_dry.set(True)
        try:
            with torch.inference_mode(False), torch.no_grad(), _Zeros():
                yield missing
        finally:
            _is_dry.reset(token)
            runtime.jit_cache_hook = before


def compile_ahead(steps: Callable[[], None], device: torch.device) -> int:
    """Compile all of our kernels that ``steps`` launches on ``device`` and that are not there yet. What it computes is
    lost, and nothing is written but by torch. Returns how many; without Triton there are none."""
    if find_spec("triton") is None:
        return 0
    where: Callable[[], AbstractContextManager[object]] = nullcontext
    if device.type == "cuda":  # threads begin with device 0
        where = partial(torch.cuda.device, torch.cuda.current_device() if device.index is None else device.index)
    with where(), dry_run() as missing:
        steps()

    def run(compilation: Callable[[], object]) -> None:
        with where():
            compilation()

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, missing.values()))
    return len(missing)
