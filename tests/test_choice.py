"""Which attention kernels are chosen: a table read by pure functions, no device needed."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from builders import make_batch
from torch import Tensor

from minisgl.engine import attention
from minisgl.engine.attention import load_attention
from minisgl.engine.attention.choice import (
    AttentionShape,
    Choice,
    choose,
    flashinfer_problem,
    parse,
    usable_dtype,
)
from minisgl.engine.attention.rehearsal import random_batch, rehearse
from minisgl.engine.attention.split import BySize, SplitAttention
from minisgl.engine.attention.torch_backend import TorchAttention
from minisgl.forward import ForwardBatch

QWEN = AttentionShape(dtype=torch.bfloat16, num_heads=16, num_kv_heads=8, head_dim=128, page_size=64)
CPU = torch.device("cpu")


def kernels(choice: Choice) -> str:
    return ",".join([choice.prefill, *(kernel for _, kernel in choice.decode)])


@pytest.mark.parametrize(
    ("capability", "expected", "for_flashinfer"),
    [
        (None, "torch,torch", None),
        ((7, 0), "torch,torch", None),
        ((7, 5), "torch,torch", None),
        ((8, 0), "fa2,triton", "fa2,fa2"),
        ((8, 6), "fa2,triton", "fa2,fa2"),
        ((8, 9), "fa2,triton", "fa2,fa2"),
        ((9, 0), "fa3,triton", "fa3,xqa"),
        ((10, 0), "triton,triton", "fa2,xqa"),
        ((10, 3), "triton,triton", "fa2,xqa"),
        ((12, 0), "triton,triton", "fa2,xqa"),
        ((12, 1), "triton,triton", None),
        ((9, 9), "triton,triton", None),
    ],
)
def test_E07_each_device_has_its_own_row(
    capability: tuple[int, int] | None, expected: str, for_flashinfer: str | None
) -> None:
    """E07: a device with a higher number than a known one gets what everybody can run, not what that one has."""
    missing = flashinfer_problem(capability, installed=True, prebuilt=True, nvcc=None)
    assert kernels(choose("auto", capability, QWEN, no_flashinfer=missing)) == expected
    assert kernels(choose("auto", capability, QWEN)) == expected
    if for_flashinfer is None:
        with pytest.raises(ValueError, match=r"flashinfer.* is not possible"):
            choose("flashinfer", capability, QWEN, no_flashinfer=missing)
    else:
        assert kernels(choose("flashinfer", capability, QWEN, no_flashinfer=missing)) == for_flashinfer
    if capability != (9, 0):
        with pytest.raises(ValueError, match=r"'fa3,triton' is not possible"):
            choose("fa3,triton", capability, QWEN, no_flashinfer=missing)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": torch.float16}, "fa3,triton"),
        ({"dtype": torch.float32}, "torch,torch"),
        ({"head_dim": 64}, "fa3,triton"),
        ({"head_dim": 80}, "triton,triton"),
        ({"head_dim": 96}, "triton,triton"),
        ({"num_heads": 24}, "fa3,triton"),  # groups of 3 were not measured
        ({"page_size": 1}, "fa3,triton"),
        ({"page_size": 16}, "fa3,triton"),
    ],
)
def test_a_shape_gets_what_serves_it(change: dict[str, object], expected: str) -> None:
    shape = replace(QWEN, **change)
    assert kernels(choose("auto", (9, 0), shape)) == expected
    assert kernels(choose("auto", (9, 0), shape, no_triton="none", no_flashinfer="none")) == "torch,torch"


def test_E08_old_devices_have_torch_and_float16() -> None:
    """E08"""
    for capability in ((7, 0), (7, 5)):
        assert usable_dtype(capability, torch.bfloat16) == torch.float16
        assert usable_dtype(capability, torch.float32) == torch.float32
        assert kernels(choose("auto", capability, replace(QWEN, dtype=torch.float16))) == "torch,torch"
    for capability in ((8, 0), (9, 0), (12, 0), None):
        assert usable_dtype(capability, torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize(
    ("installed", "nvcc", "message"),
    [
        (False, (13, 0), "flashinfer-python is not installed"),
        (True, None, "there is no nvcc; FlashInfer's kernels need 12.3 or newer"),
        (True, (11, 8), "nvcc 11.8 is too old; FlashInfer's kernels need 12.3 or newer"),
    ],
)
def test_E09_without_a_compiler_triton_serves_and_says_what_is_missing(
    installed: bool, nvcc: tuple[int, int] | None, message: str
) -> None:
    """E09"""
    missing = flashinfer_problem((9, 0), installed=installed, prebuilt=False, nvcc=nvcc)
    assert missing is not None and message in missing
    choice = choose("auto", (9, 0), QWEN, no_flashinfer=missing)
    assert kernels(choice) == "triton,triton" and message in choice.reason
    with pytest.raises(ValueError, match=message):
        choose("fa3,xqa", (9, 0), QWEN, no_flashinfer=missing)
    assert flashinfer_problem((9, 0), installed=True, prebuilt=False, nvcc=(12, 3)) is None
    assert flashinfer_problem((9, 0), installed=True, prebuilt=True, nvcc=None) is None
    assert "12.9" in str(flashinfer_problem((12, 0), installed=True, prebuilt=False, nvcc=(12, 8)))


def test_the_reason_names_device_shape_and_kernels() -> None:
    reason = choose("auto", (9, 0), QWEN).reason
    for part in ("fa3", "triton", "9.0", "head_dim 128", "2 query heads a KV head", "pages of 64"):
        assert part in reason


def test_measured_ranges_fall_back_and_join(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {2: ((8, "triton"), (64, "xqa"), (None, "fa2"))}
    monkeypatch.setattr("minisgl.engine.attention.choice._MEASURED", table)
    assert choose("auto", (9, 0), QWEN).decode == table[2]
    assert choose("auto", (9, 0), QWEN, no_flashinfer="none").decode == ((None, "triton"),)
    assert choose("auto", (9, 0), QWEN, no_triton="none").decode == ((8, "torch"), (64, "xqa"), (None, "fa2"))


@pytest.mark.parametrize("name", ["auto", "torch", "triton", "flashinfer", "fa3,triton", "fa2,xqa", "torch,torch"])
def test_names(name: str) -> None:
    prefill, decode = parse(name)
    assert name in (f"{prefill},{decode}", prefill) and (decode == prefill or "," in name)


@pytest.mark.parametrize("name", ["flash", "", "fa3", "xqa,fa3", "fa3,", ",xqa", "auto,xqa", "fa3, xqa", "fa2,xqa,fa2"])
def test_an_unknown_name_is_refused_with_all_that_are_known(name: str) -> None:
    with pytest.raises(ValueError, match=r"'auto', 'torch', 'triton', 'flashinfer'.*fa3.*xqa.*got"):
        parse(name)
    with pytest.raises(ValueError, match="got"):
        load_attention(name)


class Broken(TorchAttention):
    """A kernel that was built for another device: it runs and writes nothing of use."""

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """Twice what is right."""
        return 2 * super().forward(q, kv, batch, scale=scale, out=out)


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_rehearsal_tells_right_from_wrong(num_new: int, page_size: int) -> None:
    shape = replace(QWEN, page_size=page_size)
    random_batch([1, num_new, 9], [page_size + 1, num_new, 40], page_size, CPU).validate()
    rehearse(TorchAttention(grouped=False), shape, CPU, num_new=num_new)
    with pytest.raises(RuntimeError, match="Broken is off by"):
        rehearse(Broken(), shape, CPU, num_new=num_new)


def test_E09_a_kernel_that_fails_is_replaced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E07, E09: compiled for another device, or not at all."""
    real = choose
    monkeypatch.setattr(attention, "_flashinfer_problem", lambda capability: None)
    monkeypatch.setattr(attention, "choose", lambda name, capability, *args, **kw: real(name, (9, 0), *args, **kw))
    monkeypatch.setattr(attention, "_triton_problem", lambda: "none here")

    def fails(*args: object) -> None:
        raise RuntimeError("nvcc fatal: Unsupported gpu architecture\nmore")

    monkeypatch.setattr(attention, "_load_flashinfer", fails)
    with caplog.at_level(logging.INFO, logger="minisgl"):
        assert isinstance(load_attention("auto", shape=QWEN), TorchAttention)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    for record in caplog.records:
        assert "fa3 failed: nvcc fatal: Unsupported gpu architecture" in record.message and "more" not in record.message
    with pytest.raises(ValueError, match="'fa3,xqa' is not possible: FlashInfer's xqa failed: nvcc fatal"):
        load_attention("fa3,xqa", shape=QWEN)


