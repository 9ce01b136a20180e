"""Writes the model card from a checkpoint folder and the report of its training.

python book/tiny/card.py minisgl/tiny book/results/tiny-training.json
"""

from __future__ import annotations

import hashlib
import json
import sys
import textwrap
from pathlib import Path

from gates import GATES

CARD = """# tiny: the model that comes with minisgl

A language model of {parameters:,} parameters, trained by us, small enough to travel inside the package. It tells small
stories, does small sums, counts, gives the meaning of common words and answers questions about the engine that serves
it; on other questions it says that it does not know. It is there so that every example of the book runs on a real
model with no download. It is not fit for any other use: it knows next to nothing, and what it says may be wrong.

`LLM("tiny")` and `--model tiny` load it; the folder also loads with `transformers`.

| property | value |
|---|---|
| architecture | Qwen3, dense: 7 layers, hidden 256, 8 query and 4 KV heads of 64, intermediate 640, tied embeddings |
| context | 2,048 tokens |
| weights | bfloat16 |
| tokenizer | byte-level BPE, 4,096 tokens, each digit a token of its own; no token is put at the beginning |
| special tokens | 0 end of text, 1 turn start, 2 turn end (spelled as in ChatML); an answer ends with 2 or 0 |
| chat | ChatML, in `chat_template.jinja`; plain text works too |
| licence | Apache-2.0, with the notices of the sources in the repository's `LICENSE` |

## Files

| file | bytes | sha256 |
|---|---|---|
{manifest}

## Training

The recipe is `book/tiny/` in the repository. About 70 % of the tokens are made-up tales, chats, sums and questions
about the engine, written by a generator from seed {seed}; 20 % are glosses of WordNet as questions and answers; 10 %
are Jane Austen's novels. Rows of 512 tokens, for the last tenth of the way 2,048; AdamW, betas 0.9 and 0.95, rate up to
0.003 with warm-up and cosine, 131,072 tokens a step.

{tokens:,} tokens in {steps:,} steps, {tokens_per_s:,} tokens a second on one {device}; {seconds_in_all:.0f} seconds for
the whole command with compilation, data, export and gates ({date}; Python {python}, torch {torch}, transformers
{transformers}). The full record is `book/results/tiny-training.json`.

    python book/tiny/sources.py SOURCES
    python book/tiny/corpus.py SOURCES minisgl/tiny
    {command}

| million tokens | loss |
|---|---|
{curve}

## Gates

Asked of the exported bfloat16 weights, with greedy decoding unless a temperature is given, and with prompts that
training never saw: heroes with names and things that they never had there, other wordings for sums, other questions
about the model itself. The sums of numbers from 0 to 20 are all in training, in other words; the wordings of the last
gate and of the known sums are in training too.

{remarks}

| gate | at least | measured |
|---|---|---|
{gates}

## What it writes

{samples}

## Sources and licences

- Tales, chats, sums, questions about the engine: our own text, Apache-2.0.
- WordNet 3.0 (Debian `wordnet-base`): the WordNet licence, whose notice is in `LICENSE`. Glosses were chosen,
  shortened and put into sentences by us.
- Jane Austen's novels from the R package janeaustenr 1.0.0 (Debian `r-cran-janeaustenr`): the novels are in the public
  domain, the package is under the MIT licence, whose notice is in `LICENSE`.
"""


def card(model: Path, report: dict) -> str:
    """The text of the card."""
    files = sorted(path for path in model.iterdir() if path.name != "README.md")
    manifest = [
        f"| `{p.name}` | {p.stat().st_size:,} | `{hashlib.sha256(p.read_bytes()).hexdigest()}` |" for p in files
    ]
    points = report["curve"]
    chosen = sorted({round(i * (len(points) - 1) / 11) for i in range(12)})
    samples = []
    for prompt, text in report["samples"].items():
        quoted = "\n".join(f"> {line}".rstrip() for line in text.split("\n"))
        samples.append(f"**{prompt}**\n\n{quoted}")
    return CARD.format(
        **report | report["versions"]
        | {
            "manifest": "\n".join(manifest),
            "curve": "\n".join(f"| {points[i]['tokens'] / 1e6:.0f} | {points[i]['loss']:.3f} |" for i in chosen),
            "gates": "\n".join(
                f"| {gate} | {100 * least:.0f} % | {100 * report['gates'][gate]:.2f} % |"
                for gate, least in GATES.items()
            ),
            "remarks": "\n".join(
                textwrap.fill(f"- {remark}", 118, subsequent_indent="  ") for remark in report["remarks"]
            ),
            "samples": "\n\n".join(samples),
        }
    )  # fmt: skip


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "README.md").write_text(card(folder, json.loads(Path(sys.argv[2]).read_text())))
