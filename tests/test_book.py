"""Prose may not say what the package does not do: names, paths, flags, listings, figures, notebooks, pages."""

import argparse
import importlib
import importlib.util
import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import minisgl
from minisgl import book

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def prose():
    """Every piece of prose with the place where it stands."""
    pages = [*sorted((ROOT / "book").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    yield from ((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in pages)
    for path in NOTEBOOKS:
        for index, cell in enumerate(cells(path)):
            if cell["cell_type"] == "markdown":
                yield f"{path.name} cell {index}", "".join(cell["source"])


PROSE = list(prose())


def found(pattern):
    return sorted({(where, hit) for where, text in PROSE for hit in re.findall(pattern, text)})


def resolve(dotted):
    parts = dotted.split(".")
    for k in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:k]))
        except ImportError:
            continue
        for name in parts[k:]:
            value = getattr(value, name)
        return value
    raise ImportError(dotted)


@pytest.mark.parametrize(("where", "name"), found(r"`~?(minisgl(?:\.\w+)+)(?:\(\))?`"))
def test_names_resolve(where, name):
    resolve(name)


@pytest.mark.parametrize(("where", "role"), found(r"\{py:\w+\}`([^`]+)`"))
def test_roles_name_the_package_in_full(where, role):
    target = role.rsplit("<", 1)[-1].rstrip(">").lstrip("~")
    assert target == "minisgl" or target.startswith("minisgl."), "the build checks names below minisgl only"


@pytest.mark.parametrize(
    ("where", "path"), found(r"`((?:minisgl|book|notebooks|tests|\.github)/[\w./-]*|_\w+\.yml|\w+\.toml|[A-Z]+\.md)`")
)
def test_paths_exist(where, path):
    assert (ROOT / path).exists()


