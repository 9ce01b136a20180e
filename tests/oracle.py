"""The content oracle: every slot that attention would read holds what it should. No model, no torch.

The strongest test of scheduler and KV cache. A fake engine keeps, for each slot, the *identity of the prefix* that
ends there: a rolling hash of the cache salt and of all tokens up to the slot's position, because the KV of a token
depends on all before it. A step writes its new tokens, then reads every slot that attention would read for each of its
requests, and compares with what the request's own tokens give. The next token is a function of that identity, so a
request has exactly one right output, found beforehand by computing it alone (`Truth`): whatever shares the batch, the
pool and the prefix cache with it, whenever it is preempted, in both loops.

What the device knows, it knows from the plan's columns. Steps run in the order of their launch; within that order the
oracle tries the extremes (`TIMINGS`), since a fault may show in one of them only:

- "late": a step runs when its result is waited for, so as late as it can; its page copies just before its forward pass.
- "early copies": the same, but page copies run on a second stream when the step is launched, *before* the forward pass
  of the steps still under way. Legal, because the sources were computed by steps that are done, and the destinations
  are free of launched steps: that is what `KVCacheManager` promises.
- "eager": the device is done with a step before the host does anything else.

``python tests/oracle.py [schedules]`` runs it and prints what it went through.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from minisgl.config import Admission, Order, SchedulerConfig
from minisgl.request import FinishedRequest, LogprobColumns, Request, RequestStatus, SamplingParams, StepOutput
from minisgl.scheduler import Scheduler, SchedulerOutput, StepResult
from minisgl.utils import Int32Array, ceil_div

VOCABULARY = 29
EOS = 0
Timing = Literal["late", "early copies", "eager"]
TIMINGS: tuple[Timing, ...] = ("late", "early copies", "eager")
PAGE_SIZES = (1, 4, 16, 64)
AXES = tuple(product(PAGE_SIZES, (True, False), (True, False)))  # page size, prefix cache, overlap


class OracleError(AssertionError):
    """The engine under test did something wrong."""


def require(condition: object, message: str) -> None:
    """Raise `OracleError` unless ``condition`` holds."""
    if not condition:
        raise OracleError(message)


# ---------------------------------------------------------------------------------------------------------- the truth


def extend(prefix: int, token: int) -> int:
    """Identity of a prefix that goes on with ``token``."""
    return (prefix * 1_000_003 + token + 1) % ((1 << 61) - 1)


def next_token(prefix: int) -> int:
    """What a model that is a function of the whole prefix says next."""
    return (prefix >> 7) % VOCABULARY


class Truth:
    """One request computed alone, token by token.

    Attributes:
        tokens: prompt and output, the output going on behind its end as an engine does that has not noticed it yet.
        prefixes: ``prefixes[p]`` is the identity of tokens 0..p: what the slot of position p must hold.
        output: what the user must get.
        finish_reason: and why it ends.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> None:
        self.num_prompt_tokens = len(prompt)
        self.params = params
        tokens, prefixes = list(prompt), []
        prefix = zlib.crc32(repr(params.cache_salt).encode())
        for position in range(len(prompt) + max_tokens):
            if position == len(tokens):
                tokens.append(next_token(prefix))
            prefix = extend(prefix, tokens[position])
            prefixes.append(prefix)
        self.tokens = np.array(tokens, np.int32)
        self.prefixes = np.array(prefixes, np.int64)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        output = tokens[len(prompt) :]
        stop = next((i for i, token in enumerate(output) if token in ends), None)
        self.output = output[:stop]
        self.finish_reason = "length" if stop is None else "stop"
        self.scored: set[int] = set()  # positions of the prompt that the user got log-probabilities for


# ---------------------------------------------------------------------------------------------------- the fake engine


