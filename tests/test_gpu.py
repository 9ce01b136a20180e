"""The engine on a CUDA device gives the tokens that it gives on a CPU, whatever computes them."""

import logging
import os
from pathlib import Path

import pytest
import torch
from tolerances import BFLOAT16_GAP, FLOAT32_GAP

from minisgl import LLM, SamplingParams
from minisgl.benchmark.report import write_report
from minisgl.engine.pending import PendingStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

QUESTIONS = ["Tell me a story about a fox.", "What is 7 + 5?", "Who are you?", "What is a lighthouse?", "Count to ten."]
LONG = "Once upon a time there was a little fox named Ruby who lived near the old bridge. " * 6
TEXTS = ["Once upon a time", "The", LONG + "One day", LONG + "One night", LONG]
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def prompts():
    with LLM("tiny", device="cpu") as llm:
        chats = [llm.tokenizer.encode_chat([{"role": "user", "content": q}]).tolist() for q in QUESTIONS]
        return [*chats, *(llm.tokenizer.encode(t).tolist() for t in TEXTS)]


@pytest.fixture(scope="module")
def reference(prompts):
    """The CPU's outputs, float32."""
    with LLM("tiny", device="cpu", dtype="float32", overlap=False) as llm:
        return llm.generate(prompts, GREEDY, use_tqdm=False)


def num_decided(output, gap: float) -> int:
    """How many tokens come before the first position where the two most likely are closer than ``gap``."""
    for position, entry in enumerate(output.logprobs):
        best, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
        if best - second < gap:
            return position
    return len(output.token_ids)


def compare(reference, outputs, gap: float) -> int:
    compared = 0
    for want, got in zip(reference, outputs, strict=True):
        n = num_decided(want, gap)
        assert got.token_ids[:n] == want.token_ids[:n]
        compared += n
    return compared


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size,chunk", [(64, None), (16, 16), (1, 5)])
def test_float32_greedy_equals_cpu(prompts, reference, overlap, page_size, chunk):
    with LLM("tiny", device="cuda", dtype="float32", overlap=overlap, page_size=page_size, chunk_size=chunk,
             strict=True, num_pages=4096 // page_size + 1) as llm:  # fmt: skip
        for _ in range(2):  # the second time with a warm prefix cache
            compared = compare(reference, llm.generate(prompts, GREEDY, use_tqdm=False), FLOAT32_GAP)
            assert compared > 0.8 * NUM_TOKENS * len(prompts)


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False), (64, True)])
@pytest.mark.parametrize("max_graph", [0, None])
def test_our_kernels_and_graphs_in_float32(prompts, reference, overlap, page_size, max_graph):
    """E02. Fused kernels, Triton attention, graphs: the same tokens."""
    with LLM("tiny", device="cuda", dtype="float32", attention="triton", overlap=overlap, strict=True,
             page_size=page_size, num_pages=4096 // page_size + 1, cuda_graph_max_bs=max_graph, max_running=16,
             ) as llm:  # fmt: skip
        graphs = llm.engine.runner.graphs
        assert bool(graphs.decodes) == bool(graphs.tokens) == (max_graph is None)
        for _ in range(2):
            compared = compare(reference, llm.generate(prompts, GREEDY, use_tqdm=False), FLOAT32_GAP)
            assert compared > 0.8 * NUM_TOKENS * len(prompts)


BACKENDS = ["torch", "triton", "flashinfer", "fa2,fa2", "fa2,xqa", "fa3,triton", "auto"]


