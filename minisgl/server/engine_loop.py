"""The loop of an engine process: messages in, a step, a message out.

Chapter 1 tells this module's story. It knows an engine by what it does (`Engine`), so that the one with a model and the
echo turn in the same loop, in a process of their own (`run_engine`) or in a thread. No torch here.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import zmq

from minisgl.request import FinishedRequest, FinishReason, SamplingParams, StepOutput
from minisgl.server.client import EngineStats, ModelInfo
from minisgl.server.wire import (
    Add,
    Call,
    End,
    Error,
    Heartbeat,
    Message,
    Receiver,
    Reply,
    Seen,
    Sender,
    Started,
    Step,
    ToEngine,
)
from minisgl.utils import Int32Array, as_token_ids

HEARTBEAT_S = 0.5
GOLDEN = "golden"  # the request that an engine decodes before it serves


class Engine(Protocol):
    """What the loop needs of an engine. ``ValueError`` from `add` refuses that request; any other error is the end."""

    @property
    def info(self) -> ModelInfo:
        """The model."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def add(self, request_id: str, prompt_token_ids: Int32Array, sampling_params: SamplingParams) -> object:
        """Queue a request."""
        ...

    def abort(
        self, request_id: str, *, reason: FinishReason = "abort", stop_reason: str | None = None
    ) -> FinishedRequest | None:
        """End a request in whatever state it is; None if it has ended or never was."""
        ...

    def step(self) -> StepOutput | None:
        """One turn; None when it brought no result."""
        ...

    def flush_cache(self) -> int:
        """Forget cached prefixes; returns the pages that came free."""
        ...

    def stats(self, *, detail: bool = False) -> EngineStats:
        """Its state; the loop counts tokens."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class EngineLoop:
    """Carries messages to an engine, and what its steps bring back: at most one message a turn.

    Args:
        engine: turned by this loop alone.
        send: called with each message that leaves.
        clock: seconds; the engine's.
    """

    def __init__(
        self, engine: Engine, *, send: Callable[[Message], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine = engine
        self._send = send
        self._clock = clock
        self._ended: list[FinishedRequest] = []  # between two steps
        self._num_tokens = [0, 0, 0]  # of prompts, cached among them, of outputs; since the start
        self._beat_s = float("-inf")

    def start(self) -> None:
        """Decode a known prompt greedily, so that everything has run once, and tell that the engine can work."""
        most = self.engine.info.max_model_len
        prompt = [1 + i % (self.engine.info.vocab_size - 1) for i in range(min(8, most - 1))]
        params = SamplingParams(temperature=0, max_tokens=min(8, most - len(prompt)), ignore_eos=True)
        self.engine.add(GOLDEN, as_token_ids(prompt), params)
        tokens: list[int] = []
        while self.engine.has_work:
            output = self.engine.step()
            tokens += output.token_ids.tolist() if output is not None else []
        self.engine.flush_cache()
        self._send(Started(self.engine.info, (prompt, tokens)))

    def handle(self, message: ToEngine) -> None:
        """Take a message of the worker."""
        if isinstance(message, Add):
            for request_id, params in message.children:
                try:
                    self.engine.add(request_id, message.prompt_token_ids, params)
                except ValueError as error:
                    self._send(Error(request_id, str(error)))
        elif isinstance(message, End):
            finished = self.engine.abort(message.request_id, reason=message.reason, stop_reason=message.stop_reason)
            if finished is not None:
                self._ended.append(finished)
        elif isinstance(message, Call):
            value = self.engine.flush_cache() if message.name == "flush" else self.stats(message.name == "detail")
            self._send(Reply(message.call_id, value))

    def turn(self) -> None:
        """One step, if there is work, and a message about it; now and then a heartbeat."""
        output = self.engine.step() if self.engine.has_work else None
        if output is not None or self._ended:
            ended = tuple(self._ended)
            self._ended.clear()
            step = Step(0, self._clock(), (), b"", ended) if output is None else Step.of(output, ended)
            self._num_tokens[2] += len(step.request_ids)
            for finished in step.finished:
                self._num_tokens[0] += finished.usage.prompt_tokens
                self._num_tokens[1] += finished.usage.cached_tokens
            self._send(step)
        self.beat()

    def beat(self) -> None:
        """A heartbeat, unless the last one was a moment ago."""
        now = self._clock()
        if now - self._beat_s >= HEARTBEAT_S:
            self._beat_s = now
            self._send(Heartbeat(self.stats(), now))

    def stats(self, detail: bool = False) -> EngineStats:
        """The engine's state, and the tokens counted here."""
        prompt, cached, output = self._num_tokens
        stats = self.engine.stats(detail=detail)
        return replace(stats, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)


