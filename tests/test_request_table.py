"""From plans to batches: packed, sent and prepared, with padding and without."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders_scheduler import Loop, make_scheduler

from minisgl.engine.graphs import PAGES_PER_REQUEST, TOKEN_BUCKETS, GraphCapture, Graphs, decode_buckets
from minisgl.engine.request_table import RequestTable, StepBuffers, pack_step, sampled_rows
from minisgl.forward import ForwardBatch
from minisgl.kernels.kernel_set import PLAIN
from minisgl.scheduler import SchedulerOutput
from minisgl.scheduler.plan import empty_plan

COLUMNS = ("input_ids", "positions", "slot_mapping", "seq_lens", "logits_indices")


def new_table(page_size: int = 4) -> RequestTable:
    return RequestTable(max_running=8, table_width=16, page_size=page_size, device="cpu", kernels=PLAIN)


@pytest.fixture(scope="module")
def plans() -> list[SchedulerOutput]:
    """Prompts in chunks, shared prefixes, preemption, remapped pages, decodes; a token of its own for each place."""
    scheduler = make_scheduler(num_pages=18, max_running=8, max_num_batched_tokens=16, chunk_size=6, mean_output=0.0)
    loop = Loop(scheduler, script=lambda request_id, n: 1000 + 10 * n + int(request_id[1:]))
    for i in range(12):
        shared = [50, 51, 52, 53, 54, 55] if i % 3 else [60 + i]
        loop.add([*shared, *range(100 * i, 100 * i + i + 1)], max_tokens=9)
    loop.run()
    assert scheduler.num_preemptions and any(len(plan.page_copies) for plan in loop.plans)
    return loop.plans


def remember(table: RequestTable, plan: SchedulerOutput) -> None:
    """Some token for each row that samples, as the sampler would leave it."""
    rows = torch.from_numpy(plan.rows[plan.samples]).long()
    table.last_tokens[rows] = plan.step_id * 10 + rows


def test_batches_are_valid_and_sample_the_plan_s_rows(plans: list[SchedulerOutput]) -> None:
    table = new_table()
    for plan in plans:
        batch, rows = table.prepare(plan)
        batch.validate()
        assert batch.seq_lens.tolist() == (plan.starts + plan.num_tokens).tolist()
        assert rows.tolist() == plan.rows[plan.samples].tolist()
        known = np.diff(plan.token_offsets) > 0
        for i in np.flatnonzero(~known).tolist():  # decodes continue with what the device remembers
            assert int(batch.input_ids[batch.host_cu_seqlens_q[i]]) == int(table.last_tokens[plan.rows[i]])
        remember(table, plan)


@pytest.mark.parametrize("whole_buckets", [True, False])
def test_E03_padding_changes_nothing_of_a_step(plans: list[SchedulerOutput], whole_buckets: bool) -> None:
    """E03: padded by requests of one token each, as decodes are, or by one request that takes all that is left."""
    table, padded = new_table(), new_table()
    for plan in plans:
        right, right_rows = table.prepare(plan)
        decodes = plan.total_tokens == plan.num_requests
        num_requests = plan.num_requests + (3 if decodes and whole_buckets else 1)
        num_tokens = num_requests if decodes and whole_buckets else plan.total_tokens + 5
        step = pack_step(plan, num_requests, num_tokens)
        buffers = StepBuffers.new(
            num_requests, num_tokens, table_width=16, packed_len=len(step.values) + 7, device=torch.device("cpu")
        )
        padded.send(step, into=buffers.packed)
        batch = padded.batch(step, buffers)
        n, r = plan.total_tokens, plan.num_requests
        for name in COLUMNS:
            assert torch.equal(getattr(batch, name)[: len(getattr(right, name))], getattr(right, name)), name
        assert not batch.slot_mapping[n:].any() and not batch.positions[n:].any()  # the reserved page 0
        assert (batch.seq_lens[r:] == 1).all() and not batch.page_table[r:, 0].any()
        assert torch.equal(sampled_rows(step, buffers), right_rows)
        own = replace(batch.part(0, r), logits_indices=batch.logits_indices)
        own.validate()
        assert own.num_decodes == right.num_decodes
        assert batch.num_decodes == (num_requests if num_tokens == num_requests else right.num_decodes)
        for t in (table, padded):
            remember(t, plan)
        for name in ("seq_lens", "page_table", "last_tokens"):
            assert torch.equal(getattr(table, name), getattr(padded, name)), name


def test_a_step_like_the_one_before_packs_alike() -> None:
    """So that it need not be sent: the same requests, none with a new page."""
    alike, loop = 0, Loop(page_size=16)
    for _ in range(3):
        loop.add(5, max_tokens=40)
    loop.run()
    plans = loop.plans
    for before, plan in itertools.pairwise(plans):
        same = (
            plan.rows.tolist() == before.rows.tolist()
            and all(p.total_tokens == p.num_requests and p.samples.all() for p in (before, plan))
            and not any(len(x) for p in (before, plan) for x in (p.token_ids, p.page_ids, p.admitted))
        )
        packed = [pack_step(p, p.num_requests + 2, p.num_requests + 2).values for p in (before, plan) if same]
        if same:
            assert np.array_equal(*packed)
            alike += 1
    assert alike > 30


def test_a_graph_s_step_of_nothing_is_all_padding() -> None:
    step = pack_step(empty_plan(), 3, 3)
    assert (step.values[:3] == -1).all() and step.cu_seqlens_q.tolist() == [0, 1, 2, 3] and step.num_samples == 0


class SlowHost(GraphCapture):
    """One that launches as fast as a device computes so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.asked = num_tokens, list[int]()

    def _host_is_slow(self, num_tokens: int) -> bool:
        self.asked.append(num_tokens)
        return num_tokens <= self.num_tokens


