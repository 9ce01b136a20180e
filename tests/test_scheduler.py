"""The scheduler's promises, one by one; `test_oracle` holds them together over thousands of schedules."""

from __future__ import annotations

import sys
from dataclasses import fields
from itertools import product
from types import FrameType
from typing import Any

import numpy as np
import oracle
import pytest
from builders_scheduler import EOS, TOKEN, Loop, make_case, make_config, make_params, make_prompt, make_scheduler

from minisgl.request import Request, RequestStatus
from minisgl.scheduler import SchedulerOutput, policy

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
ORDERS = ("mixed", "prefill_first", "decode_first")


# ------------------------------------------------------------------------------------------------------------ the end


@BOTH_LOOPS
@pytest.mark.parametrize("crowd", [0, 5])
def test_s03_exactly_max_tokens(overlap: bool, crowd: int) -> None:
    loop = Loop(overlap=overlap, max_running=4)
    lengths = [1, 2, 3, 5, *[4] * crowd]
    for n in lengths:
        loop.add(max_tokens=n)
    assert [len(output) for output in loop.run().values()] == lengths
    assert {f.reason for f in loop.finished.values()} == {"length"}
    assert [loop.finished[f"r{i}"].usage.completion_tokens for i in range(len(lengths))] == lengths


@BOTH_LOOPS
def test_s04_nothing_after_the_end(overlap: bool) -> None:
    """The step that was under way when EOS came brings a token too many: nobody sees it."""
    loop = Loop(overlap=overlap, script=lambda request_id, n: EOS if n == 4 else TOKEN + n)
    loop.add(max_tokens=20, ignore_eos=False)
    loop.add(max_tokens=20)
    assert loop.run() == {"r0": [7, 8, 9, 10], "r1": [7, 8, 9, 10, 0, *range(12, 27)]}
    assert loop.finished["r0"].reason == "stop" and loop.finished["r0"].stop_reason is None
    assert loop.num_pages_lost == 0 and loop.scheduler.requests == {}


@BOTH_LOOPS
def test_a_stop_token_is_named(overlap: bool) -> None:
    loop = Loop(overlap=overlap)
    loop.add(stop_token_ids=[TOKEN])
    loop.run()
    assert (loop.outputs["r0"], loop.finished["r0"].reason, loop.finished["r0"].stop_reason) == ([], "stop", TOKEN)


@BOTH_LOOPS
def test_logits_that_are_not_finite_end_one_request_and_are_not_shared(overlap: bool) -> None:
    loop = Loop(overlap=overlap, script=lambda request_id, n: -1 if request_id == "r0" else TOKEN)
    loop.add(make_prompt())
    loop.add(make_prompt(first=500))
    loop.run()
    assert loop.finished["r0"].reason == "abort" and loop.finished["r0"].stop_reason == "the logits are not finite"
    assert len(loop.outputs["r1"]) == 4
    for prompt, num_cached in ((make_prompt(), 0), (make_prompt(first=500), 9)):
        again = loop.add(prompt)
        loop.run()
        assert again.num_cached_tokens == num_cached


# -------------------------------------------------------------------------------------------------------------- abort


@BOTH_LOOPS
@pytest.mark.parametrize("budget", [4, 5, 7, 20])
@pytest.mark.parametrize("num_steps", range(1, 12))
def test_a04_abort_between_chunks(overlap: bool, budget: int, num_steps: int) -> None:
    """A03, A04: after every chunk, in flight or not, the last one too: all pages come back."""
    loop = Loop(overlap=overlap, max_num_batched_tokens=budget)
    loop.add(20)
    for _ in range(num_steps):
        loop.step()
    loop.abort("r0")
    loop.scheduler.check()
    loop.add(make_prompt(20))  # the same prompt: what it left must be right
    loop.run()
    assert loop.num_pages_lost == 0 and len(loop.outputs["r1"]) == 4


@pytest.mark.parametrize("moment", ["planned", "launched", "ended"])
def test_a03_abort_in_the_step_that_ends_it(moment: str) -> None:
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    scheduler.add("a", make_prompt(), make_params(1))
    plan = scheduler.schedule()
    assert plan is not None
    if moment == "planned":
        assert loop.scheduler.abort("a") is not None
    result = loop._result(plan)
    if moment == "launched":
        assert scheduler.abort("a") is not None
    output = scheduler.update(plan, result)
    assert scheduler.abort("a") is None
    assert len(output.finished) == len(output.request_ids) == (moment == "ended")
    scheduler.check()
    assert not scheduler.has_work and loop.num_pages_lost == 0


