"""The same workload on transformers' continuous batching, with the same random weights: a second opinion in each run.

It is a comparison with what many have installed already, not with the fastest there is. The part of transformers that
this uses is younger than the rest and changes: if it cannot be had, the row says why, and nothing else fails.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from minisgl.benchmark.measure import free_memory
from minisgl.benchmark.workload import Workload
from minisgl.checkpoint import find_model
from minisgl.config import EngineConfig, ModelConfig
from minisgl.launch import find_device, find_dtype
from minisgl.model import load_model
from minisgl.model.weights import checkpoint_names
from minisgl.utils import ceil_div

logger = logging.getLogger(__name__)
_WARM_UP = 16  # new tokens of each request
_CPU_PAGE_SIZE, _CPU_BUDGET = 64, 1024


def run_transformers(
    options: Mapping[str, Any], workload: Workload, *, seconds_here: float | None = None, seed: int = 0
) -> dict[str, Any]:
    """Run ``workload`` once, after a short warm-up that does not count.

    Args:
        options: of `LLM`; model, device, dtype and load_format count.
        workload: what to run.
        seconds_here: what this engine took for it.
        seed: of the prompts' tokens.

    Returns:
        A row of figures; where it could not be run, ``failed`` says why and the figures are None.
    """
    row: dict[str, Any] = {"row": f"transformers {transformers.__version__}", "output tok/s": None, "seconds": None}
    row |= {"time ratio": None, "attention": None, "failed": None}
    try:
        model = load_transformers(EngineConfig(**options))
        free_memory()  # of the model that the weights came from: KV takes what is left
        rng = random.Random(seed)
        _generate(model, workload.shortened(_WARM_UP), rng)
        seconds = _generate(model, workload, rng)
        row |= {"output tok/s": workload.num_output / seconds, "seconds": seconds}
        row |= {"time ratio": seconds_here and seconds / seconds_here, "attention": model.config._attn_implementation}
    except Exception as error:  # whatever it is, our own figures are not to be lost for it
        row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        logger.warning("the comparison with transformers could not be made: %s", row["failed"])
    free_memory()
    return row


def load_transformers(config: EngineConfig) -> Any:
    """transformers' model with the weights that `LLM` has for the same configuration; they share memory with none."""
    device, folder = find_device(config.device), find_model(config.model)
    model_config = ModelConfig.from_folder(folder)
    dtype = find_dtype(config, model_config, device)
    ours = load_model(model_config, folder, device=device, dtype=dtype, load_format=config.load_format)
    with torch.device(device):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=dtype
        )
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        for name, (path, shard) in checkpoint_names(ours).items():
            theirs.get_parameter(name).copy_(parameters[path][shard.rows])
    return theirs.eval()


def _generate(model: Any, workload: Workload, rng: random.Random) -> float:
    """Seconds from the first request to the last token. Raises ``RuntimeError`` if a request fails."""
    sampling: dict[str, Any] = {"do_sample": False}
    if workload.temperature > 0:
        sampling = {"do_sample": True, "temperature": workload.temperature, "top_k": 0}
    config = transformers.GenerationConfig(
        **sampling, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(workload.output_lens)
    )
    prompts = workload.draw(rng, model.config.vocab_size)
    from transformers.generation import ContinuousBatchingConfig  # older versions have none

    sizes: dict[str, Any] = {}
    if model.device.type == "cpu":  # left alone it would fill the machine's memory with KV
        lengths = zip(workload.input_lens, workload.output_lens, strict=True)
        num_blocks = sum(ceil_div(n + m, _CPU_PAGE_SIZE) for n, m in lengths)
        sizes = {"page_size": _CPU_PAGE_SIZE, "num_blocks": 1 + num_blocks, "max_batch_tokens": _CPU_BUDGET}
    batching = ContinuousBatchingConfig(**sizes)
    with (
        torch.no_grad(),
        model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching
        ) as manager,
    ):
        started = time.perf_counter()
        for prompt, n in zip(prompts, workload.output_lens, strict=True):
            manager.add_request(prompt, max_new_tokens=n)
        num_tokens = num_done = 0
        while num_done < len(prompts):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the generation thread has ended")
            elif result.error is not None:
                raise RuntimeError(str(result.error))
            elif result.is_finished():
                num_done += 1
                num_tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - started
    if num_tokens != workload.num_output:
        raise RuntimeError(f"{num_tokens} tokens came, {workload.num_output} were asked for")
    return seconds
