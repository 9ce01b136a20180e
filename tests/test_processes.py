"""The server's processes: killed, frozen, flooded and orphaned. Nobody waits for ever, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from serving import ENGINE, Loop, ask, check_equal_to_offline, completions, echo, idle, read, read_some, until

from minisgl import SamplingParams
from minisgl.backend import command, start_client
from minisgl.checkpoint import TINY
from minisgl.server.client import EngineDied
from minisgl.server.clients import Client
from minisgl.server.config import ServerConfig
from minisgl.server.processes import ProcessLink
from minisgl.server.wire import WINDOW, Abort, Seen, address

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "plain"])
def tiny(request: pytest.FixtureRequest, loop: Loop) -> Iterator[tuple[Client, bool]]:
    client = loop.run(start_client(replace(ENGINE, overlap=request.param), ServerConfig()))
    yield client, request.param
    loop.run(client.close())


@pytest.fixture(scope="module")
def parrot(loop: Loop) -> Iterator[Client]:
    """An echo of 200 tokens a second."""
    client = loop.run(start_client(ENGINE, echo(echo_rate=200)))
    yield client
    loop.run(client.close())


def link_of(client: Client) -> ProcessLink:
    assert isinstance(client._link, ProcessLink)
    return client._link


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def wait_for_end_of(pids: list[int], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still there after {timeout_s} s"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------ answers


def test_answers_over_sockets_are_those_of_the_library(loop: Loop, tiny: tuple[Client, bool]) -> None:
    """S03, S04, with both loops."""
    client, overlap = tiny
    check_equal_to_offline(loop, client, overlap=overlap)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_exactly_max_tokens(loop: Loop, tiny: tuple[Client, bool], count: int) -> None:
    """S03: alone, and while others come and go."""
    client, _ = tiny
    params = SamplingParams(max_tokens=count, ignore_eos=True)

    async def scenario() -> None:
        [alone] = completions(await read(client, ask("a", params)))
        others = [asyncio.create_task(read(client, ask(f"o{i}", SamplingParams(max_tokens=9)))) for i in range(4)]
        [among_others] = completions(await read(client, ask("a", params)))
        await asyncio.gather(*others)
        for answer in (alone, among_others):
            assert (len(answer.token_ids), answer.finish_reason) == (count, "length")

    loop.run(scenario())


def test_leaving_frees_rows_and_pages(loop: Loop, tiny: tuple[Client, bool]) -> None:
    """A01, A02, A03, A08."""
    client, _ = tiny

    async def scenario() -> None:
        for num_updates in (0, 1, 3):
            await asyncio.gather(*(read_some(client, ask(f"r{i}", LONG), num_updates) for i in range(5)))
            await idle(client, 1.0)

    loop.run(scenario())


def test_a_bad_request_is_its_own_error_alone(loop: Loop, tiny: tuple[Client, bool]) -> None:
    """V01, V03, V12."""
    client, _ = tiny

    async def scenario() -> None:
        bad = (ask("a", text=""), ask("a", token_ids=[5] * 5000), ask("a", messages=[{"role": "nobody"}]))
        for request in bad:
            with pytest.raises(ValueError, match=r"empty|5000 tokens|role"):
                await read(client, request)
        assert completions(await read(client, ask("a")))

    loop.run(scenario())


def test_a_flood_is_answered_whole(loop: Loop, parrot: Client) -> None:
    """O03: 1,000 requests at once, each ends once, and nothing is left."""

    async def scenario() -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        answers = await asyncio.gather(*(read(parrot, ask(f"r{i}", params)) for i in range(1000)))
        assert {len(completions(updates)[0].token_ids) for updates in answers} == {20}
        assert {completions(updates)[0].text for updates in answers} == {"Once upon a time" * 5}
        await idle(parrot)

    loop.run(scenario())


def test_a_reader_that_is_behind_costs_little(loop: Loop, parrot: Client) -> None:
    """S17: it gets few and large updates, and nobody waits for it."""

    async def scenario() -> None:
        slow = asyncio.create_task(read(parrot, ask("slow", LONG), pause_s=0.05))
        fast = [asyncio.create_task(read(parrot, ask(f"r{i}", LONG))) for i in range(20)]
        answers = await asyncio.gather(*fast)
        assert all(len(completions(updates)[0].token_ids) == 400 for updates in answers)
        updates = await slow
        assert len(completions(updates)[0].token_ids) == 400 and len(updates) < 100

    loop.run(scenario())


def test_a_worker_tells_a_front_that_stands_still_no_more_than_a_window(loop: Loop, parrot: Client) -> None:
    """S17: what the sockets hold is bounded; then everything comes, in fewer and larger updates."""

    async def scenario() -> None:
        link = link_of(parrot)
        readers = [asyncio.create_task(read(parrot, ask(f"r{i}", LONG))) for i in range(10)]
        await asyncio.sleep(0)
        receiver: Any = link._receiver
        before = receiver.number
        time.sleep(2.0)  # the loop of the front stands still
        messages = receiver.drain(100_000)
        num_waiting = receiver.number - before
        link._receive([message for message in messages if not isinstance(message, Seen)])
        assert 1 < num_waiting <= 2 * WINDOW
        answers = await asyncio.gather(*readers)
        assert {len(completions(updates)[0].token_ids) for updates in answers} == {400}

    loop.run(scenario())


def test_the_sockets_are_private(loop: Loop, parrot: Client) -> None:
    folder = link_of(parrot).folder
    assert folder is not None and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {
        f"{a}-{b}" for a, b in (("front", "worker"), ("worker", "front"), ("worker", "engine"), ("engine", "worker"))
    }


# ------------------------------------------------------------------------------------------------ deaths


async def end_of(client: Client, cause: Any, *, num_requests: int = 3) -> str:
    """Let ``cause`` happen to running requests; all end with an error within two seconds. Returns the error."""
    readers = [asyncio.create_task(read(client, ask(f"r{i}", LONG))) for i in range(num_requests)]

    async def all_run() -> bool:
        return (await client.stats()).num_running == num_requests

    await until(all_run)
    cause()
    async with asyncio.timeout(2.0):
        ends = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDied] * num_requests
    return str(ends[0])


def test_a_frozen_engine_is_seen_and_may_thaw_and_a_killed_one_ends_its_requests(loop: Loop) -> None:
    """O05, O08: a heartbeat that grows old is not ready, and not dead."""

    async def scenario() -> None:
        client = await start_client(ENGINE, echo(echo_rate=50, heartbeat_s=1.0))
        pids, folder = link_of(client).pids, link_of(client).folder
        reader = asyncio.create_task(read(client, ask("a", SamplingParams(max_tokens=40, ignore_eos=True))))
        await asyncio.sleep(0.2)
        os.kill(pids["engine"], signal.SIGSTOP)

        async def is_not_ready() -> bool:
            return client.not_ready is not None

        await until(is_not_ready)
        assert "has not turned" in str(client.not_ready) and client.failure is None
        assert (await client.stats()).heartbeat_age_s > 1.0
        os.kill(pids["engine"], signal.SIGCONT)
        assert len(completions(await reader)[0].token_ids) == 40
        assert client.not_ready is None

        error = await end_of(client, lambda: os.kill(pids["engine"], signal.SIGKILL))
        assert error == "the engine process was killed by SIGKILL" == client.failure == client.not_ready
        with pytest.raises(EngineDied, match="SIGKILL"):
            await read(client, ask("late"))
        await client.close()
        wait_for_end_of(list(pids.values()))
        assert folder is not None and not folder.exists()

    loop.run(scenario())


def test_an_engine_that_stays_frozen_is_given_up(loop: Loop) -> None:
    """O08."""

    async def scenario() -> None:
        client = await start_client(ENGINE, echo(echo_rate=50, step_deadline_s=1.0))
        reader = asyncio.create_task(read(client, ask("a", LONG)))
        await asyncio.sleep(0.1)
        pids = link_of(client).pids
        os.kill(pids["engine"], signal.SIGSTOP)
        async with asyncio.timeout(10):
            with pytest.raises(EngineDied, match="no heartbeat of the engine has come"):
                await reader
        await client.close()
        wait_for_end_of(list(pids.values()))

    loop.run(scenario())


HANGING = """
import sys, time
from pathlib import Path
from minisgl.server.client import ModelInfo
from minisgl.server.echo import EchoEngine
from minisgl.server.engine_loop import last_words, run_engine
from minisgl.server.processes import live_with_parent