def test_a05_abort_in_every_state() -> None:
    loop = Loop(overlap=True, max_running=2)
    for _ in range(3):
        loop.add(max_tokens=8)
    assert not loop.abort("nobody")
    assert loop.abort("r2")  # queued
    loop.step()
    assert loop.abort("r0") and not loop.abort("r0")  # in flight, and twice
    loop.run()
    assert not loop.abort("r1")  # ended
    assert [loop.finished[request_id].reason for request_id in ("r0", "r1", "r2")] == ["abort", "length", "abort"]
    assert loop.num_pages_lost == 0 and len(loop.outputs["r1"]) == 8


@BOTH_LOOPS
def test_a05_abort_of_a_preempted_request(overlap: bool) -> None:
    """Waiting for its last launched step, and waiting for a page."""
    for num_more_steps in (0, 1, 2):
        loop = Loop(overlap=overlap, num_pages=8, max_model_len=28, mean_output=0.0)
        loop.add(10, max_tokens=12)
        victim = loop.add(10, max_tokens=12)
        loop.run_until(lambda victim=victim: victim.status is RequestStatus.PREEMPTED)
        for _ in range(num_more_steps):
            loop.step()
        assert loop.abort("r1")
        assert len(loop.run()["r0"]) == 12
        assert loop.num_pages_lost == 0


def test_an_id_is_free_again_at_once() -> None:
    """The request that ended may still be in flight when its id comes back."""
    loop = Loop(overlap=True)
    loop.add()
    loop.step()
    loop.abort("r0")
    loop.scheduler.add("r0", make_prompt(), make_params(3))
    loop.outputs["r0"], loop.finished = [], {}
    with pytest.raises(ValueError, match="in use"):
        loop.scheduler.add("r0", make_prompt(), make_params(3))
    assert loop.run() == {"r0": [TOKEN] * 3}


# ---------------------------------------------------------------------------------------------------------- admission


def test_c08_admission_counts_whole_pages() -> None:
    """C08: 12 prompts of 3 tokens are 60 tokens in all, and 12 pages where there are 4."""
    loop = Loop(page_size=16, num_pages=5)
    for _ in range(12):
        loop.add(3, max_tokens=2)
    loop.step()
    assert loop.plans[0].num_requests == 4
    assert [len(output) for output in loop.run().values()] == [2] * 12


def test_c09_what_can_never_fit_is_refused_at_the_door() -> None:
    with pytest.raises(ValueError, match=r"max_model_len 81 .* pool of 80 tokens \(5 pages of 16\)"):
        make_config(page_size=16, num_pages=6, max_model_len=81)
    loop = Loop(page_size=16, num_pages=6, max_model_len=80)
    with pytest.raises(ValueError, match=r"80 tokens.* at most 79"):
        loop.add(80)
    with pytest.raises(ValueError, match="empty"):
        loop.add(0)
    assert loop.add(79, max_tokens=1_000).max_tokens == 1  # clamped to what is left
    assert loop.add(10, max_tokens=None).max_tokens == 70
    assert [len(output) for output in loop.run().values()] == [1, 70]


def test_c10_an_estimate_admits_more_than_a_reservation() -> None:
    """C10 as a count: all ask for much more than they take."""
    running = {}
    for admission in ("estimate", "reserve"):
        loop = Loop(admission=admission, mean_output=8.0, script=lambda request_id, n: EOS if n == 8 else TOKEN)
        for _ in range(40):
            loop.add(8, max_tokens=56, ignore_eos=False)
        loop.step()
        running[admission] = loop.plans[0].num_requests
        assert [len(output) for output in loop.run().values()] == [8] * 40
        assert loop.scheduler.num_preemptions == 0
    assert running == {"estimate": 19, "reserve": 6}  # of 99 pages: 5 each, and 16 each


@BOTH_LOOPS
def test_a_reservation_never_preempts(overlap: bool) -> None:
    for seed, page_size, cache in product(range(25), (1, 4, 16), (True, False)):
        case = oracle.Case.draw(page_size, cache, overlap, seed)
        if case.config.admission == "reserve":
            assert oracle.run(case)["preemptions"] == 0


