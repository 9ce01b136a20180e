"""`OutputAssembler`: from the tokens of each step to what the users see.

Chapter 1 tells this module's story. It owns the text side of every prompt: a detokenizer for each of its completions,
their log-probabilities, and the decision that a stop string has ended one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from minisgl.request import (
    Completion,
    FinishedRequest,
    FinishReason,
    Logprob,
    LogprobColumns,
    RequestOutput,
    SamplingParams,
    StepOutput,
    Timings,
    Usage,
)
from minisgl.server.client import Delta, Update
from minisgl.server.detokenizer import Detokenizer
from minisgl.server.tokenizer import Tokenizer
from minisgl.utils import Int32Array


@dataclass(slots=True, eq=False)
class _Completion:
    request_id: str  # the engine's
    index: int
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    first_token_s: float | None = None
    end: FinishedRequest | None = None  # what the engine said
    num_taken: tuple[int, int] = (0, 0)  # characters and tokens that `take` has given out
    is_told: bool = False  # `take` has given out the finish reason

    def finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.detokenizer.finish()
        self.finish_reason, self.stop_reason = reason, stop_reason


@dataclass(slots=True, eq=False)
class _Prompt:
    request_id: str
    text: str | None
    token_ids: Int32Array
    params: SamplingParams
    arrival_s: float
    completions: list[_Completion]
    logprobs: list[dict[int, Logprob] | None] | None
    num_logprobs: int = 1  # prompt tokens whose log-probability is known; the first has none
    is_taken: bool = False
    logprobs_are_taken: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """What a step changed.

    Args:
        grown: prompts whose output has grown or ended, in order, each once.
        finished: those among them that have ended whole.
        stopped: (engine request id, stop string): ended by their text; the engine does not know yet.
    """

    grown: tuple[str, ...]
    finished: tuple[str, ...]
    stopped: tuple[tuple[str, str], ...]


class OutputAssembler:
    """Keeps what every prompt in the engine has brought so far.

    A prompt with ``n`` completions is ``n`` requests in the engine; `add` names them.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompts: dict[str, _Prompt] = {}
        self._parents: dict[str, tuple[_Prompt, _Completion]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Int32Array,
        params: SamplingParams,
        *,
        arrival_s: float,
    ) -> list[tuple[str, SamplingParams]]:
        """Begin a prompt; returns the engine requests that make it up: id and parameters of each."""
        # A prompt with one completion is one request with the same id.
        child_ids = [request_id] if params.n == 1 else [f"{request_id}/{index}" for index in range(params.n)]
        completions = [
            _Completion(
                child_id,
                index,
                Detokenizer(
                    self._tokenizer,
                    stop=tuple(params.stop),
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                    min_tokens=params.min_tokens,
                ),
                logprobs=None if params.logprobs is None else [],
            )
            for index, child_id in enumerate(child_ids)
        ]
        asks = params.prompt_logprobs is not None
        logprobs: list[dict[int, Logprob] | None] | None = [None] * len(prompt_token_ids) if asks else None
        entry = _Prompt(request_id, prompt, prompt_token_ids, params, arrival_s, completions, logprobs)
        self._prompts[request_id] = entry
        children = []
        for completion in completions:
            child_params = params
            if params.n > 1:
                seed = None if params.seed is None else (params.seed + completion.index) % 2**63
                child_params = replace(params, n=1, seed=seed)
            self._parents[completion.request_id] = (entry, completion)
            children.append((completion.request_id, child_params))
        return children

    def process(self, step: StepOutput) -> Changes:
        """Take in the result of a step. Requests that are not known (any more) are passed over."""
        grown: dict[str, None] = {}
        stopped = []
        for request_id, start, columns in step.prompt_logprobs:
            if request_id in self._parents:
                self._add_prompt_logprobs(self._parents[request_id][0], start, columns)
        for i, (request_id, token_id) in enumerate(zip(step.request_ids, step.token_ids.tolist(), strict=True)):
            if request_id not in self._parents:
                continue
            prompt, completion = self._parents[request_id]
            if completion.finish_reason is not None:
                continue  # a stop string ended it: what the engine had under way is surplus
            grown[prompt.request_id] = None
            if completion.first_token_s is None:
                completion.first_token_s = step.time_s
            completion.token_ids.append(token_id)
            if completion.logprobs is not None and step.logprobs is not None:
                completion.logprobs.append(self._logprobs(step.logprobs, i, token_id, prompt.params.logprobs or 0))
            completion.detokenizer.push((token_id,))
            stop = completion.detokenizer.stop_reason
            if stop is not None:
                completion.finish("stop", stop)
                stopped.append((request_id, stop))
        finished = self.end(step.finished)
        for changed in finished.grown:
            grown[changed] = None
        ended = {f.request_id for f in step.finished}
        return Changes(tuple(grown), finished.finished, tuple(s for s in stopped if s[0] not in ended))

    def end(self, finished: Iterable[FinishedRequest]) -> Changes:
        """The engine ended these requests; each is told once."""
        grown: dict[str, None] = {}
        whole = []
        for end in finished:
            if end.request_id not in self._parents:
                continue
            prompt, completion = self._parents.pop(end.request_id)
            completion.end = end
            if completion.finish_reason is None:
                completion.finish(end.reason, end.stop_reason)
            grown[prompt.request_id] = None
            if all(c.end is not None for c in prompt.completions):
                whole.append(prompt.request_id)
        return Changes(tuple(grown), tuple(whole), ())

    def output(self, request_id: str) -> RequestOutput:
        """What the prompt has brought so far. Its ``usage.cached_tokens`` is known once a completion has ended."""
        prompt = self._prompts[request_id]
        timings = self._timings(prompt)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids.tolist(),
            outputs=tuple(
                Completion(
                    index=c.index,
                    text=c.detokenizer.text,
                    token_ids=list(c.token_ids),
                    finish_reason=c.finish_reason,
                    stop_reason=c.stop_reason,
                    logprobs=None if c.logprobs is None else list(c.logprobs),
                )
                for c in prompt.completions
            ),
            finished=timings.finished_s is not None,
            usage=self._usage(prompt),
            timings=timings,
            prompt_logprobs=None if prompt.logprobs is None else list(prompt.logprobs),
        )

    def take(self, request_id: str) -> Update:
        """What the prompt has brought since the last time; the cost is that of what is new. The last update has
        timings; `forget` may follow."""
        prompt = self._prompts[request_id]
        deltas = tuple(delta for c in prompt.completions if (delta := self._delta(c)) is not None)
        logprobs = None
        if (
            prompt.logprobs is not None
            and not prompt.logprobs_are_taken
            and prompt.num_logprobs >= len(prompt.token_ids)
        ):
            logprobs, prompt.logprobs_are_taken = tuple(prompt.logprobs), True
        prompt_token_ids = None if prompt.is_taken else tuple(prompt.token_ids.tolist())
        prompt.is_taken = True
        usage, timings = self._usage(prompt), self._timings(prompt)
        return Update(
            request_id,
            deltas,
            usage,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=logprobs,
            timings=None if timings.finished_s is None else timings,
        )

    @staticmethod
    def _delta(c: _Completion) -> Delta | None:
        chars, tokens = c.num_taken
        ends_now = c.finish_reason is not None and not c.is_told
        if not ends_now and len(c.token_ids) == tokens:
            return None
        delta = Delta(
            c.index,
            c.detokenizer.text_from(chars),
            tuple(c.token_ids[tokens:]),
            logprobs=None if c.logprobs is None else tuple(c.logprobs[tokens:]),
            finish_reason=c.finish_reason,
            stop_reason=c.stop_reason,
        )
        c.num_taken, c.is_told = (c.detokenizer.num_chars, len(c.token_ids)), c.finish_reason is not None
        return delta

    def _usage(self, prompt: _Prompt) -> Usage:
        cached = [c.end.usage.cached_tokens for c in prompt.completions if c.end is not None]
        return Usage(
            prompt_tokens=len(prompt.token_ids),
            cached_tokens=min(cached, default=0),
            completion_tokens=sum(len(c.token_ids) for c in prompt.completions),
        )

    def _timings(self, prompt: _Prompt) -> Timings:
        first_token = [c.first_token_s for c in prompt.completions if c.first_token_s is not None]
        ends = [c.end.timings.finished_s or 0.0 for c in prompt.completions if c.end is not None]
        return Timings(
            arrival_s=prompt.arrival_s,
            first_token_s=min(first_token, default=None),
            finished_s=max(ends) if len(ends) == len(prompt.completions) else None,
        )

    def unfinished(self, request_id: str) -> list[str]:
        """The prompt's engine requests that have not ended. Unknown ids have none."""
        prompt = self._prompts.get(request_id)
        return [] if prompt is None else [c.request_id for c in prompt.completions if c.end is None]

    def forget(self, request_id: str) -> list[str]:
        """Forget a prompt, ended or not; returns its engine requests that have not ended. Unknown ids have none."""
        prompt = self._prompts.pop(request_id, None)
        completions = prompt.completions if prompt is not None else ()
        return [c.request_id for c in completions if self._parents.pop(c.request_id, None) is not None]

    def _logprobs(self, columns: LogprobColumns, i: int, token_id: int, num_top: int) -> dict[int, Logprob]:
        """Entry ``i``: the token itself first, then its most likely alternatives."""
        entry = {token_id: self._logprob(token_id, float(columns.logprobs[i]), int(columns.ranks[i]))}
        top_ids = columns.top_ids[i, :num_top].tolist()
        for rank, (top_id, value) in enumerate(zip(top_ids, columns.top_logprobs[i].tolist(), strict=False), start=1):
            entry.setdefault(top_id, self._logprob(top_id, value, rank))
        return entry

    def _logprob(self, token_id: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _add_prompt_logprobs(self, prompt: _Prompt, start: int, columns: LogprobColumns) -> None:
        if prompt.logprobs is None:
            return
        for i in range(len(columns.logprobs)):
            position = start + 1 + i
            token_id = int(prompt.token_ids[position])
            prompt.num_logprobs = max(prompt.num_logprobs, position + 1)
            prompt.logprobs[position] = self._logprobs(columns, i, token_id, prompt.params.prompt_logprobs or 0)
