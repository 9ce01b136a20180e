"""The torch attention backend: its definition against float64, its grouped path against the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from builders import make_batch, make_pages
from torch import Tensor

from minisgl.engine.attention import load_attention
from minisgl.engine.attention.torch_backend import TorchAttention, attend
from minisgl.forward import ForwardBatch

PAGE_SIZE = 4


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention written out: query by query, head by head, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        last = k.shape[0] - q.shape[0] + i
        for head in range(q.shape[1]):
            scores = [scale * float(q[i, head] @ k[j, head // group]) for j in range(last + 1)]
            weights = [math.exp(score - max(scores)) for score in scores]
            for j, weight in enumerate(weights):
                out[i, head] += weight / sum(weights) * v[j, head // group]
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 16), (2, 1, 80), (6, 2, 16), (4, 1, 24)])
@pytest.mark.parametrize(("num_q", "num_k"), [(1, 1), (1, 9), (4, 4), (3, 7)])
def test_M13_attend_equals_float64(heads: int, kv_heads: int, dim: int, num_q: int, num_k: int) -> None:
    """Groups of 1 to 4, any head_dim; the last query sees everything, the first one K - Q + 1 tokens."""
    q, k, v = randn(num_q, heads, dim), randn(num_k, kv_heads, dim, seed=1), randn(num_k, kv_heads, dim, seed=2)
    got = attend(q, k, v, scale=0.3)
    torch.testing.assert_close(got.double(), exact(q, k, v, 0.3), atol=1e-6, rtol=1e-5)


# new tokens and computed tokens of each request
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1] * 6, [0, 3, 4, 17, 30, 12]),
    "prefill": ([5, 5, 9, 1], [0, 0, 0, 0]),
    "mixed": ([1, 1, 7, 1, 4, 7], [20, 3, 0, 8, 11, 24]),
    "one": ([6], [2]),
}


def make_step(name: str, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[ForwardBatch, Tensor]:
    """A batch, and a cache that is NaN wherever none of its requests has a token."""
    new, computed = STEPS[name]
    pages = make_pages(len(new), pages_each=9, seed=4)
    batch = make_batch([[0] * n for n in new], computed=computed, pages=pages, page_size=PAGE_SIZE)
    kv = torch.full((2, 1 + 9 * len(new), PAGE_SIZE, kv_heads, dim), float("nan"), dtype=dtype)
    for i, length in enumerate(batch.seq_lens.tolist()):
        for t in range(length):
            kv[:, pages[i][t // PAGE_SIZE], t % PAGE_SIZE] = randn(2, kv_heads, dim, seed=100 * i + t, dtype=dtype)
    return batch, kv


def forward(backend: TorchAttention, q: Tensor, kv: Tensor, batch: ForwardBatch) -> Tensor:
    return backend.forward(q, kv, replace(batch, attn_metadata=backend.plan(batch)), scale=0.3)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 16), (6, 2, 80), (4, 1, 16)])
def test_grouped_equals_one_request_after_the_other(name: str, heads: int, kv_heads: int, dim: int) -> None:
    """Both equal float64 on each request's own tokens, whatever foreign, stale or reserved slots hold: NaN here."""
    batch, kv = make_step(name, kv_heads, dim)
    q = randn(batch.num_tokens, heads, dim, seed=9)
    loop = forward(TorchAttention(grouped=False), q, kv, batch)
    grouped = forward(TorchAttention(grouped=True), q, kv, batch)
    starts = batch.cu_seqlens_q.tolist()
    right = []
    for i, length in enumerate(batch.seq_lens.tolist()):
        where = torch.arange(length)
        own = kv[:, batch.page_table[i].long()[where // PAGE_SIZE], where % PAGE_SIZE]
        right.append(exact(q[starts[i] : starts[i + 1]], *own, 0.3))
    torch.testing.assert_close(loop.double(), torch.cat(right), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grouped.double(), torch.cat(right), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype(dtype: torch.dtype) -> None:
    batch, kv = make_step("mixed", 2, 16, dtype)
    q = randn(batch.num_tokens, 4, 16, seed=9, dtype=dtype)
    right = forward(TorchAttention(grouped=False), q.float(), kv.float(), batch)
    # One after the other rounds only the result; a fused kernel may round the weights as well.
    for grouped, tolerance in ((False, torch.finfo(dtype).eps / 2), (True, 0.03)):
        got = forward(TorchAttention(grouped=grouped), q, kv, batch)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), right, atol=tolerance, rtol=tolerance)


def test_a_broken_request_stays_alone() -> None:
    """NaN in one request's own tokens must not reach those that share its group."""
    batch, kv = make_step("decode", 2, 16)
    kv[:, batch.page_table[3, 0]] = float("nan")
    out = forward(TorchAttention(), randn(batch.num_tokens, 4, 16), kv, batch)
    assert out.isnan().flatten(1).any(1).tolist() == [False, False, False, True, False, False]


def test_padding_at_most_doubles_the_work() -> None:
    """A long request beside short ones must not make them as long as itself."""
    batch, _ = make_step("decode", 2, 16)
    padded = sum(len(group.slots) for group in TorchAttention().plan(batch).groups)
    assert padded <= 2 * int(batch.seq_lens.sum())


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows the lengths: neither ``plan`` nor the layers wait for the device."""
    batch, kv = make_step("mixed", 2, 16)
    q, reads = randn(batch.num_tokens, 4, 16), []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        true = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda *a, _n=name, _f=true, **k: (reads.append(_n), _f(*a, **k))[1])
    for backend in (TorchAttention(), TorchAttention(grouped=False)):
        planned = replace(batch, attn_metadata=backend.plan(batch))
        backend.forward(q, kv, planned, scale=0.3)
        assert not reads


def test_backends_are_loaded_by_name() -> None:
    assert isinstance(load_attention(), TorchAttention) and isinstance(load_attention("torch"), TorchAttention)
    with pytest.raises(ValueError, match=r"'auto', 'torch'.*'flash'"):
        load_attention("flash")