def test_l05_ten_thousand_prompts_keep_their_order() -> None:
    loop = Loop(make_scheduler(num_pages=20_000))
    loop.scheduler.check = lambda: None  # type: ignore[method-assign]  # as often as there are steps is too often here
    for i in range(10_000):
        loop.add(np.full(1 + i % 50, i, np.int32), max_tokens=1)
    first: list[str] = []
    while loop.scheduler.has_work:
        plan = loop.step()
        first += [admitted.request_id for admitted in plan.admitted] if plan else []
    assert first == list(loop.outputs) and all(len(output) == 1 for output in loop.outputs.values())
    assert len(loop.plans) == 40  # 256 rows a step


# ------------------------------------------------------------------------------------------------ orders and budgets


def kinds(plan: SchedulerOutput) -> str:
    """p for a step with prompt tokens, d for one with decodes, pd for one with both."""
    known = np.diff(plan.token_offsets) > 0
    return "p" * bool(known.any()) + "d" * bool((~known).any())


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("mixed", "p pd pd d d"),  # prefill chunks ride along with decodes
        ("prefill_first", "p p p d d"),  # nobody decodes while a prompt waits
        ("decode_first", "p d d p p d d"),  # no prompt while anybody decodes
    ],
)
def test_what_an_order_does(order: str, steps: str) -> None:
    """r0 (4 tokens) arrives alone; r1 (16 tokens, in chunks of 8) while it runs; three tokens each."""
    loop = Loop(order=order, chunk_size=8)
    loop.add(4, max_tokens=3)
    loop.step()
    loop.add(16, max_tokens=3)
    loop.run()
    assert " ".join(kinds(plan) for plan in loop.plans) == steps


def test_a_prompt_does_not_hold_up_those_who_run() -> None:
    """C11 as a count: with chunks that ride along, a running request gets its token in every step."""
    loop = Loop(max_num_batched_tokens=8, max_model_len=200)
    loop.add(4, max_tokens=12)
    loop.step()
    loop.add(50, max_tokens=1)
    for plan in (loop.step() for _ in range(7)):
        assert plan is not None and plan.total_tokens == 8 and plan.rows.tolist() == [0, 1]
        assert plan.num_tokens.tolist() == [1, 7]


@BOTH_LOOPS
@pytest.mark.parametrize(("budget", "chunk"), [(1, None), (7, None), (16, 3), (64, 5), (5, 64)])
def test_budget_and_chunk_are_never_exceeded(overlap: bool, budget: int, chunk: int | None) -> None:
    loop = Loop(overlap=overlap, max_num_batched_tokens=budget, chunk_size=chunk)
    for n in (1, 5, 17, 33, 33):
        loop.add(n, max_tokens=3)
    loop.run()
    assert max(plan.total_tokens for plan in loop.plans) <= budget
    assert max(plan.num_tokens.max() for plan in loop.plans) <= (chunk or budget)
    num_prompt_tokens = sum(len(plan.token_ids) for plan in loop.plans)
    assert num_prompt_tokens == 1 + 5 + 17 + 33 + 33  # each computed once
    columns = [getattr(plan, each.name) for plan in loop.plans for each in fields(plan)]
    assert {column.dtype for column in columns if isinstance(column, np.ndarray)} == {np.dtype("i4"), np.dtype("?")}


def test_rows_are_ordered_by_arrival() -> None:
    """Also when an older request comes back into a higher row."""
    loop = Loop(num_pages=8, max_model_len=28, mean_output=0.0, max_running=3)
    requests = [loop.add(6, max_tokens=16) for _ in range(4)]
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    owner: dict[int, str] = {}
    for plan in loop.plans:
        owner |= {admitted.row: admitted.request_id for admitted in plan.admitted}
        arrivals = [requests[int(owner[row][1:])].arrival for row in plan.rows.tolist()]
        assert arrivals == sorted(set(arrivals))


@pytest.mark.parametrize("order", ORDERS)
def test_same_inputs_same_plans(order: str) -> None:
    def plans() -> list[str]:
        loop = Loop(overlap=True, order=order, num_pages=12, max_model_len=28, mean_output=0.0, max_running=4)
        for n in (6, 3, 14, 9, 6, 6):
            loop.add(make_prompt(n), max_tokens=n)
            loop.step()
        loop.abort("r2")
        loop.run()
        return [
            f"{[*plan.rows_view()]} {plan.page_copies.tolist()} {[a.seed for a in plan.admitted]}"
            for plan in loop.plans
        ]

    assert plans() == plans()


