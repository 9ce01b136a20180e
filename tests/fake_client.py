"""An `EngineClient` without an engine: it answers with the letters of a fixed rule, and remembers what happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from minisgl.request import FinishReason, Logprob, SamplingParams, Timings, Usage
from minisgl.server.client import Delta, EngineDied, EngineStats, GenerateRequest, ModelInfo, RequestRefused, Update

VOCAB = 256  # a token is a byte


@dataclass
class FakeClient:
    """Token ``j`` of completion ``i`` of a prompt is a letter that depends on prompt, seed, i and j.

    Args:
        delay_s: between tokens.
        gate: if given, no answer gets a token before it is set.
        dies_after: tokens of an answer after which the engine is gone.
    """

    delay_s: float = 0.0
    gate: asyncio.Event | None = None
    dies_after: int | None = None
    info: ModelInfo = field(default_factory=lambda: ModelInfo("fake", 64, VOCAB, True))
    failure: str | None = None
    not_ready: str | None = None
    running: set[str] = field(default_factory=set)
    seen: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    iterators: list[AsyncGenerator[Update, None]] = field(default_factory=list)

    def encode(self, request: GenerateRequest) -> list[int]:
        if request.token_ids is not None:
            return request.token_ids
        if request.text is not None:
            try:
                return list(request.text.encode())
            except UnicodeEncodeError as error:
                raise RequestRefused(str(error)) from None
        if any(m["content"] == "refuse" for m in request.messages or ()):
            raise RequestRefused("the chat template raised: no such thing")
        return list("".join(f"{m['role']}:{m['content']}\n" for m in request.messages or ()).encode())

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        iterator = self._generate(request)
        self.iterators.append(iterator)  # so that the garbage collector, which closes them too, cannot
        return iterator

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        prompt = self.encode(request)
        if len(prompt) >= self.info.max_model_len:
            raise RequestRefused(f"the prompt has {len(prompt)} tokens; the context is {self.info.max_model_len}")
        self.seen.append(request)
        self.running.add(request.request_id)
        params = request.params
        most = min(params.max_tokens or VOCAB, self.info.max_model_len - len(prompt))
        usage = Usage(len(prompt), 0, 0)
        try:
            yield Update(request.request_id, (), usage, prompt_token_ids=tuple(prompt))
            if self.gate is not None:
                await self.gate.wait()
            texts = ["" for _ in range(params.n)]
            done: dict[int, FinishReason] = {}
            for j in range(most):
                await asyncio.sleep(self.delay_s)
                if self.dies_after is not None and j >= self.dies_after:
                    raise EngineDied("killed")
                deltas = []
                for i in range(params.n):
                    if i not in done:
                        delta = self._delta(params, prompt, texts, i, j, last=j == most - 1)
                        usage = Usage(len(prompt), 0, usage.completion_tokens + 1)
                        if request.request_id in self.aborted:
                            delta = Delta(i, "", (), (), "abort")
                        if delta.finish_reason is not None:
                            done[i] = delta.finish_reason
                        deltas.append(delta)
                ended = len(done) == params.n
                yield Update(
                    request.request_id,
                    tuple(deltas),
                    usage,
                    prompt_logprobs=self._prompt_logprobs(params, prompt) if j == 0 else None,
                    timings=Timings(0.0, 0.0, 1.0) if ended else None,
                )
                if ended:
                    return
        finally:
            self.running.discard(request.request_id)

    def _delta(
        self, params: SamplingParams, prompt: list[int], texts: list[str], i: int, j: int, *, last: bool
    ) -> Delta:
        token = ord("a") + (sum(prompt) + (params.seed or 0) + 7 * i + j * j) % 26
        texts[i] += chr(token)
        reason: FinishReason | None = "length" if last else None
        for stop in params.stop:
            if texts[i].endswith(stop):  # only of one letter: held-back text is the assembler's own matter
                return Delta(i, "", (token,), self._logprobs(params, token), "stop", stop)
        return Delta(i, chr(token), (token,), self._logprobs(params, token), reason)

    def _logprobs(self, params: SamplingParams, token: int) -> tuple[dict[int, Logprob], ...] | None:
        return None if params.logprobs is None else (self._entry(token, params.logprobs),)

    def _entry(self, token: int, num_top: int) -> dict[int, Logprob]:
        """The token itself is the second most likely, behind "!"."""
        entry = {token: Logprob(-1.5, 2, chr(token))}
        for rank in range(1, num_top + 1):
            other = ord("!") + rank - 1
            if rank != 2:
                entry[other] = Logprob(-1.0 * rank, rank, chr(other))
        return entry

    def _prompt_logprobs(
        self, params: SamplingParams, prompt: list[int]
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        if params.prompt_logprobs is None:
            return None
        return (None, *(self._entry(token, params.prompt_logprobs) for token in prompt[1:]))

    async def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return request_id in self.running

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        return self.encode(request)

    async def detokenize(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    async def flush_cache(self) -> int:
        return 3

    async def stats(self, *, detail: bool = False) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_pages=8,
            num_free_pages=4,
            num_cached_pages=2,
            prompt_tokens=10,
            cached_tokens=5,
            detail={"batch": sorted(self.running)} if detail else {},
        )

    async def close(self) -> None:
        pass
