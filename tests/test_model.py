"""Models against transformers on random tiny checkpoints: logits, weights and their errors, rotary tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from builders import make_batch, make_pages
from transformers import PreTrainedModel, Qwen3Config

from minisgl.config import ModelConfig
from minisgl.engine.attention.torch_backend import TorchAttention
from minisgl.model import CausalLM, load_model

PAGE_SIZE = 4
TINY = dict(
    vocab_size=150,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    initializer_range=0.2,
)


def save_tiny(folder: Path, config_class: type = Qwen3Config, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random checkpoint in ``folder`` and the transformers model that it came from."""
    config = config_class(**{**TINY, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # not ones and zeros: those would hide a mix-up
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
    model.save_pretrained(folder)
    return model


def load(folder: Path, **options: object) -> CausalLM:
    return load_model(ModelConfig.from_folder(folder), folder, **options)


def run(model: CausalLM, texts: list[list[int]], cuts: list[list[int]]) -> list[torch.Tensor]:
    """Logits ``[len, vocab]`` of each text; text i is computed in pieces that end at ``cuts[i]``, one a step."""
    pages = make_pages(len(texts), seed=3)
    num_pages = 1 + sum(map(len, pages))
    attention = TorchAttention()
    kv_layers = [torch.full(model.kv_shape(num_pages, PAGE_SIZE), float("nan")) for _ in model.model.layers]
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(max(map(len, cuts))):
        now = [i for i, ends in enumerate(cuts) if step < len(ends)]
        starts = [cuts[i][step - 1] if step else 0 for i in now]
        pieces = [texts[i][start : cuts[i][step]] for i, start in zip(now, starts, strict=True)]
        batch = make_batch(
            pieces, computed=starts, pages=[pages[i] for i in now], page_size=PAGE_SIZE, attention=attention
        )
        with torch.inference_mode():
            hidden = model(batch, kv_layers, attention)
            parts = model.logits(hidden[batch.logits_indices]).split(list(map(len, pieces)))
        for i, part in zip(now, parts, strict=True):
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def random_texts(lengths: tuple[int, ...] = (13, 1, 22), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, TINY["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def expected(model: PreTrainedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0] for text in texts]


def cut(texts: list[list[int]], size: int) -> list[list[int]]:
    return [[*range(size, len(text), size), len(text)] for text in texts]


SHAPES = {
    "tied": dict(tie_word_embeddings=True),
    "untied": dict(tie_word_embeddings=False),
    "one_kv_head": dict(num_key_value_heads=1),
    "no_grouping": dict(num_key_value_heads=4),
    "three_to_one": dict(num_attention_heads=6, num_key_value_heads=2),
    "M13_head_dim_80": dict(head_dim=80),
    "M07_attention_bias": dict(attention_bias=True),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_qwen3_equals_transformers(tmp_path: Path, shape: str) -> None:
    """M07, M13: as one prefill, in chunks of 5, and token by token; all requests in one batch, on scattered pages."""
    reference = save_tiny(tmp_path, **SHAPES[shape])
    model, texts = load(tmp_path), random_texts()
    want = expected(reference, texts)
    for size in (100, 5, 1):
        for got, right in zip(run(model, texts, cut(texts, size)), want, strict=True):
            torch.testing.assert_close(got, right, atol=1e-4, rtol=0)
