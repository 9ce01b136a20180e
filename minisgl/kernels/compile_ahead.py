"""The kernels of an engine, compiled before its first step, many at a time.

Chapter 4 tells this module's story. Triton compiles a kernel when it is first launched, which takes a second or so. An
engine has some fifty, and steps of different sizes share most of them. So steps of all kinds are first run *dry*:
nothing is launched, what they compute is zeros, and Triton says which kernels it would have to compile. These are then
compiled side by side, each once. Owns nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from minisgl.kernels.kernel_set import on_device

logger = logging.getLogger(__name__)

_is_dry = ContextVar("is_dry", default=False)  # of this thread
_one_at_a_time = RLock()  # Triton has one hook for all threads

_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
_PRODUCTS = {torch.mm, torch.addmm, torch.bmm, torch.baddbmm, torch.matmul, Tensor.matmul, Tensor.__matmul__, F.linear}


def is_dry() -> bool:
    """Whether this thread runs steps for nothing but their kernels' names: then `minisgl.kernels.triton_launch.launch`
    launches nothing."""
    return _is_dry.get()


class _Zeros(TorchFunctionMode):
    """This thread's new memory is zeros, since no kernel will write it and indices are read from it; and its matrix
    products are not computed, since cuBLAS has nothing to compile: new ones are zeros, others stay what they were."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _EMPTY:
            return func(*args, **kwargs).zero_()
        if func is Tensor.addmm_:
            return args[0]
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        if (out := kwargs.get("out")) is not None:
            return out
        if func is F.linear:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        left, right = args[-2:]
        return left.new_zeros(*left.shape[:-1], right.shape[-1])


@dataclass(frozen=True, slots=True)
class Compilation:
    """What is left to do for one variant of a kernel.

    Args:
        function: Triton's ``JITFunction``.
        data: which variant, as Triton writes it.
    """

    function: Any
    data: str

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.function.__name__)

    def __call__(self) -> Any:
        """Compile it; returns Triton's ``CompiledKernel``."""
        return self.function.preload(self.data)


@contextmanager
def dry_run() -> Iterator[dict[Any, Compilation]]:
    """As long as the block lasts, this thread launches nothing. Yields what it would have had to compile, by kernel and
    variant. Other threads launch and compile as ever, but wait here."""
    runtime = import_module("triton.knobs").runtime
    missing: dict[Any, Compilation] = {}

    def note(*, fn: Any, key: Any, compile: dict[str, Any], **others: Any) -> Any:
        if not is_dry():
            return before(fn=fn, key=key, compile=compile, **others) if before is not None else None
        missing[fn.module, fn.name, str(key)] = Compilation(fn.jit_function, compile["specialization_data"])
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


def compile_ahead(steps: Callable[[], object], device: torch.device) -> int:
    """Compile all of our kernels that ``steps`` launches on ``device`` and that are not there yet. What it computes is
    lost, and nothing is written but by torch. A kernel that cannot be compiled, or does not fit the device, is told in
    a warning; its first launch raises. Returns how many there were; without Triton there are none."""
    if find_spec("triton") is None:
        return 0
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    driver = import_module("triton.runtime").driver

    def compile(compilation: Compilation) -> Any:
        kernel = compilation()
        driver.active.launcher_cls(kernel.src, kernel.metadata)  # to disk: some versions compile C code for its launch
        return kernel

    def attempt(work: Callable[[Any], Any], kernel: Any) -> Any:
        try:
            with on_device(device):
                return work(kernel)
        except Exception as error:  # Triton has many ways to say that something does not fit
            logger.warning("%s cannot be made ahead: %s: %s", kernel.name, type(error).__name__, error)
            return None

    with _one_at_a_time:  # whoever comes second finds the kernels there
        with on_device(device), dry_run() as missing:
            steps()
        # The first one alone: Triton looks at all of its own files then, as each thread would at once. Then the
        # longest, so that none of them begins when the others are done.
        by_length = sorted(missing.values(), key=lambda compilation: len(compilation.function.src))
        kernels = [attempt(compile, compilation) for compilation in by_length[:1]]
        with ThreadPoolExecutor() as pool:
            kernels += pool.map(partial(attempt, compile), reversed(by_length[1:]))
        # Loaded one by one. Such launchers are C modules that all have one name, and whoever imports one again gets
        # from CPython the module that has the name now, changed: two threads could get each other's.
        for kernel in filter(None, kernels):
            attempt(lambda kernel: kernel.run, kernel)
    return len(missing)
