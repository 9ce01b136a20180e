"""From logits to a token, one meaning a function: plain torch on ``[S, V]``, each row on its own.

Chapter 5 tells this module's story; `minisgl.engine.sampler` decides which rows need what, and keeps their state.
S rows, V tokens of the vocabulary. Owns nothing; only `sample_rows` changes what it is given.

A step applies, in this order, only what its rows ask for:

1. `apply_penalties`: repetition first, then frequency and presence (vLLM's order);
2. logit bias: a plain addition, so that a bias of 5 is 5 whatever the penalties do (vLLM adds it before them);
3. `exclude`: tokens that are not allowed, and before ``min_tokens`` those that would end the text;
4. a greedy row ends here, with `most_likely`. So penalties, bias and exclusions hold for it as in vLLM and the OpenAI
   API, while temperature and filters, which never change which token is first, do not;
5. `apply_temperature`, in float32;
6. `keep_top_k`, `keep_top_p`, `keep_min_p`, each over the probabilities that the one before left (the order of
   transformers; vLLM applies min_p before the other two);
7. `gumbel_argmax`.

Ties: among equal logits the lower token id counts as more likely, in `most_likely`, in the filters and in the order of
alternatives. Hence ``top_k`` keeps exactly k tokens (vLLM and transformers keep all that equal the k-th), and
``top_k=1`` or a tiny ``top_p`` is exactly greedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minisgl.kernels.philox import philox

LOGPROB_FLOOR = -9999.0
"""Log-probabilities are cut off here, so that they are finite and JSON can write them. The OpenAI API uses this number
for "very unlikely"."""

MAX_SLICE_ELEMENTS = 2**24
"""Most elements of a temporary ``[rows, V]`` in functions that need several: 64 MiB of float32, 128 MiB of int64.

