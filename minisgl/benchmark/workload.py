"""What is asked of an engine in a measurement: how many tokens in and out; the tokens themselves are random.

Lengths are fixed by a seed, so that figures of different engines and days are of the same work. The tokens are drawn
anew for each run, so that no prefix is ever found in the cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from minisgl.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at once; EOS is ignored, so that each brings exactly as many tokens as it says.

    Args:
        input_lens: tokens of each prompt.
        output_lens: new tokens of each request.
        temperature: of all requests.
    """

    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    temperature: float = 0.6

    @property
    def num_requests(self) -> int:
        """How many requests."""
        return len(self.input_lens)

    @property
    def num_input(self) -> int:
        """Prompt tokens of all."""
        return sum(self.input_lens)

    @property
    def num_output(self) -> int:
        """New tokens of all."""
        return sum(self.output_lens)

    def draw(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """Prompts of random tokens, as token ids."""
        return [rng.choices(range(vocab_size), k=n) for n in self.input_lens]

    def params(self) -> list[SamplingParams]:
        """Sampling parameters, one for each request."""
        return [SamplingParams(temperature=self.temperature, max_tokens=n, ignore_eos=True) for n in self.output_lens]

    def summary(self) -> dict[str, float]:
        """The sizes, for reports."""
        return {
            "requests": self.num_requests,
            "input tokens": self.num_input,
            "output tokens": self.num_output,
            "temperature": self.temperature,
        }

    def shortened(self, num_output: int) -> Workload:
        """The same prompts with at most so many new tokens each: to warm up with."""
        return Workload(self.input_lens, tuple(min(n, num_output) for n in self.output_lens), self.temperature)


def mixed_lengths(
    num_requests: int = 256,
    *,
    input_len: tuple[int, int] = (100, 1024),
    output_len: tuple[int, int] = (100, 1024),
    temperature: float = 0.6,
    seed: int = 0,
) -> Workload:
    """Requests of mixed lengths, uniform between shortest and longest: the field's common offline workload.

    Its lengths are by convention those that are drawn together with tokens from 0 to 10,000, prompt by prompt: by
    default 142,827 tokens in and 133,966 out. Only the lengths are kept here; the draws between them are made all the
    same, because the generator's state depends on them.
    """
    rng = random.Random(seed)
    input_lens = []
    for _ in range(num_requests):
        n = rng.randint(*input_len)
        input_lens.append(n)
        for _ in range(n):
            rng.randint(0, 10_000)
    return Workload(tuple(input_lens), _draw_lengths(rng, num_requests, output_len), temperature)


def equal_lengths(num_requests: int, num_input: int, num_output: int, *, temperature: float = 0.6) -> Workload:
    """Requests of one length."""
    return Workload((num_input,) * num_requests, (num_output,) * num_requests, temperature)


def _draw_lengths(rng: random.Random, count: int, between: Iterable[int]) -> tuple[int, ...]:
    low, high = between
    return tuple(rng.randint(low, high) for _ in range(count))
