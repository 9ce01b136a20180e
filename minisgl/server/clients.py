"""`Client`: the front's side of an engine, whatever lies between.

Chapter 1 tells this module's story. A `Client` keeps what its callers wait for and speaks in the wire's messages over a
`Link`: to processes of their own (`minisgl.server.processes`), or to a thread of this one (`ThreadLink`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from minisgl.request import SamplingParams
from minisgl.server.client import Delta, EngineDied, EngineStats, GenerateRequest, ModelInfo, RequestRefused, Update
from minisgl.server.engine_loop import HEARTBEAT_S, Engine, EngineLoop
from minisgl.server.log import log
from minisgl.server.tokenizer import Tokenizer
from minisgl.server.wire import (
    WINDOW,
    Abort,
    Call,
    Detokenize,
    Error,
    FromFront,
    Heartbeat,
    Message,
    News,
    Reply,
    Started,
    Submit,
    Tokenize,
)
from minisgl.server.worker import TextWorker

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 1.0
MOST_PARTS = 64  # news of one request that are kept apart until somebody asks


class Link(Protocol):
    """The way to a text worker and, behind it, an engine."""

    async def start(self, receive: Callable[[Sequence[Message]], None], lost: Callable[[str, bool], None]) -> None:
        """Begin to start the other side; it says `Started` when it is there.

        Args:
            receive: called in this event loop with the messages that come.
            lost: called with the reason when the other side is gone, and whether that is for good; otherwise it will
                say `Started` again. Nothing that was sent before will be answered.
        """
        ...

    def send(self, message: Message) -> None:
        """Send, without waiting. Raises ``ValueError``, ``TypeError`` or ``RecursionError`` for what no message can
        hold."""
        ...

    async def close(self) -> None:
        """End the other side."""
        ...


class _Entry:
    """What one caller of `Client.generate` waits for."""

    __slots__ = ("error", "is_closed", "news", "waiter")

    def __init__(self) -> None:
        self.news: list[Update] = []
        self.error: Exception | None = None
        self.is_closed = False  # nobody waits any more; it stays known until its end is confirmed
        self.waiter: asyncio.Future[None] | None = None

    def put(self, update: Update) -> None:
        if self.is_closed:
            return
        self.news.append(update)
        if len(self.news) > MOST_PARTS:
            self.news = [merge(self.news)]
        self.wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> Update:
        while not self.news:
            if self.error is not None:
                raise self.error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        news, self.news = self.news, []
        return news[0] if len(news) == 1 else merge(news)


def merge(news: Sequence[Update]) -> Update:
    """Several updates of one request, in order, as one."""
    parts: dict[int, list[Delta]] = {}
    for update in news:
        for delta in update.deltas:
            parts.setdefault(delta.index, []).append(delta)
    last = news[-1]
    return Update(
        last.request_id,
        tuple(_merge_deltas(deltas) for _, deltas in sorted(parts.items())),
        last.usage,
        prompt_token_ids=next((u.prompt_token_ids for u in news if u.prompt_token_ids is not None), None),
        prompt_logprobs=next((u.prompt_logprobs for u in news if u.prompt_logprobs is not None), None),
        timings=last.timings,
    )


def _merge_deltas(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    logprobs = tuple(entry for d in deltas for entry in d.logprobs or ())
    return Delta(
        last.index,
        "".join(d.text for d in deltas),
        tuple(token_id for d in deltas for token_id in d.token_ids),
        logprobs=None if last.logprobs is None else logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


class Client:
    """An `EngineClient` over a `Link`. All methods belong to one event loop.

    Invariant: each request that `generate` sent has an entry until the other side has said its last word on it, or is
    lost; so every caller gets exactly one end.

    Args:
        link: not started yet.
        heartbeat_s: `not_ready` when the engine's loop has not turned for this long.
        log_prompts: write prompts to the log too.
        clock: seconds; the engine's.
    """

    def __init__(
        self,
        link: Link,
        *,
        heartbeat_s: float = 5.0,
        log_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._heartbeat_s = heartbeat_s
        self._log_prompts = log_prompts
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._info: ModelInfo | None = None
        self._heartbeat: Heartbeat | None = None
        self._trouble: str | None = "the engine is starting"
        self._failure: str | None = None
        self._is_up = False  # messages reach the other side
        self._has_changed = asyncio.Event()  # trouble or failure
        self._golden_task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._entries)

    async def start(self) -> None:
        """Start the other side and wait until it has answered a known prompt as it should. Raises `EngineDied`, in one
        line, if it cannot start; then everything is closed."""
        try:
            await self._link.start(self._receive, self._lost)
            while self._trouble is not None and self._failure is None:
                self._has_changed.clear()
                await self._has_changed.wait()
        except BaseException:
            await self.close()
            raise
        if self._failure is not None:
            failure = self._failure
            await self.close()
            raise EngineDied(failure)

    # ------------------------------------------------------------------------------------------------ state

    @property
    def info(self) -> ModelInfo:
        """The model. Raises `EngineDied` before `start`."""
        if self._info is None:
            raise EngineDied("the engine has not started")
        return self._info

    @property
    def failure(self) -> str | None:
        """Why the engine is gone for good, or None."""
        return self._failure

    @property
    def not_ready(self) -> str | None:
        """Why requests had better go elsewhere now, or None."""
        if self._failure is not None or self._trouble is not None:
            return self._failure or self._trouble
        if (age := self._heartbeat_age_s()) > self._heartbeat_s:
            return f"the engine's loop has not turned for {age:.1f} s"
        return None

    async def wait_failure(self) -> str:
        """Return `failure` once there is one."""
        while self._failure is None:
            self._has_changed.clear()
            await self._has_changed.wait()
        return self._failure

    def _heartbeat_age_s(self) -> float:
        return 0.0 if self._heartbeat is None else max(0.0, self._clock() - self._heartbeat.time_s)

    # ------------------------------------------------------------------------------------------------ asking

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        """Answer a request; see `EngineClient.generate`."""
        request_id, entry = request.request_id, _Entry()
        if request_id in self._entries:
            raise RequestRefused(f"request id {request_id!r} is in use")
        self._send(Submit(_sendable(request)))
        self._entries[request_id] = entry
        started_s = self._clock()
        seen = {"prompt": request.text or request.token_ids or request.messages} if self._log_prompts else {}
        params = request.params
        log(logger, "accepted", request_id=request_id, n=params.n, max_tokens=params.max_tokens, **seen)
        update = None
        try:
            while update is None or update.timings is None:
                update = await entry.take()
                yield update
        except (RequestRefused, EngineDied) as error:
            log(logger, "failed", request_id=request_id, error=str(error))
            raise
        finally:
            # It may have ended, and nobody has read that yet.
            if request_id in self._entries and self._entries[request_id] is entry:
                entry.is_closed = True
                entry.news.clear()
                if self._is_up:
                    self._link.send(Abort(request_id))
            if update is not None:
                reasons = ",".join(d.finish_reason for d in update.deltas if d.finish_reason is not None)
                log(
                    logger,
                    "ended" if update.timings is not None else "left",
                    request_id=request_id,
                    prompt_tokens=update.usage.prompt_tokens,
                    cached_tokens=update.usage.cached_tokens,
                    completion_tokens=update.usage.completion_tokens,
                    reasons=reasons,
                    seconds=round(self._clock() - started_s, 3),
                )

    async def abort(self, request_id: str) -> bool:
        """End a request; its iterator ends with finish reason "abort". False if there is none of that id."""
        entry = self._entries.get(request_id)
        if entry is None or entry.is_closed or not self._is_up:
            return False
        self._link.send(Abort(request_id))
        return True

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids."""
        ids: list[int] = await self._call(lambda call_id: Tokenize(call_id, _sendable(request)))
        return ids

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of ids."""
        text: str = await self._call(lambda call_id: Detokenize(call_id, token_ids))
        return text

    async def flush_cache(self) -> int:
        """Forget cached prefixes that nobody uses; returns how many pages that freed."""
        num_pages: int = await self._call(lambda call_id: Call(call_id, "flush"))
        return num_pages

    async def stats(self, *, detail: bool = False) -> EngineStats:
        """The engine's state now; what its last heartbeat said if it does not answer within a second."""
        name = "detail" if detail else "stats"
        try:
            stats: EngineStats = await asyncio.wait_for(
                self._call(lambda call_id: Call(call_id, name)), STATS_TIMEOUT_S
            )
        except TimeoutError:
            stats = EngineStats() if self._heartbeat is None else self._heartbeat.stats
        return replace(stats, heartbeat_age_s=self._heartbeat_age_s())

    async def close(self) -> None:
        """End what runs and give everything back. A second call does nothing."""
        self._lost(self._failure or "the server has ended", True)
        await self._link.close()

    # ------------------------------------------------------------------------------------------------ messages

    def _send(self, message: Message) -> None:
        if not self._is_up:
            raise EngineDied(self._failure or self._trouble or "the engine is gone")
        try:
            self._link.send(message)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise RequestRefused(f"this cannot be sent to the engine: {error}") from None

    async def _call(self, message: Callable[[str], Message]) -> Any:
        call_id = f"call {next(self._call_ids)}"
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(call_id))
            return await answer
        finally:
            del self._calls[call_id]

    def _receive(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if isinstance(message, News):
                for update in message.updates:
                    self._news(update)
            elif isinstance(message, Heartbeat):
                self._heartbeat = message
            elif isinstance(message, Error):
                entry = self._entries.pop(message.id, None)
                if entry is not None:
                    entry.fail(RequestRefused(message.message))
                elif message.id in self._calls:
                    self._answer(message.id, RequestRefused(message.message))
            elif isinstance(message, Reply):
                if message.call_id in self._calls:  # otherwise nobody waits any more
                    self._answer(message.call_id, message.value)
            elif isinstance(message, Started):
                self._info = message.info
                self._heartbeat = None
                self._is_up = True
                self._golden_task = asyncio.get_running_loop().create_task(self._check_golden(*message.golden))

    def _news(self, update: Update) -> None:
        entry = self._entries.get(update.request_id)
        assert entry is not None, f"news of {update.request_id!r}, which has ended"
        if update.timings is not None:
            del self._entries[update.request_id]
        entry.put(update)

    def _answer(self, call_id: str, value: Any) -> None:
        future = self._calls[call_id]
        if future.done():
            return
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _lost(self, reason: str, for_good: bool) -> None:
        """The other side is gone: everybody who waits for it hears that now."""
        self._is_up = False
        self._trouble = reason
        self._failure = self._failure or (reason if for_good else None)
        if self._golden_task is not None:
            self._golden_task.cancel()
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.fail(EngineDied(reason))
        for call_id in self._calls:
            self._answer(call_id, EngineDied(reason))
        self._has_changed.set()

    async def _check_golden(self, prompt: list[int], known: list[int]) -> None:
        """What the engine computed alone must come out the other end of the whole way, and again after a restart."""
        params = SamplingParams(temperature=0, max_tokens=len(known), ignore_eos=True)
        request = GenerateRequest("golden", params, token_ids=prompt)
        token_ids: list[int] = []
        try:
            async for update in self.generate(request):
                token_ids += (token_id for delta in update.deltas for token_id in delta.token_ids)
            await self.flush_cache()
            self._trouble = None if token_ids == known else f"a known prompt brought {token_ids} instead of {known}"
        except RequestRefused as error:
            self._trouble = f"a known prompt was refused: {error}"
        except EngineDied:
            return  # `_lost` has told
        self._failure = self._trouble
        self._has_changed.set()


def _sendable(request: GenerateRequest) -> GenerateRequest:
    """The same with integers that no context is long enough for cut to what fits on the wire."""
    params, most = request.params, 2**31 - 1
    if max(params.max_tokens or 0, params.min_tokens, params.top_k) <= most:
        return request
    max_tokens = None if params.max_tokens is None else min(params.max_tokens, most)
    cut = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, most), top_k=min(params.top_k, most))
    return replace(request, params=cut)


