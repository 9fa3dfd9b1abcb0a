"""A head and nodes in one event loop: what nodes report of their blocks, a node that takes another role, and nodes that
cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.attempts import BlocksEvicted, BlocksStored, Convert
from isthmus.core.conductor import RequestFailed, RoleChanged, Route, SendOrder
from isthmus.core.cost import Curve
from isthmus.core.errors import UnavailableError
from isthmus.core.node import SEVERED_NS
from isthmus.core.types import BlockName, Job, NodeId, RequestId, Role, Sampling, Tier
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import OnLost
from isthmus.live.engine.emulated import expected_tokens
from isthmus.live.messenger import Handler, Session
from isthmus.live.peers.messages import PeerMessage
from isthmus.live.store import Arena, Log, Shape, Store
from tests.inside import decided_of, stored_of
from tests.live.cluster.kit import SMALL, STEADY, in_memory
from tests.memory_network import MemoryNetwork

CURVE = Curve(kv_token_bytes=2048, num_layers=2, prefill_token_s=1e-6, decode_fixed_s=1e-5)


async def answer(head: Head, name: str, prompt: Sequence[int], count: int = 10) -> list[int]:
    job = Job(RequestId(name), tuple(prompt), count, Sampling(temperature=0.0))
    return [generated.token async for batch in head.submit(job) for generated in batch]


# Blocks: the conductor's picture, what a node decided, and what lies where are one.

P = NodeId("p-0")
DRAM, DISK = 6, 10
FIVE_BLOCKS = [tuple(range(start, start + 81)) for start in (1, 100, 200, 300, 400)]
ORDER = (0, 1, 2, 0, 3, 0, 1, 4, 4, 2, 1)


def store_opener(folder: Path) -> Callable[[OnLost], Store]:
    shape = Shape(SMALL.layout.num_layers, SMALL.layout.slice_bytes)

    def opened(on_lost: OnLost) -> Store:
        folder.mkdir()
        return Store(Arena(shape, DRAM + 8), Log(folder / "log", shape, 4 << 20, b"test"), on_lost=on_lost)

    return opened


def believed_of(head: Head, process: NodeProcess) -> dict[BlockName, Tier]:
    view = head._desk.conductor.view
    mask = view.nodes[process.node.node].bit
    held = [name for name, nodes in view.index._held.items() if nodes & mask]
    return {name: Tier.DISK if view.index._disk.get(name, 0) & mask else Tier.MEMORY for name in held}


def is_settled(head: Head, process: NodeProcess) -> bool:
    """Nothing is under way, and everybody agrees."""
    try:
        process.node.check_idle()
    except AssertionError:
        return False
    return believed_of(head, process) == decided_of(process) == stored_of(process)


async def test_the_conductor_knows_in_which_tier_each_block_is(tmp_path: Path) -> None:
    tiers = {"dram_blocks": DRAM, "ssd_blocks": DISK, "transit_blocks": 8}
    roles = {P: Role.PREFILL, "d-0": Role.DECODE}
    opener_of = lambda name: store_opener(tmp_path / name)  # noqa: E731
    async with in_memory(roles, CURVE, opener_of=opener_of, **tiers) as (head, nodes, tape):
        for number, at in enumerate(ORDER):
            prompt = FIVE_BLOCKS[at]
            assert await answer(head, str(number), prompt, 4) == expected_tokens(SMALL, prompt, 4)
            while not all(is_settled(head, process) for process in nodes.values()):
                await asyncio.sleep(0.005)
        assert set(believed_of(head, nodes[P]).values()) == {Tier.MEMORY, Tier.DISK}
    where = dict[BlockName, Tier]()
    moves: set[tuple[Tier | None, Tier | None]] = set()
    for event in [entry.event for entry in tape.entries]:
        match event:
            case BlocksStored(node, names, tier) if node == P:
                moves |= {(where.get(name), tier) for name in names}
                where |= dict.fromkeys(names, tier)
            case BlocksEvicted(node, names) if node == P:
                moves |= {(where.pop(name), None) for name in names}
    stored, sunk, raised = (None, Tier.MEMORY), (Tier.MEMORY, Tier.DISK), (Tier.DISK, Tier.MEMORY)
    assert moves >= {stored, sunk, raised, (Tier.DISK, None)}, "each way a block can go was told"


async def test_a_converted_node_decodes() -> None:
    """It takes its new role in place while the cluster serves, with the limits of that role."""
    prompts = [tuple(range(start, start + 40 + start)) for start in (1, 60, 120, 180)]

    roles = {"p-0": Role.PREFILL, "p-1": Role.PREFILL, "d-0": Role.DECODE}
    async with in_memory(roles, CURVE) as (head, nodes, tape):
        answers = [await answer(head, f"before-{at}", prompt) for at, prompt in enumerate(prompts)]
        head._act(SendOrder(NodeId("p-1"), Convert(NodeId("p-1"), Role.DECODE)), 0)
        while not any(isinstance(entry.event, RoleChanged) for entry in tape.entries):
            await asyncio.sleep(0.001)
        found = {node: role for node, (role, *_) in head.nodes().items()}
        assert found == roles | {"p-1": Role.DECODE}
        asked = [answer(head, f"after-{at}", prompt) for at, prompt in enumerate(prompts)]
        answers += await asyncio.gather(*asked)
        assert nodes["p-1"].node.scheduler.limits.max_sequences == 2
    assert answers == 2 * [expected_tokens(SMALL, prompt, 10) for prompt in prompts]
    routes = [action for entry in tape.entries for action in entry.actions if isinstance(action, Route)]
    before, after = routes[:4], routes[4:]
    assert {route.prefill for route in before} == {"p-0", "p-1"}
    assert {route.decode for route in before} == {"d-0"}
    assert {route.prefill for route in after} == {"p-0"} and {route.decode for route in after} == {"p-1", "d-0"}


class Deaf(MemoryNetwork):
    """Nodes cannot be reached by each other."""

    async def connect(
        self, address: str, types: Any, handler: Handler, *, timeout_s: float, connections: int | None = None
    ) -> Session:
        if types is PeerMessage:
            raise ConnectionRefusedError("nobody listens")
        return await super().connect(address, types, handler, timeout_s=timeout_s, connections=connections)


async def test_a_node_that_cannot_be_reached_is_given_time_to_be_missed() -> None:
    """Whoever finds a dead node before the head does would use up all attempts with it."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    async with in_memory(roles, Curve(**STEADY), network=Deaf()) as (head, _, tape):
        with pytest.raises(UnavailableError, match="attempt 3 of 3"):
            await answer(head, "a", range(40))
    routed = [each.at_ns for each in tape.entries for action in each.actions if isinstance(action, Route)]
    failed: dict[int, int] = {}  # both nodes may say so of an attempt
    for each in tape.entries:
        if isinstance(each.event, RequestFailed):
            failed.setdefault(each.event.attempt, each.at_ns)
    assert len(routed) == 3
    assert all(end - begin >= SEVERED_NS for begin, end in zip(routed, failed.values(), strict=True))
