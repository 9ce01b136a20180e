"""The engine's loop around its parts: checks, records, and what it does when one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import Checkpoint

from minisgl import LLM, SamplingParams
from minisgl.engine import runner as module
from minisgl.scheduler.flight import Failure, Replay, read_records

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def open_llm(checkpoint_of: Callable[[str], Checkpoint]) -> Callable[..., LLM]:
    options = dict(device="cpu", page_size=4, num_pages=40, max_model_len=100)
    return lambda **changes: LLM(str(checkpoint_of("qwen3").folder), **{**options, **changes})


def test_o13_a_failed_check_is_logged_and_the_engine_goes_on(open_llm, caplog):
    with open_llm() as llm:
        want = llm.generate([5, 6, 7], GREEDY)[0].token_ids
        llm.engine.kv.allocator.allocate(1)  # a page that nobody has
        llm.engine._next_check_s = 0.0
        assert llm.generate([5, 6, 7], GREEDY)[0].token_ids == want
        assert "integrity check failed" in caplog.text and llm.engine.num_failed_checks == 1
        assert llm.generate([5, 6, 7], GREEDY)[0].token_ids == want


def test_each_step_runs_on_the_engine_s_device(open_llm, monkeypatch):
    """Current devices are a thread's own, and who calls the engine may have another one."""
    entered = []

    @contextmanager
    def on_device(device):
        entered.append(device)
        yield

    assert module.on_device(torch.device("cuda", 1)).idx == 1
    with open_llm() as llm:
        monkeypatch.setattr(module, "on_device", on_device)
        llm.generate([5, 6, 7], GREEDY)
        assert entered == [torch.device("cpu")] * 2 * 6, "six steps, forward and sample"


def test_o13_strict_raises(open_llm):
    with open_llm(strict=True) as llm:
        llm.generate([5, 6, 7], GREEDY)
        llm.engine.kv.allocator.allocate(1)
        with pytest.raises(AssertionError, match="pages in no state"):
            llm.generate([5, 6, 7], GREEDY)
        with pytest.raises(RuntimeError, match="the engine has failed"):
            llm.generate([5, 6, 7], GREEDY)


def test_the_idle_check_takes_a_hundredth_of_the_time_at_most(open_llm):
    now, checks = [0.0], []
    with open_llm() as llm:
        engine = llm.engine
        engine._clock = lambda: now[0]

        def check() -> None:
            checks.append(now[0])
            now[0] += 0.5  # a slow one

        engine.scheduler.check = check
        engine._next_check_s = 0.0
        for _ in range(200):
            now[0] += 1.0
            llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    assert len(checks) >= 3 and 0.5 * len(checks) <= now[0] / 100 + 0.5 * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_crash_writes_the_last_record_by_itself(open_llm, tmp_path: Path, overlap, monkeypatch):
    path = tmp_path / "run.jsonl"
    with open_llm(record=str(path), overlap=overlap) as llm:
        llm.generate([5, 6, 7], GREEDY)
        sample, calls = llm.engine.runner.sample, []

        def break_down(pending):
            calls.append(pending)
            if len(calls) == 4:
                raise RuntimeError("out of memory, let us say")
            return sample(pending)

        monkeypatch.setattr(llm.engine.runner, "sample", break_down)
        with pytest.raises(RuntimeError, match="let us say"):
            llm.generate([8, 9], GREEDY)
        records = read_records(path)  # before anything is closed
    assert isinstance(records[-1], Failure) and "let us say" in records[-1].error
    replay = Replay(records)
    played = [plan.step_id for plan, _ in replay.play()]
    assert replay.failure == records[-1].error and played == list(range(1, len(played) + 1))
    assert replay.scheduler.num_steps == records[-2].plan, "the step that failed was planned again"


def test_a_failed_check_writes_the_last_record(open_llm, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with open_llm(record=str(path), strict=True) as llm:
        llm.engine.kv.allocator.allocate(1)
        with pytest.raises(AssertionError):
            llm.generate([8, 9], GREEDY)
        assert isinstance(read_records(path)[-1], Failure)


def test_close_completes_the_record(open_llm, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with open_llm(record=str(path)) as llm:
        llm.generate([5, 6, 7], GREEDY)
        num_steps = llm.engine.scheduler.num_steps
    replay = Replay(read_records(path))
    assert sum(1 for _ in replay.play()) == num_steps and not replay.scheduler.has_work


def test_record_and_trace_exclude_each_other(open_llm, tmp_path: Path):
    with pytest.raises(ValueError, match="record and trace"):
        open_llm(record=str(tmp_path / "a"), trace=True)
    with pytest.raises(ValueError, match="cannot write the flight record"):
        open_llm(record=str(tmp_path / "no" / "folder"))


def test_m11_sources_of_a_model(open_llm, checkpoint_of, monkeypatch):
    """A local folder needs no network; a hub id is asked of the hub's own client (which knows mirrors and offline
    mode by its environment); what is neither is refused with the reason."""
    folder = checkpoint_of("qwen3").folder
    asked = []

    def download(name, **options):
        asked.append(name)
        if name != "org/model":
            raise OSError("no such repository\nand a long explanation")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with open_llm() as local:
        want = local.generate([5, 6, 7], GREEDY)[0].token_ids
    assert not asked
    with LLM("org/model", device="cpu", page_size=4, num_pages=40, max_model_len=100) as llm:
        assert llm.generate([5, 6, 7], GREEDY)[0].token_ids == want
    with pytest.raises(
        ValueError, match=r"'org/other' is neither a folder nor to be had from the hub: no such repository$"
    ):
        LLM("org/other")
    assert asked == ["org/model", "org/other"]


def test_a_flush_is_in_the_record(open_llm, tmp_path: Path):
    """Else the replay finds cached what the engine had forgotten."""
    path, prompt = tmp_path / "run.jsonl", [*range(5, 17)]
    with open_llm(record=str(path)) as llm:
        llm.generate(prompt, GREEDY)
        assert llm.engine.flush_cache() > 0
        assert llm.generate(prompt, GREEDY)[0].usage.cached_tokens == 0
        num_steps = llm.engine.scheduler.num_steps
    assert sum(1 for _ in Replay(read_records(path)).play()) == num_steps
