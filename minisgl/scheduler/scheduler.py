"""`Scheduler`: which requests and which tokens enter the next step, so that compute, KV and rows stay in bounds.

The only writer of `Request`. Its state is a fold over its inputs (arrivals, aborts, clock readings, results), so the
same inputs give the same plans. `schedule` may run ahead of `update` by a step: a request that ended may still be named
by one launched step, and `_retire` is the one place that waits for it.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.kv_cache import KVCacheManager
from minisgl.request import (
    FinishedRequest,
    FinishReason,
    Request,
    RequestStatus,
    SamplingParams,
    StepOutput,
    Timings,
    Usage,
)
from minisgl.scheduler import policy
from minisgl.scheduler.draft import Draft
from minisgl.scheduler.plan import AdmittedRow, PromptLogprobs, SchedulerOutput, StepResult
from minisgl.scheduler.rows import Rows
from minisgl.utils import Int32Array, ceil_div

_EMPTY: Int32Array = np.zeros(0, np.int32)
# What an engine that has finished nothing yet expects of a request, and how fast it learns from those that finish.
FIRST_EXPECTED_TOKENS = 128
EXPECTATION_RATE = 0.05


class Scheduler:
    """Continuous batching over paged KV.

    Args:
        config: the decided numbers.
        eos_token_ids: ids that end a text.
        seed: of the seeds of requests that bring none; None: the operating system's.
        clock: seconds; read once an arrival and once a result.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        eos_token_ids: Iterable[int] = (),
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.kv = KVCacheManager(config.num_pages, config.page_size, prefix_cache=config.prefix_cache)
        self.rows = Rows(config.max_running)
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival
        self.retiring: list[Request] = []  # left `running`, but a launched step still names their row
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.num_preemptions = 0
        self._clock = clock
        self._random = random.Random(seed)
        self._num_arrived = 0
        self._step_id = 0  # last planned step
        self._steps_done = 0  # all steps up to here are done
        self._mean_output = float(FIRST_EXPECTED_TOKENS)
        self._preempted: list[str] = []
        self._running_rows: Int32Array | None = None  # rows of `running`, in its order

    # ------------------------------------------------------------------------------------------------ at the door

    def add(self, request_id: str, prompt_token_ids: Int32Array, sampling_params: SamplingParams) -> Request:
        """Queue a request.

        Raises:
            ValueError: the id is in use, or the prompt is empty or leaves no room for a token.
        """
        self.check_prompt(len(prompt_token_ids))
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        room = self.config.max_model_len - len(prompt_token_ids)
        params = sampling_params
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            arrival=self._num_arrived,
            arrival_time_s=self._clock(),
            max_tokens=min(params.max_tokens or room, room),
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            end_token_ids=(*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids),
        )
        self._num_arrived += 1
        self.requests[request_id] = request
        self.waiting.append(request)
        return request

    def check_prompt(self, num_tokens: int) -> None:
        """Raise ``ValueError`` unless a prompt of so many tokens can be served; the message has both numbers."""
        if num_tokens == 0:
            raise ValueError("the prompt is empty")
        if num_tokens >= self.config.max_model_len:
            raise ValueError(
                f"the prompt has {num_tokens} tokens; at most {self.config.max_model_len - 1} leave room for an answer "
                f"(max_model_len {self.config.max_model_len})"
            )

    def abort(
        self, request_id: str, *, reason: FinishReason = "abort", stop_reason: str | None = None
    ) -> FinishedRequest | None:
        """End a request now, in whatever state it is; None if it has ended or never was.

        The text layer ends a request the same way (``reason="stop"``) when it finds a stop string.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.row is None:
            del self.waiting[bisect_left(self.waiting, request.arrival, key=_arrival)]
        finished = self._finish(request, reason, stop_reason, self._clock())
        self._retire()
        return finished

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._step_id

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or still waits for a launched step."""
        return bool(self.requests or self.retiring)

    # ------------------------------------------------------------------------------------------------ plan

    def schedule(self) -> SchedulerOutput | None:
        """The plan of the next step, or None if nothing can run now. A plan must be launched, and its result given to
        `update`, in order."""
        draft = Draft(self.config.max_num_batched_tokens)
        for stage in policy.STAGES[self.config.order]:
            for kind in stage:
                if kind == "decode":
                    self._schedule_decodes(draft)
                elif kind == "prefill":
                    self._schedule_prefills(draft)
                else:
                    self._admit(draft)
            if draft.rows:
                return self._plan(draft)
        return None

    def _schedule_decodes(self, draft: Draft) -> None:
        """One token for each request whose last token lies on the device."""
        c, rows = self.rows, self._rows_of_running()
        rows = rows[c.on_device[rows] & (c.num_tokens[rows] < c.limit[rows])]
        first = rows[: draft.budget]
        need = first[c.num_computed[first] >= c.num_pages[first] * self.config.page_size]
        if len(need) <= self.kv.num_available_pages:
            for row in need.tolist():
                self._grow(row, int(c.num_tokens[row]))
            draft.add(first, np.ones(len(first), np.int32))
            return
        # Not all can grow. The oldest first; who cannot leaves the budget to the next, so that somebody always does.
        able = (r for r in rows.tolist() if self._is_running(r) and self._make_room(r, int(c.num_tokens[r])))
        rows = np.array(list(islice(able, draft.budget)), np.int32)
        draft.add(rows, np.ones(len(rows), np.int32))
        draft.drop_unless(self._is_running)

    def _schedule_prefills(self, draft: Draft) -> None:
        """The next chunk of each half-computed prompt."""
        c, rows = self.rows, self._rows_of_running()
        rows = rows[~c.on_device[rows] & (c.num_computed[rows] < c.num_tokens[rows])]
        if not len(rows):
            return
        remaining = c.num_tokens[rows] - c.num_computed[rows]
        wanted = np.minimum(remaining, self.config.chunk_size or remaining.max())
        num_preemptions = self.num_preemptions
        for row, n in zip(rows.tolist(), wanted.tolist(), strict=True):
            n = min(n, draft.budget)
            if n and self._is_running(row) and self._make_room(row, int(c.num_computed[row]) + n):
                draft.add(np.array([row], np.int32), np.array([n], np.int32))
        if self.num_preemptions > num_preemptions:
            draft.drop_unless(self._is_running)

    def _admit(self, draft: Draft) -> None:
        """Give rows and pages to waiting requests, first come, first served."""
        c, size = self.rows, self.config.page_size
        while self.waiting and draft.budget > 0 and c.num_free:
            request = self.waiting[0]
            params = request.sampling_params
            # The last token is always computed: its logits are what the step is for.
            end = 0 if params.prompt_logprobs is not None else request.num_tokens - 1
            left = request.max_tokens - request.num_output_tokens
            new = policy.expected_new_tokens(self.config.admission, left, self._mean_output)
            expected = request.num_tokens + new
            chunk = min(draft.budget, self.config.chunk_size or draft.budget)
            running = self._rows_of_running()
            promised = policy.promised_pages(c.expected[running], c.num_pages[running], size)
            match = self.kv.match(request.token_ids[:end], salt=params.cache_salt)
            needed = ceil_div(expected, size) - len(match.page_ids)
            holding = self.kv.open(
                match,
                min(match.num_tokens + chunk, request.num_tokens),
                min_available=needed + promised if self.running else 0,
            )
            if holding is None:
                return
            self.waiting.pop(0)
            row = c.take(request, holding, expected=expected)
            request.row, request.status = row, RequestStatus.RUNNING
            if request.num_cached_tokens is None:
                request.num_cached_tokens = holding.num_cached_tokens
            insort(self.running, request, key=_arrival)
            self._running_rows = None
            n = min(chunk, min(request.num_tokens, holding.num_pages * size) - holding.num_cached_tokens)
            draft.admitted.append(row)
            draft.add(np.array([row], np.int32), np.array([n], np.int32))

    def _plan(self, draft: Draft) -> SchedulerOutput:
        """Freeze the draft into columns, and count its tokens as computed."""
        c = self.rows
        rows, num_tokens = draft.columns()
        order = np.lexsort((c.arrival[rows], num_tokens > 1))
        rows, num_tokens = rows[order], num_tokens[order]
        starts = c.num_computed[rows]
        samples = starts + num_tokens == c.num_tokens[rows]
        self._step_id += 1
        admitted = [self._admitted_row(row) for row in draft.admitted]
        known = ~c.on_device[rows]  # their tokens are on the host
        tokens, prompt_logprobs = [_EMPTY], []
        for i in known.nonzero()[0].tolist():
            request, start = c.request(rows[i]), int(starts[i])
            end = start + int(num_tokens[i])
            tokens.append(request.token_ids[start:end])
            num_top = request.sampling_params.prompt_logprobs
            if num_top is not None and start + 1 < request.num_prompt_tokens:
                prompt_logprobs.append(PromptLogprobs(i, request.prompt_token_ids[start + 1 : end + 1], num_top))
        page_starts = c.first_unsent_page[rows]
        num_new_pages = c.num_pages[rows] - page_starts
        pages = [_EMPTY]
        for i in num_new_pages.nonzero()[0].tolist():
            pages.append(c.holding(rows[i]).page_ids[page_starts[i] :])
        c.first_unsent_page[rows] = c.num_pages[rows]
        c.num_computed[rows] += num_tokens
        c.num_tokens[rows] += samples
        c.on_device[rows] |= samples
        c.last_step[rows] = self._step_id
        preempted, self._preempted = tuple(self._preempted), []
        return SchedulerOutput(
            step_id=self._step_id,
            rows=rows,
            num_tokens=num_tokens,
            starts=starts,
            samples=samples,
            token_offsets=_offsets(num_tokens * known),
            token_ids=np.concatenate(tokens),
            page_starts=page_starts,
            page_offsets=_offsets(num_new_pages),
            page_ids=np.concatenate(pages),
            page_copies=self.kv.take_copies(),
            admitted=tuple(admitted),
            prompt_logprobs=tuple(prompt_logprobs),
            preempted=preempted,
        )

    def _admitted_row(self, row: int) -> AdmittedRow:
        request = self.rows.request(row)
        return AdmittedRow(
            row=row,
            request_id=request.request_id,
            sampling_params=request.sampling_params,
            seed=request.seed,
            eos_token_ids=request.end_token_ids,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids.copy(),
            num_computed=int(self.rows.num_computed[row]),
        )

    # ------------------------------------------------------------------------------------------------ result

    def update(self, plan: SchedulerOutput, result: StepResult) -> StepOutput:
        """Take in the result of the oldest plan that has none yet: the step is done on the device."""
        assert plan.step_id == self._steps_done + 1, (plan.step_id, self._steps_done)
        self._steps_done = plan.step_id
        c, now = self.rows, self._clock()
        prompt_logprobs = [
            (c.request(plan.rows[i]).request_id, int(plan.starts[i]), columns)
            for i, columns in (result.prompt_logprobs or {}).items()
            if not c.request(plan.rows[i]).is_finished
        ]
        request_ids, token_ids, indices, finished = [], [], [], []
        sampled = plan.rows[plan.samples].tolist()
        for j, (row, token, finite) in enumerate(
            zip(sampled, result.token_ids.tolist(), result.finite.tolist(), strict=True)
        ):
            request = c.request(row)
            if request.is_finished:
                continue  # it ended after this step was launched: the token is surplus
            if request.first_token_time_s is None:
                request.first_token_time_s = now
            if not finite:
                c.num_computed[row] = 0  # what it computed is not fit to be shared
                finished.append(self._finish(request, "abort", "the logits are not finite", now))
                continue
            if token in request.end_token_ids:
                is_stop_token = token in request.sampling_params.stop_token_ids
                finished.append(self._finish(request, "stop", token if is_stop_token else None, now))
                continue
            request.append(token)
            request_ids.append(request.request_id)
            token_ids.append(token)
            indices.append(j)
            if request.num_output_tokens == request.max_tokens:
                finished.append(self._finish(request, "length", None, now))
        prefilled = np.diff(plan.token_offsets).nonzero()[0].tolist() if len(plan.token_ids) else []
        for i in prefilled:
            row = int(plan.rows[i])
            if self._is_running(row):
                self._share(row, int(plan.starts[i] + plan.num_tokens[i]))
        self._retire()
        return StepOutput(
            step_id=plan.step_id,
            time_s=now,
            request_ids=tuple(request_ids),
            token_ids=np.array(token_ids, np.int32),
            finished=tuple(finished),
            logprobs=result.logprobs.take(np.array(indices, np.int32)) if result.logprobs else None,
            prompt_logprobs=tuple(prompt_logprobs),
        )

    def _share(self, row: int, num_computed: int) -> None:
        """Make the full pages of a computed chunk visible to others."""
        c, request = self.rows, self.rows.request(row)
        changed = self.kv.register(c.holding(row), request.token_ids, num_computed, in_use_until=int(c.last_step[row]))
        if changed is not None:
            c.first_unsent_page[row] = min(int(c.first_unsent_page[row]), changed)

    # ------------------------------------------------------------------------------------------------ leaving

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None, now: float
    ) -> FinishedRequest:
        request.finish_reason, request.stop_reason = reason, stop_reason
        was_retiring = request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        if reason != "abort":
            self._mean_output += EXPECTATION_RATE * (request.num_output_tokens - self._mean_output)
        if request.row is not None and not was_retiring:
            self._leave(request)
        return FinishedRequest(
            request_id=request.request_id,
            reason=reason,
            stop_reason=stop_reason,
            usage=Usage(request.num_prompt_tokens, request.num_cached_tokens or 0, request.num_output_tokens),
            timings=Timings(request.arrival_time_s, request.first_token_time_s, now),
        )

    def _preempt(self, request: Request) -> None:
        """Take a request's row and pages; it will compute its tokens again when there is room."""
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self._preempted.append(request.request_id)
        self._leave(request)
        self._retire()

    def _leave(self, request: Request) -> None:
        del self.running[bisect_left(self.running, request.arrival, key=_arrival)]
        self._running_rows = None
        self.retiring.append(request)

    def _retire(self) -> None:
        """Free the rows and pages of requests that left. A launched step may still name them: they come free only when
        the last such step is done."""
        c = self.rows
        self.kv.step_done(self._steps_done)
        for request in self.retiring:
            row = request.row
            assert row is not None
            if c.last_step[row] > self._steps_done:
                continue
            # A step that ran ahead may have computed past the last token that is known.
            num_computed = min(int(c.num_computed[row]), request.num_tokens)
            self.kv.close(c.holding(row), request.token_ids, num_computed)
            c.give_back(row)
            request.row = None
            if request.status is RequestStatus.PREEMPTED:
                insort(self.waiting, request, key=_arrival)
        self.retiring = [r for r in self.retiring if r.row is not None]

    # ------------------------------------------------------------------------------------------------ pages

    def _grow(self, row: int, num_tokens: int) -> bool:
        holding = self.rows.holding(row)
        done = self.kv.grow(holding, num_tokens)
        self.rows.num_pages[row] = holding.num_pages
        return done

    def _make_room(self, row: int, num_tokens: int) -> bool:
        """Pages for ``num_tokens`` tokens of a running request, if need be by preempting those who are younger or of
        lower priority. False if it cannot run in this step."""
        request = self.rows.request(row)
        while not self._grow(row, num_tokens):
            missing = ceil_div(num_tokens, self.config.page_size) - int(self.rows.num_pages[row])
            if missing <= self.kv.num_available_pages + self._num_coming_pages():
                return False  # those who left give back enough once their last step is done
            victim = policy.choose_victim(self.running)
            if victim is request:
                return False  # all others go first; it keeps what it has until one of them needs it
            self._preempt(victim)
        return True

    def _num_coming_pages(self) -> int:
        """Pages that will be available once the launched steps are done: of requests that are leaving."""
        leaving = [self.rows.holding(r.row) for r in self.retiring if r.row is not None]
        return self.kv.num_pages_held_by(leaving) + self.kv.num_in_transit_pages

    # ------------------------------------------------------------------------------------------------ looking

    def _rows_of_running(self) -> Int32Array:
        if self._running_rows is None:
            self._running_rows = np.array([r.row for r in self.running], np.int32)
        return self._running_rows

    def _is_running(self, row: int) -> bool:
        request = self.rows.requests[row]
        return request is not None and request.status is RequestStatus.RUNNING

    def check(self) -> None:
        """Assert the invariants of queue, rows and pages."""
        self.kv.check()
        c = self.rows
        for queue in (self.waiting, self.running):
            assert [r.arrival for r in queue] == sorted({r.arrival for r in queue})
        assert all(r.row is None and not r.is_finished for r in self.waiting)
        holders = [*self.running, *self.retiring]
        assert len({r.row for r in holders}) == len(holders) == self.config.max_running - c.num_free
        for request in holders:
            row = request.row
            assert row is not None and c.requests[row] is request
            holding = c.holding(row)
            assert holding.num_pages == c.num_pages[row], request
            assert c.num_computed[row] <= c.num_tokens[row] <= c.limit[row], request
            assert c.num_computed[row] <= holding.num_pages * self.config.page_size, request
            assert request.num_tokens <= c.num_tokens[row] or request.is_finished, request
        living = {r.request_id for r in (*self.waiting, *holders) if not r.is_finished}
        assert living == set(self.requests), living ^ set(self.requests)


def _offsets(lengths: Int32Array) -> Int32Array:
    """Where each of the parts begins, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    lengths.cumsum(out=offsets[1:])
    return offsets


def _arrival(request: Request) -> int:
    return request.arrival
