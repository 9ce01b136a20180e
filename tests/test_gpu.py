"""The engine on a CUDA device gives the tokens that it gives on a CPU."""

import os
from pathlib import Path

import pytest
import torch
from tolerances import BFLOAT16_GAP, FLOAT32_GAP

from minisgl import LLM, SamplingParams
from minisgl.benchmark.report import write_report

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QUESTIONS = ["Tell me a story about a fox.", "What is 7 + 5?", "Who are you?", "What is a lighthouse?", "Count to ten."]
LONG = "Once upon a time there was a little fox named Ruby who lived near the old bridge. " * 6
TEXTS = ["Once upon a time", "The", LONG + "One day", LONG + "One night", LONG]
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def prompts():
    with LLM("tiny", device="cpu") as llm:
        chats = [llm.tokenizer.encode_chat([{"role": "user", "content": q}]).tolist() for q in QUESTIONS]
        return [*chats, *(llm.tokenizer.encode(t).tolist() for t in TEXTS)]


@pytest.fixture(scope="module")
def reference(prompts):
    """The CPU's outputs, float32."""
    with LLM("tiny", device="cpu", dtype="float32", overlap=False) as llm:
        return llm.generate(prompts, GREEDY, use_tqdm=False)


def num_decided(output, gap: float) -> int:
    """How many tokens come before the first position where the two most likely are closer than ``gap``."""
    for position, entry in enumerate(output.logprobs):
        best, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
        if best - second < gap:
            return position
    return len(output.token_ids)


def compare(reference, outputs, gap: float) -> int:
    compared = 0
    for want, got in zip(reference, outputs, strict=True):
        n = num_decided(want, gap)
        assert got.token_ids[:n] == want.token_ids[:n]
        compared += n
    return compared


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size,chunk", [(64, None), (16, 16), (1, 5)])
def test_float32_greedy_equals_cpu(prompts, reference, overlap, page_size, chunk):
    with LLM("tiny", device="cuda", dtype="float32", overlap=overlap, page_size=page_size, chunk_size=chunk,
             strict=True, num_pages=4096 // page_size + 1) as llm:  # fmt: skip
        for _ in range(2):  # the second time with a warm prefix cache
            compared = compare(reference, llm.generate(prompts, GREEDY, use_tqdm=False), FLOAT32_GAP)
            assert compared > 0.8 * NUM_TOKENS * len(prompts)


@pytest.mark.parametrize("overlap", [False, True])
def test_bfloat16_greedy_equals_cpu_up_to_near_ties(prompts, reference, overlap):
    with LLM("tiny", device="cuda", overlap=overlap) as llm:
        assert llm.engine.runner.kv.layers[0].dtype == torch.bfloat16
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert compare(reference, outputs, BFLOAT16_GAP) > 0.1 * NUM_TOKENS * len(prompts)


def test_seeded_tokens_equal_cpu(prompts):
    """P05: random numbers are the same on every device."""
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=24, ignore_eos=True) for i in range(5)]
    tokens = []
    for device in ("cpu", "cuda"):
        with LLM("tiny", device=device, dtype="float32") as llm:
            tokens.append([o.token_ids for o in llm.generate(prompts[:5], params, use_tqdm=False)])
    assert tokens[0] == tokens[1]


def test_memory_returns_on_close(prompts):
    """E14"""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with LLM("tiny", device="cuda", num_pages=64) as llm:
            llm.generate(prompts[:2], GREEDY, use_tqdm=False)
            assert torch.cuda.memory_allocated() > before
        del llm
        assert torch.cuda.memory_allocated() == before


def test_report(prompts, reference):
    """Write what was compared, if there is a place for it."""
    with LLM("tiny", device="cuda", dtype="float32") as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    compared = compare(reference, outputs, FLOAT32_GAP)
    same = sum(a.token_ids == b.token_ids for a, b in zip(reference, outputs, strict=True))
    if "OUT" in os.environ:
        results = {
            "prompts": len(prompts),
            "tokens_compared": compared,
            "tokens_generated": NUM_TOKENS * len(prompts),
            "outputs_identical": same,
        }
        what = "greedy tokens of the bundled model, float32, CUDA against CPU, plain torch path"
        write_report(Path(os.environ["OUT"]) / "gpu-greedy.json", what, torch.device("cuda"), results)
    assert same > 0
