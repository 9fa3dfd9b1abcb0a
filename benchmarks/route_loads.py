"""The loads by which routers are judged, and the ways by which a load reaches the servers.

`cost`: what a hop takes. `turns`: conversations, of which each prompt begins with all of the last one. `trace`: prompts
of a recorded trace, equal where the trace says so. The same seed makes the same prompts.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from benchmarks.paced import BLOCK_TOKENS, TOKEN_CHARS, WORDS, Blocks, length_of, named, rendered
from benchmarks.route_client import Client, Message, Reply
from isthmus.bench import BenchError
from isthmus.core.errors import ConfigError

ID_TOKENS = 512
"""Of a prompt, for which one hash id of a trace stands."""
COST_SYSTEM, COST_USER = 256, 32
"""Tokens of the prompts of which cost is measured."""
STREAM_TOKENS, STREAMS = 32, 16
"""The answers of which the cost of a stream is measured, and how many run at once."""


class Way(Protocol):
    """How a request comes to a server."""

    async def ask(self, messages: Sequence[Message], max_tokens: int, *, stream: bool = True) -> Reply: ...

    async def close(self) -> None: ...


class InTurn:
    """The client takes the servers in turn; a router is its only one."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients, self._next = clients, count()

    async def ask(self, messages: Sequence[Message], max_tokens: int, *, stream: bool = True) -> Reply:
        client = self._clients[next(self._next) % len(self._clients)]
        return await client.ask(messages, max_tokens, stream=stream)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class Exact(InTurn):
    """The client knows what each server has cached, and sends where the fewest uncached tokens wait, its own included.

    A router can hardly know more, though a rule that spreads less may hit more.
    """

    def __init__(self, clients: Sequence[Client], blocks: int) -> None:
        super().__init__(clients)
        self._kept = [Blocks(blocks) for _ in clients]
        self._waiting = [0] * len(clients)

    async def ask(self, messages: Sequence[Message], max_tokens: int, *, stream: bool = True) -> Reply:
        text = rendered(messages)
        names = named(text)
        missing = [length_of(text) - kept.matched(names) * BLOCK_TOKENS for kept in self._kept]
        loads = [more + waits for more, waits in zip(missing, self._waiting, strict=True)]
        at = loads.index(min(loads))
        self._waiting[at] += missing[at]
        self._kept[at].use(names)
        try:
            reply = await self._clients[at].ask(messages, max_tokens, stream=stream)
        finally:
            self._waiting[at] -= missing[at]
        self._kept[at].use(named(text + reply.text))
        return reply


def checked(replies: Iterable[Reply]) -> list[Reply]:
    """The good ones. Raises BenchError if more than one in a hundred is not."""
    found = list(replies)
    good = [each for each in found if not each.error]
    if len(good) < 0.99 * len(found) or not good:
        error = next((each.error for each in found if each.error), "nothing was asked")
        raise BenchError(f"{len(found) - len(good)} of {len(found)} answers failed: {error}")
    return good


# Cost.


class Cost(msgspec.Struct, frozen=True):
    """CPU times are the router's own, None where there is none."""

    ttft_1_ms: float
    ttft_8_ms: float
    requests_per_s: float
    request_cpu_ms: float | None
    stream_cpu_ms: float | None


async def cost(way: Way, seconds: float, cpu_s: Callable[[], float | None]) -> Cost:
    """Four loads for so many seconds each: one stream at once, 8, 64 requests of one token, streams of 32 tokens.
    `cpu_s`: processor time that the router has used."""
    numbers = count()

    async def at_once(
        num: int, tokens: int, span_s: float, *, stream: bool
    ) -> tuple[list[Reply], float, float | None]:
        """Answers, seconds an answer, and processor seconds an answer."""
        replies, begin, before = list[Reply](), time.perf_counter(), cpu_s()

        async def one_after_another() -> None:
            while time.perf_counter() < begin + span_s:
                replies.append(await way.ask(_costs(next(numbers)), tokens, stream=stream))

        async with asyncio.TaskGroup() as group:
            for _ in range(num):
                group.create_task(one_after_another())
        took, after, good = time.perf_counter() - begin, cpu_s(), checked(replies)
        cpu = None if before is None or after is None else (after - before) / len(good)
        return good, took / len(good), cpu

    await at_once(8, 2, seconds / 4, stream=True)  # connections are opened, code is warm
    alone, _, _ = await at_once(1, 2, seconds, stream=True)
    eight, _, _ = await at_once(8, 2, seconds, stream=True)
    _, request_s, request_cpu_s = await at_once(64, 1, seconds, stream=False)
    _, _, stream_cpu_s = await at_once(STREAMS, STREAM_TOKENS, seconds, stream=True)
    return Cost(
        statistics.median([each.ttft_s for each in alone]) * 1e3,
        statistics.median([each.ttft_s for each in eight]) * 1e3,
        1 / request_s,
        None if request_cpu_s is None else request_cpu_s * 1e3,
        None if stream_cpu_s is None else stream_cpu_s * 1e3,
    )