class Watchdog:
    """Ends the process when a step takes too long: the device hangs, and no exception will ever come of it.

    A thread looks at the clock. It writes all stacks to stderr and hands ``leave`` one line; ``leave`` must not return.

    Args:
        deadline_s: longest time between two calls of `pat`.
        note: further help for whoever reads the line, such as where the flight record is.
        leave: ends the process.
    """

    def __init__(self, deadline_s: float, *, note: str = "", leave: Callable[[str], None]) -> None:
        self._deadline_s = deadline_s
        self._note = note
        self._leave = leave
        self._patted_s = time.monotonic()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def pat(self) -> None:
        """The loop turns."""
        self._patted_s = time.monotonic()

    def _watch(self) -> None:
        while (late_s := time.monotonic() - self._patted_s - self._deadline_s) < 0:
            time.sleep(min(max(-late_s, 0.01), 1.0))
        faulthandler.dump_traceback(file=2, all_threads=True)
        self._leave(f"a step has taken longer than {self._deadline_s:g} s{self._note}")


def run_engine(
    load: Callable[[], Engine], folder: Path, *, step_deadline_s: float, leave: Callable[[str], None], note: str = ""
) -> None:
    """An engine process: carry messages and turn until somebody ends it.

    Args:
        load: makes the engine.
        folder: where the sockets are.
        step_deadline_s: a turn that takes longer is the end of the process,
        leave: by this function, which gets the reason and must not return; ``note`` is added to that.

    Raises:
        BrokenWire: and whatever ``load`` or the engine raises.
    """
    with zmq.Context() as context:
        worker: Receiver[ToEngine] = Receiver(context, folder, "worker", "engine", ToEngine)
        to_worker = Sender(context, folder, "engine", "worker")
        loop = EngineLoop(load(), send=to_worker.send)
        loop.start()
        # What there is now stays: the collector need not look at it again. Nor does it look at everything in the middle
        # of a step, which takes 20 ms where many requests and cached prefixes live, but when there is nothing to do.
        gc.collect()
        gc.freeze()
        gc.set_threshold(700, 10, 2**30)
        is_clean = True
        watchdog = Watchdog(step_deadline_s, note=note, leave=leave)
        while True:
            waits = not loop.engine.has_work or to_worker.is_ahead
            if waits and not worker.socket.poll(int(HEARTBEAT_S * 1000)) and not is_clean:
                gc.collect()
                is_clean = True
            watchdog.pat()
            for message in worker.drain():
                if isinstance(message, Seen):
                    to_worker.num_seen = message.number
                else:
                    loop.handle(message)
            if to_worker.is_ahead:  # the worker cannot keep up: do not pile up steps before it
                loop.beat()
            else:
                is_clean = is_clean and not loop.engine.has_work
                loop.turn()


def last_words(folder: Path, role: str) -> Callable[[str], None]:
    """A function that leaves one line for the parent to tell, and ends this process at once."""

    def leave(reason: str) -> None:
        (folder / f"{role}.died").write_text(" ".join(reason.split()), encoding="utf-8")
        os._exit(1)

    return leave
