"""What nodes report of their blocks: the conductor's picture, what the nodes decided, and what lies where are one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.config import Config
from isthmus.core.attempts import BlocksEvicted, BlocksStored
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.types import BlockName, Job, ModelCard, NodeId, RequestId, Role, Sampling, Tier
from isthmus.facts import NodeFacts, Sequences, rules_of
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import NodeOptions, OnLost, Runtime
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of
from isthmus.live.store import Arena, Log, Shape, Store
from tests.memory_network import MemoryNetwork
from tests.tape import MemoryTape

RECIPE = Recipe("model", layout_of(16), 1000)
CURVE = Curve(kv_token_bytes=2048, num_layers=2, prefill_token_s=1e-6, decode_fixed_s=1e-5)
P, D = NodeId("p-0"), NodeId("d-0")
DRAM, DISK = 6, 10
PROMPTS = [tuple(range(start, start + 81)) for start in (1, 100, 200, 300, 400)]  # five blocks each
ORDER = (0, 1, 2, 0, 3, 0, 1, 4, 4, 2, 1)

Where = dict[BlockName, Tier]


def facts_of(node: NodeId, role: Role) -> NodeFacts:
    return NodeFacts(
        node, role, CURVE, 64, 16, dram_blocks=DRAM, ssd_blocks=DISK, transit_blocks=8, token_budget=64,
        sequences=Sequences(4, 4, 4),
    )  # fmt: skip


def store_opener(folder: Path) -> Callable[[OnLost], Store]:
    layout = RECIPE.layout
    shape = Shape(layout.num_layers, layout.slice_bytes)

    def opened(on_lost: OnLost) -> Store:
        folder.mkdir()
        return Store(Arena(shape, DRAM + 8), Log(folder / "log", shape, 4 << 20, b"test"), on_lost=on_lost)

    return opened


class Picture:
    """Of one node: as the conductor sees it, as it was decided there, and as its store has it."""

    def __init__(self, head: Head, process: NodeProcess) -> None:
        self._view, self._process = head._desk.conductor.view, process

    def conductor(self) -> Where:
        index = self._view.index
        mask = self._view.nodes[self._process.node.node].bit
        held = [name for name, nodes in index._held.items() if nodes & mask]
        return {name: Tier.DISK if index._disk.get(name, 0) & mask else Tier.MEMORY for name in held}

    def node(self) -> Where:
        tiers = self._process.node.tiers
        assert tiers is not None
        return dict.fromkeys(tiers.dram.held, Tier.MEMORY) | dict.fromkeys(tiers.ssd.held, Tier.DISK)

    def store(self) -> Where:
        cache = self._process._cache
        assert cache is not None
        names = self.conductor().keys() | self.node().keys()
        found = {name: tier for name in names if (tier := cache.store.tier(name)) is not None}
        known = sum(tier is Tier.MEMORY for tier in found.values())
        return found if known == cache.store.stat().memory.num_blocks else {}

    def is_settled(self) -> bool:
        """Nothing is under way, and everybody agrees."""
        try:
            self._process.node.check_idle()
        except AssertionError:
            return False
        return self.conductor() == self.node() == self.store()

    async def settle(self) -> None:
        async with asyncio.timeout(60):
            while not self.is_settled():
                await asyncio.sleep(0.005)


async def answer(head: Head, number: int, prompt: Sequence[int]) -> list[int]:
    job = Job(RequestId(str(number)), tuple(prompt), 4, Sampling(temperature=0.0))
    return [generated.token async for batch in head.submit(job) for generated in batch]


async def serve(folder: Path) -> MemoryTape:
    network, tape = MemoryNetwork(), MemoryTape()
    card = ModelCard("model", 1000, 1000, created_s=0)
    head = Head(rules_of(Config()), card, silence_s=30, rejoin_s=30, recorder=tape, network=network)
    join = await head.open("127.0.0.1", 0)
    processes = []
    async with asyncio.TaskGroup() as group:
        for node, role in ((P, Role.PREFILL), (D, Role.DECODE)):
            engine = EmulatedEngine(RECIPE, compile_cost(CURVE), 64, max_length=1000)
            options = NodeOptions(facts_of(node, role), join, transfer_s=30)
            opener = store_opener(folder / node)
            processes.append(NodeProcess(engine, options, Runtime(network), opener))
            group.create_task(processes[-1].run())
        await head.wait_for([P, D])
        pictures = [Picture(head, process) for process in processes]
        for number, prompt in enumerate(ORDER):
            assert await answer(head, number, PROMPTS[prompt]) == expected_tokens(RECIPE, PROMPTS[prompt], 4)
            for picture in pictures:
                await picture.settle()
        tiers = set(pictures[0].conductor().values())
        await head.close()
    assert tiers == {Tier.MEMORY, Tier.DISK}
    return tape


def test_the_conductor_knows_in_which_tier_each_block_is(tmp_path: Path) -> None:
    tape = asyncio.run(asyncio.wait_for(serve(tmp_path), 60))
    where: Where = {}
    moves: set[tuple[Tier | None, Tier | None]] = set()
    for entry in tape.entries:
        match entry.event:
            case BlocksStored(node, names, tier) if node == P:
                moves |= {(where.get(name), tier) for name in names}
                where |= dict.fromkeys(names, tier)
            case BlocksEvicted(node, names) if node == P:
                moves |= {(where.pop(name), None) for name in names}
    stored, sunk, raised = (None, Tier.MEMORY), (Tier.MEMORY, Tier.DISK), (Tier.DISK, Tier.MEMORY)
    assert moves >= {stored, sunk, raised, (Tier.DISK, None)}, "each way a block can go was told"
