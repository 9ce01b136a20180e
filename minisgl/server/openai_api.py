"""What clients may ask for: OpenAI's request bodies, checked, and what they mean to an engine.

Chapter 1 tells this module's story. A field is honoured, or refused by name, or stands in a list of fields that change
nothing: none is ignored in silence. Values are checked where they are known: types here, ranges in `SamplingParams`,
lengths in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from minisgl.request import SamplingParams
from minisgl.server.chat import ROLES, check_messages, check_tools
from minisgl.server.client import GenerateRequest, ModelInfo
from minisgl.server.errors import ApiError

MAX_PROMPTS = 256  # in one body; each takes a row or waits for one

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Prompt = str | list[TokenId]
_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
         "required": ["type", "text"]}  # fmt: skip
# Checked by `check_messages`, which templates rely on in every door; here it is only described.
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {
                    "description": "Text, or text parts. Only an assistant's may be missing, next to tool_calls.",
                    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}],
                },
            },
            "required": ["role"],
        }
    ),
]
Ignored = Annotated[Any, Field(default=None, description="Accepted, and changes nothing.")]
Unsupported = Annotated[Any, Field(default=None, description="Not supported: anything but the default is refused.")]

# Fields that OpenAI's clients know and this engine does not, with the values that ask for what happens anyway.
# A field that is not even here is refused as unknown.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = Field(False, description="A last chunk without choices tells the usage.")
    include_obfuscation: Ignored


class _Sampling(BaseModel):
    """The fields that both routes share. Ranges are those of `SamplingParams`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = Field(None, description="A name that /v1/models lists; the served model if left out.")
    temperature: float | None = Field(None, ge=0, description="0: the most likely token; default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, description="Token id -> number in -100..100.")
    allowed_token_ids: list[TokenId] | None = None
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, description="Default: the rest of the context, to which it is cut.")
    min_tokens: int | None = Field(None, ge=0)
    stop: str | list[str] | None = Field(None, description="At most 16 strings that end the text and are cut off it.")
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Lower is preempted first.")
    cache_salt: str | None = Field(None, description="Cached prefixes are shared only among equal salts.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored
    prompt_cache_retention: Ignored

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Sampling):
    """Body of ``/v1/completions``: texts to go on with."""

    prompt: Prompt | list[Prompt] = Field(description="A text, its token ids, or a list of either.")
    echo: bool | None = Field(None, description="The answer starts with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Also the log-probabilities of this many tokens.")
    best_of: Unsupported
    suffix: Unsupported
    response_format: Unsupported


class ChatRequest(_Sampling):
    """Body of ``/v1/chat/completions``: a conversation to answer."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(None, description="Told to the model by its chat template.")
    tool_choice: Any = Field(None, description="'auto', or 'none' to hide the tools; a forced choice is refused.")
    audio: Unsupported
    function_call: Unsupported
    functions: Unsupported
    modalities: Unsupported
    parallel_tool_calls: Unsupported
    prediction: Unsupported
    reasoning_effort: Unsupported
    response_format: Unsupported
    verbosity: Unsupported
    web_search_options: Unsupported


class TokenizeRequest(BaseModel):
    """Body of ``/tokenize``: a prompt, or messages for the chat template."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(BaseModel):
    """Body of ``/detokenize``: token ids, at most as many as the model's context holds."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: list[TokenId]


class AbortRequest(BaseModel):
    """Body of ``/abort``: the ``id`` of an answer, as its chunks name it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_id: str


def check_model(name: str | None, info: ModelInfo) -> None:
    """Raise `ApiError` 404 unless ``name`` is the served model, or None."""
    if name is not None and name != info.name:
        raise ApiError(
            404, f"the model {name!r} does not exist; served is {info.name!r}", param="model", code="model_not_found"
        )