@pytest.mark.parametrize("overlap", [False, True])
def test_c20_boundaries(overlap: bool) -> None:
    """C20: budget of 1, chunk smaller than a page, prompt = k chunks, and one more and one less."""
    for chunk, page_size, n, budget in product((1, 2, 5, 16), (1, 4, 16), (1, 15, 16, 17, 33), (1, 64)):
        prompts = [range(1, n + 1), range(1, n + 1), [*range(1, n), 28]]
        sizes: dict[str, Any] = dict(page_size=page_size, chunk_size=chunk, max_num_batched_tokens=budget)
        counts = oracle.run(make_case(prompts, overlap=overlap, max_tokens=3, **sizes))
        assert counts["requests"] == 3


# --------------------------------------------------------------------------------------------------------- preemption


@BOTH_LOOPS
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_c06_c07_preempted_requests_come_back_to_a_fuller_cache(overlap: bool, page_size: int) -> None:
    """C06, C07: a pool of two requests, fifty with prefixes in common: all get what a large pool gives."""
    prompts = [[*range(1, 1 + 3 * page_size), i % 7] for i in range(50)]
    config = make_config(page_size=page_size, num_pages=1 + 15, max_model_len=8 * page_size)
    counts = oracle.run(make_case(prompts, overlap=overlap, max_tokens=3 * page_size + 2, config=config))
    assert counts["preemptions"] > 3
    assert counts["cached tokens"] > 50 * 2 * page_size


@BOTH_LOOPS
def test_the_youngest_of_the_lowest_priority_is_preempted(overlap: bool) -> None:
    loop = Loop(overlap=overlap, num_pages=10, max_model_len=32, mean_output=0.0)
    for priority in (0, -1, -1, 0):
        loop.add(7, max_tokens=12, priority=priority)
    loop.run()
    preempted = [request_id for plan in loop.plans for request_id in plan.preempted]
    assert preempted[:2] == ["r2", "r1"]
    assert [len(output) for output in loop.outputs.values()] == [12] * 4


def test_one_victim_is_enough_if_it_gives_back_enough() -> None:
    """With overlap its pages come a step later, those of its prompt among them: no reason to take another one's too."""
    loop = Loop(overlap=True, num_pages=80, max_model_len=128, chunk_size=24, mean_output=0.0)
    loop.add(120, max_tokens=2)  # its last chunk finds five of its six pages taken by answers longer than expected
    for _ in range(6):
        loop.add(31, max_tokens=8)
    loop.run()
    assert next(plan.preempted for plan in loop.plans if plan.preempted) == ("r6",)
    assert [len(output) for output in loop.outputs.values()] == [2, *[8] * 6]


@pytest.mark.parametrize("order", ORDERS)
@BOTH_LOOPS
def test_who_cannot_grow_does_not_keep_the_budget(order: str, overlap: bool) -> None:
    """The oldest request has the lowest priority, cannot get a page, and a step has one token: the other must run."""
    config = make_config(order=order, max_num_batched_tokens=1, num_pages=8, max_model_len=28, prefix_cache=False)
    loop = Loop(make_scheduler(config, mean_output=0.0), overlap=overlap)
    loop.add(8, max_tokens=16, priority=-1)
    loop.add(8, max_tokens=16, priority=1)
    assert [len(output) for output in loop.run().values()] == [16, 16]


def test_preempted_in_flight_then_ended_by_the_step_that_was_under_way() -> None:
    """The victim's last token is already on its way: it ends, and does not come back."""
    loop = Loop(overlap=True, num_pages=8, max_model_len=28, mean_output=0.0)
    loop.add(12, max_tokens=12)
    victim = loop.add(6, max_tokens=5)
    loop.run_until(lambda: loop.scheduler.num_preemptions)
    loop.run()
    assert loop.scheduler.num_preemptions == 1
    assert victim.num_output_tokens == 5 and sum(len(plan.admitted) for plan in loop.plans) == 2


@BOTH_LOOPS
def test_prompt_logprobs_compute_the_whole_prompt_and_share_it(overlap: bool) -> None:
    """The match is skipped, so the pages are duplicates of the tree's and give way to them."""
    prompts = [range(1, 20)] * 3
    case = make_case(prompts, arrivals=[0, 4, 8], overlap=overlap, chunk_size=7, params=dict(prompt_logprobs=2))
    counts = oracle.run(case)
    assert counts["cached tokens"] == 0 and counts["remaps"] == 2 * 4


