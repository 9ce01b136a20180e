"""Triton's attention against float64 and their plain twins: compiled where there is a CUDA device, else interpreted.

Outputs are NaN before a kernel writes them, and so is whatever it has no business to read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import make_batch, make_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_helpers import DEVICE, MARKS, NAN, check_compilation, poison, randn, triton

from minisgl import LLM, SamplingParams
from minisgl.benchmark.tune_decode import ALTERED, altered
from minisgl.engine.attention import AttentionShape, load_attention
from minisgl.engine.attention.triton_backend import TritonAttention
from minisgl.forward import ForwardBatch
from minisgl.kernels.triton_attention import decode_attention, prefill_attention
from minisgl.kernels.triton_line import DecodeOptions, DecodePlan, choose_options, lay_out

pytestmark = MARKS
# Rounding of the result (half a unit in the last place), and of the weights before they meet V.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Of one request, in float64."""
    (num_q, heads, _), num_k = q.shape, k.shape[0]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    hidden = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).triu(num_k - num_q + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class Step:
    """A batch with random queries, a cache that is NaN wherever no request has a token, and the float64 result."""

    def __init__(
        self,
        new: Sequence[int],
        computed: Sequence[int],
        *,
        page_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        scale: float = 0.3,
    ) -> None:
        lengths = [n + done for n, done in zip(new, computed, strict=True)]
        pages = make_pages(len(new), pages_each=-(-max(lengths) // page_size), seed=4)
        self.batch = make_batch(
            [[0] * n for n in new], computed=computed, pages=pages, page_size=page_size, device=DEVICE
        )
        self.scale = scale
        self.q = randn(self.batch.num_tokens, heads, dim, seed=9, dtype=dtype)
        self.kv = torch.full((2, 1 + sum(map(len, pages)), page_size, kv_heads, dim), NAN, dtype=dtype, device=DEVICE)
        exact, start = [], 0
        for i, length in enumerate(lengths):
            own = randn(2, length, kv_heads, dim, seed=100 + i, dtype=dtype)
            where = torch.arange(length)
            self.kv[:, torch.tensor(pages[i])[where // page_size], where % page_size] = own
            exact.append(exact_attention(self.q[start : start + new[i]], *own, scale))
            start += new[i]
        self.exact = torch.cat(exact)

    def new_out(self) -> Tensor:
        return torch.full_like(self.q, NAN)

    def check(self, out: Tensor) -> None:
        assert out.dtype == self.q.dtype
        tolerance = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), self.exact, atol=tolerance, rtol=tolerance)


NEVER, ALWAYS = -(10**6), 10**6  # patience with whole items


def decode(
    step: Step,
    lengths: Tensor | None = None,
    *,
    num_programs: int,
    heads: int = 1,
    patience: int = NEVER,
    **options: int,
) -> Tensor:
    """Twice: the second launch finds the counters as the first one did. What is not written stays NaN."""
    page_table, seq_lens = step.batch.page_table, step.batch.seq_lens if lengths is None else lengths
    counters, out = torch.zeros(num_programs, dtype=torch.int32, device=DEVICE), step.new_out()
    chosen = DecodeOptions(heads=heads, patience=patience, **options)
    _, _, page_size, num_kv_heads, _ = step.kv.shape
    for _ in range(2):
        out.fill_(NAN)
        plan = lay_out(
            seq_lens, page_table, chosen, num_programs=num_programs, num_kv_heads=num_kv_heads, page_size=page_size
        )
        decode_attention(step.q, step.kv, out, page_table, seq_lens, plan, counters, scale=step.scale)
        assert not counters.any()
    return out


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize(("num_programs", "heads"), [(1, 1), (3, 2), (8, 1), (30, 2)])
def test_decode_at_the_edges_of_pages_and_stretches(
    monkeypatch: pytest.MonkeyPatch, page_size: int, num_programs: int, heads: int
) -> None:
    """One program for all, one for a block or less, and between."""
    poison(monkeypatch)
    lengths = [130, 1, 15, 16, 17, 1, 1, 23, 24, 25, 63, 64, 65]
    step = Step([1] * len(lengths), [n - 1 for n in lengths], page_size=page_size, heads=6)
    step.check(decode(step, num_programs=num_programs, heads=heads, block_rows=16))


@pytest.mark.parametrize("num_programs", [2, 3, 4, 5, 40])
@pytest.mark.parametrize("lengths", [[32, 32], [32] * 6, [128], [100], [16], [3], [1, 95, 32]])
def test_stretches_that_end_with_an_item_or_in_its_first_block(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], num_programs: int
) -> None:
    poison(monkeypatch)
    step = Step([1] * len(lengths), [n - 1 for n in lengths], page_size=16, dim=128, heads=8)
    with last_to_first():
        out = decode(step, num_programs=num_programs, heads=1, block_rows=16, num_warps=1)  # merges piece by piece
    step.check(out)


@contextmanager
def last_to_first() -> Iterator[None]:
    """The interpreter runs programs one after the other; here the last one comes first. A device has any order."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as interpreter

    forwards = interpreter.set_grid_idx
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            interpreter, "set_grid_idx", lambda x, y, z: forwards(interpreter.grid_dim[0] - 1 - x, y, z)
        )
        yield


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from([1, 2]),
    st.sampled_from([NEVER, 0, 2, ALWAYS]),
    st.sampled_from([0, 1, 3]),
)
def test_any_lengths_over_any_number_of_programs_in_either_order(
    lengths: list[int], num_programs: int, heads: int, patience: int, item_cost: int
) -> None:
    step = Step([1] * len(lengths), [n - 1 for n in lengths])
    options = dict(num_programs=num_programs, heads=heads, block_rows=16, patience=patience, item_cost=item_cost)
    step.check(decode(step, **options))
    with last_to_first():
        step.check(decode(step, **options))


@pytest.mark.parametrize("num_programs", [1, 4, 30])
@pytest.mark.parametrize("lengths", [[130, 1, 17], [1], []])
def test_padding_at_the_end_gets_zeros_from_many_programs(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], num_programs: int
) -> None:
    """Padding is as graphs have it: one token on page 0."""
    poison(monkeypatch)
    padded = [*lengths, *[1] * 9]
    step = Step([1] * len(padded), [n - 1 for n in padded], page_size=16, heads=6)
    step.batch.page_table[len(lengths) :] = 0
    step.kv[:, 0] = NAN
    step.exact[len(lengths) :] = 0
    step.check(decode(step, num_programs=num_programs, heads=2, block_rows=16))


def test_padding_is_no_part_of_the_line() -> None:
    """Each padding request would be an item or two, which costs something however short it is, and all of them, at the
    line's end, would be one program's."""
    options = DecodeOptions(heads=1, block_rows=16, each=1, patience=NEVER, item_cost=0)
    without = records_of([50, 5], options, 4)
    assert records_of([50, 5], options, 4, num_padding=40) == without and {r[9] for r in without} == {2}
    nothing = records_of([], options, 4, num_padding=3)
    assert all(r[0] > r[4] and r[9] == 0 for r in nothing)


def records_of(
    lengths: list[int], options: DecodeOptions, num_programs: int, *, num_padding: int = 0
) -> list[list[int]]:
    """With 2 KV heads; request i has pages 1 + 100 * i and following, of 16 tokens."""
    pages = 1 + 100 * torch.arange(len(lengths))[:, None] + torch.arange(100)
    pages = torch.cat([pages, torch.zeros(num_padding, 100, dtype=torch.int64)])
    seq_lens = torch.tensor([*lengths, *[1] * num_padding], dtype=torch.int32, device=DEVICE)
    plan = lay_out(seq_lens, pages.int().to(DEVICE), options, num_programs=num_programs, num_kv_heads=2, page_size=16)
    assert isinstance(plan, DecodePlan)
    return plan.records[:, :10].tolist()


def test_a_record_says_what_a_program_begins_and_ends_with() -> None:
    """First item, its token, its length and the token's page; last item and the token where it ends; the programs that
    share the first item, and the last of those that share the last one; how many requests are real."""
    options, open_end = DecodeOptions(heads=1, block_rows=16, each=1, patience=NEVER, item_cost=0), 2**31 - 1
    records = records_of([50, 5], options, 4)  # of 4, 4, 1 and 1 blocks: stretches of 3
    assert records[0][:6] == [0, 0, 50, 1, 0, 48] and records[0][8] == 1
    assert records[1] == [0, 48, 50, 4, 1, 32, 0, 1, 2, 2]
    assert records[2][:8] == [1, 32, 50, 3, 2, open_end, 1, 2]
    assert records[3][:6] == [3, 0, 5, 101, 3, open_end]
    records = records_of([1], options, 3)  # two heads' blocks for three programs
    assert records[0][:6] == [0, 0, 1, 1, 0, open_end] and records[1][:6] == [1, 0, 1, 1, 1, open_end]
    assert records[2][0] > records[2][4]


def test_an_item_costs_something_beside_its_blocks() -> None:
    """A block of 16 tokens for each: 2 x 64 short items and two long ones, shared by 8 programs."""
    lengths, most = [16] * 64 + [1024], {}
    for item_cost in (0, 1, 3):
        options = DecodeOptions(heads=1, block_rows=16, each=1, patience=NEVER, item_cost=item_cost)
        records = records_of(lengths, options, 8)
        whole = [set(range(r[0] + (r[1] > 0), r[4] + 1)) for r in records]
        most[item_cost] = max(map(len, whole))
        assert sorted(item for items in whole for item in items) == sorted({*range(130)})
    assert most == {0: 32, 1: 25, 3: 21}


def test_what_an_item_costs_begins_with_the_program_that_has_its_first_block() -> None:
    options, open_end = DecodeOptions(heads=1, block_rows=16, each=1, patience=NEVER, item_cost=2), 2**31 - 1
    records = records_of([32], options, 4)  # 2 + 2 and 2 + 2: stretches of 2
    assert records[0][0] > records[0][4] and records[2][0] > records[2][4], "nothing but cost: left to the next"
    assert records[1][:6] == [0, 0, 32, 1, 0, open_end] and records[3][:6] == [1, 0, 32, 1, 1, open_end]
    records = records_of([48], options, 5)  # 2 + 3 and 2 + 3: borders at 2, 4, 6, 8
    assert records[1][:6] == [0, 0, 48, 1, 0, 32] and records[1][8] == 2
    assert records[2][:8] == [0, 32, 48, 3, 0, open_end, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "num_programs", "each", "patience", "is_whole"),
    [
        ([64] * 4, 7, 1, 2, False),  # 8 blocks for one of the programs, 5 if they are cut
        ([64] * 4, 7, 1, 3, True),
        ([48] * 3, 10, 2, 1, False),  # two programs of a multiprocessor read 6 blocks, 4 if they are cut
        ([48] * 3, 10, 2, 2, True),
        ([640, 16], 4, 1, 2, False),
    ],
)
def test_items_stay_whole_where_that_takes_hardly_longer(
    lengths: list[int], num_programs: int, each: int, patience: int, is_whole: bool
) -> None:
    options = DecodeOptions(heads=1, block_rows=16, each=each, patience=patience, item_cost=0)
    records = [record for record in records_of(lengths, options, num_programs) if record[0] <= record[4]]
    assert all(record[1] == 0 for record in records) == is_whole
    if is_whole:
        items = [item for record in records for item in range(record[0], record[4] + 1)]
        assert items == list(range(2 * len(lengths))) and all(record[5] == 2**31 - 1 for record in records)


def test_whole_items_are_shared_by_the_border_nearest_to_an_equal_stretch() -> None:
    options = DecodeOptions(heads=1, block_rows=16, each=1, patience=ALWAYS, item_cost=0)
    records = records_of([64] * 4, options, 7)  # items of 4 blocks, stretches of 5: borders at 0, 4, 12, 16, 20, ..
    assert [(r[0], r[4]) for r in records if r[0] <= r[4]] == [(0, 0), (1, 2), (3, 3), (4, 4), (5, 5), (6, 7)]


@pytest.mark.parametrize(("heads", "num_warps"), [(8, 1), (2, 4), (3, 4)])
def test_one_request_over_all_programs(monkeypatch: pytest.MonkeyPatch, heads: int, num_warps: int) -> None:
    """One piece is merged at a time, or several, and there are more than that."""
    poison(monkeypatch)
    step = Step([1], [600], dim=128, heads=heads, kv_heads=1, scale=0.1)
    step.check(decode(step, num_programs=20, block_rows=16, num_warps=num_warps))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_with_and_without_a_prefix(page_size: int) -> None:
    """Chunks and prefixes that end before, at and behind a page's end; single tokens among them."""
    step = Step([1, 15, 16, 17, 1, 33, 5], [0, 0, 1, 15, 64, 16, 111], page_size=page_size)
    out = step.new_out()
    tables = step.batch.page_table, step.batch.cu_seqlens_q, step.batch.seq_lens
    prefill_attention(step.q, step.kv, out, *tables, scale=step.scale, block_m=32, block_k=32)
    step.check(out)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_any_head_dim_and_dtype(dim: int, dtype: torch.dtype) -> None:
    step = Step([1, 19], [40, 3], dim=dim, dtype=dtype, scale=dim**-0.5, kv_heads=1, heads=2)
    step.check(run(attention_of(step), step))


@pytest.mark.parametrize("group", range(1, 9))
def test_any_group(group: int) -> None:
    """Also groups that do not divide a tile: some of its rows are then empty."""
    step = Step([1, 19, 1], [40, 3, 7], heads=2 * group, kv_heads=2)
    step.check(run(attention_of(step), step))


def attention_of(step: Step) -> TritonAttention:
    _, _, page_size, num_kv_heads, head_dim = step.kv.shape
    shape = AttentionShape(
        dtype=step.q.dtype, num_heads=step.q.shape[1], num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size
    )
    return TritonAttention(shape, DEVICE)


def run(attention: TritonAttention, step: Step, batch: ForwardBatch | None = None) -> Tensor:
    batch = step.batch if batch is None else batch
    return attention.forward(step.q, step.kv, replace(batch, attn_metadata=attention.plan(batch)), scale=step.scale)


@pytest.mark.parametrize("new", [[1, 1], [3, 3], [1, 4], [1, 1, 4, 1, 2]])
def test_decodes_and_prompts_of_a_step_have_a_kernel_each(new: list[int]) -> None:
    step = Step(new, [70, 600, 3, 4, 0][: len(new)])
    step.check(run(attention_of(step), step))


def test_queries_may_be_a_view_of_the_merged_projection() -> None:
    step = Step([1, 5], [3, 20])
    merged = torch.cat((step.q, randn(step.q.shape[0], 4, 16)), dim=1)
    step.q = merged[:, :4]
    step.check(run(attention_of(step), step))


@pytest.mark.parametrize("num_programs", [1, 4, 20])
def test_a_request_of_length_0_gets_zeros(monkeypatch: pytest.MonkeyPatch, num_programs: int) -> None:
    """As padding of a graph: one new token on paper, none in the cache."""
    poison(monkeypatch)
    step = Step([1] * 6, [0, 20, 0, 30, 0, 0])
    lengths = torch.tensor([0, 21, 0, 31, 0, 0], dtype=torch.int32, device=DEVICE)
    out = decode(step, lengths, num_programs=num_programs, heads=1, block_rows=16)
    assert not out[[0, 2, 4, 5]].any()
    torch.testing.assert_close(out[[1, 3]].double(), step.exact[[1, 3]], atol=2e-6, rtol=2e-6)


def test_a_launch_of_padding_only() -> None:
    step = Step([1, 1], [0, 0])
    assert not decode(step, torch.zeros_like(step.batch.seq_lens), num_programs=3).any()


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_heads_of_an_item_do_not_mix(heads: int) -> None:
    step = Step([1] * 3, [40, 3, 70], heads=16, kv_heads=8, page_size=8)
    step.check(decode(step, num_programs=5, heads=heads, block_rows=32))


def test_a_plan_holds_for_a_graph_whose_requests_grow() -> None:
    """`plan` and `forward` with the lengths of a step's first tokens on the host; the device knows the true ones."""
    step = Step([1, 1, 1], [70, 600, 3])
    short = replace(step.batch, host_seq_lens=np.ones(3, np.int32))
    step.check(run(attention_of(step), step, short))


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA has graphs")
def test_a_captured_step_serves_requests_that_grow() -> None:
    step = Step([1, 1, 1, 1], [70, 600, 3, 1999], page_size=64)
    attention = attention_of(step)
    lengths = torch.ones_like(step.batch.seq_lens)
    batch = replace(step.batch, seq_lens=lengths)
    run(attention, step, batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(attention, step, batch)
    for _ in range(2):
        out.fill_(NAN)
        lengths.copy_(step.batch.seq_lens)
        graph.replay()
        step.check(out)
        lengths.fill_(0)
        graph.replay()
        assert not out.any() and not attention.counters.any()


def test_neither_plan_nor_forward_reads_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    step, reads = Step([1, 5], [3, 20]), []
    attention = attention_of(step)
    planned = replace(step.batch, attn_metadata=attention.plan(step.batch))
    attention.forward(step.q, step.kv, planned, scale=1.0)  # compiles
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    else:  # the interpreter itself reads, so only plan can be watched
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
            monkeypatch.setattr(Tensor, name, lambda *a, _n=name, **k: reads.append(_n))
    try:
        attention.plan(step.batch)
        if DEVICE == "cuda":
            attention.forward(step.q, step.kv, planned, scale=1.0)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert not reads


def test_an_item_takes_heads_that_cost_nothing_if_it_is_hardly_cut() -> None:
    def chosen(num_requests: int, num_kv_heads: int = 8, group: int = 2) -> int:
        heads = dict(num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads)
        return choose_options(num_requests, **heads, head_dim=128, num_programs=264).heads

    assert [chosen(r) for r in (1, 64, 197, 198, 256, 1000)] == [1, 1, 1, 8, 8, 8]
    assert [chosen(1000, group=g) for g in (1, 2, 3, 4, 5, 8, 16)] == [8, 8, 4, 4, 2, 2, 1]
    assert [chosen(1000, num_kv_heads=n, group=1) for n in (1, 2, 5, 6)] == [1, 2, 1, 2]


def test_where_items_are_few_each_has_a_multiprocessor() -> None:
    options = [choose_options(r, num_heads=16, num_kv_heads=8, head_dim=128, num_programs=264) for r in (4, 5, 16, 17)]
    assert [o.each for o in options] == [2, 1, 1, 2]


@pytest.mark.parametrize("name", ALTERED)
def test_the_kernels_that_are_altered_to_be_measured_can_be_made(name: str, tmp_path: Path) -> None:
    """What is to be put otherwise stands in the module, once."""
    assert altered(name, tmp_path).decode_attention is not decode_attention


def test_the_backend_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load_attention("triton", device=DEVICE), TritonAttention)
    assert not isinstance(load_attention("auto", device=DEVICE), TritonAttention)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"attention 'triton' needs a CUDA device \(or TRITON_INTERPRET=1\)"):
        load_attention("triton", device="cpu")


def test_without_triton_only_its_backend_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "minisgl.engine.attention.triton_backend")
    monkeypatch.setitem(sys.modules, "triton", None)
    load_attention("auto", device=DEVICE)
    with pytest.raises(ValueError, match="needs the package triton"):
        load_attention("triton", device=DEVICE)


