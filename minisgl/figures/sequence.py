"""Who said what to whom, and when: a sequence diagram of recorded messages. Chapter 1 shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.figures.drawing import Drawing
from minisgl.figures.marks import text
from minisgl.figures.style import color
from minisgl.server.client import Update
from minisgl.server.wire import Add, End, Message, News, Step, Submit
from minisgl.server.wire_record import Frame

LANES = {"client": 84.0, "front": 208.0, "worker": 332.0, "engine": 450.0}
WIDTH, ROW, TOP = 480, 30, 34  # a row has room for words of 14 characters over each arrow


@dataclass(frozen=True, slots=True)
class Said:
    """One message.

    Args:
        time_s: clock reading.
        sender, receiver: two of `LANES`.
        words: what it says, in a few characters.
        state: the palette's colour for it: "prefill" for prompts, "decode" for tokens, None for the rest.
    """

    time_s: float
    sender: str
    receiver: str
    words: str
    state: str | None = None


def say(frame: Frame) -> Said:
    """A frame of the wire in a few words. Of a message about several requests, only how many."""
    words, state = _words(frame.message)
    return Said(frame.time_s, frame.sender, frame.receiver, words, state)


def sequence(messages: Sequence[Said], *, max_rows: int = 16) -> Drawing:
    """One lane for each party, time downwards. A message that its receiver passes on at once shares the row with what
    comes of it. Of more than ``max_rows`` rows those in the middle are left out; the last four stay.

    Raises:
        ValueError: there are no messages.
    """
    if not messages:
        raise ValueError("there is nothing to draw: no messages")
    messages = sorted(messages, key=lambda said: said.time_s)
    rows: list[list[Said]] = []
    for said in messages:
        if rows and rows[-1][-1].receiver == said.sender and _step(rows[-1][-1]) == _step(said):
            rows[-1].append(said)
        else:
            rows.append([said])
    num_hidden = max(0, len(rows) - max_rows)
    shown = rows if not num_hidden else [*rows[: max_rows - 4], [], *rows[-4:]]

    height = TOP + ROW * len(shown) + 10
    parts = [text(0, 17, "ms", weight=600)]
    for name, x in LANES.items():
        parts.append(text(x, 17, name, anchor="middle", weight=600))
        parts.append(f'<path d="M{x:g} 24V{height}" stroke="currentColor" opacity=".45" stroke-dasharray="2 3"/>')
    for i, row in enumerate(shown):
        y = TOP + ROW * i + 22
        if not row:
            parts.append(text(0, y, f"⋮ {num_hidden} more rows"))
            continue
        parts.append(text(0, y + 4, f"{1e3 * (row[0].time_s - messages[0].time_s):.1f}"))
        parts += (_arrow(said, y) for said in row)
    milliseconds = 1e3 * (messages[-1].time_s - messages[0].time_s)
    alt = f"Sequence of {len(messages)} messages in {milliseconds:.1f} milliseconds. First "
    alt += "; ".join(_told(said) for said in messages[:5]) + "; at the end "
    alt += "; ".join(_told(said) for said in messages[-3:]) + "."
    return Drawing("".join(parts), WIDTH, height, alt)


def _words(message: Message) -> tuple[str, str | None]:
    name = type(message).__name__
    if isinstance(message, Submit):
        return name, "prefill"
    if isinstance(message, Add):
        return f"Add {len(message.prompt_token_ids)} ids", "prefill"
    if isinstance(message, End):
        return f"End: {message.reason}", None
    if isinstance(message, Step):
        token_ids = message.unpack().token_ids
        if len(token_ids) == 1:
            return f"Step: id {token_ids[0]}", "decode"
        if len(token_ids):
            return f"Step: {len(token_ids)} ids", "decode"
        reasons = {finished.reason for finished in message.finished}
        return f"Step: {' '.join(sorted(reasons)) or 'nothing'}", None
    if isinstance(message, News):
        return _news(message.updates)
    return name, None


def _news(updates: Sequence[Update]) -> tuple[str, str | None]:
    if len(updates) > 1:
        return f"News of {len(updates)}", "decode"
    deltas = updates[0].deltas
    if written := "".join(delta.text for delta in deltas):
        return f"News {written!r}"[:14], "decode"
    reasons = sorted({delta.finish_reason for delta in deltas if delta.finish_reason is not None})
    return f"News: {' '.join(reasons) or 'accepted' if updates[0].prompt_token_ids else ' '.join(reasons)}", None


def _step(said: Said) -> int:
    """1 from the client towards the engine, -1 on the way back."""
    return 1 if LANES[said.receiver] > LANES[said.sender] else -1


def _arrow(said: Said, y: float) -> str:
    begin, end, step = LANES[said.sender], LANES[said.receiver], _step(said)
    paint = "currentColor" if said.state is None else color(said.state)
    line = f'<path d="M{begin + 2 * step:g} {y:g}H{end - 8 * step:g}" stroke="{paint}" stroke-width="2"/>'
    tip = f'<path d="M{end - step:g} {y:g}l{-9 * step} -5v10z" fill="{paint}"/>'
    return line + tip + text((begin + end) / 2, y - 6, said.words, anchor="middle")


def _told(said: Said) -> str:
    return f"{said.sender} to {said.receiver}: {said.words}"
