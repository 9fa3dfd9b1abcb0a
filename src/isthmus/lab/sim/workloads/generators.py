"""Generates workloads from a specification (`specification.py`) and its seed."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import accumulate, count, islice
from typing import Any

from isthmus.lab.sim.workloads.documents import DocumentPrompts
from isthmus.lab.sim.workloads.specification import Spec, parse
from isthmus.lab.sim.workloads.workload import Request, Workload


def generate(source: str | Mapping[str, Any]) -> Workload:
    """The workload of a specification. Raises ConfigError, one line, for one that cannot be read."""
    name, spec = parse(source)
    gap = _gap(spec.arrivals, spec.cv, spec.random("arrivals"))
    if spec.documents:
        requests = _retrieved(spec, gap)
    elif spec.prefixes or spec.turns != 1.0:
        requests = _conversations(spec, gap)
    else:
        requests = _plain(spec, gap)
    return Workload(name, spec.block_size, list(requests))


def _gap(kind: str, cv: float, rng: random.Random) -> Callable[[], float]:
    """Draws gaps with mean 1."""
    if kind == "poisson":
        return lambda: rng.expovariate(1.0)
    if kind == "gamma":
        # Shape k and scale s have mean k * s and variation k ** -0.5.
        return lambda: rng.gammavariate(cv**-2, cv**2)
    return lambda: 1.0


def _plain(spec: Spec, gap: Callable[[], float]) -> Iterator[Request]:
    """Requests that share nothing."""
    inputs, outputs = spec.random("input"), spec.random("output")
    draw_input, draw_output = spec.input, spec.output
    ns_per_gap = 1e9 / spec.rate
    is_one_of_few, few = spec.random("few"), spec.random("few lengths")
    time = 0.0
    for _ in range(spec.num):
        time += gap()
        if spec.few_input and spec.few_output and is_one_of_few.random() < spec.few:
            yield Request(int(time * ns_per_gap), spec.few_input(few), spec.few_output(few))
            continue
        yield Request(int(time * ns_per_gap), draw_input(inputs), draw_output(outputs))


def _retrieved(spec: Spec, gap: Callable[[], float]) -> Iterator[Request]:
    """Requests that are made of documents."""
    prompts, outputs, time = DocumentPrompts(spec), spec.random("output"), 0.0
    for _ in range(spec.num):
        time += gap()
        num_tokens, blocks, content = prompts.draw()
        arrival_ns, output = int(time * (1e9 / spec.rate)), spec.output(outputs)
        yield Request(arrival_ns, num_tokens, output, blocks, content=content)


class _Conversation:
    """Beginning of the next prompt of a conversation: its tokens and full blocks."""

    __slots__ = ("blocks", "num_tokens")

    def __init__(self, num_tokens: int, blocks: list[int]) -> None:
        self.num_tokens = num_tokens
        self.blocks = blocks


def _conversations(spec: Spec, gap: Callable[[], float]) -> Iterator[Request]:
    """Requests that share prefixes with each other, with those before them in their conversation, or both."""
    inputs, outputs = spec.random("input"), spec.random("output")
    turns = spec.random("turns")
    ids = count()
    begin = _beginnings(spec, ids)
    ns_per_gap = 1e9 * spec.turns / spec.rate
    start = gap() * ns_per_gap
    due: list[tuple[float, int, _Conversation]] = []  # heap: time of the next turn, and a number against ties
    for number in range(spec.num):
        if due and due[0][0] <= start:
            time, _, conversation = heappop(due)
        else:
            time, conversation = start, begin()
            start += gap() * ns_per_gap
        request = _turn(conversation, int(time), spec.input(inputs), spec.output(outputs), spec, ids)
        if turns.random() * spec.turns >= 1.0:
            heappush(due, (time - math.log(1.0 - turns.random()) * spec.think_s * 1e9, number, conversation))
        yield request


def _beginnings(spec: Spec, ids: Iterator[int]) -> Callable[[], _Conversation]:
    """Opens conversations, each with a shared prefix where there are any."""
    if spec.prefixes == 0:
        return lambda: _Conversation(0, [])
    rng = spec.random("prefixes")
    popularity = list(accumulate(rank**-spec.zipf for rank in range(1, spec.prefixes + 1)))
    full_blocks: dict[int, list[int]] = {}

    def begin() -> _Conversation:
        prefix = bisect_left(popularity, rng.random() * popularity[-1])
        if prefix not in full_blocks:
            full_blocks[prefix] = list(islice(ids, spec.prefix_tokens // spec.block_size))
        return _Conversation(spec.prefix_tokens, full_blocks[prefix].copy())

    return begin


def _turn(
    conversation: _Conversation, arrival_ns: int, new_tokens: int, output: int, spec: Spec, ids: Iterator[int]
) -> Request:
    """The next request of a conversation. Its answer becomes part of what is said before the one after."""
    num_tokens = conversation.num_tokens + new_tokens
    num_full, rest = divmod(num_tokens, spec.block_size)
    conversation.blocks += islice(ids, num_full - len(conversation.blocks))
    conversation.num_tokens = num_tokens + output
    # What fills the last block is not known before the next turn: until then it is another block.
    blocks = (*conversation.blocks, next(ids)) if rest else tuple(conversation.blocks)
    return Request(arrival_ns, num_tokens, output, blocks)