def options(parser, words):
    """The option strings of the subcommand of an argparse parser that the words name, however deep."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
            return options(action.choices[words[0]], words[1:])
    return set(parser._option_string_actions)


@pytest.mark.parametrize(("where", "line"), found(r"\bminisgl ((?:[a-z]+)(?: [^\n`&|]*)?--[^\n`&|]*)"))
def test_command_line_flags_exist(where, line):
    cli = pytest.importorskip("minisgl.cli")
    words = line.split()
    flags = {word.split("=")[0] for word in words if word.startswith("--")}
    assert flags <= options(cli._parser(), words)


def test_listings_are_taken_by_name():
    for where, text in PROSE:
        for path, body in re.findall(r"\{literalinclude\} (\S+)\n(.*?)```", text, re.DOTALL):
            assert "/minisgl/" not in path or ":pyobject:" in body, f"{where}: {path}"
            assert ":lines:" not in body, f"{where}: {path}"
            if match := re.search(r":pyobject: \w+\.\w+", body):
                assert ":dedent:" in body, f"{where}: {match.group()}"


def test_figures_have_alternative_text():
    for where, text in PROSE:
        for body in re.findall(r"\{(?:figure|image)\} [^\n]*\n(.*?)```", text, re.DOTALL):
            assert re.search(r":alt: \S", body), where
        assert not re.search(r"!\[\s*\]\(", text), where


def test_measured_numbers_are_not_typed():
    """In notebooks a number with a unit of measurement must come from a cell or a file."""
    pattern = r"(?<![\w.`$=])\d[\d.,]*\s*(?:ms|us|µs|seconds|GB/s|TB/s|tokens/s|tokens per second|% faster|x faster)\b"
    for where, text in PROSE:
        if ".ipynb" in where:
            assert not re.search(pattern, re.sub(r"```.*?```", "", text, flags=re.DOTALL)), where


def script(name):
    """A program of `book/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"book/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="README shows what the CPU says")
def test_readme_shows_what_the_engine_says(tmp_path):
    readme, text = script("readme"), (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.example(text)[0] == text, "python book/readme.py"
    readme.picture().save(tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").read_text() == (ROOT / "book/_static/timeline.svg").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_committed_in_canonical_form(path):
    text = path.read_text(encoding="utf-8")
    assert text == script("strip").canonical(json.loads(text)), f"python book/strip.py notebooks/{path.name}"
    ids = [cell["id"] for cell in cells(path)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_has_the_parts_of_a_chapter(path):
    first = "".join(cells(path)[0]["source"])
    code = "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "code")
    text = "\n".join("".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")
    assert first.startswith("# ") and first.count("\n# ") == 0
    for part in ("## Goals", "Predict", "## Exercises", "## Takeaways", "{exercise", "{solution"):
        assert part in text, part
    assert re.search(r"^assert ", code, re.MULTILINE)
    assert str(path.stem) in (ROOT / "_toc.yml").read_text()


def test_every_glossary_word_is_there_once():
    words = re.findall(r"^(\w[\w ]*)\n  ", (ROOT / "book/glossary.md").read_text(), re.MULTILINE)
    assert words == sorted(set(words), key=str.lower)


def test_api_page_lists_the_public_names():
    listed = re.findall(r"^- \{py:class\}`~minisgl\.\w+\.(\w+)`", (ROOT / "book/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(minisgl.__all__)


def test_api_pages_cover_the_package():
    pytest.importorskip("sphinx")
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "book/api").glob("*.md")))
    covered = " ".join(re.findall(r"\{modules\} (.+)", pages)).split()
    rooms = {module.name for module in pkgutil.iter_modules(minisgl.__path__, "minisgl.") if module.ispkg}
    assert set(covered) == rooms | {"minisgl"} | set(script("_ext/live_pages").VOCABULARY)


@pytest.mark.parametrize("path", sorted((ROOT / "book/results").glob("*.json")), ids=lambda path: path.name)
def test_measurements_say_where_they_come_from(path):
    assert {"what", "device", "command", "date"} <= set(json.loads(path.read_text(encoding="utf-8")))


def test_results_page_copes_with_any_json():
    pytest.importorskip("sphinx")
    render = script("_ext/live_pages").render
    assert render({"a_b": [{"x": 1}, {"y": "<"}]}).count("<table") == 2
    assert "<details>" in render(list(range(100))) and render([None, True, [1.5], {}]).startswith(", True, 1.5")


def test_cache_key_follows_code_data_and_results(tmp_path):
    for name, text in {"minisgl/a.py": "1", "minisgl/tiny/model": "2", "book/results/r.json": "3"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    keys = {book.source_digest(tmp_path)}
    for name in ("minisgl/a.py", "minisgl/tiny/model", "book/results/r.json"):
        (tmp_path / name).write_text("changed")
        keys.add(book.source_digest(tmp_path))
    assert len(keys) == 4
    (tmp_path / "minisgl/__pycache__").mkdir()
    (tmp_path / "minisgl/__pycache__/a.pyc").write_text("x")
    assert book.source_digest(tmp_path) in keys


def test_page_problems_finds_outside_requests_and_silent_images(tmp_path):
    (tmp_path / "good.html").write_text(
        '<a href="https://x.org">x</a><link rel="canonical" href="https://x.org"><img src="a.png" alt="a">'
    )
    assert book.page_problems(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<script src="https://x.org/a.js"></script><link rel="stylesheet" href="//x.org/a.css"><img src="a.png">'
    )
    (tmp_path / "bad.css").write_text("@font-face { src: url('https://x.org/a.woff2') }")
    assert len(book.page_problems(tmp_path)) == 4


def test_book_needs_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(book, "__file__", str(tmp_path / "site-packages/minisgl/book.py"))
    assert book.book(check=True) == 2
    assert "checkout" in capsys.readouterr().err


def test_book_refuses_another_checkout(tmp_path, monkeypatch, capsys):
    for name in ("_config.yml", "_toc.yml", "book", "notebooks", "minisgl"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "book")
    assert book.book(check=True) == 2
    assert "imported from" in capsys.readouterr().err


def test_built_book_is_whole_without_a_network():
    html = ROOT / "_build/html"
    if not (html / "index.html").exists():
        pytest.skip("the book has not been built; `minisgl book --check` makes this test itself")
    assert book.page_problems(html) == []
