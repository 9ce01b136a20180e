"""What a measurement says: floors worked out by hand, the same work each time, every second accounted for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Checkpoint

from minisgl import LLM, RequestOutput, SamplingParams, cli
from minisgl.benchmark import compare, measure, targets
from minisgl.benchmark.ceilings import Ceilings
from minisgl.benchmark.measure import engine_options, open_bench
from minisgl.benchmark.offline import bench_offline
from minisgl.benchmark.profile import (
    HEAD,
    LAYER_PRODUCTS,
    Event,
    StepShape,
    find_place,
    find_places,
    place_floors,
    profile,
    read_trace,
    summarise,
    timed_by_events,
)
from minisgl.benchmark.roofline import KERNELS_PER_LAYER, KERNELS_PER_STEP, ModelCosts, Steps, lines, plan_steps
from minisgl.benchmark.shapes import SHAPES, shape_folder
from minisgl.benchmark.targets import StartUp, Target, bench_all, start_up
from minisgl.benchmark.workload import Workload, equal_lengths, mixed_lengths
from minisgl.config import EngineConfig, ModelConfig, Order, SchedulerConfig
from minisgl.model.registry import count_parameters
from minisgl.server import load_tokenizer

H200 = Ceilings(4.68e12, 4.28e12, 788e12, 1.3e-6, "bfloat16")
TENTHS = Ceilings(10.0, 5.0, 100.0, 0.5, "float32")
SMALL = mixed_lengths(6, input_len=(5, 30), output_len=(3, 9))


def scheduler_config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"page_size": 64, "num_pages": 20_000, "max_model_len": 40_960, **changes})


def costs_of(shape: str) -> ModelCosts:
    return ModelCosts.of(ModelConfig.from_dict(SHAPES[shape]))


@pytest.fixture(scope="module")
def options(checkpoint_of: Callable[[str], Checkpoint]) -> dict[str, Any]:
    return {"model": str(checkpoint_of("qwen3").folder), "device": "cpu", "page_size": 4, "num_pages": 200}


@pytest.fixture
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring them takes a second each time, and is tested elsewhere."""
    monkeypatch.setattr(measure, "measure_ceilings", lambda device: Ceilings(1e10, 1e10, 1e11, 1e-6, "float32"))


# ------------------------------------------------------------------------------------------------------------ workload


def test_the_workload_is_the_fields_own() -> None:
    workload = mixed_lengths()
    assert (workload.num_requests, workload.num_input, workload.num_output) == (256, 142_827, 133_966)
    assert min(workload.input_lens + workload.output_lens) >= 100
    assert max(workload.input_lens + workload.output_lens) <= 1024
    assert mixed_lengths(seed=1).input_lens != workload.input_lens


def test_prompts_are_drawn_anew_but_their_lengths_stay() -> None:
    rng = random.Random(0)
    first, second = SMALL.draw(rng, 50), SMALL.draw(rng, 50)
    assert [len(p) for p in first] == [len(p) for p in second] == list(SMALL.input_lens)
    assert first != second and {t for p in first for t in p} <= set(range(50))
    assert [p.max_tokens for p in SMALL.params()] == list(SMALL.output_lens)
    assert all(p.ignore_eos and p.temperature == 0.6 for p in SMALL.params())
    short = SMALL.shortened(4)
    assert max(short.output_lens) == 4 and min(short.output_lens) == 3 and short.input_lens == SMALL.input_lens


# ------------------------------------------------------------------------------------------------------------ roofline


