"""`minisgl serve`: the HTTP front over a backend, from the start to the last signal.

Chapter 1 tells this module's story. Ports are tried before a model is loaded; signals are counted; the engine's end is
the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from minisgl.backend import start_client
from minisgl.config import EngineConfig
from minisgl.server.client import EngineDied
from minisgl.server.config import ServerConfig
from minisgl.server.listener import Addresses, serve_http
from minisgl.server.log import log, set_up_log

logger = logging.getLogger(__name__)


FAILURE_S = 1.0  # between the engine's death and the server's end: clients and probes are told


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until SIGTERM or Ctrl-C, or until the engine is gone for good; returns the exit code. The first signal lets
    running answers end, the second ends them, the third ends the process.

    Raises ``ValueError`` or `EngineDied`, in one line, if it cannot start."""
    set_up_log("front")
    try:
        return asyncio.run(_serve(engine, server))
    except asyncio.CancelledError:
        return 1


async def _serve(engine: EngineConfig, server: ServerConfig) -> int:
    stop = _stop_on_signals()
    _check_ports(server)
    async with _tasks(start_client(engine, server), stop.wait()) as (start, stopping):
        await asyncio.wait([start, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            return 0
        client = start.result()
    try:
        http = serve_http(client, server, stop=stop, started=_announce(client.info.name))
        async with _tasks(http, client.wait_failure()) as (serving, failing):
            await asyncio.wait([serving, failing], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await asyncio.sleep(FAILURE_S)
                stop.set()
            await serving
        if client.failure is not None:
            raise EngineDied(client.failure)
        return 0
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _tasks(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Each in a task; when the block is left, those that still run are cancelled, and have ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_ports(server: ServerConfig) -> None:
    """Raise ``ValueError`` for a port that is in use, before a model is loaded for nothing."""
    for host, port in ((server.host, server.port), ("127.0.0.1", server.admin_port)):
        if not port:
            continue
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            socket.create_server(address[:2], family=family).close()
        except OSError as error:
            raise ValueError(f"cannot listen at {host} port {port}: {os.strerror(error.errno or 0)}") from error


def _stop_on_signals() -> asyncio.Event:
    stop, task, num_signals = asyncio.Event(), asyncio.current_task(), 0
    assert task is not None

    def on_signal(number: int) -> None:
        nonlocal num_signals
        num_signals += 1
        log(logger, "signal", name=signal.Signals(number).name, times=num_signals)
        if num_signals == 1:
            stop.set()
        elif num_signals == 2:
            task.cancel()
        else:
            os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


def _announce(name: str) -> Callable[[Addresses], None]:
    def announce(at: Addresses) -> None:
        # What there is now stays, and is most of what there will be: the garbage collector, which would stop all
        # streams for 100 ms each time it looks at everything, need not look at it again.
        gc.collect()
        gc.freeze()
        host = f"[{at.host}]" if ":" in at.host else at.host
        print(f"{name} is served at http://{host}:{at.port}", flush=True)
        if at.admin_port is not None:
            print(f"its admin's page is at http://127.0.0.1:{at.admin_port}", flush=True)

    return announce
