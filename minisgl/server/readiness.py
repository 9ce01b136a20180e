"""Whether to send requests here: the engine has answered one rightly, and its loop turns.

Chapter 1 tells this module's story. Live and ready are two questions. `/health` asks whether this process is there;
`/ready` whether an answer is to be expected: it is what a balancer should ask.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from minisgl.request import SamplingParams
from minisgl.server.client import EngineClient, EngineDied, EngineStats, GenerateRequest, RequestRefused

STATS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Golden:
    """A request whose answer is known.

    Args:
        prompt_token_ids: the prompt; any ids of the vocabulary will do.
        token_ids: the greedy answer; None: any that has the asked length.
        num_tokens: asked length.
    """

    prompt_token_ids: tuple[int, ...] = (1, 2, 3, 4)
    token_ids: tuple[int, ...] | None = None
    num_tokens: int = 4


async def run_golden(client: EngineClient, golden: Golden) -> str | None:
    """Ask for the golden answer; returns what is wrong with the one that came, None if nothing is."""
    params = SamplingParams(temperature=0, max_tokens=golden.num_tokens, ignore_eos=True, cache_salt="golden")
    request = GenerateRequest("golden", params, token_ids=list(golden.prompt_token_ids))
    token_ids: list[int] = []
    try:
        async for update in client.generate(request):
            token_ids += [token_id for delta in update.deltas for token_id in delta.token_ids]
    except (RequestRefused, EngineDied) as error:
        return f"the first request failed: {error}"
    if golden.token_ids is not None and tuple(token_ids) != golden.token_ids:
        return f"the first request brought tokens {token_ids} instead of {list(golden.token_ids)}"
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < client.info.vocab_size]
    if wrong or len(token_ids) != golden.num_tokens:
        return f"the first request brought tokens {token_ids} where {golden.num_tokens} of the vocabulary were due"
    return None


async def read_stats(client: EngineClient, *, detail: bool = False) -> EngineStats | None:
    """The engine's state; None if it is dead or does not say within `STATS_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await client.stats(detail=detail)
    except (TimeoutError, EngineDied):
        return None


class Readiness:
    """Knows whether the golden request has passed; asks for the rest."""

    def __init__(self, client: EngineClient, *, heartbeat_s: float, golden: Golden) -> None:
        self._client = client
        self._heartbeat_s = heartbeat_s
        self._golden = golden
        self._problem: str | None = "the first request has not been answered yet"
        self.draining = False

    async def start(self) -> None:
        """Run the golden request."""
        self._problem = await run_golden(self._client, self._golden)

    async def problem(self) -> str | None:
        """Why there is no point in sending requests here; None if there is."""
        if self.draining:
            return "the server is ending"
        if self._client.failure is not None:
            return f"the engine is gone: {self._client.failure}"
        if self._problem is not None:
            return self._problem
        stats = await read_stats(self._client)
        if stats is None:
            return "the engine does not answer"
        if stats.heartbeat_age_s > self._heartbeat_s:
            return f"the engine's loop has not turned for {stats.heartbeat_age_s:.1f} s"
        return None