@pytest.mark.parametrize("num_tokens", [0, 64, 1000, 8192, 10**6])
def test_graphs_of_tokens_are_for_steps_that_the_host_is_slow_with(num_tokens: int) -> None:
    capture, sizes = SlowHost(num_tokens), [*(n for n in TOKEN_BUCKETS if n < 8192), 8192]
    assert capture.worthwhile_token_buckets(8192) == tuple(n for n in sizes if n <= num_tokens)
    assert len(capture.asked) <= 4, "each answer takes a tenth of a second"


def test_E04_buckets_end_at_the_largest_batch() -> None:
    """E04"""
    assert decode_buckets(0) == [] and decode_buckets(1) == [1] and decode_buckets(3) == [1, 2, 3]
    assert decode_buckets(160)[-2:] == [128, 160] and decode_buckets(300)[-2:] == [256, 300]
    for most in range(1, 600):
        buckets = decode_buckets(most)
        assert buckets == sorted(set(buckets)) and buckets[-1] == most
    assert list(TOKEN_BUCKETS) == sorted(TOKEN_BUCKETS)


class FakeGraph:
    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests

    def takes(self, plan: SchedulerOutput) -> bool:
        return len(plan.page_ids) <= PAGES_PER_REQUEST * self.num_requests


def test_a_step_takes_the_smallest_graph_that_holds_it(plans: list[SchedulerOutput]) -> None:
    graphs = Graphs({n: FakeGraph(n) for n in (1, 2, 4)}, {n: FakeGraph(n) for n in (8, 64)})  # type: ignore[misc]
    for plan in plans:
        found = graphs.for_decodes(plan)
        only_decodes = plan.total_tokens == plan.num_requests and plan.samples.all()
        fits = only_decodes and plan.num_requests <= 4
        assert (found is not None) == bool(fits)
        if found is not None:
            assert found.num_requests == min(n for n in (1, 2, 4) if n >= plan.num_requests)
        pieces = graphs.for_tokens(plan)
        assert pieces is not None and pieces.num_requests == (8 if plan.total_tokens <= 8 else 64)
    assert Graphs().for_decodes(plans[0]) is None is Graphs().for_tokens(plans[0])


def test_a_part_of_a_batch_is_a_batch(plans: list[SchedulerOutput]) -> None:
    table = new_table()
    for plan in plans:
        batch: ForwardBatch = table.prepare(plan)[0]
        middle = plan.num_requests // 2
        for begin, end in ((0, middle), (middle, plan.num_requests)):
            if end > begin:
                batch.part(begin, end).validate()
