"""What bytes each token id stands for: text is their UTF-8, whatever way they are cut into tokens.

Chapter 1 tells why: a token may hold half a character, so ids cannot be turned into text one at a time, but they can
be turned into bytes one at a time. `TokenBytes` reads a tokenizer's decoder once and owns the table; `Tokenizer.decode`
and `Detokenizer` both read from it, so that the stream and the whole cannot disagree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

# Decoders that treat each token by itself, or only the first one differently. BPEDecoder and CTC look at neighbours.
_STREAMABLE = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A token to put before another one, so that the decoder does not take that other one for the first of the text.
_ANCHOR = "x"


class TokenBytes:
    """The bytes of every token of a `tokenizers.Tokenizer`. Built once; what it has looked up, it remembers.

    Two families exist. *Byte-level* tokens (GPT-2, Llama-3, Qwen) spell bytes with an alphabet of 256 printable
    characters. The others (SentencePiece: Llama-2, Gemma) are text with `▁` for a space, plus tokens `<0x00>` to
    `<0xFF>` for the bytes of rare characters; some of these drop the space in front of the first token of a text.

    Raises:
        ValueError: the decoder needs a token's neighbours to decode it, so its text cannot be streamed.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        decoder = backend.decoder
        steps = [] if decoder is None else _flatten(json.loads(decoder.__getstate__()))
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        if (
            not kinds <= _STREAMABLE
            or (self._is_byte_level and not kinds <= {"ByteLevel", "Fuse"})
            or any(step["type"] == "Strip" and step["stop"] > 0 for step in steps)
        ):
            names = " + ".join(step["type"] for step in steps)
            raise ValueError(f"the tokenizer's decoder ({names}) cannot be streamed: it needs a token's neighbours")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._known: dict[int, bytes | None] = {}

    def get(self, token_id: int, *, first: bool = False) -> bytes | None:
        """The bytes of one token, ``first`` of its text or not; None for an id without a token (a padded row of the
        vocabulary). Special tokens give the bytes of their name."""
        if first:
            return self._look_up(token_id, first=True)
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id, first=False)
        return self._known[token_id]

    def join(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of a text from its first token on; ids without a token count for nothing."""
        pieces: list[bytes] = []
        for token_id in token_ids:
            if skip_special_tokens and token_id in self.special_ids:
                continue
            piece = self.get(token_id, first=not pieces)
            if piece is not None:
                pieces.append(piece)
        return b"".join(pieces)

    def _look_up(self, token_id: int, first: bool) -> bytes | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._is_byte_level:
            try:
                return bytes([_BYTE_OF_LETTER[letter] for letter in token])
            except KeyError:  # an added token with a character outside the alphabet reads as it is written
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if match and (byte := int(match[1], 16)) >= 0x80:
            return bytes([byte])  # part of a character; ASCII below goes on to the decoder, which may strip a space
        decoder = self._backend.decoder
        if decoder is None:
            return (token if first else " " + token).encode()
        text: str = decoder.decode([token]) if first else decoder.decode([_ANCHOR, token]).removeprefix(_ANCHOR)
        return text.encode()


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder in order, sequences unpacked."""
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 byte is its own letter, the others take the letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_level_alphabet()
