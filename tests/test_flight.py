"""The flight recorder: a recorded run replays to identical plans, in another process, and under other policies."""

import json
import random
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from minisgl.config import SchedulerConfig
from minisgl.request import SamplingParams
from minisgl.scheduler import Scheduler, StepResult
from minisgl.scheduler.flight import FlightRecorder, Record, Replay, make_header, read_records
from minisgl.scheduler.view import describe
from minisgl.scheduler.what_if import parse_changes, what_if

EOS = (1, 2)


def fly(path, *, seed=0, num_requests=200, **options):
    """A recorded run without a model: arrivals, aborts, small pool, tokens from a random generator; overlapped."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        **{"page_size": 4, "num_pages": 70, "max_model_len": 240, "max_running": 8, "chunk_size": 16,
           "max_num_batched_tokens": 32, **options}
    )  # fmt: skip
    now = [0.0]

    def clock():
        now[0] += rng.random() / 1000
        return now[0]

    scheduler = Scheduler(config, eos_token_ids=EOS, seed=seed, clock=clock)
    recorder = FlightRecorder(make_header(config, eos_token_ids=EOS, seed=seed), path)
    systems = [[rng.randrange(3, 50) for _ in range(20)] for _ in range(3)]
    num_arrived, in_flight, plans, states = 0, [], [], {}
    while num_arrived < num_requests or scheduler.has_work:
        if num_arrived < num_requests and rng.random() < 0.3:
            prompt = rng.choice(systems)[: rng.randint(1, 20)] + [
                rng.randrange(3, 50) for _ in range(rng.randint(0, 9))
            ]
            params = SamplingParams(
                max_tokens=rng.choice([3, 10, 200]), temperature=rng.choice([0, 0.7]), priority=rng.choice([0, 0, 1]),
                cache_salt=rng.choice([None, None, "a"]), logit_bias=rng.choice([None, {5: 1.5}]), stop=["x", "yz"],
                seed=rng.choice([None, 7]),
            )  # fmt: skip
            recorder.arrived(scheduler.add(f"r{num_arrived}", np.array(prompt, np.int32), params))
            num_arrived += 1
        if rng.random() < 0.03 and num_arrived:
            ended = scheduler.abort(f"r{rng.randrange(num_arrived)}", reason=rng.choice(["abort", "stop"]))
            if ended:
                recorder.ended(ended)
        if rng.random() < 0.002:
            recorder.flushed()
            scheduler.kv.flush()
        plan = scheduler.schedule()
        if plan is not None:
            recorder.planned(plan, clock())
            plans.append(plan)
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) > 1):
            done = in_flight.pop(0)
            n = int(done.samples.sum())
            ids = np.array([1 if rng.random() < 0.01 else rng.randrange(3, 50) for _ in range(n)], np.int32)
            result = StepResult(ids, np.array([rng.random() > 0.002 for _ in range(n)], np.bool_))
            output = scheduler.update(done, result)
            recorder.done(output.step_id, result, output.time_s)
            states[output.step_id] = describe(scheduler)
        recorder.end_turn()
    recorder.close()
    return scheduler, plans, states, recorder


@pytest.fixture(scope="module")
def flight(tmp_path_factory):
    path = tmp_path_factory.mktemp("flight") / "run.jsonl"
    return path, *fly(path)


def test_the_flight_is_worth_recording(flight):
    _, scheduler, plans, *_ = flight
    assert scheduler.num_preemptions > 5 and len(plans) > 500
    assert any(len(p.page_copies) for p in plans)


def test_replay_gives_identical_plans_and_states(flight):
    path, _, plans, states, _ = flight
    replay = Replay(read_records(path))
    for plan, output in replay.play():
        original = plans[plan.step_id - 1]
        for column in (
            "rows",
            "num_tokens",
            "starts",
            "samples",
            "token_ids",
            "page_ids",
            "page_starts",
            "page_copies",
        ):
            assert np.array_equal(getattr(plan, column), getattr(original, column)), (plan.step_id, column)
        assert [a.seed for a in plan.admitted] == [a.seed for a in original.admitted]
        assert describe(replay.scheduler) == states[output.step_id]
    assert replay.step_id == len(plans) and not replay.scheduler.has_work


def test_records_in_memory_are_those_of_the_file(flight):
    path, *_ = flight
    *_, recorder = fly(None)
    assert [msgspec.json.decode(msgspec.json.encode(r), type=Record) for r in recorder.records] == read_records(path)


def test_one_compact_record_a_step(flight):
    path, _, plans, *_ = flight
    lines = path.read_text().splitlines()
    steps = [line for line in lines if '"kind":"step"' in line]
    others = ('"kind":"add"', '"kind":"abort"', '"kind":"flush"', '"kind":"header"')
    num_others = sum(kind in line for line in lines for kind in others)
    assert len(steps) + num_others == len(lines) and len(steps) <= len(plans) + 2 + num_others
    assert sum(map(len, steps)) / len(steps) < 160


def command(*args):
    return subprocess.run([sys.executable, "-m", "minisgl", "replay", *map(str, args)], capture_output=True, text=True,
                          timeout=120)  # fmt: skip


def test_command_line_in_another_process(flight, tmp_path):
    path, scheduler, plans, states, _ = flight
    whole = command(path, "--perfetto", tmp_path / "trace.json")
    assert whole.returncode == 0, whole.stderr
    assert f"{len(plans)} steps" in whole.stdout and f"{scheduler.num_preemptions} preemptions" in whole.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" and e["pid"] == 0 for e in events) == len(plans)
    at = command(path, "--step", 100)
    assert states[100] in at.stdout and "tree:" in at.stdout
    assert command(path, "--bisect", "check").returncode == 0
    compared = command(path, "--what-if", "order=prefill_first")
    assert compared.returncode == 0 and "preemptions" in compared.stdout
    for bad in (["--step", 10**6], ["--what-if", "order=nonsense"], ["--what-if", "nonsense=1"]):
        refused = command(path, *bad)
        assert refused.returncode != 0 and len(refused.stderr.splitlines()) == 1, refused.stderr
    (tmp_path / "other").write_text("hello\n")
    for file in (tmp_path / "other", tmp_path / "none"):
        refused = command(file)
        assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1, refused.stderr


def test_bisect_finds_the_first_broken_step(flight, monkeypatch, capsys):
    from minisgl import replay as module

    path, *_ = flight
    update = Scheduler.update

    def leaky(self, plan, result):
        output = update(self, plan, result)
        if plan.step_id == 57 and self.kv.allocator.num_free:
            self.kv.allocator.allocate(1)  # a page that nobody has
        return output

    monkeypatch.setattr(Scheduler, "update", leaky)
    assert module.replay(str(path), bisect=True) == 1
    assert "first broken by step 57" in capsys.readouterr().out


def test_a_record_that_does_not_replay_is_refused(flight, tmp_path):
    path, *_ = flight
    text = path.read_text()
    (tmp_path / "changed").write_text(text.replace('"chunk_size":16', '"chunk_size":15'))
    with pytest.raises(ValueError, match="not the recorded one"):
        list(Replay(read_records(tmp_path / "changed")).play())
    # A crash cuts the last line; what was before it replays.
    (tmp_path / "cut").write_text(text[: len(text) // 2])
    assert sum(1 for _ in Replay(read_records(tmp_path / "cut")).play()) > 100


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("header", {"config": {"zz": 1}}),
        ("header", {"config": {}}),
        ("add", {"params": {"zz": 1}}),
        ("step", {"done": 77}),
        ("step", {"ids": []}),
        ("step", {"ids": [10**12]}),
        ("step", {"bad": [99]}),
    ],
    ids=str,
)
def test_a_corrupted_record_is_refused_in_words(flight, tmp_path, kind, changes):
    records = [json.loads(line) for line in flight[0].read_bytes().splitlines()[:40]]
    spoilt = next(r for r in records if r["kind"] == kind and (kind != "step" or r.get("ids")))
    spoilt.update(changes)
    path = tmp_path / "spoilt.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(ValueError, match=r"record|outside"):
        for _ in Replay(read_records(path)).play():
            pass


def test_what_if_keeps_what_requests_say_and_changes_only_when(flight):
    path, *_ = flight
    records = read_records(path)
    same, first = what_if(records), what_if(records, order="prefill_first")
    reserve = what_if(records, admission="reserve")
    assert reserve.num_preemptions == 0 < same.num_preemptions
    assert same.trace.steps and set(same.finished_s) == set(first.finished_s) == set(reserve.finished_s)
    for outcome in (same, first, reserve):
        said = {}
        for step in outcome.trace.steps:
            for request_id, samples in zip(step.request_ids, step.samples.tolist(), strict=True):
                said[request_id] = said.get(request_id, 0) + samples
        assert sum(said.values()) == sum(s.samples.sum() for s in outcome.trace.steps)
    assert first.summary()["steps"] != same.summary()["steps"]
    assert what_if(records, order="prefill_first").summary() == first.summary(), "not deterministic"


def test_parse_changes():
    assert parse_changes(["order=mixed", "chunk-size=none", "prefix_cache=false", "max_running=3"]) == {
        "order": "mixed", "chunk_size": None, "prefix_cache": False, "max_running": 3,
    }  # fmt: skip
    for bad in ("order", "nonsense=3", "max_running=many", "prefix_cache=perhaps"):
        with pytest.raises(ValueError):
            parse_changes([bad])