@pytest.mark.parametrize(("page_size", "overlap"), [(16, True), (64, False)])
@pytest.mark.parametrize("attention", BACKENDS)
def test_bfloat16_greedy_equals_cpu_up_to_near_ties(prompts, reference, attention, page_size, overlap):
    if attention not in ("torch", "triton", "auto"):
        pytest.importorskip("flashinfer")
    for max_graph in (0, None):
        with LLM("tiny", device="cuda", attention=attention, page_size=page_size, overlap=overlap,
                 cuda_graph_max_bs=max_graph, max_running=16, num_pages=4096 // page_size + 1) as llm:  # fmt: skip
            assert llm.engine.runner.kv.layers[0].dtype == torch.bfloat16
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert compare(reference, outputs, BFLOAT16_GAP) > 0.1 * NUM_TOKENS * len(prompts)


def test_E03_padding_changes_nothing(prompts, reference):
    """Batches of 1 to 9 in graphs of 1, 2, 4 and 8, prompts of all lengths in graphs of pieces."""
    with LLM("tiny", device="cuda", dtype="float32", attention="triton", max_running=8, num_pages=200) as llm:
        assert list(llm.engine.runner.graphs.decodes) == [1, 2, 4, 8]
        for size in range(1, 10):
            outputs = llm.generate(prompts[:size], GREEDY, use_tqdm=False)
            compare(reference[:size], outputs, FLOAT32_GAP)
            llm.engine.flush_cache()
        page_0 = [layer[:, 0] for layer in llm.engine.runner.kv.layers]
        assert all(bool(page.isfinite().all()) for page in page_0) and bool(page_0[0].any())


def test_tokens_that_leave_late_are_the_right_ones(prompts, reference, monkeypatch):
    """Their copy waits until the device is deep in the next step, whose graphs must not write where they lie."""

    def late(sampled, prompt_logprobs, *, stream):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**7)  # some milliseconds
        return PendingStep(sampled, prompt_logprobs, stream=stream)

    monkeypatch.setattr("minisgl.engine.runner.PendingStep", late)
    with LLM("tiny", device="cuda", dtype="float32", attention="triton", max_running=16, num_pages=200) as llm:
        assert compare(reference, llm.generate(prompts, GREEDY, use_tqdm=False), FLOAT32_GAP) > 0


def test_E04_graphs_stop_at_max_running_and_larger_batches_go_without(prompts, reference):
    options = dict(device="cuda", dtype="float32", attention="triton", num_pages=200)
    with LLM("tiny", max_running=3, cuda_graph_max_bs=160, **options) as llm:
        assert list(llm.engine.runner.graphs.decodes) == [1, 2, 3]
    with LLM("tiny", max_running=10, cuda_graph_max_bs=4, **options) as llm:
        assert list(llm.engine.runner.graphs.decodes) == [1, 2, 4]
        compare(reference, llm.generate(prompts, GREEDY, use_tqdm=False), FLOAT32_GAP)


def test_sampling_in_a_graph_equals_sampling_without(prompts):
    """P04, P05: greedy rows, random rows and rows that need more than one pass, in one batch."""
    params = [SamplingParams(temperature=t, top_p=p, seed=i, max_tokens=24, ignore_eos=True)
              for i, (t, p) in enumerate([(0, 1), (0.8, 1), (0.8, 0.9), (0, 1), (1.2, 1), (0.5, 0.5)])]  # fmt: skip
    tokens = []
    for max_graph, kernels in ((0, "torch"), (0, "triton"), (None, "triton")):
        with LLM("tiny", device="cuda", dtype="float32", attention="triton", kernels=kernels,
                 cuda_graph_max_bs=max_graph, num_pages=200, max_running=16) as llm:  # fmt: skip
            for batch in (params, params[:2] + params[3:5]):
                tokens.append([o.token_ids for o in llm.generate(prompts[: len(batch)], batch, use_tqdm=False)])
    assert tokens[0] == tokens[2] == tokens[4] and tokens[1] == tokens[3] == tokens[5]
    assert tokens[0][0] == tokens[1][0] and tokens[0][1] == tokens[1][1]


