"""Configuration: what the user asks for, what the checkpoint is, and the numbers that the scheduler works with.

Chapter 1 tells this module's story. All three are frozen. `EngineConfig` holds wishes (None: "decide for me"),
`ModelConfig` what a checkpoint's ``config.json`` says, `SchedulerConfig` only decided numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from minisgl.utils import as_plain, ceil_div, check_int, check_range

Order = Literal["prefill_first", "decode_first", "mixed"]
Waiting = Literal["fcfs"]
Admission = Literal["estimate", "reserve"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]


# What the fields of the configuration classes may be: (lowest, highest), or a choice.
_INTEGERS: dict[str, tuple[int, int | None]] = {
    "tp": (1, 1024),
    "page_size": (1, 1024),
    "num_pages": (2, 2**31 - 1),
    "max_model_len": (2, 2**31 - 1),
    "max_running": (1, 65536),
    "max_num_batched_tokens": (1, 2**31 - 1),
    "chunk_size": (1, 2**31 - 1),
    "cuda_graph_max_bs": (0, 2**31 - 1),
    "seed": (0, 2**63 - 1),
}
_CHOICES: dict[str, Any] = {
    "dtype": Dtype,
    "load_format": LoadFormat,
    "order": Order,
    "waiting": Waiting,
    "admission": Admission,
}
_SWITCHES = ("prefix_cache", "overlap", "trace", "strict")
_TEXTS = ("model", "device", "attention", "kernels", "record")


def _check_fields(config: Any) -> None:
    """Raise ``ValueError`` for a field out of its range; None is allowed where it is the default. A number of numpy's
    becomes Python's, a path a string."""
    for f in fields(config):
        value = as_plain(getattr(config, f.name))
        object.__setattr__(config, f.name, value)
        if value is None and (f.default is None or "None" in str(f.type)):
            continue
        if f.name in _INTEGERS:
            low, high = _INTEGERS[f.name]
            check_int(f.name, value, low=low, high=high)
        elif f.name in _CHOICES and value not in get_args(_CHOICES[f.name]):
            allowed = ", ".join(map(repr, get_args(_CHOICES[f.name])))
            raise ValueError(f"{f.name} must be one of {allowed}, got {value!r}")
        elif f.name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{f.name} must be True or False, got {value!r}")
        elif f.name in _TEXTS:
            if not isinstance(value, (str, os.PathLike)):
                raise ValueError(f"{f.name} must be a string, got {value!r}")
            object.__setattr__(config, f.name, os.fspath(value))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may ask of an engine. None means that the engine decides.

    Args:
        model: "tiny" (the bundled model), a folder with a checkpoint, or a hub id.
        device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
        dtype: of weights and KV; "auto": the checkpoint's on CUDA, float32 on a CPU.
        tp: number of tensor-parallel ranks; so far 1.
        load_format: "dummy" gives random weights of the true shapes.
        page_size: tokens in a KV page; None: 64 on CUDA, 16 on a CPU.
        num_pages: KV pages in the pool, the reserved page 0 among them; None: what memory allows.
        memory_fraction: share of the device's memory that weights, graphs and KV together may take; on a CPU, KV takes
            a quarter of this share of the machine's.
        max_model_len: longest prompt plus output in tokens; None: the checkpoint's context, or the pool if smaller.
        max_running: most requests in a step.
        max_num_batched_tokens: token budget of a step.
        chunk_size: most prompt tokens of one request in a step; None: no cap but the budget.
        order: "mixed" (prefill chunks ride along with decodes), "prefill_first", or "decode_first".
        waiting: order of the waiting queue: "fcfs" (first come, first served).
        admission: "estimate" admits by expected length and preempts when wrong; "reserve" by the longest possible one.
        prefix_cache: keep the KV of finished requests for prompts that begin alike.
        overlap: schedule and launch step k+1 before step k is read.
        attention: attention kernels: "auto" (what is fastest on the device), "torch", "triton", "flashinfer", or
            "PREFILL,DECODE" with PREFILL one of torch, triton, fa2, fa3 and DECODE one of torch, triton, fa2, xqa.
        kernels: of layers and sampler: "triton" (fused), "torch" (the plain versions), or "auto" (Triton's on CUDA).
        cuda_graph_max_bs: largest batch of decodes that is captured in a CUDA graph, at most ``max_running``; 0: no
            graphs; None: up to 512 on CUDA, if the attention backend allows.
        seed: seed of requests that bring none; None: another one at each start.
        record: file that a flight record is written to.
        trace: keep the records that the book's figures are drawn from.
        strict: a failed integrity check raises; otherwise it is logged.
    """

    model: str = "tiny"
    device: str = "auto"
    dtype: Dtype = "auto"
    tp: int = 1
    load_format: LoadFormat = "auto"
    page_size: int | None = None
    num_pages: int | None = None
    memory_fraction: float = 0.9
    max_model_len: int | None = None
    max_running: int = 256
    max_num_batched_tokens: int = 8192
    chunk_size: int | None = None
    order: Order = "mixed"
    waiting: Waiting = "fcfs"
    admission: Admission = "estimate"
    prefix_cache: bool = True
    overlap: bool = True
    attention: str = "auto"
    kernels: str = "auto"
    cuda_graph_max_bs: int | None = None
    seed: int | None = None
    record: str | None = None
    trace: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        check_range("memory_fraction", self.memory_fraction, low=0, high=1, open_low=True)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The decided numbers that scheduler and KV cache work with; their meaning is that of `EngineConfig`.

    A request of ``max_model_len`` tokens always fits into the empty pool: whatever is admitted can finish.
    """

    page_size: int
    num_pages: int
    max_model_len: int
    max_running: int = 256
    max_num_batched_tokens: int = 8192
    chunk_size: int | None = None
    order: Order = "mixed"
    waiting: Waiting = "fcfs"
    admission: Admission = "estimate"
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.max_model_len > self.pool_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into the pool of {self.pool_tokens} tokens "
                f"({self.num_pages - 1} pages of {self.page_size})"
            )

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool can hold (page 0 is reserved for padding)."""
        return (self.num_pages - 1) * self.page_size

    @property
    def table_width(self) -> int:
        """Pages that the longest request can need."""
        return ceil_div(self.max_model_len, self.page_size)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base, kind and the kind's own parameters, whatever spelling the checkpoint uses.

    Args:
        theta: base of the frequencies.
        rope_type: "default", "linear", "llama3", "yarn", "longrope" or "dynamic".
        rotary_dim: how many of a head's dimensions are rotated.
        parameters: the other keys of the checkpoint's rotary section.
    """

    theta: float
    rope_type: str
    rotary_dim: int
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model, read from a Hugging Face ``config.json``.

    Args:
        architecture: class name in ``architectures``, such as "Qwen3ForCausalLM".
        dtype: dtype of the checkpoint: "bfloat16", "float16" or "float32".
        max_position_embeddings: trained context in tokens.
        sliding_window: tokens that a layer with a window sees; None if no layer has one.
        eos_token_ids: ids that end a text, from ``config.json`` and ``generation_config.json``.
        raw: the whole ``config.json``, for what only one architecture needs.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    dtype: str
    eos_token_ids: frozenset[int]
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json`` and, if there, ``generation_config.json``. Raises ``ValueError`` for a missing or broken
        file and for a missing key."""
        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} is not a checkpoint: it has no config.json")
        generation = folder / "generation_config.json"
        return cls.from_dict(_read_json(folder / "config.json"), _read_json(generation) if generation.exists() else {})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """The same from parsed JSON. Raises ``ValueError`` naming a key that is missing or makes no sense."""
        if not isinstance(raw, Mapping) or not isinstance(generation or {}, Mapping):
            raise ValueError("config.json and generation_config.json must hold JSON objects")

        def integer(key: str, default: int | None = None, high: int = 2**31 - 1) -> int:
            value = raw[key] if default is None or raw.get(key) is not None else default
            check_int(f"config.json: {key}", value, low=1, high=high)
            return int(value)

        architectures = raw.get("architectures") or ["unknown"]
        if not isinstance(architectures, list):
            raise ValueError(f"config.json: architectures must be a list of names, got {architectures!r}")
        rms_norm_eps = raw.get("rms_norm_eps", 1e-6)
        check_range("config.json: rms_norm_eps", rms_norm_eps, low=0)
        try:
            heads, hidden = integer("num_attention_heads"), integer("hidden_size")
            kv_heads = integer("num_key_value_heads", heads)
            if heads % kv_heads:
                raise ValueError(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
            head_dim = integer("head_dim", hidden // heads)
            return cls(
                architecture=str(architectures[0]),
                vocab_size=integer("vocab_size"),
                hidden_size=hidden,
                intermediate_size=integer("intermediate_size"),
                num_layers=integer("num_hidden_layers", high=10_000),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rms_norm_eps=float(rms_norm_eps),
                rope=_rope(raw, head_dim),
                max_position_embeddings=integer("max_position_embeddings"),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                attention_bias=bool(raw.get("attention_bias", False)),
                mlp_bias=bool(raw.get("mlp_bias", False)),
                sliding_window=_sliding_window(raw),
                dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
                eos_token_ids=_ids(raw.get("eos_token_id")) | _ids((generation or {}).get("eos_token_id")),
                raw=dict(raw),
            )
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]!r}") from None

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """KV cache bytes of one token in all layers, for elements of ``dtype_bytes`` bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _rope(raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """transformers 5 writes ``rope_parameters``; transformers 4 ``rope_theta`` beside ``rope_scaling``."""
    section = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"config.json: rope_parameters must be an object, got {section!r}")
    section = dict(section)
    theta = section.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    check_range("config.json: rope_theta", theta, low=0, open_low=True)
    rope_type = section.pop("rope_type", None) or section.pop("type", None) or "default"
    section.pop("type", None)
    share = section.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    check_range("config.json: partial_rotary_factor", share, low=0, high=1, open_low=True)
    rotary_dim = int(head_dim * share)
    if "original_max_position_embeddings" in raw:
        section["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    return RopeConfig(theta=float(theta), rope_type=str(rope_type), rotary_dim=rotary_dim, parameters=section)


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    """The window, or None if no layer has one: Qwen has a switch, and windows only in layers from the
    ``max_window_layers``-th on or where ``layer_types`` says so."""
    window = raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", True):
        return None
    if "use_sliding_window" in raw:
        types = raw.get("layer_types")
        windowed = "sliding_attention" in types if types else raw.get("max_window_layers", 0) < raw["num_hidden_layers"]
        if not windowed:
            return None
    check_int("config.json: sliding_window", window, low=1)
    return int(window)


def _ids(value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(ids)
