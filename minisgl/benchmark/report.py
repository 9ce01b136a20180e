"""Where a measurement comes from, and how it is written down."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def provenance(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit, command and date of a measurement made now. Where the source is no repository, the
    commit can be given as ``MINISGL_COMMIT``."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for library in ("triton", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    if device.type == "cuda":
        name, versions["cuda"] = torch.cuda.get_device_name(device), str(torch.version.cuda)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if driver:
            versions["driver"] = driver.splitlines()[0]
    else:
        name = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "versions": versions,
        "commit": os.environ.get("MINISGL_COMMIT") or _commit(),
        "command": " ".join([_program(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def source_digest() -> str:
    """Of the source of `minisgl.kernels` and `minisgl.engine`: whether they have changed since a measurement."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for room in ("engine", "kernels"):
        for path in sorted((root / room).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def write_report(path: str | Path, what: str, device: torch.device, results: Mapping[str, Any]) -> None:
    """Write ``results`` to a JSON file, with `provenance`."""
    report = {"what": what, **provenance(device), **results}
    Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as text, columns aligned."""
    names = list(rows[0])
    cells = [names, *[[_number(row[name]) for name in names] for row in rows]]
    widths = [max(len(line[k]) for line in cells) for k in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)


def _commit() -> str:
    return _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD") or "unknown"


def _program() -> str:
    """What was started: ``python -m NAME`` has its file for a name."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
