"""The plain torch kernels against float64 and, where rounding is part of the meaning, against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from minisgl.kernels.activation import silu_and_mul
from minisgl.kernels.kv import copy_pages, store_kv
from minisgl.kernels.norm import add_rms_norm, rms_norm
from minisgl.kernels.rotary import apply_rotary


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 16)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rms_norm_equals_float64(shape: tuple[int, ...], size: float) -> None:
    x, weight = randn(*shape) * size, randn(shape[-1], seed=1)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), exact_rms_norm(x, weight, 1e-5), atol=2e-6, rtol=1e-6
    )


def test_rms_norm_rounds_like_transformers() -> None:
    """In bfloat16 bit for bit: float32 inside, rounded before the weight."""
    theirs = Qwen3RMSNorm(48, eps=1e-6)
    theirs.weight.data = randn(48, seed=1, dtype=torch.bfloat16)
    x = randn(50, 48, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, theirs.weight.data, 1e-6), theirs(x))


def test_add_rms_norm_is_the_sum_and_its_norm() -> None:
    x, residual, weight = randn(7, 48), randn(7, 48, seed=1), randn(48, seed=2)
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual) and torch.equal(residual, before)
    exact = exact_rms_norm(x.double() + residual.double(), weight, 1e-5)
    torch.testing.assert_close(normed.double(), exact, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(("dim", "pairs"), [(16, 8), (80, 40), (16, 4), (80, 20)])
def test_M13_rotary_turns_pairs_as_complex_numbers(dim: int, pairs: int) -> None:
    """Whole and partial: pair (i, i + F) is multiplied by exp(angle * j), the rest passes through."""
    q, k = randn(5, 6, dim), randn(5, 2, dim, seed=1)
    angles = randn(5, pairs, seed=2).double() * 3
    for got, x in zip(apply_rotary(q, k, angles.cos().float(), angles.sin().float()), (q, k), strict=True):
        turned = torch.complex(x[..., :pairs].double(), x[..., pairs : 2 * pairs].double())
        turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
        exact = torch.cat((turned.real, turned.imag, x[..., 2 * pairs :].double()), dim=-1)
        torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [40, 20])
def test_rotary_rounds_like_transformers(dtype: torch.dtype, pairs: int) -> None:
    q, k = randn(9, 6, 80, dtype=dtype), randn(9, 2, 80, seed=1, dtype=dtype)
    angles = randn(9, pairs, seed=2) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wide = [torch.cat((t, t), dim=-1) for t in (cos, sin)]
    theirs = apply_rotary_pos_emb(q, k, *wide, unsqueeze_dim=1)
    for got, right in zip(apply_rotary(q, k, cos, sin), theirs, strict=True):
        assert torch.equal(got, right)


def test_silu_and_mul_equals_float64() -> None:
    x = randn(7, 24) * 4
    gate, up = x[:, :12].double(), x[:, 12:].double()
    torch.testing.assert_close(silu_and_mul(x).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=1e-6)


def test_store_kv_writes_exactly_its_slots() -> None:
    """Strided input, as the views of the merged projection are."""
    merged = randn(3, 2 * 2 * 8)
    k, v = (t.view(3, 2, 8) for t in merged.chunk(2, dim=-1))
    kv = torch.full((2, 5, 4, 2, 8), -1.0)
    store_kv(k, v, kv, torch.tensor([4 * 3 + 1, 4 * 1 + 3, 4 * 4]))
    for part, cache in ((k, kv[0]), (v, kv[1])):
        for token, (page, offset) in enumerate([(3, 1), (1, 3), (4, 0)]):
            assert torch.equal(cache[page, offset], part[token])
    assert int((kv == -1.0).sum()) == kv.numel() - 2 * k.numel()


def test_store_kv_lets_padding_share_a_slot_of_page_0() -> None:
    kv = torch.zeros(2, 3, 4, 2, 8)
    k = randn(3, 2, 8)
    store_kv(k, k, kv, torch.tensor([0, 0, 4]))
    assert torch.equal(kv[0, 1, 0], k[2]) and not kv[:, 2].any() and not kv[:, 1, 1:].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copy_pages_reads_before_it_writes(dtype: torch.dtype) -> None:
    """1 -> 2 and 2 -> 3 in one call: page 3 gets what page 2 held before."""
    kv = randn(3, 2, 5, 4, 2, 8)
    before = kv.clone()
    copy_pages(kv, torch.tensor([[1, 2], [2, 3]], dtype=dtype))
    assert torch.equal(kv, before[:, :, [0, 1, 1, 2, 4]])


def test_copy_pages_of_nothing_changes_nothing() -> None:
    kv = randn(1, 2, 3, 4, 2, 8)
    before = kv.clone()
    copy_pages(kv, torch.empty((0, 2), dtype=torch.int32))
    assert torch.equal(kv, before)
