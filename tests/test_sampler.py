"""The sampler: each draw against a slow twin in plain Python, and one row against the same row in a crowd."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.engine.pending import PendingStep
from minisgl.engine.sampler import SampledTokens, Sampler
from minisgl.kernels import sampling
from minisgl.kernels.kernel_set import PLAIN
from minisgl.kernels.philox import philox, philox_4x32, uniform
from minisgl.kernels.sampling import LOGPROB_FLOOR
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import AdmittedRow
from minisgl.utils import Int32Array

VOCAB = 40
EOS = 2


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are too small for threads; waiting for them costs most of the time on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- builders ----


def admitted(
    row: int, *, seed: int = 0, prompt: Any = (5, 6), output: Any = (), eos: Any = (EOS,), **params: Any
) -> AdmittedRow:
    return AdmittedRow(
        row=row,
        request_id=f"r{row}",
        sampling_params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=tuple(eos),
        prompt_token_ids=np.array(prompt, np.int32),
        output_token_ids=np.array(output, np.int32),
        num_computed=0,
    )


def new_sampler(max_running: int, *, vocab_size: int = VOCAB, device: str = "cpu") -> Sampler:
    return Sampler(max_running=max_running, vocab_size=vocab_size, device=device, kernels=PLAIN)


def sampler_with(*rows: AdmittedRow, vocab_size: int = VOCAB, device: str = "cpu") -> Sampler:
    sampler = new_sampler(max((a.row for a in rows), default=0) + 1, vocab_size=vocab_size, device=device)
    sampler.admit(rows)
    return sampler


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def draw(sampler: Sampler, logits: Tensor, *rows: int) -> SampledTokens:
    return sample(sampler, logits, np.array(rows, np.int32))


def sample(sampler: Sampler, logits: Tensor, rows: Int32Array) -> SampledTokens:
    device_rows = torch.from_numpy(rows.copy())
    if sampler.device.type == "cuda":
        device_rows = device_rows.pin_memory().to(sampler.device, non_blocking=True)
    last_tokens = torch.full((len(sampler._needs),), -1, dtype=torch.int64, device=sampler.device)
    return sampler.sample(logits, rows, device_rows, last_tokens)


def test_rows_remember_their_token_and_no_other_does() -> None:
    for params in ([{}, dict(temperature=0)], KINDS):
        sampler = sampler_with(*(admitted(2 * i, **p) for i, p in enumerate(params)))
        rows, last_tokens = torch.arange(len(params)) * 2, torch.full((2 * len(params),), -1)
        device_rows = rows.to(torch.int32)
        result = sampler.sample(random_logits(len(params), VOCAB), device_rows.numpy(), device_rows, last_tokens)
        assert torch.equal(last_tokens[rows], result.token_ids.long()) and (last_tokens[1::2] == -1).all()


def tokens(sampler: Sampler, logits: Tensor, *rows: int) -> list[int]:
    return draw(sampler, logits, *rows).token_ids.tolist()


def same_bits(a: SampledTokens, i: int, b: SampledTokens, j: int) -> bool:
    """Whether row ``i`` of ``a`` is row ``j`` of ``b``, log-probabilities included as far as both have them."""
    equal = a.token_ids[i] == b.token_ids[j] and a.finite[i] == b.finite[j]
    if a.logprobs is None or b.logprobs is None:
        return bool(equal)
    k = min(a.logprobs.top_ids.shape[1], b.logprobs.top_ids.shape[1])
    for column in fields(a.logprobs):
        x, y = getattr(a.logprobs, column.name)[i], getattr(b.logprobs, column.name)[j]
        equal = equal and torch.equal(x[..., :k] if x.ndim else x, y[..., :k] if y.ndim else y)
    return bool(equal)


class Watch(TorchDispatchMode):
    """Names of the operations that ran, and the largest float32 or int64 result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names[func.overloadpacket.__name__] += 1
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.largest = max(self.largest, tensor.numel())
        return result


