"""`create_app`: the routes, their true description, and the door in front of them.

Chapter 1 tells this module's story. A route checks what it is asked and says what it means to the engine; everything
that takes time is in `front.answer`. The admin's routes are in the same app if it listens where only admins come, or
has a key for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal
from uuid import uuid4

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import minisgl
from minisgl.server.answers import ChatAnswer, ChatChunk, ChatFormat, CompletionAnswer, CompletionFormat, Head
from minisgl.server.client import EngineClient, EngineDied, EngineStats, RequestRefused
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError, ErrorBody, as_api_error
from minisgl.server.front import Front, Job, answer
from minisgl.server.live import add_page
from minisgl.server.openai_api import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    chat_request,
    check_model,
    check_token_ids,
    completion_requests,
    tokenize_request,
)
from minisgl.server.security import Door

ADMIN_PATHS = ("/flush_cache", "/abort", "/live")


class ModelCard(msgspec.Struct):
    """A model that can be asked."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "minisgl"


class ModelList(msgspec.Struct):
    """All models that can be asked: the one."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct):
    """A prompt's tokens."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class State(msgspec.Struct):
    """``status`` is "ok", or why not."""

    status: str


class Flushed(msgspec.Struct):
    """How many pages came free."""

    num_pages: int


class Aborted(msgspec.Struct):
    """Whether there was anything to abort."""

    aborted: bool


_SHAPES = (
    ChatAnswer, ChatChunk, CompletionAnswer, ModelList, ModelCard, Tokens, Detokenized, State, Flushed, Aborted,
    EngineStats, ErrorBody,
)  # fmt: skip


class _Json(Response):
    """A value as JSON, by msgspec."""

    media_type = "application/json"

    def __init__(self, value: Any, status_code: int = 200) -> None:
        super().__init__(msgspec.json.encode(value), status_code)


class _Answer(Response):
    """A `Job`'s answer, which writes itself."""

    def __init__(self, front: Front, job: Job) -> None:
        super().__init__()
        self._front, self._job = front, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(self._front, self._job, receive, send)


