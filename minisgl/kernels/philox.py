"""Random numbers without a state: Philox4x32-10, a function from (seed, output position, token id) to a number.

Chapter 5 tells this module's story. A generator with a state gives a request other numbers when its neighbours change;
a counter-based one cannot, because nothing but the request's own seed and position goes in. Owns nothing.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (the Random123 library).

The mapping, which every twin of this module must keep:

    key     = (low 32 bits, high 32 bits) of the seed's 64
    counter = (token id // 4, output position, 0, 0)
    number  = uniform(word ``token id % 4`` of the output's four)

Four neighbours share ten rounds: with rounds for each token, a GPU would spend most of a full batch's draw on them.

In Triton: ``tl.philox(seed, token_id // 4, position, 0, 0)`` with a 64-bit ``seed`` and 32-bit counters gives the four
words, and ``tl.minimum(word.to(tl.float32) * 2**-32 + 2**-33, 1 - 2**-24)`` is `uniform`: the conversion rounds to
nearest, the product is exact, so that a fused multiply-add gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as fractions of 2**32


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], *, rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32: four random 32-bit words for a counter of four words and a key of two.

    All words are int64 tensors with values in 0..2**32-1, of shapes that broadcast; so are the results. The products
    wrap in int64, which keeps the right 64 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _MASK, product0 & _MASK
        high1, low1 = (product1 >> 32) & _MASK, product1 & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(words: Tensor) -> Tensor:
    """32-bit words (int64, any shape) as float32 strictly between 0 and 1.

    ``(word + 1/2) / 2**32``, rounded to float32 and kept at or below ``1 - 2**-24``. Near 0 the numbers lie 2**-32
    apart, near 1 only 2**-24: whoever needs fine steps at one end should look at 0.
    """
    return (words.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)


def philox(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """One uniform number for each row and token.

    Args:
        seeds: ``[S]`` int64; all 64 bits count.
        positions: ``[S]`` int64, below 2**32: how many tokens the request has output before.
        vocab_size: V.

    Returns:
        ``[S, V]`` float32 in (0, 1), on the device of ``seeds``.
    """
    counters = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    seeds, positions = seeds[:, None], positions[:, None] & _MASK
    words = philox_4x32((counters, positions, zero, zero), (seeds & _MASK, (seeds >> 32) & _MASK))
    return uniform(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])
