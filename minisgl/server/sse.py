"""Server-sent events: how a stream of answers is framed, and when the client has left.

Chapter 1 tells this module's story. The framing is three bytes before and two behind; what takes care is the end: a
client that leaves says so on the side, and whatever is being computed for it must be told at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from minisgl.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that buffer would hold tokens back
)


def event(json: bytes) -> bytes:
    """One event. JSON has no raw line breaks, so that a line is enough."""
    return b"data: " + json + b"\n\n"


class ClientLeft(Exception):
    """The client closed the connection: there is nobody to answer."""


@asynccontextmanager
async def while_connected(receive: Receive, *, timeout_s: float | None) -> AsyncIterator[None]:
    """Run the body until it ends, the client leaves, or ``timeout_s`` is over, whichever is first; the latter two
    cancel what the body awaits, and come out as an exception. The request's body must have been read.

    Raises:
        ClientLeft: it did.
        ApiError: 504, it is.
    """
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        if not scope.expired():
            left = True
            scope.reschedule(0.0)  # the past: what the body awaits is cancelled now

    watcher: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(timeout_s) as scope:
            watcher = asyncio.create_task(watch())
            yield
    except TimeoutError:
        if left:
            raise ClientLeft from None
        if scope.expired():
            # Trying again, as clients do by themselves after a 5xx, would take as long.
            headers = {"x-should-retry": "false"}
            raise ApiError(504, f"not done within {timeout_s:g} s", code="deadline", headers=headers) from None
        raise
    finally:
        if watcher is not None:
            watcher.cancel()
