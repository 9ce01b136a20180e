"""The server's other processes: started, watched, ended. Nobody outlives the parent, and no death goes unseen.

Chapter 1 tells this module's story. `ProcessLink` is the parent's side, `live_with_parent` the child's.

How a death is seen: the parent waits for its children. A child that ends by itself leaves its reason in the private
folder (`last_words`); one that is killed leaves none. A child that is frozen sends no heartbeat, and is killed after
the deadline. A child sees the parent's death on its stdin, a pipe that nobody else holds open; Linux also kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from minisgl.server.client import EngineDied
from minisgl.server.wire import (
    RECORD,
    BrokenWire,
    Heartbeat,
    Message,
    Receiver,
    Seen,
    Sender,
    Started,
    ToFront,
    address,
)

logger = logging.getLogger(__name__)

ROLES = ("worker", "engine")
TERMINATE_S = 2.0  # between asking a child to end and making it
STEADY_S = 60.0  # an engine that lived this long may start again at once
LONGEST_PAUSE_S = 30.0
_PREFIX = "minisgl-"


class ProcessLink:
    """A `Link` to a worker and an engine in processes of their own. Must be started in a thread that lives as long as
    they shall, in the main thread best: Linux ends them with it.

    Args:
        command: argv of a role's process, and the line that it finds on its stdin, given the folder for the sockets.
        restart: start again after a death; pauses grow from one second to half a minute.
        step_deadline_s: an engine whose loop has not turned for this long is killed.
        record: an existing folder, in which all write down what they send; None: nobody does.
    """

    def __init__(
        self,
        command: Callable[[str, Path], tuple[Sequence[str], bytes]],
        *,
        restart: bool,
        step_deadline_s: float,
        record: Path | None = None,
    ) -> None:
        self._command = command
        self._restart = restart
        self._deadline_s = step_deadline_s
        self._record = record
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._folder: Path | None = None
        self._close_sockets: Callable[[], object] = lambda: None
        self._receiver: Receiver[Message] | None = None
        self._sender: Sender | None = None
        self._has_started = False
        self._heartbeat_s: float | None = None
        self._broken: asyncio.Future[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each role that runs."""
        return {role: process.pid for role, process in self._processes.items()}

    @property
    def folder(self) -> Path | None:
        """The private folder, None if nothing runs."""
        return self._folder

    async def start(self, receive: Callable[[Sequence[Message]], None], lost: Callable[[str, bool], None]) -> None:
        """Start the processes, and watch them from now on."""
        self._receive, self._lost = receive, lost
        await self._launch()
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    def send(self, message: Message) -> None:
        """Send."""
        if self._sender is None:
            raise EngineDied("the engine is not running")
        self._sender.send(message)

    async def close(self) -> None:
        """End the processes and remove the sockets."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._end()

    # ------------------------------------------------------------------------------------------------ start and end

    async def _launch(self) -> None:
        sweep()
        self._ending = None
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))  # for its owner alone
        if len(address(self._folder, "worker", "engine")) > 100:  # a Unix socket's path holds 107 bytes
            shutil.rmtree(self._folder)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
        if self._record is not None:
            (self._folder / RECORD).symlink_to(self._record.resolve(), target_is_directory=True)
        self._broken = asyncio.get_running_loop().create_future()
        self._heartbeat_s = None
        context: zmq.Context[Any] = zmq.Context()
        self._receiver = Receiver(context, self._folder, "worker", "front", ToFront)
        self._sender = Sender(context, self._folder, "front", "worker")
        # A program that forgets to close must not wait for open sockets when it ends.
        self._close_sockets = weakref.finalize(self, _close_sockets, context, self._receiver, self._sender)
        asyncio.get_running_loop().add_reader(self._receiver.socket.getsockopt(zmq.FD), self._read)
        for role in ROLES:
            argv, line = self._command(role, self._folder)
            # What a child prints is for the log; stdout belongs to the parent.
            process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.PIPE, stdout=2)
            self._processes[role] = process
            assert process.stdin is not None
            process.stdin.write(line + b"\n")

    async def _end(self) -> None:
        """End everything, once; whoever is cancelled while it waits for that does not stop it."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end_all())
        await asyncio.shield(self._ending)

    async def _end_all(self) -> None:
        processes, self._processes = self._processes, {}
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        waits = [asyncio.ensure_future(process.wait()) for process in processes.values()]
        if waits and (late := (await asyncio.wait(waits, timeout=TERMINATE_S))[1]):
            for process in processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.wait(late)
        if self._receiver is not None:
            asyncio.get_running_loop().remove_reader(self._receiver.socket.getsockopt(zmq.FD))
        self._close_sockets()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._receiver = self._sender = self._folder = None

    # ------------------------------------------------------------------------------------------------ while they run

    def _read(self) -> None:
        """The socket's descriptor speaks up only when something new comes, so read until nothing is left."""
        if self._receiver is None or self._sender is None:
            return
        try:
            messages = self._receiver.drain()
        except BrokenWire as error:
            if self._broken is not None and not self._broken.done():
                self._broken.set_result(str(error))
            return
        if not messages:
            return
        for message in messages:
            if isinstance(message, Started):
                self._has_started = True
            if isinstance(message, Heartbeat):
                self._heartbeat_s = message.time_s
        if (seen := self._receiver.confirm()) is not None:
            self._sender.send(seen)
        self._receive([message for message in messages if not isinstance(message, Seen)])
        asyncio.get_running_loop().call_soon(self._read)  # others have their turn in between

    async def _supervise(self) -> None:
        pause_s = 1.0
        while True:
            since_s = time.monotonic()
            reason = await self._wait_for_death()
            if self._has_started:  # otherwise it is for whoever starts
                logger.error("%s", reason)
            for_good = not self._restart or not self._has_started
            # Those who wait hear of it before the others have ended.
            self._lost(reason, for_good)
            await self._end()
            if for_good:
                return
            while True:
                pause_s = 1.0 if time.monotonic() - since_s > STEADY_S else pause_s
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                try:
                    await self._launch()
                    break
                except OSError as error:
                    logger.error("cannot start again: %s", error)
                    await self._end()

    async def _wait_for_death(self) -> str:
        """Return why it cannot go on, in one line."""
        assert self._broken is not None
        ends: dict[asyncio.Future[Any], str] = {
            asyncio.ensure_future(process.wait()): role for role, process in self._processes.items()
        }
        num_late = 0
        try:
            while True:
                done, _ = await asyncio.wait([*ends, self._broken], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if self._broken in done:
                    return f"the wire broke: {self._broken.result()}"
                if done:
                    # The one that left a word knows more than the one that fell over its end.
                    roles = sorted((ends[end] for end in done), key=lambda role: not self._words(role))
                    return self._words(roles[0]) or f"the {roles[0]} process {_how(self._processes[roles[0]])}"
                late_s = 0.0 if self._heartbeat_s is None else time.monotonic() - self._heartbeat_s - self._deadline_s
                # Twice in a row: if it was this process that slept, the heartbeats are still to be read.
                num_late = num_late + 1 if late_s > TERMINATE_S else 0
                if num_late == 2:
                    return f"no heartbeat of the engine has come for {late_s + self._deadline_s:.0f} s"
        finally:
            for end in ends:
                end.cancel()

    def _words(self, role: str) -> str:
        assert self._folder is not None
        try:
            return (self._folder / f"{role}.died").read_text(encoding="utf-8")
        except OSError:
            return ""


def _close_sockets(context: zmq.Context[Any], receiver: Receiver[Message], sender: Sender) -> None:
    receiver.close()
    sender.close()
    context.term()


def _how(process: asyncio.subprocess.Process) -> str:
    code = process.returncode or 0
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended by itself with code {code}"


def sweep() -> None:
    """Remove the folders of servers of this user that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        try:
            os.kill(int(folder.name.split("-")[1]), 0)
        except ProcessLookupError:
            if folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, OSError):
            continue  # it lives, or is another's


def live_with_parent() -> bytes:
    """To be called first in a child: returns the line that the parent wrote. From then on this process ends when the
    parent does, however that ends, and leaves Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    line = sys.stdin.buffer.readline()

    def wait_for_end() -> None:
        os.read(0, 1)  # the parent never writes again, so this returns when its end of the pipe is closed
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent watch", daemon=True).start()
    return line
