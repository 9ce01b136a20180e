"""A real model with real weights, outside CI: greedy tokens equal to transformers over the pairwise array.

Run as ``MINISGL_REAL_MODEL=FOLDER pytest -m real_model``; any supported checkpoint with a chat template will do.
"""

import os
from pathlib import Path

import pytest
import torch
import transformers
from test_parity import CASES, name_of
from tolerances import FLOAT32_GAP

from minisgl import LLM, SamplingParams
from minisgl.server import load_tokenizer

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif("MINISGL_REAL_MODEL" not in os.environ, reason="needs a checkpoint in $MINISGL_REAL_MODEL"),
]
NUM_NEW = 32
MAX_MODEL_LEN = 256
SYSTEM = "You are a careful assistant who answers in one short sentence."
QUESTIONS = (
    "What is the capital of France?", "Name three fruits.", "What is 12 + 30?", "Why is the sky blue?",
    "Who wrote Hamlet?", "Translate 'good morning' into Spanish.", "What do bees make?", "How many days has a week?",
)  # fmt: skip
TEXTS = (
    "Once upon a time", "The quick brown fox", "In 1969, the first man", "def fibonacci(n):", "Water boils at", "A",
    "The largest planet of the solar system is", "To make bread you need flour, water, salt and",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(os.environ["MINISGL_REAL_MODEL"])


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Eight chats with one system prompt, and eight texts."""
    tokenizer = load_tokenizer(folder)
    chats = [
        tokenizer.encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    return [ids.tolist() for ids in (*chats, *map(tokenizer.encode, TEXTS))]


@pytest.fixture(scope="module")
def reference(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens, up to the first near tie."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            answer: list[int] = []
            out = model(torch.tensor([prompt]), use_cache=True)
            for _ in range(NUM_NEW):
                best = out.logits[0, -1].topk(2)
                if float(best.values[0] - best.values[1]) < FLOAT32_GAP:
                    break
                answer.append(int(best.indices[0]))
                out = model(torch.tensor([answer[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            answers.append(answer)
    return answers


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_greedy_equals_transformers(folder, prompts, reference, case) -> None:
    options = dict(case)
    tokens = {"just enough": MAX_MODEL_LEN, "medium": 600, "large": 4096}[options.pop("pool")]
    num_pages = 1 + tokens // case["page_size"]
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN, max_running=8,
             num_pages=num_pages, strict=True, **options) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for want, output in zip(reference, outputs, strict=True):
        assert len(output.token_ids) == NUM_NEW
        assert output.token_ids[: len(want)] == want


def test_near_ties_are_rare(reference) -> None:
    assert sum(map(len, reference)) > 0.8 * NUM_NEW * len(reference)


def test_chat_answers(folder) -> None:
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN) as llm:
        conversation = [{"role": "user", "content": "What is the capital of France?"}]
        (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    assert "Paris" in output.text and output.finish_reason == "stop"
