"""`python -m benchmarks vllm-nodes`: vLLM as a node of a running cluster, beside the same vLLM alone.

The same prompts go to both in turns, so many at once, greedy and streamed: whether the tokens are the same ones, and
how much later the first and each further one come. Prompts are random token ids of log-uniform lengths, some of which
begin alike; those of each turn are new. The server alone is one that no node has, else it has in its cache what the
node's side asked for.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
from rich.table import Table

from isthmus.core.errors import StartError

SHORTEST = 5
ALIKE = 0.4
"""So many prompts begin with tokens of one that all share."""
FIRST_TOKEN = 3
"""Lower ids may be special."""


@dataclass(frozen=True)
class Side:
    """A server: `model`, what it calls its model."""

    name: str
    url: str
    model: str


@dataclass(frozen=True)
class Plan:
    """`vocabulary`: token ids below it are drawn; `tokens`: of each answer; `longest`, in tokens, of the prompts."""

    sides: tuple[Side, ...]
    prompts: int = 200
    shortest: int = SHORTEST
    longest: int = 3000
    concurrency: int = 8
    tokens: int = 16
    rounds: int = 3
    vocabulary: int = 250
    seed: int = 1


@dataclass(frozen=True)
class Answer:
    """`ttft_s`: until its first token; `gap_s`: the mean time between its tokens."""

    tokens: tuple[int, ...]
    ttft_s: float
    gap_s: float


@dataclass(frozen=True)
class Round:
    """Of each side, the answers to the same prompts in their order."""

    answers: tuple[tuple[Answer, ...], ...]

    def differing(self) -> int:
        return sum([len({answer.tokens for answer in same}) > 1 for same in zip(*self.answers, strict=True)])


def run(plan: Plan, report: Callable[[str], None]) -> list[Round]:
    """Raises StartError for a server that does not answer as it should."""
    found = []
    for number in range(plan.rounds):
        prompts = prompts_of(plan, number)
        order = range(len(plan.sides)) if number % 2 == 0 else reversed(range(len(plan.sides)))
        answers: dict[int, tuple[Answer, ...]] = {}
        for at in order:
            answers[at] = asyncio.run(_ask_all(plan, plan.sides[at], prompts))
        found.append(Round(tuple(answers[at] for at in range(len(plan.sides)))))
        report(f"turn {number + 1}: {found[-1].differing()} of {plan.prompts} answers differ")
    return found


def prompts_of(plan: Plan, number: int) -> list[list[int]]:
    """Of one turn. Which lengths they have is the same in each."""
    lengths, tokens = random.Random(plan.seed), random.Random(f"{plan.seed} {number}")
    span = range(FIRST_TOKEN, plan.vocabulary)
    shared = tokens.choices(span, k=plan.longest)
    found = []
    for _ in range(plan.prompts):
        length = int(plan.shortest * (plan.longest / plan.shortest) ** lengths.random())
        alike = lengths.randrange(length + 1) if lengths.random() < ALIKE else 0
        found.append(shared[:alike] + tokens.choices(span, k=length - alike))
    return found


async def _ask_all(plan: Plan, side: Side, prompts: Sequence[list[int]]) -> tuple[Answer, ...]:
    left, found = list(range(len(prompts)))[::-1], dict[int, Answer]()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def client() -> None:
            while left:
                at = left.pop()
                found[at] = await _ask(session, side, prompts[at], plan.tokens)

        try:
            await asyncio.gather(*[client() for _ in range(plan.concurrency)])
        except (aiohttp.ClientError, OSError) as error:
            raise StartError(f"{side.name} at {side.url}: {error}") from None
    return tuple(found[at] for at in range(len(prompts)))


async def _ask(session: aiohttp.ClientSession, side: Side, prompt: list[int], count: int) -> Answer:
    body = {
        "model": side.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    tokens, times, began = list[int](), list[float](), time.perf_counter()
    async with session.post(f"{side.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise StartError(f"{side.name} at {side.url}: HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise StartError(f"{side.name} at {side.url}: {chunk['error']}")
            new = [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
            if new:
                times.append(time.perf_counter())
                tokens += new
    if len(tokens) != count:
        raise StartError(f"{side.name} at {side.url}: {len(tokens)} tokens, not {count}")
    return Answer(tuple(tokens), times[0] - began, (times[-1] - times[0]) / max(1, count - 1))


def table(plan: Plan, rounds: Sequence[Round]) -> Table:
    """Medians over all answers, and what each side adds to the last one: the median of the answers' differences."""
    found = Table(
        title=f"{plan.prompts} prompts of {plan.shortest} to {plan.longest} tokens, {plan.concurrency} at once, "
        f"{plan.tokens} tokens each, {len(rounds)} turns: {sum([each.differing() for each in rounds])} answers differ"
    )
    for head in ("side", "TTFT ms", "token ms", "adds to TTFT ms", "adds to a token ms"):
        found.add_column(head, justify="left" if head == "side" else "right")
    for at, side in enumerate(plan.sides):
        own = [answer for each in rounds for answer in each.answers[at]]
        base = [answer for each in rounds for answer in each.answers[-1]]
        pairs = list(zip(own, base, strict=True))
        found.add_row(
            side.name,
            f"{1000 * statistics.median([answer.ttft_s for answer in own]):.1f}",
            f"{1000 * statistics.median([answer.gap_s for answer in own]):.2f}",
            f"{1000 * statistics.median([mine.ttft_s - other.ttft_s for mine, other in pairs]):+.1f}",
            f"{1000 * statistics.median([mine.gap_s - other.gap_s for mine, other in pairs]):+.2f}",
        )
    return found