def _costs(number: int) -> list[Message]:
    """One system prompt, and a question like no other."""
    return _chat(_text("cost", COST_SYSTEM), _text(f"cost {number}", COST_USER))


# Conversations.


@dataclass(frozen=True)
class Conversations:
    """Sizes are tokens. A conversation begins some time within `begin_s`, its user thinks `think_s` in the mean."""

    num: int = 60
    turns: int = 6
    systems: int = 4
    system_tokens: int = 512
    user_tokens: int = 64
    answer_tokens: int = 32
    begin_s: float = 3.0
    think_s: float = 0.3
    seed: int = 1


async def turns(way: Way, load: Conversations) -> list[Reply]:
    """Each conversation goes on when its answer is there and its user has thought."""
    drawn = random.Random(load.seed)
    replies = list[Reply]()

    async def talk(number: int, waits_s: Sequence[float]) -> None:
        messages = [
            {"role": "system", "content": _text(f"{load.seed} {number % load.systems}", load.system_tokens)}
        ]
        for turn, wait_s in enumerate(waits_s):
            await asyncio.sleep(wait_s)
            text = _text(f"{load.seed} {number} {turn}", load.user_tokens)
            messages.append({"role": "user", "content": text})
            replies.append(await way.ask(messages, load.answer_tokens))
            messages.append({"role": "assistant", "content": replies[-1].text})

    async with asyncio.TaskGroup() as group:
        for number in range(load.num):
            waits_s = [drawn.uniform(0, load.begin_s)]
            waits_s += [
                drawn.expovariate(1 / load.think_s) if load.think_s else 0 for _ in range(load.turns - 1)
            ]
            group.create_task(talk(number, waits_s))
    return checked(replies)


# A trace.


@dataclass(frozen=True)
class Row:
    """One request of a trace: when it comes, its prompt, and the tokens of its answer."""

    at_s: float
    text: str
    max_tokens: int


def rows_of(file: Path, rows: int, *, shrink: int, speed: float) -> list[Row]:
    """The first rows of a trace in Mooncake's form, with lengths divided by `shrink` and times by `speed`.
    Equal hash ids are equal text. Raises ConfigError for a file that is no such trace."""
    chars, found = ID_TOKENS // shrink * TOKEN_CHARS, []
    try:
        with file.open("rb") as lines:
            for line, _ in zip(lines, range(rows), strict=False):
                row = msgspec.json.decode(line)
                text = "".join(_text(f"id {name}", ID_TOKENS // shrink) for name in row["hash_ids"])
                text = text[: min(len(row["hash_ids"]) * chars, row["input_length"] // shrink * TOKEN_CHARS)]
                found.append(Row(row["timestamp"] / 1e3 / speed, text, max(1, row["output_length"] // shrink)))
    except OSError as error:
        raise ConfigError(f"--trace {file}: {error.strerror}") from None
    except (msgspec.DecodeError, KeyError, TypeError):
        raise ConfigError(f"--trace {file}: line {len(found) + 1} is no request of a trace") from None
    return found


async def trace(way: Way, rows: Sequence[Row]) -> list[Reply]:
    """Each request at its time, whatever has been answered by then."""
    begin, late_s = time.perf_counter(), 0.0

    async def one(row: Row) -> Reply:
        nonlocal late_s
        await asyncio.sleep(begin + row.at_s - time.perf_counter())
        sent_s = time.perf_counter() - begin
        late_s = max(late_s, sent_s - row.at_s)
        reply = await way.ask([{"role": "user", "content": row.text}], row.max_tokens)
        reply.ttft_s += sent_s - row.at_s
        return reply

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(row)) for row in rows]
    return checked(task.result() for task in tasks)


def endless(rows: Sequence[Row]) -> float:
    """The hit rate of one server that forgets nothing, if it gets one prompt after another."""
    blocks = Blocks(1 << 40)
    cached = total = 0
    for row in rows:
        text = rendered([{"role": "user", "content": row.text}])
        names, tokens = named(text), length_of(text)
        cached += blocks.matched(names[: (tokens - 1) // BLOCK_TOKENS]) * BLOCK_TOKENS
        total += tokens
        blocks.use(names)
    return cached / total


def _chat(system: str, user: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _text(name: str, tokens: int) -> str:
    """Words that are drawn by a name: equal names, equal text."""
    drawn = b""
    for part in range(-(-tokens // 128)):
        drawn += hashlib.blake2b(f"{part} {name}".encode()).digest()
    words = [WORDS[half] for byte in drawn for half in (byte >> 4, byte & 15)]
    return "".join(words[:tokens])