# new tokens and computed tokens of each request, decodes first
STEPS = {
    "decodes": ([1, 1, 1], [3, 9, 0]),
    "prompts": ([5, 2], [0, 7]),
    "mixed": ([1, 1, 6, 3, 1], [4, 11, 0, 9, 2]),
}


class Spy(TorchAttention):
    """Notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ForwardBatch] = []

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        """As torch's."""
        assert q.shape[0] == batch.num_tokens
        self.seen.append(batch)
        return super().forward(q, kv, batch, scale=scale, out=out)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("given", [False, True])
def test_a_split_step_equals_a_whole_one(name: str, given: bool) -> None:
    new, computed = STEPS[name]
    batch = make_batch([[0] * n for n in new], computed=computed)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(batch.num_tokens, 4, 16, generator=generator)
    kv = torch.randn(2, 1 + 8 * len(new), batch.page_size, 2, 16, generator=generator)
    whole = TorchAttention()
    right = whole.forward(q, kv, replace(batch, attn_metadata=whole.plan(batch)), scale=0.3)
    few, many, prefill = Spy(), Spy(), Spy()
    split = SplitAttention(prefill, BySize([(2, few), (None, many)]))
    out = torch.full_like(q, float("nan")) if given else None
    got = split.forward(q, kv, replace(batch, attn_metadata=split.plan(batch)), scale=0.3, out=out)
    torch.testing.assert_close(got, right)
    assert not given or got is out
    d = batch.num_decodes
    decode, other = (few, many) if d <= 2 else (many, few)
    assert len(decode.seen) == (d > 0) and not other.seen
    assert len(prefill.seen) == (d < batch.num_requests)
    for part in (*decode.seen, *prefill.seen):
        part.validate()


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (2, 5), (1, 4), (0, 5), (3, 3)])
def test_a_part_of_a_batch_is_a_batch(begin: int, end: int) -> None:
    new, computed = STEPS["mixed"]
    batch = make_batch([[k] * n for k, n in enumerate(new)], computed=computed)
    part = batch.part(begin, end)
    part.validate()
    assert part.num_requests == end - begin and part.num_decodes == max(0, min(end, 2) - begin)
    assert set(part.input_ids.tolist()) == set(range(begin, end))
    assert part.page_table.data_ptr() == batch.page_table[begin:].data_ptr() or begin == end
