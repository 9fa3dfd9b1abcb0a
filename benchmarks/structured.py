"""Structured output on a real model: generated JSON schemas, whether every answer follows its own, and what that costs.

Each schema is asked for in words and as `response_format`, and without it for as many tokens, in turns of which every
other begins with the one; the prompts are cached before. So the difference in time per token is what the schema takes:
in the first turn with its compilation, later without. Last, a decode node is killed in the middle. All numbers and
lengths in the schemas are bounded: a model this small would write digits without end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.table import Table

from benchmarks.peers.servers import Running, Side, running
from isthmus.bench import BenchError

WORDS = (
    "name",
    "city",
    "age",
    "price",
    "tags",
    "owner",
    "active",
    "score",
    "items",
    "note",
    "kind",
    "size",
    "when",
)
COLOURS = ("red", "green", "blue", "black")
MAX_TOKENS = 1024
"""More than any of these schemas can need."""

START_S = 60.0

Report = Callable[[str], None]
Schema = dict[str, Any]


class Plan(msgspec.Struct, frozen=True):
    """`folder`: where logs are kept; `rounds`: turns of each side."""

    num_schemas: int
    concurrency: int
    rounds: int
    seed: int
    folder: Path


class Answer(msgspec.Struct, frozen=True):
    """`fault`: why it does not follow its schema, "" if it does; `token_ms`: mean time of a token after the first."""

    tokens: int
    ttft_ms: float
    token_ms: float
    fault: str = ""


class Turn(msgspec.Struct, frozen=True):
    """All schemas once. `wall_s`: from the first request to the end of the last."""

    side: str
    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def token_ms(self) -> float:
        """Mean over all tokens after each answer's first."""
        followers = sum(max(0, each.tokens - 1) for each in self.answers)
        return sum(each.token_ms * (each.tokens - 1) for each in self.answers if each.tokens > 1) / followers


# Schemas.


def schemas(num: int, seed: int) -> list[Schema]:
    """Objects of up to five fields, nested up to twice; the same for the same seed."""
    drawn = random.Random(seed)
    return [_object(drawn, 2) for _ in range(num)]


def _object(drawn: random.Random, depth: int) -> Schema:
    names = drawn.sample(WORDS, drawn.randint(1, 5))
    required = [name for name in names if drawn.random() < 0.7] or names[:1]
    properties = {name: _value(drawn, depth) for name in names}
    found = {"type": "object", "properties": properties, "required": required}
    return found | {"additionalProperties": False}


def _value(drawn: random.Random, depth: int) -> Schema:
    kinds = [_text, _choice, _integer, _number, _constant, _date]
    if depth:
        kinds += [_list, _object_below, _either]
    return drawn.choice(kinds)(drawn, depth)


def _text(drawn: random.Random, depth: int) -> Schema:
    if drawn.random() < 0.3:
        return {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}
    return {"type": "string", "minLength": drawn.randint(0, 3), "maxLength": drawn.randint(8, 40)}


def _choice(drawn: random.Random, depth: int) -> Schema:
    return {"enum": drawn.sample([*COLOURS, 1, 2.5, True, None], 4)}


def _integer(drawn: random.Random, depth: int) -> Schema:
    low = drawn.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + drawn.randint(0, 100_000)}


def _number(drawn: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}


def _constant(drawn: random.Random, depth: int) -> Schema:
    return drawn.choice([{"type": "boolean"}, {"type": "null"}, {"const": drawn.choice(COLOURS)}])


def _date(drawn: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": drawn.choice(["date", "uuid", "ipv4"])}


def _list(drawn: random.Random, depth: int) -> Schema:
    low = drawn.randint(0, 2)
    return {
        "type": "array",
        "items": _value(drawn, depth - 1),
        "minItems": low,
        "maxItems": low + drawn.randint(1, 3),
    }


def _object_below(drawn: random.Random, depth: int) -> Schema:
    return _object(drawn, depth - 1)


def _either(drawn: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(drawn, depth - 1), {"type": "null"}]}


# Asking.


