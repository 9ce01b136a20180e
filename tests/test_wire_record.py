"""What the processes say to each other can be written down, and read back frame by frame."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from minisgl.benchmark.serving import serving
from minisgl.request import FinishedRequest, Timings, Usage
from minisgl.server.config import ServerConfig
from minisgl.server.wire import Add, Heartbeat, Hello, News, Started, Step, Submit
from minisgl.server.wire_record import Frame, about, read_wire


def ask(url: str, **body: object) -> str:
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["id"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder of frames, and the ids of two answers in it: one text of three tokens, and two of two."""
    folder = tmp_path_factory.mktemp("wire") / "new"
    with serving(["--echo", "--echo-rate", "50", "--record-wire", str(folder)]) as server:
        first = ask(server.url, prompt=[5, 6, 7], max_tokens=3)
        second = ask(server.url, prompt=[8, 9], max_tokens=2, n=2)
    return folder, first, second


def test_every_frame_is_there_in_order(recorded: tuple[Path, str, str]) -> None:
    """Each link begins with its handshake and has no gap; all clocks are one."""
    frames = read_wire(recorded[0])
    links = {(frame.sender, frame.receiver) for frame in frames}
    assert links == {("front", "worker"), ("worker", "engine"), ("engine", "worker"), ("worker", "front")}
    for link in links:
        mine = [frame for frame in frames if (frame.sender, frame.receiver) == link]
        assert [frame.number for frame in mine] == list(range(len(mine)))
        assert [isinstance(frame.message, Hello) for frame in mine] == [True] + [False] * (len(mine) - 1)
        assert all(frame.data[:8] == frame.number.to_bytes(8, "little") for frame in mine)
    assert [frame.time_s for frame in frames] == sorted(frame.time_s for frame in frames)
    assert {type(frame.message) for frame in frames} > {Started, Heartbeat}


def test_a_request_is_followed_by_its_id(recorded: tuple[Path, str, str]) -> None:
    """And by those of its completions; what belongs to another one is left out."""
    folder, first, second = recorded
    frames = about(read_wire(folder), first)
    assert [type(frame.message) for frame in frames[:2]] == [Submit, Add]
    steps = [frame.message for frame in frames if isinstance(frame.message, Step)]
    assert [int(token) for step in steps for token in step.unpack().token_ids] == [5, 6, 7]
    news = [frame.message for frame in frames if isinstance(frame.message, News)]
    assert [message.updates[-1].timings is None for message in news] == [True] * (len(news) - 1) + [False]
    assert len(frames) == 2 + len(steps) + len(news)
    [add] = [frame.message for frame in about(read_wire(folder), second) if isinstance(frame.message, Add)]
    assert [child_id for child_id, _ in add.children] == [f"{second}/0", f"{second}/1"]


def test_an_end_without_a_token_belongs_to_its_request() -> None:
    """As of one that was aborted, or whose last token is not given out."""
    finished = FinishedRequest("a/1", "abort", None, Usage(3, 0, 1), Timings(0.0, 1.0, 2.0))
    frames = [Frame(0.0, "engine", "worker", 1, b"", Step(1, 0.0, (), b"", ended)) for ended in ((finished,), ())]
    assert about(frames, "a") == frames[:1] and about(frames, "b") == []


def test_files_are_their_owners_alone(recorded: tuple[Path, str, str]) -> None:
    """They hold prompts."""
    assert stat.S_IMODE(recorded[0].stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in recorded[0].iterdir()} == {0o600}


def test_the_last_entry_of_a_killed_process_is_left_out(recorded: tuple[Path, str, str], tmp_path: Path) -> None:
    """Wherever it was cut; other damage is told."""
    data = (recorded[0] / "engine-worker.frames").read_bytes()
    path = tmp_path / "engine-worker.frames"
    path.write_bytes(data)
    num_whole = len(read_wire(tmp_path))
    for num_bytes in (1, 13, len(read_wire(tmp_path)[-1].data) + 11):
        path.write_bytes(data[:-num_bytes])
        assert len(read_wire(tmp_path)) == num_whole - 1
    path.write_bytes(data[:20] + b"\xc1" + data[21:])
    with pytest.raises(ValueError, match="no frame ends at byte"):
        read_wire(tmp_path)


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    """A thread has no wire; a file is no folder, and then the server does not start."""
    with pytest.raises(ValueError, match="in_process"):
        ServerConfig(record_wire=str(tmp_path), in_process=True)
    (tmp_path / "file").touch()
    with (
        pytest.raises(RuntimeError, match="cannot record into"),
        serving(["--echo", "--record-wire", str(tmp_path / "file" / "x")]),
    ):
        pass
    assert os.listdir(tmp_path) == ["file"]
