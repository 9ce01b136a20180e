"""From an `EngineConfig` to a running engine: one of the places that name concrete classes.

Chapter 1 tells this module's story: where the model lies, which device and dtype, how many pages, and the wiring.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import RLock, Thread

import torch

from minisgl.checkpoint import TINY as TINY
from minisgl.checkpoint import find_model
from minisgl.config import EngineConfig, ModelConfig, SchedulerConfig
from minisgl.engine.attention import AttentionShape, load_attention
from minisgl.engine.attention.choice import usable_dtype
from minisgl.engine.core import EngineCore
from minisgl.engine.graphs import GraphCapture
from minisgl.engine.kv_storage import KVStorage
from minisgl.engine.memory import MemoryNeed, measure, rehearsal_sizes
from minisgl.engine.request_table import RequestTable
from minisgl.engine.runner import ModelRunner
from minisgl.engine.sampler import Sampler
from minisgl.forward import AttentionBackend
from minisgl.kernels.kernel_set import Kernels, load_kernels, on_device
from minisgl.model import load_model
from minisgl.model.decoder import CausalLM
from minisgl.scheduler import Scheduler
from minisgl.scheduler.flight import FlightRecorder, make_header
from minisgl.server import Tokenizer, load_tokenizer
from minisgl.utils import ceil_div

# Without a device's own memory to fill, the pool takes this share of the machine's.
CPU_POOL_SHARE = 0.25
# Larger decode steps take the device longer than the host needs to launch them.
MAX_GRAPH_REQUESTS = 512

logger = logging.getLogger(__name__)

_one_at_a_time = RLock()


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what belongs to it."""

    core: EngineCore
    tokenizer: Tokenizer
    model_config: ModelConfig


def load_engine(config: EngineConfig, *, progress: bool = False) -> LoadedEngine:
    """Load the model and wire up an engine. One at a time in a process: while one loads, it measures what is free on
    the device, and loads kernels, which Triton 3.6 cannot do in two threads at once.

    Raises:
        ValueError: for a model, device or option that cannot be had, in one line.
    """
    check_supported(config)
    device = find_device(config.device)
    with _one_at_a_time, on_device(device):
        return _load(config, device, progress)


def _load(config: EngineConfig, device: torch.device, progress: bool) -> LoadedEngine:
    folder = find_model(config.model)
    model_config = ModelConfig.from_folder(folder)
    reading = _in_background(partial(load_tokenizer, folder))
    dtype = find_dtype(config, model_config, device)
    shape = find_attention_shape(config, model_config, device, dtype)
    kernels = load_kernels(config.kernels, device=device)
    attention = load_attention(config.attention, device=device, shape=shape)
    context = find_context(config, model_config)
    started = time.monotonic()
    model = load_model(
        model_config,
        folder,
        device=device,
        dtype=dtype,
        load_format=config.load_format,
        kernels=kernels,
        max_model_len=context,
        progress=progress,
    )
    if reading.done():
        reading.result()  # if it cannot be had, the device need not do anything
    weight_bytes = sum(p.nbytes for p in model.parameters())
    logger.info("loaded %.2f GiB of weights in %.1f s", weight_bytes / 2**30, time.monotonic() - started)
    build = partial(
        _build_runner, model=model, attention=attention, kernels=kernels, dtype=dtype, device=device
    )  # over a pool of the given sizes
    max_graph_requests = find_max_graph_requests(config, attention, device)
    if device.type == "cuda":
        sizes, graphs = _size_on_cuda(config, model_config, device, dtype, build, max_graph_requests)
    else:
        num_bytes = CPU_POOL_SHARE * config.memory_fraction * _device_bytes(device)
        sizes, graphs = size_pool(config, model_config, device, dtype, num_bytes), None
    tokenizer = reading.result()
    runner = build(sizes)
    if graphs is not None and max_graph_requests:
        capture = GraphCapture(runner, max_seq_len=sizes.max_model_len)
        runner.graphs = capture.capture(
            max_requests=max_graph_requests, token_buckets=graphs.token_buckets, reserve_bytes=graphs.step_bytes
        )
    seed = secrets.randbits(63) if config.seed is None else config.seed
    scheduler = Scheduler(sizes, eos_token_ids=tokenizer.eos_token_ids, seed=seed)
    recorder = None
    if config.trace or config.record is not None:
        header = make_header(sizes, eos_token_ids=tokenizer.eos_token_ids, seed=seed)
        recorder = FlightRecorder(header, None if config.trace else config.record)
    core = EngineCore(scheduler, runner, overlap=config.overlap, recorder=recorder, strict=config.strict)
    return LoadedEngine(core, tokenizer, model_config)