# ---- the slow twin: one row, plain Python, float64 ----


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def python_uniform(seed: int, position: int, token_id: int) -> float:
    words = python_philox([token_id // 4, position, 0, 0], [seed % 2**32, seed >> 32 & 0xFFFFFFFF])
    word = words[token_id % 4]
    return min(float(np.float32(np.float32(word) * 2.0**-32 + 2.0**-33)), 1 - 2.0**-24)


@dataclass
class Twin:
    """What one request's next token must be. ``slim`` tells that float32 may see it differently."""

    request: AdmittedRow
    output: list[int] = field(default_factory=list)

    def adjusted(self, raw: list[float]) -> list[float]:
        p, x = self.request.sampling_params, list(raw)
        prompt = set(self.request.prompt_token_ids.tolist())
        for token in range(len(x)):
            count = self.output.count(token)
            if token in prompt or count:
                x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
            if count:
                x[token] -= p.frequency_penalty * count + p.presence_penalty
            x[token] += (p.logit_bias or {}).get(token, 0.0)
            if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
                x[token] = -math.inf
            if len(self.output) < p.min_tokens and token in {*self.request.eos_token_ids, *p.stop_token_ids}:
                x[token] = -math.inf
        return x

    def next(self, raw: list[float]) -> tuple[int | None, bool]:
        """The token (None: the row is not finite), and whether the decision is slim."""
        p, x = self.request.sampling_params, self.adjusted(raw)
        if max(x) == -math.inf:
            return None, False
        order = sorted(range(len(x)), key=lambda token: (-x[token], token))
        if p.temperature < 1e-5:
            return order[0], False
        x = [(value - max(x)) / p.temperature for value in x]
        slim = False

        kept = order[: p.top_k] if p.top_k > 0 else order
        total, cumulated, nucleus = sum(math.exp(x[token]) for token in kept), 0.0, []
        for token in kept:
            slim |= p.top_p < 1 and abs(cumulated - p.top_p) < 1e-5
            if cumulated < p.top_p or p.top_p == 1:
                nucleus.append(token)
            cumulated += math.exp(x[token]) / total
        likely = [token for token in nucleus if math.exp(x[token]) >= p.min_p]
        slim |= any(abs(math.exp(x[token]) - p.min_p) < 1e-5 for token in nucleus if token != order[0])

        noisy = {
            token: x[token] - math.log(-math.log1p(-python_uniform(self.request.seed, len(self.output), token)))
            for token in likely
            if x[token] > -math.inf
        }
        ranking = sorted(noisy, key=lambda token: -noisy[token])
        slim |= len(ranking) > 1 and noisy[ranking[0]] - noisy[ranking[1]] < 1e-4
        return ranking[0], slim


def python_logprobs(raw: list[float]) -> list[float]:
    top = max(raw)
    log_sum = top + math.log(sum(math.exp(value - top) for value in raw))
    return [value - log_sum for value in raw]


token_ids_of_vocab = st.integers(0, VOCAB - 1)
# Powers of two and quarters: float32 computes adjusted logits exactly, so that ties are ties in both.
quarters = st.integers(-8, 8).map(lambda n: n / 4)
params_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0, 1e-6, 0.3, 1.0, 2.5]),
        "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.4, 1e-3]),
        "top_k": st.sampled_from([0, -1, 1, 3, 10, VOCAB, 10**30]),
        "min_p": st.sampled_from([0, 0, 0.07, 0.6, 1.0]),
        "repetition_penalty": st.sampled_from([1, 1, 0.5, 2]),
        "presence_penalty": st.just(0) | quarters,
        "frequency_penalty": st.just(0) | quarters,
        "logit_bias": st.none() | st.dictionaries(token_ids_of_vocab, quarters, max_size=4),
        "allowed_token_ids": st.none() | st.lists(token_ids_of_vocab, min_size=1, max_size=8),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(token_ids_of_vocab, max_size=2),
        "logprobs": st.sampled_from([None, None, 0, 3]),
    }
)
requests_strategy = st.fixed_dictionaries(
    {
        "params": params_strategy,
        "seed": st.integers(0, 2**63 - 1),
        "prompt": st.lists(token_ids_of_vocab, min_size=1, max_size=5),
        "output": st.lists(token_ids_of_vocab, max_size=5),
        "eos": st.sampled_from([(), (EOS,), (EOS, 3, VOCAB + 7)]),
    }
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    batch=st.lists(requests_strategy, min_size=1, max_size=6),
    logits_seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 4),
    spread=st.sampled_from([1, 3]),
    padding=st.sampled_from([0, 5]),
)
def test_every_row_equals_its_twin(
    batch: list[dict[str, Any]], logits_seed: int, steps: int, spread: int, padding: int
) -> None:
    """Any mix of parameters, several steps, rows in another order each time, some of them coming from a preemption."""
    rng = np.random.default_rng(logits_seed)
    rows = rng.permutation(len(batch) + 2)[: len(batch)].astype(np.int32)
    twins = []
    for row, request in zip(rows.tolist(), batch, strict=True):
        params = {key: value for key, value in request.items() if key != "params"} | request["params"]
        a = admitted(row, **params)
        twins.append(Twin(a, list(request["output"])))
    sampler = new_sampler(len(batch) + 2)
    sampler.admit([twin.request for twin in twins])
    for _ in range(steps):
        # Multiples of 1/8 in a narrow range: many ties.
        raw = np.round(rng.normal(size=(len(batch), VOCAB)) * spread * 8) / 8
        raw[rng.random(raw.shape) < 0.05] = -np.inf
        wide = np.concatenate([raw, np.full((len(batch), padding), 99.0)], axis=1)
        order = rng.permutation(len(batch))
        result = PendingStep(sample(sampler, torch.tensor(wide[order], dtype=torch.float32), rows[order])).wait()
        for place, i in enumerate(order.tolist()):
            expected, slim = twins[i].next(raw[i].tolist())
            token, finite = int(result.token_ids[place]), bool(result.finite[place])
            assert finite == (expected is not None)
            assert token == (expected or 0) or slim, twins[i]
            if twins[i].request.sampling_params.logprobs is not None:
                assert result.logprobs is not None
                values = python_logprobs(raw[i].tolist())
                assert result.logprobs.logprobs[place] == pytest.approx(max(values[token], LOGPROB_FLOOR), abs=1e-4)
                assert result.logprobs.ranks[place] == 1 + sum(value > values[token] for value in values)
                likely = sorted(range(VOCAB), key=lambda t: (-values[t], t))
                k = twins[i].request.sampling_params.logprobs
                assert result.logprobs.top_ids[place, :k].tolist() == likely[:k]
            twins[i].output.append(token)


