"""Small checkpoints that transformers also understands, and what it says of them: the truth that the engine is held to.

Random ones for every architecture, and the bundled model. All share the bundled tokenizer, so that every one is a whole
model that `LLM` can open.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from minisgl.launch import TINY
from minisgl.server import load_tokenizer

VOCAB_SIZE = 4096
NUM_NEW = 9
# Two logits that are closer may change places with the order of a sum; then "the most likely token" says nothing.
LEAST_GAP = 1e-4
ARCHITECTURES: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "qwen3": (Qwen3Config, dict(head_dim=24, tie_word_embeddings=True)),
    "llama": (LlamaConfig, dict(attention_bias=True, tie_word_embeddings=False)),
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=True)),
    "mistral": (MistralConfig, dict(sliding_window=None, tie_word_embeddings=False)),
}
SHAPE = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)
NAMES = [*ARCHITECTURES, "tiny"]
STORY = (
    "Once upon a time there was a little fox named Ruby who lived near the old bridge. Every morning she went to the "
    "river to look for berries. What is 7 + 5? Nobody knew. Then the wind came and took her hat, and she ran after it."
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model, prompts for it, and transformers' greedy answers.

    Args:
        folder: what `LLM` opens.
        prompts: token ids; the first half begin alike, two are the same.
        answers: for each prompt the `NUM_NEW` tokens that follow, EOS like any other.
        logprobs: for each prompt ``[len(prompt) + NUM_NEW - 1, V]`` float32: row i scores the token at i + 1.
    """

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    logprobs: list[npt.NDArray[np.float32]]


def make_prompts(source: npt.NDArray[np.integer], start: int = 0) -> list[list[int]]:
    """Prompts of 1 to 50 tokens, cut from ``source`` behind ``start``. The first half begin alike, for 16 to 33 tokens;
    lengths lie at, below and above the borders of pages and chunks."""
    source = source[start:].tolist()
    shared = source[:33]
    alike = [shared + source[50:67], shared[:20], shared, shared + source[41:42], shared, shared[:16] + source[30:35]]
    others = [source[40:41], source[60:76], source[70:85], source[80:97]]
    return alike + others


def make_checkpoint(name: str, folder: Path) -> Checkpoint:
    """The checkpoint called ``name``, with prompts on which no greedy choice is close. Random models are drawn, and
    saved in ``folder``, until that is so; for the bundled one other prompts are cut."""
    for seed in range(50):
        if name == "tiny":
            folder, source = TINY, np.tile(load_tokenizer(TINY).encode(STORY), 3)
            prompts = make_prompts(source, seed)[::2]  # it is not quite as small
        else:
            draw_model(name, folder, seed)
            prompts = make_prompts(np.random.default_rng(seed).integers(0, VOCAB_SIZE, 100))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found = [greedy(model, prompt) for prompt in prompts]
        if all(gap > LEAST_GAP for _, _, gap in found):
            return Checkpoint(folder, prompts, [answer for answer, _, _ in found], [table for _, table, _ in found])
    raise AssertionError(f"{name}: every draw has a near tie")


def draw_model(name: str, folder: Path, seed: int) -> None:
    """Save a random model of two layers in ``folder``, with tokenizer and generation config."""
    config_class, special = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SHAPE, **special))
    for parameter_name, parameter in model.named_parameters():  # not all ones and zeros: those would hide a mix-up
        if parameter_name.endswith(("norm.weight", "bias")):
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TINY / file, folder / file)


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], npt.NDArray[np.float32], float]:
    """The `NUM_NEW` tokens that follow, the log-probabilities of all, and the smallest gap between the best two."""
    ids = list(prompt)
    for _ in range(NUM_NEW):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0].double()
    best, second = logits[len(prompt) - 1 :].topk(2).values.unbind(-1)
    return ids[len(prompt) :], logits.log_softmax(-1).float().numpy(), float((best - second).min())