def _in_background(read: Callable[[], Tokenizer]) -> Future[Tokenizer]:
    """A tokenizer's library takes seconds to import: it is, while the device gets its weights and kernels. Nobody waits
    for this thread who does not want the tokenizer."""
    reading: Future[Tokenizer] = Future()

    def run() -> None:
        started = time.monotonic()
        try:
            reading.set_result(read())
            logger.info("read the tokenizer in %.1f s", time.monotonic() - started)
        except BaseException as error:  # whatever it is, it is for whoever waits
            reading.set_exception(error)

    Thread(target=run, daemon=True).start()
    return reading


def check_supported(config: EngineConfig) -> None:
    """Raise ``ValueError`` for an option that this version does not carry out, rather than ignore it."""
    if config.tp != 1:
        raise ValueError(f"tp {config.tp} is not supported yet; supported is 1")
    if config.record is not None and config.trace:
        raise ValueError("record and trace exclude each other: a trace is the same record, kept in memory")


def find_device(name: str) -> torch.device:
    """The device called ``name``; "auto" is CUDA if there is one. Raises ``ValueError`` if it cannot be had."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def find_dtype(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV; "auto": the checkpoint's on CUDA, float32 on a CPU."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_config.dtype  # type: ignore[assignment]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise ValueError(f"the checkpoint's dtype {name!r} is not supported; choose dtype float32, bfloat16 or float16")
    if config.dtype == "auto" and device.type == "cuda":
        usable = usable_dtype(torch.cuda.get_device_capability(device), dtype)
        if usable != dtype:  # E08
            logger.warning("this device has no bfloat16: float16 is used")
        return usable
    return dtype


def find_context(config: EngineConfig, model_config: ModelConfig) -> int:
    """The longest prompt plus output, before the pool has a say: what is asked for, else the model's. Raises
    ``ValueError`` for more than the model's."""
    most = model_config.max_position_embeddings
    context = config.max_model_len or most
    if context > most:
        raise ValueError(f"max_model_len {context} is beyond the model's context of {most} tokens")
    return context


