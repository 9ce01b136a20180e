"""The worker between front and engine: text to token ids on the way in, token ids to text on the way back.

Chapter 1 tells this module's story. `TextWorker` takes messages and gives messages; whoever owns it carries them, be it
over sockets (`run_worker`) or within one process. It owns the tokenizer and the texts in the making; it has no threads,
and no torch.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from minisgl.request import SamplingParams
from minisgl.server.assembly import OutputAssembler
from minisgl.server.client import GenerateRequest, ModelInfo
from minisgl.server.tokenizer import Tokenizer
from minisgl.server.wire import (
    Abort,
    Add,
    Call,
    Detokenize,
    End,
    Error,
    FromEngine,
    FromFront,
    Message,
    News,
    Receiver,
    Reply,
    Seen,
    Sender,
    Started,
    Step,
    Submit,
    Tokenize,
)
from minisgl.utils import Int32Array, as_token_ids

logger = logging.getLogger(__name__)


class TextWorker:
    """Turns requests of the front into requests of the engine, and steps of the engine into news for the front.

    Invariant: each `Submit` is answered by exactly one `Error`, or by news of which exactly one, the last, has timings.
    What one request brings about, be it a template that raises, is that request's error alone.

    Args:
        tokenizer: the model's.
        to_front, to_engine: called with each message that leaves.
        clock: seconds; the engine's clock.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        to_front: Callable[[Message], None],
        to_engine: Callable[[Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._to_front = to_front
        self._to_engine = to_engine
        self._clock = clock
        self._assembler = OutputAssembler(tokenizer)
        self._prompt_of: dict[str, str] = {}  # engine request that has not ended -> its prompt
        self._changed: dict[str, None] = {}  # prompts with news, in order
        self._info: ModelInfo | None = None

    def __len__(self) -> int:
        return len(self._assembler)

    def on_front(self, message: FromFront) -> None:
        """Take a message of the front."""
        if isinstance(message, Submit):
            self._answer(message.request.request_id, lambda: self._submit(message.request))
        elif isinstance(message, Abort):
            for child in self._assembler.unfinished(message.request_id):
                self._to_engine(End(child, "abort"))
        elif isinstance(message, Tokenize):
            self._answer(message.call_id, lambda: self._reply(message.call_id, self._encode(message.request).tolist()))
        elif isinstance(message, Detokenize):
            self._answer(
                message.call_id, lambda: self._reply(message.call_id, self._tokenizer.decode(message.token_ids))
            )
        elif isinstance(message, Call):
            self._to_engine(message)

    def on_engine(self, message: FromEngine) -> None:
        """Take a message of the engine."""
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, Error):
            self._refused(message)
        elif isinstance(message, Started):
            self._info = message.info
            info = ModelInfo(
                message.info.name,
                message.info.max_model_len,
                message.info.vocab_size,
                self._tokenizer.has_chat_template,
            )
            self._to_front(Started(info, message.golden))
        elif not isinstance(message, Seen):
            self._to_front(message)  # an answer or a heartbeat on its way

    def tell(self) -> None:
        """Send the front all news. Who calls it more seldom sends less: news of a request join."""
        if not self._changed:
            return
        updates = tuple(self._assembler.take(request_id) for request_id in self._changed)
        self._changed.clear()
        for update in updates:
            if update.timings is not None:
                self._assembler.forget(update.request_id)
        self._to_front(News(updates))

    # ------------------------------------------------------------------------------------------------ on the way in

    def _answer(self, id: str, work: Callable[[], None]) -> None:
        try:
            work()
        except ValueError as error:
            self._to_front(Error(id, str(error)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust's panics in the tokenizer are no Exceptions
            logger.exception("request %s: unexpected error", id)
            self._to_front(Error(id, f"the prompt cannot be encoded: {type(error).__name__}: {error}"))

    def _submit(self, request: GenerateRequest) -> None:
        assert self._info is not None, "a request came before the engine had started"
        prompt, request_id = self._encode(request), request.request_id
        self._check(prompt, request.params)
        children = self._assembler.add(request_id, request.text, prompt, request.params, arrival_s=self._clock())
        self._prompt_of.update((child_id, request_id) for child_id, _ in children)
        self._to_engine(Add(children, prompt.tobytes()))
        self._changed[request_id] = None  # it is accepted

    def _encode(self, request: GenerateRequest) -> Int32Array:
        given = [x is not None for x in (request.text, request.token_ids, request.messages)]
        if sum(given) != 1:
            raise ValueError("a request has one prompt: a text, token ids, or messages")
        most = None if self._info is None else self._info.max_model_len
        if request.text is not None:
            return self._tokenizer.encode(request.text, most=most)
        if request.token_ids is not None:
            return as_token_ids(request.token_ids)
        return self._tokenizer.encode_chat(request.messages, tools=request.tools, most=most)

    def _check(self, prompt: Int32Array, params: SamplingParams) -> None:
        """Raise ``ValueError`` for what the engine would refuse, before it hears of it."""
        assert self._info is not None, "a request came before the engine had started"
        most, vocab_size = self._info.max_model_len, self._info.vocab_size
        if len(prompt) == 0:
            raise ValueError("the prompt is empty")
        if len(prompt) >= most:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; at most {most - 1} leave room for an answer "
                f"(max_model_len {most})"
            )
        if int(prompt.max()) >= vocab_size:
            raise ValueError(f"token id {int(prompt.max())} is outside the vocabulary 0..{vocab_size - 1}")
        params.check_vocabulary(vocab_size)

    def _reply(self, call_id: str, value: list[int] | str) -> None:
        self._to_front(Reply(call_id, value))

    # ------------------------------------------------------------------------------------------------ on the way back

    def _step(self, message: Step) -> None:
        changes = self._assembler.process(message.unpack())
        self._changed.update(dict.fromkeys(changes.grown))
        for child_id, stop in changes.stopped:
            self._to_engine(End(child_id, "stop", stop))
        for finished in message.finished:
            self._prompt_of.pop(finished.request_id, None)

    def _refused(self, error: Error) -> None:
        """The engine refused a request in spite of our checks."""
        prompt_id = self._prompt_of.get(error.id)
        if prompt_id is None:
            self._to_front(error)  # of a call
            return
        for child in self._assembler.forget(prompt_id):
            del self._prompt_of[child]
            if child != error.id:
                self._to_engine(End(child, "abort"))
        self._changed.pop(prompt_id, None)
        self._to_front(Error(prompt_id, error.message))


def run_worker(load: Callable[[], Tokenizer], folder: Path) -> None:
    """The worker process: carry messages until somebody ends it. Raises `BrokenWire`, and what ``load`` raises."""
    with zmq.Context() as context:
        front: Receiver[FromFront] = Receiver(context, folder, "front", "worker", FromFront)
        engine: Receiver[FromEngine] = Receiver(context, folder, "engine", "worker", FromEngine)
        to_front, to_engine = (Sender(context, folder, "worker", other) for other in ("front", "engine"))
        worker = TextWorker(load(), to_front=to_front.send, to_engine=to_engine.send)
        poller = zmq.Poller()
        poller.register(front.socket, zmq.POLLIN)
        poller.register(engine.socket, zmq.POLLIN)
        gc.collect()
        gc.freeze()  # the tokenizer stays, and the collector need not look at it while streams wait
        while True:
            poller.poll()
            for request in front.drain():
                if isinstance(request, Seen):
                    to_front.num_seen = request.number
                else:
                    worker.on_front(request)
            for news in engine.drain():
                worker.on_engine(news)
            if (seen := engine.confirm()) is not None:
                to_engine.send(seen)
            if not to_front.is_ahead:
                worker.tell()
