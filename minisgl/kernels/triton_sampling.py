"""From logits to a token in one pass over them, in Triton.

Chapter 5 tells this module's story. Twins: `most_likely`, `gumbel_argmax` of `apply_temperature`, and `sample_rows`, in
`minisgl.kernels.sampling`; `philox` in `minisgl.kernels.philox`, which documents the mapping to `tl.philox`. Owns
nothing.

The vocabulary is divided over programs, one tile each, so that a single row fills the device too. Each leaves its best
candidate; a second kernel, a program for each row, picks among them. (In attention the last program to arrive does
that, because it happens in every layer. Here it is once a step, and needs no counters that somebody has to own.)

The twin takes the row's greatest logit from all others before it divides by the temperature, so that a tiny temperature
overflows downwards only. One pass knows just its tile's greatest: it takes that one, and the second kernel makes up for
the difference. Apart from such rounding, the numbers are the twin's: the same uniforms to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.triton_launch import launch, let_next_begin, pdl_options, wait_for_previous

_TILE, _WARPS = 2048, 4
# A multiprocessor then holds four programs, of which one computes while others wait for memory, and none spills. Left
# alone, Triton 3.6 takes as many and 3.9 takes 74. With 48 it would hold five, but rows that are not aligned spill.
_MAX_REGISTERS = 64
# Their addresses differ with the number of rows; a variant for each kind would be compiled while requests wait.
_ANY_PLACE = ["rows", "keys", "peaks", "token_ids"]


@triton.jit
def _philox_4x32(seed, position, counters):
    """`minisgl.kernels.philox.philox_4x32` of ``(counters, position, 0, 0)``: four words for each of ``counters``.

    ``tl.philox`` gives the same words, but multiplies twice for the two halves of a product."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1 = counters.to(tl.uint32), position.to(tl.uint32)
    c2, c3 = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
    for _ in tl.static_range(10):
        product0, product1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _uniforms(seed, position, tile, TILE: tl.constexpr, PAIRS: tl.constexpr):
    """`minisgl.kernels.philox.philox` for one row and the token ids of a tile, in their order.

    A thread reads 16 bytes of logits at once and makes the numbers of just these tokens, so that none has to reach
    another thread through shared memory: one counter's four for float32, with ``PAIRS`` two counters' eight for half
    precision."""
    if PAIRS:
        even = tile * (TILE // 4) + 2 * tl.arange(0, TILE // 8)
        a0, a1, a2, a3 = _philox_4x32(seed, position, even)
        b0, b1, b2, b3 = _philox_4x32(seed, position, even + 1)
        w0, w1, w2, w3 = tl.join(a0, b0), tl.join(a1, b1), tl.join(a2, b2), tl.join(a3, b3)
    else:
        w0, w1, w2, w3 = _philox_4x32(seed, position, tile * (TILE // 4) + tl.arange(0, TILE // 4))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))
    # The conversion rounds to nearest and the product is exact, so a fused multiply-add gives the same bits.
    return tl.minimum(words.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)


@triton.jit
def _exponential(u):
    """``-log(1 - u)`` to 2e-7 of itself, for u in (0, 1), in fewer instructions than a library's logarithm.

    ``1 - u`` is ``2**k (1 + f)`` with f between -1/3 and 1/3; near 0, where tokens win, k is 0, and f is -u itself, of
    which ``1 - u`` has lost most. The polynomial is ``log(1 + f) / f`` to 3e-8, by a fit at Chebyshev's points."""
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    shift = (bits - 0x3F2AAAAB) & -0x800000  # k in the exponent's place; the constant is 2/3
    f = tl.where(shift == 0, -u, (bits - shift).to(tl.float32, bitcast=True) - 1.0)
    p = 0.14056085050106049 * f - 0.15403197705745697
    p = p * f + 0.1398765742778778
    p = p * f - 0.164127916097641
    p = p * f + 0.20011943578720093
    p = p * f - 0.25008028745651245
    p = p * f + 0.3333316743373871
    p = p * f - 0.4999993145465851
    p = p * f + 1.0
    return -(shift.to(tl.float32) * (0.6931471805599453 * 2.0**-23)) - f * p


@triton.jit(do_not_specialize_on_alignment=_ANY_PLACE)
def _candidates_kernel(
    logits, rows, temperature, seeds, positions, keys, peaks, token_ids, stride, vocab_size,
    ROWS: tl.constexpr, NOISE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each sample and tile of the vocabulary: the best of the tile, and what its key is relative to.
    With ``ROWS``, what is known of a sample lies at its row of the tables; -1 is padding."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    sample, tile = tl.program_id(0), tl.program_id(1)
    row = sample
    if ROWS:
        row = tl.load(rows + sample)
        if row < 0:
            return
    ids = tile * TILE + tl.arange(0, TILE)
    values = tl.load(
        logits + sample.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf")
    ).to(tl.float32)  # fmt: skip
    place = sample * tl.num_programs(1) + tile
    # A NaN (infinity minus infinity makes one too) must not lose: a broken row may not pass as sound.
    heat = 0.0
    if NOISE:
        heat = tl.load(temperature + row)
        peak = tl.max(values, axis=0)
        values -= tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(peaks + place, peak)
    broken = tl.sum((values != values).to(tl.int32), axis=0) > 0
    losses = -values
    if heat > 0:
        # The exponential of minus the key: one logarithm for the tile instead of one for each token.
        pairs: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
        u = _uniforms(tl.load(seeds + row), tl.load(positions + row), tile, TILE, pairs)
        losses = _exponential(u) * tl.exp2(losses * tl.minimum(1.4426950408889634 / heat, 3e38))
    least = tl.min(losses, axis=0)
    token_id = tl.min(tl.where((losses == least) | broken, ids, 2**31 - 1), axis=0)
    key = -least
    if heat > 0:
        key = -tl.log(least)
    tl.store(keys + place, tl.where(broken, float("nan"), key))
    tl.store(token_ids + place, token_id)


@triton.jit
def _choose(keys, peaks, token_ids, heat, sample, num_tiles, NOISE: tl.constexpr, BLOCK: tl.constexpr):
    """The best of a sample's candidates, the lowest id among equals: its key, NaN if the row is broken, and its id."""
    tiles = tl.arange(0, BLOCK)
    mask = tiles < num_tiles
    values = tl.load(keys + sample * num_tiles + tiles, mask=mask, other=float("-inf"))
    ids = tl.load(token_ids + sample * num_tiles + tiles, mask=mask, other=2**31 - 1)
    if NOISE:
        peak = tl.load(peaks + sample * num_tiles + tiles, mask=mask, other=float("-inf"))
        below = tl.where(peak == float("-inf"), 0.0, peak - tl.max(peak, axis=0))
        values += below / tl.where(heat > 0, heat, 1.0)
    broken = tl.sum((values != values).to(tl.int32), axis=0) > 0
    best = tl.max(values, axis=0)
    # A broken row has to have some id, within the vocabulary.
    token_id = tl.min(tl.where((values == best) | broken, ids, 2**31 - 1), axis=0)
    return tl.where(broken, float("nan"), best), token_id


@triton.jit(do_not_specialize_on_alignment=_ANY_PLACE)
def _choose_kernel(
    keys, peaks, token_ids, temperature, best_keys, best_ids, num_tiles,
    NOISE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each sample."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0)
    heat = tl.load(temperature + sample) if NOISE else 0.0
    best, token_id = _choose(keys, peaks, token_ids, heat, sample, num_tiles, NOISE, BLOCK)
    tl.store(best_keys + sample, best.to(best_keys.dtype.element_ty))
    tl.store(best_ids + sample, token_id.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=_ANY_PLACE)
def _choose_rows_kernel(
    keys, peaks, token_ids, rows, temperature, positions, last_tokens, out, num_tiles,
    NOISE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each sample; tables by row learn of the token."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    sample = tl.program_id(0)
    row = tl.load(rows + sample)
    token_id, sound = 0, 0
    if row >= 0:
        heat = tl.load(temperature + row) if NOISE else 0.0
        position = tl.load(positions + row)
        best, best_id = _choose(keys, peaks, token_ids, heat, sample, num_tiles, NOISE, BLOCK)
        sound = (tl.abs(best) < float("inf")).to(tl.int32)
        token_id = best_id * sound
        tl.store(last_tokens + row, token_id.to(tl.int64))
        tl.store(positions + row, position + 1)  # a program is one warp: all of it has read
    tl.store(out + sample, token_id)
    tl.store(out + tl.num_programs(0) + sample, sound)


class _Candidates:
    """What the programs of a step leave for those that choose among it."""

    def __init__(self, num_samples: int, vocab_size: int, tile: int, device: torch.device) -> None:
        self.num_tiles = triton.cdiv(vocab_size, tile)
        self.keys, self.peaks = torch.empty((2, num_samples, self.num_tiles), dtype=torch.float32, device=device)
        self.token_ids = torch.empty((num_samples, self.num_tiles), dtype=torch.int32, device=device)
        self.columns = self.keys, self.peaks, self.token_ids
        self.block = triton.next_power_of_2(self.num_tiles)


def _best(
    logits: Tensor, noise: tuple[Tensor, Tensor, Tensor] | None, dtype: torch.dtype, tile: int
) -> tuple[Tensor, Tensor]:
    (num_rows, vocab_size), device = logits.shape, logits.device
    assert logits.stride(1) == 1
    found = _Candidates(num_rows, vocab_size, tile, device)
    best_keys = torch.empty(num_rows, dtype=dtype, device=device)
    best_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    temperature, seeds, positions = noise or (found.keys, best_ids, best_ids)  # not looked at without noise
    if num_rows:
        launch(_candidates_kernel, num_rows, found.num_tiles)(
            logits, found.token_ids, temperature, seeds, positions, *found.columns, logits.stride(0), vocab_size,
            ROWS=False, NOISE=noise is not None, TILE=tile, num_warps=_WARPS, maxnreg=_MAX_REGISTERS,
            **pdl_options(device),
        )  # fmt: skip
        launch(_choose_kernel, num_rows)(
            *found.columns, temperature, best_keys, best_ids, found.num_tiles,
            NOISE=noise is not None, BLOCK=found.block, num_warps=1, **pdl_options(device),
        )  # fmt: skip
    return best_keys, best_ids


def sample_rows(
    logits: Tensor,
    rows: Tensor,
    temperature_by_row: Tensor,
    seeds_by_row: Tensor,
    positions_by_row: Tensor,
    last_tokens_by_row: Tensor,
    vocab_size: int,
    out: Tensor | None = None,
    *,
    all_greedy: bool = False,
    tile: int = _TILE,
    num_warps: int = _WARPS,
) -> Tensor:
    """`minisgl.kernels.sampling.sample_rows` in two launches.

    A row's token is that of the twin unless two keys are equal up to rounding; a row of temperature 0 costs no noise,
    whether or not others have some.

    Args:
        logits: ``[S, at least V]`` of any float dtype; rows may be further apart.
        rows: ``[S]`` int32, all different but for -1: padding, which changes no row.
        temperature_by_row: ``[max_running]`` float32, 0 or more.
        seeds_by_row: ``[max_running]`` int64.
        positions_by_row: ``[max_running]`` int64, below 2**32; counted up.
        last_tokens_by_row: ``[max_running]`` int64; takes the new token.
        vocab_size: V.
        out: ``[2, S]`` int32, contiguous, where to write the result; made if None.
        all_greedy: the temperatures are 0: they are not even looked at.
        tile: tokens that a program looks at, a power of 2, 8 or more. Keys are rounded in another way with another
            one, so it must not depend on how many rows there are.
        num_warps: of such a program.

    Returns:
        ``[2, S]`` int32: the tokens, 0 of a row that is not sound; and 1 where a row is sound. Padding gets 0 and 0.
    """
    num_samples = rows.shape[0]
    assert logits.stride(1) == 1 and rows.is_contiguous() and logits.shape[1] >= vocab_size
    out = torch.empty((2, num_samples), dtype=torch.int32, device=logits.device) if out is None else out
    assert out.is_contiguous() and out.shape == (2, num_samples)
    if num_samples:
        found = _Candidates(num_samples, vocab_size, tile, logits.device)
        launch(_candidates_kernel, num_samples, found.num_tiles)(
            logits, rows, temperature_by_row, seeds_by_row, positions_by_row, *found.columns, logits.stride(0),
            vocab_size, ROWS=True, NOISE=not all_greedy, TILE=tile, num_warps=num_warps, maxnreg=_MAX_REGISTERS,
            **pdl_options(logits.device),
        )  # fmt: skip
        launch(_choose_rows_kernel, num_samples)(
            *found.columns, rows, temperature_by_row, positions_by_row, last_tokens_by_row, out, found.num_tiles,
            NOISE=not all_greedy, BLOCK=found.block, num_warps=1, **pdl_options(logits.device),
        )  # fmt: skip
    return out


def most_likely(logits: Tensor, *, tile: int = _TILE) -> tuple[Tensor, Tensor]:
    """`minisgl.kernels.sampling.most_likely`: the greatest logit of each row and its id, the lowest among equals.

    Args:
        logits: ``[S, V]`` of any float dtype; rows may be further apart than V.
        tile: tokens that a program looks at, a power of 2.

    Returns:
        ``[S]`` of the dtype of ``logits``, NaN if the row holds a NaN (the id then says nothing); ``[S]`` int64.
    """
    return _best(logits, None, logits.dtype, tile)


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, tile: int = _TILE
) -> tuple[Tensor, Tensor]:
    """Draw a token from each row's softmax at its temperature; at temperature 0, take the most likely one.

    Its twin is ``gumbel_argmax(apply_temperature(logits, temperature), seeds, positions)``, and `most_likely` for rows
    of temperature 0. It gives the same tokens unless two keys are equal up to rounding.

    Args:
        logits: ``[S, V]`` of any float dtype; rows may be further apart than V.
        temperature: ``[S]`` float32, at least 0.
        seeds: ``[S]`` int64; all 64 bits count.
        positions: ``[S]`` int64, below 2**32: how many tokens the request has output before.
        tile: tokens that a program looks at, a power of 2, 8 or more.

    Returns:
        ``[S]`` float32, (logit - the row's greatest) / temperature plus noise, not finite if the row is broken (NaN,
        plus infinity, nothing but minus infinity; the id then says nothing); and ``[S]`` int64, the token.
    """
    return _best(logits, (temperature, seeds, positions), torch.float32, tile)


@triton.jit
def _philox_kernel(seeds, positions, out, vocab_size, TILE: tl.constexpr, PAIRS: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    u = _uniforms(tl.load(seeds + row), tl.load(positions + row), tile, TILE, PAIRS)
    tl.store(out + row.to(tl.int64) * vocab_size + ids, u, mask=ids < vocab_size)


def philox(seeds: Tensor, positions: Tensor, vocab_size: int, *, tile: int = _TILE, pairs: bool = False) -> Tensor:
    """`minisgl.kernels.philox.philox`, to the bit: ``[S]`` and ``[S]`` int64 to ``[S, V]`` float32. `gumbel_argmax`
    makes these numbers where it needs them, with ``pairs`` for logits of half precision; written out they are for tests
    and readers."""
    out = torch.empty((seeds.shape[0], vocab_size), dtype=torch.float32, device=seeds.device)
    launch(_philox_kernel, seeds.shape[0], triton.cdiv(vocab_size, tile))(
        seeds, positions, out, vocab_size, TILE=tile, PAIRS=pairs
    )
    return out
