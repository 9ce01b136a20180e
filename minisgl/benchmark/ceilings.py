"""What a device gives at most, measured: results count as shares of these, taken in the same command.

They differ from machine to machine, and with the power that is drawn from run to run, so no table of them is kept. The
data are random: on zeros a matrix product takes less power, and so more clock, than any model lets it have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.benchmark.timing import time_calls

_CHUNK_BYTES = 4 * 131_072  # the reading kernel's unit


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of one device.

    Args:
        read_bytes_per_s: memory, reading only.
        copy_bytes_per_s: memory, bytes read plus bytes written of a copy.
        matmul_flops_per_s: a large dense product (a multiplication and an addition are 2) in ``matmul_dtype``.
        launch_s: a tiny kernel inside a CUDA graph; on a CPU a tiny operation: what each costs however little it does.
        matmul_dtype: "bfloat16" where CUDA has it, else "float16"; "float32" on a CPU.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    launch_s: float
    matmul_dtype: str


def measure_ceilings(device: torch.device | str, *, num_bytes: int | None = None, size: int | None = None) -> Ceilings:
    """Measure; takes a few seconds and ``1.5 * num_bytes`` of memory.

    Args:
        device: where.
        num_bytes: read in a run; by default 4 GiB on CUDA or what is free of it, 64 MiB elsewhere: many times the
            caches.
        size: rows and columns of the matrices; by default 8192 on CUDA, 512 elsewhere.
    """
    device = torch.device(device)
    cuda = device.type == "cuda"
    if num_bytes is None:
        num_bytes = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 3) if cuda else 64 << 20
    if size is None:
        size = 8192 if cuda else 512
    num_bytes = max(num_bytes // _CHUNK_BYTES, 2) // 2 * 2 * _CHUNK_BYTES
    read_s, copy_s = _memory_seconds(num_bytes, device)
    dtype = torch.float32
    if cuda:
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    matmul_s = _matmul_seconds(size, dtype, device)
    tiny = torch.zeros(1, device=device)
    launch_s = time_calls([lambda: tiny.add_(1)] * 500, device, graph=True).median_s
    name = str(dtype).removeprefix("torch.")
    return Ceilings(num_bytes / read_s, num_bytes / copy_s, 2 * size**3 / matmul_s, launch_s, name)


def _memory_seconds(num_bytes: int, device: torch.device) -> tuple[float, float]:
    """Of reading ``num_bytes``, and of copying half as many: as many are moved."""
    memory = torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device=device)
    half = memory[: memory.numel() // 2]
    copied = torch.empty_like(half)
    return _read_seconds(memory), time_calls([lambda: copied.copy_(half)], device).median_s


def _read_seconds(memory: torch.Tensor) -> float:
    """Of the better of two ways to read: a sum in torch, and the kernel of `minisgl.benchmark.triton_read`."""
    floats = memory.view(torch.bfloat16 if memory.is_cuda else torch.float32)
    seconds = time_calls([floats.sum], memory.device).median_s
    if memory.is_cuda:
        try:
            from minisgl.benchmark.triton_read import read_all  # triton is not to be had everywhere
        except ModuleNotFoundError:
            return seconds
        out = torch.empty(memory.numel() * 4 // _CHUNK_BYTES, dtype=torch.int32, device=memory.device)
        seconds = min(seconds, time_calls([lambda: read_all(memory, out)], memory.device).median_s)
    return seconds


def _matmul_seconds(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return time_calls([lambda: torch.mm(a, b, out=product)], device, run_s=0.1 if a.is_cuda else 0.02).median_s
