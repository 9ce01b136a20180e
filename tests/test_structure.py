"""The house's rules that a program can check: who may import whom, torch-free rooms, documented public names."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import minisgl

PACKAGE = Path(minisgl.__file__).parent
VOCABULARY = {"utils", "config", "request", "trace"}
# room -> rooms that it may import from, beside itself
MAY_IMPORT = {
    "utils": set(),
    "config": {"utils"},
    "request": {"utils"},
    "trace": {"utils"},
    "forward": VOCABULARY,
    "kv_cache": VOCABULARY,
    "scheduler": VOCABULARY | {"kv_cache"},
    "server": VOCABULARY,
    "kernels": {"utils"},
    "model": VOCABULARY | {"forward", "kernels"},
    "engine": VOCABULARY | {"forward", "kv_cache", "scheduler", "kernels", "model"},
    "cluster": VOCABULARY | {"forward", "kv_cache", "scheduler", "server", "kernels", "model", "engine"},
    "figures": VOCABULARY | {"forward", "kv_cache", "scheduler", "server", "kernels", "model", "engine", "cluster"},
    "benchmark": None,
    "llm": None,  # composition roots import what they like
    "launch": None,
    "checkpoint": None,
    "serve": None,
    "backend": None,
    "book": None,
    "info": None,
    "replay": None,
    "cli": None,
    "__main__": None,
    "__init__": None,
}
TORCH_FREE = ("utils", "config", "request", "trace", "kv_cache", "scheduler", "server")
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[ast.AST, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found.append((node, node.module or ""))
            if node.module == "minisgl":
                found += [(node, f"minisgl.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    allowed = MAY_IMPORT[room]
    if allowed is None:
        return
    for node, name in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if name.startswith("minisgl."):
            assert name.split(".")[1] in allowed | {room}, f"{path.name}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_stand_at_the_top(path: Path) -> None:
    """Except in composition roots, which load heavy packages late, and for what only drawing needs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if MAY_IMPORT[room_of(path)] is None:
        return
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node, name in imports(function):
                drawing = room_of(path) == "figures" and not name.startswith("minisgl")
                assert drawing, f"{path.name}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_public_names_have_docstrings_and_no_state_is_global(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.name} does not say why it exists"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{path.name}:{node.lineno} rebinds a global"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}:{node.lineno} {node.name} has no docstring"
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    assert ast.get_docstring(method), f"{path.name}:{method.lineno} {node.name}.{method.name}"


def test_rooms_without_torch_import_with_torch_blocked() -> None:
    rooms = ", ".join(f"minisgl.{room}" for room in TORCH_FREE)
    code = f"import sys; sys.modules['torch'] = None; import minisgl, {rooms}; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "ok", done.stderr


def test_importing_minisgl_imports_no_torch() -> None:
    code = "import sys, minisgl; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stdout + done.stderr


def test_all_names_what_is_there() -> None:
    expected = {"LLM", "SamplingParams", "RequestOutput", "Completion", "Logprob", "Timings", "Usage"}
    assert set(minisgl.__all__) == expected
    for path in FILES:
        if path.name != "__init__.py":
            continue
        name = ".".join(("minisgl", *path.parent.relative_to(PACKAGE).parts))
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.{public}"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = minisgl.no_such_name
