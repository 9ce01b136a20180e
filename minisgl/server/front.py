"""`answer`: one HTTP request from its place in the queue to the last byte of its answer.

Chapter 1 tells this module's story. It owns what the routes share (`Front`) and the life of each `Job`: admitted,
handed to the engine, told to the client whole or in events, and over, in whatever way, exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.types import Receive, Send

from minisgl.request import Usage
from minisgl.server import sse
from minisgl.server.answers import AnswerFormat, Echo, Text
from minisgl.server.client import EngineClient, EngineDied, EngineStats, GenerateRequest, Update
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError, as_api_error
from minisgl.server.limits import Ticket, WaitingRoom
from minisgl.server.log import log
from minisgl.server.metrics import Metrics

logger = logging.getLogger(__name__)


class Front:
    """What all requests of a server share.

    Attributes:
        client: the engine.
        config: the server's options.
        waiting: who waits.
        metrics: what was counted.
        draining: nothing new is answered.
        running: engine request ids of each answer that is under way, by the answer's id.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client = client
        self.config = config
        self.waiting = WaitingRoom(
            max_requests=config.max_waiting,
            max_tokens=config.max_waiting_tokens,
            max_first_token_s=config.max_first_token_s,
        )
        self.metrics = Metrics()
        self.draining = False
        self.running: dict[str, list[str]] = {}

    @property
    def not_ready(self) -> str | None:
        """Why requests had better go elsewhere now, or None."""
        return "the server is ending" if self.draining else self.client.not_ready

    async def stats(self, *, detail: bool = False) -> EngineStats | None:
        """The engine's state, None if it is dead."""
        try:
            return await self.client.stats(detail=detail)
        except EngineDied:
            return None

    async def abort(self, answer_id: str) -> bool:
        """End an answer under way; what there is of it is its end. False if there is none of that id."""
        request_ids = self.running.get(answer_id, [])
        return any([await self.client.abort(request_id) for request_id in request_ids])


@dataclass(slots=True)
class Job:
    """One HTTP request for texts.

    Args:
        id: of the answer.
        route: for metrics.
        requests: one a prompt; all have the same ``n``.
        format: how the answer is written.
        stream: in events, or whole.
        include_usage: a stream ends with its usage.
        echo: texts begin with their prompts.
    """

    id: str
    route: str
    requests: Sequence[GenerateRequest]
    format: AnswerFormat
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    started: bool = field(default=False, init=False)  # a stream, when its status has been sent
    texts: list[Text] = field(init=False)
    echoes: list[Echo | None] = field(init=False)
    usages: list[Usage] = field(init=False)
    prompt_token_ids: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        num = len(self.requests)
        self.texts = [Text(index) for index in range(num * self.n)]
        self.echoes = [None] * num
        self.usages = [Usage(0, 0, 0)] * num
        self.prompt_token_ids = [()] * num

    @property
    def n(self) -> int:
        """Texts a prompt."""
        return self.requests[0].params.n

    @property
    def usage(self) -> Usage:
        """Of all prompts."""
        return Usage(
            sum(u.prompt_tokens for u in self.usages),
            sum(u.cached_tokens for u in self.usages),
            sum(u.completion_tokens for u in self.usages),
        )


async def answer(front: Front, job: Job, receive: Receive, send: Send) -> None:
    """Answer over ASGI. Before anything was sent, errors are raised, for the app to tell; later they end the stream."""
    start_s = time.monotonic()
    if front.draining:
        raise ApiError(503, "the server is ending", code="draining", headers={"retry-after": "5"})
    tickets = front.waiting.enter([_estimate_tokens(request) for request in job.requests], start_s)
    front.running[job.id] = [request.request_id for request in job.requests]
    front.metrics.in_flight.inc()
    outcome = "error"
    try:
        async with (
            sse.while_connected(receive, timeout_s=front.config.request_timeout_s),
            aclosing(_observed(front, job, tickets, start_s)) as updates,
        ):
            await (_stream if job.stream else _whole)(front, job, updates, send)
        outcome = job.texts[0].finish_reason or "error"
    except sse.ClientLeft:
        outcome = "left"
    except Exception as error:
        if not job.started:
            raise
        told = as_api_error(error)
        if told is None:
            logger.exception("the stream of %s broke off", job.id)
        front.metrics.refused.labels(told.status if told else 500).inc()
        await send({"type": "http.response.body", "body": sse.event((told or ApiError(500, "internal error")).body)})
    finally:
        for ticket in tickets:
            ticket.close()
        del front.running[job.id]
        front.metrics.in_flight.dec()
        front.metrics.requests.labels(job.route, outcome).inc()
        front.metrics.request_s.observe(time.monotonic() - start_s)
        seconds = round(time.monotonic() - start_s, 3)
        log(logger, "answered", answer_id=job.id, route=job.route, outcome=outcome, seconds=seconds)