class FakeEngine:
    """Device state as a real engine keeps it, by row, fed from plans only."""

    def __init__(self, config: SchedulerConfig, truths: dict[str, Truth], timing: Timing) -> None:
        self.config, self.truths, self.timing = config, truths, timing
        self.counts: Counter[str] = Counter()
        self.kv = np.zeros((config.num_pages, config.page_size), np.int64)
        self.page_table = np.zeros((config.max_running, config.table_width), np.int32)
        self.lengths = [0] * config.max_running
        self.last_tokens = [-1] * config.max_running
        self.owners: list[Truth | None] = [None] * config.max_running
        self._launched: deque[SchedulerOutput] = deque()
        self._results: dict[int, StepResult] = {}

    def launch(self, plan: SchedulerOutput) -> None:
        """Hand a step to the device; when it runs is the device's affair."""
        self._launched.append(plan)
        if self.timing != "late":
            self._copy(plan)
        if self.timing == "eager":
            self._run_oldest()

    def wait(self, plan: SchedulerOutput) -> StepResult:
        """The step's result; it and all before it have run."""
        while plan.step_id not in self._results:
            self._run_oldest()
        return self._results.pop(plan.step_id)

    @property
    def is_idle(self) -> bool:
        """Whether all that was launched was also waited for."""
        return not self._launched and not self._results

    def _run_oldest(self) -> None:
        plan = self._launched.popleft()
        if self.timing == "late":
            self._copy(plan)
        self._results[plan.step_id] = self._forward(plan)

    def _copy(self, plan: SchedulerOutput) -> None:
        # The copies of a step are independent of each other: a kernel makes them in any order.
        for source, destination in reversed(plan.page_copies.tolist()):
            require(source and destination, f"step {plan.step_id} copies the reserved page")
            self.kv[destination] = self.kv[source]
            self.counts["copies"] += 1

    def _forward(self, plan: SchedulerOutput) -> StepResult:
        self._apply_deltas(plan)
        for view in plan.rows_view():
            self._write(plan.step_id, view.row, view.start, view.num_tokens, view.token_ids)
        for row in plan.rows.tolist():
            self._read(plan.step_id, row)
        sampled = plan.rows[plan.samples].tolist()
        for row in sampled:
            self.last_tokens[row] = next_token(int(self._owner(row).prefixes[self.lengths[row] - 1]))
        self.counts["steps"] += 1
        self.counts["requests in steps"] += plan.num_requests
        self.counts["tokens"] += plan.total_tokens
        token_ids = np.array([self.last_tokens[row] for row in sampled], np.int32)
        return StepResult(
            token_ids=token_ids,
            finite=np.ones(len(sampled), np.bool_),
            logprobs=_columns(token_ids),
            prompt_logprobs={wish.place: _columns(wish.next_token_ids) for wish in plan.prompt_logprobs},
        )

    def _apply_deltas(self, plan: SchedulerOutput) -> None:
        for new in plan.admitted:
            truth = self.owners[new.row] = self.truths[new.request_id]
            known = np.concatenate([new.prompt_token_ids, new.output_token_ids])
            require(np.array_equal(known, truth.tokens[: len(known)]), f"{new.request_id} comes in with wrong tokens")
            self.lengths[new.row], self.last_tokens[new.row] = new.num_computed, -1
            self.page_table[new.row] = 0
            self.counts["cached tokens"] += new.num_computed
        for view in plan.rows_view():
            entries = self.page_table[view.row, view.first_page : view.first_page + len(view.new_pages)]
            require(len(entries) == len(view.new_pages), f"row {view.row} gets more pages than its table can hold")
            self.counts["remaps"] += int(((entries != 0) & (entries != view.new_pages)).sum())
            entries[:] = view.new_pages

    def _write(self, step_id: int, row: int, start: int, num_tokens: int, token_ids: list[int] | None) -> None:
        where, truth, end = f"step {step_id}, row {row}", self._owner(row), start + num_tokens
        tokens = token_ids if token_ids is not None else [self.last_tokens[row]]
        require(start == self.lengths[row], f"{where}: starts at {start}, but the row has {self.lengths[row]} tokens")
        require(len(tokens) == num_tokens, f"{where}: {len(tokens)} token ids for {num_tokens} tokens")
        require(tokens == truth.tokens[start:end].tolist(), f"{where}: wrong tokens at {start}..{end}")
        self.lengths[row] = end
        positions = np.arange(start, end)
        pages = self.page_table[row, positions // self.config.page_size]
        require(pages.all(), f"{where}: a token of {start}..{end} is written to the reserved page")
        self.kv[pages, positions % self.config.page_size] = truth.prefixes[start:end]

    def _read(self, step_id: int, row: int) -> None:
        length = self.lengths[row]
        pages = self.page_table[row, : ceil_div(length, self.config.page_size)]
        wrong = self.kv[pages].ravel()[:length] != self._owner(row).prefixes[:length]
        if wrong.any():
            position = int(wrong.argmax())
            page = pages[position // self.config.page_size]
            raise OracleError(f"step {step_id}, row {row}: page {page} holds something else at position {position}")

    def _owner(self, row: int) -> Truth:
        truth = self.owners[row]
        assert truth is not None, f"row {row} runs before it was admitted"
        return truth


def _columns(token_ids: Int32Array) -> LogprobColumns:
    """Stand-ins for log-probabilities, which say what token they belong to."""
    nothing = np.zeros((len(token_ids), 0))
    return LogprobColumns(token_ids.astype(np.float32), token_ids, nothing.astype(np.int32), nothing.astype(np.float32))


# --------------------------------------------------------------------------------------------------------- a schedule


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random schedule, all of it a function of ``name``."""

    name: str
    config: SchedulerConfig
    overlap: bool
    timing: Timing
    mean_output: float
    disturbance: float
    arrivals: tuple[tuple[int, tuple[int, ...], SamplingParams], ...]  # (step, prompt, how)

    @classmethod
    def draw(cls, page_size: int, prefix_cache: bool, overlap: bool, seed: int) -> Case:
        """The case of these axes and this seed."""
        name = f"Case.draw({page_size}, {prefix_cache}, {overlap}, {seed})"
        rng = random.Random(name)
        long, long_output = {1: (12, 16), 4: (20, 16), 16: (40, 32), 64: (130, 70)}[page_size]
        salts = rng.choice([(None,), (None,), ("a", "b")])
        stems = [_tokens(rng, long) for _ in range(rng.randint(1, 3))]
        budget = rng.choice([1, 3, long, 2 * long, 1000, 1000, 1000])
        last_arrival = rng.choice([0, 3, 8, 20])
        arrivals: list[tuple[int, tuple[int, ...], SamplingParams]] = []
        for _ in range(rng.randint(3, 14 if budget > 3 else 5)):
            # Much in common, so that prefixes are shared, split, partly matched and computed twice at once.
            step, salt = rng.randint(0, last_arrival), rng.choice(salts)
            prompt = rng.choice(stems)[: rng.randint(1, rng.choice([long, rng.randint(1, long)]))]
            if arrivals and rng.random() < 0.4:  # the next turn of a talk: a prompt, its answer, and a word more
                step, prompt, past = rng.choice(arrivals)
                step, salt = step + rng.randint(1, 30), past.cache_salt
                prompt = tuple(Truth(prompt, past, rng.randint(1, long_output)).tokens.tolist())[: 2 * long]
            params = SamplingParams(
                max_tokens=rng.choice([1, 2, 5, rng.randint(3, long_output), long_output, long_output, None]),
                ignore_eos=rng.random() < 0.6,
                stop_token_ids=(5,) if rng.random() < 0.2 else (),
                prompt_logprobs=0 if rng.random() < 0.15 else None,
                priority=rng.choice([-1, 0, 0, 1]),
                cache_salt=salt,
            )
            arrivals.append((step, prompt + _tokens(rng, rng.choice([0, 0, 1, long // 3])), params))
        longest = max(len(prompt) for _, prompt, _ in arrivals)
        max_model_len = longest + rng.choice([1, 6, long_output])
        width = ceil_div(max_model_len, page_size)
        config = SchedulerConfig(
            page_size=page_size,
            num_pages=1 + width + rng.choice([0, 1, width, 2 * width, 2 * width, 5 * width]),
            max_model_len=max_model_len,
            max_running=rng.choice([1, 2, 4, 8, 8, 8]),
            max_num_batched_tokens=budget,
            chunk_size=rng.choice([None, None, 1, max(1, page_size - 1), page_size, page_size + 1, 2 * page_size]),
            order=rng.choice(list[Order](("mixed", "mixed", "prefill_first", "prefill_first", "decode_first"))),
            admission=rng.choice(list[Admission](("estimate", "estimate", "estimate", "reserve"))),
            prefix_cache=prefix_cache,
        )
        return cls(
            name=name,
            config=config,
            overlap=overlap,
            timing=rng.choice(("late", "early copies", "early copies", "eager")),
            mean_output=rng.choice([0.0, 0.0, 0.0, 128.0]),
            disturbance=rng.choice([0.0, 0.02, 0.08]),
            arrivals=tuple(sorted(arrivals, key=lambda a: a[0])),
        )


def _tokens(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(n))


class Drive:
    """Runs a case through a scheduler and the fake engine, and holds every word of both to the truth."""

    def __init__(self, case: Case, make_scheduler: Callable[..., Scheduler] = Scheduler) -> None:
        self.case, self.config = case, case.config
        self.counts: Counter[str] = Counter({"schedules": 1, f"schedules, {case.timing}": 1})
        self.scheduler = make_scheduler(case.config, eos_token_ids=[EOS], seed=0, clock=lambda: 0.0)
        self.scheduler._mean_output = case.mean_output
        self.truths: dict[str, Truth] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishedRequest] = {}
        self.engine = FakeEngine(case.config, self.truths, case.timing)
        self._rng = random.Random(f"{case.name} disturbed")
        self._arrivals = deque(case.arrivals)
        self._num_aborted = 0
        self._count_evictions()

    def run(self) -> Counter[str]:
        """The whole schedule; raises an ``AssertionError`` if anything is wrong."""
        pending: SchedulerOutput | None = None
        round_, max_rounds = 0, 200 + 20 * sum(len(p) + (q.max_tokens or 24) for _, p, q in self.case.arrivals)
        while self._arrivals or self.scheduler.has_work or pending is not None:
            require(round_ < max_rounds, f"not done after {round_} rounds")
            self._arrive(round_)
            self._disturb()
            plan = self.scheduler.schedule()
            self._disturb()
            if plan is not None:
                self._check_plan(plan)
                self.engine.launch(plan)
                self._disturb()
            if self.case.overlap:  # step k + 1 is launched; only now is step k read
                plan, pending = pending, plan
            if plan is not None:
                self._receive(self.scheduler.update(plan, self.engine.wait(plan)))
            elif pending is None and self.scheduler.has_work:
                raise OracleError(f"stuck: nothing runs, nothing is under way, {self.scheduler.requests} wait")
            self.scheduler.check()
            round_ += 1
        self._check_end()
        self.counts["preemptions"] = self.scheduler.num_preemptions
        return self.counts + self.engine.counts

    # The outside world.

    def _arrive(self, round_: int) -> None:
        while self._arrivals and self._arrivals[0][0] <= round_:
            _, prompt, params = self._arrivals.popleft()
            request_id = f"r{len(self.truths)}"
            request = self.scheduler.add(request_id, np.array(prompt, np.int32), params)
            self.truths[request_id] = Truth(prompt, params, request.max_tokens)
            self.outputs[request_id] = []
            self.counts["requests"] += 1

    def _disturb(self) -> None:
        """Now and then, at any moment: an abort of anybody, or a flush."""
        if self._rng.random() >= self.case.disturbance:
            return
        if self._rng.random() < 0.2:
            self.scheduler.kv.flush()
            self.counts["flushes"] += 1
        else:
            living = self._rng.random() < 0.7 and [*self.scheduler.requests]
            request_id = self._rng.choice(living or [*self.truths, "nobody"])
            request = self.scheduler.requests.get(request_id)
            self.counts[f"aborts: {self._state(request_id, request)}"] += 1
            finished = self.scheduler.abort(request_id)
            require((finished is None) == (request is None), "an abort is told to those that live, and to no others")
            require(self.scheduler.abort(request_id) is None, "aborted twice")
            if finished is not None:
                self._end(finished)
        self.scheduler.check()

    def _state(self, request_id: str, request: Request | None) -> str:
        if request is None:
            return "ended" if request_id in self.truths else "unknown"
        state = "preempted" if request.status is RequestStatus.PREEMPTED else "queued"
        if request.row is None:
            return state
        rows = self.scheduler.rows
        if request.status is RequestStatus.RUNNING:
            state = "decoding" if rows.on_device[request.row] else "half a prompt"
        return f"{state}, in flight" if rows.last_step[request.row] > self.scheduler._steps_done else state

    # What comes out of the scheduler.

    def _check_plan(self, plan: SchedulerOutput) -> None:
        rows, config = plan.rows, self.config
        require(0 < plan.num_requests <= config.max_running, "an empty plan, or more requests than rows")
        require(len(set(rows.tolist())) == len(rows), "a row twice")
        require((plan.num_tokens > 0).all(), "a request without tokens")
        require(plan.total_tokens <= config.max_num_batched_tokens, "over the token budget")
        require(plan.num_tokens.max() <= (config.chunk_size or plan.total_tokens), "over the chunk size")
        singles, arrival = plan.num_tokens == 1, self.scheduler.rows.arrival[rows]
        require(singles[: plan.num_decodes].all(), "decodes do not come first")
        for part in (singles, ~singles):
            require((np.diff(arrival[part]) > 0).all(), "rows are not in order of arrival")
        require((plan.page_ids > 0).all(), "the reserved page is given out")

    def _receive(self, output: StepOutput) -> None:
        assert output.logprobs is not None
        require(np.array_equal(output.logprobs.ranks, output.token_ids), "logprobs of other tokens")
        for request_id, start, columns in output.prompt_logprobs:
            require(request_id not in self.finished, f"{request_id} got prompt logprobs after its end")
            truth, end = self.truths[request_id], start + 1 + len(columns.ranks)
            require(np.array_equal(columns.ranks, truth.tokens[start + 1 : end]), "prompt logprobs of other tokens")
            truth.scored |= set(range(start + 1, end))
        for request_id, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            require(request_id not in self.finished, f"{request_id} got a token after its end")
            self.outputs[request_id].append(token)
            got = len(self.outputs[request_id])
            require([token] == self.truths[request_id].output[got - 1 : got], f"{request_id}: wrong token {got}")
        for finished in output.finished:
            self._end(finished)

    def _end(self, finished: FinishedRequest) -> None:
        request_id = finished.request_id
        truth, output = self.truths[request_id], self.outputs[request_id]
        require(request_id not in self.finished, f"{request_id} ended twice")
        self.finished[request_id] = finished
        require(finished.usage.completion_tokens == len(output), f"{request_id}: usage is not what was given out")
        require(finished.usage.cached_tokens < truth.num_prompt_tokens, f"{request_id}: all of it from the cache")
        if finished.reason == "abort":
            require(output == truth.output[: len(output)], f"{request_id}: wrong output before its abort")
            return
        require(output == truth.output, f"{request_id}: {len(output)} tokens, {len(truth.output)} are right")
        require(finished.reason == truth.finish_reason, f"{request_id} ended with {finished.reason}")
        if truth.params.prompt_logprobs is not None:
            missing = set(range(1, truth.num_prompt_tokens)) - truth.scored
            require(not missing, f"{request_id}: no prompt logprobs at {missing}")

    def _check_end(self) -> None:
        kv, config = self.scheduler.kv, self.config
        require(self.finished.keys() == self.truths.keys(), "somebody never ended")
        require(not (config.admission == "reserve" and self.scheduler.num_preemptions), "preempted despite reservation")
        require(self.engine.is_idle, "a step was launched and never waited for")
        require(self.scheduler.rows.num_free == config.max_running, "a row leaked")
        require(kv.num_available_pages == config.num_pages - 1, "a page is still held")
        kv.flush()
        require(kv.allocator.num_free == config.num_pages - 1, "a page cannot be evicted")
        self.scheduler.check()

    def _count_evictions(self) -> None:
        evict = self.scheduler.kv.tree.evict

        def counting(num_pages: int) -> Int32Array:
            pages = evict(num_pages)
            self.counts["evicted pages"] += len(pages)
            return pages

        self.scheduler.kv.tree.evict = counting  # type: ignore[method-assign]


def run(case: Case, make_scheduler: Callable[..., Scheduler] = Scheduler) -> Counter[str]:
    """Run one case; what it went through, as counts. Failures name the case."""
    try:
        return Drive(case, make_scheduler).run()
    except Exception as error:
        error.add_note(f"replay: oracle.run(oracle.{case.name})")
        raise


def main(num_schedules: int = 2400) -> None:
    """Run ``num_schedules`` cases, spread over all axes, and print the counts."""
    counts: Counter[str] = Counter()
    for axes in AXES:
        for seed in range(num_schedules // len(AXES)):
            counts += run(Case.draw(*axes, seed))
    for name, count in sorted(counts.items()):
        print(f"{count:10,} {name}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