class Hanging(EchoEngine):
    def step(self):
        if self.stats().num_steps == 30:
            time.sleep(60)
        return super().step()

live_with_parent()
folder = Path(sys.argv[1])
run_engine(
    lambda: Hanging(ModelInfo("echo", 512, 4096, True), rate=50), folder,
    step_deadline_s=1.0, leave=last_words(folder, "engine"), note="; the flight record is FILE",
)
"""


def test_a_step_that_hangs_is_ended_by_the_watchdog(
    loop: Loop, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says where it hung, and where the flight record is; everybody hears of it."""
    (tmp_path / "hanging.py").write_text(HANGING)

    async def scenario() -> None:
        usual = command(ENGINE, echo(), TINY)

        def hanging(role: str, folder: Path) -> tuple[Sequence[str], bytes]:
            argv, line = usual(role, folder)
            return ([sys.executable, str(tmp_path / "hanging.py"), str(folder)] if role == "engine" else argv), line

        client = Client(ProcessLink(hanging, restart=False, step_deadline_s=30.0))
        await client.start()
        async with asyncio.timeout(5):
            with pytest.raises(EngineDied) as error:
                await read(client, ask("a", LONG))
        assert str(error.value) == "a step has taken longer than 1 s; the flight record is FILE"
        await client.close()

    loop.run(scenario())
    errors = capfd.readouterr().err
    assert "most recent call first" in errors and "hanging.py" in errors and "in step" in errors


