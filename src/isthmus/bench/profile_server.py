"""`isthmus profile --vllm`: the cost curve of a vLLM server, from what its clients see.

Prompts are measured alone: until their only token is there. Decodes are measured together: the time between tokens of
one answer while all of them are being generated. So HTTP and vLLM's own scheduling count, as they do for a node. Every
case is run in turns with the others, and its median counts, as of an engine of ours (`profile.py`); mixed iterations
cannot be told apart from outside, and are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence

from isthmus.bench.child import Loop
from isthmus.bench.profile import DECODE_STEPS, Case, Profile, affordable, cases_of, fit_profile, measured
from isthmus.bench.study import Report, silent
from isthmus.core.blocks import KVLayout
from isthmus.core.errors import StartError
from isthmus.core.types import Sampling
from isthmus.live.servers.client import Client, EngineError, body_of

_GREEDY = Sampling(temperature=0.0)
_STEPS = 4 * DECODE_STEPS
"""Tokens of an answer: they begin one after the other, and all run together for a part of it."""
FIRST_TOKEN = 3
"""Lower ids may be special."""


def profile_server(
    client: Callable[[], Client],
    layout: KVLayout,
    *,
    vocab_size: int,
    max_length: int,
    kv_tokens: int,
    max_sequences: int,
    origin: str,
    rounds: int = 5,
    budget_s: float = 90.0,
    report: Report = silent,
) -> Profile:
    """`client`: makes one, in the event loop; `kv_tokens`: that its KV memory holds; `max_sequences`: it runs at once.
    Raises StartError where the server does not answer."""
    cases = [
        case
        for case in cases_of(max_length, kv_tokens)
        if not (case.num_tokens and case.num_decodes) and case.num_decodes <= max_sequences
        if case.context + _STEPS <= max_length
    ]

    with contextlib.closing(_Bench(client, layout.block_size, vocab_size)) as bench:
        try:
            bench.seconds(Case(num_tokens=64))  # what is compiled or allocated once
            kept = affordable(bench.seconds, cases)
            report(f"{len(kept)} cases at {bench.url}")
            found = measured(bench.seconds, kept, rounds, budget_s)
        except EngineError as error:
            raise StartError(f"vLLM at {bench.url}: {error}") from None
    return fit_profile(found, layout.num_layers * layout.token_bytes, layout.num_layers, origin)


class _Bench:
    """Runs cases on one server. No prompt comes twice, but for what is to be cached."""

    def __init__(self, client: Callable[[], Client], block_size: int, vocab_size: int) -> None:
        self._loop = Loop()
        self._client, self._block_size = self._loop.run(_made(client)), block_size
        self.url = self._client.url
        self._draws = random.Random(0)
        self._span = range(FIRST_TOKEN, vocab_size)
        self._number = 0

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()

    def seconds(self, case: Case) -> float:
        return self._loop.run(self._decode(case) if case.num_decodes else self._prefill(case))

    async def _prefill(self, case: Case) -> float:
        before = self._drawn(case.cached // self._block_size * self._block_size)
        if before:
            await self._compute([*before, *self._drawn(1)])
        prompt = [*before, *self._drawn(case.num_tokens)]
        started_s = time.perf_counter()
        await self._compute(prompt)
        return time.perf_counter() - started_s

    async def _decode(self, case: Case) -> float:
        """The prompts begin alike, so that their answers begin together."""
        prompt = self._drawn(max(1, case.context - _STEPS // 2))
        await self._compute(prompt)
        times = await asyncio.gather(*[self._times(prompt) for _ in range(case.num_decodes)])
        first, last = max(each[0] for each in times), min(each[-1] for each in times)
        gaps = [gap for each in times if (gap := _mean_gap(each, first, last)) is not None]
        if gaps:
            return statistics.median(gaps)
        return statistics.median([(each[-1] - each[0]) / max(1, len(each) - 1) for each in times])

    async def _compute(self, prompt: Sequence[int]) -> None:
        await self._client.compute(self._key(), body_of(_GREEDY, prompt, len(prompt), 1))

    async def _times(self, prompt: Sequence[int]) -> list[float]:
        body, found = body_of(_GREEDY, prompt, len(prompt), _STEPS), list[float]()
        async for tokens in self._client.answer(self._key(), body, None):
            found += [time.perf_counter()] * len(tokens)
        return found

    def _drawn(self, count: int) -> list[int]:
        return self._draws.choices(self._span, k=count)

    def _key(self) -> str:
        self._number += 1
        return f"profile-{self._number}"


async def _made(client: Callable[[], Client]) -> Client:
    return client()


def _mean_gap(times: Sequence[float], first: float, last: float) -> float | None:
    """Between the tokens of one answer that came while all were being generated."""
    inside = [at for at in times if first <= at <= last]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else None
