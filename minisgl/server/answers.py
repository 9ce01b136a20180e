"""What clients get: OpenAI's answers, whole and in chunks, made of an engine's deltas.

Chapter 1 tells this module's story. The structs are the format; `ChatFormat` and `CompletionFormat` fill them. A chunk
that only brings text, which nearly all do, is pasted together from parts that were encoded once; its slow twin encodes
the struct, and a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from minisgl.request import FinishReason, Logprob, Usage
from minisgl.server.client import Delta

_encode = msgspec.json.Encoder().encode
_MARK = "\x01text\x01"  # stands in a chunk where text will be


class CachedTokens(msgspec.Struct):
    """How much of a prompt the prefix cache held."""

    cached_tokens: int


class UsageBody(msgspec.Struct):
    """Token counts; the prompt counts once, whatever ``n``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens. ``bytes`` is null where the token is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """A token of the answer, and what else was likely there."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """An entry a token."""

    content: list[TokenLogprob]


class Message(msgspec.Struct):
    """The assistant's answer."""

    role: str
    content: str


class ChatChoice(msgspec.Struct):
    """One of the ``n`` answers."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(msgspec.Struct, kw_only=True):
    """``chat.completion``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What an answer has gained."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """News of one of the ``n`` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """``chat.completion.chunk``. ``usage`` is there if it was asked for, and null before the last chunk."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct):
    """Columns, an entry a token. The first token of an echoed prompt has none: null."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct):
    """One of the texts: the ``n`` of the first prompt, then those of the second; or news of one of them."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """``text_completion``, whole and in chunks."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer begin with."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class Text:
    """One text while it grows; its length so far gives the offsets of completions' logprobs."""

    index: int
    text: str = ""
    num_chars: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is given back: its text, and with log-probabilities its tokens, the first of which has none."""

    text: str
    tokens: Sequence[tuple[int, str]] = ()
    logprobs: Sequence[dict[int, Logprob] | None] | None = None


class AnswerFormat(Protocol):
    """How one route says it. Chunks are the JSON of an event, without the framing."""

    def start(self, index: int) -> bytes | None:
        """What a stream says of a text before there is any, or None."""
        ...

    def echo(self, index: int, echo: Echo) -> bytes | None:
        """What a stream says of a prompt that is to be echoed, or None."""
        ...

    def chunk(self, index: int, delta: Delta, *, offset: int = 0) -> bytes | None:
        """A delta; None if it brings nothing to tell. ``offset``: characters of the text before it."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk of a stream with usage."""
        ...

    def whole(self, texts: Sequence[Text], usage: Usage, echoes: Sequence[Echo | None]) -> bytes:
        """The answer at once; ``echoes`` has an entry a text."""
        ...


class _FastText:
    """The parts around the text of a text-only chunk, encoded once a choice."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[bytes, bytes]] = {}

    def get(self, index: int) -> tuple[bytes, bytes] | None:
        return self._parts.get(index)

    def learn(self, index: int, chunk: msgspec.Struct) -> tuple[bytes, bytes]:
        # The marker's only unescaped-looking form is this one: control characters are always escaped in JSON.
        before, _, after = _encode(chunk).rpartition(_encode(_MARK))
        self._parts[index] = before, after
        return before, after


class ChatFormat:
    """``/v1/chat/completions``."""

    def __init__(self, head: Head, *, include_usage: bool = False, num_top: int = 0) -> None:
        self._head = head
        self._no_usage = None if include_usage else msgspec.UNSET
        self._num_top = num_top
        self._fast = _FastText()

    def start(self, index: int) -> bytes | None:
        """The role."""
        return self._chunk(ChatChunkChoice(index, ChatDelta("assistant", "")))

    def echo(self, index: int, echo: Echo) -> bytes | None:
        """Nothing: conversations are not echoed."""
        return None

    def chunk(self, index: int, delta: Delta, *, offset: int = 0) -> bytes | None:
        """See `AnswerFormat`."""
        if delta.logprobs is None and delta.finish_reason is None:
            if not delta.text:
                return None
            before, after = self._fast.get(index) or self._fast.learn(
                index, self._struct(ChatChunkChoice(index, ChatDelta(content=_MARK)))
            )
            return before + _encode(delta.text) + after
        return self.slow_chunk(index, delta)

    def slow_chunk(self, index: int, delta: Delta) -> bytes:
        """`chunk` by way of the structs."""
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.token_ids, delta.logprobs, self._num_top)
        return self._chunk(ChatChunkChoice(index, ChatDelta(content=delta.text or None), logprobs, delta.finish_reason))

    def usage_chunk(self, usage: Usage) -> bytes:
        """See `AnswerFormat`."""
        head = self._head
        return _encode(
            ChatChunk(id=head.id, created=head.created, model=head.model, choices=[], usage=usage_body(usage))
        )

    def whole(self, texts: Sequence[Text], usage: Usage, echoes: Sequence[Echo | None]) -> bytes:
        """See `AnswerFormat`; conversations are not echoed."""
        choices = [
            ChatChoice(
                text.index,
                Message("assistant", text.text),
                chat_logprobs(text.token_ids, text.logprobs, self._num_top) if text.logprobs else None,
                text.finish_reason or "abort",
            )
            for text in texts
        ]
        head = self._head
        return _encode(
            ChatAnswer(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage_body(usage))
        )

    def _struct(self, choice: ChatChunkChoice) -> ChatChunk:
        head = self._head
        return ChatChunk(id=head.id, created=head.created, model=head.model, choices=[choice], usage=self._no_usage)

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return _encode(self._struct(choice))


class CompletionFormat:
    """``/v1/completions``."""

    def __init__(self, head: Head, *, include_usage: bool = False) -> None:
        self._head = head
        self._no_usage = None if include_usage else msgspec.UNSET
        self._fast = _FastText()

    def start(self, index: int) -> bytes | None:
        """Nothing."""
        return None

    def echo(self, index: int, echo: Echo) -> bytes | None:
        """The prompt, as a stream's first chunk."""
        return self._chunk(CompletionChoice(index, echo.text, _echo_logprobs(echo)))

    def chunk(self, index: int, delta: Delta, *, offset: int = 0) -> bytes | None:
        """See `AnswerFormat`."""
        if delta.logprobs is None and delta.finish_reason is None:
            if not delta.text:
                return None
            before, after = self._fast.get(index) or self._fast.learn(
                index, self._struct(CompletionChoice(index, _MARK))
            )
            return before + _encode(delta.text) + after
        return self.slow_chunk(index, delta, offset=offset)

    def slow_chunk(self, index: int, delta: Delta, *, offset: int = 0) -> bytes:
        """`chunk` by way of the structs."""
        logprobs = None if delta.logprobs is None else completion_logprobs(delta.token_ids, delta.logprobs, offset)
        return self._chunk(CompletionChoice(index, delta.text, logprobs, delta.finish_reason))

    def usage_chunk(self, usage: Usage) -> bytes:
        """See `AnswerFormat`."""
        return self._answer([], usage)

    def whole(self, texts: Sequence[Text], usage: Usage, echoes: Sequence[Echo | None]) -> bytes:
        """See `AnswerFormat`."""
        return self._answer([_completion_choice(*pair) for pair in zip(texts, echoes, strict=True)], usage)

    def _answer(self, choices: list[CompletionChoice], usage: Usage) -> bytes:
        head = self._head
        return _encode(
            CompletionAnswer(
                id=head.id, created=head.created, model=head.model, choices=choices, usage=usage_body(usage)
            )
        )

    def _struct(self, choice: CompletionChoice) -> CompletionAnswer:
        head = self._head
        return CompletionAnswer(
            id=head.id, created=head.created, model=head.model, choices=[choice], usage=self._no_usage
        )

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return _encode(self._struct(choice))