def test_a_broken_wire_is_the_end(loop: Loop) -> None:
    """O04: a stranger's frame, or a lost one, is not passed over."""

    async def scenario() -> None:
        client = await start_client(ENGINE, echo(echo_rate=50))
        folder = link_of(client).folder
        assert folder is not None
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(address(folder, "front", "worker"))
            frame = struct.pack("<Q", 999) + msgspec.msgpack.encode(Abort("a"))
            error = await end_of(client, lambda: stranger.send(frame))
        assert "frame 999 came where" in error
        await client.close()

    loop.run(scenario())


def test_after_a_death_it_starts_again_if_asked_to(loop: Loop) -> None:
    """O05, with the worker."""

    async def scenario() -> None:
        client = await start_client(ENGINE, echo(echo_rate=100, restart=True))
        before = link_of(client).pids
        await end_of(client, lambda: os.kill(before["worker"], signal.SIGKILL))
        assert client.failure is None and client.not_ready == "the worker process was killed by SIGKILL"
        with pytest.raises(EngineDied):
            await read(client, ask("early"))

        async def is_ready() -> bool:
            return client.not_ready is None

        await until(is_ready, 30)
        assert not set(before.values()) & set(link_of(client).pids.values())
        wait_for_end_of(list(before.values()))
        assert completions(await read(client, ask("r0", SamplingParams())))[0].text == "Once upon a time"
        await client.close()

    loop.run(scenario())


