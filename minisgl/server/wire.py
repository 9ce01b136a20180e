"""The wire: what the server's processes say to each other, and the sockets that carry it.

Chapter 1 tells this module's story, with messages printed from a real wire. There are four links, each with one sender
and one receiver: front to worker, worker to engine, and back. A link is a pair of ZeroMQ PUSH and PULL sockets without
a high-water mark, so nothing is dropped (PUB and SUB would drop). Nothing is bounded by the socket either: a sender
looks at `Sender.is_ahead`, and then waits or merges.

A frame is a sequence number of 8 bytes and a message in msgpack. Frame 0 is the handshake; a number that is not the
next one, or bytes that are no message, are fatal.

If the folder of the sockets has a folder `RECORD` in it, each sender also writes its frames down there, as they leave;
`minisgl.server.wire_record` reads them.
"""

from __future__ import annotations

import os
import struct
import time
from io import FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import zmq

from minisgl.request import FinishedRequest, FinishReason, LogprobColumns, SamplingParams, StepOutput
from minisgl.server.client import EngineStats, GenerateRequest, ModelInfo, Update
from minisgl.utils import Int32Array

VERSION = 1
WINDOW = 64  # messages that a sender may be ahead of what its receiver has confirmed
RECORD = "record"  # folder beside the sockets, or a link to one
_NUMBER = struct.Struct("<Q")
ENTRY = struct.Struct("<dI")  # before each recorded frame: the clock in seconds, and how many bytes follow
T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message: an array that begins with its type's name."""


# ------------------------------------------------------------------------------------------------------ both ways


class Hello(Message, frozen=True):
    """Frame 0 of every link: who speaks, and which version of this page."""

    version: int
    sender: str


class Seen(Message, frozen=True):
    """The receiver of the link the other way has read up to this number."""

    number: int


class Call(Message, frozen=True):
    """A question that is answered once, by `Reply` or `Error`: "stats", "detail" or "flush", all for the engine."""

    call_id: str
    name: str


class Reply(Message, frozen=True):
    """The answer to a `Call`, `Tokenize` or `Detokenize`."""

    call_id: str
    value: EngineStats | list[int] | str | int


class Error(Message, frozen=True):
    """A request or call is refused, by its sender's mistake; it gets no other answer. ``id`` is the request's or
    call's."""

    id: str
    message: str


class Heartbeat(Message, frozen=True):
    """The engine's loop turns: its counters now, and the clock when they were read."""

    stats: EngineStats
    time_s: float


# ------------------------------------------------------------------------------------------------ front to worker


class Submit(Message, frozen=True):
    """A request."""

    request: GenerateRequest


class Abort(Message, frozen=True):
    """A request that nobody waits for any more, or that somebody wants ended."""

    request_id: str


class Tokenize(Message, frozen=True):
    """What would this prompt be encoded to?"""

    call_id: str
    request: GenerateRequest


class Detokenize(Message, frozen=True):
    """What is the text of these ids?"""

    call_id: str
    token_ids: list[int]


# ------------------------------------------------------------------------------------------------ worker to engine


class Add(Message, frozen=True):
    """A prompt for the engine: the requests that it consists of, one for each of its ``n`` completions."""

    children: list[tuple[str, SamplingParams]]
    prompt: bytes  # [n] int32

    @property
    def prompt_token_ids(self) -> Int32Array:
        """``[n]`` int32."""
        return np.frombuffer(self.prompt, np.int32)


class End(Message, frozen=True):
    """End a request of the engine: its client left ("abort"), or its text holds a stop string ("stop")."""

    request_id: str
    reason: FinishReason
    stop_reason: str | None = None


# ------------------------------------------------------------------------------------------------ engine to worker


class Started(Message, frozen=True):
    """The engine can work. ``golden`` is a prompt and what the engine decoded it to, greedily, when it was alone."""

    info: ModelInfo
    golden: tuple[list[int], list[int]]


