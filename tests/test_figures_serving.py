"""The drawings of chapter 1 that show processes and loops: every message once, in order, in the right lane."""

from __future__ import annotations

import re

import numpy as np
import pytest

from minisgl.figures.sequence import LANES, Said, say, sequence
from minisgl.figures.step_spans import step_spans
from minisgl.request import FinishedRequest, SamplingParams, Timings, Usage
from minisgl.server.client import Delta, GenerateRequest, Update
from minisgl.server.wire import Add, End, Message, News, Seen, Step, Submit
from minisgl.server.wire_record import Frame
from minisgl.trace import StepRecord, Trace

USAGE = Usage(3, 0, 1)
FINISHED = FinishedRequest("a", "stop", None, USAGE, Timings(0.0, 1.0, 2.0))
PROMPT = np.array([4, 5, 6], np.int32).tobytes()


def step(*token_ids: int, finished: tuple[FinishedRequest, ...] = ()) -> Step:
    return Step(7, 0.0, tuple("abc"[: len(token_ids)]), np.array(token_ids, np.int32).tobytes(), finished)


def news(text: str, reason: str | None = None, prompt: tuple[int, ...] | None = None) -> Update:
    deltas = () if prompt else (Delta(0, text, (9,), finish_reason=reason),)  # type: ignore[arg-type]
    return Update("a", deltas, USAGE, prompt_token_ids=prompt)


@pytest.mark.parametrize(
    ("message", "words", "state"),
    [
        (Submit(GenerateRequest("a", SamplingParams(), text="x")), "Submit", "prefill"),
        (Add([("a", SamplingParams())], PROMPT), "Add 3 ids", "prefill"),
        (step(12), "Step: id 12", "decode"),
        (step(12, 13), "Step: 2 ids", "decode"),
        (step(finished=(FINISHED,)), "Step: stop", None),
        (step(), "Step: nothing", None),
        (End("a", "abort"), "End: abort", None),
        (News((news(" dog"),)), "News ' dog'", "decode"),
        (News((news(" dog"), news("s"))), "News of 2", "decode"),
        (News((news("", "length"),)), "News: length", None),
        (News((news("", prompt=(4, 5, 6)),)), "News: accepted", None),
        (News((news("a very long piece of text"),)), "News 'a very l", "decode"),
        (Seen(3), "Seen", None),
    ],
)
def test_a_frame_in_a_few_words(message: Message, words: str, state: str | None) -> None:
    """What fits over an arrow."""
    assert say(Frame(1.5, "engine", "worker", 3, b"", message)) == Said(1.5, "engine", "worker", words, state)
    assert len(words) <= 14


CHAIN = [
    Said(1.0, "client", "front", "POST"),
    Said(1.001, "front", "worker", "Submit", "prefill"),
    Said(1.002, "worker", "engine", "Add", "prefill"),
    Said(1.003, "worker", "front", "accepted"),
    *(
        Said(1.01 * k + d / 1000, sender, receiver, f"token {k}{sender}", "decode")
        for k in range(1, 31)
        for d, (sender, receiver) in enumerate([("engine", "worker"), ("worker", "front"), ("front", "client")], 4)
    ),
]


def test_a_message_that_is_passed_on_shares_the_row() -> None:
    """And every message is drawn once, in the order of time, whatever order they come in."""
    drawing = sequence(CHAIN[::-1], max_rows=100)
    lines = {float(y) for y in re.findall(r'<path d="M[\d.]+ ([\d.]+)H', drawing.body)}
    assert len(lines) == 2 + 30  # the way in; what the worker says by itself; each token's way out
    written = re.findall(r">([^<>]+)</text>", drawing.body)
    assert [words for words in written if words in {said.words for said in CHAIN}] == [said.words for said in CHAIN]
    assert "First client to front: POST" in drawing.alt and "front to client: token 30front." in drawing.alt


def test_an_answer_has_a_row_of_its_own() -> None:
    """It goes back, where the arrow before it lies."""
    there, back = Said(0.0, "worker", "engine", "Add"), Said(0.001, "engine", "worker", "Step")
    assert len({y for y in re.findall(r'<path d="M[\d.]+ ([\d.]+)H', sequence([there, back]).body)}) == 2


def test_the_middle_of_a_long_sequence_is_left_out() -> None:
    """Rows are counted, those that are shown and those that are not."""
    drawing = sequence(CHAIN, max_rows=10)
    assert len({y for y in re.findall(r'<path d="M[\d.]+ ([\d.]+)H', drawing.body)}) == 10
    assert "⋮ 22 more rows" in drawing.body
    assert "token 30front" in drawing.body and "token 27engine" in drawing.body and "token 26engine" not in drawing.body
    assert drawing.height < sequence(CHAIN, max_rows=100).height
    with pytest.raises(ValueError, match="no messages"):
        sequence([])


def test_arrows_point_at_the_receiver() -> None:
    """Also on the way back."""
    for said in CHAIN[:4]:
        [tip] = re.findall(r'<path d="M([\d.]+) [\d.]+l(-?\d+) ', sequence([said]).body)
        assert abs(float(tip[0]) - LANES[said.receiver]) <= 1
        assert (int(tip[1]) > 0) == (LANES[said.sender] > LANES[said.receiver])


def trace(*spans: tuple[float, float]) -> Trace:
    def record(k: int, launched_s: float, done_s: float) -> StepRecord:
        column = np.array([5 if k == 1 else 1], np.int32)
        start = np.array([0 if k == 1 else k + 3], np.int32)
        return StepRecord(k, launched_s, done_s, ("a",), column, start, np.array([5], np.int32), np.array([True]))

    return Trace([record(k, *span) for k, span in enumerate(spans, 1)])


def test_spans_show_which_loop_launches_early() -> None:
    """The words count what the bars show; bars of one run lie on its own scale."""
    plain, overlapped = trace((0, 1), (1, 2), (2, 4)), trace((100, 103), (101, 104), (102, 105))
    drawing = step_spans({"plain": plain, "overlapped": overlapped})
    assert "plain: 0 of 2 steps" in drawing.alt and "overlapped: 2 of 2 steps" in drawing.alt
    bars = [
        (float(x), float(w) + 1) for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', drawing.body)
    ]
    assert [x for x, _ in bars] == pytest.approx([72, 174, 276, 72, 153.6, 235.2], abs=0.1)
    assert [w for _, w in bars] == pytest.approx([102, 102, 204, 244.8, 244.8, 244.8], abs=0.2)
    assert drawing.body.count("--sgl-prefill") == 2 and drawing.body.count("--sgl-decode") == 4
    assert len(re.findall("<rect", step_spans({"plain": plain}, num_steps=2).body)) == 2
    with pytest.raises(ValueError, match="no steps"):
        step_spans({"empty": Trace()})