def create_app(
    client: EngineClient, config: ServerConfig, *, admin: bool = False, front: Front | None = None
) -> FastAPI:
    """The app that answers for ``client``.

    ``admin``: it listens where only admins come, so that their routes are there, behind whatever keys there are;
    otherwise they are there only with an ``admin_key``. ``front``: shared with another app; None makes one.
    """
    front = Front(client, config) if front is None else front
    with_admin = admin or config.admin_key is not None
    keys = {key for key in (config.api_key, config.admin_key) if key is not None and config.needs_key}
    app = FastAPI(
        title="minisgl",
        version=minisgl.__version__,
        description="Completions and chats in OpenAI's format, and what a server of them needs.",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_texts(app, front)
    _add_tokens(app, front)
    _add_operation(app, front)
    if with_admin:
        _add_admin(app, front)
        add_page(app)
    _add_errors(app, front)
    _describe(app, needs_key=bool(keys) or config.admin_key is not None)
    app.add_middleware(
        Door,
        keys=keys,
        restricted_paths=ADMIN_PATHS,
        restricted_keys=keys if config.admin_key is None else {config.admin_key},
        allowed_hosts=(config.host, *config.allowed_hosts),
        allowed_origins=config.allowed_origins,
        max_body_bytes=config.max_body_bytes,
    )
    return app


def _ref(shape: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}


def _responses(shape: type, *, stream: bool = False, also: Mapping[int, type] | None = None) -> dict[Any, Any]:
    content: dict[str, Any] = {"application/json": _ref(shape)}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers: dict[Any, Any] = {200: {"description": shape.__doc__, "content": content}}
    for status, other in (also or {}).items():
        answers[status] = {"description": other.__doc__, "content": {"application/json": _ref(other)}}
    answers["default"] = {"description": ErrorBody.__doc__, "content": {"application/json": _ref(ErrorBody)}}
    return answers


def _add_texts(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", responses=_responses(CompletionAnswer, stream=True))
    async def completions(body: CompletionRequest) -> Response:
        """Go on with texts."""
        check_model(body.model, front.client.info)
        answer_id = f"cmpl-{uuid4().hex}"
        head = Head(answer_id, int(time.time()), front.client.info.name)
        return _Answer(
            front,
            Job(
                answer_id,
                "completions",
                completion_requests(body, front.client.info, answer_id),
                CompletionFormat(head, include_usage=body.include_usage),
                stream=bool(body.stream),
                include_usage=body.include_usage,
                echo=bool(body.echo),
            ),
        )

    @app.post("/v1/chat/completions", responses=_responses(ChatAnswer, stream=True))
    async def chat_completions(body: ChatRequest) -> Response:
        """Answer a conversation."""
        check_model(body.model, front.client.info)
        answer_id = f"chatcmpl-{uuid4().hex}"
        head = Head(answer_id, int(time.time()), front.client.info.name)
        return _Answer(
            front,
            Job(
                answer_id,
                "chat",
                [chat_request(body, front.client.info, answer_id)],
                ChatFormat(head, include_usage=body.include_usage, num_top=body.top_logprobs or 0),
                stream=bool(body.stream),
                include_usage=body.include_usage,
            ),
        )


def _add_tokens(app: FastAPI, front: Front) -> None:
    client, started = front.client, int(time.time())

    def card() -> ModelCard:
        return ModelCard(client.info.name, started, client.info.max_model_len)

    @app.get("/v1/models", responses=_responses(ModelList))
    async def models() -> Response:
        """The models."""
        return _Json(ModelList([card()]))

    @app.get("/v1/models/{model:path}", responses=_responses(ModelCard))
    async def model(model: str) -> Response:
        """One model."""
        check_model(model, client.info)
        return _Json(card())

    @app.post("/tokenize", responses=_responses(Tokens))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a prompt, or of messages in the chat template."""
        check_model(body.model, client.info)
        tokens = await client.tokenize(tokenize_request(body, f"tok-{uuid4().hex}"))
        return _Json(Tokens(tokens, len(tokens), client.info.max_model_len))

    @app.post("/detokenize", responses=_responses(Detokenized))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens."""
        check_model(body.model, client.info)
        if len(body.tokens) > client.info.max_model_len:
            most = client.info.max_model_len
            raise ApiError(400, f"tokens: at most {most}, the model's context, got {len(body.tokens)}", param="tokens")
        check_token_ids(body.tokens, client.info, param="tokens")
        return _Json(Detokenized(await client.detokenize(body.tokens)))


def _add_operation(app: FastAPI, front: Front) -> None:
    @app.get("/health", responses=_responses(State))
    async def health() -> Response:
        """Whether the front is alive; it says nothing of the engine."""
        return _Json(State("ok"))

    @app.get("/ready", responses=_responses(State, also={503: State}))
    async def ready() -> Response:
        """Whether the engine answers: a first request with a known answer has passed, and its loop turns."""
        problem = front.not_ready
        return _Json(State(problem or "ok"), 200 if problem is None else 503)

    responses = _responses(State)
    responses[200] = {"description": "Prometheus' format", "content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", responses=responses, response_class=Response)
    async def metrics() -> Response:
        """Counts and times for Prometheus."""
        body = front.metrics.render(await front.stats())
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_admin(app: FastAPI, front: Front) -> None:
    @app.post("/flush_cache", responses=_responses(Flushed))
    async def flush_cache() -> Response:
        """Forget cached prefixes that nobody uses."""
        return _Json(Flushed(await front.client.flush_cache()))

    @app.post("/abort", responses=_responses(Aborted))
    async def abort(body: AbortRequest) -> Response:
        """End an answer; its client gets what there is of it, with finish reason "abort"."""
        return _Json(Aborted(await front.abort(body.request_id)))

    @app.get("/live", responses=_responses(EngineStats))
    async def live() -> Response:
        """The running batch, the pages and the radix tree at this moment."""
        stats = await front.stats(detail=True)
        if stats is None:
            raise EngineDied(front.client.failure or "it is starting")
        return _Json(stats)


def _add_errors(app: FastAPI, front: Front) -> None:
    """Every error in OpenAI's shape."""

    def tell(error: ApiError) -> Response:
        front.metrics.refused.labels(error.status).inc()
        return Response(error.body, error.status, headers=error.headers, media_type="application/json")

    async def known(_: Request, error: Exception) -> Response:
        # What is unknown is a bug: logged with its stack, and kept from clients, who might learn secrets from it.
        return tell(as_api_error(error) or ApiError(500, "internal error"))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return tell(ApiError(400, f"body: not JSON, from position {first['loc'][1]} on: {first['ctx']['error']}"))
        if first["loc"] == ("body",) and first["type"] != "missing":
            # Without the header that says so, which some clients forget, even JSON is but bytes.
            return tell(ApiError(400, "body: must be a JSON object, sent with Content-Type: application/json"))
        # A place is body, field, then positions and names below it, among them the types that a union tried.
        problems = [
            (".".join(str(part) for part in each["loc"][1:] if part != "str" and "[" not in str(part)), each["msg"])
            for each in error.errors()
        ]
        text = "; ".join(f"{where or 'body'}: {what}" for where, what in dict.fromkeys(problems[:6]))
        return tell(ApiError(400, text, param=problems[0][0].split(".")[0] or None))

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return tell(ApiError(error.status_code, str(error.detail), headers=error.headers))

    for kind in (ApiError, EngineDied, RequestRefused, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _describe(app: FastAPI, *, needs_key: bool) -> None:
    """Complete the OpenAPI description with the answers' shapes, which FastAPI does not see."""
    made_by_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made_by_fastapi()
            components = schema.setdefault("components", {})
            _, shapes = msgspec.json.schema_components(_SHAPES, ref_template="#/components/schemas/{name}")
            components.setdefault("schemas", {}).update(shapes)
            if needs_key:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
