"""Dependent launches: a kernel starts while the one before it still runs, and waits only when it needs its results.

Chapter 5 tells this module's story. A step is a chain of short kernels, and between two of them the device would drain
and fill again. With programmatic dependent launch (compute capability 9.0 and later) the programs of the next kernel
come to the multiprocessors as soon as those of this one have all begun; there they can read what no kernel of a step
writes (weights), then wait. Three rules make that safe:

- Before `wait_for_previous` a program touches nothing that a kernel of the step writes or reads later: no activations,
  no outputs. What the step is prepared with (lengths, page table, plan of the decodes) is there for all layers: the
  kernel that makes the last of it, the plan, does not let the next one begin, and behind it comes one that knows
  nothing of this (the gathering of embeddings), which waits until all is written.
- *Every* program of *every* kernel waits, also one that has nothing to do. It waits until the kernel just before has
  ended with all that it wrote; what lies further back has ended only because that one had waited in its turn.
- A kernel that knows nothing of this (cuBLAS, a copy) may stand between: it begins when the one before has ended, and
  the one behind it waits until it has.

Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from minisgl.kernels.compile_ahead import is_dry


def launch(kernel: Any, *grid: int) -> Callable[..., object]:
    """``kernel[grid]``; in a dry run what only asks for the kernel, see `minisgl.kernels.compile_ahead`."""
    return partial(kernel.warmup, grid=grid) if is_dry() else kernel[grid]


@cache
def pdl_options(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """Arguments of a launch: the kernel's constant ``PDL``, and the option that goes with it.

    Args:
        device: where the kernel runs; dependent launches are for those that have them.
        wanted: False: as if it had none.
    """
    if wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """The next kernel's programs may come, once all of this kernel's have said so or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the kernel before has ended, and what it wrote is to be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(addresses, num_bytes):
    """Into the L2 cache: at each address so many bytes, multiples of 16 both; 0: nothing. Once if there are as many
    addresses as threads. For devices that have dependent launches: they have the instruction."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [addresses, num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