def usage_body(usage: Usage) -> UsageBody:
    """`Usage` as clients know it."""
    total = usage.prompt_tokens + usage.completion_tokens
    return UsageBody(usage.prompt_tokens, usage.completion_tokens, total, CachedTokens(usage.cached_tokens))


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[dict[int, Logprob]], num_top: int) -> ChatLogprobs:
    """An entry for each token, with the ``num_top`` most likely ones there, which may include it."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        own = entry[token_id]
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
        top = [TopLogprob(_name(key, each), each.logprob, _bytes(each)) for key, each in ranked]
        content.append(TokenLogprob(_name(token_id, own), own.logprob, _bytes(own), top))
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[dict[int, Logprob]], offset: int
) -> CompletionLogprobs:
    """Columns of the tokens; the token itself is always among the most likely ones. ``offset``: where the first token
    begins in the text, each further one where the written form of the one before ends."""
    columns = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        offset = _add_column(columns, _name(token_id, entry[token_id]), token_id, entry, offset)
    return columns


def _add_column(
    columns: CompletionLogprobs, name: str, token_id: int, entry: dict[int, Logprob] | None, offset: int
) -> int:
    columns.tokens.append(name)
    columns.text_offset.append(offset)
    if entry is None:
        columns.token_logprobs.append(None)
        columns.top_logprobs.append(None)
    else:
        columns.token_logprobs.append(entry[token_id].logprob)
        top: dict[str, float] = {}
        for key, each in sorted(entry.items(), key=lambda item: item[1].rank):
            top.setdefault(_name(key, each), each.logprob)  # of two tokens with one name, the likelier
        columns.top_logprobs.append(top)
    return offset + len(name)


def _echo_logprobs(echo: Echo) -> CompletionLogprobs | None:
    if echo.logprobs is None:
        return None
    columns, offset = CompletionLogprobs([], [], [], []), 0
    for (token_id, name), entry in zip(echo.tokens, echo.logprobs, strict=True):
        offset = _add_column(columns, name, token_id, entry, offset)
    return columns


def _completion_choice(text: Text, echo: Echo | None) -> CompletionChoice:
    whole, logprobs = text.text, None
    if text.logprobs:
        logprobs = completion_logprobs(text.token_ids, text.logprobs, len(echo.text) if echo else 0)
    if echo is not None:
        whole = echo.text + whole
        before = _echo_logprobs(echo)
        if before is not None and logprobs is not None:
            logprobs = CompletionLogprobs(
                before.tokens + logprobs.tokens,
                before.token_logprobs + logprobs.token_logprobs,
                before.top_logprobs + logprobs.top_logprobs,
                before.text_offset + logprobs.text_offset,
            )
    return CompletionChoice(text.index, whole, logprobs, text.finish_reason or "abort")


def _name(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _bytes(logprob: Logprob) -> list[int] | None:
    text = logprob.decoded_token
    return None if text is None or "�" in text else list(text.encode())
