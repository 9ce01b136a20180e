"""The wheel stands alone: installed outside the checkout, it answers with the bundled model."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, cwd: Path, timeout: int = 300) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_wheel_answers_outside_the_checkout(tmp_path: Path) -> None:
    """O15: what is installed is the package alone. Its dependencies come from this environment, by a path file, so that
    the test needs no network; the new environment itself holds nothing but the wheel."""
    source = tmp_path / "source"  # a copy, so that nothing left over from an earlier build gets in
    shutil.copytree(ROOT / "minisgl", source / "minisgl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), ".",
        cwd=source)  # fmt: skip
    (wheel,) = tmp_path.glob("minisgl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"minisgl/tiny/model.safetensors", "minisgl/py.typed", "minisgl/server/page/index.html"} <= set(names)
    assert not [n for n in names if n.startswith(("tests/", "notebooks/", "book/"))]
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(str(python), "-m", "pip", "install", "-q", "--no-deps", str(wheel), cwd=tmp_path)
    site = Path(run(str(python), "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip())
    ours = run(sys.executable, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    (site / "dependencies.pth").write_text(ours + "\n")
    where = run(str(python), "-c", "import minisgl; print(minisgl.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "env"), where
    command = (str(tmp_path / "env" / "bin" / "minisgl"), "generate", "--prompt", "What is 2 + 3?", "--chat",
               "--temperature", "0", "--max-tokens", "8")  # fmt: skip
    assert "5" in run(*command, cwd=tmp_path)