# ---- random numbers ----


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    """The philox4x32-10 lines of kat_vectors in the Random123 distribution."""

    def parse(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    got = philox_4x32(tuple(map(torch.tensor, parse(counter))), tuple(map(torch.tensor, parse(key))))
    assert [int(word) for word in got] == parse(words) == python_philox(parse(counter), parse(key))


def test_philox_maps_seed_position_and_token() -> None:
    """All 64 bits of the seed count, also the sign; four tokens share a counter, whose second word is the position."""
    seeds = [0, 1, 2**32, 2**63 - 1, -1, -(2**63), 0x123456789ABCDEF]
    positions = [0, 1, 2, 1000, 2**31, 2**32 - 1, 7]
    got = philox(torch.tensor(seeds), torch.tensor(positions), 11)
    expected = [[python_uniform(s, p, t) for t in range(11)] for s, p in zip(seeds, positions, strict=True)]
    assert got.dtype == torch.float32 and got.tolist() == expected
    assert len(set(got.flatten().tolist())) == got.numel()
    for vocab_size in range(1, 11):
        assert torch.equal(philox(torch.tensor(seeds), torch.tensor(positions), vocab_size), got[:, :vocab_size])


def test_uniform_is_strictly_inside_0_and_1() -> None:
    words = torch.tensor([0, 1, 2**31, 2**32 - 1])
    assert uniform(words).tolist() == [2.0**-33, 1.5 * 2.0**-32, 0.5, 1 - 2.0**-24]


def chi_square(observed: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


CHI_SQUARE_11 = 37.4  # 11 degrees of freedom, exceeded by chance once in 10,000


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_distribution(over: str) -> None:
    """20,000 draws, over seeds that follow each other or over one request's positions: both as good as random."""
    n, logits = 20_000, random_logits(12, seed=5) / 2
    counting, constant = torch.arange(n), torch.full((n,), 7)
    seeds, positions = (counting, constant) if over == "seeds" else (constant, counting)
    _, ids = sampling.gumbel_argmax(logits.expand(n, -1), seeds, positions)
    probabilities = logits.double().softmax(-1)
    assert chi_square(ids.bincount(minlength=12), probabilities) < CHI_SQUARE_11
    # Neighbours are independent: the pairs with an even and an odd first token have the same second tokens.
    for parity in (0, 1):
        second = ids[1:][ids[:-1] % 2 == parity]
        assert chi_square(second.bincount(minlength=12), probabilities) < CHI_SQUARE_11


def test_filtered_draws_follow_the_rest_of_the_distribution() -> None:
    """top_k and temperature through the sampler: the kept tokens in their proportion, the others never."""
    n, logits = 4000, random_logits(1, VOCAB, seed=6)
    sampler = sampler_with(*(admitted(i, seed=i, temperature=2.0, top_k=12) for i in range(n)))
    ids = sample(sampler, logits.expand(n, -1), np.arange(n, dtype=np.int32)).token_ids
    values, kept = (logits[0] / 2).topk(12)
    assert set(ids.tolist()) <= set(kept.tolist())
    assert chi_square(ids.bincount(minlength=VOCAB)[kept], values.double().softmax(-1)) < CHI_SQUARE_11


def test_the_least_uniform_number_wins() -> None:
    """Tokens are won near u = 0, where float32 has steps of 2**-32; near 1 they are 2**-24, and many would tie."""
    seeds, positions = torch.arange(20), torch.arange(20) * 3
    numbers = philox(seeds, positions, 3000)
    values, ids = sampling.gumbel_argmax(torch.zeros(20, 3000), seeds, positions, max_elements=7000)
    assert torch.equal(ids, numbers.argmin(-1))
    assert torch.allclose(values, -numbers.amin(-1).log(), atol=1e-2)


# ---- P01, P04, P05, P06 ----


def test_p01_temperature_0_is_argmax_whatever_the_filters() -> None:
    """P01: 50 repeats in a mixed batch; the lowest id among equals."""
    logits = random_logits(4, VOCAB)
    logits[:, [9, 30]] = 20.0
    greedy = dict(top_p=0.5, top_k=40, min_p=0.5)
    sampler = sampler_with(
        admitted(0, temperature=0, **greedy),
        admitted(1, temperature=1.0, seed=1),
        admitted(2, temperature=9e-6, **greedy),
        admitted(3, temperature=1.0, seed=2, top_p=0.5),
    )
    for _ in range(50):
        got = tokens(sampler, logits, 0, 1, 2, 3)
        assert got[0] == got[2] == 9


def test_p01_top_k_1_and_tiny_top_p_are_greedy() -> None:
    logits = random_logits(2, VOCAB).round()  # ties
    best = logits.max(-1).indices.tolist()
    sampler = sampler_with(admitted(0, top_k=1, temperature=5.0), admitted(1, top_p=1e-50, temperature=5.0))
    for _ in range(20):
        assert tokens(sampler, logits, 0, 1) == best


KINDS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=0, logprobs=5, frequency_penalty=0.5),
    dict(temperature=1.0, seed=7),
    dict(temperature=0.7, top_k=9, seed=1),
    dict(temperature=1.3, top_p=0.8, seed=2, logprobs=2),
    dict(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3),
    dict(temperature=1.0, logit_bias={3: 2.0, 5: -7}, seed=4, logprobs=0),
    dict(temperature=2.0, allowed_token_ids=[1, 5, 8, 13], min_tokens=3, stop_token_ids=[13], seed=5),
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("vocab", [VOCAB, 1009])
def test_p04_p05_p06_a_row_alone_is_the_row_in_a_crowd(kind: int, vocab: int) -> None:
    """P04, P05, P06: every kind of request, to the bit, log-probabilities included, for 6 steps of its own.

    The crowd holds all kinds, in another order of rows, and comes and goes."""
    logits = random_logits(6, len(KINDS), vocab, seed=kind)
    alone = sampler_with(admitted(0, **KINDS[kind]), vocab_size=vocab)
    crowd = sampler_with(*(admitted(10 - i, **params) for i, params in enumerate(KINDS)), vocab_size=vocab)
    for step, x in enumerate(logits):
        members = [i for i in range(len(KINDS)) if i == kind or (i + step) % 4]
        single = draw(alone, x[kind : kind + 1], 0)
        together = draw(crowd, x[members], *(10 - i for i in members))
        assert same_bits(single, 0, together, members.index(kind)), (step, KINDS[kind])


def test_p06_in_a_large_vocabulary_with_threads() -> None:
    """P06: work that torch divides among threads, in other pieces when the batch is larger."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        kinds = [KINDS[1], KINDS[4], KINDS[5]]
        logits = random_logits(3, 50257)
        crowd = sampler_with(*(admitted(i, **params) for i, params in enumerate(kinds)), vocab_size=50257)
        together = draw(crowd, logits, 0, 1, 2)
        for i, params in enumerate(kinds):
            alone = draw(sampler_with(admitted(0, **params), vocab_size=50257), logits[i : i + 1], 0)
            assert same_bits(alone, 0, together, i)
    finally:
        torch.set_num_threads(threads)


def test_p05_seeds_give_different_texts_and_positions_different_tokens() -> None:
    sampler = sampler_with(*(admitted(i, seed=seed) for i, seed in enumerate([7, 8, 7 + 2**32, 7])))
    logits = torch.zeros(4, VOCAB)
    texts = torch.stack([draw(sampler, logits, 0, 1, 2, 3).token_ids for _ in range(12)], dim=1).tolist()
    assert texts[0] == texts[3]
    assert len({tuple(text) for text in texts}) == 3
    assert all(len(set(text)) > 4 for text in texts)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("lost_at", [0, 2, 4])
def test_after_a_preemption_as_if_it_had_never_been(kind: int, lost_at: int) -> None:
    """The request comes back to another row, which somebody else has used, with its output so far."""
    logits = random_logits(8, 1, VOCAB, seed=kind + 20)
    undisturbed = sampler_with(admitted(0, **KINDS[kind]))
    moved = sampler_with(admitted(0, **KINDS[kind]), admitted(1, seed=99, presence_penalty=1.0, logit_bias={0: 50}))
    expected, output = [], []
    for step, x in enumerate(logits):
        expected += tokens(undisturbed, x, 0)
        if step <= lost_at:
            draw(moved, x, 1)
        if step == lost_at:
            moved.admit([admitted(1, output=output, **KINDS[kind])])
        output += tokens(moved, x, 1 if step >= lost_at else 0)
    assert output == expected


# ---- temperature and filters ----


def test_tiny_and_huge_temperatures() -> None:
    """Neither overflows: just above the greedy limit the most likely token, far above it any that is not excluded."""
    logits = random_logits(2, VOCAB) * 2e37
    logits[:, 4] = -math.inf
    sampler = sampler_with(admitted(0, temperature=1e-5), admitted(1, temperature=1e300))
    got = [draw(sampler, logits, 0, 1) for _ in range(60)]
    assert all(bool(step.finite.all()) for step in got)
    ids = torch.stack([step.token_ids for step in got])
    assert set(ids[:, 0].tolist()) == {int(logits[0].argmax())}
    assert len(set(ids[:, 1].tolist())) > 20 and 4 not in ids[:, 1]


def kept(filtered: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in filtered]


def test_top_p_keeps_the_token_that_crosses_the_limit() -> None:
    logits = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log().expand(5, -1)
    got = kept(sampling.keep_top_p(logits, torch.tensor([0.4, 0.6, 0.76, 0.9, 1.0])))
    assert got == [[1], [1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_top_p_just_reached_needs_no_further_token() -> None:
    """Equal logits: probabilities of exactly 1/4, the lower ids first."""
    got = kept(sampling.keep_top_p(torch.zeros(3, 4), torch.tensor([0.25, 0.5, 0.50001])))
    assert got == [[0], [0, 1], [0, 1, 2]]


def test_top_p_1_keeps_the_far_tail() -> None:
    """The sum rounds to 1 long before the last token."""
    logits = torch.tensor([[0.0, -30.0, -60.0, -90.0]])
    assert kept(sampling.keep_top_p(logits, torch.tensor([1.0]))) == [[0, 1, 2, 3]]


def test_top_k_keeps_exactly_k_lower_ids_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]]).expand(5, -1)
    got = kept(sampling.keep_top_k(logits, torch.tensor([1, 3, 4, 5, 99])))
    assert got == [[1], [0, 1, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_min_p_is_relative_to_the_most_likely() -> None:
    logits = torch.tensor([[0.5, 0.26, 0.24]]).log().expand(4, -1)
    got = kept(sampling.keep_min_p(logits, torch.tensor([0.0, 0.4, 0.5, 1.0])))
    assert got == [[0, 1, 2], [0, 1, 2], [0, 1], [0]]


@pytest.mark.parametrize("max_elements", [1, 3 * VOCAB, 2**24])
def test_one_sort_equals_two(max_elements: int) -> None:
    """The fused filter is its two halves, to the bit, in slices of any size."""
    logits = random_logits(16, VOCAB, seed=8).mul(2).round() / 2
    top_k = torch.tensor([1, 2, 5, VOCAB] * 4)
    top_p = torch.tensor([0.1, 0.5, 0.9, 1.0]).repeat_interleave(4)
    fused = sampling.keep_top_k_top_p(logits, top_k, top_p, max_elements=max_elements)
    assert torch.equal(fused, sampling.keep_top_p(sampling.keep_top_k(logits, top_k), top_p))
    assert len(set(map(len, kept(fused)))) > 4


# ---- penalties, bias, exclusions ----


def test_penalties_equal_a_naive_count() -> None:
    """Greedy over constant logits: each token is repeated until its penalties outweigh the next one's logit."""
    logits = torch.tensor([[4.0, 3.9, 3.0, -1.0]])
    sampler = sampler_with(
        admitted(0, temperature=0, frequency_penalty=0.25, presence_penalty=0.5, repetition_penalty=1.1, prompt=(1,)),
        vocab_size=4,
    )
    got, counts = [], [0, 0, 0, 0]
    for _ in range(12):
        x = [
            value / 1.1 if count or token == 1 else value
            for token, (value, count) in enumerate(zip(logits[0].tolist(), counts, strict=True))
        ]
        x = [value - 0.25 * count - 0.5 * (count > 0) for value, count in zip(x, counts, strict=True)]
        expected = x.index(max(x))
        got += tokens(sampler, logits, 0)
        assert got[-1] == expected
        counts[expected] += 1
    assert len(set(got)) == 3


def test_repetition_penalty_makes_negative_logits_smaller() -> None:
    sampler = sampler_with(admitted(0, temperature=0, repetition_penalty=2.0, prompt=(0,)), vocab_size=2)
    assert tokens(sampler, torch.tensor([[-1.0, -1.5]]), 0) == [1]


def test_counts_are_made_only_when_somebody_needs_them_and_reused() -> None:
    sampler = new_sampler(64)
    sampler.admit([admitted(i, seed=i) for i in range(64)])
    assert sampler._counts.in_output.numel() == 0
    for _ in range(10):
        sampler.admit([admitted(i, presence_penalty=1.0) for i in (3, 9, 20)])
    assert sampler._counts.in_output.shape == sampler._counts.in_prompt.shape == (4, VOCAB)


def test_growing_counts_keeps_those_that_are_there() -> None:
    logits = random_logits(10, 1, VOCAB, seed=3)
    params = dict(temperature=0, frequency_penalty=1.0, repetition_penalty=1.5)
    steady = sampler_with(admitted(0, **params))
    growing = new_sampler(16)
    growing.admit([admitted(0, **params)])
    for step, x in enumerate(logits / 4):
        assert tokens(steady, x, 0) == tokens(growing, x, 0)
        growing.admit([admitted(step + 1, output=[1, 1, 1], **params)])


def test_logit_bias_forces_and_forbids() -> None:
    logits = random_logits(3, VOCAB)
    best = int(logits[1].argmax())
    sampler = sampler_with(
        admitted(0, logit_bias={11: 100}),
        admitted(1, temperature=0, logit_bias={best: -100}),
        admitted(2, temperature=0),
    )
    for _ in range(10):
        got = tokens(sampler, logits, 0, 1, 2)
        assert got == [11, int(logits[1].topk(2).indices[1]), int(logits[2].argmax())]


def test_only_allowed_tokens_come() -> None:
    logits = random_logits(2, VOCAB)
    sampler = sampler_with(admitted(0, temperature=50.0, allowed_token_ids=[3, 4, 31]), admitted(1, temperature=50.0))
    ids = torch.stack([draw(sampler, logits, 0, 1).token_ids for _ in range(60)])
    assert set(ids[:, 0].tolist()) == {3, 4, 31}
    assert len(set(ids[:, 1].tolist())) > 15


def test_min_tokens_holds_back_eos_and_stop_tokens() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [EOS, 7]] = 50.0
    sampler = sampler_with(
        admitted(0, temperature=0, min_tokens=3, stop_token_ids=[7]),
        admitted(1, seed=4, min_tokens=3, stop_token_ids=[7], output=[9, 9]),
    )
    ids = torch.stack([draw(sampler, logits, 0, 1).token_ids for _ in range(5)], dim=1).tolist()
    assert ids[0] == [0, 0, 0, EOS, EOS]
    assert ids[1][0] not in (EOS, 7) and set(ids[1][1:]) <= {EOS, 7}


