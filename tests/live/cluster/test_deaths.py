"""What the death of a node costs: one attempt of each request that it takes part in, and no token."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.cli.models import bytes_folder
from isthmus.config import Config
from isthmus.core.conductor import NodeJoined, NodeLeft, RequestArrived, RequestFailed, Route
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.errors import UnavailableError
from isthmus.core.node import SEVERED_NS
from isthmus.core.types import Job, ModelCard, NodeId, RequestId, Role, Sampling
from isthmus.facts import NodeFacts, Sequences, rules_of
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of, recipe_of
from isthmus.live.messenger import Handler, Session
from isthmus.live.peers.messages import PeerMessage
from tests.memory_network import MemoryNetwork
from tests.served import Served, node_pid, serve, streamed
from tests.tape import Entry, MemoryTape

RECIPE = recipe_of(bytes_folder(), bytes_folder(), 16)
CURVE: dict[str, Any] = {
    "kv_token_bytes": 2048,
    "num_layers": 4,
    "prefill_token_s": 1e-4,
    "decode_fixed_s": 0.004,
}


def kill(served: Served, victim: str, flight: Path, times: int) -> None:
    """And waits until it has joined once more. The head hears of it before other nodes can say that they lost it."""
    processes = set(served.children().values())
    dead = node_pid(processes, victim)
    for other in processes - {dead}:
        os.kill(other, signal.SIGSTOP)
    os.kill(dead, signal.SIGKILL)
    served.wait_until(lambda: left(flight, victim) == times, f"{victim} is missed")
    for other in processes - {dead}:
        os.kill(other, signal.SIGCONT)
    served.wait_until(lambda: joined(flight, victim) == times + 1, f"{victim} comes back")


def entries(flight: Path) -> list[Entry]:
    return [
        msgspec.json.decode(line, type=Entry)
        for line in flight.read_bytes().splitlines(True)[1:]
        if line.endswith(b"\n")
    ]


def joined(flight: Path, node: str) -> int:
    return sum(isinstance(each.event, NodeJoined) and each.event.node == node for each in entries(flight))


def left(flight: Path, node: str) -> int:
    return sum(isinstance(each.event, NodeLeft) and each.event.node == node for each in entries(flight))


def heard(flight: Path, kind: type) -> int:
    return sum(isinstance(each.event, kind) for each in entries(flight))


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_death_costs_one_attempt(victim: str, tmp_path: Path) -> None:
    """kill -9, twice, while some prompts wait, some are computed, some are handed over and some answers go on."""
    flight = tmp_path / "flight.jsonl"
    roles = {"prefill": 2, "decode": 1} if victim == "decode-0" else {"prefill": 1, "decode": 2}
    sections = {"roles": roles, "engine": {"kind": "emulated", "cost": CURVE, "token_budget": 256}}
    prompts = [[at % 200 for at in range(seed, seed + 100 + 80 * seed)] for seed in range(26)]
    late = prompts[24:]
    with (
        serve(tmp_path, sections, "--record", str(flight)) as served,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        begun = [threading.Event() for _ in prompts]

        def ask(prompt: list[int]) -> Future[list[int]]:
            return pool.submit(streamed, served, prompt, 150, begun[prompts.index(prompt)])

        def come(count: int) -> None:
            served.wait_until(lambda: heard(flight, RequestArrived) == count, f"{count} prompts came")

        asked = [ask(prompt) for prompt in prompts[:24]]
        come(24)
        for times in (1, 2):
            some = 4 * times
            served.wait_until(
                lambda some=some: sum(map(threading.Event.is_set, begun)) >= some, "answers go on"
            )
            # A machine that is slow to kill it, and not to answer, would find nothing left of it to lose.
            os.kill(node_pid(served.children().values(), victim), signal.SIGSTOP)
            asked.append(ask(late[times - 1]))
            come(24 + times)
            kill(served, victim, flight, times)
        for prompt, answer in zip(prompts, asked, strict=True):
            assert answer.result() == expected_tokens(RECIPE, prompt, 150, stop_tokens=(257,))
        log = entries(flight)
    routes: Counter[RequestId] = Counter()
    gone: list[NodeId] = []
    for entry in log:
        if isinstance(entry.event, NodeLeft):
            gone.append(entry.event.node)
        routes.update(action.request for action in entry.actions if isinstance(action, Route))
        assert max(routes.values(), default=0) <= 1 + len(gone), "a death cost more than one attempt"
    assert gone == [victim] * 2
    assert len(routes) == len(prompts) and max(routes.values()) > 1


class Deaf(MemoryNetwork):
    """Nodes cannot be reached by each other."""

    async def connect(
        self, address: str, types: Any, handler: Handler, *, timeout_s: float, connections: int | None = None
    ) -> Session:
        if types is PeerMessage:
            raise ConnectionRefusedError("nobody listens")
        return await super().connect(address, types, handler, timeout_s=timeout_s, connections=connections)


def test_a_node_that_cannot_be_reached_is_given_time_to_be_missed() -> None:
    """Whoever finds a dead node before the head does would use up all attempts with it."""

    async def attempts() -> list[tuple[int, int]]:
        """When each was routed, and when it failed."""
        network, tape = Deaf(), MemoryTape()
        card = ModelCard("model", 1000, 1000, created_s=0)
        rules = rules_of(Config())
        head = Head(rules, card, silence_s=30, rejoin_s=30, recorder=tape, network=network)
        join, curve = await head.open("127.0.0.1", 0), Curve(**CURVE)
        async with asyncio.TaskGroup() as group:
            for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
                facts = NodeFacts(
                    NodeId(name), role, curve, 64, 16, token_budget=64, sequences=Sequences(4, 4, 4)
                )
                engine = EmulatedEngine(
                    Recipe("model", layout_of(16), 1000), compile_cost(curve), 64, max_length=1000
                )
                options = NodeOptions(facts, join, transfer_s=30)
                group.create_task(NodeProcess(engine, options, Runtime(network)).run())
            await head.wait_for([NodeId("p"), NodeId("d")])
            stream = head.submit(Job(RequestId("a"), tuple(range(40)), 10, Sampling()))
            with pytest.raises(UnavailableError, match="attempt 3 of 3"):
                [batch async for batch in stream]
            await head.close()
        routed = [each.at_ns for each in tape.entries for action in each.actions if isinstance(action, Route)]
        failed: dict[int, int] = {}  # both nodes may say so of an attempt
        for each in tape.entries:
            if isinstance(each.event, RequestFailed):
                failed.setdefault(each.event.attempt, each.at_ns)
        return list(zip(routed, failed.values(), strict=True))

    found = asyncio.run(asyncio.wait_for(attempts(), 120))
    assert len(found) == 3 and all(failed - routed >= SEVERED_NS for routed, failed in found)