def completion_requests(body: CompletionRequest, info: ModelInfo, request_id: str) -> list[GenerateRequest]:
    """What to generate, a request a prompt. Raises `ApiError` for what is wrong with the body."""
    _refuse_unsupported(body)
    prompts = _prompts(body.prompt, info)
    prompt_logprobs = body.logprobs if body.echo else None
    params = _sampling_params(body, info, max_tokens=body.max_tokens, logprobs=body.logprobs, echoed=prompt_logprobs)
    return [
        GenerateRequest(
            request_id if len(prompts) == 1 else f"{request_id}-{i}",
            params,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
        )
        for i, prompt in enumerate(prompts)
    ]


def chat_request(body: ChatRequest, info: ModelInfo, request_id: str) -> GenerateRequest:
    """What to generate. Raises `ApiError` for what is wrong with the body."""
    _refuse_unsupported(body)
    if body.tool_choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice: a forced choice is not supported; use 'auto' or 'none'", param="tool_choice")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens are one option and differ", param="max_tokens")
    try:
        messages, tools = check_messages(body.messages), check_tools(body.tools)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    params = _sampling_params(body, info, max_tokens=most, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    return GenerateRequest(request_id, params, messages=messages, tools=None if body.tool_choice == "none" else tools)


def tokenize_request(body: TokenizeRequest, request_id: str) -> GenerateRequest:
    """What to tokenize. Raises `ApiError` unless there is exactly one of prompt and messages."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt")
    if body.tools is not None and body.messages is None:
        raise ApiError(400, "tools need messages", param="tools")
    try:
        messages = None if body.messages is None else check_messages(body.messages)
        tools = check_tools(body.tools)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    return GenerateRequest(request_id, SamplingParams(max_tokens=1), text=body.prompt, messages=messages, tools=tools)


def check_token_ids(token_ids: Sequence[int], info: ModelInfo, *, param: str) -> None:
    """Raise `ApiError` 400 if an id is outside the vocabulary."""
    if token_ids and max(token_ids) >= info.vocab_size:
        raise ApiError(
            400, f"{param}: token id {max(token_ids)} is outside the vocabulary 0..{info.vocab_size - 1}", param=param
        )


def _refuse_unsupported(body: BaseModel) -> None:
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        # By type too: 1 == True.
        if value is not None and not any(type(value) is type(like) and value == like for like in neutral):
            allowed = " or ".join(repr(like) for like in neutral)
            hint = f"; leave it out{f' or send {allowed}' if allowed else ''}"
            raise ApiError(400, f"{name} is not supported{hint}", param=name, code="unsupported_parameter")


def _prompts(prompt: Prompt | list[Prompt], info: ModelInfo) -> list[Prompt]:
    """The prompts of a body, whichever of its forms it took."""
    one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    prompts: list[Any] = [prompt] if one else list(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}", param="prompt")
    for each in prompts:
        if not each:
            raise ApiError(400, "prompt must not be empty", param="prompt")
        if isinstance(each, list):
            check_token_ids(each, info, param="prompt")
            if len(each) >= info.max_model_len:
                raise ApiError(
                    400,
                    f"the prompt has {len(each)} tokens and leaves no room for an answer: this model's context is "
                    f"{info.max_model_len} tokens",
                    param="prompt",
                    code="context_length_exceeded",
                )
    return prompts


_SHARED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "seed", "n", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "priority", "cache_salt",
)  # fmt: skip


def _sampling_params(
    body: _Sampling, info: ModelInfo, *, max_tokens: int | None, logprobs: int | None, echoed: int | None = None
) -> SamplingParams:
    # Null means the default, as it does with OpenAI.
    given = {name: getattr(body, name) for name in _SHARED if getattr(body, name) is not None}
    try:
        params = SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=echoed)
        params.check_vocabulary(info.vocab_size)
    except ValueError as error:
        name = str(error).split(maxsplit=1)[0].rstrip(":")
        raise ApiError(400, str(error), param=name if name in type(body).model_fields else None) from error
    return params
