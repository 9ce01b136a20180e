"""A real model with real weights, outside CI: greedy tokens equal to transformers over the pairwise array, and on a GPU
equal to the torch path's whatever computes them.

Run as ``MINISGL_REAL_MODEL=FOLDER pytest -m real_model``; any supported checkpoint with a chat template will do.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_gpu import BACKENDS, compare
from test_parity import CASES, name_of
from tolerances import BFLOAT16_GAP, FLOAT32_GAP

from minisgl import LLM, RequestOutput, SamplingParams
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


# -- on a GPU --

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2)


def answers_on_gpu(folder: Path, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    num_pages = 1 + 4096 // options["page_size"]
    with LLM(str(folder), device="cuda", max_model_len=MAX_MODEL_LEN, max_running=16, num_pages=num_pages, strict=True,
             **options) as llm:  # fmt: skip
        return llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def torch_path(folder: Path, prompts: list[list[int]]) -> list[RequestOutput]:
    """In float32, with nothing that is to be tested."""
    return answers_on_gpu(
        folder, prompts, dtype="float32", attention="torch", kernels="torch", overlap=False, page_size=16
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("page_size", "overlap", "max_graph"),
    [(1, True, None), (16, True, 0), (16, False, None), (64, True, None), (64, False, 0)],
)
@pytest.mark.parametrize(
    ("dtype", "attention"), [("float32", "torch"), ("float32", "triton"), *(("bfloat16", name) for name in BACKENDS)]
)
def test_greedy_equals_the_torch_path(
    folder, prompts, torch_path, dtype, attention, page_size, overlap, max_graph
) -> None:
    try:
        outputs = answers_on_gpu(
            folder, prompts, dtype=dtype, attention=attention, page_size=page_size, overlap=overlap,
            cuda_graph_max_bs=max_graph,
        )  # fmt: skip
    except ValueError as error:
        assert attention not in ("torch", "triton", "auto")
        pytest.skip(f"this backend does not serve the model with pages of {page_size}: {error}")
    gap, share = (FLOAT32_GAP, 0.8) if dtype == "float32" else (BFLOAT16_GAP, 0.1)
    assert compare(torch_path, outputs, gap) > share * NUM_NEW * len(prompts)
