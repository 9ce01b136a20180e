"""The book's drawings: one palette, in step with the site and the package; no matplotlib until something is plotted."""

import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from builders_scheduler import Loop, make_scheduler
from test_flight import fly

from minisgl.figures.budget_use import budget_use
from minisgl.figures.drawing import Drawing
from minisgl.figures.engine_map import BOXES, engine_map
from minisgl.figures.marks import PAGE_LOOKS
from minisgl.figures.page_map import page_map, page_states
from minisgl.figures.radix_tree import radix_tree
from minisgl.figures.source import find_scheduler, find_trace
from minisgl.figures.style import STATES
from minisgl.figures.token_gaps import find_gaps, token_gaps
from minisgl.scheduler.flight import Replay

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"
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
    links = {a.get("href") for a in svg.iter(SVG + "a")}
    assert links == {"api.html#server", "one.html"}


def test_drawing_must_say_what_it_shows(tmp_path):
    with pytest.raises(ValueError, match="alt"):
        Drawing("<path/>", 10, 10, alt=" ")
    drawing = Drawing("<path/>", 10, 10, alt="a < b")
    drawing.save(tmp_path / "a.svg")
    for text in (drawing.svg, (tmp_path / "a.svg").read_text()):
        assert ElementTree.fromstring(text).find(SVG + "title").text == "a < b"


def test_import_needs_neither_matplotlib_nor_torch():
    rooms = ", ".join(f"minisgl.figures.{path.stem}" for path in (ROOT / "minisgl/figures").glob("[a-z]*.py"))
    code = f"import sys; sys.modules['matplotlib'] = None; sys.modules['torch'] = None; import {rooms}"
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
        return StepRecord(step_id, 0.0, 1.0, ids, *columns, samples)

    steps = [
        step(1, ("a", 5, 0, 5)),
        step(2, ("a", 1, 5, 5), ("b", 7, 16, 23)),
        step(3, ("a", 1, 6, 5), ("b", 1, 23, 23)),
    ]
    return Trace(steps, {"a": 0.0, "b": 0.5}, {"a": 0, "b": 16}, {})


def texts(drawing):
    return [node.text for node in ElementTree.fromstring(drawing.svg).iter(SVG + "text")]


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


# ------------------------------------------------------------------------------- drawn from engines and flight records


@pytest.fixture(scope="module")
def records():
    """A flight with preemptions, aborts, copies on write and a flush now and then; overlapped."""
    scheduler, plans, _, recorder = fly(None, num_requests=90, num_pages=62)
    kinds = {type(record).__name__ for record in recorder.records}
    assert scheduler.num_preemptions and {"Abort", "Step"} <= kinds and any(len(p.page_copies) for p in plans)
    return recorder.records


@pytest.fixture(scope="module")
def num_steps(records):
    return sum(1 for _ in Replay(records).play())


def drawn_pages(drawing):
    """How many page cells of each state, those of the legend left out."""
    root = ElementTree.fromstring(drawing.svg)
    legends = {path for group in root.iter(SVG + "g") for path in group}
    counts = Counter()
    for path in root.iter(SVG + "path"):
        if path.get("data-state") and path not in legends:
            counts[path.get("data-state")] += path.get("d").count("M")
    return counts


def counts_of(scheduler):
    """Pages of each state, by what their owners say of themselves."""
    kv = scheduler.kv
    holdings = [scheduler.rows.holding(r.row) for r in (*scheduler.running, *scheduler.retiring)]
    counts = {
        "reserved": 1,
        "free": kv.allocator.num_free,
        "locked": kv.tree.num_locked_pages,
        "cached": kv.tree.num_evictable_pages,
        "in transit": kv.num_in_transit_pages,
        "private": sum(h.num_pages - h.num_shared_pages for h in holdings),
    }
    return Counter({state: n for state, n in counts.items() if n})


def test_page_states_are_those_of_the_pool_at_every_step(records):
    replay, seen, num_shared = Replay(records), set(), 0
    for _ in replay.play():
        scheduler = replay.scheduler
        states, owners = page_states(scheduler)
        assert Counter(states) == counts_of(scheduler)
        for request in (*scheduler.running, *scheduler.retiring):
            mine = [page for page, holders in enumerate(owners) if request.request_id in holders]
            assert mine == sorted(scheduler.rows.holding(request.row).page_ids.tolist())
        seen |= set(states)
        num_shared += any(len(holders) > 1 for holders in owners)
    assert seen == set(PAGE_LOOKS) - {"lost"} and num_shared


