"""`PendingStep`: sampled tokens on their way from the device to the host.

Chapter 4 tells this module's story. The overlapped loop launches step k+1 while the tokens of step k still travel; this
object is what it holds meanwhile. It owns the host memory that the tokens travel to.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.sampler import SampledTokens
from minisgl.kernels.sampling import LogprobTensors
from minisgl.request import LogprobColumns
from minisgl.scheduler.plan import StepResult


class _Copy:
    """One tensor's copy to the host, launched on the current stream: pinned memory on CUDA, the tensor itself on a
    CPU."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            tensor.record_stream(torch.cuda.current_stream(tensor.device))  # its memory stays until the copy is done
        else:
            self._host = tensor

    def numpy(self, dtype: type[np.generic]) -> np.ndarray:
        """A fresh array, so that pinned memory goes back to its pool with the step. Only after the event."""
        return self._host.numpy().astype(dtype)


class _LogprobCopies:
    def __init__(self, tensors: LogprobTensors) -> None:
        self._logprobs = _Copy(tensors.logprobs)
        self._ranks = _Copy(tensors.ranks)
        self._top_ids = _Copy(tensors.top_ids)
        self._top_logprobs = _Copy(tensors.top_logprobs)

    def columns(self) -> LogprobColumns:
        return LogprobColumns(
            logprobs=self._logprobs.numpy(np.float32),
            ranks=self._ranks.numpy(np.int32),
            top_ids=self._top_ids.numpy(np.int32),
            top_logprobs=self._top_logprobs.numpy(np.float32),
        )


class PendingStep:
    """The results of one step, on their way.

    Making it launches one copy for each tensor, behind what the current stream has so far, and an event behind them;
    `wait` waits for that event and for nothing that was launched later.
    """

    def __init__(
        self,
        sampled: SampledTokens,
        prompt_logprobs: Mapping[int, LogprobTensors] | None = None,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """
        Args:
            sampled: what `Sampler.sample` returned.
            prompt_logprobs: index in the plan's R -> log-probabilities of the tokens that follow in its prompt.
            stream: for the copies, so that the next step does not stand behind them; None: the current one. Whoever
                writes to the memory of ``sampled`` again waits for it.
        """
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._tokens = _Copy(sampled.tokens)
            self._logprobs = None if sampled.logprobs is None else _LogprobCopies(sampled.logprobs)
            self._prompt_logprobs = {
                index: _LogprobCopies(tensors) for index, tensors in (prompt_logprobs or {}).items()
            }
            device = sampled.tokens.device
            self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> StepResult:
        """The step's results, once they are there. May be called again; the arrays are then fresh copies."""
        if self._event is not None:
            self._event.synchronize()
        token_ids, finite = self._tokens.numpy(np.int32)
        return StepResult(
            token_ids=token_ids,
            finite=finite.astype(np.bool_),
            logprobs=None if self._logprobs is None else self._logprobs.columns(),
            prompt_logprobs={index: copies.columns() for index, copies in self._prompt_logprobs.items()} or None,
        )
