"""The engine against transformers: the same greedy tokens and the same log-probabilities, whatever the options.

C03, C04, C06, C07, C20, S03, P06: chunks, pages, cache, loop, order and pool size decide when and where something is
computed, never what. CI runs a pairwise array of the options on every checkpoint, the marker ``full`` their product on
one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from checkpoints import NAMES, NUM_NEW, VOCAB_SIZE, Checkpoint

from minisgl import LLM, Logprob, SamplingParams
from minisgl.utils import ceil_div

MAX_MODEL_LEN = 64
FACTORS: dict[str, tuple[Any, ...]] = {
    "chunk_size": (1, 5, 16, None),
    "page_size": (1, 4, 16, 64),
    "prefix_cache": (True, False),
    "overlap": (True, False),
    "order": ("mixed", "prefill_first", "decode_first"),
    "pool": ("just enough", "medium", "large"),  # for one request of the longest length, for two and a bit, for all
}
Case = Mapping[str, Any]


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two of its choices."""
    return set(itertools.combinations(case.items(), 2))


def product(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every combination."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[Case]:
    """Cases in which every two values of different factors meet: again and again the one with most new pairs."""
    everything = product(factors)
    random.Random(seed).shuffle(everything)
    missing = set().union(*map(pairs_of, everything))
    cases = []
    while missing:
        cases.append(max(everything, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(cases[-1])
    return cases


CASES = pairwise(FACTORS, seed=0)


def name_of(case: Case) -> str:
    words = ["cache" if case["prefix_cache"] else "no cache", "overlap" if case["overlap"] else "plain", case["order"]]
    return f"chunk {case['chunk_size']}, page {case['page_size']}, {', '.join(words)}, {case['pool']}"


def test_the_array_is_small_and_covers_every_pair() -> None:
    met = set().union(*map(pairs_of, CASES))
    for (a, values_a), (b, values_b) in itertools.combinations(FACTORS.items(), 2):
        for x, y in itertools.product(values_a, values_b):
            assert ((a, x), (b, y)) in met
    assert 16 <= len(CASES) <= 22


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("name", NAMES)
def test_parity(checkpoint_of: Callable[[str], Checkpoint], name: str, case: Case) -> None:
    check_parity(checkpoint_of(name), case)


@pytest.mark.full
@pytest.mark.parametrize("case", product(FACTORS), ids=name_of)
def test_parity_in_full(checkpoint_of: Callable[[str], Checkpoint], case: Case) -> None:
    check_parity(checkpoint_of("qwen3"), case)


def check_parity(checkpoint: Checkpoint, case: Case) -> None:
    """Two waves: all prompts at once, then those that begin alike, over what the first has left in the cache."""
    options = dict(case)
    tokens = {"just enough": MAX_MODEL_LEN, "medium": 2 * MAX_MODEL_LEN + 20, "large": 12 * MAX_MODEL_LEN}
    num_pages = 1 + ceil_div(tokens[options.pop("pool")], case["page_size"])
    with LLM(str(checkpoint.folder), device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN, max_running=6,
             num_pages=num_pages, strict=True, **options) as llm:  # fmt: skip
        for layer in llm.engine.runner.kv.layers:
            layer.fill_(float("nan"))  # whoever reads what was not written will know
        llm.engine.scheduler._mean_output = 0.0  # an optimist: it admits more than fits, and has to preempt
        everything = list(range(len(checkpoint.prompts)))
        for chosen in (everything, everything[: len(everything) // 2][::-1]):
            params = [
                SamplingParams(
                    temperature=0,
                    max_tokens=NUM_NEW - i % 3,
                    ignore_eos=True,
                    logprobs=20,
                    prompt_logprobs=3 if i % 4 == 1 else None,
                )
                for i in chosen
            ]
            outputs = llm.generate([checkpoint.prompts[i] for i in chosen], params, use_tqdm=False)
            for i, output in zip(chosen, outputs, strict=True):
                table, prompt = checkpoint.logprobs[i], checkpoint.prompts[i]
                assert output.token_ids == checkpoint.answers[i][: NUM_NEW - i % 3]
                check_logprobs(output.logprobs, output.token_ids, table[len(prompt) - 1 :], 20)
                if output.prompt_logprobs is not None:
                    assert output.prompt_logprobs[0] is None
                    check_logprobs(output.prompt_logprobs[1:], prompt[1:], table, 3)
                assert output.usage.cached_tokens < len(prompt)
                assert case["prefix_cache"] or output.usage.cached_tokens == 0
        assert llm.engine.kv.num_available_pages == num_pages - 1


def check_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None, token_ids: Sequence[int], table: np.ndarray, num_top: int
) -> None:
    """One entry a token, with it and the most likely ones, each as transformers has it."""
    assert entries is not None and len(entries) == len(token_ids)
    for entry, token_id, row in zip(entries, token_ids, table, strict=False):
        assert entry is not None and token_id in entry and len(entry) in (num_top, num_top + 1)
        ids = list(entry)
        np.testing.assert_allclose([entry[i].logprob for i in ids], row[ids], atol=1e-4, rtol=0)
        least = np.sort(row)[VOCAB_SIZE - num_top]
        assert all(row[i] > least - 2e-4 for i in ids if i != token_id), "not among the most likely"
        for i in ids:  # its rank, give or take neighbours that are as good as equal
            assert (row > row[i] + 2e-4).sum() < entry[i].rank <= (row > row[i] - 2e-4).sum()
