"""From documents to rows of token ids: the tokenizer and the packing.

`python corpus.py SOURCES MODEL` trains the byte-level BPE tokenizer on all three kinds of text and writes its files
into MODEL. `start_rows` makes training rows in as many processes as there are cores.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from random import Random

import numpy as np
from tales import END_OF_TEXT, TURN_END, TURN_START, document, documents, gloss_document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
CONTEXT = 2048
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)

# Shares of the tokens: made-up text, glosses, novels.
SHARES = (0.7, 0.2, 0.1)


class Sources:
    """The texts in the folder that `sources.py` wrote."""

    def __init__(self, folder: Path) -> None:
        self.glosses = json.loads((folder / "glosses.json").read_text())
        self.weights = np.cumsum([weight for *_, weight in self.glosses]).tolist()
        novels = (folder / "novels.txt").read_text().split("\n\n\n")
        self.novels = [novel.strip().split("\n\n") for novel in novels]
        self.lengths = np.cumsum([len(novel) for novel in self.novels]).tolist()

    def gloss(self, rng: Random) -> str:
        """A gloss as a question and its answer; common words come more often."""
        word, kind, gloss, _ = rng.choices(self.glosses, cum_weights=self.weights)[0]
        return gloss_document(rng, word, kind, gloss)

    def passage(self, rng: Random) -> str:
        """Some consecutive paragraphs of a novel, about 1,500 characters."""
        novel = rng.choices(self.novels, cum_weights=self.lengths)[0]
        at = rng.randrange(len(novel))
        passage = novel[at]
        while len(passage) < 1500 and (at := at + 1) < len(novel):
            passage += "\n\n" + novel[at]
        return passage + END_OF_TEXT


def train_tokenizer(sources: Sources) -> Tokenizer:
    """A byte-level BPE of 4,096 tokens whose digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = Random(0)
    tales = documents(0, 20_000)
    glosses = [gloss_document(rng, word, kind, gloss) for word, kind, gloss, weight in sources.glosses if weight > 1]
    novels = [paragraph for novel in sources.novels for paragraph in novel]
    clean = (text.replace(TURN_START, "").replace(TURN_END, "") for text in (*tales, *glosses, *novels))
    tokenizer.train_from_iterator(clean, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def pack(documents: list[list[int]], length: int) -> Iterator[list[int]]:
    """Rows of `length` tokens that begin with a document's beginning; what sticks out of a row is cut off."""
    row: list[int] = []
    for ids in documents:
        row += ids
        if len(row) >= length:
            yield row[:length]
            row = []


def block(arguments: tuple[int, int, int, Path, Path]) -> np.ndarray:
    """One process's share of the training rows: `[rows, length]` uint16, from a seed."""
    seed, num_rows, length, source_folder, model_folder = arguments
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    sources, rng = Sources(source_folder), Random(seed)
    rows = np.empty((num_rows, length), np.uint16)
    filled = 0
    while filled < num_rows:
        encoded: list[list[int]] = []
        for share, write, batch in zip(SHARES, (document, sources.gloss, sources.passage), (500, 200, 10), strict=True):
            wanted, size = share * 400_000, 0
            while size < wanted:
                new = [e.ids for e in tokenizer.encode_batch_fast([write(rng) for _ in range(batch)])]
                size += sum(map(len, new))
                encoded += new
        rng.shuffle(encoded)
        for row in pack(encoded, length):
            if filled == num_rows:
                break
            rows[filled] = row
            filled += 1
    return rows


def start_rows(pool: Pool, seed: int, num_rows: int, length: int, sources: Path, model: Path) -> AsyncResult:
    """Begins to make training rows `[num_rows, length]` uint16 from a seed; the same for any number of processes.

    What comes back gives the blocks of rows when asked with `get`. A row holds one token more than the model reads, for
    the last target.
    """
    parts = 64
    sizes = [num_rows // parts + (part < num_rows % parts) for part in range(parts)]
    work = [(seed * 1000 + part, size, length, sources, model) for part, size in enumerate(sizes) if size]
    return pool.map_async(block, work, chunksize=1)


if __name__ == "__main__":
    save_tokenizer(train_tokenizer(Sources(Path(sys.argv[1]))), Path(sys.argv[2]))
