"""CUDA graphs: steps that were recorded once and are launched as one.

Chapter 4 tells this module's story. A decode step of a small model is two hundred launches of a few microseconds each;
the host cannot launch that fast, a graph can. There are two kinds. A `DecodeGraph` is a whole decode step, for a number
of requests. `PieceGraphs` are a step with prompts, for a number of tokens: attention has no static shape there, so the
recording is cut at it, and its pieces are launched with attention between them.

A step smaller than its graph is padded: with requests of row -1, whose one token is written to the reserved page 0 and
read from there. All graphs share one pool of memory, since never more than one of them runs; what is still needed when
the next one does (the tokens, on their way to the host) lies outside it. Twin: the eager step.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.request_table import PackedStep, RequestTable, StepBuffers, pack_step, sampled_rows
from minisgl.forward import AttentionBackend, ForwardBatch
from minisgl.kernels.compile_ahead import compile_ahead
from minisgl.scheduler.plan import SchedulerOutput, empty_plan
from minisgl.utils import Int32Array

if TYPE_CHECKING:
    from minisgl.engine.runner import ModelRunner

logger = logging.getLogger(__name__)

# New pages that a decode step may bring, a request: one is usual, more come when the prefix cache's replace its own.
PAGES_PER_REQUEST = 4
FEW_TOKENS = 64  # up to here products have kernels of their own
TOKEN_BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def decode_buckets(most: int) -> list[int]:
    """Numbers of requests that decode graphs are made for, ascending, the last one ``most``: close together where a
    step's time depends on them most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, most, 64)]
    return [*(size for size in sizes if size < most), *([most] if most else [])]


