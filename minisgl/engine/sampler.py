"""The sampler: remembers how each row is to be sampled, and draws the next tokens of a step.

Chapter 4 tells this module's story; what the single operations mean stands in `minisgl.kernels.sampling`. The
`Sampler` owns the sampling state of all rows: numbers that kernels read lie on the device, beside them the host keeps
a word of flags a row, so that a step does the work that its own rows ask for and never asks the device what.

S rows of a step, V tokens of the vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.kernels import sampling
from minisgl.kernels.kernel_set import Kernels
from minisgl.kernels.sampling import LogprobTensors
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import AdmittedRow
from minisgl.utils import Int32Array

Int64Array = npt.NDArray[np.int64]
NeedArray = npt.NDArray[np.int64]
_MAX_FLOAT = float(np.finfo(np.float32).max)
_MAX_TOKENS = 2**31 - 1


class Need(IntFlag):
    """What a row asks for beyond the most likely token."""

    RANDOM = 1
    TOP_K_TOP_P = 2
    MIN_P = 4
    PENALTIES = 8
    BIAS = 16
    ALLOWED = 32
    MIN_TOKENS = 64
    LOGPROBS = 128


_MORE_THAN_LAUNCH = int(~Need.RANDOM)  # an int: an enum's operators take microseconds
# Rows that need nothing else are drawn in one pass over the logits.
_ONE_PASS = Need.RANDOM | Need.LOGPROBS
_ADJUSTS_LOGITS = Need.PENALTIES | Need.BIAS | Need.ALLOWED | Need.MIN_TOKENS


def _needs(params: SamplingParams, num_output: int, vocab_size: int) -> Need:
    random = not params.is_greedy
    needs = {
        Need.RANDOM: random,
        Need.TOP_K_TOP_P: random and (0 < params.top_k < vocab_size or params.top_p < 1),
        Need.MIN_P: random and params.min_p > 0,
        Need.PENALTIES: params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty,
        Need.BIAS: bool(params.logit_bias),
        Need.ALLOWED: params.allowed_token_ids is not None,
        Need.MIN_TOKENS: num_output < params.min_tokens,
        Need.LOGPROBS: params.logprobs is not None,
    }
    return Need(sum(need for need, asked in needs.items() if asked))


def _signed(seed: int) -> int:
    """The int64 with the low 64 bits of ``seed``."""
    return (seed + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The tokens of a step, on the device.

    Args:
        tokens: ``[2, S]`` int32: the tokens, below the vocabulary size; and 1 where the row is sound, 0 where the
            logits held NaN or plus infinity, or every token was excluded. The token of such a row is 0 and means
            nothing: the request has to end.
        logprobs: of S tokens if any row of the step asks, K the most that one asks for; rows that do not ask hold
            `LOGPROB_FLOOR`, rank 0 and id 0. From the raw logits, before penalties, bias, temperature and filters
            (the default of vLLM v1): what the model thinks, not what the request made of it.
    """

    tokens: Tensor
    logprobs: LogprobTensors | None = None

    @property
    def token_ids(self) -> Tensor:
        """``[S]`` int32."""
        return self.tokens[0]

    @property
    def finite(self) -> Tensor:
        """``[S]`` bool."""
        return self.tokens[1].to(torch.bool)


class _TokenCounts:
    """How often penalised rows have seen each token. Such rows are rare, so they share slots that are made as needed.

    Invariants: every row has at most one slot; a slot belongs to one row or is free.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._slots: dict[int, int] = {}  # row -> slot
        self._free: list[int] = []
        self.in_output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [slots, V]
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)  # [slots, V]

    def slots(self, rows: Int32Array) -> Int64Array:
        """The slots of ``rows``, all of which have one."""
        return np.array([self._slots[row] for row in rows.tolist()], np.int64)

    def release(self, row: int) -> None:
        """Take the row's slot away, if it has one."""
        if row in self._slots:
            self._free.append(self._slots.pop(row))

    def assign(self, row: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        """Give the row a slot that counts these tokens; ids are int64 on the device."""
        if not self._free:  # twice as many slots
            old, vocab_size = self.in_output.shape
            more = max(1, old)
            self.in_output = torch.cat([self.in_output, self.in_output.new_empty(more, vocab_size)])
            self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_empty(more, vocab_size)])
            self._free = list(range(old, old + more))
        slot = self._slots[row] = self._free.pop()
        self.in_output[slot] = 0
        self.in_output[slot].index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
        self.in_prompt[slot] = False
        self.in_prompt[slot].index_fill_(0, prompt_ids, True)


