"""The model can be compiled: a step comes as arguments, so that no guard watches a context that others change."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from minisgl import LLM, SamplingParams


def test_E15_a_compiled_model_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """E15: steps of all sizes, prompts and decodes; 100 of them after the first few."""
    torch._dynamo.reset()
    counter = CompileCounter()
    with LLM("tiny", device="cpu", overlap=False, prefix_cache=False, max_running=8) as llm:
        runner = llm.engine.runner
        # What attention does depends on the lengths, in plain torch; a kernel would be one operation.
        monkeypatch.setattr(runner.attention, "forward", torch.compiler.disable(runner.attention.forward))
        monkeypatch.setattr(
            runner.model.model, "forward", torch.compile(runner.model.model.forward, backend=counter, dynamic=True)
        )

        def run(sizes: range, max_tokens: int) -> int:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            before = llm.engine.scheduler.num_steps
            for n in sizes:
                llm.generate([[5 + i] * (3 * i + n + 1) for i in range(n)], params, use_tqdm=False)
            return llm.engine.scheduler.num_steps - before

        run(range(1, 4), 4)
        compiled = counter.frame_count
        assert compiled > 0
        assert run(range(1, 9), 14) >= 100
        assert counter.frame_count == compiled