@pytest.mark.parametrize(
    "bad",
    [dict(logit_bias={99999999: 5}), dict(allowed_token_ids=[1, VOCAB]), dict(stop_token_ids=[VOCAB], min_tokens=1)],
)
def test_v06_a_token_outside_the_vocabulary_is_refused_and_changes_nothing(bad: dict[str, Any]) -> None:
    """V06: it would kill the device's context. The batch that holds it leaves every row as it was."""
    logits = random_logits(5, 1, VOCAB)
    expected, sampler = sampler_with(admitted(0, seed=5)), sampler_with(admitted(0, seed=5))
    for x in logits:
        assert tokens(expected, x, 0) == tokens(sampler, x, 0)
        with pytest.raises(ValueError, match=f"outside the vocabulary 0..{VOCAB - 1}"):
            sampler.admit([admitted(0, temperature=0), admitted(0, **bad)])


def test_a_row_forgets_its_last_request() -> None:
    logits = random_logits(4, 1, VOCAB)
    everything = dict(
        min_tokens=9, logit_bias={1: 9}, allowed_token_ids=[1, EOS], frequency_penalty=2, top_k=2, logprobs=1
    )
    sampler, fresh = sampler_with(admitted(0, **everything)), sampler_with(admitted(0, seed=3))
    draw(sampler, logits[0], 0)
    sampler.admit([admitted(0, seed=3)])
    for x in logits:
        a, b = draw(sampler, x, 0), draw(fresh, x, 0)
        assert a.logprobs is None and same_bits(a, 0, b, 0)


