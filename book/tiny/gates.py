"""What the exported model must do before it is kept, asked with prompts that training never saw.

`python gates.py MODEL` prints the table for a checkpoint folder.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from random import Random

import torch
from engine import IDENTITY_WORDS, TOPICS
from tales import HELD_OUT_IDENTITY, HELD_OUT_SUMS, KINDS, NAMES, THINGS, article, held_out, names_of
from transformers import AutoModelForCausalLM, AutoTokenizer

GATES = {  # what at least must be right, as a share
    "story ends": 0.99,
    "hero keeps the name": 0.95,
    "friend has another name": 0.95,
    "thing occurs": 0.90,
    "story ends, temperature 0.8": 0.99,
    "hero keeps the name, temperature 0.8": 0.90,
    "sums, new wording": 0.95,
    "sums, known wording": 0.95,
    "sums, plain text": 0.95,
    "who are you": 0.95,
    "what is a KV cache": 0.95,
}
SAMPLES = (
    "Tell me a story about a fox.",
    "What is 7 + 5?",
    "What is 2 + 3?",
    "Who are you?",
    "What is a KV cache?",
    "What is a lighthouse?",
    "Count from 3 to 9.",
    "Describe a fox named Ruby as JSON.",
    "What is the capital of France?",
)


class Writer:
    """A checkpoint folder that answers batches of prompts."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    @torch.no_grad()
    def write(
        self, prompts: list[str], tokens: int, temperature: float = 0.0, chat: bool = True
    ) -> list[tuple[str, bool]]:
        """For each prompt what the model writes, and whether it came to an end by itself."""
        ends = set(self.model.generation_config.eos_token_id)
        texts = []
        if chat:
            template = self.tokenizer.apply_chat_template
            prompts = [
                template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True) for p in prompts
            ]
        options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        for at in range(0, len(prompts), 512):
            batch = self.tokenizer(prompts[at : at + 512], return_tensors="pt", padding=True).to(self.model.device)
            batch.pop("token_type_ids", None)
            out = self.model.generate(**batch, max_new_tokens=tokens, **options)[:, batch["input_ids"].shape[1] :]
            texts += [
                (self.tokenizer.decode(row, skip_special_tokens=True), not ends.isdisjoint(row.tolist())) for row in out
            ]
        return texts


def keeps_name(text: str, name: str) -> bool:
    """Whether the tale is about this name: it opens it, comes back twice, and at most one other name is there."""
    found = [word for word in re.findall(r"[A-Z][a-z]+", text) if word in NAMES]
    return found[:1] == [name] and found.count(name) >= 3 and len(set(found)) <= 2


def two_names(text: str) -> bool:
    """Whether the tale has a hero and a friend whose name is another."""
    return len({word for word in re.findall(r"[A-Z][a-z]+", text) if word in NAMES}) == 2


def last_number(text: str) -> int | None:
    """The last number in a text."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


def share(hits: list[bool]) -> float:
    """How many of them are true, from 0 to 1."""
    return round(sum(hits) / len(hits), 4)


def measure(writer: Writer, stories: int = 400, sums: int = 441) -> tuple[dict[str, float], dict[str, str]]:
    """The shares of `GATES` and some sample texts."""
    rng = Random(7)
    named = [(k, n) for k in KINDS for n in names_of(k) if held_out(k, n)]
    equipped = [(k, t) for k in KINDS for t in THINGS if held_out(k, t)]
    named, equipped = (rng.sample(pairs, min(stories, len(pairs))) for pairs in (named, equipped))
    result = {}

    wishes = [f"Tell me a story about {article(k)} named {n}." for k, n in named]
    plain = writer.write(wishes, 320)
    free = [f"Tell me a story about {article(k)}." for k in KINDS]
    things = writer.write([f"Tell me a story about {article(k)} and {article(t)}." for k, t in equipped] + free, 320)
    result["story ends"] = share([end for _, end in plain + things])
    result["hero keeps the name"] = share([keeps_name(text, n) for (text, _), (_, n) in zip(plain, named, strict=True)])
    result["thing occurs"] = share(
        [t in text and k in text for (text, _), (k, t) in zip(things, equipped, strict=False)]
    )
    result["friend has another name"] = share([two_names(text) for text, _ in things])
    torch.manual_seed(0)
    warm = writer.write(wishes, 320, temperature=0.8)
    result["story ends, temperature 0.8"] = share([end for _, end in warm])
    result["hero keeps the name, temperature 0.8"] = share(
        [keeps_name(text, n) for (text, _), (_, n) in zip(warm, named, strict=True)]
    )

    pairs = rng.sample([(a, b) for a in range(21) for b in range(21)], sums)
    for label, wordings, chat in (
        ("sums, new wording", HELD_OUT_SUMS, True),
        ("sums, known wording", ("What is {a} + {b}?",), True),
        ("sums, plain text", ("What is {a} + {b}?\n",), False),
    ):
        asked = [(wording.format(a=a, b=b), a + b) for wording in wordings for a, b in pairs]
        answers = writer.write([question for question, _ in asked], 24, chat=chat)
        right = [last_number(text) == total and end for (text, end), (_, total) in zip(answers, asked, strict=True)]
        result[label] = share(right)

    who = [form for q in HELD_OUT_IDENTITY for form in (q, q.lower(), q.rstrip("?."))]
    result["who are you"] = share([any(word in text for word in IDENTITY_WORDS) for text, _ in writer.write(who, 64)])
    answers = writer.write([f"What is {name}?" for name, _, _ in TOPICS], 64)
    result["what is a KV cache"] = share(
        [text == what for (text, _), (_, what, _) in zip(answers, TOPICS, strict=True)]
    )

    samples = dict(zip(SAMPLES, (text for text, _ in writer.write(list(SAMPLES), 320)), strict=True))
    for prompt in ("Once upon a time", "What is 2 + 3?"):
        samples[prompt + " (plain text)"] = prompt + writer.write([prompt], 320, chat=False)[0][0]
    return result, samples


def missed(result: dict[str, float]) -> list[str]:
    """The gates that were not passed."""
    return [gate for gate, least in GATES.items() if result[gate] < least]


if __name__ == "__main__":
    gates, samples = measure(Writer(Path(sys.argv[1]), "cpu", torch.float32), stories=20, sums=40)
    print(json.dumps({"gates": gates, "missed": missed(gates), "samples": samples}, indent=2))
