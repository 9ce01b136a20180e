"""Valid requests that overlap, leave and are aborted at random moments, against a really started server.

``python tests/fuzz_serve.py --seconds 300 --seed 0`` flies one trace a seed, each against a server of other options and
a pool so small that requests are preempted. After every round of a trace it asks: did every answer come, with one end
to each text; is each what the library says to the same prompt alone, and what was read of those that ended early its
beginning; are all rows and pages back; is the server as quick as at the start? The flight record must play again,
every plan as recorded, with all invariants after each step: a finding names its seed and its record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from started import CHAT, COMPLETIONS, Started, events, fold, join, params_of, whole

from minisgl import LLM
from minisgl.scheduler.flight import Replay, read_records

MAX_MODEL_LEN = 512
NUM_BODIES = 24  # different requests of a trace, the first of which is long
NUM_MOVES, NUM_LONG = 30, 4  # requests of a round, the long ones last
HANG_S, BACK_S = 60.0, 2.0  # longest answer; until rows and pages are back
PREFIXES = ("Once upon a time", "The little dog was sad. " * 6, "Lily and Tom went to the park to play. " * 9)
TAILS = ("", " One day", " and", " They saw a big", " But the")


class Finding(AssertionError):
    """What should never happen, and how to see it again."""


@dataclass(frozen=True)
class Move:
    """One request of a round: ``body`` by number; it is read to its end, or after ``num_events`` of a stream or
    ``wait_s``, whichever is first, its client leaves or an admin aborts it."""

    due_s: float
    body: int
    stream: bool
    how: Literal["read", "leave", "abort"]
    num_events: int
    wait_s: float


def make_options(chance: random.Random) -> list[str]:
    """A server's options: another engine for each seed."""
    page_size = chance.choice([4, 16])
    pool = chance.choice([600, 900, 4000])  # tokens; a context is 512
    return [
        "--model", "tiny", "--device", "cpu", "--strict", "--admin-port", "0", "--max-model-len", str(MAX_MODEL_LEN),
        "--page-size", str(page_size), "--num-pages", str(pool // page_size + 1),
        "--chunk-size", str(chance.choice([7, 32, 256])), "--max-running", str(chance.choice([3, 16, 64])),
        "--order", chance.choice(["mixed", "prefill_first", "decode_first"]),
        "--admission", chance.choice(["estimate", "estimate", "reserve"]),
        chance.choice(["--overlap", "--overlap", "--no-overlap"]),
        chance.choice(["--prefix-cache", "--prefix-cache", "--prefix-cache", "--no-prefix-cache"]),
    ]  # fmt: skip


def make_body(chance: random.Random) -> dict[str, Any]:
    """A valid request."""
    text = chance.choice(PREFIXES) + chance.choice(TAILS)
    body: dict[str, Any] = {"max_tokens": chance.choice([1, 2, 5, 12, 30, 90]), "temperature": 0}
    if chance.random() < 0.3:
        body |= {"temperature": 1.0, "seed": chance.randrange(5), "top_k": chance.choice([0, 40])}
    if chance.random() < 0.3:
        body["n"] = chance.choice([2, 3])
    if chance.random() < 0.3:
        body["stop"] = chance.sample([" the", ".", " a", " was", "Tom", "ily"], 2)
    if chance.random() < 0.7:
        body["ignore_eos"] = True
    if chance.random() < 0.2:
        body["logprobs"] = chance.choice([0, 2])
    if chance.random() < 0.2:
        body["cache_salt"] = chance.choice("ab")
    if chance.random() < 0.2:
        body["priority"] = chance.choice([-1, 3])
    if chance.random() < 0.25:
        body["messages"] = [{"role": "user", "content": text}]
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    else:
        prompts = [text, chance.choice(PREFIXES), [300, 301, 302 + chance.randrange(3)]]
        body["prompt"] = prompts if chance.random() < 0.2 else prompts[0]
    return body


def make_round(chance: random.Random) -> list[Move]:
    """Moves of about two seconds, or all at once."""
    span_s = chance.choice([0.0, 0.5, 2.0])
    moves = [
        Move(
            due_s=chance.random() * span_s,
            body=chance.randrange(1, NUM_BODIES),
            stream=chance.random() < 0.6,
            how=chance.choice(["read", "read", "leave", "abort"]),
            num_events=chance.choice([0, 1, 2, 5, 20]),
            wait_s=chance.choice([0.0, 0.01, 0.1, 0.5]) * chance.random(),
        )
        for _ in range(NUM_MOVES)
    ]
    # Those that would run longest are left last: nobody else's end hides it if they go on.
    return moves + [Move(span_s, 0, True, "leave", 3, 5.0) for _ in range(NUM_LONG)]


def expected_answers(bodies: Sequence[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    """Text and reason of each choice, by a slow twin of all servers: no cache, no overlap, no chunks, no preemption."""
    options: dict[str, Any] = {"prefix_cache": False, "overlap": False, "admission": "reserve", "max_running": 16}
    with LLM("tiny", device="cpu", num_pages=2000, page_size=16, max_model_len=MAX_MODEL_LEN, **options) as llm:
        prompts: list[list[Any]] = []
        for body in bodies:
            if "messages" in body:
                prompts.append([llm.tokenizer.encode_chat(body["messages"]).tolist()])
            else:
                prompts.append(body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]])
        params = [params_of(body) for body, each in zip(bodies, prompts, strict=True) for _ in each]
        outputs = iter(llm.generate([prompt for each in prompts for prompt in each], params, use_tqdm=False))
    return [[(text.text, str(text.finish_reason)) for _ in each for text in next(outputs).outputs] for each in prompts]


class Flight:
    """One trace against one server.

    Args:
        seed: all of the trace follows from it, but for what the clocks do.
        folder: where the flight record is left.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.options = make_options(self.chance)
        self.record = folder / f"fuzz-{seed}.jsonl"
        long = {"prompt": PREFIXES[0], "max_tokens": MAX_MODEL_LEN, "temperature": 0, "ignore_eos": True, "n": 2}
        self.bodies = [long, *(make_body(self.chance) for _ in range(NUM_BODIES - 1))]
        self.expected = expected_answers(self.bodies)
        self.num_requests = self.num_left = self.num_aborted = 0

    def fly(self, num_rounds: int) -> None:
        """Fly and judge. Raises `Finding`."""
        server, where = None, "at the start"
        try:
            server = Started(*self.options, "--record", str(self.record))
            before_s = self._probe(server)
            for number in range(num_rounds):
                where = f"in round {number}"
                asyncio.run(self._round(server, make_round(self.chance)))
                where = f"after round {number}"
                server.wait_idle(BACK_S)
            self._check_speed(before_s, self._probe(server))
            where = "at the end"
            httpx.post(server.admin_url + "/flush_cache", timeout=10)
            now = server.metrics()
            assert now["kv_pages_free"] == now["kv_pages"] and now["failed_checks_total"] == 0, now
            server.process.terminate()
            code, log = server.end()
            assert code == 0 and "Traceback" not in log and "level=error" not in log, log[-3000:]
            where = "in its record"
            self._replay()
        except (AssertionError, httpx.HTTPError, OSError, KeyError, ValueError, IndexError) as error:
            raise Finding(
                f"seed {self.seed}, {where}: {type(error).__name__}: {error}\n"
                f"options: {' '.join(self.options)}\nflight record: {self.record}\n"
                f"log: {'' if server is None else server.log[-1500:]}"
            ) from error
        finally:
            if server is not None:
                server.close()

    async def _round(self, server: Started, moves: list[Move]) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits) as client,
            httpx.AsyncClient(base_url=server.admin_url, timeout=HANG_S) as admin,
            asyncio.timeout(HANG_S),
        ):
            results = await asyncio.gather(*(self._move(client, admin, move) for move in moves), return_exceptions=True)
        for move, result in zip(moves, results, strict=True):
            if isinstance(result, BaseException):
                body = json.dumps(self.bodies[move.body])
                raise AssertionError(f"{move}: {type(result).__name__}: {result}\nbody: {body}") from result

    async def _move(self, client: httpx.AsyncClient, admin: httpx.AsyncClient, move: Move) -> None:
        await asyncio.sleep(move.due_s)
        self.num_requests += 1
        body, expected = self.bodies[move.body], self.expected[move.body]
        path = CHAT if "messages" in body else COMPLETIONS
        if not move.stream:
            try:
                async with asyncio.timeout(None if move.how == "read" else move.wait_s):
                    answer = await client.post(path, json=body)
            except TimeoutError:
                self.num_left += 1
                return
            assert answer.status_code == 200, answer.text
            self._check_whole(whole(answer.json()), expected)
            return
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        lines: list[str] = []
        async with client.stream("POST", path, json=body) as answer, asyncio.TaskGroup() as tasks:
            assert answer.status_code == 200, await answer.aread()
            if move.how == "abort":
                tasks.create_task(self._abort(admin, answer.headers["x-request-id"], move.wait_s))
            try:
                async with asyncio.timeout(move.wait_s if move.how == "leave" else None):
                    async for line in answer.aiter_lines():
                        lines += [line] if line else []
                        if move.how == "leave" and len(lines) > move.num_events:
                            break
            except TimeoutError:
                pass
        if move.how == "leave" and "data: [DONE]" not in lines:
            self.num_left += 1
            self._check_part(fold(json.loads(line.removeprefix("data: ")) for line in lines), expected)
        elif move.how == "abort":
            answered = join(events(lines))["choices"]
            assert len(answered) == len(expected)
            self._check_part(dict(enumerate(answered)), expected)
        else:
            self._check_whole(join(events(lines)), expected)

    async def _abort(self, admin: httpx.AsyncClient, answer_id: str, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        answer = await admin.post("/abort", json={"request_id": answer_id})
        self.num_aborted += answer.json()["aborted"]

    def _check_whole(self, found: dict[str, Any], expected: list[tuple[str, str]]) -> None:
        got = [(choice["text"], choice["reason"]) for choice in found["choices"]]
        assert got == expected, f"expected {expected}, got {got}"

    def _check_part(self, found: dict[int, dict[str, Any]], expected: list[tuple[str, str]]) -> None:
        """What there is, is the beginning of what there would have been."""
        for index, choice in found.items():
            text, reason = expected[index]
            assert text.startswith(choice["text"]), f"expected {text!r}, got {choice['text']!r}"
            assert choice["reason"] in (None, "abort") or (choice["text"], choice["reason"]) == (text, reason), choice

    def _probe(self, server: Started) -> float:
        """Seconds that an answer of 20 tokens takes, at best: others want the machine too."""
        times = []
        for _ in range(8):
            start_s = time.perf_counter()
            server.post({"prompt": PREFIXES[0], "max_tokens": 20, "temperature": 0, "ignore_eos": True})
            times.append(time.perf_counter() - start_s)
        return min(times)

    def _check_speed(self, before_s: float, after_s: float) -> None:
        assert after_s < 3 * before_s + 0.1, f"20 tokens took {before_s:.3f} s at the start, {after_s:.3f} s now"

    def _replay(self) -> None:
        """Every plan is made again as it was; all invariants hold after each step."""
        flight = Replay(read_records(self.record))
        for _ in flight.play():
            flight.scheduler.check()
        assert flight.failure is None, flight.failure
        assert not flight.scheduler.has_work


def main() -> int:
    """Fly until the time is over; 1 at the first finding, whose record is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first trace; the next ones count on")
    parser.add_argument("--rounds", type=int, default=5, help="of each trace")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-serve-"))
    end_s, seed = time.monotonic() + args.seconds, args.seed
    num_findings = 0
    while time.monotonic() < end_s:
        flight = Flight(seed, folder)
        try:
            flight.fly(args.rounds)
            flight.record.unlink()
            verdict = "as it should"
        except Finding as finding:
            num_findings += 1
            verdict = str(finding)
        counts = f"{flight.num_requests} requests, {flight.num_left} left, {flight.num_aborted} aborted"
        print(f"seed {seed}: {counts}: {verdict}", flush=True)
        seed += 1
    print(f"{seed - args.seed} traces, {num_findings} findings")
    return int(num_findings > 0)


if __name__ == "__main__":
    raise SystemExit(main())