# ---- broken rows, padding ----


@pytest.mark.parametrize("broken", ["nan", "one nan", "nan for eos", "inf", "all excluded", "no allowed token left"])
@pytest.mark.parametrize("params", [*KINDS, dict(temperature=0, allowed_token_ids=[5])], ids=str)
def test_a_broken_row_says_so_and_disturbs_nobody(broken: str, params: dict[str, Any]) -> None:
    """Also where the broken token is one that the request excludes."""
    logits = random_logits(3, VOCAB)
    if broken == "nan":
        logits[1] = math.nan
    elif broken == "one nan":
        logits[1, 20] = math.nan
    elif broken == "nan for eos":
        logits[1, EOS] = math.nan
    elif broken == "inf":
        logits[1, 20] = math.inf
    elif broken == "all excluded":
        logits[1] = -math.inf
    else:
        params = params | dict(allowed_token_ids=[EOS, 13], stop_token_ids=[13], min_tokens=3)
    neighbours = dict(temperature=1.0, seed=8, top_p=0.9, logprobs=2), dict(temperature=0, presence_penalty=1.0)
    sampler = sampler_with(admitted(0, **neighbours[0]), admitted(1, **params), admitted(2, **neighbours[1]))
    got = draw(sampler, logits, 0, 1, 2)
    assert got.finite.tolist() == [True, False, True]
    assert got.token_ids[1] == 0
    assert got.logprobs is not None and bool(got.logprobs.logprobs.isfinite().all())
    assert bool(got.logprobs.top_logprobs.isfinite().all())
    healthy = sampler_with(admitted(0, **neighbours[0]), admitted(2, **neighbours[1]))
    expected = draw(healthy, logits[[0, 2]], 0, 2)
    assert same_bits(got, 0, expected, 0) and got.token_ids[2] == expected.token_ids[1]


