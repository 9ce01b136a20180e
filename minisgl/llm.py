"""`LLM`: the library's front door. It owns an engine, a tokenizer, and the texts in the making.

Chapter 1 tells this module's story. Whoever waits for an answer drives the engine: `generate`, `stream` and
`async_generate` all take the same lock, find out whether their own answer has grown, and if not make one step for all.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from minisgl.config import EngineConfig
from minisgl.launch import load_engine
from minisgl.request import RequestOutput, SamplingParams
from minisgl.server import OutputAssembler
from minisgl.utils import Int32Array, as_token_ids

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Watch:
    """Some prompts that one caller waits for."""

    num_unfinished: int
    has_grown: bool = False


class LLM:
    """A model that answers prompts.

    Args:
        model: "tiny" (the bundled model), a folder, or a hub id.
        options: the other fields of `minisgl.config.EngineConfig`.

    Attributes:
        engine: the `EngineCore`; its scheduler, KV manager and runner can be looked at.
        tokenizer: the model's `Tokenizer`.
        config: the model's `ModelConfig`.
        engine_config: what was asked for.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an option out of its range, or a model that cannot be loaded.
    """

    def __init__(self, model: str = "tiny", **options: Any) -> None:
        self.engine_config = EngineConfig(model=str(model), **options)
        loaded = load_engine(self.engine_config)
        self.engine = loaded.core
        self.tokenizer = loaded.tokenizer
        self.config = loaded.model_config
        self._assembler = OutputAssembler(self.tokenizer)
        self._watches: dict[str, _Watch] = {}  # by id of a prompt that has not ended
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    # ------------------------------------------------------------------------------------------------ asking

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, all together.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all, or one for each prompt; None: the defaults.
            use_tqdm: show progress if it takes longer than a second or two.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt or its parameters cannot be served; nothing has been computed then.
        """
        prompts = _list_of_prompts(prompts)
        return self._run([self._encode(p) for p in prompts], prompts, _one_for_each(params, len(prompts)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them: `generate` behind the model's chat template.

        Args:
            messages: dicts with ``role`` and ``content``.
            tools: descriptions in OpenAI's format, for the template.
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        texts = [self.tokenizer.render_chat(c, tools=tools) for c in conversations]
        ids = [self.tokenizer.encode_chat(c, tools=tools) for c in conversations]
        return self._run(ids, texts, _one_for_each(params, len(ids)), use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt; yields its output each time that it has grown, last the finished one. Closing the iterator
        cancels the request. Raises ``ValueError`` as `generate` does, at the call."""
        return self._stream(prompt, *self._check_one(prompt, params))

    def _stream(self, prompt: Prompt, ids: Int32Array, params: SamplingParams) -> Iterator[RequestOutput]:
        watch = _Watch(num_unfinished=1)
        request_id = self._submit(prompt, ids, params, watch)
        try:
            while (output := self._next_output(request_id, watch)) is not None:
                yield output
        finally:
            self._cancel([request_id])

    def async_generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """The same as an asynchronous iterator. Any number may run at once: they share the engine's steps."""
        return self._async_stream(prompt, *self._check_one(prompt, params))

    async def _async_stream(
        self, prompt: Prompt, ids: Int32Array, params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        watch = _Watch(num_unfinished=1)
        request_id = self._submit(prompt, ids, params, watch)
        try:
            while (output := await asyncio.to_thread(self._next_output, request_id, watch)) is not None:
                yield output
        finally:
            self._cancel([request_id])

    # ------------------------------------------------------------------------------------------------ checking

    def _encode(self, prompt: Prompt) -> Int32Array:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)

    def _check(self, prompt_token_ids: Int32Array, params: SamplingParams) -> None:
        self.engine.scheduler.check_prompt(len(prompt_token_ids))
        highest = int(prompt_token_ids.max())
        if highest >= self.config.vocab_size:
            raise ValueError(f"token id {highest} is outside the vocabulary 0..{self.config.vocab_size - 1}")
        params.check_vocabulary(self.config.vocab_size)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed")

    # ------------------------------------------------------------------------------------------------ working

    def _run(
        self, ids: list[Int32Array], prompts: Sequence[Any], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        self._check_open()
        for prompt_token_ids, p in zip(ids, params, strict=True):
            self._check(prompt_token_ids, p)
        watch = _Watch(num_unfinished=len(ids))
        request_ids: list[str] = []
        with tqdm(total=len(ids), desc="prompts", disable=not use_tqdm, delay=2) as bar:
            try:
                for prompt, prompt_token_ids, p in zip(prompts, ids, params, strict=True):
                    request_ids.append(self._submit(prompt, prompt_token_ids, p, watch))
                while watch.num_unfinished:
                    watch.has_grown = False
                    self._advance(watch)
                    bar.update(len(ids) - watch.num_unfinished - bar.n)
                with self._lock:
                    return [self._assembler.pop(request_id) for request_id in request_ids]
            finally:
                self._cancel(request_ids)

    def _check_one(self, prompt: Prompt, params: SamplingParams | None) -> tuple[Int32Array, SamplingParams]:
        self._check_open()
        ids, params = self._encode(prompt), _one_for_each(params, 1)[0]
        self._check(ids, params)
        return ids, params

    def _submit(self, prompt: Any, prompt_token_ids: Int32Array, params: SamplingParams, watch: _Watch) -> str:
        with self._lock:
            request_id = str(next(self._ids))
            children = self._assembler.add(
                request_id,
                prompt if isinstance(prompt, str) else None,
                prompt_token_ids,
                params,
                arrival_s=self.engine.now(),
            )
            self._watches[request_id] = watch
            for child_id, child_params in children:
                self.engine.add(child_id, prompt_token_ids, child_params)
        return request_id

    def _next_output(self, request_id: str, watch: _Watch) -> RequestOutput | None:
        """The prompt's output once it has grown; None if it had ended before."""
        if watch.num_unfinished == 0 and not watch.has_grown:
            return None
        while not watch.has_grown:
            self._advance(watch)
        with self._lock:
            watch.has_grown = False
            return self._assembler.output(request_id)

    def _advance(self, watch: _Watch) -> None:
        """Make one step, unless somebody else's step has brought what ``watch`` waits for."""
        with self._lock, _interrupts_deferred():
            self._check_open()
            if not watch.has_grown and watch.num_unfinished:
                self._step()

    def _step(self) -> None:
        step = self.engine.step()
        if step is None:
            return
        changes = self._assembler.process(step)
        ends = [self.engine.abort(child, reason="stop", stop_reason=stop) for child, stop in changes.stopped]
        ended = self._assembler.end(end for end in ends if end is not None)
        for request_id in changes.grown:
            if request_id in self._watches:
                self._watches[request_id].has_grown = True
        for request_id in (*changes.finished, *ended.finished):
            self._watches.pop(request_id).num_unfinished -= 1

    def _cancel(self, request_ids: Sequence[str]) -> None:
        """Forget these prompts, ended or not, and when nobody waits any more let the engine finish what it launched."""
        with self._lock, _interrupts_deferred():
            if self._closed:
                return
            for request_id in request_ids:
                self._watches.pop(request_id, None)
                for child in self._assembler.forget(request_id):
                    self.engine.abort(child)
            while not self._watches and self.engine.has_work and self.engine.failure is None:
                self.engine.step()

    # ------------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """End what is running and give weights, KV and graphs back. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._watches.clear()
            device = self.engine.runner.table.device
            del self.engine
        if device.type == "cuda":
            import torch  # this module needs it for nothing else

            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _list_of_prompts(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of many."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if prompts and all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in prompts):
        return [prompts]
    for prompt in prompts:
        if not isinstance(prompt, (str, Sequence, np.ndarray)):
            raise ValueError(f"a prompt must be a text or a list of token ids, got {type(prompt).__name__}")
    return prompts


def _one_for_each(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    params = list(params)
    if len(params) != count or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(f"params must be one SamplingParams or one for each of the {count} prompts, got {len(params)}")
    return params


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done, so that no step is torn in two. A second Ctrl-C does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[Any] = []

    def remember(number: int, frame: Any) -> None:
        if pending:
            signal.default_int_handler(number, frame)
        pending.append(number)

    try:
        previous = signal.signal(signal.SIGINT, remember)
    except ValueError:  # an embedding that does not let us
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt
