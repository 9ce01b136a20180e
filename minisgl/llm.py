"""`LLM`: the library's front door. It owns an engine, a tokenizer, and the texts in the making.

Chapter 1 tells this module's story. Whoever waits for an answer drives the engine: `generate`, `stream` and
`async_generate` take turns, find out whether their own answer has grown, and if not make one step for all.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.config import EngineConfig
from minisgl.engine.core import EngineCore
from minisgl.launch import load_engine
from minisgl.request import RequestOutput, SamplingParams
from minisgl.server import OutputAssembler
from minisgl.utils import Int32Array, as_token_ids

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_PROMPTS_A_TURN = 64  # that enter together: between turns Ctrl-C is heard, and others make steps


@dataclass(slots=True, eq=False)
class _Watch:
    """Some prompts that one caller waits for; written in turns only."""

    num_unfinished: int
    has_grown: bool = False


class LLM:
    """A model that answers prompts.

    Args:
        model: "tiny" (the bundled model), a folder, or a hub id.
        options: the other fields of `minisgl.config.EngineConfig`.

    Attributes:
        tokenizer: the model's `Tokenizer`.
        config: the model's `ModelConfig`.
        engine_config: what was asked for.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an option out of its range, or a model that cannot be loaded.
    """

    def __init__(self, model: str | os.PathLike[str] = "tiny", **options: Any) -> None:
        self.engine_config = EngineConfig(model=model, **options)  # type: ignore[arg-type]  # a path becomes a string
        loaded = load_engine(self.engine_config, progress=sys.stderr.isatty())
        self._engine: EngineCore | None = loaded.core
        self.tokenizer = loaded.tokenizer
        self.config = loaded.model_config
        self._assembler = OutputAssembler(self.tokenizer)
        self._watches: dict[str, _Watch] = {}  # by id of a prompt that somebody waits for
        self._cancelled: deque[str] = deque()  # ids of prompts that nobody waits for any more
        self._ids = itertools.count()
        self._lock = threading.Lock()

    @property
    def engine(self) -> EngineCore:
        """The engine; its scheduler, KV manager and runner can be looked at. Raises ``RuntimeError`` after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

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
            use_tqdm: show progress on a terminal if it takes longer than two seconds.

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
        if not isinstance(messages, Iterable) or isinstance(messages, (str, bytes, Mapping)):
            raise ValueError(f"messages must be one conversation or a list of them, got {type(messages).__name__}")
        messages = list(messages)
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
        request_id, watch = self._new_id(), _Watch(num_unfinished=1)
        try:
            self._submit([(request_id, prompt, ids, params)], watch)
            while (output := self._next_output(request_id, watch)) is not None:
                yield output
        finally:
            self._cancelled.append(request_id)  # one call, so that Ctrl-C cannot come between
            self._forget_cancelled()

    def async_generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """The same as an asynchronous iterator. Any number may run at once: they share the engine's steps."""
        return self._async_stream(prompt, *self._check_one(prompt, params))

    async def _async_stream(
        self, prompt: Prompt, ids: Int32Array, params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        request_id, watch = self._new_id(), _Watch(num_unfinished=1)
        try:
            self._submit([(request_id, prompt, ids, params)], watch)
            while (output := await asyncio.to_thread(self._next_output, request_id, watch)) is not None:
                yield output
        finally:
            self._cancelled.append(request_id)  # one call, so that Ctrl-C cannot come between
            self._forget_cancelled()

    # ------------------------------------------------------------------------------------------------ checking

    def _encode(self, prompt: Prompt) -> Int32Array:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)

    def _check(self, prompt_token_ids: Int32Array, params: SamplingParams) -> None:
        self.engine.scheduler.check_prompt(len(prompt_token_ids))
        highest = int(prompt_token_ids.max())
        if highest >= self.config.vocab_size:
            raise ValueError(f"token id {highest} is outside the vocabulary 0..{self.config.vocab_size - 1}")
        params.check_vocabulary(self.config.vocab_size)

    # ------------------------------------------------------------------------------------------------ working

    def _run(
        self, ids: list[Int32Array], prompts: Sequence[Any], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        for prompt_token_ids, p in zip(ids, params, strict=True):
            self._check(prompt_token_ids, p)
        request_ids, watch = [self._new_id() for _ in ids], _Watch(num_unfinished=len(ids))
        # Shown on a terminal, and only when it takes a while.
        with tqdm(total=len(ids), desc="prompts", disable=None if use_tqdm else True, delay=2) as bar:
            try:
                entries = zip(request_ids, prompts, ids, params, strict=True)
                while some := list(itertools.islice(entries, _PROMPTS_A_TURN)):
                    self._submit(some, watch)
                while watch.num_unfinished:
                    with self._turn() as engine:
                        if watch.num_unfinished:
                            self._step(engine)
                    num_ended = len(ids) - watch.num_unfinished - bar.n
                    if num_ended:
                        bar.update(num_ended)
                with self._turn():
                    return [self._assembler.output(request_id) for request_id in request_ids]
            finally:
                self._cancelled.extend(request_ids)
                self._forget_cancelled()

    def _check_one(self, prompt: Prompt, params: SamplingParams | None) -> tuple[Int32Array, SamplingParams]:
        ids, params = self._encode(prompt), _one_for_each(params, 1)[0]
        self._check(ids, params)
        return ids, params

    def _new_id(self) -> str:
        return str(next(self._ids))

    def _submit(self, entries: Iterable[tuple[str, Any, Int32Array, SamplingParams]], watch: _Watch) -> None:
        """Ids, prompts, their tokens and parameters, in one turn."""
        with self._turn() as engine:
            for request_id, prompt, prompt_token_ids, params in entries:
                text = prompt if isinstance(prompt, str) else None
                self._watches[request_id] = watch
                children = self._assembler.add(request_id, text, prompt_token_ids, params, arrival_s=engine.now())
                for child_id, child_params in children:
                    engine.add(child_id, prompt_token_ids, child_params)

    def _next_output(self, request_id: str, watch: _Watch) -> RequestOutput | None:
        """The prompt's output once it has grown; None if it had ended before, or nobody waits for it any more."""
        while watch.has_grown or watch.num_unfinished:
            with self._turn() as engine:
                if watch.num_unfinished and not watch.has_grown:
                    self._step(engine)
                if watch.has_grown:  # by this step, or by somebody else's before
                    watch.has_grown = False
                    return self._assembler.output(request_id)
        return None

    def _step(self, engine: EngineCore) -> None:
        step = engine.step()
        if step is None:
            return
        changes = self._assembler.process(step)
        ends = [engine.abort(child, reason="stop", stop_reason=stop) for child, stop in changes.stopped]
        ended = self._assembler.end(end for end in ends if end is not None)
        for request_id in changes.grown:
            self._watches[request_id].has_grown = True
        for request_id in (*changes.finished, *ended.finished):
            self._watches[request_id].num_unfinished -= 1

    def _forget_cancelled(self) -> None:
        """Forget the prompts in ``_cancelled``, ended or not. Never waits, since the garbage collector may close a
        stream while this very thread is in its turn: whoever has the turn sees to it when it ends."""
        if not self._cancelled:
            return  # as after most steps
        with _interrupts_deferred():
            while self._cancelled and self._lock.acquire(blocking=False):
                try:
                    self._forget(self._engine)
                finally:
                    self._lock.release()

    def _forget(self, engine: EngineCore | None) -> None:
        while self._cancelled:
            request_id = self._cancelled.popleft()
            watch = self._watches.pop(request_id, None)
            if watch is not None:
                watch.num_unfinished, watch.has_grown = 0, False
            for child in self._assembler.forget(request_id):
                if engine is not None:
                    engine.abort(child)
        # When nobody waits any more, the engine finishes what it has launched.
        while engine is not None and not self._watches and engine.has_work and engine.failure is None:
            engine.step()

    @contextmanager
    def _turn(self) -> Iterator[EngineCore]:
        """The engine, for one caller at a time. Ctrl-C waits for the end of the turn: no step is torn in two."""
        with _interrupts_deferred():
            try:
                with self._lock:
                    yield self.engine
            finally:
                self._forget_cancelled()

    # ------------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """End what is running and give weights, KV and graphs back. A second call does nothing."""
        with _interrupts_deferred(), self._lock:
            if self._engine is None:
                return
            device = self._engine.runner.table.device
            if self._engine.recorder is not None:
                self._engine.recorder.close()
            self._engine = None
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
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping)):
        raise ValueError(f"prompts must be texts or lists of token ids, got {type(prompts).__name__}")
    prompts = prompts.tolist() if isinstance(prompts, np.ndarray) else list(prompts)
    if not isinstance(prompts, list):  # an array without dimensions
        raise ValueError(f"prompts must be texts or lists of token ids, got {prompts!r}")
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
    params = list(params) if isinstance(params, Iterable) else [params]
    if len(params) != count or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(f"params must be one SamplingParams or one for each of the {count} prompts, got {len(params)}")
    return params


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done. A second Ctrl-C does not wait."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield  # signals go to the main thread, if anybody there wants to know
        return
    is_pending = False

    def remember(number: int, frame: Any) -> None:
        nonlocal is_pending
        if is_pending:
            previous(number, frame)
        is_pending = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if is_pending:
            signal.raise_signal(signal.SIGINT)
