"""Directives that read the package and the measurements at build time, so that no page repeats them by hand."""

import importlib
import importlib.util
import json
import pkgutil
import posixpath
from html import escape
from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

PROVENANCE = ("device", "driver", "versions", "torch", "cuda", "commit", "command", "date", "seed")
VOCABULARY = ("minisgl.request", "minisgl.config", "minisgl.trace", "minisgl.forward", "minisgl.utils")
LONG = 20  # rows or values beyond which a list is folded


def raw(html):
    return nodes.raw("", html, format="html")


class EngineMap(SphinxDirective):
    """`minisgl.figures.engine_map`: rooms lead to their API pages, chapters to their pages, if these exist."""

    def run(self):
        from minisgl.figures.engine_map import BOXES, engine_map

        toc = Path(self.env.srcdir) / "_toc.yml"
        self.env.note_dependency(str(toc))
        chapters = [c["file"] for part in yaml.safe_load(toc.read_text())["parts"] for c in part["chapters"]]
        here = posixpath.dirname(self.env.docname)
        links = {box.room: posixpath.relpath(f"book/api/{box.room}", here) + ".html" for box in BOXES}
        for chapter in chapters:
            if chapter.startswith("notebooks/"):
                number = posixpath.basename(chapter).split("-")[0].lstrip("0")  # of an appendix it is no number
                links[f"chapter {number}"] = posixpath.relpath(chapter, here) + ".html"
        return [raw(engine_map(links))]


class Palette(SphinxDirective):
    """The table of states: colour, letter, meaning."""

    def run(self):
        from minisgl.figures.style import STATES, color, ink

        rows = "".join(
            f'<tr><td><span class="sgl-swatch" style="background:{color(name)};color:{ink(name)}">{state.symbol}</span>'
            f"</td><td>{name}</td><td>{escape(state.meaning)}</td></tr>"
            for name, state in STATES.items()
        )
        head = "<thead><tr><th>mark</th><th>state</th><th>meaning</th></tr></thead>"
        return [raw(f'<table class="table">{head}{rows}</table>')]


class Modules(SphinxDirective):
    """`automodule` for the named modules and all below them that have no leading underscore."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        sections = []
        for name in [name for root in self.arguments[0].split() for name in modules(root)]:
            self.env.note_dependency(importlib.util.find_spec(name).origin)  # triton may be missing
            node = nodes.section(ids=[nodes.make_id(name)], names=[name])
            node += nodes.title(name, "", nodes.literal(name, name))
            lines = ["```{eval-rst}", f".. automodule:: {name}", "   :members:", "   :show-inheritance:", "```"]
            self.state.nested_parse(StringList(lines, source=name), 0, node)
            sections.append(node)
        return sections


def modules(root):
    """The names of a module and of those below it, by name; of the package itself, the modules beside the rooms."""
    paths = getattr(importlib.import_module(root), "__path__", [])
    if root == "minisgl":
        names = [module.name for module in pkgutil.iter_modules(paths, "minisgl.") if not module.ispkg]
    else:
        names = [root, *(module.name for module in pkgutil.walk_packages(paths, root + "."))]
    return sorted(name for name in names if "._" not in name and (root != "minisgl" or name not in VOCABULARY))


class Options(SphinxDirective):
    """The options of a group of a command, as the command line itself has them: ``options serve server``."""

    required_arguments = 2

    def run(self):
        from minisgl import cli

        command, title = self.arguments
        self.env.note_dependency(cli.__file__)
        [commands] = [action for action in cli._parser()._actions if getattr(action, "choices", None)]
        [group] = [group for group in commands.choices[command]._action_groups if group.title == title]
        told = [(action.option_strings[0], action.help.replace("%%", "%")) for action in group._group_actions]
        rows = "".join(f"<tr><td><code>{flag}</code></td><td>{escape(text)}</td></tr>" for flag, text in told)
        head = "<tr><th>option</th><th>meaning</th></tr>"
        return [raw(f'<div class="sgl-scroll"><table class="table sgl-results">{head}{rows}</table></div>')]


class ServerMetrics(SphinxDirective):
    """What a server that has just started tells Prometheus: names, kinds and meanings."""

    def run(self):
        from minisgl.server import metrics
        from minisgl.server.client import EngineStats

        self.env.note_dependency(metrics.__file__)
        lines = metrics.Metrics().render(EngineStats()).decode().splitlines()
        words = {"HELP": [], "TYPE": []}
        for line in lines:
            if line.startswith("#"):
                _, word, name, text = line.split(" ", 3)
                words[word].append((name, text))
        kinds = dict(words["TYPE"])
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{kinds[name]}</td><td>{escape(text)}</td></tr>"
            for name, text in words["HELP"]
            if not name.endswith("_created")
        )
        head = "<tr><th>name</th><th>kind</th><th>meaning</th></tr>"
        return [raw(f'<div class="sgl-scroll"><table class="table sgl-results">{head}{rows}</table></div>')]


class Results(SphinxDirective):
    """Every file of `book/results/`: provenance first, then its tables and values."""

    def run(self):
        folder = Path(self.env.srcdir) / "book" / "results"
        found = []
        for path in sorted(folder.glob("*.json")):
            self.env.note_dependency(str(path))
            section = nodes.section(ids=[nodes.make_id(f"results-{path.stem}")], names=[f"results {path.stem}"])
            data = json.loads(path.read_text(encoding="utf-8"))
            title = str(data.pop("what", path.stem) if isinstance(data, dict) else path.stem)
            section += nodes.title("", title[:1].upper() + title[1:])
            source = f'<p class="sgl-source">from <code>book/results/{escape(path.name)}</code></p>'
            section += raw(f'<div class="sgl-scroll">{render(data)}</div>{source}')
            found.append(section)
        return found or [nodes.paragraph("", "No measurement has been recorded yet.")]


def render(data):
    """HTML of any JSON value: an object becomes a table of two columns, a list of objects a table with a header."""
    if isinstance(data, dict):
        keys = sorted(data, key=lambda k: PROVENANCE.index(k) if k in PROVENANCE else len(PROVENANCE))
        rows = "".join(f"<tr><th>{escape(str(k).replace('_', ' '))}</th><td>{render(data[k])}</td></tr>" for k in keys)
        return f'<table class="table sgl-results">{rows}</table>'
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        keys = list(dict.fromkeys(key for row in data for key in row))
        head = "".join(f"<th>{escape(str(key).replace('_', ' '))}</th>" for key in keys)
        rows = "".join("<tr>" + "".join(f"<td>{render(row.get(key))}</td>" for key in keys) + "</tr>" for row in data)
        table = f'<table class="table sgl-results"><thead><tr>{head}</tr></thead>{rows}</table>'
        return fold(data, table)
    if isinstance(data, list):
        return fold(data, ", ".join(render(value) for value in data))
    if isinstance(data, float):
        return f"{data:.4g}" if abs(data) < 1e5 else f"{data:,.0f}"
    if isinstance(data, int) and abs(data) >= 10_000:
        return f"{data:,}"
    return "" if data is None else escape(str(data))


def fold(data, html):
    """``html``, hidden behind a click when ``data`` is long."""
    return html if len(data) <= LONG else f"<details><summary>{len(data)} entries</summary>{html}</details>"


def setup(app):
    app.add_directive("engine-map", EngineMap)
    app.add_directive("palette", Palette)
    app.add_directive("modules", Modules)
    app.add_directive("options", Options)
    app.add_directive("server-metrics", ServerMetrics)
    app.add_directive("results", Results)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