A draw takes 0.6 GiB for them, most of it for the noise. With many slices a GPU would wait for the host to launch."""

_NEVER = float("-inf")


def _slices(num_rows: int, vocab_size: int, max_elements: int) -> Iterator[slice]:
    step = max(1, max_elements // vocab_size)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def apply_penalties(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Make tokens that were seen before less likely (or more, with penalties below their neutral value).

    Args:
        logits: ``[S, V]`` float32.
        counts: ``[S, V]`` int32, how often each token was output.
        in_prompt: ``[S, V]`` bool, whether it occurs in the prompt.
        repetition: ``[S]`` float32; divides positive and multiplies other logits of tokens in prompt or output.
        presence: ``[S]`` float32, subtracted from logits of tokens in the output.
        frequency: ``[S]`` float32, subtracted once for each time in the output.

    Returns:
        ``[S, V]`` float32.
    """
    repetition = repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | (counts > 0), repeated, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def exclude(logits: Tensor, keep: Tensor) -> Tensor:
    """``logits`` ``[S, V]``, minus infinity where ``keep`` ``[S, V]`` bool is False. A NaN stays a NaN: a broken row
    must not pass as sound because its broken token is excluded."""
    return logits + torch.zeros_like(logits).masked_fill_(~keep, _NEVER)


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest logit of each row of ``[S, V]``, and its token id: the lowest one among equals.

    Returns:
        ``[S]`` of the dtype of ``logits`` and ``[S]`` int64. The logit is NaN if the row holds a NaN, and not finite
        either if it holds plus infinity or nothing but minus infinity.
    """
    values, token_ids = logits.max(dim=-1)
    return values, token_ids


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """``(logits - the row's greatest) / temperature`` in float32; ``[S, V]`` and ``[S]`` float32 above 0.

    The greatest becomes 0 first, so that a tiny temperature overflows downwards only, to a probability of 0."""
    logits = logits.to(torch.float32)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])


def _keep(logits: Tensor, order: Tensor, keep_sorted: Tensor) -> Tensor:
    keep = torch.empty_like(keep_sorted).scatter_(-1, order, keep_sorted)
    return logits.masked_fill(~keep, _NEVER)


def _within_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """For falling ``logits``: whether the tokens before this one sum to less than ``top_p``. The first is always kept,
    also by a ``top_p`` that float32 rounds to 0; 1 keeps all, although the sum of many may round to 1 early."""
    before = logits.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = -1
    return (before < top_p[:, None]) | (top_p[:, None] >= 1)


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep exactly the ``top_k`` ``[S]`` int64 most likely tokens of ``[S, V]`` float32; the rest becomes minus
    infinity. ``top_k`` of V or more keeps all."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(logits.shape[-1], device=logits.device)
    return _keep(logits, order, places < top_k[:, None])


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities sum to at least ``top_p`` ``[S]`` float32 in (0, 1]: the
    one that crosses the limit stays. ``[S, V]`` float32; the rest becomes minus infinity. 1 keeps all."""
    falling, order = logits.sort(dim=-1, descending=True, stable=True)
    return _keep(logits, order, _within_top_p(falling, top_p))


def keep_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor, *, max_elements: int = MAX_SLICE_ELEMENTS) -> Tensor:
    """``keep_top_p(keep_top_k(logits, top_k), top_p)``, to the bit, with one sort instead of two, and in slices of at
    most ``max_elements`` (but at least a row)."""
    places = torch.arange(logits.shape[-1], device=logits.device)
    result = torch.empty_like(logits)
    for part in _slices(logits.shape[0], logits.shape[1], max_elements):
        falling, order = logits[part].sort(dim=-1, descending=True, stable=True)
        within_k = places < top_k[part, None]
        within_p = _within_top_p(falling.masked_fill_(~within_k, _NEVER), top_p[part])
        result[part] = _keep(logits[part], order, within_k & within_p)
    return result


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens at least ``min_p`` ``[S]`` float32 in 0..1 times as likely as the most likely one. ``[S, V]``
    float32; the rest becomes minus infinity. 0 keeps all.

    No probability is computed: their ratio is the exponential of the difference of the logits."""
    lowest = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
    return logits.masked_fill(logits < lowest, _NEVER)


def gumbel_argmax(
    logits: Tensor, seeds: Tensor, positions: Tensor, *, max_elements: int = MAX_SLICE_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Draw a token from each row's softmax: `most_likely` of logits plus Gumbel noise (Gumbel 1954; Maddison 2014).

    The noise is ``-log(-log(1 - u))`` with `philox`'s u. With ``1 - u`` the tokens that win, those with much noise,
    have u near 0, where float32 is finest; so the probabilities hold down to about 2**-32.

    Args:
        logits: ``[S, V]`` float32; minus infinity is never drawn while anything else is there.
        seeds: ``[S]`` int64.
        positions: ``[S]`` int64, how many tokens the request has output before.
        max_elements: bound for the temporaries, which take 40 bytes for each element.

    Returns:
        ``[S]`` float32, logit plus noise, not finite where that of `most_likely` is not; and ``[S]`` int64, the token.
    """
    num_rows, vocab_size = logits.shape
    values = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for part in _slices(num_rows, vocab_size, max_elements):
        exponential = torch.log1p(-philox(seeds[part], positions[part], vocab_size)).neg_()
        values[part], token_ids[part] = most_likely(logits[part] - exponential.log_())
    return values, token_ids


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
    max_elements: int = MAX_SLICE_ELEMENTS,
) -> Tensor:
    """The next token of rows that need nothing but a temperature, and what their rows remember of it.

    `most_likely` where the temperature is 0, else `gumbel_argmax` of `apply_temperature`. Never waits for a CUDA
    device, so that a graph can hold it.

    Args:
        logits: ``[S, at least V]`` of any float dtype; columns behind V are padding.
        rows: ``[S]`` int32, all different but for -1: padding, which changes no row.
        temperature_by_row: ``[max_running]`` float32, 0 or more.
        seeds_by_row: ``[max_running]`` int64.
        positions_by_row: ``[max_running]`` int64, how many tokens the request has output before; counted up.
        last_tokens_by_row: ``[max_running]`` int64; takes the new token.
        vocab_size: V.
        out: where to write the result; made if None.
        all_greedy: the temperatures are 0, as the host may know: no noise is made.
        max_elements: bound for the temporaries.

    Returns:
        ``[2, S]`` int32: the tokens, and 1 where a row is sound, 0 where it held NaN, plus infinity or nothing but
        minus infinity: such a row's token is 0. Padding gets 0 and 0.
    """
    out = torch.empty((2, len(rows)), dtype=torch.int32, device=logits.device) if out is None else out
    real, index = rows >= 0, rows.clamp(min=0).to(torch.int64)
    temperature, seeds, positions = temperature_by_row[index], seeds_by_row[index], positions_by_row[index]
    for part in _slices(len(rows), vocab_size, max_elements):
        raw, heat = logits[part, :vocab_size], temperature[part]
        values, token_ids = most_likely(raw)
        if not all_greedy:
            scaled = apply_temperature(raw, heat.where(heat > 0, 1))
            _, drawn = gumbel_argmax(scaled, seeds[part], positions[part], max_elements=max_elements)
            token_ids = drawn.where(heat > 0, token_ids)
        sound = (values.abs() < torch.inf) & real[part]
        out[0, part] = token_ids.where(sound, 0).to(torch.int32)
        out[1, part] = sound.to(torch.int32)
    # Differences, because padding shares its index with row 0, and adds nothing to it.
    last_tokens_by_row.index_add_(0, index, (out[0] - last_tokens_by_row[index]).where(real, 0))
    positions_by_row.index_add_(0, index, real.to(torch.int64))
    return out


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """Log-probabilities of M tokens and of the K most likely ones in their places, on one device.

    Args:
        logprobs: ``[M]`` float32, natural logarithm, finite: at least `LOGPROB_FLOOR`.
        ranks: ``[M]`` int32, 1 + the number of tokens that are strictly more likely.
        top_ids: ``[M, K]`` int32, most likely first, the lower id first among equals.
        top_logprobs: ``[M, K]`` float32, falling, finite.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def spread(self, places: Tensor, num_tokens: int) -> LogprobTensors:
        """These at ``places`` ``[M]`` int64 of ``num_tokens``; the others hold `LOGPROB_FLOOR`, rank 0 and id 0."""

        def spread(values: Tensor, filler: float) -> Tensor:
            return values.new_full((num_tokens, *values.shape[1:]), filler).index_copy_(0, places, values)

        return LogprobTensors(
            logprobs=spread(self.logprobs, LOGPROB_FLOOR),
            ranks=spread(self.ranks, 0),
            top_ids=spread(self.top_ids, 0),
            top_logprobs=spread(self.top_logprobs, LOGPROB_FLOOR),
        )


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, *, max_elements: int = MAX_SLICE_ELEMENTS
) -> LogprobTensors:
    """Log-probabilities of given tokens, with alternatives, from the ``log_softmax`` in float32.

    Args:
        logits: ``[M, V]`` of any float dtype.
        token_ids: ``[M]`` int64, below V.
        num_top: K; at most V alternatives are there.
        max_elements: rows are taken in slices, so that no float32 copy has more elements (but one row always fits).

    Returns:
        `LogprobTensors` of M tokens. Rows that hold a NaN get `LOGPROB_FLOOR`.
    """
    num_tokens, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    new = partial(torch.empty, device=logits.device)
    result = LogprobTensors(
        logprobs=new(num_tokens, dtype=torch.float32),
        ranks=new(num_tokens, dtype=torch.int32),
        top_ids=new(num_tokens, num_top, dtype=torch.int32),
        top_logprobs=new(num_tokens, num_top, dtype=torch.float32),
    )
    for part in _slices(num_tokens, vocab_size, max_elements):
        # Order and ranks come from the logits: log_softmax may round two of them to one.
        values, ids = logits[part].to(torch.float32), token_ids[part, None]
        logprobs = values.log_softmax(dim=-1).nan_to_num_(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
        result.logprobs[part] = logprobs.gather(-1, ids)[:, 0]
        result.ranks[part] = 1 + (values > values.gather(-1, ids)).sum(dim=-1, dtype=torch.int32)
        if num_top:
            order = values.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
            result.top_ids[part] = order.to(torch.int32)
            result.top_logprobs[part] = logprobs.gather(-1, order)
    return result
