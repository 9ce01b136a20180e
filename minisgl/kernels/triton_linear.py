"""Products with a weight matrix for few tokens, in Triton, with norm, activation and addition in the same launch.

Chapter 5 tells this module's story. Decoding a small batch streams every weight past a few tokens, so a product takes
as long as its weights take to arrive; cuBLAS, made for tall matrices, leaves a third to nine tenths of the bandwidth
unused there. Two kernels, both reading each weight once, in pieces of 16 bytes:

- ``gemv``, for a handful of tokens: a program holds a few rows of W against all tokens, multiplies and adds in float32
  on the ordinary units, and sums over its threads at the very end.
- ``dot``, up to 64 tokens: the tensor cores, with W as their left operand. Their left side is 16 or 64 rows high, and
  W has as many rows as one likes, while tokens would have to be padded. Where a program takes few rows, its warps share
  K among them (``split``) and are summed at the end: otherwise all but one of them would wait. Where W has few rows and
  tokens are many, programs do so too (``parts``): with few rows each, they would read more of x than of W.

Which is the fastest for a shape and a number of tokens, if not cuBLAS, is measured (`minisgl.benchmark.gemm`) and kept
in ``linear_table.json``. Twins: `minisgl.kernels.linear`.

The activation stands behind the product of gate and up: a program takes rows of both, so half as much leaves it.
Where parts are summed by a second kernel, that one sees whole tokens: it can take the stream's next norm along.

Rounding: sums are float32, and the result is rounded to the tensors' dtype once, activation and residual included (the
twin rounds each step). The norm is not taken before the product but behind it: ``rsqrt(mean(x^2) + eps)`` is one number
a token, so the loop over K can multiply ``x * norm_weight`` with W and collect the squares by the way. The twin rounds
the normalised value to the dtype, then its product with the norm's weight; here ``gemv`` rounds neither and ``dot``
rounds ``x * norm_weight``. In float16 that product may be out of range where the twin's is not, so there the norm stays
a kernel of its own. The norm behind a sum of parts rounds as the twin does. Owns nothing.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_elementwise import rms_norm, silu_and_mul
from minisgl.kernels.triton_launch import launch, let_next_begin, pdl_options, prefetch, wait_for_previous

MAX_TOKENS = 64
"""From more tokens on, cuBLAS is used."""

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64)
"""Numbers of tokens that the table has entries for; one in between goes by the next greater."""


@dataclass(frozen=True)
class LinearPath:
    """How a product is computed.

    Args:
        kind: "cublas", or one of this module's kernels.
        block_n: rows of W a program, a power of 2; for "dot" at least 8.
        block_k: columns of W at once, a power of 2; for "dot" at least 16, and for each part of the split.
        split: "dot": parts of K that the warps of a program share; 1 or ``num_warps``.
        parts: "dot": programs that share K; a second kernel sums what they found. Not with norm or activation inside.
        depth: blocks of K that are under way together: unrolled in "gemv", stages of the pipeline in "dot".
        num_warps: of a program.
        tokens: "dot": as many at least, a power of 2; where there are fewer, the rest is padding. Hopper's own
            instructions begin at 64, and behind other kernels they were the faster for 16 tokens too.
        fused: whether a norm is part of the kernel, or one of its own before it.
    """

    kind: Literal["cublas", "gemv", "dot"]
    block_n: int = 0
    block_k: int = 0
    split: int = 1
    parts: int = 1
    depth: int = 1
    num_warps: int = 4
    tokens: int = 1
    fused: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("cublas", "gemv", "dot"):
            raise ValueError(f"kind must be cublas, gemv or dot, got {self.kind!r}")
        if self.kind != "cublas":
            for size in (self.block_n, self.block_k, self.split, self.parts, self.num_warps, self.tokens):
                if size < 1 or size & (size - 1):
                    raise ValueError(f"sizes of a path must be powers of 2: {self}")

    def to_json(self) -> Any:
        """As the table writes it."""
        return "cublas" if self.kind == "cublas" else asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> LinearPath:
        """What `to_json` gave."""
        return CUBLAS if data == "cublas" else cls(**data)


CUBLAS = LinearPath("cublas", fused=False)

_INTERPRETED = triton.knobs.runtime.interpret  # the interpreter has no product of bfloat16


# --------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    """Nothing outside the mask. Weights are read once: they should not push out what is read again."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def _rows_of(program, N: tl.constexpr, SILU: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which rows of W a program takes: where the first is, how far behind it each of them, and whether each is there.
    With ``SILU`` rows of gate and of up alternate, so that both of an output meet in one program."""
    start, each = program.to(tl.int64) * BLOCK_N, tl.arange(0, BLOCK_N)
    if SILU:
        return start // 2, each // 2 + each % 2 * N, start + each < 2 * N
    return start, each, start + each < N


@triton.jit
def _prefetch_rows(
    weight, program, N: tl.constexpr, K: tl.constexpr, SILU: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The first ``AHEAD`` columns of a program's rows into L2, a piece of a row by each thread."""
    if AHEAD > 0:
        EACH: tl.constexpr = THREADS // BLOCK_N
        PIECE: tl.constexpr = AHEAD // EACH
        thread = tl.arange(0, THREADS)
        row = program.to(tl.int64) * BLOCK_N + thread // EACH
        if SILU:
            row = tl.minimum(row // 2, N - 1) + row % 2 * N
        else:
            row = tl.minimum(row, N - 1)
        prefetch(weight + row * K + thread % EACH * PIECE, PIECE * (weight.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def _finish(
    result, offset, before, target, kept,
    SILU: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What belongs behind the product, ``[BLOCK_M, BLOCK_N]`` float32, and the only rounding."""
    if BIAS:
        result += offset[None, :]
    if SILU:
        gate, up = tl.split(tl.reshape(result, (BLOCK_M, BLOCK_N // 2, 2)))
        result = gate / (1.0 + tl.exp(-gate)) * up
    if ADD:
        result += before.to(tl.float32)
    tl.store(target, result.to(target.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["num_tokens"])
def _gemv_kernel(
    x, norm_weight, weight, bias, out, eps, num_tokens, x_stride, out_stride,
    N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each ``BLOCK_N`` rows of W. Tiles are [tokens, rows, K], all with one layout: threads lie along K
    only, so that a thread meets its piece of every row and token in registers. It sums over the ``VECTOR`` numbers of
    a load at once, which keeps one sum for each of them from having its own register."""
    PIECES: tl.constexpr = BLOCK_K // VECTOR
    WIDTH: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    MASK_N: tl.constexpr = N % WIDTH != 0
    MASK_K: tl.constexpr = K % BLOCK_K != 0
    let_next_begin(PDL)
    program, inner = tl.program_id(0), tl.arange(0, BLOCK_K)[None, None, :]
    first, rows, there = _rows_of(program, N, SILU, BLOCK_N)
    w_at = weight + first * K + (rows * K)[None, :, None] + inner
    # Weights do not wait: the first piece of each row is under way, the others come as near as the L2 cache.
    w = _load(w_at, there[None, :, None] & (inner < K), MASK_N or MASK_K)
    _prefetch_rows(weight, program, N, K, SILU, BLOCK_N, AHEAD, THREADS)
    offset = tl.load(bias + first + rows, mask=there, other=0.0).to(tl.float32) if BIAS else 0.0
    wait_for_previous(PDL)

    tokens = tl.arange(0, BLOCK_M)
    columns = program.to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    real = (tokens < num_tokens)[:, None, None]
    x_at = x + (tokens * x_stride)[:, None, None] + inner
    target = out + (tokens * out_stride)[:, None] + columns[None, :]
    kept = (tokens < num_tokens)[:, None] & (columns < N)[None, :]
    before = tl.load(target, mask=kept, other=0.0) if ADD else 0.0
    total = tl.zeros((BLOCK_M, BLOCK_N, PIECES), tl.float32)
    squares = tl.zeros((BLOCK_M, 1, PIECES), tl.float32)
    for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=DEPTH):
        following = _load(w_at + k + BLOCK_K, there[None, :, None] & (k + BLOCK_K + inner < K), True)
        value = tl.load(x_at + k, mask=real & (k + inner < K), other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(value * value, (BLOCK_M, 1, PIECES, VECTOR)), axis=3)
            value *= tl.load(norm_weight + k + inner, mask=k + inner < K, other=0.0).to(tl.float32)
        total += tl.sum(tl.reshape(value * w.to(tl.float32), (BLOCK_M, BLOCK_N, PIECES, VECTOR)), axis=3)
        w = following
    result = tl.sum(total, axis=2)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, axis=2) / K + eps)
    _finish(result, offset, before, target, kept, SILU, BIAS, ADD, BLOCK_M, BLOCK_N)


@triton.jit
def _dot_step(
    w, x_at, scale_at, real, inside, total, squares,
    MASK_K: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A block of K into the sums of the products and of the squares."""
    value = tl.load(x_at, mask=real & inside if MASK_K else real, other=0.0)
    if NORM:
        scale = tl.load(scale_at, mask=inside if MASK_K else None, other=0.0 if MASK_K else None).to(tl.float32)
        wide = value.to(tl.float32)
        squares += tl.sum(wide * wide, axis=2 if SPLIT > 1 else 1)
        value = (wide * scale).to(value.dtype)
    if WIDEN:
        w, value = w.to(tl.float32), value.to(tl.float32)
    left = w if SWAP else value
    right = value if SWAP else w
    right = tl.permute(right, (0, 2, 1)) if SPLIT > 1 else tl.trans(right)
    return tl.dot(left, right, total, input_precision="ieee"), squares


@triton.jit(do_not_specialize=["num_tokens"])
def _dot_kernel(
    x, norm_weight, weight, bias, out, eps, num_tokens, x_stride, out_stride,
    N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, SWAP: tl.constexpr, WIDEN: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program for each ``BLOCK_N`` rows of W, and each of the ``PARTS`` of K: with several, ``out`` has one more
    dimension in front. Tiles are [rows, K], or [SPLIT, rows, K]: one product for each part of
    K, each of them a warp's. Only without ``SWAP`` are the tokens on the left. Where a block is as long as a row, all
    weights of a program are under way to its registers before it waits; else a pipeline brings them, through L2."""
    STEP: tl.constexpr = SPLIT * BLOCK_K
    OWN_K: tl.constexpr = K // PARTS
    WHOLE: tl.constexpr = OWN_K <= STEP
    WIDTH: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    MASK_N: tl.constexpr = N % WIDTH != 0
    MASK_K: tl.constexpr = OWN_K % STEP != 0
    let_next_begin(PDL)
    program, part, tokens = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_M)
    weight += part * OWN_K
    x += part * OWN_K
    out += part * num_tokens * N
    inner = tl.arange(0, BLOCK_K)[None, :]
    if SPLIT > 1:
        inner = (tl.arange(0, SPLIT) * BLOCK_K)[:, None, None] + inner
    first, rows, there = _rows_of(program, N, SILU, BLOCK_N)
    w_at = weight + first * K + (rows * K)[:, None] + inner
    if WHOLE:
        w = _load(w_at, there[:, None] & (inner < OWN_K), MASK_N or MASK_K)
    _prefetch_rows(weight, program, N, K, SILU, BLOCK_N, AHEAD, THREADS)
    offset = tl.load(bias + first + rows, mask=there, other=0.0).to(tl.float32) if BIAS else 0.0
    wait_for_previous(PDL)

    columns = program.to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x_at, real = x + (tokens * x_stride)[:, None] + inner, (tokens < num_tokens)[:, None]
    target = out + (tokens * out_stride)[:, None] + columns[None, :]
    kept = (tokens < num_tokens)[:, None] & (columns < N)[None, :]
    before = tl.load(target, mask=kept, other=0.0) if ADD else 0.0
    LEFT: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    RIGHT: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    if SPLIT > 1:
        total, squares = tl.zeros((SPLIT, LEFT, RIGHT), tl.float32), tl.zeros((SPLIT, BLOCK_M), tl.float32)
    else:
        total, squares = tl.zeros((LEFT, RIGHT), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    if WHOLE:
        total, squares = _dot_step(
            w, x_at, norm_weight + inner, real, inner < OWN_K, total, squares, MASK_K, NORM, SPLIT, SWAP, WIDEN
        )
    else:
        for k in tl.range(0, OWN_K, STEP, num_stages=DEPTH):
            inside = k + inner < OWN_K
            w = _load(w_at + k, there[:, None] & inside, MASK_N or MASK_K)
            # The norm's weight is loaded as a tile, though its rows are equal: so small a load as a row would not go
            # through the pipeline, but be waited for in each round.
            total, squares = _dot_step(
                w, x_at + k, norm_weight + k + inner + 0 * tokens[:, None], real, inside, total, squares,
                MASK_K, NORM, SPLIT, SWAP, WIDEN,
            )  # fmt: skip
    if SPLIT > 1:
        total, squares = tl.sum(total, axis=0), tl.sum(squares, axis=0)
    result = tl.trans(total) if SWAP else total
    if NORM:
        result *= tl.rsqrt(squares / K + eps)[:, None]
    _finish(result, offset, before, target, kept, SILU, BIAS, ADD, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["num_tokens"])
def _splitk_reduce_kernel(
    parts, bias, out, norm_weight, normed, eps, num_tokens, out_stride,
    N: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each token and ``BLOCK`` outputs, all with ``NORM``: what it has written, it also writes normalised
    to ``normed``. The parts are added in their order, so always the same."""
    let_next_begin(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    token, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    offset = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32) if BIAS else 0.0
    factor = tl.load(norm_weight + columns, mask=mask, other=0.0).to(tl.float32) if NORM else 0.0
    wait_for_previous(PDL)
    target = out + token * out_stride + columns
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32) if ADD else 0.0
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * num_tokens + token) * N + columns, mask=mask, other=0.0)
    result = (total + offset + before).to(dtype)
    tl.store(target, result, mask=mask)
    if NORM:
        value = result.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / N + eps)
        value = (value * scale).to(dtype).to(tl.float32) * factor
        tl.store(normed + token * N + columns, value.to(dtype), mask=mask)


# -------------------------------------------------------------------------------------------------------- products


def skinny(
    path: LinearPath,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: tuple[Tensor, float] | None = None,
    silu: bool = False,
    bias: Tensor | None = None,
    add: bool = False,
    then: tuple[Tensor, float, Tensor] | None = None,
    pdl: bool = True,
) -> Tensor:
    """One of this module's kernels: ``out (+)= g(f(x) W^T + b)`` with f the norm and g the activation, or nothing.

    Args:
        path: a "gemv" or "dot". With "gemv" all tokens are held in registers: it is meant for up to 16.
        x: ``[M, K]``; M at most 64, rows may be further apart than they are long.
        weight: ``[N, K]``, with ``silu`` ``[2 * N, K]``, gate first; contiguous.
        out: ``[M, N]``, of the dtype of ``x``; written in place. Rows may be further apart than they are long.
        norm: ``[K]`` weight and epsilon.
        silu: the product is gate and up, of which ``silu(gate) * up`` is wanted.
        bias: ``[N]``, with ``silu`` ``[2 * N]``.
        add: add to ``out`` instead of overwriting it.
        then: of a norm behind it all, ``[N]`` weight and epsilon, and ``[M, N]``, contiguous, where to write what comes
            of ``out`` through it; only for a path with parts.
        pdl: launch it as `minisgl.kernels.triton_launch` says, where the device can.

    Returns:
        ``out``.
    """
    (num_tokens, width), (num_rows, k) = x.shape, weight.shape
    n = num_rows // 2 if silu else num_rows
    assert 0 < num_tokens <= MAX_TOKENS and out.shape == (num_tokens, n) and width == k and num_rows % (1 + silu) == 0
    assert x.stride(1) == out.stride(1) == 1 and weight.is_contiguous() and x.dtype == weight.dtype == out.dtype
    assert path.parts == 1 or (path.kind == "dot" and norm is None and not silu and k % path.parts == 0)
    assert then is None or (path.parts > 1 and then[0].is_contiguous() and then[2].is_contiguous())
    assert then is None or (then[0].shape == (n,) and then[2].shape == out.shape and then[2].dtype == out.dtype)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    dependent, block_n, own_k = pdl_options(x.device, pdl), max(path.block_n, 1 + silu), k // path.parts
    whole = path.block_k * path.split >= own_k
    ahead = _ahead(path, weight, own_k, block_n) if dependent["PDL"] and not whole else 0
    target, biased, adds = out, bias is not None, add
    if path.parts > 1:
        target = torch.empty((path.parts, num_tokens, n), dtype=torch.float32, device=x.device)
        biased = adds = False
    sizes = {
        "N": n, "K": k, "NORM": norm is not None, "SILU": silu, "BIAS": biased, "ADD": adds,
        "BLOCK_N": block_n, "DEPTH": path.depth, "AHEAD": ahead, "THREADS": 32 * path.num_warps,
        "num_warps": path.num_warps,
    }  # fmt: skip
    offset = x if bias is None else bias
    tensors = (x, norm_weight, weight, offset, target, eps, num_tokens, x.stride(0), target.stride(-2))
    grid, block_m = (triton.cdiv(num_rows, block_n), path.parts), max(triton.next_power_of_2(num_tokens), path.tokens)
    if path.kind == "gemv":
        block_k = min(path.block_k, triton.next_power_of_2(k))
        vector = min(16 // x.element_size(), block_k)
        launch(_gemv_kernel, *grid)(*tensors, **sizes, BLOCK_M=block_m, BLOCK_K=block_k, VECTOR=vector, **dependent)
    else:
        # Hopper's own instructions take 64 rows on the left: those of the tokens, where a program has fewer of W.
        swap = block_n >= 16 and not (block_m == 64 > block_n and path.split == 1)
        launch(_dot_kernel, *grid)(
            *tensors, **sizes, BLOCK_M=max(block_m, 8 if swap else 16), BLOCK_K=path.block_k, SPLIT=path.split,
            PARTS=path.parts, SWAP=swap, WIDEN=_INTERPRETED and x.dtype == torch.bfloat16, **dependent,
        )  # fmt: skip
    if path.parts > 1:
        # With a norm as many threads to a token as take 4 numbers each, of every part: all are under way at once.
        block = 256 if then is None else triton.next_power_of_2(n)
        next_weight, next_eps, normed = (x, 0.0, out) if then is None else then
        launch(_splitk_reduce_kernel, num_tokens, triton.cdiv(n, block))(
            target, offset, out, next_weight, normed, next_eps, num_tokens, out.stride(0),
            N=n, PARTS=path.parts, BIAS=bias is not None, ADD=add, NORM=then is not None, BLOCK=block,
            num_warps=min(max(block // 128, 1), 16), **dependent,
        )  # fmt: skip
    return out


def _ahead(path: LinearPath, weight: Tensor, own_k: int, block_n: int) -> int:
    """Columns that a program prefetches, of its ``own_k``: all, if L2 has room for W and the next matrix. Of a larger
    one "dot" takes what a multiprocessor reads while it waits for memory; "gemv" has as much under way in its many
    programs' registers. None where they do not make pieces of 16 bytes, or most programs come when nobody waits."""
    size, threads = weight.element_size(), 32 * path.num_warps
    small = weight.numel() * size <= 2**24
    if not small and (path.kind == "gemv" or weight.numel() * size > 2**26):
        return 0
    columns = own_k if small else min(2**15 // (block_n * size), own_k)
    even = threads % block_n == 0 and columns * size % (16 * threads // block_n) == 0
    aligned = weight.shape[1] * size % 16 == own_k * size % 16 == weight.data_ptr() % 16 == 0
    return columns if even and aligned else 0


def default_path(num_tokens: int, n: int, k: int) -> LinearPath:
    """For devices and shapes that nobody has measured: what should be right for any GPU since Ampere.

    A small matrix is where cuBLAS loses most; a larger one than 64 MiB is left to it. Programs take so few rows that
    there are some for each multiprocessor; pipelines fit the 99 KiB of shared memory of the smallest of these GPUs.
    """
    if num_tokens <= 4:
        return LinearPath("gemv", block_n=1 if n < 2048 else 2 if n < 4096 else 4, block_k=1024, depth=2)
    if num_tokens <= 32 and n * k <= 2**25:
        return LinearPath("dot", block_n=16, block_k=64, split=4, depth=3, fused=num_tokens <= 16)
    return CUBLAS


@dataclass(frozen=True)
class SkinnyLinear:
    """The functions of `minisgl.kernels.linear` on a CUDA device, each product by the path that was measured fastest.

    Args:
        table: (N, K) to number of tokens (of `BUCKETS`) to path.
        native: whether this module's kernels are used where the table is silent; else cuBLAS.
        pdl: whether kernels are launched as `minisgl.kernels.triton_launch` says, where the device can.
    """

    table: Mapping[tuple[int, int], Mapping[int, LinearPath]] = field(default_factory=dict)
    native: bool = True
    pdl: bool = True

    @classmethod
    def load(cls, device: torch.device | str) -> SkinnyLinear:
        """The table's part for this device, by its name; empty if it was never measured."""
        device = torch.device(device)
        if device.type != "cuda":
            return cls()
        measured = read_table().get(torch.cuda.get_device_name(device), {})
        return cls(measured, native=torch.cuda.get_device_capability(device) >= (8, 0))

    def path(self, num_tokens: int, weight: Tensor) -> LinearPath:
        """How ``num_tokens`` tokens are multiplied with ``weight``. By cuBLAS if there are more than `MAX_TOKENS`, or
        none, and for dtypes other than those of 2 bytes, which are all that was measured."""
        if not 0 < num_tokens <= MAX_TOKENS or weight.element_size() != 2:
            return CUBLAS
        n, k = weight.shape
        measured = self.table.get((n, k), {}).get(BUCKETS[bisect_left(BUCKETS, num_tokens)])
        if measured is None:
            return default_path(num_tokens, n, k) if self.native else CUBLAS
        return measured

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`minisgl.kernels.linear.linear`."""
        path = self.path(x.shape[0], weight)
        if path.kind == "cublas":
            if out is None:
                return F.linear(x, weight, bias)
            return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
        return skinny(path, x, weight, _new(x, weight) if out is None else out, bias=bias, pdl=self.pdl)

    def norm_linear(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        normed: Tensor | None = None,
    ) -> Tensor:
        """`minisgl.kernels.linear.norm_linear`."""
        path = self.path(x.shape[0], weight)
        if normed is None and path.fused and x.dtype != torch.float16:
            return skinny(path, x, weight, _new(x, weight), norm=(norm_weight, eps), bias=bias, pdl=self.pdl)
        normed = rms_norm(x, norm_weight, eps, pdl=self.pdl) if normed is None else normed
        return self.linear(normed, weight, bias)

    def norm_linear_silu(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        normed: Tensor | None = None,
    ) -> Tensor:
        """`minisgl.kernels.linear.norm_linear_silu`."""
        path = self.path(x.shape[0], weight)
        if path.kind == "cublas":
            return silu_and_mul(self.norm_linear(x, norm_weight, eps, weight, bias, normed), pdl=self.pdl)
        out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
        if normed is None and path.fused and x.dtype != torch.float16:
            return skinny(path, x, weight, out, norm=(norm_weight, eps), silu=True, bias=bias, pdl=self.pdl)
        normed = rms_norm(x, norm_weight, eps, pdl=self.pdl) if normed is None else normed
        return skinny(path, normed, weight, out, silu=True, bias=bias, pdl=self.pdl)

    def linear_add(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor | None:
        """`minisgl.kernels.linear.linear_add`. The norm is part of the sum of a path's parts, if it has some."""
        path = self.path(x.shape[0], weight)
        if path.kind == "cublas":
            if bias is None:
                residual.addmm_(x, weight.t())
            else:
                residual.add_(F.linear(x, weight, bias))
            return None
        if norm is None or path.parts == 1:
            skinny(path, x, weight, residual, bias=bias, add=True, pdl=self.pdl)
            return None
        normed = _new(x, weight)
        skinny(path, x, weight, residual, bias=bias, add=True, then=(*norm, normed), pdl=self.pdl)
        return normed


def _new(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


# ----------------------------------------------------------------------------------------------------------- table

Table = dict[str, dict[tuple[int, int], dict[int, LinearPath]]]
"""Name of a device to (N, K) to number of tokens to path."""


def read_table() -> Table:
    """What ``linear_table.json`` holds."""
    text = files("minisgl.kernels").joinpath("linear_table.json").read_text(encoding="utf-8")
    table: Table = {}
    for name, shapes in json.loads(text).items():
        table[name] = {}
        for shape, paths in shapes.items():
            n, k = map(int, shape.split(","))
            table[name][n, k] = {int(bucket): LinearPath.from_json(path) for bucket, path in paths.items()}
    return table


def table_as_json(table: Table) -> str:
    """The text of ``linear_table.json`` for ``table``: a line for each path."""
    return (
        _indented(
            {
                name: _indented(
                    {
                        f"{n},{k}": _indented(
                            {str(m): json.dumps(path.to_json()) for m, path in sorted(paths.items())}, 2
                        )
                        for (n, k), paths in sorted(shapes.items())
                    },
                    1,
                )
                for name, shapes in sorted(table.items())
            },
            0,
        )
        + "\n"
    )


def _indented(entries: Mapping[str, str], depth: int) -> str:
    lines = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(key)}: {text}" for key, text in entries.items())
    return f"{{\n{lines}\n{' ' * depth}}}"
