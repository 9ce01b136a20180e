"""A load for a server: requests that are sent when they are due, whoever is still waiting, and when their news came.

One thread over non-blocking sockets, which counts the events of a stream and reads none but the last: a client that
parsed them all would be slower than the server, and would measure itself.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

_TAIL_BYTES = 1024  # of an answer that are kept: the last event and the one before it are in them
_NUM_LAST_EVENTS = 2  # usage, and [DONE]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for ``/v1/completions``.

    Args:
        due_s: when to send it, in seconds from the start.
        body: what to ask; streaming and usage are added.
    """

    due_s: float
    body: dict[str, Any]


@dataclass(slots=True)
class Sample:
    """What became of an `Ask`. Times are in seconds from the start.

    Args:
        due_s: when it should have been sent.
        sent_s: when the connection was made and it was.
        times_s: when news came, without the last two events, which bring no text,
        num_events: and how many events each time.
        end_s: when the connection was closed.
        prompt_tokens, cached_tokens, output_tokens: by the server's word.
        error: what went wrong: a status, or a few words; None: nothing.
    """

    due_s: float
    sent_s: float | None = None
    times_s: list[float] = field(default_factory=list)
    num_events: list[int] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        """From when it was due to its first text, so that a client that is late for its own plan shows too."""
        return self.times_s[0] - self.due_s

    @property
    def whole_s(self) -> float:
        """From when it was due to its last text."""
        return self.times_s[-1] - self.due_s

    @property
    def token_s(self) -> float | None:
        """Mean time from one token to the next; None if there is only one."""
        n = self.output_tokens - 1
        return (self.times_s[-1] - self.times_s[0]) / n if n > 0 else None

    @property
    def gaps_s(self) -> list[float]:
        """The pauses that a reader sees: between news and news."""
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


def run_load(
    url: str,
    asks: Sequence[Ask],
    *,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    watch: Callable[[int, int], None] = lambda num_started, num_ended: None,
) -> list[Sample]:
    """Send all, wait for all, and return their samples in the order of ``asks``.

    Args:
        url: of the server.
        asks: in whatever order.
        api_key: its key.
        timeout_s: a request that takes longer is an error.
        watch: called when an answer begins and when one ends, with how many have.

    Raises:
        ValueError: the URL is not one that can be asked.
    """
    return _Load(_parse(url), api_key, timeout_s, watch).run(asks)


def _parse(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"the URL must be like http://HOST:PORT, got {url!r}")
    return parts


class _Stream:
    """One request on a connection of its own."""

    __slots__ = ("head", "sample", "socket", "tail", "unsent")

    def __init__(self, sample: Sample, connection: socket.socket, request: bytes) -> None:
        self.sample = sample
        self.socket = connection
        self.unsent = memoryview(request)
        self.head: bytes | None = b""  # None once it has been read
        self.tail = b""