@pytest.mark.parametrize("graphs", [None, 0, 2])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_no_request_waits_for_a_compiler(prompts, kernels, attention, graphs):
    """What a start has not compiled would be compiled in the middle of an answer: decodes alone and beside prompts,
    prompts of all lengths, greedy and random draws, copied pages."""
    runtime = pytest.importorskip("triton").knobs.runtime
    compiled: list[str] = []
    params = [SamplingParams(max_tokens=3 + 2 * i, temperature=i % 3, ignore_eos=True) for i in range(len(prompts))]
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM("tiny", device="cuda", kernels=kernels, attention=attention, max_running=8, num_pages=192,
             cuda_graph_max_bs=graphs) as llm:  # fmt: skip
        runtime.jit_post_compile_hook = lambda fn, **_: compiled.append(fn.name)
        try:
            for size in range(1, len(prompts) + 1):
                llm.generate(prompts[-size:], params[:size], use_tqdm=False)
                llm.generate(prompts[:size], greedy, use_tqdm=False)
                if size % 3 == 0:
                    llm.engine.flush_cache()
        finally:
            runtime.jit_post_compile_hook = None
    assert not compiled


@pytest.mark.alone
def test_E05_the_pool_leaves_room_for_the_largest_step(caplog):
    """Under an artificial limit, with the longest chunk and the largest batch, and graphs for both."""
    share = 0.06
    free, total = torch.cuda.mem_get_info()
    with LLM("tiny", device="cuda", memory_fraction=share, max_running=256) as llm:
        context = llm.engine.scheduler.config.max_model_len
        prompts = [[7] * (context - 8)] * 8 + [[9, i % 50, i // 50] for i in range(300)]
        params = SamplingParams(max_tokens=8, ignore_eos=True, top_p=0.9, logprobs=20)
        llm.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
        used = free - torch.cuda.mem_get_info()[0]
    assert used < share * total


@pytest.mark.alone
def test_E05_what_does_not_fit_is_left_out(caplog, monkeypatch):
    from minisgl.engine import graphs

    free = torch.cuda.mem_get_info()[0]
    readings = iter([free] * 4)
    with LLM("tiny", device="cuda", num_pages=64, max_running=16, cuda_graph_max_bs=0) as llm:
        capture = graphs.GraphCapture(llm.engine.runner, max_seq_len=64)
        monkeypatch.setattr(graphs.torch.cuda, "mem_get_info", lambda device=None: (next(readings, 0), free))
        with caplog.at_level(logging.WARNING):
            captured = capture.capture(max_requests=16, token_buckets=(64,), reserve_bytes=1)
    assert list(captured.decodes) == [2, 4, 8, 16] and not captured.tokens
    assert "the graph of 1 requests is left out" in caplog.text


def test_seeded_tokens_equal_cpu(prompts):
    """P05: random numbers are the same on every device."""
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=24, ignore_eos=True) for i in range(5)]
    tokens = []
    for device in ("cpu", "cuda"):
        with LLM("tiny", device=device, dtype="float32") as llm:
            tokens.append([o.token_ids for o in llm.generate(prompts[:5], params, use_tqdm=False)])
    assert tokens[0] == tokens[1]


@pytest.mark.alone
def test_memory_returns_on_close(prompts):
    """E14"""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with LLM("tiny", device="cuda", num_pages=64) as llm:
            llm.generate(prompts[:2], GREEDY, use_tqdm=False)
            assert torch.cuda.memory_allocated() > before
        del llm
        assert torch.cuda.memory_allocated() == before


@pytest.mark.alone
def test_report(prompts, reference):
    """Write what was compared, if there is a place for it."""
    with LLM("tiny", device="cuda", dtype="float32") as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    compared = compare(reference, outputs, FLOAT32_GAP)
    same = sum(a.token_ids == b.token_ids for a, b in zip(reference, outputs, strict=True))
    if "OUT" in os.environ:
        results = {
            "prompts": len(prompts),
            "tokens_compared": compared,
            "tokens_generated": NUM_TOKENS * len(prompts),
            "outputs_identical": same,
        }
        what = "greedy tokens of the bundled model, float32, CUDA against CPU, plain torch path"
        write_report(Path(os.environ["OUT"]) / "gpu-greedy.json", what, torch.device("cuda"), results)
    assert same > 0
