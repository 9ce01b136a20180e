"""`minisgl serve`: which processes there are, and what each is made of.

Chapter 1 tells this module's story. The parent has the HTTP front; a worker has the tokenizer; an engine process has
the model, and it alone imports torch. ``python -m minisgl.serve ROLE`` is how the parent starts the other two.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from minisgl.checkpoint import find_model
from minisgl.config import EngineConfig, ModelConfig
from minisgl.server.client import EngineDied, EngineStats, ModelInfo
from minisgl.server.clients import Client, ThreadLink
from minisgl.server.config import ServerConfig
from minisgl.server.echo import EchoEngine
from minisgl.server.engine_loop import Engine, last_words, run_engine
from minisgl.server.listener import Addresses, serve_http
from minisgl.server.log import log, set_up_log
from minisgl.server.processes import ProcessLink, live_with_parent
from minisgl.server.tokenizer import Tokenizer, load_tokenizer
from minisgl.server.worker import run_worker

logger = logging.getLogger("minisgl.serve")  # in a child, this module is "__main__"


FAILURE_S = 1.0  # between the engine's death and the server's end: clients and probes are told


class Job(msgspec.Struct, frozen=True):
    """What a child process is told: the configuration, with ``folder`` of the model, and ``sockets`` of the server."""

    engine: EngineConfig
    server: ServerConfig
    folder: str
    sockets: str


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
        host = f"[{at.host}]" if ":" in at.host else at.host
        print(f"{name} is served at http://{host}:{at.port}", flush=True)
        if at.admin_port is not None:
            print(f"its admin's page is at http://127.0.0.1:{at.admin_port}", flush=True)

    return announce


async def start_client(engine: EngineConfig, server: ServerConfig) -> Client:
    """The engine that ``server`` asks for, started and tried.

    Raises:
        ValueError: there is no such model.
        EngineDied: it cannot start, for the reason given in one line.
    """
    folder = find_model(engine.model)
    link: Any
    if server.in_process:
        link = ThreadLink(lambda: (load(engine, server, folder), tokenizer_of(server, folder)))
    else:
        job = Job(engine, server, str(folder.resolve()), "")

        def command(role: str, sockets: Path) -> tuple[list[str], bytes]:
            line = msgspec.json.encode(msgspec.structs.replace(job, sockets=str(sockets)))
            return [sys.executable, "-m", "minisgl.serve", role], line

        link = ProcessLink(command, restart=server.restart, step_deadline_s=server.step_deadline_s)
    client = Client(link, heartbeat_s=server.heartbeat_s, log_prompts=server.log_prompts)
    await client.start()
    return client


def load(engine: EngineConfig, server: ServerConfig, folder: Path) -> Engine:
    """The echo, or an engine with a model. Raises ``ValueError`` as `minisgl.launch.load_engine` does."""
    name = server.served_model_name or engine.model
    if server.echo:
        model = ModelConfig.from_folder(folder)
        context = engine.max_model_len or model.max_position_embeddings
        return EchoEngine(ModelInfo(name, context, model.vocab_size, True), rate=server.echo_rate)
    from minisgl.launch import load_engine  # torch

    return ServedEngine(load_engine(replace(engine, model=str(folder))), name)


def tokenizer_of(server: ServerConfig, folder: Path) -> Tokenizer:
    """The model's tokenizer, with the chat template that was asked for."""
    return load_tokenizer(folder, chat_template=server.chat_template)


class ServedEngine:
    """An `EngineCore` as the server's loop knows engines."""

    def __init__(self, loaded: Any, name: str) -> None:
        self._core = loaded.core
        most = loaded.core.scheduler.config.max_model_len
        self.info = ModelInfo(name, most, loaded.model_config.vocab_size, loaded.tokenizer.has_chat_template)
        self.add, self.abort = self._core.add, self._core.abort
        self.step, self.flush_cache = self._core.step, self._core.flush_cache

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._core.has_work)

    def stats(self, *, detail: bool = False) -> EngineStats:
        """Queue, pages and steps."""
        scheduler, kv = self._core.scheduler, self._core.kv
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=kv.num_pages - 1,
            num_free_pages=kv.allocator.num_free,
            num_cached_pages=kv.tree.num_evictable_pages,
            num_steps=scheduler.num_steps,
            num_preemptions=scheduler.num_preemptions,
            detail=self._detail() if detail else {},
        )

    def _detail(self) -> dict[str, Any]:
        from minisgl.scheduler.view import describe  # only for who looks

        return {"text": describe(self._core.scheduler)}

    def close(self) -> None:
        """End the flight record, give the device's memory back."""
        if self._core.recorder is not None:
            self._core.recorder.close()
        device = self._core.runner.table.device
        del self._core, self.add, self.abort, self.step, self.flush_cache
        if device.type == "cuda":
            import torch  # it is there already

            torch.cuda.empty_cache()


def run_child(role: str) -> None:
    """The whole life of a worker or engine process."""
    job = msgspec.json.decode(live_with_parent(), type=Job)
    set_up_log(role)
    sockets, folder = Path(job.sockets), Path(job.folder)
    leave = last_words(sockets, role)
    try:
        if role == "worker":
            run_worker(lambda: tokenizer_of(job.server, folder), sockets)
        else:
            record = job.engine.record
            note = "" if record is None else f"; the flight record is {record}"
            run_engine(
                lambda: load(job.engine, job.server, folder), sockets,
                step_deadline_s=job.server.step_deadline_s, leave=leave, note=note,
            )  # fmt: skip
    except ValueError as error:  # in words for users
        leave(str(error))
    except BaseException as error:
        logger.exception("the %s process has failed", role)
        leave(f"the {role} process has failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    run_child(sys.argv[1])