def test_costs_by_hand() -> None:
    """A model small enough to count on paper."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 10,
            "max_position_embeddings": 64, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    costs = ModelCosts.of(config, 2)
    assert costs.layer_params == 3 * (8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 10) == 1296
    assert costs.head_params == 800 and costs.weight_bytes == 2 * (1296 + 800)
    assert costs.kv_bytes == 2 * 3 * 2 * 2 * 2
    assert costs.pair_flops == 3 * (2 + 2) * 8  # scores and sum over the values, for each of 4 heads of 2
    assert costs.elementwise_bytes == 3 * 2 * (8 * 8 + 2 * 16 + 30)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_of_the_model(shape: str) -> None:
    """All but the norms, which are a ten-thousandth."""
    config = ModelConfig.from_dict(SHAPES[shape])
    costs = ModelCosts.of(config)
    embedding = 0 if config.tie_word_embeddings else costs.head_params
    assert costs.layer_params + costs.head_params + embedding == pytest.approx(count_parameters(config), rel=2e-4)


def test_steps_of_two_requests_by_hand() -> None:
    """Prompts of 5 and 3 in a budget of 6: the second prompt's last two tokens ride along with the first's decode."""
    steps = plan_steps(Workload((5, 3), (3, 2)), scheduler_config(max_num_batched_tokens=6))
    assert steps.num_prefill.tolist() == [6, 2, 0]
    assert steps.prefill_pairs.tolist() == [15 + 1, 2 + 3, 0]
    assert steps.num_prefill_samples.tolist() == [1, 1, 0]
    assert steps.num_decodes.tolist() == [0, 1, 2]
    assert steps.decode_pairs.tolist() == [0, 6, 7 + 4]


@pytest.mark.parametrize("order", ["mixed", "prefill_first", "decode_first"])
@pytest.mark.parametrize("budget", [7, 64])
def test_steps_hold_the_whole_workload(order: Order, budget: int) -> None:
    """Every token once, whatever the order; attention sees what a triangle holds."""
    steps = plan_steps(SMALL, scheduler_config(order=order, max_num_batched_tokens=budget, max_running=3))
    pairs = [n * (n + 1) // 2 for n in SMALL.input_lens]
    decoded = [
        sum(range(i + 1, i + o)) for i, o in zip(SMALL.input_lens, SMALL.output_lens, strict=True)
    ]  # the last token is never computed
    assert steps.num_prefill.sum() == SMALL.num_input and steps.prefill_pairs.sum() == sum(pairs)
    assert steps.num_decodes.sum() == SMALL.num_output - 6 and steps.decode_pairs.sum() == sum(decoded)
    assert steps.num_prefill_samples.sum() == 6 and (steps.num_decodes + steps.num_prefill).max() <= budget


def test_lines_by_hand() -> None:
    """A prompt step, a mixed step and two decode steps, one bound by weights and one by arithmetic."""
    costs = ModelCosts(
        num_layers=2, layer_params=10, head_params=5, dtype_bytes=2, kv_bytes=4, pair_flops=1, elementwise_bytes=20
    )
    columns = [[0, 1, 1, 30], [0, 7, 8, 90], [50, 10, 0, 0], [100, 55, 0, 0], [1, 1, 0, 0]]
    steps = Steps(*(np.array(c, np.int64) for c in columns))
    weights_s = 30 / 10
    first = 2 * 10 * 50 + 2 * 5 + 100
    second = 2 * 10 * 10 + 2 * 5 + 55
    serial = [
        first / 100,
        weights_s + 7 * 4 / 10 + second / 100,
        weights_s + 8 * 4 / 10,
        30 * 2 * 15 / 100 + 90 * 4 / 10,
    ]
    found = lines(costs, steps, TENTHS)
    assert found.serial_s == pytest.approx(sum(serial))
    all_flops = first + second + 32 * 30 + (7 + 8 + 90)
    assert found.overlap_s == pytest.approx(max((4 * 30 + 105 * 4) / 10, all_flops / 100))
    num_kernels = 4 * (2 * KERNELS_PER_LAYER + KERNELS_PER_STEP)
    assert found.launch_aware_s == pytest.approx(sum(serial) + num_kernels * 0.5 + (32 + 60) * 20 / 5)


def test_a_small_prompt_takes_as_long_as_the_weights() -> None:
    steps = plan_steps(equal_lengths(1, 1, 1), scheduler_config())
    costs = costs_of("qwen3-8b")
    assert lines(costs, steps, H200).serial_s == pytest.approx(costs.weight_bytes / 4.68e12)


@pytest.mark.parametrize(
    ("shape", "workload", "count", "tokens_per_s"),
    [
        ("qwen3-0.6b", mixed_lengths(), "output", 39_100),
        ("qwen3-8b", mixed_lengths(), "output", 13_300),
        ("qwen3-14b", mixed_lengths(), "output", 8440),
        ("qwen3-0.6b", equal_lengths(1, 128, 512), "output", 3790),
        ("qwen3-8b", equal_lengths(1, 128, 512), "output", 308),
        ("qwen3-0.6b", equal_lengths(16, 128, 512), "output", 39_500),
        ("qwen3-8b", equal_lengths(32, 1024, 1), "input", 55_500),
        ("qwen3-0.6b", equal_lengths(32, 1024, 1), "input", 789_000),
    ],
)
def test_lines_of_an_h200(shape: str, workload: Workload, count: str, tokens_per_s: float) -> None:
    """Against figures that were worked out without this module, to three digits; steps that mix prompts and decodes,
    which they leave out, change half a percent, and the prompts of 16 short requests one."""
    costs = costs_of(shape)
    by_order = {
        o: lines(costs, plan_steps(workload, scheduler_config(order=o)), H200) for o in ("mixed", "prefill_first")
    }
    num_tokens = workload.num_output if count == "output" else workload.num_input
    for order, found in by_order.items():
        rough = 0.012 if order == "mixed" or workload.num_requests == 16 else 0.004
        assert num_tokens / found.serial_s == pytest.approx(tokens_per_s, rel=rough)
        assert found.overlap_s <= found.serial_s < found.launch_aware_s


# -------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_a_folder_that_opens(shape: str) -> None:
    with shape_folder(shape) as folder:
        config, tokenizer = ModelConfig.from_folder(folder), load_tokenizer(folder)
        assert config.vocab_size > tokenizer.vocab_size and config.dtype == "bfloat16"
        assert tokenizer.decode([5, config.vocab_size - 1, 9]) == tokenizer.decode([5, 9])
    assert not Path(folder).exists()


def test_the_published_sizes() -> None:
    sizes = {name: count_parameters(ModelConfig.from_dict(shape)) for name, shape in SHAPES.items()}
    assert sizes["qwen3-0.6b"] == 596_049_920 and sizes["qwen3-8b"] == 8_190_735_360
    assert sizes["qwen3-14b"] == 14_768_307_200 and sizes["llama-3.1-8b"] == 8_030_261_248


def test_a_shape_takes_the_models_place() -> None:
    with engine_options({"model": "tiny", "device": "cpu"}, "qwen3-0.6b") as changed:
        assert EngineConfig(**changed).load_format == "dummy" and changed["dtype"] == "bfloat16"
        assert ModelConfig.from_folder(changed["model"]).num_layers == 28
    with engine_options({"dtype": "float32"}, "qwen3-0.6b") as changed:
        assert changed["dtype"] == "float32"
    with pytest.raises(ValueError, match="shape must be one of qwen3"), engine_options({}, "gpt-9"):
        pass


# ----------------------------------------------------------------------------------------------------------- measuring


def test_a_run_is_timed_and_finds_nothing_cached(
    options: dict[str, Any], no_ceilings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[list[RequestOutput]] = []
    generate = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda *a, **k: answers.append(generate(*a, **k)) or answers[-1])
    # The same prompts each time: they would be found in the cache if it were not emptied.
    prompts = SMALL.draw(random.Random(0), 100)
    monkeypatch.setattr(Workload, "draw", lambda *_: prompts)
    with open_bench(options) as bench:
        runs = bench.measure(SMALL, 3)
        row = bench.row("here", SMALL, runs)
        assert bench.row("in", SMALL, runs, count="input")["input tok/s"] == SMALL.num_input / row["seconds"]
        assert bench.load_s > 0 and bench.facts()["load seconds"] == bench.load_s
    assert len(runs) == 3 and len(answers) == 4  # once to warm up
    for run, outputs in zip(runs, answers[1:], strict=True):
        assert [len(o.token_ids) for o in outputs] == list(SMALL.output_lens)
        assert sum(o.usage.cached_tokens for o in outputs) == 0
        assert 0 < min(run.first_token_s) <= max(run.first_token_s) < run.seconds
        for first_s, token_s, n, o in zip(run.first_token_s, run.token_s, SMALL.output_lens, outputs, strict=True):
            assert o.timings.finished_s is not None
            assert first_s + (n - 1) * token_s == pytest.approx(o.timings.finished_s - o.timings.arrival_s)
        assert run.steps == max(SMALL.output_lens)
    seconds = sorted(run.seconds for run in runs)
    assert row["seconds"] == seconds[1] and row["output tok/s"] == SMALL.num_output / seconds[1]
    assert row["spread %"] == pytest.approx(100 * (seconds[2] - seconds[0]) / seconds[1])
    assert row["share %"] == pytest.approx(100 * row["output tok/s"] / row["serial roofline"])


def test_offline_variants_and_the_report(
    options: dict[str, Any], no_ceilings: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    rows = bench_offline(
        options, workload=SMALL, repeats=2, variants=("as asked", "plain loop", "recorded"), output=str(path)
    )
    assert [row["row"] for row in rows] == ["as asked", "plain loop", "recorded"] and rows[0]["time ratio"] == 1
    report = json.loads(path.read_text())
    assert report["rows"] == rows and report["workload"]["input tokens"] == SMALL.num_input
    assert report["ceilings"]["read TB/s"] == 0.01 and report["command"] and report["commit"]
    assert "plain loop" in capsys.readouterr().out


def test_all_targets_in_one_table(
    options: dict[str, Any], no_ceilings: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caches = []

    def start(options: dict[str, Any], triton_cache: str) -> tuple[float, list[str]]:
        caches.append(triton_cache)
        (Path(triton_cache) / "kernel").touch(exist_ok=len(caches) == 2)
        return 4.0 - len(caches), ["5 ms: imported"]

    monkeypatch.setattr(targets, "start_up", start)
    rows = [
        StartUp(None, must=2.5, goal=1),
        StartUp(None, must=2.5, goal=1, kernels="on disk"),
        Target("easy", None, SMALL, must=1, goal=2, repeats=1),
        Target("hard", None, SMALL, must=1e12, goal=2e12, count="input", repeats=1),
        Target("hard for this machine", None, SMALL, must=1e12, goal=2e12, roofline=1e30, repeats=1),
        Target("not here", "no-such-shape", SMALL, must=1, goal=1),
    ]
    path = tmp_path / "all.json"
    with pytest.raises(RuntimeError, match="no-such-shape"):
        bench_all(options, targets=rows, output=str(path))
    report = json.loads(path.read_text())
    assert [row["reached"] for row in report["rows"]] == ["NO", "yes", "yes", "NO", "by share"]
    assert report["rows"][3]["row"] == "hard, input tok/s" and report["rows"][0]["measured"] == 3.0
    assert len(report["failed"]) == 1 and caches[0] == caches[1] and not Path(caches[0]).exists()
    detail = report["details"][options["model"]]
    assert detail["easy"]["share %"] == report["rows"][2]["share %"] and len(detail["easy"]["runs"]) == 1
    assert "kernels" not in detail["easy"]  # its goal is reached
    kernels = detail["hard"]["kernels"]
    assert kernels["kind"] == "decode" and kernels["requests a step"] == SMALL.num_requests
    assert {"QKV product", "attention", "down product"} <= {row["place"] for row in kernels["rows"]}
    assert "hard, input tok/s" in capsys.readouterr().out
    with pytest.raises(ValueError, match="gpt-9"):
        bench_all(options, targets=rows, shapes=["gpt-9"])


def test_every_target_has_a_shape_that_there_is() -> None:
    assert {t.shape for t in targets.TARGETS} <= SHAPES.keys()
    for t in targets.TARGETS:
        assert t.must is not None and t.goal is not None
        assert t.goal < t.must if isinstance(t, StartUp) else t.goal > t.must


def test_start_up_counts_the_whole_process(options: dict[str, Any]) -> None:
    seconds, log = start_up(options)
    assert seconds > 0.5  # torch alone takes longer to import
    said = [line.split(" ms: ", 1) for line in log]
    times = [int(ms) for ms, _ in said]
    assert said[0][1] == "imported" and said[-1][1] == "first token" and times == sorted(times)
    assert 0 < times[0] < times[-1] < 1000 * seconds + 1000
    with pytest.raises(RuntimeError, match="nowhere"):
        start_up({**options, "model": "./nowhere"})


# -------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_transformers_gets_the_same_weights(options: dict[str, Any], load_format: Any) -> None:
    theirs = compare.load_transformers(EngineConfig(**{**options, "load_format": load_format}))
    prompt = [7, 300, 12, 55]
    with LLM(**options, load_format=load_format) as llm:
        ours = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0].token_ids
    with torch.no_grad():
        for token in ours:
            assert int(theirs(torch.tensor([prompt])).logits[0, -1].argmax()) == token
            prompt = [*prompt, token]


def test_transformers_runs_the_workload_or_says_why_not(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = compare.run_transformers(options, SMALL, seconds_here=0.5)
    assert row["failed"] is None and row["output tok/s"] == pytest.approx(SMALL.num_output / row["seconds"])
    assert row["time ratio"] == row["seconds"] / 0.5

    def refuse(*_: object) -> None:
        raise ImportError("no such thing here")

    monkeypatch.setattr(compare, "_generate", refuse)
    row = compare.run_transformers(options, SMALL)
    assert row["failed"] == "ImportError: no such thing here" and row["seconds"] is None


# ------------------------------------------------------------------------------------------------------------- profile


def made_events(num_layers: int, steps: int) -> list[Event]:
    """Steps of layers as kernels of 2 us, each beginning 1 us after the one before: they overlap by half."""
    layer = ["nvjet_qkv", "_norm_rotary_store_kernel", "_decode_kernel", "_gemv_kernel", "_gemv_kernel", "_dot_kernel"]
    names = (layer * num_layers + ["_gemv_kernel", "_choose_kernel"]) * steps
    return [Event(name, float(i), 2.0) for i, name in enumerate(names)]


def test_products_are_told_apart_by_their_order() -> None:
    events = made_events(2, 3)
    places = find_places(events, steps=3, num_layers=2)
    layer = ["QKV product", "QK norm, rotary, KV write", "attention", *LAYER_PRODUCTS[1:]]
    assert places == [*layer * 2, HEAD, "sampling"] * 3
    # A product in two kernels: the second belongs to the first.
    events.insert(1, Event("splitKreduce_kernel", 0.5, 1.0))
    assert find_places(events, steps=3, num_layers=2)[:3] == ["QKV product", "QKV product", layer[1]]
    # One product more than there should be: nothing is claimed.
    events.append(Event("_gemv_kernel", 99.0, 1.0))
    assert set(find_places(events, steps=3, num_layers=2)) == {"products", *layer[1:3], "sampling"}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(x*)", "norm"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<Softmax<1>>(P)", "attention"),
        ("void cutlass::device_kernel<flashinfer::PrefillWithKVCacheKernel<Softmax>>(P)", "attention"),
        ("kernel_mha", "attention"),
        ("void flashinfer::sampling::TopKSamplingFromProbKernel<1>(f*)", "sampling"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(P)", "products"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("void at::native::(anonymous namespace)::indexSelectSmallIndex<bf16>(T)", "embedding"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(I)>(int)", "activation"),
        ("_silu_and_mul_kernel", "activation"),
        ("Memcpy DtoH (Device -> Pinned)", "copies to and from the host"),
        ("void at::native::elementwise_kernel<128, 4, F>(int, F)", "elementwise_kernel"),
    ],
)
def test_the_place_of_a_kernel(name: str, place: str) -> None:
    assert find_place(name) == place


def test_a_profile_adds_up() -> None:
    events = made_events(2, 3)
    floors = {"attention": (3e6, 1e-6), "QKV product": (1e6, 2e-6)}
    report = summarise(events, steps=3, step_s=30e-6, num_layers=2, floors=floors)
    rows = {row["place"]: row for row in report["rows"]}
    assert sum(row["us"] for row in report["rows"]) == report["kernels us"] == len(events) * 2 / 3
    assert report["kernels us"] + report["remainder us"] == report["step us"] == pytest.approx(30)
    assert report["kernels % of step"] == pytest.approx(100 * 28 / 30)
    attention = rows["attention"]
    assert (attention["calls"], attention["us"], attention["MB"]) == (2, 4, 3)
    assert attention["floor us"] == pytest.approx(1) and attention["floor / time %"] == pytest.approx(25)
    assert rows["sampling"]["floor us"] is None and rows["O product"]["kernels"] == {"_gemv_kernel": 2}


def test_no_moment_of_a_device_counts_twice(tmp_path: Path) -> None:
    """A kernel that was launched dependently waits for the one before it, which is at work."""
    runs = {"c": (20, 1), "a": (0, 10), "b": (2, 3), "d": (20.5, 2)}
    entries = [{"ph": "X", "cat": "kernel", "name": n, "ts": ts, "dur": dur} for n, (ts, dur) in runs.items()]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": entries}))
    own = {event.name: event.duration_us for event in read_trace(path, cuda=True)}
    assert own == {"a": 10, "b": 0, "c": 1, "d": 1.5}


def test_floors_sum_to_the_roofline_of_a_step() -> None:
    """Two ways to the same number: by place here, by step there."""
    config = ModelConfig.from_dict(SHAPES["qwen3-8b"])
    costs = ModelCosts.of(config)
    floors = place_floors(config, 2, StepShape(64, 64, decode_pairs=64 * 512), H200)
    step = lines(costs, Steps(*(np.array([n]) for n in (64, 64 * 512, 0, 0, 0))), H200)
    parts = [floors[place] for place in (*LAYER_PRODUCTS, HEAD, "attention")]
    assert sum(seconds for _, seconds in parts) == pytest.approx(step.serial_s)
    assert sum(num_bytes for num_bytes, _ in parts) == costs.weight_bytes + costs.kv_bytes * 64 * 512
    floors = place_floors(config, 2, StepShape(4096, 4, prefill_pairs=4 * 1024 * 1025 / 2), H200)
    step = lines(costs, Steps(*(np.array([n]) for n in (0, 0, 4096, 4 * 1024 * 1025 // 2, 4))), H200)
    parts = [floors[place] for place in (*LAYER_PRODUCTS, "attention")]  # the head is bound by memory
    head_s = 2 * costs.head_params * 4 / 788e12
    assert sum(seconds for _, seconds in parts) == pytest.approx(step.serial_s - head_s)


def test_a_trace_is_read_with_each_operations_own_time(tmp_path: Path) -> None:
    def entry(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    entries = [
        entry("cpu_op", "linear", 0, 10), entry("cpu_op", "mm", 2, 5), entry("cpu_op", "empty", 3, 1),
        entry("cpu_op", "add", 10, 4), entry("cpu_op", "elsewhere", 1, 6, tid=2), entry("kernel", "gemm", 50, 7),
        entry("gpu_memcpy", "Memcpy", 40, 2), {"ph": "i", "cat": "cpu_op", "name": "mark", "ts": 1},
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": entries}))
    own = {e.name: e.duration_us for e in read_trace(path, cuda=False)}
    assert own == {"linear": 5, "mm": 4, "empty": 1, "add": 4, "elsewhere": 6}
    assert [(e.name, e.start_us, e.duration_us) for e in read_trace(path, cuda=True)] == [
        ("Memcpy", 40, 2),
        ("gemm", 50, 7),
    ]


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_profile_of_an_engine(
    kind: Any, options: dict[str, Any], no_ceilings: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "profile.json", tmp_path / "trace.json"
    report = profile(
        {**options, "max_num_batched_tokens": 60},
        kind=kind, batch=3 if kind == "decode" else 2, context=20, steps=4, output=str(out), perfetto=str(trace),
    )  # fmt: skip
    rows = {row["place"]: row for row in report["rows"]}
    for place in (*LAYER_PRODUCTS, HEAD):
        assert rows[place]["calls"] == (1 if place == HEAD else 2), place
    config = ModelConfig.from_folder(options["model"])
    num_read = rows["attention"]["MB"] * 1e6 / config.kv_bytes_per_token(4)  # on average, of all requests
    if kind == "decode":
        assert (report["tokens a step"], report["steps"]) == (3, 4)
        assert num_read == pytest.approx(3 * (20 + 2 + 1.5 * 4), abs=2)  # the second four steps after two tokens
    else:  # four times two prompts fill less than three steps
        assert (report["tokens a step"], report["steps"]) == (pytest.approx(160 / 3), 3)
        assert num_read == pytest.approx(160 / 3)
    assert sum(row["us"] for row in report["rows"]) == pytest.approx(report["kernels us"])
    assert report["kernels us"] + report["remainder us"] == pytest.approx(report["step us"])
    assert json.loads(out.read_text())["rows"] == report["rows"]
    assert json.loads(trace.read_text())["traceEvents"]
    printed = capsys.readouterr().out
    assert f"a {kind} step" in printed and "are not in the table" in printed


def test_a_profile_that_does_not_fit(options: dict[str, Any], no_ceilings: None) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        profile(options, batch=50, context=100)
    with pytest.raises(ValueError, match="context 100 does not fit"):
        profile({**options, "max_num_batched_tokens": 50}, kind="prefill", context=100)


def test_without_cupti_operations_are_timed() -> None:
    a = torch.randn(64, 64)
    events = timed_by_events(lambda: [a @ a for _ in range(3)] and None, torch.device("cpu"))
    assert sum(e.name == "aten::mm" for e in events) == 3 and all(e.duration_us > 0 for e in events)
    with pytest.raises(RuntimeError, match="cuda_graph_max_bs"):
        timed_by_events(lambda: None, torch.device("cpu"))


# --------------------------------------------------------------------------------------------------------- command line


def test_commands(
    options: dict[str, Any], no_ceilings: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ["--model", options["model"], "--device", "cpu", "--page-size", "4", "--num-pages", "200"]
    out = str(tmp_path / "out.json")
    lengths = ["--num-requests", "3", "--input-len", "4", "9", "--output-len", "2", "5"]
    for command, shown in (
        (["bench", "offline", *lengths, "--repeats", "1", "--compare", "no prefix cache"], "no prefix cache"),
        (["bench", "latency", "--row", "2x8/3", "--row", "1x4/1", "--repeats", "1"], "2x8/3"),
        (["bench", "prefill", "--row", "2x30", "--repeats", "1"], "2x30"),
        (["profile", "--batch", "2", "--context", "9", "--steps", "2"], "a decode step"),
    ):
        assert cli.main([*command, *engine, "--output", out]) == 0, command
        assert shown in capsys.readouterr().out
        assert json.loads(Path(out).read_text())["rows"], command


def test_kernels_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--decode", "2x20", "--decode", "1x9", "--prefill", "2x8", "--heads", "4x2", "--repeats", "1"]
    assert cli.main(["bench", "attention", "--device", "cpu", *options]) == 0
    assert re.search(r"4/2 +16 +1 x 9 +torch", capsys.readouterr().out)
    assert cli.main(["bench", "gemm", "--device", "cpu"]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
    asked: dict[str, Any] = {}
    monkeypatch.setattr("minisgl.benchmark.gemm.bench_gemm", lambda **options: asked.update(options))
    monkeypatch.setattr("minisgl.launch.find_device", torch.device)
    command = ["--device", "cuda:0", "--shapes", "qwen3-0.6b,qwen3-8b", "--table-output", "table.json"]
    assert cli.main(["bench", "gemm", *command]) == 0
    assert asked == {
        "device": torch.device("cuda:0"), "shapes": ["qwen3-0.6b", "qwen3-8b"], "output": None,
        "table_output": "table.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["bench", "latency", "--row", "2x8"], "NxIN/OUT"),
        (["bench", "latency", "--row", "0x8/4"], "NxIN/OUT"),
        (["bench", "prefill", "--row", "2x8/3"], "NxIN"),
        (["profile", "--kind", "sleep"], "prefill"),
        (["bench", "all", "--model", "tiny"], "--model"),
        (["bench", "all", "--shapes", "qwen3-8b,gpt-9"], "qwen3-0.6b, "),
        (["bench", "latency", "--shape", "gpt-9"], "qwen3-0.6b"),
        (["bench", "attention", "--heads", "4"], "QxKV"),
    ],
)
def test_bad_commands(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and says in error


def test_all_targets_are_for_a_gpu_unless_a_cpu_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        cli.main(["bench", "all"])
    assert "--device cpu" in capsys.readouterr().err
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(targets, "bench_all", lambda options, **others: asked.append(options))
    assert cli.main(["bench", "all", "--device", "cpu"]) == 0 and asked[0]["device"] == "cpu"


def test_what_reaches_a_share_and_what_does_not() -> None:
    """Of a roofline of 200, 50 must be reached: a quarter, on whatever machine."""
    target = Target("", None, SMALL, must=50, goal=100, roofline=200)
    assert targets.must_share(target) == 25 and targets.must_share(StartUp(None, must=2, goal=1)) is None
    found = [targets._reached(*case, target) for case in ((50, 30), (50, 20), (49, 25), (49, 24.9))]
    assert found == ["yes", "yes", "by share", "NO"]


def test_the_typical_step_of_a_workload() -> None:
    """Whole prompts within the budget; or as many decodes as run together, half way through."""
    sizes = scheduler_config(max_running=4, max_num_batched_tokens=100)
    prompts, answers = equal_lengths(8, 200, 1), equal_lengths(8, 20, 10)
    assert targets.typical_step(prompts, sizes) == {"kind": "prefill", "batch": 8, "context": 100}
    assert targets.typical_step(answers, sizes) == {"kind": "decode", "batch": 4, "context": 25}


def test_a_shortened_workload_is_sampled_alike() -> None:
    assert equal_lengths(1, 2, 3, temperature=0.25).shortened(1) == equal_lengths(1, 2, 1, temperature=0.25)


def test_a_start_is_held_to_what_must_be_reached(
    options: dict[str, Any], no_ceilings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "start_up", lambda options, triton_cache: (3.0, []))
    rows = bench_all(options, targets=[StartUp(None, must=must, goal=1) for must in (2.9, 3, None)])
    assert [row["reached"] for row in rows] == ["NO", "yes", None]