class Columns(Message, frozen=True):
    """`LogprobColumns` as bytes: M tokens, K alternatives each."""

    logprobs: bytes  # [M] float32
    ranks: bytes  # [M] int32
    top_ids: bytes  # [M, K] int32
    top_logprobs: bytes  # [M, K] float32

    @classmethod
    def of(cls, columns: LogprobColumns) -> Columns:
        """Pack."""
        return cls(
            columns.logprobs.tobytes(), columns.ranks.tobytes(), columns.top_ids.tobytes(),
            columns.top_logprobs.tobytes(),
        )  # fmt: skip

    def unpack(self) -> LogprobColumns:
        """And back."""
        num_tokens = len(self.ranks) // 4
        shape = (num_tokens, len(self.top_ids) // (4 * num_tokens) if num_tokens else 0)
        return LogprobColumns(
            np.frombuffer(self.logprobs, np.float32),
            np.frombuffer(self.ranks, np.int32),
            np.frombuffer(self.top_ids, np.int32).reshape(shape),
            np.frombuffer(self.top_logprobs, np.float32).reshape(shape),
        )


class Step(Message, frozen=True):
    """What one step brought to all its requests: `StepOutput`, in columns. Requests that ended between two steps ride
    along; without tokens it is only about them."""

    step_id: int
    time_s: float
    request_ids: tuple[str, ...]
    tokens: bytes  # [len(request_ids)] int32
    finished: tuple[FinishedRequest, ...]
    logprobs: Columns | None = None
    prompt_logprobs: tuple[tuple[str, int, Columns], ...] = ()

    @classmethod
    def of(cls, output: StepOutput, ended: tuple[FinishedRequest, ...] = ()) -> Step:
        """Pack, with requests that ended outside the step."""
        return cls(
            output.step_id,
            output.time_s,
            output.request_ids,
            output.token_ids.tobytes(),
            (*ended, *output.finished),
            None if output.logprobs is None else Columns.of(output.logprobs),
            tuple((request_id, start, Columns.of(columns)) for request_id, start, columns in output.prompt_logprobs),
        )

    def unpack(self) -> StepOutput:
        """And back."""
        return StepOutput(
            self.step_id,
            self.time_s,
            self.request_ids,
            np.frombuffer(self.tokens, np.int32),
            self.finished,
            None if self.logprobs is None else self.logprobs.unpack(),
            tuple((request_id, start, columns.unpack()) for request_id, start, columns in self.prompt_logprobs),
        )


# ------------------------------------------------------------------------------------------------ worker to front


class News(Message, frozen=True):
    """What is new of many requests: one message for one step or, if somebody is behind, for several."""

    updates: tuple[Update, ...]


FromFront = Hello | Seen | Call | Submit | Abort | Tokenize | Detokenize
ToEngine = Hello | Seen | Call | Add | End
FromEngine = Hello | Seen | Started | Step | Reply | Error | Heartbeat
ToFront = Hello | Seen | Started | News | Reply | Error | Heartbeat


# ------------------------------------------------------------------------------------------------------- sockets


class BrokenWire(RuntimeError):
    """Something was lost, doubled or damaged between two processes: what they believe of each other is worth nothing
    now."""


def address(folder: Path, sender: str, receiver: str) -> str:
    """Where the link of these two is: a socket in the server's private folder."""
    return f"ipc://{folder}/{sender}-{receiver}"


class Sender:
    """The sending end of a link. Never blocks.

    Attributes:
        number: of the last frame sent.
        num_seen: of the last frame that the receiver confirmed; whoever reads the `Seen` messages sets it.
    """

    def __init__(self, context: zmq.Context[Any], folder: Path, sender: str, receiver: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address(folder, sender, receiver))
        self._encoder = msgspec.msgpack.Encoder()
        self._record = _open_record(folder, sender, receiver)
        self.number = -1
        self.num_seen = -1
        self.send(Hello(VERSION, sender))

    @property
    def is_ahead(self) -> bool:
        """Whether the receiver is so far behind that the sender should wait, or merge what it has to say."""
        return self.number - self.num_seen >= WINDOW

    def send(self, message: Message) -> None:
        """Send. Raises ``ValueError``, ``TypeError`` or ``RecursionError`` for a message that cannot be encoded,
        and nothing is sent then."""
        body = self._encoder.encode(message)
        self.number += 1
        frame = _NUMBER.pack(self.number) + body
        if self._record is not None:
            self._record.write(ENTRY.pack(time.monotonic(), len(frame)) + frame)
        self._socket.send(frame, zmq.NOBLOCK, copy=len(body) < 65536)

    def close(self) -> None:
        """Close at once; what was not delivered is dropped."""
        self._socket.close()
        if self._record is not None:
            self._record.close()


def _open_record(folder: Path, sender: str, receiver: str) -> FileIO | None:
    """Where a sender's frames go too, if they are asked for. They hold prompts, so that the file is for its owner
    alone; and they are written at once, for processes are killed."""
    if not (folder / RECORD).is_dir():
        return None
    path = folder / RECORD / f"{sender}-{receiver}.frames"
    return FileIO(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600))


class Receiver(Generic[T]):
    """The receiving end of a link: it binds, so it is made first or last, as it comes.

    Args:
        kind: the union of the messages that may come.

    Attributes:
        socket: to be polled.
        number: of the last frame read.
    """

    def __init__(self, context: zmq.Context[Any], folder: Path, sender: str, receiver: str, kind: Any) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address(folder, sender, receiver))
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._name = f"{sender} to {receiver}"
        self.number = -1
        self._num_confirmed = -1

    def drain(self, most: int = 4 * WINDOW) -> list[T]:
        """The messages that are there, in order, at most so many. Raises `BrokenWire`."""
        messages: list[T] = []
        while len(messages) < most:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._open(frame)
            if message is not None:
                messages.append(message)
        return messages

    def _open(self, frame: bytes) -> T | None:
        """The message of a frame; None for the handshake."""
        try:
            (number,) = _NUMBER.unpack_from(frame)
            message: Any = self._decoder.decode(memoryview(frame)[_NUMBER.size :])
        except (struct.error, msgspec.MsgspecError, ValueError) as error:
            raise BrokenWire(f"{self._name}: frame {self.number + 1} is damaged: {error}") from error
        if number != self.number + 1:
            raise BrokenWire(f"{self._name}: frame {number} came where {self.number + 1} was due")
        if (number == 0) != isinstance(message, Hello) or (number == 0 and message.version != VERSION):
            raise BrokenWire(f"{self._name}: frame {number} is {message!r}; a link begins with its version, {VERSION}")
        self.number = number
        return None if number == 0 else message

    def confirm(self) -> Seen | None:
        """What to tell the sender, if it is time: a few times a window."""
        if self.number - self._num_confirmed < WINDOW // 4:
            return None
        self._num_confirmed = self.number
        return Seen(self.number)

    def close(self) -> None:
        """Close at once."""
        self.socket.close()
