"""Rotary position embedding: the frequencies of each kind, and the table of cosines and sines.

Chapter 5 tells this module's story. Frequencies and angles are float32 throughout and equal those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minisgl.config import RopeConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position of the context, worked out once.

    Args:
        rope: base, kind and parameters.
        trained_len: the checkpoint's ``max_position_embeddings``.
        context_len: positions that will be asked for; the table has exactly as many rows.

    Raises:
        ValueError: for an unknown kind, a missing parameter, or a context that the kind cannot serve.
    """

    def __init__(self, rope: RopeConfig, trained_len: int, context_len: int) -> None:
        super().__init__()
        # On the CPU whatever the model's device, so that the table is the same everywhere.
        with torch.device("cpu"):
            frequencies_F, scale = rotary_frequencies(rope, trained_len, context_len)
            angles_TF = torch.arange(context_len, dtype=torch.float32)[:, None] * frequencies_F
            self.register_buffer("cos_TF", angles_TF.cos() * scale, persistent=False)
            self.register_buffer("sin_TF", angles_TF.sin() * scale, persistent=False)

    def forward(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``positions_N``, each ``[N, F]``, F pairs of a head being rotated."""
        return self.cos_TF[positions_N], self.sin_TF[positions_N]


def rotary_frequencies(rope: RopeConfig, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Angle per position of each rotated pair, ``[F]`` float32, and the factor of cosines and sines.

    Raises ``ValueError`` as `RotaryEmbedding` does.
    """
    if rope.rope_type not in _KINDS:
        raise ValueError(f"rotary kind {rope.rope_type!r} is not supported; supported are {', '.join(_KINDS)}")
    if rope.rotary_dim % 2:
        raise ValueError(f"a head's dimensions are rotated in pairs, so their number cannot be {rope.rotary_dim}")
    try:
        frequencies_F, scale = _KINDS[rope.rope_type](rope, trained_len, context_len)
    except KeyError as error:
        raise ValueError(f"rotary kind {rope.rope_type!r} needs the parameter {error.args[0]!r}") from None
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"rotary kind {rope.rope_type!r} cannot work with {dict(rope.parameters)}: {error}") from None
    if not (frequencies_F.isfinite() & (frequencies_F >= 0)).all() or not math.isfinite(scale):
        raise ValueError(f"rotary kind {rope.rope_type!r} turns nothing that is finite with {dict(rope.parameters)}")
    return frequencies_F, scale


def _plain(rope: RopeConfig) -> Tensor:
    exponents_F = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return 1.0 / rope.theta**exponents_F


def _default(rope: RopeConfig, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Su et al., 2021."""
    return _plain(rope), 1.0


def _linear(rope: RopeConfig, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Position interpolation: every angle shrinks by the same factor (Chen et al., 2023)."""
    return _plain(rope) / rope.parameters["factor"], 1.0


def _dynamic(rope: RopeConfig, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Dynamic NTK: up to the trained length the plain angles. Beyond it they would change with every token, also for
    the keys that are in the cache already."""
    if context_len > trained_len:
        raise ValueError(
            f"rotary kind 'dynamic' changes cached keys beyond the trained length, so the context ends at "
            f"{trained_len} tokens, not {context_len}"
        )
    return _plain(rope), 1.0


def _llama3(rope: RopeConfig, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """Llama 3.1: slow pairs are interpolated, fast ones kept, those between blended."""
    factor, low, high = (rope.parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original_len = rope.parameters.get("original_max_position_embeddings") or trained_len
    plain_F = _plain(rope)
    wavelength_F = 2 * math.pi / plain_F
    blend_F = (original_len / wavelength_F - low) / (high - low)
    between_F = (1 - blend_F) * plain_F / factor + blend_F * plain_F
    slow_F, fast_F = wavelength_F > original_len / low, wavelength_F < original_len / high
    return torch.where(slow_F, plain_F / factor, torch.where(fast_F, plain_F, between_F)), 1.0


def _yarn(rope: RopeConfig, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): a ramp from kept to interpolated pairs, and a scale that sharpens attention."""
    p = rope.parameters
    original_len = p.get("original_max_position_embeddings") or trained_len
    factor = p["factor"] if p["factor"] is not None else trained_len / original_len

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = p.get("attention_factor")
    if scale is None and p.get("mscale") and p.get("mscale_all_dim"):
        scale = sharpness(p["mscale"]) / sharpness(p["mscale_all_dim"])
    elif scale is None:
        scale = sharpness(1.0)

    def pair_turning(times: float) -> float:
        """The pair that turns so many times within the original length."""
        return rope.rotary_dim * math.log(original_len / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_turning(p.get("beta_fast") or 32), pair_turning(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    pairs_F = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp_F = ((pairs_F - first) / ((last - first) or 0.001)).clamp(0, 1)
    plain_F = _plain(rope)
    return plain_F / factor * ramp_F + plain_F * (1 - ramp_F), float(scale)


def _longrope(rope: RopeConfig, trained_len: int, context_len: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024): a factor of its own for each pair, from one of two lists.

    The list is chosen once, by the length of the context: choosing it by each sequence's length, as transformers does,
    would change cached keys when a sequence grows past the original length.
    """
    p = rope.parameters
    original_len = p.get("original_max_position_embeddings") or trained_len
    factor = p.get("factor") or trained_len / original_len
    scale = p.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0
    stretch_F = torch.tensor(p["long_factor" if context_len > original_len else "short_factor"], dtype=torch.float32)
    if len(stretch_F) != rope.rotary_dim // 2:
        raise ValueError(f"rotary kind 'longrope' needs {rope.rotary_dim // 2} factors, got {len(stretch_F)}")
    exponents_F = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return 1.0 / (stretch_F * rope.theta**exponents_F), float(scale)


_KINDS: dict[str, Callable[[RopeConfig, int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
}
