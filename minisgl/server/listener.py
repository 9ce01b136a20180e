"""`serve_http`: the sockets that the app listens at, and clients that are too slow for them.

Chapter 1 tells this module's story. uvicorn speaks HTTP; added are bounds in time, for a connection that sends or reads
too slowly costs a descriptor and a buffer for as long as it likes, and an end in which running answers come to theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.server.client import EngineClient
from minisgl.server.config import ServerConfig
from minisgl.server.front import Front
from minisgl.server.http import create_app

ABORT_GRACE_S = 5.0  # for the last words of answers that were cut short at the end
MAX_HEAD_BYTES = 65536  # of a request's line and headers
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a server listens. ``admin_port`` is None if there is no admin's listener; that is on loopback."""

    host: str
    port: int
    admin_port: int | None


async def serve_http(
    client: EngineClient,
    config: ServerConfig,
    *,
    stop: asyncio.Event,
    started: Callable[[Addresses], None] = lambda _: None,
) -> None:
    """Serve until ``stop`` is set, then let running answers end, for ``config.drain_s`` at most, and return.

    ``started`` is called when requests can be sent; they are ready to be answered when ``/ready`` says so. Cancelling
    ends everything at once. ``client`` is not closed. Raises ``ValueError``, in one line, if a port cannot be had.
    """
    front = Front(client, config)
    with contextlib.ExitStack() as stack:
        listeners = [_Listener(create_app(client, config, front=front), stack.enter_context(_bind(config)), config)]
        if config.admin_port is not None:
            admin = create_app(client, config, admin=True, front=front)
            at_loopback = stack.enter_context(_bind(config, admin=True))
            listeners.append(_Listener(admin, at_loopback, config))
        ports = [listener.port for listener in listeners]
        tasks = [asyncio.create_task(listener.serve()) for listener in listeners]
        try:
            started(Addresses(config.host, ports[0], ports[1] if len(ports) > 1 else None))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await _drain(front, listeners, config.drain_s)
            await asyncio.gather(*tasks)
        finally:
            for listener in listeners:
                listener.force_exit = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(front: Front, listeners: list[_Listener], drain_s: float) -> None:
    """Accept nothing more and wait for what runs; what still does after ``drain_s`` is aborted, which ends it too."""
    front.draining = True
    for listener in listeners:
        listener.should_exit = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            while front.running:
                await asyncio.sleep(0.02)
    for answer_id in list(front.running):
        await front.abort(answer_id)


class _Listener(uvicorn.Server):
    """uvicorn for one socket; signals are left to whoever runs it."""

    def __init__(self, app: ASGIApp, bound: socket.socket, config: ServerConfig) -> None:
        self._bound = bound
        self.port: int = bound.getsockname()[1]
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(config),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=math.ceil(config.header_timeout_s),
                timeout_graceful_shutdown=math.ceil(config.drain_s + ABORT_GRACE_S),
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until ``should_exit``."""
        await super().serve([self._bound])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _bind(config: ServerConfig, *, admin: bool = False) -> socket.socket:
    host, port = ("127.0.0.1", config.admin_port or 0) if admin else (config.host, config.port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error


def _protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    """A connection with ``config``'s bounds. uvicorn takes a class, so that the options are this one's closure."""

    class Connection(HttpToolsProtocol):
        """One client's connection. At most one of the two clocks runs for each direction."""

        _receive_clock: TimerHandle | None = None
        _write_clock: TimerHandle | None = None
        _is_in_head = False
        _num_head_bytes = 0

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_within(config.header_timeout_s)
            if len(self.connections) > config.max_connections:
                transport.write(_TOO_MANY)
                transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_within(None)
            self._stop_write_clock()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # The parser would keep a head that never ends.
            self._num_head_bytes = self._num_head_bytes + len(data) if self._is_in_head else 0
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

        def on_message_begin(self) -> None:
            self._is_in_head = True
            if self.cycle is not None and not self.cycle.response_complete:
                # A request sent before the last was answered would stop us from reading, and so from seeing the client
                # leave. No client of this API does that.
                self.transport.abort()
            self._expect_within(config.header_timeout_s)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            self._expect_within(config.header_timeout_s)  # again, for the body
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._expect_within(None)
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_clock = self.loop.call_later(config.reader_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_write_clock()
            super().resume_writing()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            # Closing waits for what is unsent, for a client that may never read it.
            self.loop.call_later(config.reader_timeout_s, self.transport.abort)

        def _expect_within(self, seconds: float | None) -> None:
            """Cut the client off unless the next part of a request is there in time; None: nothing is expected."""
            if self._receive_clock is not None:
                self._receive_clock.cancel()
            self._receive_clock = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

        def _stop_write_clock(self) -> None:
            if self._write_clock is not None:
                self._write_clock.cancel()
                self._write_clock = None

    return Connection