def run(plan: Plan, side: Side, killed: Side | None, report: Report) -> list[Turn]:
    """`killed`: one with several decode nodes, of which one is killed in the midst; None: not done.

    Raises BenchError, StartError.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    wanted = schemas(plan.num_schemas, plan.seed)
    turns: list[Turn] = []
    with running(side, plan.folder / f"{side.name}.log") as server:

        def turn(name: str, lengths: Sequence[int] | None = None) -> Turn:
            return asyncio.run(_turn(server, name, wanted, plan.concurrency, lengths))

        turn("none", [1] * len(wanted))
        for number in range(plan.rounds):
            report(f"round {number + 1} of {plan.rounds}")
            if number % 2:
                turns.append(turn("none", [each.tokens for each in turns[-1].answers]))
            turns.append(turn("schema"))
            if not number % 2:
                turns.append(turn("none", [each.tokens for each in turns[-1].answers]))
    if killed is not None:
        report("a decode node is killed in the midst")
        with running(killed, plan.folder / f"{killed.name}.log") as server:
            turns.append(asyncio.run(_with_a_death(server, wanted, plan.concurrency)))
    return turns


async def _turn(
    server: Running,
    side: str,
    wanted: Sequence[Schema],
    concurrency: int,
    lengths: Sequence[int] | None = None,
    half_way: Callable[[], None] | None = None,
) -> Turn:
    """With `lengths` no schema is given but so many tokens are made. `half_way` is called once, while half of the
    answers are still to come and some are under way."""
    gate, done = asyncio.Semaphore(concurrency), 0

    async def answer(at: int) -> Answer:
        nonlocal done
        async with gate:
            found = await _ask(session, server, wanted[at], lengths[at] if lengths else None)
        done += 1
        if half_way and done == len(wanted) // 2:
            half_way()
        return found

    begin = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=600)) as session:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(at)) for at in range(len(wanted))]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
    return Turn(side, tuple(task.result() for task in tasks), time.perf_counter() - begin)


async def _with_a_death(server: Running, wanted: Sequence[Schema], concurrency: int) -> Turn:
    node = (await _decode_nodes(server, 2))[0]
    pid = _process_of(server.pid, node)
    return await _turn(
        server, f"schema, {node} killed", wanted, concurrency, half_way=lambda: os.kill(pid, signal.SIGKILL)
    )


async def _decode_nodes(server: Running, least: int) -> list[str]:
    """Once there are so many. Raises BenchError when they do not come."""
    until = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until:
            async with session.get(f"{server.url}/status") as reply:
                nodes = (await reply.json())["nodes"]
            if len(found := [node["node"] for node in nodes if node["role"] == "decode"]) >= least:
                return found
            await asyncio.sleep(0.1)
    raise BenchError(f"not {least} decode nodes within {START_S:g} s: --death-options '--decode {least}'")


def _process_of(parent: int, node: str) -> int:
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in children.read_text().split():
            if node.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return int(pid)
    raise BenchError(f"no process of {node} found")


async def _ask(session: aiohttp.ClientSession, server: Running, schema: Schema, length: int | None) -> Answer:
    prompt = f"Make up one example as JSON. It must follow this JSON schema:\n{json.dumps(schema)}"
    form = {"type": "json_schema", "json_schema": {"name": "example", "schema": schema, "strict": True}}
    asked = {"response_format": form} if length is None else {"ignore_eos": True}
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "stream": True}
    body |= {
        "model": server.model,
        "max_tokens": length or MAX_TOKENS,
        "stream_options": {"include_usage": True},
    }
    begin, times, text, tokens = time.perf_counter(), [], "", 0
    async with session.post(f"{server.url}/v1/chat/completions", json=body | asked) as reply:
        if reply.status != 200:
            raise BenchError(f"{server.url} answered {reply.status}: {(await reply.text())[:300]}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise BenchError(f"{server.url} broke off: {event['error']['message']}")
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                times.append(time.perf_counter())
                text += choice["delta"].get("content") or ""
    spread = (times[-1] - times[0]) / max(1, tokens - 1)
    return Answer(tokens, (times[0] - begin) * 1e3, spread * 1e3, "" if length else fault_of(text, schema))


def fault_of(text: str, schema: Schema) -> str:
    """Why `text` does not follow the schema; "" if it does."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except ValueError as error:
        return f"no JSON: {error}: {text[:80]!r}"
    except jsonschema.ValidationError as error:
        return f"{error.json_path}: {error.message}"
    return ""


# What was found.


def table(plan: Plan, turns: Sequence[Turn]) -> Table:
    shown = Table(title=f"{plan.num_schemas} JSON schemas, {plan.concurrency} at a time")
    for head in ("", "answers", "follow their schema", "tokens", "TTFT ms, median", "ms per token", "s in all"):
        shown.add_column(head, justify="left" if not head else "right")
    for turn in turns:
        followed = sum(not each.fault for each in turn.answers)
        shown.add_row(
            turn.side,
            str(len(turn.answers)),
            "–" if turn.side == "none" else str(followed),
            str(sum(each.tokens for each in turn.answers)),
            f"{statistics.median(each.ttft_ms for each in turn.answers):.0f}",
            f"{turn.token_ms:.2f}",
            f"{turn.wall_s:.1f}",
        )
    return shown


def verdict(turns: Sequence[Turn]) -> str:
    """The difference between turns side by side, so that what else the machine did touches both."""
    pairs = zip(*([t.token_ms for t in turns if t.side == side] for side in ("schema", "none")), strict=True)
    added = [schema - none for schema, none in pairs]
    faults = [each.fault for turn in turns for each in turn.answers if each.fault]
    said = f"a schema adds {statistics.median(added):.2f} ms to a token (of {len(added)} turns the median)"
    return said + "".join(f"\nfault: {fault}" for fault in faults)
