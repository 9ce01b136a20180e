"""Every Triton kernel of the engine, in a run short enough for compute-sanitizer on a GPU:

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/sanitize.py

The caching allocator is off, so that each tensor is an allocation of its own and a read beyond its end is seen.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

from minisgl import LLM, SamplingParams

LONG = [7, 8, 9, 10, 11] * 9
PROMPTS = [LONG + [3], LONG + [4], [5], LONG[:20], [6, 7]]


def main() -> None:
    """Prompts with and without a prefix, decodes, page copies; greedy rows and random ones; groups of heads."""
    for page_size in (16, 64):
        with LLM("tiny", device="cuda", attention="triton", kernels="triton", page_size=page_size, num_pages=40,
                 max_running=4, max_num_batched_tokens=64, cuda_graph_max_bs=0, strict=True) as llm:  # fmt: skip
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=6, ignore_eos=True)
                outputs = llm.generate(PROMPTS, params, use_tqdm=False)
                assert all(len(output.token_ids) == 6 for output in outputs)
    print("all kernels ran")


if __name__ == "__main__":
    main()
