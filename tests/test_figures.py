"""The book's drawings: one palette, in step with the site and the package; no matplotlib until something is plotted."""

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from minisgl.figures.drawing import Drawing
from minisgl.figures.engine_map import BOXES, engine_map
from minisgl.figures.style import STATES

ROOT = Path(__file__).resolve().parents[1]
# Machado, Oliveira and Fernandes 2009: linear RGB as seen with protanopia and deuteranopia.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color):
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    low, high = sorted((TO_XYZ[1] @ linear(a), TO_XYZ[1] @ linear(b)))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_style_sheet_repeats_the_palette():
    css = (ROOT / "book/_static/book.css").read_text(encoding="utf-8")
    found = dict(re.findall(r"--sgl-([\w-]+): \"?([^;\"]+)", css))
    want = {}
    for name, state in STATES.items():
        want |= {name: state.color, f"{name}-ink": state.ink, f"{name}-symbol": state.symbol}
    assert found == want


@pytest.mark.parametrize("name", STATES)
def test_colors_are_readable_in_light_and_dark(name):
    state = STATES[name]
    assert contrast(state.color, "#ffffff") >= 3 and contrast(state.color, "#121212") >= 3
    assert contrast(state.color, state.ink) >= 4.5


@pytest.mark.parametrize("vision", VISION)
def test_colors_and_symbols_can_be_told_apart(vision):
    seen = {name: lab(VISION[vision] @ linear(state.color)) for name, state in STATES.items()}
    near = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in combinations(seen, 2)}
    assert min(near.values()) > 14, near
    assert len({state.symbol for state in STATES.values()}) == len(STATES)


def test_map_names_the_rooms():
    rooms = {path.parent.name for path in (ROOT / "minisgl").glob("*/__init__.py")}
    assert {box.room for box in BOXES} == rooms


def test_map_links_what_has_an_address():
    svg = ElementTree.fromstring(engine_map({"server": "api.html#server", "chapter 1": "one.html"}))
    links = {a.get("href") for a in svg.iter("{http://www.w3.org/2000/svg}a")}
    assert links == {"api.html#server", "one.html"}


def test_drawing_must_say_what_it_shows(tmp_path):
    with pytest.raises(ValueError, match="alt"):
        Drawing("<path/>", 10, 10, alt=" ")
    drawing = Drawing("<path/>", 10, 10, alt="a < b")
    drawing.save(tmp_path / "a.svg")
    for text in (drawing.svg, (tmp_path / "a.svg").read_text()):
        assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title").text == "a < b"


def test_import_needs_no_matplotlib():
    code = (
        "import sys; sys.modules['matplotlib'] = None; import minisgl.figures, minisgl.figures.drawing as d; print(d)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_matplotlib_takes_the_palette():
    plt = pytest.importorskip("matplotlib.pyplot")
    from minisgl.figures.drawing import from_matplotlib
    from minisgl.figures.style import matplotlib_style

    with matplotlib_style():
        figure, axes = plt.subplots()
        axes.plot([1, 2, 3], label="pages")
        drawing = from_matplotlib(figure, alt="a line")
    ElementTree.fromstring(drawing.svg)
    assert "var(--sgl-prefill, #4a88dd)" in drawing.svg and "#000000" not in drawing.svg


@pytest.fixture
def trace():
    """Two requests: one alone, then one with a cached prefix beside it."""
    from minisgl.trace import StepRecord, Trace

    def step(step_id, *rows):
        ids, num_tokens, starts, prompts = zip(*rows, strict=True)
        columns = [np.array(column, np.int32) for column in (num_tokens, starts, prompts)]
        samples = columns[1] + columns[0] >= columns[2]
        return StepRecord(step_id, 0.0, 1.0, ids, *columns, samples, num_free_pages=9, num_cached_pages=0)

    steps = [
        step(1, ("a", 5, 0, 5)),
        step(2, ("a", 1, 5, 5), ("b", 7, 16, 23)),
        step(3, ("a", 1, 6, 5), ("b", 1, 23, 23)),
    ]
    return Trace(steps, {"a": 0.0, "b": 0.5}, {"a": 0, "b": 16}, {})


def texts(drawing):
    return [node.text for node in ElementTree.fromstring(drawing.svg).iter("{http://www.w3.org/2000/svg}text")]


def test_timeline_shows_what_the_trace_holds(trace):
    from minisgl.figures.timeline import timeline

    drawing = timeline(trace, {"a": "first <one>"})
    shown = texts(drawing)
    assert shown.index("first <one>") < shown.index("b")
    assert {"5", "16", "7", "8", "step 1", "step 3", "prefill", "decode", "cached"} <= set(shown)
    assert "b: 7 prompt tokens after 16 cached ones from step 2 on, 2 new" in drawing.alt


def test_positions_shows_each_token_once(trace):
    from minisgl.figures.timeline import positions

    svg = positions(trace, "a").svg  # one more of each in the legend
    assert svg.count('fill="var(--sgl-prefill,') == 5 + 1
    assert svg.count('fill="var(--sgl-decode,') == 2 + 1
    assert svg.count('fill="none"') == 5 + 6
    with pytest.raises(ValueError, match="nobody"):
        positions(trace, "nobody")


def test_timeline_of_nothing_says_what_is_missing():
    from minisgl.figures.timeline import timeline
    from minisgl.trace import Trace

    with pytest.raises(ValueError, match="trace=True"):
        timeline(Trace())
