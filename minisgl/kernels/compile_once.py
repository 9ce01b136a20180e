"""Kernels that several threads ask for at once are compiled by one of them.

Chapter 4 tells this module's story. Triton compiles a kernel when it is first launched, and keeps it in memory and on
disk. Threads that launch the same new kernel at the same time would each compile it: most of a start's time, since
engines warm up many sizes of step together, and these share most of their kernels. Owns nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# A kernel takes a second or two. Who waits longer than this compiles it too: the other one may have failed.
_PATIENCE_S = 60.0


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
