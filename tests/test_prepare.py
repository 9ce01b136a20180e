"""From a packed plan to a step's tensors: the torch twin against a loop over requests, the Triton one against that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.kernels import prepare
from minisgl.utils import ceil_div

try:  # loops are interpreted only where its interpreter and numpy fit together: `triton_helpers` skips elsewhere
    from triton_helpers import check_compilation

    from minisgl.kernels import triton_prepare
except pytest.skip.Exception:
    triton_prepare = None

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
POISON = -(2**30)
MAX_RUNNING, WIDTH, PAGE_SIZE = 7, 5, 4


@dataclass
class Planned:
    """One request of a plan: ``tokens`` are those that the host knows, ``num_tokens`` all that are computed."""

    row: int = -1
    num_tokens: int = 1
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    page_start: int = 0
    fresh: int = -1


def pack(requests: list[Planned], spare: int = 9) -> Tensor:
    """The buffer that the engine sends: columns, token ids, page ids, and behind them what nobody may read."""
    head = 6 * len(requests) + 3

    def offsets(counts: list[int], first: int) -> list[int]:
        return (first + np.cumsum([0, *counts])).tolist()

    token_offsets = offsets([len(r.tokens) for r in requests], head)
    columns = [
        [r.row for r in requests],
        [r.fresh for r in requests],
        [r.page_start for r in requests],
        offsets([r.num_tokens for r in requests], 0),
        token_offsets,
        offsets([len(r.pages) for r in requests], token_offsets[-1]),
        *(r.tokens for r in requests),
        *(r.pages for r in requests),
        [POISON] * spare,
    ]
    return torch.tensor([x for column in columns for x in column], dtype=torch.int32, device=DEVICE)


class Step:
    """A device's table and the tensors of a step, poisoned."""

    def __init__(self, num_requests: int, num_tokens: int, width: int = WIDTH, *, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def new(shape: tuple[int, ...], dtype: torch.dtype, high: int = 0) -> Tensor:
            values = random.integers(1, high, shape) if high else np.full(shape, POISON)
            return torch.from_numpy(values).to(DEVICE, dtype)

        self.seq_lens_by_row = new((MAX_RUNNING,), torch.int32, WIDTH * PAGE_SIZE - 3)
        self.last_tokens_by_row = new((MAX_RUNNING,), torch.int64, 2**31 - 1)
        self.page_table_by_row = new((MAX_RUNNING, WIDTH), torch.int32, 1000)
        self.table = self.seq_lens_by_row, self.last_tokens_by_row, self.page_table_by_row
        self.outputs = {name: new((num_tokens,), torch.int64) for name in ("input_ids", "positions", "slot_mapping")}
        self.outputs["seq_lens"] = new((num_requests,), torch.int32)
        self.outputs["page_table"] = new((num_requests, width), torch.int32)

    def run(self, prepare_step: Callable[..., None], packed: Tensor) -> None:
        num_requests = len(self.outputs["seq_lens"])
        assert prepare_step(packed, num_requests, *self.table, **self.outputs, page_size=PAGE_SIZE) is None

    def run_by_loop(self, requests: list[Planned]) -> None:
        """What the sentences of `prepare_step` say, one request and token at a time."""
        out, token = self.outputs, 0
        for i, r in enumerate(requests):
            out["seq_lens"][i], out["page_table"][i, 0], start = 1, 0, 0
            if r.row >= 0:
                if r.fresh >= 0:
                    self.seq_lens_by_row[r.row], self.page_table_by_row[r.row] = r.fresh, 0
                for nth, page in enumerate(r.pages):
                    self.page_table_by_row[r.row, r.page_start + nth] = page
                start = int(self.seq_lens_by_row[r.row])
                out["seq_lens"][i] = self.seq_lens_by_row[r.row] = start + r.num_tokens
                used = ceil_div(start + r.num_tokens, PAGE_SIZE)
                out["page_table"][i, :used] = self.page_table_by_row[r.row, :used]
            for nth in range(r.num_tokens):
                values = 0, 0, 0
                if r.row >= 0:
                    token_id = r.tokens[nth] if r.tokens else int(self.last_tokens_by_row[r.row])
                    at = start + nth
                    page = int(self.page_table_by_row[r.row, at // PAGE_SIZE])
                    values = token_id, at, page * PAGE_SIZE + at % PAGE_SIZE
                for name, value in zip(("input_ids", "positions", "slot_mapping"), values, strict=True):
                    out[name][token] = value
                token += 1

    def same_as(self, right: Step) -> None:
        """All equal, but for entries of the step's page table that mean nothing: the loop leaves them poisoned."""
        for mine, other in zip(self.table, right.table, strict=True):
            assert torch.equal(mine, other)
        for name, other in right.outputs.items():
            mine = self.outputs[name]
            assert mine.dtype == other.dtype
            assert torch.equal(mine.where(other != POISON, POISON), other), name


FULL = [
    Planned(row=2, pages=[71], page_start=4),  # a decode, whether or not it needs its new page
    Planned(row=0),
    Planned(),  # padding in the middle
    Planned(row=5, fresh=0, num_tokens=9, tokens=list(range(100, 109)), pages=[11, 12, 13]),
    Planned(row=4, fresh=6, num_tokens=1, tokens=[55], pages=[21, 22]),  # a prefix of the cache
    Planned(row=6, fresh=3, num_tokens=2, tokens=[7, 8], pages=[31]),
    Planned(num_tokens=0),
    Planned(num_tokens=11),  # the tail of a token bucket
]


def implementations() -> Iterator[object]:
    yield pytest.param(prepare.prepare_step, id="torch")
    if triton_prepare is not None:
        yield pytest.param(triton_prepare.prepare_step, id="triton")


@pytest.fixture(params=implementations())
def prepare_step(request: pytest.FixtureRequest) -> Callable[..., None]:
    return request.param


@pytest.mark.parametrize("requests", [FULL, FULL[:1], FULL[2:3], FULL[5::-1]], ids=["full", "one", "padding", "turned"])
def test_every_kind_of_request(prepare_step: Callable[..., None], requests: list[Planned]) -> None:
    num_tokens = sum(r.num_tokens for r in requests)
    step, right = Step(len(requests), num_tokens), Step(len(requests), num_tokens)
    step.run(prepare_step, pack(requests))
    right.run_by_loop(requests)
    step.same_as(right)


def test_longer_than_any_block_of_a_program(prepare_step: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 700)
    requests = [
        Planned(row=1, fresh=2, num_tokens=2300, tokens=list(range(2300)), pages=list(range(5, 581))),
        Planned(row=3, pages=[4000], page_start=650),
        Planned(num_tokens=1030),
    ]
    step, right = Step(3, 3331, width=690), Step(3, 3331, width=690)
    for each in (step, right):
        each.seq_lens_by_row[3] = 2600
    step.run(prepare_step, pack(requests))
    right.run_by_loop(requests)
    step.same_as(right)


def test_a_prompt_in_chunks_then_decodes(prepare_step: Callable[..., None]) -> None:
    """Steps that follow one another: the table carries the state. Pages that give way to others; a step's table that is
    narrower than the rows'."""
    chunks = [
        [Planned(row=3, fresh=4, num_tokens=3, tokens=[1, 2, 3], pages=[9, 8]), Planned(num_tokens=2)],
        [Planned(), Planned(row=3, num_tokens=2, tokens=[4, 5], pages=[6, 7], page_start=1)],
        [Planned(row=3), Planned()],
        [Planned(row=3), Planned(row=0, fresh=0, num_tokens=2, tokens=[1, 2], pages=[4])],
    ]
    table = Step(2, 5, width=3), Step(2, 5, width=3)
    for requests in chunks:
        num_tokens = sum(r.num_tokens for r in requests)
        step, right = Step(2, num_tokens, width=3), Step(2, num_tokens, width=3)
        step.table = table[0].table
        right.table = right.seq_lens_by_row, right.last_tokens_by_row, right.page_table_by_row = table[1].table
        step.run(prepare_step, pack(requests))
        right.run_by_loop(requests)
        step.same_as(right)
    assert table[0].seq_lens_by_row[3] == 4 + 3 + 2 + 1 + 1
    assert table[0].page_table_by_row[3].tolist() == [9, 6, 7, 0, 0]


@pytest.mark.skipif(DEVICE == "cuda" or triton_prepare is None, reason="there every test compiles, or none")
def test_it_compiles_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    check_compilation(
        "from minisgl.kernels import triton_prepare\n"
        "check(triton_prepare._prepare_step_kernel, PAGE_SIZE=64, BLOCK_N=32, BLOCK_P=128)",
        tmp_path,
    )


def test_a_step_s_table_is_written_no_further_than_it_is_wide(prepare_step: Callable[..., None]) -> None:
    """A new request's row is cleared to its end; what lies behind the step's table is somebody else's."""
    step, wide = Step(1, 2), torch.full((9, 1), 7, dtype=torch.int32, device=DEVICE)
    step.outputs["page_table"] = wide[:1]
    step.run(prepare_step, pack([Planned(row=0, fresh=0, num_tokens=2, tokens=[1, 2], pages=[4])]))
    assert wide[:, 0].tolist() == [4, *[7] * 8]
