"""Which attention kernels serve a model on a device: tables, and pure functions that read them.

Chapter 4 tells this module's story. A device is known by its compute capability, and capabilities are compared by
equality: a larger number is another device, not a better one. What runs on (10, 0) need not run on (12, 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Capability = tuple[int, int]

PREFILL = ("torch", "triton", "fa2", "fa3")
DECODE = ("torch", "triton", "fa2", "xqa")
ALONE = ("auto", "torch", "triton", "flashinfer")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What attention kernels are made for.

    Args:
        dtype: of queries and cache.
        num_heads, num_kv_heads: of one rank.
        page_size: tokens in a page.
    """

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kernels, and why.

    Args:
        prefill: a name of `PREFILL`.
        decode: (largest batch, a name of `DECODE`), ascending; the last bound is None.
        reason: for people, one line.
    """

    prefill: str
    decode: tuple[tuple[int | None, str], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class _Device:
    """A row of the table.

    Args:
        name: what such devices are called.
        prefill, decode: kernels from best to worst; "measured" is what `_MEASURED` says.
        flashinfer: FlashInfer's kernels that can be built for it.
        nvcc: oldest compiler that can build them.
    """

    name: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    flashinfer: tuple[str, ...] = ()
    nvcc: tuple[int, int] = (12, 0)


# fa2 was written for Ampere and its kin; on Blackwell nobody has measured it against our own kernel yet, so there it is
# used only when it is asked for. Triton's matrix products need Ampere.
_DEVICES: dict[Capability, _Device] = {
    (7, 0): _Device("Volta: V100", ("torch",), ("torch",)),
    (7, 5): _Device("Turing: T4, RTX 20", ("torch",), ("torch",)),
    (8, 0): _Device("Ampere: A100", ("fa2", "triton", "torch"), ("triton", "torch"), ("fa2",)),
    (8, 6): _Device("Ampere: A10, RTX 30", ("fa2", "triton", "torch"), ("triton", "torch"), ("fa2",)),
    (8, 9): _Device("Ada: L4, L40, RTX 40", ("fa2", "triton", "torch"), ("triton", "torch"), ("fa2",)),
    (9, 0): _Device(
        "Hopper: H100, H200",
        ("fa3", "fa2", "triton", "torch"),
        ("measured", "triton", "torch"),
        ("fa2", "fa3", "xqa"),
        (12, 3),
    ),
    (10, 0): _Device("Blackwell: B200", ("triton", "torch"), ("triton", "torch"), ("fa2", "xqa"), (12, 8)),
    (10, 3): _Device("Blackwell: B300", ("triton", "torch"), ("triton", "torch"), ("fa2", "xqa"), (12, 9)),
    (12, 0): _Device("Blackwell: RTX 50", ("triton", "torch"), ("triton", "torch"), ("fa2", "xqa"), (12, 9)),
}
_UNKNOWN = _Device("unknown", ("triton", "torch"), ("triton", "torch"))

# (9, 0), bfloat16, head_dim 64 and 128, pages of 16 and 64: query heads a KV head -> (largest batch, fastest kernel).
# `minisgl.benchmark.attention` measures it. The batch alone is the key, not the length: when a graph is captured, the
# batch is known and the length is not.
_MEASURED: dict[int, tuple[tuple[int | None, str], ...]] = {
    2: ((None, "triton"),),
    4: ((None, "triton"),),
    5: ((None, "triton"),),
    8: ((None, "triton"),),
}
_MEASURED_PAGES = (16, 64)

_HALF = (torch.float16, torch.bfloat16)
_NO_BFLOAT16 = ((7, 0), (7, 5))


def parse(name: str) -> tuple[str, str]:
    """The kernels that ``name`` asks for, prefill and decode: twice the same word for a word alone.

    Raises:
        ValueError: no such name; the message lists all.
    """
    prefill, _, decode = name.partition(",")
    if (not decode and name in ALONE) or (prefill in PREFILL and decode in DECODE):
        return prefill, decode or prefill
    raise ValueError(
        f"attention must be one of {', '.join(map(repr, ALONE))}, or 'PREFILL,DECODE' with PREFILL one of "
        f"{', '.join(PREFILL)} and DECODE one of {', '.join(DECODE)}; got {name!r}"
    )


def choose(
    name: str,
    capability: Capability | None,
    shape: AttentionShape,
    *,
    no_triton: str | None = None,
    no_flashinfer: str | None = None,
) -> Choice:
    """The kernels for ``shape``. "auto" always finds some: in the end torch's.

    Args:
        name: what is asked for, see `parse`.
        capability: of the CUDA device; None for a CPU.
        no_triton, no_flashinfer: why these cannot be used at all; None if they can.

    Raises:
        ValueError: ``name`` is unknown, or a kernel that it names cannot serve.
    """
    prefill, decode = parse(name)
    device = _DEVICES.get(capability, _UNKNOWN) if capability else _UNKNOWN
    problems = _Problems(capability, device, shape, no_triton, no_flashinfer)
    if name == "flashinfer":
        prefill = "fa3" if "fa3" in device.flashinfer else "fa2"
        decode = "fa2" if problems.of("xqa") else "xqa"
    if name != "auto":
        for kernel in (prefill, decode):
            if problem := problems.of(kernel):
                raise ValueError(f"attention {name!r} is not possible: {problem}")
        return Choice(prefill, ((None, decode),), f"prefill {prefill}, decode {decode}: asked for")
    if capability is None:
        return Choice("torch", ((None, "torch"),), "prefill torch, decode torch: the device is a CPU")
    if shape.dtype not in _HALF:
        # Asked for by those who want to compare, and no kernel of half precision serves it.
        kind = str(shape.dtype).removeprefix("torch.")
        return Choice("torch", ((None, "torch"),), f"prefill torch, decode torch: {kind}, exactness before speed")
    prefill = problems.first(device.prefill)
    decodes = _decodes(device, shape, problems)
    kernels = f"prefill {prefill}, decode {', '.join(_range(bound, kernel) for bound, kernel in decodes)}"
    where = f"compute capability {capability[0]}.{capability[1]} ({device.name})"
    what = f"head_dim {shape.head_dim}, {shape.group} query heads a KV head, pages of {shape.page_size}"
    return Choice(prefill, decodes, "; ".join([f"{kernels}: {where}, {what}", *problems.met]))


def flashinfer_problem(
    capability: Capability | None, *, installed: bool, prebuilt: bool, nvcc: tuple[int, int] | None
) -> str | None:
    """Why FlashInfer cannot be used on a device; None if it can.

    Args:
        prebuilt: its kernels are there in compiled form.
        nvcc: version of the compiler, None if there is none.
    """
    if not installed:
        return "the package flashinfer-python is not installed"
    device = _DEVICES.get(capability) if capability else None
    if device is None or not device.flashinfer:
        return "FlashInfer is not known to serve this device"
    if not prebuilt and (nvcc is None or nvcc < device.nvcc):
        found = "there is no nvcc" if nvcc is None else f"nvcc {nvcc[0]}.{nvcc[1]} is too old"
        return f"{found}; FlashInfer's kernels need {device.nvcc[0]}.{device.nvcc[1]} or newer to be compiled"
    return None


def usable_dtype(capability: Capability | None, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or float16 for bfloat16 on a device that has none."""
    return torch.float16 if dtype == torch.bfloat16 and capability in _NO_BFLOAT16 else dtype