class _Load:
    def __init__(self, url: SplitResult, api_key: str | None, timeout_s: float, watch: Callable[[int, int], None]):
        self._address = (url.hostname, url.port or 80)
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {url.path.rstrip('/')}/v1/completions HTTP/1.1\r\nhost: {url.netloc}\r\n{key}"
            "content-type: application/json\r\nconnection: close\r\n"
        )
        self._timeout_s = timeout_s
        self._watch = watch
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, _Stream] = {}
        self._num_started = self._num_ended = 0
        self._start_s = 0.0

    def run(self, asks: Sequence[Ask]) -> list[Sample]:
        family, _, _, _, self._address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]  # type: ignore
        samples = [Sample(ask.due_s) for ask in asks]
        # What can be done before the clock runs is.
        requests = [self._request(ask) for ask in asks]
        queue = deque(sorted(range(len(asks)), key=lambda i: asks[i].due_s))
        self._start_s = time.perf_counter()
        look_s = 1.0
        while queue or self._streams:
            now = self._now()
            while queue and asks[queue[0]].due_s <= now:
                i = queue.popleft()
                self._open(family, samples[i], requests[i])
            if now > look_s:
                look_s = now + 1.0
                self._drop_late(now)
            wait_s = max(0.0, asks[queue[0]].due_s - self._now()) if queue else 1.0
            for key, _ in self._selector.select(min(wait_s, 1.0)):
                self._go_on(key.data)
        self._selector.close()
        return samples

    def _now(self) -> float:
        return time.perf_counter() - self._start_s

    def _request(self, ask: Ask) -> bytes:
        body = msgspec.json.encode({**ask.body, "stream": True, "stream_options": {"include_usage": True}})
        return f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body

    def _open(self, family: int, sample: Sample, request: bytes) -> None:
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect_ex(self._address)
        stream = _Stream(sample, connection, request)
        self._streams[connection.fileno()] = stream
        self._selector.register(connection, selectors.EVENT_WRITE, stream)

    def _go_on(self, stream: _Stream) -> None:
        try:
            if stream.unsent:
                self._write(stream)
            else:
                self._read(stream)
        except BlockingIOError:
            pass
        except OSError as error:
            self._close(stream, error.strerror or type(error).__name__)

    def _write(self, stream: _Stream) -> None:
        if stream.sample.sent_s is None:
            stream.sample.sent_s = self._now()
        stream.unsent = stream.unsent[stream.socket.send(stream.unsent) :]
        if not stream.unsent:
            self._selector.modify(stream.socket, selectors.EVENT_READ, stream)

    def _read(self, stream: _Stream) -> None:
        data = stream.socket.recv(65536)
        now = self._now()
        if not data:
            self._end(stream)
            return
        if stream.head is not None:
            stream.head += data
            head, end, data = stream.head.partition(b"\r\n\r\n")
            if not end:
                return
            stream.head = None
            status = head.split(b" ", 2)[1].decode("latin-1")
            if status != "200":
                stream.sample.error = f"status {status}"
        # An event ends with an empty line, which may come in two parts.
        num_events = (stream.tail[-1:] + data).count(b"\n\n")
        stream.tail = (stream.tail + data)[-_TAIL_BYTES:]
        if num_events:
            sample = stream.sample
            sample.times_s.append(now)
            sample.num_events.append(num_events)
            if len(sample.times_s) == 1:
                self._num_started += 1
                self._watch(self._num_started, self._num_ended)

    def _end(self, stream: _Stream) -> None:
        sample, tail = stream.sample, stream.tail
        if sample.error is None and b"data: [DONE]" not in tail:
            sample.error = "an error in the stream" if b'data: {"error"' in tail else "the stream broke off"
        if sample.error is None:
            sample.prompt_tokens, sample.cached_tokens, sample.output_tokens = (
                int(found.group(1)) if (found := re.search(rb'"%s": ?(\d+)' % name, tail)) else 0
                for name in (b"prompt_tokens", b"cached_tokens", b"completion_tokens")
            )
            _drop_last_events(sample)
            if not sample.times_s:
                sample.error = "no token came"
        self._close(stream, None)

    def _close(self, stream: _Stream, error: str | None) -> None:
        stream.sample.error = stream.sample.error or error
        stream.sample.end_s = self._now()
        del self._streams[stream.socket.fileno()]
        self._selector.unregister(stream.socket)
        stream.socket.close()
        self._num_ended += 1
        self._watch(self._num_started, self._num_ended)

    def _drop_late(self, now: float) -> None:
        for stream in list(self._streams.values()):
            if now - stream.sample.due_s > self._timeout_s:
                self._close(stream, f"not done within {self._timeout_s:g} s")


def _drop_last_events(sample: Sample) -> None:
    left = _NUM_LAST_EVENTS
    while left and sample.num_events:
        taken = min(left, sample.num_events[-1])
        left -= taken
        sample.num_events[-1] -= taken
        if not sample.num_events[-1]:
            sample.num_events.pop()
            sample.times_s.pop()