@pytest.mark.parametrize("params", KINDS, ids=str)
@pytest.mark.parametrize("padding", [1000.0, math.nan, math.inf])
def test_padded_vocabulary_rows_do_not_exist(params: dict[str, Any], padding: float) -> None:
    logits = random_logits(2, VOCAB)
    wide = torch.cat([logits, torch.full((2, 24), padding)], dim=1)
    rows = admitted(0, **params), admitted(1, **params)
    narrow, padded = sampler_with(*rows), sampler_with(*rows)
    for _ in range(4):
        a, b = draw(narrow, logits, 0, 1), draw(padded, wide, 0, 1)
        assert same_bits(a, 0, b, 0) and same_bits(a, 1, b, 1)
    prompt = padded.prompt_logprobs(wide, torch.tensor([3, 4]), 5)
    assert torch.equal(prompt.logprobs, logits.log_softmax(-1)[[0, 1], [3, 4]])
    assert int(prompt.top_ids.max()) < VOCAB


# ---- logprobs ----


def test_s19_logprobs_are_raw_finite_and_aligned() -> None:
    """S19: of the model's own distribution, whatever bias, temperature and filters made of it; JSON can write them."""
    logits = random_logits(4, VOCAB, seed=2)
    logits[:, 8:12] = -math.inf
    sampler = sampler_with(
        admitted(0, temperature=0, logprobs=5),
        admitted(1, temperature=3.0, top_k=1, logprobs=0),
        admitted(2, temperature=0),
        admitted(3, temperature=0, logit_bias={int(logits[3].argmin()): 1.0}, allowed_token_ids=[30], logprobs=20),
    )
    result = PendingStep(draw(sampler, logits, 0, 1, 2, 3)).wait()
    columns, raw = result.logprobs, logits.log_softmax(-1)
    assert columns is not None and columns.top_ids.shape == columns.top_logprobs.shape == (4, 20)
    json.dumps([columns.logprobs.tolist(), columns.top_logprobs.tolist()], allow_nan=False)
    for i in (0, 1, 3):
        token = int(result.token_ids[i])
        assert columns.logprobs[i] == raw[i, token]
        assert columns.ranks[i] == 1 + int((raw[i] > raw[i, token]).sum())
        assert columns.top_logprobs[i].tolist() == raw[i].topk(20).values.tolist()
        assert raw[i, torch.from_numpy(columns.top_ids[i]).long()].tolist() == columns.top_logprobs[i].tolist()
    assert columns.ranks.tolist()[:3] == [1, 1, 0] and columns.top_ids[0, 0] == result.token_ids[0]
    assert result.token_ids[3] == 30 and columns.ranks[3] > 1
    assert columns.logprobs[2] == LOGPROB_FLOOR  # did not ask