class _Problems:
    """Why kernels cannot serve. ``met`` holds what stood in the way of a better choice."""

    def __init__(
        self,
        capability: Capability | None,
        device: _Device,
        shape: AttentionShape,
        no_triton: str | None,
        no_flashinfer: str | None,
    ) -> None:
        self.capability = capability
        self.device = device
        self.shape = shape
        self.no_triton = no_triton
        self.no_flashinfer = no_flashinfer
        self.met: list[str] = []

    def of(self, kernel: str) -> str | None:
        """Why ``kernel`` cannot serve; None if it can."""
        if kernel in ("torch", "triton"):
            return self.no_triton if kernel == "triton" else None
        if self.capability is None:
            return f"{kernel} needs a CUDA device"
        if self.no_flashinfer is not None:
            return self.no_flashinfer
        if kernel not in self.device.flashinfer:
            return f"{kernel} does not run on compute capability {self.capability[0]}.{self.capability[1]}"
        if self.shape.dtype not in _HALF:
            return f"{kernel} computes in float16 or bfloat16 only"
        if self.shape.head_dim not in (64, 128, 256):
            return f"{kernel} has head_dim 64, 128 and 256, not {self.shape.head_dim}"
        if kernel == "xqa" and self.shape.page_size not in (16, 32, 64, 128):
            return f"xqa has pages of 16, 32, 64 and 128 tokens, not {self.shape.page_size}"
        return None

    def first(self, kernels: tuple[str, ...]) -> str:
        """The first that can serve; torch is always the last."""
        for kernel in kernels:
            problem = self.of(kernel)
            if problem is None:
                return kernel
            if problem not in self.met:
                self.met.append(problem)
        raise AssertionError(kernels)


def _decodes(device: _Device, shape: AttentionShape, problems: _Problems) -> tuple[tuple[int | None, str], ...]:
    ranges: tuple[tuple[int | None, str], ...] = ((None, device.decode[0]),)
    rest = device.decode
    if rest[0] == "measured":
        rest = rest[1:]
        known = shape.head_dim in (64, 128) and shape.page_size in _MEASURED_PAGES
        ranges = _MEASURED.get(shape.group, ()) if known else ()
        ranges = ranges or ((None, rest[0]),)
    found: list[tuple[int | None, str]] = []
    for bound, kernel in ranges:
        best = problems.first((kernel, *rest))
        if found and found[-1][1] == best:
            found.pop()
        found.append((bound, best))
    return tuple(found)


def _range(bound: int | None, kernel: str) -> str:
    return kernel if bound is None else f"{kernel} up to {bound} requests"