@dataclass(slots=True, eq=False)
class DecodeGraph:
    """A decode step of R requests.

    Args:
        buffers: what the step is read from and written to.
        batch: the step's tensors, in these buffers.
        forward: prepare, model and logits, recorded.
        logits: ``[R, vocab_size]``.
        draw: the draw in one pass, recorded.
        tokens: ``[2, R]`` int32, what it draws; memory of its own.
        sent: what lies in ``buffers.packed``, int32: a step like the one before it, with the same requests and no new
            pages, needs no copy at all.
    """

    buffers: StepBuffers
    batch: ForwardBatch
    forward: torch.cuda.CUDAGraph
    logits: Tensor
    draw: torch.cuda.CUDAGraph
    tokens: Tensor
    sent: Int32Array

    @property
    def num_requests(self) -> int:
        """R."""
        return self.batch.num_requests

    @property
    def rows(self) -> Tensor:
        """``[R]`` int32, rows of the last step, -1 for padding."""
        return self.buffers.packed[: self.num_requests]

    def takes(self, plan: SchedulerOutput) -> bool:
        """Whether a step of at most R decodes fits into the buffers."""
        return len(plan.token_ids) + len(plan.page_ids) <= (1 + PAGES_PER_REQUEST) * self.num_requests

    def replay(self, plan: SchedulerOutput, table: RequestTable) -> tuple[ForwardBatch, Tensor]:
        """Launch the step; returns its batch, padding included, and the logits of its own requests."""
        step = pack_step(plan, self.num_requests, self.num_requests)
        if not np.array_equal(step.values, self.sent):
            table.send(step, into=self.buffers.packed)
            self.sent = step.values
        self.forward.replay()
        batch = replace(self.batch, step_id=plan.step_id, host_seq_lens=step.seq_lens)
        return batch, self.logits[: plan.num_requests]

    def replay_draw(self, num_requests: int) -> Tensor:
        """Launch the draw; returns ``[2, num_requests]``, good until the next step."""
        self.draw.replay()
        return self.tokens[:, :num_requests]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A place where a recording was interrupted: attention of one layer, to be launched between two pieces.

    Args:
        q, out: ``[N, num_heads, head_dim]``, where it reads and writes.
        kv: the layer's cache.
        scale: factor of the scores.
    """

    q: Tensor
    out: Tensor
    kv: Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class PieceGraphs:
    """A step of N tokens of any requests, in pieces.

    Args:
        buffers: its tokens; the other tensors of a step are made anew.
        pieces: one more than there are cuts.
        cuts: attention of each layer.
        stream: ``[N, hidden_size]``, behind the last layer.
    """

    buffers: StepBuffers
    pieces: tuple[torch.cuda.CUDAGraph, ...]
    cuts: tuple[Cut, ...]
    stream: Tensor

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.stream.shape[0]

    def replay(
        self, plan: SchedulerOutput, table: RequestTable, attention: AttentionBackend
    ) -> tuple[ForwardBatch, Tensor, Tensor]:
        """Launch the step; returns its batch without padding, the rows that sample, and the residual stream."""
        own = self.buffers
        step = pack_step(plan, plan.num_requests + 1, self.num_tokens)
        buffers = table.new_buffers(
            step, input_ids=own.input_ids, positions=own.positions, slot_mapping=own.slot_mapping
        )
        padded = table.batch(step, buffers)
        batch = replace(padded.part(0, plan.num_requests), logits_indices=padded.logits_indices)
        batch = replace(batch, attn_metadata=attention.plan(batch))
        n = batch.num_tokens
        for piece, cut in zip(self.pieces, self.cuts, strict=False):
            piece.replay()
            attention.forward(cut.q[:n], cut.kv, batch, scale=cut.scale, out=cut.out[:n])
        self.pieces[-1].replay()
        return batch, sampled_rows(step, buffers), self.stream


@dataclass(frozen=True, slots=True)
class Graphs:
    """All graphs of an engine, by size, ascending."""

    decodes: Mapping[int, DecodeGraph] = field(default_factory=dict)
    tokens: Mapping[int, PieceGraphs] = field(default_factory=dict)

    def for_decodes(self, plan: SchedulerOutput) -> DecodeGraph | None:
        """The smallest graph that can carry out a step in which every request decodes, if this is one."""
        if plan.total_tokens != plan.num_requests or not plan.samples.all() or plan.prompt_logprobs:
            return None
        graph = _smallest(self.decodes, plan.num_requests)
        return graph if graph is not None and graph.takes(plan) else None

    def for_tokens(self, plan: SchedulerOutput) -> PieceGraphs | None:
        """The smallest that can carry out any step of so many tokens."""
        return _smallest(self.tokens, plan.total_tokens)


def _smallest(graphs: Mapping[int, Any], size: int) -> Any:
    return next((graph for bucket, graph in graphs.items() if bucket >= size), None)


class GraphCapture:
    """Records the graphs of an engine.

    Args:
        runner: whose steps; its KV storage must stay where it is as long as the graphs live.
        max_seq_len: longest request, in tokens.
    """

    def __init__(self, runner: ModelRunner, *, max_seq_len: int) -> None:
        self.runner = runner
        self.max_seq_len = max_seq_len
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(runner.table.device)

    @torch.no_grad()
    def capture(self, *, max_requests: int, token_buckets: Sequence[int], reserve_bytes: int = 0) -> Graphs:
        """Record decode graphs up to ``max_requests``, and pieces for ``token_buckets``; the largest first, so that the
        others fit into its memory. What would leave less than ``reserve_bytes`` of the device's memory free is left
        out, with a warning."""
        started = time.monotonic()
        decodes: dict[int, DecodeGraph] = {}
        tokens: dict[int, PieceGraphs] = {}
        for size in reversed(decode_buckets(max_requests)):
            if self._has_room(reserve_bytes, f"the graph of {size} requests"):
                decodes[size] = self.decode(size)
        for size in sorted(token_buckets, reverse=True):
            if self._has_room(reserve_bytes, f"the graphs of {size} tokens"):
                tokens[size] = self.pieces(size)
        graphs = Graphs(dict(sorted(decodes.items())), dict(sorted(tokens.items())))
        logger.info(
            "captured graphs of %s requests and of %s tokens in %.1f s",
            list(graphs.decodes),
            list(graphs.tokens),
            time.monotonic() - started,
        )
        return graphs

    def compile(self, max_requests: int, max_tokens: int) -> None:
        """Compile the kernels of steps of so many requests and tokens at most, attention to prompts excepted: compiled
        when they are first launched, one after the other, they would take most of the start, or a request's time."""

        def steps() -> None:
            for doublings in range(4, max((max_requests - 1).bit_length(), 4) + 1):  # 16 pages to copy, 32, ...
                self.runner.kv.copy_pages(np.zeros((1 << doublings, 2), np.int32))
            with self._two_layers():
                for size in {*decode_buckets(FEW_TOKENS), *TOKEN_BUCKETS, max_tokens}:
                    if size <= max_tokens:
                        self._step_of_tokens(size)
                for size in decode_buckets(max_requests):
                    self._step_of_decodes(size)

        try:
            compile_ahead(steps, self.runner.table.device)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # Triton's hooks differ from version to version, and nothing depends on this but time
            logger.warning("kernels cannot be compiled ahead: each will be at its first launch", exc_info=True)

    @torch.no_grad()
    def worthwhile_token_buckets(self, max_tokens: int) -> tuple[int, ...]:
        """Those of `TOKEN_BUCKETS` up to ``max_tokens``, and this itself, that keep the host busy for long. Above them
        a graph gains nothing, and padding costs."""
        sizes = [*(n for n in TOKEN_BUCKETS if n < max_tokens), max_tokens]
        return tuple(sizes[: bisect_left(sizes, True, key=lambda n: not self._host_is_slow(n))])

    @torch.no_grad()
    def decode(self, num_requests: int) -> DecodeGraph:
        """Record one decode step and its draw."""
        step, buffers, forward, draw = self._decodes(num_requests)
        graph, draw_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with self._on_side_stream():
            draw(forward()[1])  # whatever is allocated at first use
            with self._recording(graph):
                batch, logits = forward()
            # Borrowed, so that the graphs of other sizes may use the same memory: only one of them runs.
            logits = borrow(logits)
            with self._recording(draw_graph):
                tokens = draw(logits)
        return DecodeGraph(buffers, batch, graph, logits, draw_graph, tokens, step.values)

    @torch.no_grad()
    def pieces(self, num_tokens: int) -> PieceGraphs:
        """Record a step of so many tokens, cut at attention."""
        runner = self.runner
        buffers, batch = self._tokens(num_tokens)
        cutter = _CuttingAttention(self._pool)
        with self._on_side_stream():
            runner.model(batch, runner.kv.layers, _NoAttention())  # whatever is allocated at first use
            torch.cuda.synchronize()
            cutter.begin()
            stream = runner.model(batch, runner.kv.layers, cutter)
            cutter.end()
        return PieceGraphs(buffers, tuple(cutter.pieces), tuple(cutter.cuts), borrow(stream))

    def _decodes(
        self, num_requests: int
    ) -> tuple[PackedStep, StepBuffers, Callable[[], tuple[ForwardBatch, Tensor]], Callable[[Tensor], Tensor]]:
        """A step of padding requests: what is sent, its buffers, its forward pass and its draw."""
        runner, table = self.runner, self.runner.table
        packed_len = 6 * num_requests + 3 + (1 + PAGES_PER_REQUEST) * num_requests + 2 * num_requests
        buffers = StepBuffers.new(
            num_requests,
            num_requests,
            table_width=table.page_table.shape[1],
            packed_len=packed_len,
            device=table.device,
        )
        step = pack_step(empty_plan(), num_requests, num_requests)
        table.send(step, into=buffers.packed)
        longest = replace(step, seq_lens=np.full(num_requests, self.max_seq_len, np.int32))

        # Attention that goes by what the host knows is in no graph, and has nothing to compile.
        attention = runner.attention if runner.attention.serves_graphs else _NoAttention()

        def forward() -> tuple[ForwardBatch, Tensor]:
            batch = table.batch(longest, buffers)
            batch = replace(batch, attn_metadata=attention.plan(batch))
            stream = runner.model(batch, runner.kv.layers, attention)
            return batch, runner.model.logits(stream)

        # Not of the pool: the tokens are still on their way to the host when the next step begins to use that.
        tokens = torch.empty(2, num_requests, dtype=torch.int32, device=table.device)

        def draw(logits: Tensor) -> Tensor:
            return runner.sampler.launch(logits, buffers.packed[:num_requests], table.last_tokens, out=tokens)

        return step, buffers, forward, draw

    def _step_of_decodes(self, num_requests: int) -> None:
        _, buffers, forward, draw = self._decodes(num_requests)
        _, logits = forward()
        draw(logits)
        # Outside of graphs, a draw may be greedy for all, or of logits that were adjusted.
        sampler, zero = self.runner.sampler, logits.new_zeros(1, dtype=torch.int64)
        sampler.launch(logits, buffers.packed[:num_requests], self.runner.table.last_tokens, all_greedy=True)
        sampler.kernels.gumbel_argmax(logits.new_zeros(1, sampler.vocab_size, dtype=torch.float32), zero, zero)

    def _step_of_tokens(self, num_tokens: int) -> None:
        _, batch = self._tokens(num_tokens)
        self.runner.model(batch, self.runner.kv.layers, _NoAttention())

    def _tokens(self, num_tokens: int) -> tuple[StepBuffers, ForwardBatch]:
        """A step of nothing but padding."""
        table = self.runner.table
        step = pack_step(empty_plan(), 1, num_tokens)
        buffers = StepBuffers.new(1, num_tokens, table_width=1, packed_len=len(step.values), device=table.device)
        table.send(step, into=buffers.packed)
        return buffers, table.batch(step, buffers)

    @contextmanager
    def _two_layers(self) -> Iterator[None]:
        """The model has only two layers: they launch what all others do, and are ready in a moment."""
        decoder, kv = self.runner.model.model, self.runner.kv
        layers, kv_layers = decoder.layers, kv.layers
        decoder.layers, kv.layers = layers[:2], kv_layers[:2]
        try:
            yield
        finally:
            decoder.layers, kv.layers = layers, kv_layers

    def _host_is_slow(self, num_tokens: int) -> bool:
        """Whether the host takes more than half as long to launch a step of so many tokens as the device to compute it.
        Attention is not in it, and plans, packs and results are to be seen to in the same time."""
        _, batch = self._tokens(num_tokens)
        for _ in range(2):  # the first time is slower
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(10**8)  # the device waits until all is launched, so that its own time is seen
            begin.record()
            started = time.perf_counter()
            self.runner.model(batch, self.runner.kv.layers, _NoAttention())
            host_s = time.perf_counter() - started
            end.record()
            torch.cuda.synchronize()
        return host_s > 0.5 * begin.elapsed_time(end) / 1e3

    def _has_room(self, reserve_bytes: int, what: str) -> bool:
        free = torch.cuda.mem_get_info(self.runner.table.device)[0]
        if free < reserve_bytes:
            logger.warning("%s is left out: only %.2f GiB of memory are left", what, free / 2**30)
        return free >= reserve_bytes

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Recording is not allowed on the default stream."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # `torch.cuda.graph` would do, but it collects garbage each time: seconds, over hundreds of graphs.
        torch.cuda.synchronize()
        graph.capture_begin(pool=self._pool)
        try:
            yield
        finally:
            graph.capture_end()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines: cuBLAS keeps a workspace for every stream that it has ever seen."""
    return torch.cuda.Stream(device)


class _NoAttention:
    """Attention that computes nothing, for what surrounds it."""

    serves_graphs = True

    def plan(self, batch: ForwardBatch) -> None:
        return None

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        return torch.zeros_like(q)


class _CuttingAttention(_NoAttention):
    """Where the model asks for attention, one recording ends and the next begins."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self.cuts: list[Cut] = []

    def begin(self) -> None:
        self.pieces.append(torch.cuda.CUDAGraph())
        self.pieces[-1].capture_begin(pool=self._pool)

    def end(self) -> None:
        self.pieces[-1].capture_end()

    def forward(self, q: Tensor, kv: Tensor, batch: ForwardBatch, *, scale: float, out: Tensor | None = None) -> Tensor:
        out = torch.empty_like(q)
        self.end()
        self.cuts.append(Cut(borrow(q), borrow(out), kv, scale))
        self.begin()
        return out


class _Memory:
    """An address in the form that tensors can be made of: the CUDA array interface, version 3."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(s * tensor.element_size() for s in tensor.stride()),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrow(tensor: Tensor) -> Tensor:
    """A tensor on the same memory that does not keep it: a graph's pool does, and may use it again for what runs at
    other times."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
