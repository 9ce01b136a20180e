"""How fast a workload can be on a device: three lines that every measured figure stands beside.

1. *Serial roofline*: decodes take as long as the weights need to be read, or their products to be multiplied if that is
   longer, and then as their KV needs to be read; prompts take their arithmetic; one behind the other. A step without
   decodes reads the weights too, while it multiplies.
2. *Overlap bound*: memory and arithmetic both busy all the time. Steps that mix decodes with prompts may pass the first
   line, nothing passes this one.
3. *Launch-aware prediction*: the first line, and what each kernel costs to start, and what norms, rotary embedding and
   activation move.

Which tokens meet in which step is not guessed: the real scheduler plans the steps, on made-up results. Chapter 4 tells
this module's story. Owns nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from minisgl.benchmark.ceilings import Ceilings
from minisgl.benchmark.workload import Workload
from minisgl.config import ModelConfig, SchedulerConfig
from minisgl.scheduler import Scheduler
from minisgl.scheduler.plan import StepResult

# A layer in as few kernels as this engine has found sense in: QKV product with the norm before it; norms of Q and K
# with rotary and KV write; attention; O product; gate and up with their norm and activation; down.
KERNELS_PER_LAYER = 6
# Prepare the batch, embedding, last norm, head, sampling, and the tokens' way to the host.
KERNELS_PER_STEP = 6


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a token and a step cost, from the model's shape alone. A multiplication and an addition are 2 operations.

    Args:
        num_layers: layers.
        layer_params: weights in all layers' matrices (and their biases).
        head_params: weights of the head; a tied embedding is the head.
        dtype_bytes: bytes of a weight or a KV element.
        kv_bytes: bytes of KV of a token.
        pair_flops: operations of attention for a query token and one token that it sees, in all layers.
        elementwise_bytes: bytes that norms, rotary and activation of a token read and write, as kernels of their own.
    """

    num_layers: int
    layer_params: int
    head_params: int
    dtype_bytes: int
    kv_bytes: int
    pair_flops: int
    elementwise_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, dtype_bytes: int = 2) -> ModelCosts:
        """The costs of the model that ``config`` describes, with weights and KV of ``dtype_bytes`` bytes a number."""
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner
        if config.attention_bias:
            layer += q + 2 * kv
        # Each of two norms reads sum and stream and writes both; Q, K and V are read and written; the activation reads
        # two and writes one.
        moved = 2 * 4 * hidden + 2 * (q + 2 * kv) + 3 * inner
        return cls(
            num_layers=config.num_layers,
            layer_params=config.num_layers * layer,
            head_params=config.vocab_size * hidden,
            dtype_bytes=dtype_bytes,
            kv_bytes=config.kv_bytes_per_token(dtype_bytes),
            pair_flops=4 * config.num_layers * q,
            elementwise_bytes=config.num_layers * moved * dtype_bytes,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but an input embedding that is not the head."""
        return (self.layer_params + self.head_params) * self.dtype_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The steps of a workload, one entry each, int64.

    Args:
        num_decodes: requests that compute one token behind a sampled one.
        decode_pairs: tokens whose KV these read, in all.
        num_prefill: prompt tokens.
        prefill_pairs: for each prompt token how many tokens it sees, in all.
        num_prefill_samples: prompts that end in this step, so that the head is asked.
    """

    num_decodes: np.ndarray
    decode_pairs: np.ndarray
    num_prefill: np.ndarray
    prefill_pairs: np.ndarray
    num_prefill_samples: np.ndarray

    def __len__(self) -> int:
        return len(self.num_decodes)


@dataclass(frozen=True, slots=True)
class Lines:
    """Seconds of a whole workload by each of the three lines."""

    serial_s: float
    overlap_s: float
    launch_aware_s: float


def plan_steps(workload: Workload, config: SchedulerConfig) -> Steps:
    """Let the scheduler plan the whole workload. No model is needed: each result is the token 0.

    Raises:
        ValueError: a request does not fit into ``config.max_model_len``.
    """
    clock = itertools.count()
    scheduler = Scheduler(config, seed=0, clock=lambda: float(next(clock)))
    # All prompts are different, so that nothing is shared: each begins with its own number.
    for i, (n, params) in enumerate(zip(workload.input_lens, workload.params(), strict=True)):
        prompt = np.full(n, i, np.int32)
        scheduler.add(str(i), prompt, params)
        if len(prompt) + (params.max_tokens or 0) > config.max_model_len:
            raise ValueError(f"{n} + {params.max_tokens} tokens do not fit into max_model_len {config.max_model_len}")
    rows = []
    while (plan := scheduler.schedule()) is not None:
        known = np.diff(plan.token_offsets) > 0  # the host sends prompts' tokens; those of decodes are on the device
        tokens, starts = plan.num_tokens.astype(np.int64), plan.starts.astype(np.int64)
        pairs = tokens * starts + tokens * (tokens + 1) // 2
        rows.append(
            (
                int((~known).sum()),
                int(pairs[~known].sum()),
                int(tokens[known].sum()),
                int(pairs[known].sum()),
                int((plan.samples & known).sum()),
            )
        )
        num_sampled = int(plan.samples.sum())
        scheduler.update(plan, StepResult(np.zeros(num_sampled, np.int32), np.ones(num_sampled, np.bool_)))
    return Steps(*np.array(rows, np.int64).reshape(-1, 5).T)


def lines(costs: ModelCosts, steps: Steps, ceilings: Ceilings) -> Lines:
    """The three lines of these steps."""
    read, rate = ceilings.read_bytes_per_s, ceilings.matmul_flops_per_s
    decode_flops = 2.0 * (costs.layer_params + costs.head_params) * steps.num_decodes
    prefill_flops = (
        2.0 * costs.layer_params * steps.num_prefill
        + 2.0 * costs.head_params * steps.num_prefill_samples
        + 1.0 * costs.pair_flops * steps.prefill_pairs
    )
    kv_bytes = 1.0 * costs.kv_bytes * steps.decode_pairs
    weights_s = costs.weight_bytes / read
    decode_s = np.maximum(weights_s, decode_flops / rate) + kv_bytes / read
    only_prefill_s = np.maximum(weights_s, prefill_flops / rate)
    serial_s = float(np.where(steps.num_decodes > 0, decode_s + prefill_flops / rate, only_prefill_s).sum())

    all_bytes = float(len(steps) * costs.weight_bytes + kv_bytes.sum())
    all_flops = float((decode_flops + prefill_flops + 1.0 * costs.pair_flops * steps.decode_pairs).sum())
    overlap_s = max(all_bytes / read, all_flops / rate)

    num_kernels = len(steps) * (KERNELS_PER_LAYER * costs.num_layers + KERNELS_PER_STEP)
    num_tokens = int((steps.num_decodes + steps.num_prefill).sum())
    elementwise_s = num_tokens * costs.elementwise_bytes / ceilings.copy_bytes_per_s
    return Lines(serial_s, overlap_s, serial_s + num_kernels * ceilings.launch_s + elementwise_s)