def find_attention_shape(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AttentionShape:
    """What the attention kernels have to serve."""
    return AttentionShape(
        dtype=dtype,
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=find_page_size(config, device),
    )


def find_page_size(config: EngineConfig, device: torch.device) -> int:
    """Tokens in a page: what is asked for, else what suits the device's kernels."""
    return config.page_size or (64 if device.type == "cuda" else 16)


def find_max_graph_requests(config: EngineConfig, attention: AttentionBackend, device: torch.device) -> int:
    """The largest batch to capture: what is asked for, but no more than can run (E04); 0: none. Raises ``ValueError``
    where graphs are asked for and cannot be had."""
    reason = None
    if device.type != "cuda":
        reason = "need a CUDA device"
    elif not attention.serves_graphs:
        reason = f"cannot hold attention {config.attention!r}, whose launches depend on lengths that the host knows"
    if reason is not None:
        if config.cuda_graph_max_bs:
            raise ValueError(f"CUDA graphs {reason}; cuda_graph_max_bs must be 0 or not given")
        return 0
    asked = MAX_GRAPH_REQUESTS if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs
    return min(asked, config.max_running)


def _build_runner(
    sizes: SchedulerConfig,
    *,
    model: CausalLM,
    attention: AttentionBackend,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelRunner:
    """A runner with a pool, and nothing captured."""
    config = model.config
    return ModelRunner(
        model=model,
        attention=attention,
        kv=KVStorage(
            model.kv_shape(sizes.num_pages, sizes.page_size),
            num_layers=config.num_layers,
            dtype=dtype,
            device=device,
            kernels=kernels,
        ),
        table=RequestTable(
            max_running=sizes.max_running,
            table_width=sizes.table_width,
            page_size=sizes.page_size,
            device=device,
            kernels=kernels,
        ),
        sampler=Sampler(max_running=sizes.max_running, vocab_size=config.vocab_size, device=device, kernels=kernels),
    )


def _size_on_cuda(
    config: EngineConfig,
    shape: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    build: Callable[[SchedulerConfig], ModelRunner],
    max_graph_requests: int,
) -> tuple[SchedulerConfig, MemoryNeed]:
    """The sizes, and what steps and graphs need beside the pool: measured, before the pool gets the rest.

    Raises:
        ValueError: as `size_pool`, and if the largest step does not fit.
    """

    def left() -> float:
        free, total = torch.cuda.mem_get_info(device)
        return total * config.memory_fraction - (total - free)

    trial = rehearsal_sizes(size_pool(config, shape, device, dtype, left()))
    try:
        need = measure(build(trial), trial, max_graph_requests=max_graph_requests)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"a step of {config.max_num_batched_tokens} tokens and {config.max_running} requests does not fit beside "
            f"the weights: lower max_num_batched_tokens or max_running"
        ) from error
    torch.cuda.empty_cache()  # the trial's pool; what libraries took for themselves stays
    sizes = size_pool(config, shape, device, dtype, left() - need.step_bytes - need.graph_bytes)
    logger.info(
        "memory: %.2f GiB for the largest step, %.2f for graphs, %.2f for KV",
        need.step_bytes / 2**30,
        need.graph_bytes / 2**30,
        sizes.num_pages * sizes.page_size * shape.kv_bytes_per_token(dtype.itemsize) / 2**30,
    )
    return sizes, need


def size_pool(
    config: EngineConfig, shape: ModelConfig, device: torch.device, dtype: torch.dtype, num_bytes: float
) -> SchedulerConfig:
    """Decide page size, number of pages and longest request: what is asked for, else what memory allows.

    Args:
        num_bytes: for KV, if the number of pages was not asked for.

    Raises:
        ValueError: nothing fits, or the asked-for length does not fit into the pool.
    """
    page_size = find_page_size(config, device)
    context = find_context(config, shape)
    token_bytes = shape.kv_bytes_per_token(dtype.itemsize)
    num_pages = config.num_pages
    if num_pages is None:
        most_useful = config.max_running * ceil_div(context, page_size) + 1
        num_pages = min(int(num_bytes // (token_bytes * page_size)), most_useful)
        if num_pages < 2:
            raise ValueError(f"no memory for KV: {num_bytes / 2**30:.2f} GiB are left, a page takes "
                             f"{token_bytes * page_size / 2**20:.2f} MiB")  # fmt: skip
    elif num_pages * page_size * token_bytes > (there := _device_bytes(device)):
        raise ValueError(f"num_pages {num_pages} takes {num_pages * page_size * token_bytes / 2**30:.4g} GiB; "
                         f"the whole device has {there / 2**30:.4g}")  # fmt: skip
    pool = (num_pages - 1) * page_size
    return SchedulerConfig(
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=context if config.max_model_len is not None else min(context, pool),
        max_running=config.max_running,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunk_size=config.chunk_size,
        order=config.order,
        waiting=config.waiting,
        admission=config.admission,
        prefix_cache=config.prefix_cache,
    )


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
