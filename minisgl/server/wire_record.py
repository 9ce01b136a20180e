"""`read_wire`: what the processes of a server said to each other, from the folder of its option ``record_wire``.

Chapter 1 prints these messages and draws them. A file holds the frames of one sender to one receiver, byte for byte,
each with the clock when it left; all processes of a machine read the same clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from minisgl.server.wire import (
    ENTRY,
    Abort,
    Add,
    End,
    Error,
    FromEngine,
    FromFront,
    Message,
    News,
    Step,
    Submit,
    ToEngine,
    ToFront,
)

_KINDS: dict[str, Any] = {
    "front-worker": FromFront,
    "worker-engine": ToEngine,
    "engine-worker": FromEngine,
    "worker-front": ToFront,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was sent.

    Args:
        time_s: ``time.monotonic`` when it left.
        sender, receiver: "front", "worker" or "engine".
        number: its sequence number.
        data: its bytes, the number among them.
        message: what they mean.
    """

    time_s: float
    sender: str
    receiver: str
    number: int
    data: bytes
    message: Message


def read_wire(folder: str | Path) -> list[Frame]:
    """All frames in ``folder``, as they were sent one after the other. An entry that was not written to its end, which
    a process leaves that was killed, is left out. Raises ``ValueError`` for a file that is damaged otherwise."""
    frames = [frame for path in sorted(Path(folder).glob("*.frames")) for frame in _read(path)]
    return sorted(frames, key=lambda frame: frame.time_s)


def about(frames: Sequence[Frame], request_id: str) -> list[Frame]:
    """The frames that carry something of a request, in all of its completions."""
    return [frame for frame in frames if any(id.split("/")[0] == request_id for id in _ids(frame.message))]


def _read(path: Path) -> Iterator[Frame]:
    sender, receiver = path.stem.split("-")
    decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_KINDS[path.stem])
    data, at = path.read_bytes(), 0
    while at + ENTRY.size <= len(data):
        time_s, num_bytes = ENTRY.unpack_from(data, at)
        at += ENTRY.size
        frame = data[at : at + num_bytes]
        at += num_bytes
        if len(frame) < num_bytes:
            return
        try:
            yield Frame(time_s, sender, receiver, int.from_bytes(frame[:8], "little"), frame, decoder.decode(frame[8:]))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}: no frame ends at byte {at}: {error}") from error


def _ids(message: Message) -> Sequence[str]:
    """The requests, of front or engine, that a message is about."""
    if isinstance(message, Submit):
        return [message.request.request_id]
    if isinstance(message, Add):
        return [child_id for child_id, _ in message.children]
    if isinstance(message, (Abort, End)):
        return [message.request_id]
    if isinstance(message, Error):
        return [message.id]
    if isinstance(message, Step):
        return [*message.request_ids, *(finished.request_id for finished in message.finished)]
    if isinstance(message, News):
        return [update.request_id for update in message.updates]
    return []