def test_page_map_draws_each_page_once(records, num_steps):
    for step in range(7, num_steps, num_steps // 12):
        scheduler = find_scheduler(records, step)
        drawing, counts = page_map(records, step=step), counts_of(scheduler)
        assert drawn_pages(drawing) == counts
        assert all(f"{n} {state}" in drawing.alt for state, n in counts.items())
        assert {f"{n} {state}" for state, n in counts.items()} <= set(texts(drawing))
        assert drawing.svg == page_map(scheduler).svg


def test_page_map_names_owners_when_they_are_few():
    loop = Loop(num_pages=99, admission="reserve")
    for _ in range(3):
        loop.add(9, max_tokens=8)
    loop.step()
    shown = texts(page_map(loop.scheduler, names={"r1": "the <second>"}))
    assert {"A", "B", "C", "the <second>: 1 private and 2 shared"} <= set(shown)
    assert shown.count("B") == 3 + 1
    for _ in range(6):
        loop.add(9, max_tokens=8)
    loop.step()
    drawing = page_map(loop.scheduler)
    assert "B" not in texts(drawing) and "9 requests hold pages" in drawing.alt


def test_page_map_shows_what_nobody_and_what_two_have():
    loop = Loop(num_pages=30)
    loop.add(9)
    loop.step()
    scheduler = loop.scheduler
    scheduler.kv.allocator.allocate(2)
    assert drawn_pages(page_map(scheduler))["lost"] == 2
    scheduler.kv.allocator.free(scheduler.rows.holding(0).page_ids[:1])
    drawing = page_map(scheduler)
    assert drawn_pages(drawing)["lost"] == 3 and "3 lost" in drawing.alt


def test_page_map_of_a_large_pool_has_no_letters():
    drawing = page_map(make_scheduler(num_pages=20_000))
    assert drawn_pages(drawing) == {"free": 19_999, "reserved": 1} and drawing.height < 1000


def test_radix_tree_draws_each_node_and_page(records, num_steps):
    num_tails = 0
    for step in range(7, num_steps, num_steps // 12):
        tree = find_scheduler(records, step).kv.tree
        drawing = radix_tree(records, step=step, most_nodes=10**6)
        assert drawn_pages(drawing) == +Counter(locked=tree.num_locked_pages, cached=tree.num_evictable_pages)
        nodes = [node for node in tree.nodes() if node.parent is not None]
        tails = [node for node in nodes if len(node.tokens) % tree.page_size]
        num_tails += len(tails)
        shown = Counter(texts(drawing))
        locks = Counter(f"{n.ref_count} lock" + "s" * (n.ref_count != 1) for n in tree.nodes())
        for words, n in locks.items():
            assert sum(k for text, k in shown.items() if text.endswith(f" {words}") or text == words) == n
        assert all(shown[str(page)] for node in nodes for page in node.pages)
        assert sum(n for text, n in shown.items() if text.startswith("tail, ")) == len(tails)
        for number in (f"of {len(nodes)} nodes", f"{tree.num_pages} pages", f"{tree.num_locked_pages} of them locked",
                       f"{tree.num_evictable_pages} that may", f"{len(tails)} of the nodes are tails"):  # fmt: skip
            assert number in drawing.alt
    assert num_tails


def test_radix_tree_shows_text_and_counts_what_it_leaves_out(records, num_steps):
    class Words:
        def decode(self, token_ids, skip_special_tokens=True):
            assert not skip_special_tokens
            return "\n".join("<" + "x" * int(token) + ">" for token in token_ids)

    step = num_steps // 2
    tree = find_scheduler(records, step).kv.tree
    sizes = [len(node.pages) for node in tree.nodes()]
    drawing = radix_tree(records, step=step, tokenizer=Words(), most_nodes=3)
    assert any(text.startswith("<xxx") and "…" in text for text in texts(drawing))
    left_out = sum(sizes) - drawn_pages(drawing).total()
    assert f"and {len(sizes) - 3} more nodes with {left_out} pages" in texts(drawing)


def test_radix_tree_of_nothing():
    assert texts(radix_tree(make_scheduler())) == ["nothing is cached"]


def test_radix_tree_writes_a_long_edge_short():
    loop = Loop()
    loop.add(60, max_tokens=1)
    loop.run()
    with_many = radix_tree(loop.scheduler)
    assert drawn_pages(with_many) == {"cached": 15}
    loop = Loop(num_pages=200, max_model_len=240)
    loop.add(np.arange(200), max_tokens=1)
    loop.run()
    assert drawn_pages(radix_tree(loop.scheduler)) == {"cached": 23} and "50 pages" in radix_tree(loop.scheduler).alt
    assert "and 27 more" in texts(radix_tree(loop.scheduler))


def fills(drawing, state):
    return [rect for rect in ElementTree.fromstring(drawing.svg).iter(SVG + "rect") if f"-{state}," in rect.get("fill")]


def test_budget_use_draws_every_step(records, num_steps):
    steps, drawing = find_trace(records).steps, budget_use(records)
    assert len(steps) == num_steps
    for state, column in (("prefill", "num_prefill_tokens"), ("decode", "num_decode_tokens")):
        numbers = [getattr(step, column) for step in steps if getattr(step, column)]
        bars = fills(drawing, state)[1:]  # the first is the legend's
        assert [float(bar.get("height")) for bar in bars] == pytest.approx([n / 32 * 150 for n in numbers], abs=0.06)
        assert f"{sum(numbers)} {'prompt' if state == 'prefill' else state} tokens" in drawing.alt
    assert f"{num_steps} steps under a budget of 32 tokens" in drawing.alt


def test_budget_use_of_a_trace_is_told_the_budget(trace):
    with pytest.raises(ValueError, match="budget"):
        budget_use(trace)
    assert (
        "12 prompt tokens and 3 decode tokens, 31% of the budget; the fullest is step 2 with 8 tokens"
        in budget_use(trace, budget=16).alt
    )


def test_token_gaps_are_those_of_the_clock(records):
    replay, times, preempted = Replay(records), defaultdict(list), set()
    for plan, output in replay.play():
        preempted |= set(plan.preempted)
        ended = [f.request_id for f in output.finished if f.request_id not in output.request_ids]
        for request_id in (*output.request_ids, *ended):
            times[request_id].append(output.time_s)
    gaps, first_s = find_gaps(replay.trace)
    assert first_s == {request_id: mine[0] for request_id, mine in times.items()}
    found = defaultdict(list)
    for gap in gaps:
        found[gap.request_id].append((gap.start_s, gap.end_s))
    assert found == {r: list(pairwise(mine)) for r, mine in times.items() if len(mine) > 1}
    recomputed = {gap.request_id for gap in gaps if gap.is_recomputed}
    assert recomputed and recomputed <= preempted


@pytest.mark.parametrize("most_requests", [3, 1000])
def test_token_gaps_draws_a_bar_a_gap(records, most_requests):
    gaps, _ = find_gaps(find_trace(records))
    longest = {}
    for gap in gaps:
        longest[gap.request_id] = max(longest.get(gap.request_id, 0), gap.duration_s)
    drawn = sorted(longest, key=longest.get)[-most_requests:]
    drawing = token_gaps(records, {drawn[0]: "a <name>"}, most_requests=most_requests)
    mine = [gap for gap in gaps if gap.request_id in drawn]
    num_recomputed = sum(gap.is_recomputed for gap in mine)
    assert len(fills(drawing, "decode")) == len(mine) - num_recomputed + 1
    assert len(fills(drawing, "preempted")) == num_recomputed + 1
    assert len(fills(drawing, "prefill")) == len(drawn) + 1
    assert "a <name>" in texts(drawing)
    p50, p99 = np.percentile([1000 * gap.duration_s for gap in gaps], [50, 99])
    assert f"{len(gaps)} gaps, p50 {p50:.3g} ms, p99 {p99:.3g} ms" in drawing.alt
    assert (f"{most_requests} requests are drawn" in drawing.alt) == (most_requests < len(longest))


def test_a_figure_takes_what_is_at_hand(records, num_steps, tmp_path):
    from minisgl.figures.timeline import timeline

    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    replay = Replay(records)
    for _ in replay.play():
        pass
    for draw in (page_map, radix_tree, budget_use, token_gaps, timeline):
        assert len({draw(source).svg for source in (records, path, str(path), replay)}) == 1, draw
    assert token_gaps(replay.trace).svg == token_gaps(records).svg
    with pytest.raises(ValueError, match=f"no step {num_steps + 1}; its last is {num_steps}"):
        page_map(records, step=num_steps + 1)
    with pytest.raises(ValueError, match="flight record"):
        radix_tree(replay, step=3)
    for draw in (budget_use, token_gaps, timeline):
        with pytest.raises(ValueError, match="trace"):
            draw(records[:1])