@pytest.mark.parametrize("page_size", [16, 64])
def test_greedy_tokens_equal_those_of_the_torch_backend(page_size: int) -> None:
    prompts = ["Once upon a time there was a little fox", "The", "What is 7 + 5?"]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    tokens = {}
    for name in ("torch", "triton"):
        with LLM(
            "tiny", attention=name, device=DEVICE, dtype="float32", page_size=page_size, num_pages=40, chunk_size=8
        ) as llm:
            tokens[name] = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert tokens["triton"] == tokens["torch"]


def test_more_requests_than_a_kernel_is_compiled_for_at_first() -> None:
    """Up to 256 share a variant."""
    options = DecodeOptions(heads=1, block_rows=16, each=1, patience=NEVER, item_cost=0)
    records = records_of([16] * 300, options, 8)
    assert [(r[0], r[4], r[9]) for r in records] == [(75 * i, 75 * i + 74, 300) for i in range(8)]
    step = Step([1] * 258, [0] * 258, heads=1, kv_heads=1)
    out, tables = step.new_out(), (step.batch.page_table, step.batch.cu_seqlens_q, step.batch.seq_lens)
    prefill_attention(step.q, step.kv, out, *tables, scale=step.scale, block_m=16, block_k=16)
    step.check(out)


def test_a_group_that_does_not_divide_a_tile_and_prompts_of_several_tiles() -> None:
    """Rows that are left over would be the next tile's first query, which sees more than they load."""
    step = Step([25, 31], [0, 40], heads=6, kv_heads=2)
    out, tables = step.new_out(), (step.batch.page_table, step.batch.cu_seqlens_q, step.batch.seq_lens)
    prefill_attention(step.q, step.kv, out, *tables, scale=step.scale, block_m=32, block_k=32)
    step.check(out)