async def _whole(front: Front, job: Job, updates: AsyncIterator[tuple[int, Update]], send: Send) -> None:
    parts: list[list[str]] = [[] for _ in job.texts]
    async for i, update in updates:
        await _note(front, job, i, update)
        for delta in update.deltas:
            parts[i * job.n + delta.index].append(delta.text)
    for text, pieces in zip(job.texts, parts, strict=True):
        text.text = "".join(pieces)
    echoes = [job.echoes[text.index // job.n] for text in job.texts]
    body = job.format.whole(job.texts, job.usage, echoes)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", job.id.encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(front: Front, job: Job, updates: AsyncIterator[tuple[int, Update]], send: Send) -> None:
    """Events as updates come. A client that reads slowly holds up `send`, and meanwhile updates merge."""
    unseen = set(range(len(job.requests)))
    early: list[bytes] = []
    async for i, update in updates:
        data = await _events(front, job, i, update)
        if not job.started:
            # A status can be sent once: only when every prompt has been accepted.
            unseen.discard(i)
            early.append(data)
            if unseen:
                continue
            headers = [*sse.HEADERS, (b"x-request-id", job.id.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            job.started = True
            data = b"".join(early)
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
    end = sse.event(job.format.usage_chunk(job.usage)) if job.include_usage else b""
    await send({"type": "http.response.body", "body": end + sse.DONE})


async def _events(front: Front, job: Job, i: int, update: Update) -> bytes:
    """What an update brings, as events. The first of a prompt's updates also begins its texts."""
    chunks: list[bytes | None] = []
    had_echo = job.echoes[i] is not None
    first = update.prompt_token_ids is not None
    await _note(front, job, i, update)
    echo = job.echoes[i]
    for text in job.texts[i * job.n : (i + 1) * job.n] if first or (echo and not had_echo) else ():
        if first:
            chunks.append(job.format.start(text.index))
        if echo is not None and not had_echo:
            chunks.append(job.format.echo(text.index, echo))
            text.num_chars = len(echo.text)
    for delta in update.deltas:
        text = job.texts[i * job.n + delta.index]
        chunks.append(job.format.chunk(text.index, delta, offset=text.num_chars))
        text.num_chars += len(delta.text)
    return b"".join([sse.event(chunk) for chunk in chunks if chunk is not None])


async def _note(front: Front, job: Job, i: int, update: Update) -> None:
    """Keep what the end of the answer needs of an update: usage, reasons, and all of it but text if it comes whole."""
    job.usages[i] = update.usage
    if update.prompt_token_ids is not None:
        job.prompt_token_ids[i] = update.prompt_token_ids
    if job.echo:
        wants_logprobs = job.requests[i].params.prompt_logprobs is not None
        if update.prompt_logprobs is not None if wants_logprobs else update.prompt_token_ids is not None:
            job.echoes[i] = await _echo(front.client, job, i, update)
    for delta in update.deltas:
        text = job.texts[i * job.n + delta.index]
        if not job.stream:
            text.token_ids += delta.token_ids
            text.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            text.finish_reason = delta.finish_reason


async def _echo(client: EngineClient, job: Job, i: int, update: Update) -> Echo:
    """The prompt as text, and its tokens by name if log-probabilities came."""
    ids, text = job.prompt_token_ids[i], job.requests[i].text
    if text is None:
        text = await client.detokenize(list(ids))
    if update.prompt_logprobs is None:
        return Echo(text)
    names: list[str] = []
    for token_id, entry in zip(ids, update.prompt_logprobs, strict=True):
        name = None if entry is None else entry[token_id].decoded_token
        names.append(await client.detokenize([token_id]) if name is None else name)
    return Echo(text, list(zip(ids, names, strict=True)), update.prompt_logprobs)


async def _observed(
    front: Front, job: Job, tickets: Sequence[Ticket], start_s: float
) -> AsyncGenerator[tuple[int, Update], None]:
    """The updates of all of a job's requests, each with its request's index; measured in passing. Closing it closes
    them, which aborts what has not ended."""
    metrics = front.metrics
    last_s: dict[int, float] = {}
    ended = 0
    async with aclosing(_updates(front.client, job.requests)) as updates:
        async for i, update in updates:
            if update.prompt_token_ids is not None:
                tickets[i].correct(len(update.prompt_token_ids))
            if update.deltas:
                now_s = time.monotonic()
                if i in last_s:
                    metrics.update_s.observe(now_s - last_s[i])
                else:
                    tickets[i].first_token(now_s)
                    metrics.first_token_s.observe(now_s - start_s)
                last_s[i] = now_s
            ended += update.timings is not None
            yield i, update
    if ended != len(job.requests):
        raise EngineDied("an answer broke off without an end")


def _updates(client: EngineClient, requests: Sequence[GenerateRequest]) -> AsyncGenerator[tuple[int, Update], None]:
    if len(requests) == 1:
        return _updates_of_one(client, requests[0])
    return _updates_of_many(client, requests)


async def _updates_of_one(client: EngineClient, request: GenerateRequest) -> AsyncGenerator[tuple[int, Update], None]:
    async with aclosing(client.generate(request)) as updates:
        async for update in updates:
            yield 0, update


async def _updates_of_many(
    client: EngineClient, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, Update], None]:
    """In the order in which they come. If one fails, all end."""
    iterators = [client.generate(request) for request in requests]
    pending = {asyncio.create_task(_next(iterator)): i for i, iterator in enumerate(iterators)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: pending[task]):
                update = task.result()
                i = pending.pop(task)
                if update is not None:
                    pending[asyncio.create_task(_next(iterators[i]))] = i
                    yield i, update
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for iterator in iterators:
            await iterator.aclose()


async def _next(iterator: AsyncIterator[Update]) -> Update | None:
    return await anext(iterator, None)


def _estimate_tokens(request: GenerateRequest) -> int:
    """Tokens of a prompt before it is encoded: about four characters each."""
    if request.token_ids is not None:
        return len(request.token_ids)
    num_chars = len(request.text or "") + sum(len(str(m["content"])) for m in request.messages or ())
    return num_chars // 4 + 1
