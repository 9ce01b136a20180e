"""From token ids to text, as they come: half characters wait, and so does whatever may become a stop string.

Chapter 1 tells this module's story. A `Detokenizer` belongs to one completion and lives as long; whoever owns the
completion pushes its tokens, sends what comes back, and ends it in the engine when `stop_reason` is set.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from minisgl.server.stop_strings import StopStrings
from minisgl.server.tokenizer import Tokenizer


class Detokenizer:
    """The text of one completion, growing. Work is bounded by the new tokens: nothing is decoded twice.

    Invariants: what `push` and `finish` returned, joined, is `text`, and only ever grows; without a stop string it ends
    up equal to ``tokenizer.decode`` of all ids. A character is given out as soon as its last byte is there. When the
    tokens end inside a character, `finish` gives U+FFFD for its bytes; bytes that never were UTF-8 give it at once.

    A stop string ends the text at the first character with which any of them is complete (the longest, where several
    end there), wherever the borders of tokens and pushes fall. Of the completion's tokens, those up to and including
    the one that completed the stop string are kept and counted in `num_tokens`; what is pushed after it is dropped.

    Args:
        tokenizer: says what bytes a token stands for.
        stop: strings, none of them empty, that end the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: a stop string that is complete before this many tokens is text like any other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        assert not isinstance(stop, str), "stop is a sequence of strings here"
        self.num_tokens = 0
        self.stop_reason: str | None = None  # the stop string that ended the text
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids = self._token_bytes.special_ids if skip_special_tokens else frozenset()
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # keeps the bytes of a half character
        self._is_first = True
        self._state = 0  # of the stop strings
        self._pending = ""  # decoded, not given out
        self.num_chars = 0  # of `text`
        self._sent: list[str] = []
        self._is_finished = False

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._sent) > 1:
            self._sent = ["".join(self._sent)]
        return self._sent[0] if self._sent else ""

    def text_from(self, start: int) -> str:
        """``text[start:]``, at the cost of that part alone."""
        pieces, num_missing = [], self.num_chars - start
        for piece in reversed(self._sent):
            if num_missing <= 0:
                break
            pieces.append(piece[-num_missing:])
            num_missing -= len(piece)
        return "".join(reversed(pieces))

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens, any number of them, and return the text that may be sent now."""
        assert not self._is_finished, "push after finish"
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            if token_id in self._skipped_ids:
                continue
            piece = self._token_bytes.get(token_id, first=self._is_first)
            if piece is not None:
                self._is_first = False
                self._append(self._utf8.decode(piece))
        return self._release()

    def finish(self) -> str:
        """No more tokens: return what was held back. A second call returns nothing."""
        if self.stop_reason is None and not self._is_finished:
            self._append(self._utf8.decode(b"", final=True))
        self._is_finished = True
        self._state = 0
        return self._release()

    def _append(self, text: str) -> None:
        """Add decoded characters, up to the end of the first stop string."""
        if self._stops is not None:
            for i, char in enumerate(text):
                self._state = self._stops.step(self._state, char)
                match = self._stops.match[self._state]
                if match is None:
                    continue
                if self.num_tokens < self._min_tokens:
                    self._state = self._stops.pass_over(self._state)
                    continue
                self.stop_reason = match
                self._state = 0
                # The whole match is still here: of any text, what begins a stop string has not been given out.
                self._pending += text[: i + 1]
                if not self._include_stop:
                    self._pending = self._pending.removesuffix(match)
                return
        self._pending += text

    def _release(self) -> str:
        """Give out all but the end that may begin a stop string."""
        num_held = self._stops.depth[self._state] if self._stops is not None else 0
        num_ready = len(self._pending) - num_held
        text, self._pending = self._pending[:num_ready], self._pending[num_ready:]
        if text:
            self._sent.append(text)
            self.num_chars += len(text)
        return text