class Sampler:
    """Sampling state by row, and the draw.

    A row's tokens depend on its own logits, parameters, seed and past, never on the rows beside it. Its noise is that
    of (seed, output position), so a request that was preempted goes on as if nothing had happened.

    Invariants: a row is admitted before it is sampled; `sample` is called once for each token that a row outputs, in
    the order of the steps. The host counts output positions beside the device, for ``min_tokens``. What a row leaves
    behind stays until the row is admitted again.
    """

    def __init__(self, *, max_running: int, vocab_size: int, device: torch.device | str, kernels: Kernels) -> None:
        """
        Args:
            max_running: number of rows.
            vocab_size: V, tokens that may be chosen. Logits may be wider: what lies behind is padding.
            device: where logits are and state is kept.
            kernels: what computes.
        """
        self.kernels = kernels
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # On the device, [max_running]. Columns of one dtype share a tensor, so that an admission is one copy for each.
        self._floats = torch.ones(6, max_running, dtype=torch.float32, device=self.device)
        self._ints = torch.zeros(3, max_running, dtype=torch.int64, device=self.device)
        self._temperature, self._top_p, self._min_p, self._repetition, self._presence, self._frequency = self._floats
        self._seed, self._position, self._top_k = self._ints
        self._counts = _TokenCounts(vocab_size, self.device)
        self._bias_ids: dict[int, Tensor] = {}  # row -> [n] int64, on the device like
        self._bias_values: dict[int, Tensor] = {}  # row -> [n] float32
        self._allowed_ids: dict[int, Tensor] = {}  # row -> [n] int64
        self._ending_ids: dict[int, Tensor] = {}  # row -> [n] int64, EOS and stop ids while min_tokens is not reached
        # On the host, [max_running].
        self._needs = np.zeros(max_running, np.int64)
        self._num_logprobs = np.zeros(max_running, np.int64)
        self._num_output = np.zeros(max_running, np.int64)
        self._min_tokens = np.zeros(max_running, np.int64)

    def admit(self, admitted: Sequence[AdmittedRow]) -> None:
        """Set up rows for their requests. A request that comes back after a preemption brings its output so far and
        continues as if it had never left.

        Raises:
            ValueError: the parameters name a token id outside the vocabulary; no row has been changed then. EOS ids
                outside it are ignored: checkpoints name some that their model cannot say.
        """
        if not admitted:
            return
        for a in admitted:
            a.sampling_params.check_vocabulary(self.vocab_size)
        floats = np.empty((6, len(admitted)))
        ints = np.empty((3, len(admitted)), np.int64)
        for i, a in enumerate(admitted):
            p, num_output = a.sampling_params, len(a.output_token_ids)
            temperature = 0.0 if p.is_greedy else p.temperature
            top_k = min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size
            penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
            floats[:, i] = temperature, p.top_p, p.min_p, *penalties
            ints[:, i] = _signed(a.seed), num_output, top_k
            self._needs[a.row] = _needs(p, num_output, self.vocab_size)
            self._num_logprobs[a.row] = p.logprobs or 0
            self._num_output[a.row] = num_output
            self._min_tokens[a.row] = min(p.min_tokens, _MAX_TOKENS)
            self._set_tokens(a)
        rows = self._to_device(np.array([a.row for a in admitted]))
        # An infinite temperature would turn excluded logits into NaN.
        self._floats[:, rows] = self._to_device(floats.clip(-_MAX_FLOAT, _MAX_FLOAT).astype(np.float32))
        self._ints[:, rows] = self._to_device(ints)

    def _set_tokens(self, a: AdmittedRow) -> None:
        """The part of the row's state that is as long as the number of tokens that it names."""
        for table in (self._bias_ids, self._bias_values, self._allowed_ids, self._ending_ids):
            table.pop(a.row, None)
        self._counts.release(a.row)
        params, needs = a.sampling_params, self._needs[a.row]
        if needs & Need.PENALTIES:
            self._counts.assign(a.row, self._ids(a.prompt_token_ids), self._ids(a.output_token_ids))
        if params.logit_bias:
            self._bias_ids[a.row] = self._ids(list(params.logit_bias))
            self._bias_values[a.row] = self._to_device(np.array(list(params.logit_bias.values()), np.float32))
        if params.allowed_token_ids is not None:
            self._allowed_ids[a.row] = self._ids(params.allowed_token_ids)
        if needs & Need.MIN_TOKENS:
            ending = {*a.eos_token_ids, *params.stop_token_ids}
            self._ending_ids[a.row] = self._ids(sorted(i for i in ending if i < self.vocab_size))

    def takes_one_pass(self, rows: Int32Array) -> bool:
        """Whether these rows need nothing but `launch`, so that a graph can hold their draw."""
        return not (self._needs[rows] & _MORE_THAN_LAUNCH).any()

    def launch(
        self,
        logits: Tensor,
        device_rows: Tensor,
        last_tokens: Tensor,
        *,
        all_greedy: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The draw in one pass, on the device alone: arguments as of `sample`, result as `SampledTokens.tokens`, in
        ``out`` if that is given. Rows of -1 are passed over."""
        state = self._temperature, self._seed, self._position
        return self.kernels.sample_rows(
            logits, device_rows, *state, last_tokens, self.vocab_size, out, all_greedy=all_greedy
        )

    def launched(self, rows: Int32Array) -> None:
        """The host's side of `launch`: one more token for each of ``rows``."""
        self._num_output[rows] += 1

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Int32Array, device_rows: Tensor, last_tokens: Tensor) -> SampledTokens:
        """Draw one token for each row, and advance the rows' output positions and counts.

        Never waits for the device. Leaves ``logits`` as they are.

        Args:
            logits: ``[S, at least V]`` of any float dtype, on the sampler's device.
            rows: ``[S]`` int32 on the host, all different, in the order of ``logits``.
            device_rows: the same on the device.
            last_tokens: ``[max_running]`` int64; takes each row's token.
        """
        needs = self._needs[rows]
        step_needs = np.bitwise_or.reduce(needs)
        adjusted = np.flatnonzero(needs & ~_ONE_PASS)
        all_greedy = not (np.delete(needs, adjusted) & Need.RANDOM).any()
        if not len(adjusted):
            tokens = self.launch(logits, device_rows, last_tokens, all_greedy=all_greedy)
        else:
            # The rows that need more are padding to the kernel that draws the others.
            index = self._to_device(adjusted)
            others = device_rows.index_fill(0, index, -1)
            tokens = self.launch(logits, others, last_tokens, all_greedy=all_greedy)
            some, part = rows[adjusted], device_rows[index].to(torch.int64)
            token_ids, finite = self._sample_adjusted(logits[index, : self.vocab_size], some, part, needs[adjusted])
            tokens.index_copy_(1, index, torch.stack((token_ids.to(torch.int32), finite.to(torch.int32))))
            self._position.index_add_(0, part, torch.ones_like(part))
            last_tokens.index_copy_(0, part, token_ids)
        raw = logits[:, : self.vocab_size]
        logprobs = self._logprobs(raw, tokens[0].to(torch.int64), rows, needs) if step_needs & Need.LOGPROBS else None
        self._num_output[rows] += 1
        if step_needs & Need.MIN_TOKENS:
            reached = rows[self._num_output[rows] >= self._min_tokens[rows]]
            self._needs[reached] &= ~Need.MIN_TOKENS
        return SampledTokens(tokens=tokens, logprobs=logprobs)

    def _sample_adjusted(
        self, raw: Tensor, rows: Int32Array, device_rows: Tensor, needs: NeedArray
    ) -> tuple[Tensor, Tensor]:
        """Tokens of rows that need more than one pass: ``[S]`` int64, and ``[S]`` bool, whether the row is sound."""
        step_needs = np.bitwise_or.reduce(needs)
        adjusted = self._adjust(raw, rows, device_rows, needs) if step_needs & _ADJUSTS_LOGITS else raw
        if (needs & Need.RANDOM).all():
            values, token_ids = self._draw(adjusted, device_rows, needs)
        else:
            values, token_ids = sampling.most_likely(adjusted)
            if step_needs & Need.RANDOM:
                part, index = self._part(needs, Need.RANDOM)
                _, drawn = self._draw(adjusted[index], device_rows[index], needs[part])
                token_ids = token_ids.index_copy(0, index, drawn)
        finite = values.abs() < torch.inf  # isfinite, in half as many kernels
        token_ids = token_ids.where(finite, 0)
        if step_needs & Need.PENALTIES:
            part, index = self._part(needs, Need.PENALTIES)
            slots = self._to_device(self._counts.slots(rows[part]))
            self._counts.in_output[slots, token_ids[index]] += 1
        return token_ids, finite

    @torch.no_grad()
    def prompt_logprobs(self, logits: Tensor, next_ids: Tensor, num_top: int) -> LogprobTensors:
        """Log-probabilities of the tokens that follow in a prompt, with alternatives. Changes no state.

        Works in slices: beside ``logits``, only a bounded number of rows is held in float32.

        Args:
            logits: ``[M, at least V]`` of any float dtype, on the sampler's device.
            next_ids: ``[M]`` int64, the token after each.
            num_top: K.
        """
        return sampling.token_logprobs(logits[:, : self.vocab_size], next_ids, num_top)

    def _adjust(self, raw: Tensor, rows: Int32Array, device_rows: Tensor, needs: NeedArray) -> Tensor:
        """``[S, V]`` float32, a copy of the logits with penalties, bias and exclusions."""
        logits = raw.to(torch.float32, copy=True)
        if (needs & Need.PENALTIES).any():
            part, index = self._part(needs, Need.PENALTIES)
            slots, some = self._to_device(self._counts.slots(rows[part])), device_rows[index]
            logits[index] = sampling.apply_penalties(
                logits[index],
                self._counts.in_output[slots],
                self._counts.in_prompt[slots],
                self._repetition[some],
                self._presence[some],
                self._frequency[some],
            )
        if (needs & Need.BIAS).any():
            part, _ = self._part(needs, Need.BIAS)
            places, ids = self._entries(self._bias_ids, rows[part], part)
            logits[places, ids] += torch.cat([self._bias_values[row] for row in rows[part].tolist()])
        if (needs & Need.ALLOWED).any():
            part, index = self._part(needs, Need.ALLOWED)
            places, ids = self._entries(self._allowed_ids, rows[part], np.arange(len(part)))
            keep = torch.zeros(len(part), self.vocab_size, dtype=torch.bool, device=self.device)
            keep[places, ids] = keep.new_ones(())  # a Python value would be copied from the host, and waited for
            logits[index] = sampling.exclude(logits[index], keep)
        if (needs & Need.MIN_TOKENS).any():
            part, _ = self._part(needs, Need.MIN_TOKENS)
            places, ids = self._entries(self._ending_ids, rows[part], part)
            logits[places, ids] -= torch.inf
        return logits

    def _draw(self, logits: Tensor, device_rows: Tensor, needs: NeedArray) -> tuple[Tensor, Tensor]:
        """Draw from ``[S, V]`` adjusted logits of random rows: what `sampling.gumbel_argmax` returns."""
        logits = sampling.apply_temperature(logits, self._temperature[device_rows])
        if (needs & Need.TOP_K_TOP_P).any():
            _, index = self._part(needs, Need.TOP_K_TOP_P)
            some = device_rows[index]
            logits[index] = sampling.keep_top_k_top_p(logits[index], self._top_k[some], self._top_p[some])
        if (needs & Need.MIN_P).any():
            logits = sampling.keep_min_p(logits, self._min_p[device_rows])  # 0 keeps all
        return self.kernels.gumbel_argmax(logits, self._seed[device_rows], self._position[device_rows])

    def _logprobs(self, raw: Tensor, token_ids: Tensor, rows: Int32Array, needs: NeedArray) -> LogprobTensors:
        part, index = self._part(needs, Need.LOGPROBS)
        num_top = int(self._num_logprobs[rows[part]].max())
        if len(part) == len(rows):
            return sampling.token_logprobs(raw, token_ids, num_top)
        return sampling.token_logprobs(raw[index], token_ids[index], num_top).spread(index, len(rows))

    def _part(self, needs: NeedArray, need: Need) -> tuple[Int64Array, Tensor]:
        """Which of the S rows have this need: their places, on the host and on the device."""
        part = np.flatnonzero(needs & need)
        return part, self._to_device(part)

    def _entries(self, table: dict[int, Tensor], rows: Int32Array, places: Int64Array) -> tuple[Tensor, Tensor]:
        """The tokens that ``rows`` name in ``table``, one after the other: the place of each one's row, and its id."""
        ids = [table[row] for row in rows.tolist()]
        return self._to_device(np.repeat(places, [len(i) for i in ids])), torch.cat(ids)

    def _ids(self, token_ids: Sequence[int] | Int32Array) -> Tensor:
        return self._to_device(np.asarray(token_ids, np.int64))

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A copy on the device, without waiting for it; int32 becomes int64, which indices have to be."""
        tensor = torch.tensor(array.astype(np.int64) if array.dtype == np.int32 else array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)