def test_a_failed_start_says_why_in_one_line(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    """V15, O06."""

    async def scenario() -> None:
        with pytest.raises(EngineDied, match=r"^cannot read the chat template /no/such/file: [^\n]*$"):
            await start_client(ENGINE, echo(chat_template="/no/such/file", restart=True))

    before = children()
    loop.run(scenario())
    assert "Traceback" not in capfd.readouterr().err
    assert children() == before


def children() -> list[str]:
    """Processes of servers of this process, by their command lines."""
    mine = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(") ", 1)[1].split()[1])
            line = (folder / "cmdline").read_text()
        except OSError:
            continue
        if parent == os.getpid() and "run_child" in line:
            mine.append(line)
    return mine


CHILD = """
import time
from minisgl.server.processes import live_with_parent
print(live_with_parent().decode().strip(), flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])  # with the stdin that it has itself
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_sees_the_end_of_the_pipe() -> None:
    """O07, where no operating system helps."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"job\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"job\n" and child.poll() is None
        child.stdin.close()
        assert child.wait(5) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")
def test_linux_ends_a_child_with_its_parent() -> None:
    """O07: even one that cannot look at its pipe."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.stdin.write(b"job\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"job\n" and is_alive(pid)
        parent.kill()
        wait_for_end_of([pid])  # the pipe is open still


# ------------------------------------------------------------------------------------------------ the command


class Server:
    """``minisgl serve``, really started, with an echo."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "minisgl", "serve", "--echo", "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self.port}"
        assert self.process.stdout is not None and self.process.stdout.readline().strip().endswith(self.url)
        deadline = time.monotonic() + 20
        while httpx.get(self.url + "/ready", timeout=5).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @property
    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def stream(self, num_tokens: int) -> Any:
        body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
        return httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=20)

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Exit code and stderr; fails if it does not end in time."""
        try:
            _, errors = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, errors


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_parent_takes_its_children_and_the_next_start_ends_with_its_answers() -> None:
    """O07: kill -9; then a start at once, which removes what the dead one left; then SIGTERM, with a stream open."""
    killed = Server("--echo-rate", "20")
    pids = killed.children
    assert len(pids) == 2
    folders = set(Path("/tmp").glob(f"minisgl-{killed.process.pid}-*"))
    assert len(folders) == 1
    killed.process.kill()
    killed.end(5)
    wait_for_end_of(pids)

    server = Server("--echo-rate", "20")
    assert not any(folder.exists() for folder in folders)
    pids = server.children
    with server.stream(30) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2]
    code, errors = server.end(10)
    assert code == 0 and "Traceback" not in errors, errors
    wait_for_end_of(pids)


def test_a_second_signal_ends_at_once() -> None:
    """O07."""
    server = Server("--echo-rate", "5")
    pids = server.children
    with server.stream(100) as answer, pytest.raises(httpx.HTTPError):
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        ended_s = time.monotonic() + 5
        for _ in lines:
            assert time.monotonic() < ended_s
        raise httpx.ReadError("the stream ended with an event")  # as good as a cut
    code, errors = server.end(5)
    assert code == 1 and "Traceback" not in errors, errors
    wait_for_end_of(pids)


def test_the_server_ends_with_its_engine() -> None:
    """O05: clients hear of it, probes too, and the exit code tells."""
    server = Server("--echo-rate", "20")
    pids = server.children
    with server.stream(400) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        rest = [line for line in lines if line]
        assert "error" in "".join(rest) and time.monotonic() - killed_s < 2
    code, errors = server.end(10)
    assert code == 1 and errors.splitlines()[-1] == "minisgl: the engine process was killed by SIGKILL"
    assert "Traceback" not in errors
    wait_for_end_of(pids)


@pytest.mark.parametrize("what", ["port", "model"])
def test_a_start_that_cannot_be_is_one_line(what: str) -> None:
    """V15."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ["--port", str(taken.getsockname()[1])] if what == "port" else ["--model", "/no/such/model"]
        done = subprocess.run(
            [sys.executable, "-m", "minisgl", "serve", *options], capture_output=True, text=True, timeout=30
        )
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("minisgl: "), done.stderr