def test_s19_impossible_tokens_get_the_floor() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    got = sampling.token_logprobs(logits.expand(2, -1), torch.tensor([3, 2]), 9)
    assert got.logprobs[0] == LOGPROB_FLOOR and got.ranks.tolist() == [3, 1]
    assert got.top_ids.tolist() == [[2, 0, 1, 3]] * 2 and got.top_logprobs[0, 2:].tolist() == [LOGPROB_FLOOR] * 2


def test_s19_the_greedy_token_heads_the_alternatives_when_log_softmax_rounds() -> None:
    """Two logits differ by less than log-probabilities near -3.7 can: those tie, yet the greater logit is first."""
    logits = torch.full((1, VOCAB), 0.0)
    logits[0, 30] = 2.0**-30
    sampler = sampler_with(admitted(0, temperature=0, logprobs=2))
    got = draw(sampler, logits, 0)
    assert got.logprobs is not None
    assert got.token_ids.tolist() == [30] and got.logprobs.top_ids.tolist() == [[30, 0]]
    assert got.logprobs.ranks.tolist() == [1] and got.logprobs.top_logprobs[0, 0] == got.logprobs.top_logprobs[0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs_in_bounded_slices(dtype: torch.dtype) -> None:
    """The same numbers as at once, without ever holding more than the bound in one temporary."""
    logits, ids = random_logits(64, VOCAB).to(dtype), torch.arange(64) % VOCAB
    whole = sampling.token_logprobs(logits, ids, 3)
    with Watch() as watch:
        sliced = sampling.token_logprobs(logits, ids, 3, max_elements=5 * VOCAB)
    assert watch.largest <= 5 * VOCAB
    for column in fields(whole):
        assert torch.equal(getattr(whole, column.name), getattr(sliced, column.name))
    assert torch.equal(whole.logprobs, logits.float().log_softmax(-1)[torch.arange(64), ids])


# ---- cost and manners ----


def test_plain_steps_do_nothing_extra() -> None:
    """Rows that need more are admitted, but not in the step. Greedy: no noise. Plain temperature: no sort."""
    sampler = sampler_with(
        admitted(0, temperature=0), admitted(1, seed=1), *(admitted(2 + i, **p) for i, p in enumerate(KINDS))
    )
    logits = random_logits(1, VOCAB)
    with Watch() as greedy:
        draw(sampler, logits, 0)
    assert sum(greedy.names.values()) <= 45 and not greedy.names.keys() & {"log", "sort", "_log_softmax", "bitwise_xor"}
    with Watch() as plain:
        draw(sampler, logits, 1)
    assert "bitwise_xor" in plain.names
    assert not plain.names.keys() & {"sort", "argsort", "_log_softmax", "_softmax", "index_put_", "masked_fill"}


def test_no_step_waits_for_the_device() -> None:
    """Nothing in a step reads a number back: neither its size nor its way depends on what lies on the device."""
    sampler = sampler_with(*(admitted(i, **p) for i, p in enumerate(KINDS)))
    logits = random_logits(len(KINDS), VOCAB)
    with Watch() as watch:
        for _ in range(4):
            draw(sampler, logits, *range(len(KINDS)))
        sampler.admit([admitted(0, output=[3, 4], **KINDS[5])])
    assert {"sort", "_log_softmax", "index_put_"} <= watch.names.keys()
    assert not watch.names.keys() & {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_dtype_are_left_alone(dtype: torch.dtype) -> None:
    logits = random_logits(len(KINDS), VOCAB).to(dtype)
    before, rows = logits.clone(), [admitted(i, **p) for i, p in enumerate(KINDS)]
    low, full = sampler_with(*rows), sampler_with(*rows)
    for _ in range(3):
        a, b = draw(low, logits, *range(len(KINDS))), draw(full, logits.float(), *range(len(KINDS)))
        assert all(same_bits(a, i, b, i) for i in range(len(KINDS)))
    assert torch.equal(logits, before)


def test_an_empty_step() -> None:
    got = PendingStep(draw(sampler_with(admitted(0)), torch.zeros(0, VOCAB))).wait()
    assert got.token_ids.shape == got.finite.shape == (0,) and got.logprobs is None


def test_pending_step_brings_columns_of_the_plan() -> None:
    """The dtypes that `StepResult` states; each `wait` gives arrays of one's own."""
    sampler = sampler_with(admitted(0, logprobs=2), admitted(1))
    logits = random_logits(2, VOCAB)
    prompt = sampler.prompt_logprobs(random_logits(5, VOCAB), torch.arange(5), 3)
    pending = PendingStep(draw(sampler, logits, 0, 1), {1: prompt})
    assert pending.ready()
    first, second = pending.wait(), pending.wait()
    assert first.token_ids.dtype == np.int32 and first.finite.dtype == np.bool_
    assert first.logprobs is not None and first.prompt_logprobs is not None and first.prompt_logprobs.keys() == {1}
    columns = first.prompt_logprobs[1]
    assert columns.logprobs.dtype == columns.top_logprobs.dtype == np.float32
    assert columns.ranks.dtype == columns.top_ids.dtype == np.int32
    assert columns.top_ids.shape == (5, 3) and columns.logprobs.tolist() == prompt.logprobs.tolist()
    assert second.logprobs is not None
    for mine, other in ((first, second), (first.logprobs, second.logprobs)):
        for column in fields(mine):
            array = getattr(mine, column.name)
            assert not isinstance(array, np.ndarray) or not np.shares_memory(array, getattr(other, column.name))


# ---- CUDA ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gives_the_tokens_of_the_cpu_without_waiting() -> None:
    """Every kind of request, 50 steps; a synchronisation inside a step raises."""
    vocab, rows = 5003, [admitted(i, **p) for i, p in enumerate(KINDS * 8)]
    cpu, cuda = sampler_with(*rows, vocab_size=vocab), sampler_with(*rows, vocab_size=vocab, device="cuda")
    order, pending, expected = range(len(rows)), [], []
    for step in range(50):
        logits = random_logits(len(rows), vocab + 13, seed=step)
        expected.append(PendingStep(draw(cpu, logits, *order)).wait())
        on_device = logits.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending.append(PendingStep(draw(cuda, on_device, *order)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(expected, (p.wait() for p in pending), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and b.finite.all()
        assert a.logprobs is not None and b.logprobs is not None
        assert a.logprobs.top_ids.tolist() == b.logprobs.top_ids.tolist()
        np.testing.assert_allclose(a.logprobs.logprobs, b.logprobs.logprobs, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_has_the_same_numbers() -> None:
    seeds = torch.tensor([0, 1, 2**32, 2**63 - 1, -1, -(2**63), 0x123456789ABCDEF])
    positions = torch.tensor([0, 1, 2, 1000, 2**31, 2**32 - 1, 7])
    assert torch.equal(philox(seeds.cuda(), positions.cuda(), 1000).cpu(), philox(seeds, positions, 1000))


def test_a_graph_draws_only_rows_that_need_nothing_else() -> None:
    more = [
        dict(logprobs=0), dict(top_k=3), dict(top_p=0.5), dict(min_p=0.1), dict(presence_penalty=1.0),
        dict(logit_bias={5: 1.0}), dict(allowed_token_ids=[5]), dict(min_tokens=1),
    ]  # fmt: skip
    sampler = sampler_with(admitted(0), admitted(1, temperature=0), *(admitted(2 + i, **p) for i, p in enumerate(more)))
    assert sampler.takes_one_pass(np.array([1, 0], np.int32))
    assert not any(sampler.takes_one_pass(np.array([0, 2 + i], np.int32)) for i in range(len(more)))
