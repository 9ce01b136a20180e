"""The drawings of chapter 4: what they show is what they were given."""

import json
import re
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

from minisgl.figures.floors import floor_bars, roofline, step_bars
from minisgl.figures.recorded import missing, recorded, rows_of, source_line
from minisgl.figures.step_parts import fusion, overlap, padding, work_line
from minisgl.trace import StepRecord, Trace

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawing):
    return [node.text for node in ElementTree.fromstring(drawing.svg).iter(SVG + "text")]


def rects(drawing):
    return [node for node in ElementTree.fromstring(drawing.svg).iter(SVG + "rect")]


def test_recorded_reads_a_file_and_says_where_it_comes_from(tmp_path, monkeypatch, capsys):
    results = tmp_path / "book" / "results"
    results.mkdir(parents=True)
    report = {"device": "a GPU", "date": "2030-01-01", "command": "measure", "rows": [{"a": 1, "b": 2}, {"a": 2}]}
    (results / "one.json").write_text(json.dumps(report))
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert recorded("one") == report == recorded("one", results)
    assert capsys.readouterr().out.splitlines() == ["a GPU, 2030-01-01, measure"] * 2
    assert rows_of(report, a=1) == [{"a": 1, "b": 2}] and rows_of(report, a=3) == [] and len(rows_of(report)) == 2
    assert source_line({"device": "a CPU"}) == "a CPU"


def test_recorded_says_what_is_missing(tmp_path, capsys):
    assert recorded("nothing", tmp_path) is None
    assert capsys.readouterr().out == "nothing: not recorded yet\n"
    assert rows_of(None) == [] and texts(missing("a step")) == ["a step: not recorded yet"]


def test_floor_bars_are_as_long_as_their_times():
    drawing = floor_bars([("first", 25.0, 100.0), ("second", None, 50.0), ("third", 80.0, 40.0)])
    filled = [float(r.get("width")) for r in rects(drawing) if r.get("height") == "18"][1:]
    hollow = [float(r.get("width")) for r in rects(drawing) if r.get("height") == "16.5"][1:]
    whole = filled[0] + hollow[0]
    assert filled == pytest.approx([whole / 4, 0, 0.4 * whole], abs=0.1)
    assert hollow == pytest.approx([0.75 * whole, whole / 2, 0], abs=0.1)
    assert {"first", "100 (25%)", "50"} <= set(texts(drawing)) and "second 50 µs;" in drawing.alt
    with pytest.raises(ValueError, match="no bars"):
        floor_bars([])


def test_step_bars_draws_the_largest_places_and_sums_the_rest():
    rows = [{"place": f"place {i}", "calls": 2.0, "us": 100.0 - i, "floor us": None} for i in range(12)]
    drawing = step_bars({"kind": "decode", "rows": rows, "step us": 1500.0, "kernels us": 1134.0}, most=4)
    shown = texts(drawing)
    assert "place 3 (2)" in shown and "place 4 (2)" not in shown
    assert "8 other places" in shown and f"{sum(100 - i for i in range(4, 12))}" in shown
    assert "step 1,500 µs, its kernels 1,134 µs" in shown


def test_roofline_bends_where_both_bounds_are_equal():
    read, rate = 4e12, 6e14
    points = [(1, 1 * read), (150, rate), (600, rate / 2)]
    drawing = roofline(points, bytes_per_weight=2, read=read, rate=rate)
    assert "M = 150" in texts(drawing) and "3 measured points" in drawing.alt and "50% to 100%" in drawing.alt
    root = ElementTree.fromstring(drawing.svg)
    roof = next(p.get("d") for p in root.iter(SVG + "path") if p.get("stroke-width") == "2")
    corners = [tuple(map(float, pair.split())) for pair in re.split("[ML]", roof)[1:]]
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(SVG + "circle")]
    assert circles[1] == pytest.approx(corners[1], abs=0.2), "the ridge's point lies in the corner"
    (x1, y1), (x2, y2) = corners[:2]
    assert circles[0][1] == pytest.approx(y1 + (circles[0][0] - x1) / (x2 - x1) * (y2 - y1), abs=0.3), "on the slope"
    assert circles[2][1] > corners[2][1], "below the roof"
    with pytest.raises(ValueError, match="no points"):
        roofline([], bytes_per_weight=2, read=read, rate=rate)


def test_fusion_shows_every_part_and_every_kernel():
    drawing = fusion([("store", ("norm", "rotary", "write")), ("attend", ("attend",))])
    assert Counter(texts(drawing)) == Counter(
        {"4 launches": 1, "2 launches": 1, "store": 1, "norm": 1, "rotary": 1, "write": 1, "attend": 2}
    )
    assert "4 launches of a layer on the left become 2" in drawing.alt and len(rects(drawing)) == 6


def test_padding_shows_where_each_token_is_written():
    drawing = padding(np.array([35, 16, 0, 0], np.int32), num_real=2, page_size=16)
    assert [t for t in texts(drawing) if re.fullmatch(r"\d+:\d+", t)] == ["2:3", "1:0", "0:0", "0:0"]
    fills = [r.get("fill") for r in rects(drawing)][2:]  # behind the legend's
    assert ["decode" in fill for fill in fills] == [True, True, False, False]
    assert "the padding is written to page 0, the others to pages 2, 1" in drawing.alt


@pytest.mark.parametrize(("lengths", "programs"), [([10, 20, 31], 4), ([5], 7), ([100, 1, 1], 3)])
def test_work_line_gives_each_program_an_equal_stretch(lengths, programs):
    drawing = work_line(lengths, num_sets=2, num_programs=programs, block=4)
    items = [float(r.get("width")) + 1 for r in rects(drawing) if r.get("height") == "26"]
    stretches = [float(r.get("width")) + 2 for r in rects(drawing) if r.get("height") == "25"]
    unit = 480 / (2 * sum(lengths))
    assert items == pytest.approx([n * unit for n in lengths for _ in range(2)], abs=0.1)
    share = max(-(-2 * sum(lengths) // programs), 4)
    assert len(stretches) == -(-2 * sum(lengths) // share)
    assert stretches[:-1] == pytest.approx([share * unit] * (len(stretches) - 1), abs=0.1)


def trace_of(times):
    def column(value):
        return np.array([value], np.int32)

    steps = [
        StepRecord(i, begin, end, ("r",), column(1), column(9 + i), column(9), np.array([True]))
        for i, (begin, end) in enumerate(times)
    ]
    return Trace(steps)


def test_overlap_draws_steps_from_launch_to_reading():
    plain, ahead = trace_of([(0, 1), (1, 2), (2, 3)]), trace_of([(0, 1), (0.5, 1.5), (1, 2)])
    drawing = overlap([("plain", plain), ("overlapped", ahead)], skip=0)
    widths = [float(r.get("width")) + 1 for r in rects(drawing)]
    assert widths == pytest.approx([160] * 6, abs=0.1)
    assert "plain: 0 of 2 steps" in drawing.alt and "overlapped: 2 of 2 steps" in drawing.alt
    assert {"1,000.0 ms a step", "500.0 ms a step"} <= set(texts(drawing))
    with pytest.raises(ValueError, match="too few"):
        overlap([("plain", plain)], skip=2)
