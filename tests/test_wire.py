"""Messages between processes: whole, in order, and none missing, or the wire is broken."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.request import FinishedRequest, Logprob, LogprobColumns, SamplingParams, StepOutput, Timings, Usage
from minisgl.server.client import Delta, EngineStats, GenerateRequest, ModelInfo, Update
from minisgl.server.wire import (
    VERSION,
    WINDOW,
    Abort,
    Add,
    BrokenWire,
    Call,
    Detokenize,
    End,
    Error,
    FromEngine,
    FromFront,
    Heartbeat,
    Hello,
    Message,
    News,
    Receiver,
    Reply,
    Seen,
    Sender,
    Started,
    Step,
    Submit,
    ToEngine,
    ToFront,
    Tokenize,
    address,
)

REQUEST = GenerateRequest(
    "a",
    SamplingParams(logit_bias={3: -1.5}, stop=["x", "y"], stop_token_ids=[7], allowed_token_ids=[1, 2], seed=2**63 - 1),
    messages=[{"role": "user", "content": [{"type": "text", "text": "hé"}]}],
    tools=[{"type": "function", "function": {"name": "f"}}],
)
FINISHED = FinishedRequest("a", "stop", 7, Usage(5, 3, 2), Timings(1.0, 2.0, 3.0))
UPDATE = Update(
    "a",
    (
        Delta(0, "hé", (1, 2), ({1: Logprob(-0.5, 1, "h"), 9: Logprob(-1.5, 2, None)}, {}), "stop", "x"),
        Delta(1, "", ()),
    ),
    Usage(5, 3, 2),
    prompt_token_ids=(4, 5),
    prompt_logprobs=(None, {5: Logprob(-0.25, 1, "b")}),
    timings=Timings(1.0, 2.0, 3.0),
)
STARTED = Started(ModelInfo("m", 9, 99, True), ([1], [2]))
MESSAGES: list[tuple[Any, list[Message]]] = [
    (FromFront, [Submit(REQUEST), Abort("a"), Tokenize("c", REQUEST), Detokenize("c", [1, 2]), Call("c", "flush")]),
    (ToEngine, [Add([("a/0", REQUEST.params)], b"\1\0\0\0"), End("a/0", "stop", "x"), Call("c", "stats"), Seen(3)]),
    (FromEngine, [STARTED, Error("a", "no"), Heartbeat(EngineStats(1, 2), 3.0)]),
    (ToFront, [News((UPDATE,)), *(Reply("c", value) for value in ([1, 2], "text", 7, EngineStats(1))), Seen(3)]),
]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


def link(context: zmq.Context[Any], folder: Path, kind: Any) -> tuple[Sender, Receiver[Any]]:
    receiver: Receiver[Any] = Receiver(context, folder, "a", "b", kind)
    return Sender(context, folder, "a", "b"), receiver


def receive(receiver: Receiver[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    deadline = time.monotonic() + 20
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} messages came"
        receiver.socket.poll(100)
        messages += receiver.drain()
    return messages


@pytest.mark.parametrize(("kind", "messages"), MESSAGES, ids=["FromFront", "ToEngine", "FromEngine", "ToFront"])
def test_messages_arrive_as_they_were(
    context: zmq.Context[Any], tmp_path: Path, kind: Any, messages: list[Message]
) -> None:
    sender, receiver = link(context, tmp_path, kind)
    for message in messages:
        sender.send(message)
    assert receive(receiver, len(messages)) == messages
    assert sender.number == receiver.number == len(messages)
    sender.close(), receiver.close()


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_step_is_the_same_in_columns(data: st.DataObject) -> None:
    def columns(num_tokens: int, num_top: int) -> LogprobColumns:
        floats = st.lists(st.floats(-100, 0, width=32), min_size=num_tokens * num_top, max_size=num_tokens * num_top)
        return LogprobColumns(
            np.arange(num_tokens, dtype=np.float32),
            np.arange(num_tokens, dtype=np.int32),
            np.arange(num_tokens * num_top, dtype=np.int32).reshape(num_tokens, num_top),
            np.array(data.draw(floats), np.float32).reshape(num_tokens, num_top),
        )

    n, k = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 4))
    step = StepOutput(
        3, 1.5, tuple(f"r{i}" for i in range(n)), np.arange(n, dtype=np.int32) * 1000, (FINISHED,),
        columns(n, k) if data.draw(st.booleans()) else None,
        (("r0", 4, columns(3, k)),) if data.draw(st.booleans()) else (),
    )  # fmt: skip
    end = FinishedRequest("z", "abort", None, Usage(1, 0, 0), Timings(0.0))
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(Step.of(step, (end,))), type=Step)
    back = wire.unpack()
    assert (back.step_id, back.time_s, back.request_ids, back.finished) == (3, 1.5, step.request_ids, (end, FINISHED))
    assert back.token_ids.dtype == np.int32 and back.token_ids.tolist() == step.token_ids.tolist()
    pairs = [(step.logprobs, back.logprobs)]
    assert [p[:2] for p in back.prompt_logprobs] == [p[:2] for p in step.prompt_logprobs]
    pairs += [(a[2], b[2]) for a, b in zip(step.prompt_logprobs, back.prompt_logprobs, strict=True)]
    for before, after in pairs:
        assert (before is None) == (after is None)
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs") if before is not None else ():
            a, b = getattr(before, name), getattr(after, name)
            assert a.dtype == b.dtype and (np.array_equal(a, b) or a.size == b.size == 0)


def test_nothing_is_lost_before_a_late_receiver(context: zmq.Context[Any], tmp_path: Path) -> None:
    """O03: a burst of 5,000 messages before the receiver is there; a publisher would have dropped them."""
    sender = Sender(context, tmp_path, "a", "b")
    for i in range(5000):
        sender.send(Call(str(i), "stats"))
    assert sender.is_ahead
    receiver: Receiver[Any] = Receiver(context, tmp_path, "a", "b", ToEngine)
    assert [message.call_id for message in receive(receiver, 5000)] == [str(i) for i in range(5000)]
    seen = receiver.confirm()
    assert seen == Seen(5000) and receiver.confirm() is None
    sender.num_seen = seen.number
    assert not sender.is_ahead
    sender.close(), receiver.close()


def test_a_sender_knows_that_it_is_ahead(context: zmq.Context[Any], tmp_path: Path) -> None:
    sender, receiver = link(context, tmp_path, ToEngine)
    num_sent = 0
    while not sender.is_ahead:
        sender.send(Call("c", "stats"))
        num_sent += 1
        assert num_sent <= WINDOW
    receive(receiver, num_sent)
    assert receiver.confirm() is not None
    sender.close(), receiver.close()


HELLO = Hello(VERSION, "a")


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([(0, HELLO), (2, Seen(1))], "frame 2 came where 1 was due"),
        ([(0, HELLO), (1, Seen(1)), (1, Seen(1))], "frame 1 came where 2 was due"),
        ([(1, Seen(1))], "frame 1 came where 0 was due"),
        ([(0, Seen(1))], "begins with its version"),
        ([(0, Hello(VERSION + 1, "a"))], "begins with its version"),
        ([(0, HELLO), (1, HELLO)], "begins with its version"),
        ([(0, HELLO), (1, News(()))], "damaged"),  # not on this link
        ([b"", b""], "damaged"),
        ([b"\0" * 8], "damaged"),
        ([b"\0" * 8 + b"\xc1"], "damaged"),
    ],
)
def test_what_is_missing_doubled_or_damaged_is_fatal(
    context: zmq.Context[Any], tmp_path: Path, frames: list[Any], complaint: str
) -> None:
    """O03, O04."""
    receiver: Receiver[Any] = Receiver(context, tmp_path, "a", "b", ToEngine)
    socket = context.socket(zmq.PUSH)
    socket.connect(address(tmp_path, "a", "b"))
    for frame in frames:
        if isinstance(frame, tuple):
            frame = struct.pack("<Q", frame[0]) + msgspec.msgpack.encode(frame[1])
        socket.send(frame)
    with pytest.raises(BrokenWire, match=f"a to b: .*{complaint}"):
        receive(receiver, 9)
    socket.close(), receiver.close()


def test_what_cannot_be_sent_leaves_no_gap(context: zmq.Context[Any], tmp_path: Path) -> None:
    sender, receiver = link(context, tmp_path, FromFront)
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for bad in ({"a": object()}, {"a": 2**70}, {"a": "\ud800"}, {"a": nested}):
        request = GenerateRequest("a", SamplingParams(), messages=[bad])
        with pytest.raises((ValueError, TypeError, RecursionError, OverflowError)):
            sender.send(Submit(request))
    sender.send(Abort("a"))
    assert receive(receiver, 1) == [Abort("a")]
    sender.close(), receiver.close()
