"""`minisgl book`: builds the book from this checkout, lets the engine answer one prompt, serves the pages.

The page "How this book is built and checked" tells this module's story. It owns `_build/`, nothing else. It needs a
checkout, because a wheel holds the engine but not the book.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

CODE = ("minisgl", "book/results")  # what a notebook's outputs depend on, beside its own cells
SITE = (*CODE, "book", "notebooks", "_config.yml", "_toc.yml", "CHANGELOG.md", "pyproject.toml")


def find_root() -> Path:
    """The checkout to build: the one around the working directory, else the one that ``minisgl`` was imported from.

    Raises ``ValueError`` when there is none, or when it is not the one that ``minisgl`` was imported from.
    """
    package = Path(__file__).resolve().parent
    here = Path.cwd().resolve()
    for root in (here, *here.parents, package.parent):
        if all((root / name).exists() for name in ("_config.yml", "_toc.yml", "book", "notebooks", "minisgl")):
            break
    else:
        raise ValueError('no checkout of the repository here: clone it, then pip install -e ".[book]" inside it')
    if package != root / "minisgl":
        raise ValueError(f'minisgl is imported from {package}, not from {root}: pip install -e ".[book]" there')
    return root


def source_digest(root: Path, parts: Sequence[str] = CODE) -> str:
    """A short digest of all files below ``parts`` of ``root`` and of the versions of Python and torch."""
    digest = hashlib.sha256(f"{sys.version} torch {importlib.metadata.version('torch')}".encode())
    for path in sorted({file for part in parts for file in _files(root / part)}):
        digest.update(b"\0" + path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for file in path.rglob("*"):
        if file.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(file.parts):
            yield file


# The attribute through which a tag fetches something by itself; a link does so only in these roles.
_FETCHES = {
    **dict.fromkeys(("script", "img", "iframe", "source", "video", "audio", "embed"), "src"),
    "object": "data",
    "image": "href",
    "use": "href",
}
_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}


class _Page(HTMLParser):
    """Collects what a page fetches by itself, and the images and drawings that say nothing to a screen reader."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(_FETCHES.get(tag, ""))
        if tag == "link" and _LINKS & set((values.get("rel") or "").split()):
            address = values.get("href")
        if address and urlsplit(address).netloc:
            self.problems.append(f"<{tag}> fetches {address}")
        if tag == "img" and not values.get("alt"):
            self.problems.append(f"<img> without alt text: {values.get('src')}")


def page_problems(html: Path) -> list[str]:
    """What is wrong with the pages below ``html``: outside requests of scripts, styles, fonts and images, and images
    without alternative text. Empty when all is well."""
    found = []
    for path in sorted(html.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(html)}: {problem}" for problem in page.problems]
    for path in sorted(html.rglob("*.css")):
        text = path.read_text(encoding="utf-8").replace('"', "").replace("'", "")
        for mark in ("url(http:", "url(https:", "url(//", "@import http", "@import //"):
            if mark in text:
                found.append(f"{path.relative_to(html)}: the style sheet fetches {mark}...")
    return found


def build(root: Path) -> list[str]:
    """Bring ``_build/html`` up to date with the sources and return its problems; warnings are errors. An unchanged
    book is not built again."""
    html, stamp = root / "_build" / "html", root / "_build" / "sources"
    digest = source_digest(root, SITE)
    if stamp.exists() and stamp.read_text() == digest and (html / "index.html").exists():
        print("the book is up to date", flush=True)
        return page_problems(html)
    print("building the book and running its notebooks; the first time this takes a minute or two", flush=True)
    stamp.unlink(missing_ok=True)
    python_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    # The bundled model is too small to gain from threads, and loses much when the machine is busy.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment = os.environ | {"PYTHONPATH": python_path, "JUPYTER_PREFER_ENV_PATH": "1"} | threads
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main(prog_name='jupyter-book')"]
    # All pages are read again, for a page that is not read does not repeat its warnings.
    command += ["build", str(root), "--all", "-n", "-W", "--keep-going", "-q"]
    done = subprocess.run(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        print(done.stdout.strip(), file=sys.stderr)
        return [f"jupyter-book ended with code {done.returncode}; its warnings are above"]
    problems = page_problems(html)
    if not problems:
        stamp.write_text(digest)
    return problems


def answer(prompt: str = "Who are you?") -> str:
    """What the bundled model says to ``prompt``."""
    from minisgl import LLM, SamplingParams

    with LLM("tiny") as llm:
        messages = [{"role": "user", "content": prompt}]
        return llm.chat(messages, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)[0].text


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def book(*, check: bool = False, port: int = 0) -> int:
    """Build the book if it is stale, answer one prompt with the bundled model, and serve the pages on 127.0.0.1.

    ``port`` 0 takes a free one. With ``check`` all is done but the serving. Returns the exit code: 0 when the book is
    whole, 1 when it is not, 2 when there is no checkout to build.
    """
    try:
        root = find_root()
        importlib.metadata.version("jupyter-book")
    except (ValueError, importlib.metadata.PackageNotFoundError) as error:
        missing = 'the book\'s tools are missing: pip install -e ".[book]"'
        print(f"error: {error if isinstance(error, ValueError) else missing}", file=sys.stderr)
        return 2
    problems = build(root)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        return 1
    prompt = "Who are you?"
    print(f"\n  {prompt}\n  {answer(prompt).strip()}\n", flush=True)
    if check:
        return 0
    handler = functools.partial(_Quiet, directory=str(root / "_build" / "html"))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"the book: http://127.0.0.1:{server.server_port}/  (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