def test_zeros_of_padding_end_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written by powers of 2; behind the decodes lie the step's prompts."""
    step = Step([1] * 3, [4, 0, 0], heads=6)
    step.batch.page_table[1:], step.exact[1:] = 0, 0
    wide = torch.full((5, *step.q.shape[1:]), 7.0, device=DEVICE)
    monkeypatch.setattr(step, "new_out", lambda: wide[:3])
    step.check(decode(step, num_programs=2, block_rows=16))
    assert (wide[3:] == 7).all()


# -- compilation --

COMPILE = """
from minisgl.kernels import triton_attention, triton_line

TYPES |= dict.fromkeys(["plan"], "*i32")
heads = dict(NUM_KV_HEADS=8, GROUP=3, HEAD_DIM=80)
tile = dict(PAGE_SIZE=64, BLOCK_K=64, BLOCK_D=128, WIDEN=False, PDL=True)
assert "mma" in check(triton_attention._prefill_kernel, **heads, **tile, BLOCK_R=8, BLOCK_M=64)
tile = dict(PAGE_SIZE=64, BLOCK_D=128, WIDEN=False, BLOCK_S=16, BLOCK_P=4, RECORD=16, PDL=True)
tile |= dict(BLOCK_O=1024, COPIES=4)
ptx = check(triton_attention._decode_kernel, **heads, **tile, HEADS=4, BLOCK_K=16, BLOCK_M=16, AHEAD=4)
assert "mma" in ptx and "atom.global.gpu.acq_rel" in ptx
before, after = ptx.split("griddepcontrol.wait")
assert "bulk.prefetch.L2" in before and "ld.global" in before and "st.global" not in before
assert "bulk.prefetch.L2" not in after
line = dict(NUM_SETS=2, BLOCK_K=16, PAGE_SIZE=64, BLOCK_R=8, BITS=3, BLOCK_P=16, RECORD=16, PDL=True)
check(triton_line._plan_kernel, **line, next_waits=True)  # so that no layer's attention has to wait for it
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="there every test compiles")
def test_kernels_compile_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    check_compilation(COMPILE, tmp_path)
