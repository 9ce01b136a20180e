"""From text to token ids: the model's tokenizer, its chat template, and the tokens that end an answer.

Chapter 1 tells this module's story. `Tokenizer` is loaded once from the model's folder and shared by all requests;
nothing in it changes afterwards. Text comes back through `Detokenizer`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.server.chat import check_messages, check_tools
from minisgl.server.token_bytes import TokenBytes
from minisgl.utils import Int32Array, as_token_ids

logger = logging.getLogger(__name__)

# Imported by whoever first loads a tokenizer: it takes seconds, which a thread beside others may spend, and draws in
# torch where that is installed. This room works without. Before 5.21 it imported code of its models, too.
_LIBRARY = "transformers"


def load_tokenizer(folder: str | Path, *, chat_template: str | Path | None = None) -> Tokenizer:
    """The tokenizer of the model in ``folder``. Nothing is downloaded and no code from the folder is run.

    ``chat_template`` replaces the model's own: Jinja text, or a file that holds it.
    Raises ``ValueError`` in one line if folder or file cannot be read or used.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"cannot load a tokenizer from {folder}: not a folder")
    try:
        hf = import_module(_LIBRARY).AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        backend = hf.backend_tokenizer
    except Exception as error:  # the library raises all kinds for broken files; each means the same to a user
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"cannot load a tokenizer from {folder}: {reason}") from error
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    if special.issuperset(backend.get_vocab(with_added_tokens=False)):  # what is made of a folder without a tokenizer
        raise ValueError(f"cannot load a tokenizer from {folder}: there is none")
    if chat_template is not None:
        hf.chat_template = _read_template(chat_template)
    # Limits saved with a tokenizer would cut or pad prompts; lengths are checked elsewhere, with an error.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(hf, eos_token_ids=_find_eos_token_ids(folder, hf.eos_token_id))


class Tokenizer:
    """A Hugging Face tokenizer with the rules of serving around it. Made by `load_tokenizer`.

    BOS: where the tokenizer by itself starts a text with a BOS token, a prompt starts with exactly one, whether the
    text brings its own (as rendered chat templates do) or not; where it does not, none is added.

    Attributes:
        bos_token_id: the BOS token, None if there is none.
        eos_token_ids: every token that ends an answer; may be empty.
        special_token_ids: the tokens that text leaves out unless asked.
        token_bytes: what bytes each token stands for.
        vocab_size: one more than the largest id; the model's logits may have more (padded) rows.
    """

    def __init__(self, hf: Any, *, eos_token_ids: frozenset[int]) -> None:
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self.bos_token_id: int | None = hf.bos_token_id
        self.eos_token_ids = eos_token_ids
        self.token_bytes = TokenBytes(self._backend)
        self.special_token_ids = self.token_bytes.special_ids
        self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        self._adds_bos = self.bos_token_id is not None and self._backend.encode("a").ids[:1] == [self.bos_token_id]

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, eos_token_ids={sorted(self.eos_token_ids)})"

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` and `encode_chat` can work."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, most: int | None = None) -> Int32Array:
        """The ids ``[n] int32`` of a prompt, as the model expects one to begin and end. Raises ``ValueError`` for
        anything but a string of Unicode characters, and for a text that is far longer than ``most`` tokens, in a time
        that does not grow with the text; one that is a little longer is encoded."""
        ids = self._encode(text, add_special_tokens=True, most=most)
        if self._adds_bos and ids[1:2] == [self.bos_token_id]:
            ids = ids[1:]
        return np.array(ids, np.int32)

    def encode_chat(
        self, messages: object, *, tools: object = None, add_generation_prompt: bool = True, most: int | None = None
    ) -> Int32Array:
        """The ids ``[n] int32`` of `render_chat`. The template writes the special tokens; only a BOS that it leaves out
        is added. Raises ``ValueError`` as `render_chat` and, about ``most``, as `encode` does."""
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        ids = self._encode(text, add_special_tokens=False, most=most)
        bos = [self.bos_token_id] if self._adds_bos and ids[:1] != [self.bos_token_id] else []
        return np.array(bos + ids, np.int32)

    def render_chat(self, messages: object, *, tools: object = None, add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model was trained on, by its chat template (in Jinja's sandbox).

        ``messages`` are dicts with ``role`` and ``content``, ``tools`` dicts in OpenAI's format; `check_messages` says
        more. With ``add_generation_prompt`` the text ends where the assistant's answer begins.
        Raises ``ValueError`` if a message is malformed, there is no template, or the template raises.
        """
        conversation, tools = check_messages(messages), check_tools(tools)
        if not self.has_chat_template:
            raise ValueError(
                "this model has no chat template: send a plain prompt (/v1/completions, LLM.generate), "
                "or start with a template file (--chat-template FILE)"
            )
        try:
            if "developer" not in self._hf.get_chat_template(tools=tools):
                # OpenAI's newer name for the system's role. A template from before it would often drop the message.
                for message in conversation:
                    if message["role"] == "developer":
                        message["role"] = "system"
            text: str = self._hf.apply_chat_template(
                conversation, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:  # a template is a stranger's program: whatever it raises, it refused this input
            raise ValueError(f"the chat template raised: {error}") from error
        return text

    def decode(self, token_ids: Sequence[int] | Int32Array, skip_special_tokens: bool = True) -> str:
        """The text of a sequence of ids. Bytes that are not UTF-8 become U+FFFD, as in Unicode's recommended practice;
        ids without a token (padded rows) have no text. Raises ``ValueError`` for anything but a flat list of ids.

        Equal to Hugging Face's ``decode`` without its clean-up of spaces, but for one thing: where a run of byte tokens
        (``<0xE4>``) holds a broken character, theirs gives up the whole run, and this one keeps the good characters.
        """
        ids = as_token_ids(token_ids).tolist()
        return self.token_bytes.join(ids, skip_special_tokens=skip_special_tokens).decode("utf-8", errors="replace")

    def _encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"a prompt must be a string, got {type(text).__name__}")
        if most is not None:
            # Encoding takes about a second a million characters. So of a very long text ever longer beginnings are
            # tried first; what follows may change a beginning's last tokens, but never halves their number.
            num_chars = 16 * most
            while num_chars < len(text):
                if len(self._encode(text[:num_chars], add_special_tokens=False)) > 2 * most:
                    raise ValueError(f"the prompt is far too long: more than {most} tokens")
                num_chars *= 2
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # a str that has no UTF-8; JSON can carry one ("\ud83d")
            raise ValueError("a prompt must be Unicode text; this one holds half of a surrogate pair") from None
        return ids


def _read_template(template: str | Path) -> str:
    if isinstance(template, str) and ("{{" in template or "{%" in template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the chat template {template}: {error}") from error


def _find_eos_token_ids(folder: Path, of_tokenizer: int | None) -> frozenset[int]:
    """Every id that one of the model's files calls EOS: config.json, generation_config.json, the tokenizer. They do not
    repeat each other: Llama-3's generation_config.json lists an id that its config.json lacks."""
    found: set[int] = set() if of_tokenizer is None else {of_tokenizer}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
        # Models that also see or hear keep their language model's entries one level down.
        sections = [config, config.get("text_config")] if isinstance(config, dict) else []
        for section in sections:
            ids = section.get("eos_token_id") if isinstance(section, dict) else None
            found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int) and i >= 0)
    if not found:
        logger.warning("no EOS token in config.json, generation_config.json or tokenizer: answers end by length only")
    return frozenset(found)