# ---------------------------------------------------------------------------------------------------- counts and costs


def test_c18_check_notices_a_wrong_row() -> None:
    for name in ("num_pages", "num_computed"):
        loop = Loop()
        loop.add()
        loop.step()
        getattr(loop.scheduler.rows, name)[0] += 100
        with pytest.raises(AssertionError):
            loop.scheduler.check()


def test_c19_a_chunk_is_no_hit() -> None:
    """C19: the request's own chunks do not count as cached; what came from others does."""
    loop = Loop(chunk_size=4)
    for _ in range(2):
        loop.add(make_prompt(30), max_tokens=1)
        loop.run()
    assert [loop.finished[r].usage.cached_tokens for r in ("r0", "r1")] == [0, 29]


def test_c23_appending_tokens_does_not_copy_them_each_time() -> None:
    """C23 as a count: the buffer doubles."""
    request = Request("r", make_prompt(), make_params(32_000), max_tokens=32_000)
    buffers = set()
    for token in range(32_000):
        request.append(token)
        buffers.add(len(request._tokens))
    assert len(buffers) <= 12 and request.output_token_ids.tolist() == list(range(32_000))


def test_the_host_work_of_a_decode_step_does_not_grow_with_the_batch() -> None:
    """C24 as a count: function calls of a step in which nobody comes, goes or needs a page."""

    def num_calls(num_requests: int) -> int:
        loop = Loop(page_size=64, num_pages=1_000)
        for _ in range(num_requests):
            loop.add(max_tokens=20)
        for _ in range(3):
            loop.step()
        calls = []

        def count(frame: FrameType, event: str, arg: object) -> None:
            calls.append(event)

        sys.setprofile(count)
        plan = loop.scheduler.schedule()
        sys.setprofile(None)
        assert plan is not None and plan.total_tokens == num_requests
        return len(calls)

    assert num_calls(8) == num_calls(200)


def test_a_plan_can_be_read() -> None:
    loop = Loop()
    loop.add([1, 2, 3, 4, 5], max_tokens=2)
    loop.run()
    first, second = (list(plan.rows_view()) for plan in loop.plans)
    assert first[0]._asdict() == dict(
        row=0, start=0, num_tokens=5, token_ids=[1, 2, 3, 4, 5], new_pages=[1, 2], first_page=0, samples=True
    )
    assert second[0]._asdict() == dict(
        row=0, start=5, num_tokens=1, token_ids=None, new_pages=[], first_page=2, samples=True
    )


# ------------------------------------------------------------------------------------------------- policies, as tables


@pytest.mark.parametrize(
    ("admission", "max_new_tokens", "recent_mean", "expected"),
    [("reserve", 50, 3.0, 50), ("estimate", 50, 3.0, 4), ("estimate", 50, 3.9, 4), ("estimate", 2, 3.0, 2)],
)
def test_expected_new_tokens(admission: Any, max_new_tokens: int, recent_mean: float, expected: int) -> None:
    assert policy.expected_new_tokens(admission, max_new_tokens, recent_mean) == expected


@pytest.mark.parametrize(
    ("expected_tokens", "num_pages", "promised"),
    [([], [], 0), ([17], [2], 0), ([33], [2], 1), ([33, 64, 1], [2, 1, 5], 1 + 3 + 0)],
)
def test_promised_pages(expected_tokens: list[int], num_pages: list[int], promised: int) -> None:
    assert policy.promised_pages(np.array(expected_tokens, int), np.array(num_pages, int), 16) == promised


@pytest.mark.parametrize(
    ("priorities", "victim"), [([0], 0), ([0, 0, 0], 2), ([0, -1, 0], 1), ([-1, -1, 0], 1), ([2, 1, 3], 1)]
)
def test_choose_victim(priorities: list[int], victim: int) -> None:
    requests = [
        Request(f"r{i}", make_prompt(), make_params(priority=priority), arrival=i)
        for i, priority in enumerate(priorities)
    ]
    assert policy.choose_victim(requests) is requests[victim]


def test_every_order_has_every_kind_of_work_once() -> None:
    for order in ORDERS:
        assert sorted(kind for stage in policy.STAGES[order] for kind in stage) == ["admit", "decode", "prefill"]
