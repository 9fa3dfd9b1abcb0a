"""`python -m benchmarks lending`: requests within their limits on nodes that lend each other memory, and on the same
nodes that do not.

Real processes and sockets; the engine is emulated, at the speed of a curve, so that the machine that measures does not
matter, or a real model's. Two loads of equal arrivals: many short and few very long requests, and requests of one
length. Every request fits into one node's memory, so nodes that do not lend serve all of them too: the long ones are no
longer than what such nodes are for. Policies take turns within a round, each in a cluster of its own.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from rich.table import Table

from benchmarks.served import served
from isthmus.bench import BenchError, serve
from isthmus.live.engine.spec import kv_layout, read_spec

BLOCK_SIZE = 16
CURVE = {
    "kv_token_bytes": 4096, "num_layers": 4, "prefill_token_s": 2e-4, "decode_fixed_s": 0.025,
    "decode_sequence_s": 2e-4, "decode_context_s": 1e-6,
}  # fmt: skip
"""A node of the emulated engine: 5,000 prompt tokens a second, and 30 ms for a step of a dozen requests."""
LOADS = ("mixed", "equal")


class Plan(msgspec.Struct, frozen=True):
    """`model`: of the real engine, None emulates one. `tokens`: of KV memory of each node. `rate`: requests a second,
    a `long_share` of which are long in the mixed load; `ttft_s`, `tbt_s`: a request's limits, the second for the mean
    time between its tokens."""

    policies: tuple[str, ...] = ("none", "isthmus")
    loads: tuple[str, ...] = LOADS
    nodes: int = 4
    tokens: int = 2048
    rate: float = 12.0
    long_share: float = 0.03
    seconds: float = 20.0
    ttft_s: float = 1.5
    tbt_s: float = 0.1
    rounds: int = 2
    seed: int = 0
    model: Path | None = None


class Asked(msgspec.Struct, frozen=True):
    """One request: when it is sent, and its lengths in tokens."""

    at_s: float
    prompt: int
    output: int
    is_long: bool


class Answer(msgspec.Struct, frozen=True):
    """Seconds; `tbt_s`: mean between its tokens. `error`: why there is none, then the times mean nothing."""

    is_long: bool
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    error: str = ""


class Turn(msgspec.Struct, frozen=True):
    """One policy under one load. `asked`: questions for attention; `preempted`: attempts that lost their memory."""

    load: str
    policy: str
    answers: list[Answer]
    wall_s: float
    tokens: int
    asked: int
    preempted: int


def arrivals(plan: Plan, load: str, number: int) -> list[Asked]:
    """The same for all policies. Short: 64 to 192 and 32 to 96 tokens; long: 65 to 75 % of a node's memory and 10 to
    15 %. Equal: 128 and 64 tokens."""
    draw, found, at_s = random.Random(f"{plan.seed}/{load}/{number}"), list[Asked](), 0.0
    while (at_s := at_s + draw.expovariate(plan.rate)) < plan.seconds:
        if load == "equal":
            found.append(Asked(at_s, 128, 64, False))
        elif draw.random() < plan.long_share:
            prompt, output = draw.uniform(0.65, 0.75), draw.uniform(0.10, 0.15)
            found.append(Asked(at_s, int(plan.tokens * prompt), int(plan.tokens * output), True))
        else:
            found.append(Asked(at_s, draw.randint(64, 192), draw.randint(32, 96), False))
    return found


def run(plan: Plan, report: Callable[[str], None] = lambda line: None) -> list[Turn]:
    """Raises BenchError."""
    if unknown := [load for load in plan.loads if load not in LOADS]:
        raise BenchError(f"there is no load {unknown[0]}: known are {', '.join(LOADS)}")
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="isthmus-lending-") as name:
        for number in range(plan.rounds):
            for load in plan.loads:
                asked = arrivals(plan, load, number)
                for policy in plan.policies:
                    turns.append(asyncio.run(_turn(plan, Path(name), load, policy, asked, number)))
                    report(_line(plan, turns[-1]))
    return turns


async def _turn(plan: Plan, home: Path, load: str, policy: str, asked: Sequence[Asked], number: int) -> Turn:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        served(_config(plan, home, policy), home / "serve.log") as (url, _),
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        server = serve.Server(url, await serve.ask_model(session, url))
        loop = asyncio.get_running_loop()
        began = loop.time()
        asking = [
            loop.create_task(_ask(session, server, each, began, f"{plan.seed}/{load}/{number}/{at}"))
            for at, each in enumerate(asked)
        ]
        answers = [await each for each in asking]
        wall_s = loop.time() - began
        await asyncio.sleep(serve.BEAT_S)
        async with session.get(f"{url}/metrics") as reply:
            metrics = await reply.text()
    tokens = sum([each.output for each, answer in zip(asked, answers, strict=True) if not answer.error])
    counts = [total(metrics, name) for name in ("attention_asked_total", "num_preemptions_total")]
    return Turn(load, policy, answers, wall_s, tokens, *counts)


async def _ask(
    session: aiohttp.ClientSession, server: serve.Server, asked: Asked, began: float, seed: str
) -> Answer:
    await asyncio.sleep(max(0.0, began + asked.at_s - asyncio.get_running_loop().time()))
    row = serve.Row(asked.prompt, asked.output, 1, 1)
    prompt = list(random.Random(seed).randbytes(asked.prompt))
    try:
        stream = serve.read_stream(
            await serve.ask(session, server.url, serve.body_of(server, row, prompt)), row
        )
    except BenchError as error:
        return Answer(asked.is_long, error=str(error))
    first, last = stream.token_times_s[0], stream.token_times_s[-1]
    return Answer(asked.is_long, first - stream.sent_s, (last - first) / (asked.output - 1))


def _config(plan: Plan, home: Path, policy: str) -> Path:
    engine: dict[str, Any] = {"kind": "emulated", "cost": CURVE}
    token_bytes = CURVE["kv_token_bytes"]
    if plan.model is not None:
        engine = {"dtype": "float32", "threads": 1}
        token_bytes = kv_layout(read_spec(plan.model), "float32", BLOCK_SIZE).block_bytes // BLOCK_SIZE
    values = {
        "port": 0,
        "roles": {"prefill": 0, "decode": 0, "mixed": plan.nodes},
        "engine": engine
        | {"block_size": BLOCK_SIZE, "kv_memory": plan.tokens * token_bytes, "max_sequences": 64},
        "cache": {"dram": 0},
        "limits": {"silence_s": 30},  # a machine that is measured is busy
    }
    if policy != "none":
        values["lending"] = {"policy": policy}
    if plan.model is not None:
        values["model"] = str(plan.model)
    path = home / "lending.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def total(metrics: str, name: str) -> int:
    """Over all nodes."""
    lines = [line for line in metrics.splitlines() if line.startswith(f"isthmus_{name}{{")]
    return int(sum([float(line.rsplit(" ", 1)[1]) for line in lines]))


def within(plan: Plan, answers: Sequence[Answer]) -> int:
    """How many came in time."""
    return sum([not a.error and a.ttft_s <= plan.ttft_s and a.tbt_s <= plan.tbt_s for a in answers])


def _line(plan: Plan, turn: Turn) -> str:
    return (
        f"{turn.load}, {turn.policy}: {within(plan, turn.answers)} of {len(turn.answers)} within their limits"
    )


def ratios(plan: Plan, turns: Sequence[Turn], load: str, policy: str) -> list[float]:
    """Requests in time of a policy over those of the first one, round by round."""
    first = [
        within(plan, turn.answers) for turn in turns if turn.load == load and turn.policy == plan.policies[0]
    ]
    ours = [within(plan, turn.answers) for turn in turns if turn.load == load and turn.policy == policy]
    return [a / max(1, b) for a, b in zip(ours, first, strict=True)]


def table(plan: Plan, turns: Sequence[Turn]) -> Table:
    """Sums over the rounds."""
    first = plan.policies[0]
    found = Table(
        "load", "lending", "requests", "within limits", "goodput /s", f"/ {first}", "of the long ones", "failed",
        "P50 TTFT s", "P90 TTFT s", "tokens/s", "questions", "pre-empted",
        title=f"{plan.nodes} nodes of {plan.tokens} tokens, {plan.rate:g} requests/s; TTFT <= {plan.ttft_s:g} s, "
        f"mean TBT <= {1000 * plan.tbt_s:g} ms",
    )  # fmt: skip
    for load in plan.loads:
        for policy in plan.policies:
            its = [turn for turn in turns if turn.load == load and turn.policy == policy]
            answers = [answer for turn in its for answer in turn.answers]
            long, wall_s = [a for a in answers if a.is_long], sum([turn.wall_s for turn in its])
            good = within(plan, answers)
            ttfts = sorted([a.ttft_s for a in answers if not a.error]) or [0.0]
            found.add_row(
                load, policy, str(len(answers)), str(good), f"{good / wall_s:.2f}",
                f"{statistics.median(ratios(plan, turns, load, policy)):.2f}",
                f"{within(plan, long)} of {len(long)}", str(sum([bool(a.error) for a in answers])),
                f"{ttfts[len(ttfts) // 2]:.2f}", f"{ttfts[len(ttfts) * 9 // 10]:.2f}",
                f"{sum([turn.tokens for turn in its]) / wall_s:.0f}",
                str(sum([turn.asked for turn in its])), str(sum([turn.preempted for turn in its])),
            )  # fmt: skip
    return found
