"""What is behind the HTTP front: which processes there are, and what each is made of.

Chapter 1 tells this module's story. The parent has the front; a worker has the tokenizer; an engine process has the
model, and it alone imports torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from minisgl.checkpoint import find_model
from minisgl.config import EngineConfig, ModelConfig
from minisgl.scheduler.view import snapshot
from minisgl.server.client import EngineStats, ModelInfo
from minisgl.server.clients import Client, ThreadLink
from minisgl.server.config import ServerConfig
from minisgl.server.echo import EchoEngine
from minisgl.server.engine_loop import Engine, last_words, run_engine
from minisgl.server.log import set_up_log
from minisgl.server.processes import ProcessLink, live_with_parent
from minisgl.server.tokenizer import Tokenizer, load_tokenizer
from minisgl.server.worker import run_worker

logger = logging.getLogger(__name__)

# transformers imports torch where it can, which takes a tokenizer three seconds and 180 MiB for nothing.
WITHOUT_TORCH = "import os, sys; sys.modules['torch'] = None; os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = '1'; "


class Job(msgspec.Struct, frozen=True):
    """What a child process is told: the configuration, with ``folder`` of the model, and ``sockets`` of the server."""

    engine: EngineConfig
    server: ServerConfig
    folder: str
    sockets: str


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
        record = None if server.record_wire is None else _folder_of(server.record_wire)
        link = ProcessLink(
            command(engine, server, folder),
            restart=server.restart,
            step_deadline_s=server.step_deadline_s,
            record=record,
        )
    client = Client(link, heartbeat_s=server.heartbeat_s, log_prompts=server.log_prompts)
    await client.start()
    return client


def _folder_of(record: str) -> Path:
    try:
        Path(record).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot record into {record}: {error.strerror}") from error
    return Path(record)


def command(
    engine: EngineConfig, server: ServerConfig, folder: Path
) -> Callable[[str, Path], tuple[Sequence[str], bytes]]:
    """How `ProcessLink` starts a role's process: its argv, and the line for its stdin, given the sockets' folder."""

    def of_role(role: str, sockets: Path) -> tuple[Sequence[str], bytes]:
        job = Job(engine, server, str(folder.resolve()), str(sockets))
        code = f"from minisgl.backend import run_child; run_child({role!r})"
        return [sys.executable, "-c", (WITHOUT_TORCH if role == "worker" else "") + code], msgspec.json.encode(job)

    return of_role


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
            num_failed_checks=self._core.num_failed_checks,
            detail=snapshot(scheduler) if detail else {},
        )

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