class ThreadLink:
    """Worker and engine in a thread of this process, for notebooks and tests: the same messages, no sockets.

    Args:
        load: makes both; called in the thread.
    """

    def __init__(self, load: Callable[[], tuple[Engine, Tokenizer]]) -> None:
        self._load = load
        self.worker: TextWorker | None = None  # for those who look
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromFront)
        self._thread: threading.Thread | None = None
        self._num_sent = 0  # batches; written by the thread,
        self._num_seen = 0  # and by the event loop
        self._is_closed = False

    async def start(self, receive: Callable[[Sequence[Message]], None], lost: Callable[[str, bool], None]) -> None:
        """Begin to load in the thread."""
        loop = asyncio.get_running_loop()

        def take(messages: list[Message]) -> None:
            self._num_seen += 1
            if not self._is_closed:
                receive(messages)

        def run() -> None:
            try:
                self._run(lambda messages: loop.call_soon_threadsafe(take, messages))
            except BaseException as error:
                if not isinstance(error, ValueError):
                    logger.exception("the engine has failed")
                if not self._is_closed:
                    loop.call_soon_threadsafe(lost, f"the engine has failed: {error or type(error).__name__}", True)

        self._thread = threading.Thread(target=run, name="minisgl engine", daemon=True)
        self._thread.start()

    def _run(self, publish: Callable[[list[Message]], object]) -> None:
        engine, tokenizer = self._load()
        try:
            outbox: list[Message] = []
            to_engine: list[Any] = []
            worker = self.worker = TextWorker(tokenizer, to_front=outbox.append, to_engine=to_engine.append)
            loop = EngineLoop(engine, send=worker.on_engine)  # type: ignore[arg-type]
            loop.start()
            while True:
                for message in self._take(wait=not (engine.has_work or to_engine or outbox)):
                    if message is None:
                        return
                    worker.on_front(message)
                while to_engine:
                    loop.handle(to_engine.pop(0))
                loop.turn()
                if self._num_sent - self._num_seen < WINDOW:  # otherwise the front is behind: news join
                    worker.tell()
                    if outbox:
                        self._num_sent += 1
                        publish(outbox[:])
                        outbox.clear()
        finally:
            engine.close()

    def _take(self, *, wait: bool) -> list[Any]:
        messages = []
        try:
            messages.append(self._inbox.get(timeout=HEARTBEAT_S if wait else 0.0) if wait else self._inbox.get_nowait())
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, message: Message) -> None:
        """Send a copy, as over a socket."""
        self._inbox.put(self._decoder.decode(self._encoder.encode(message)))

    async def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        if self._thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)
