"""Very many requests, a tenth of whose clients leave, a thousand at once: run by hand, and noted in
``book/results/serve-endurance.json``.

``python tests/endurance_serve.py --output FILE`` asks an echo and the tiny model 20,000 times each. Each answer
that was waited for must be whole and end once; afterwards nothing runs, every page is free, and no process has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
import torch
from started import COMPLETIONS, Started

from minisgl.benchmark.report import write_report

AT_ONCE, LEAVERS = 1000, 0.1
GROWTH_MIB = 16.0  # that is still called flat, of a process


async def ask(port: int, number: int, chance: random.Random) -> str:
    """One request on a connection of its own; what became of it."""
    stream, leaves = number % 2 == 0, chance.random() < LEAVERS
    body = {"prompt": f"Once upon a time there were {number} foxes", "max_tokens": 4, "temperature": 0,
            "ignore_eos": True, "stream": stream}  # fmt: skip
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        if leaves:
            await asyncio.sleep(chance.random() * chance.choice([0.01, 0.3, 3.0]))
            return "left"
        answer = await asyncio.wait_for(reader.read(), 600)
    finally:
        writer.transport.abort()
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:500]
    assert answer.count(b'"finish_reason":"length"') == 1 and answer.count(b"[DONE]") == stream, answer[-500:]
    return "answered"


async def ask_all(port: int, numbers: range, chance: random.Random) -> Counter[str]:
    """All of them, `AT_ONCE` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> str:
        async with gate:
            return await ask(port, number, chance)

    return Counter(await asyncio.gather(*(one(number) for number in numbers)))


def endure(name: str, count: int, *options: str) -> dict[str, Any]:
    """Ask one server ``count`` times; its row of the report."""
    server = Started(*options, "--admin-port", "0", "--max-waiting", str(2 * AT_ONCE))
    try:
        port, chance = int(server.url.rpartition(":")[2]), random.Random(1)
        warm = max(2 * AT_ONCE, count // 5)
        asyncio.run(ask_all(port, range(warm), chance))  # buffers and caches take their size
        server.wait_idle()
        before, start_s = server.rss_mib(), time.monotonic()
        counts = asyncio.run(ask_all(port, range(warm, warm + count), chance))
        wall_s = time.monotonic() - start_s
        server.wait_idle()
        after, metrics = server.rss_mib(), server.metrics()
        httpx.post(server.admin_url + "/flush_cache", timeout=60)
        pages = server.metrics()
        server.process.terminate()
        code, log = server.end(60)
    finally:
        server.close()
    row = {
        "server": name, "requests": count, "at once": AT_ONCE, **counts, "seconds": round(wall_s, 1),
        "MiB before": {role: round(mib, 1) for role, mib in before.items()},
        "MiB after": {role: round(mib, 1) for role, mib in after.items()},
        "running": metrics["requests_running"], "in flight": metrics["requests_in_flight"],
        "pages": pages["kv_pages"], "pages free after a flush": pages["kv_pages_free"],
        "failed checks": metrics["failed_checks_total"], "exit code": code,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    assert counts["answered"] + counts["left"] == count and counts["left"] > count * LEAVERS / 2
    assert pages["kv_pages"] == pages["kv_pages_free"] and code == 0 and "Traceback" not in log
    assert all(after[role] - before[role] < GROWTH_MIB for role in before)
    return row


def main() -> None:
    """Run both and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--echo", type=int, default=20_000, help="requests to the echo")
    parser.add_argument("--tiny", type=int, default=20_000, help="requests to the tiny model")
    args = parser.parse_args()
    tiny = ("--model", "tiny", "--device", "cpu", "--num-pages", "2000", "--max-model-len", "512")
    rows = [endure("echo", args.echo, "--echo"), endure("tiny", args.tiny, *tiny)]
    if args.output is not None:
        write_report(args.output, "endurance of the server", torch.device("cpu"), {"rows": rows})


if __name__ == "__main__":
    main()
