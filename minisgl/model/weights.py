"""Weights from safetensors files, streamed tensor by tensor into the model's parameters.

Chapter 5 tells this module's story. The files are memory-mapped and only this rank's slices are read, each straight to
its place: beside the model there is at most one slice in memory. Names are checked before anything is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from minisgl.model.parallel import Shard

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
# What a checkpoint may have although the model has no place for it: tables that follow from the configuration, and the
# head of a model whose head is its embedding.
_HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", "lm_head.weight")


def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool = False,
) -> None:
    """Fill the parameters of ``model``, which lies on the meta device, from the checkpoint in ``folder``.

    Args:
        progress: show a bar.

    Raises:
        ValueError: naming the files or tensors that are missing, unexpected, of another shape, or not floats.
    """
    wanted = checkpoint_names(model)
    parameters = dict(model.named_parameters())
    loaded: dict[str, Tensor] = {}
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in checkpoint_files(folder)]
        tensors = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118 (not a dict)
        _check_names(folder, wanted, [name for name, _ in tensors])
        for name, file in tqdm(tensors, desc="loading weights", unit="tensor", leave=False, disable=not progress):
            if name not in wanted:
                continue
            target, shard = wanted[name]
            data = file.get_slice(name)
            _check_tensor(name, data, shard)
            if target not in loaded:
                loaded[target] = torch.zeros(parameters[target].shape, dtype=dtype, device=device)
            loaded[target][shard.rows].copy_(data[shard.source])
    model.load_state_dict(loaded, strict=True, assign=True)
    _move_tables(model, device, dtype)


def fill_with_dummies(model: nn.Module, *, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> None:
    """Fill the parameters of ``model``, which lies on the meta device, with small random numbers made on ``device``;
    weights of norms are 1, biases 0. The same seed, device and dtype give the same model."""
    generator = torch.Generator(device).manual_seed(seed)
    dummies: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        dummy = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() == 1:
            dummies[name] = dummy.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            dummies[name] = dummy.normal_(std=0.02, generator=generator)
    model.load_state_dict(dummies, strict=True, assign=True)
    _move_tables(model, device, dtype)


def checkpoint_names(model: nn.Module) -> dict[str, tuple[str, Shard]]:
    """For each tensor that the checkpoint must have: the parameter that it goes to, and how."""
    names: dict[str, tuple[str, Shard]] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            whole = Shard(shape, tuple(slice(None) for _ in shape), slice(0, shape[0]))
            for shard in getattr(module, "shards", {}).get(kind, [whole]):
                parent, _, own = path.rpartition(".")
                source = f"{parent}.{shard.sibling or own}.{kind}".removeprefix(".")
                names[source] = (f"{path}.{kind}", shard)
    return names


def checkpoint_files(folder: str | Path) -> list[Path]:
    """The checkpoint's safetensors files. Raises ``ValueError`` if there are none or the index names others."""
    folder = Path(folder)
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted({str(v) for v in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not a checkpoint index: {error!r}") from None
    elif (folder / _SINGLE).is_file():
        names = [_SINGLE]
    else:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; {_some(others)} cannot be read: convert to safetensors first" if others else ""
        raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}{hint}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {_some(missing)}, named in {_INDEX}")
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def _check_names(folder: str | Path, wanted: Iterable[str], found: list[str]) -> None:
    counts, expected = Counter(found), set(wanted)
    problems = {
        "it lacks": expected - counts.keys(),
        "it has the unexpected": {name for name in counts.keys() - expected if not name.endswith(_HARMLESS)},
        "it has twice": {name for name, count in counts.items() if count > 1},
    }
    texts = [f"{problem} {_some(sorted(names))}" for problem, names in problems.items() if names]
    if texts:
        raise ValueError(f"the checkpoint in {folder} does not fit the model: {'; '.join(texts)}")


def _check_tensor(name: str, data: Any, shard: Shard) -> None:
    shape, kind = tuple(data.get_shape()), data.get_dtype()
    if shape != shard.shape:
        raise ValueError(f"{name} has shape {list(shape)} in the checkpoint, the model needs {list(shard.shape)}")
    if kind not in _FLOATS:
        raise ValueError(f"{name} has dtype {kind} in the checkpoint; supported are {', '.join(_FLOATS)}")


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _move_tables(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Tables were made in float32 on the CPU; they are rounded once, here."""
    for module in model.modules():
        for name, table in module.named_buffers(recurse=False):
            setattr(module, name, table.to(device=device, dtype=dtype))
