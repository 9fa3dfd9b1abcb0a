"""The simulator's links under live nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from isthmus.core.attempts import key_of
from isthmus.core.blocks import KVLayout
from isthmus.core.conductor import Route
from isthmus.core.node.events import (
    BlocksFetched,
    Event,
    Fetch,
    HandoverComplete,
    LetterReceived,
    Loaded,
    Ship,
)
from isthmus.core.types import NodeId, RequestId
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.node import SimNode, build_node
from isthmus.lab.sim.records import SimJob
from isthmus.lab.sim.transfers import Due, KVTransfers, _Transfer
from isthmus.lab.sim.workloads import Request
from tests.memory_network import MemoryNetwork
from tests.virtual.carried import Carried
from tests.virtual.loop import ARRIVAL, FLOWS, MESSAGE, TRANSFER, ManualLoop
from tests.virtual.mover import Ether, VirtualMover


class VirtualMoves(KVTransfers):
    """Cuts real sessions where the simulator's end."""

    ether: Ether
    num_layers: int
    sources: dict[tuple[int, RequestId], int]
    """Of fetches under way, by the node that fetches."""
    broken_off: set[tuple[int, RequestId]]
    """Fetches of whose end nodes have not heard."""

    def _break_off(self, transfer: _Transfer) -> None:
        """So does the live one, and what is given for it comes to nobody."""
        key = transfer.target.slot, transfer.asked.key
        self.sources.pop(key, None)
        self.broken_off.add(key)
        super()._break_off(transfer)

    def _shipped(self, what: tuple[SimNode, SimNode, Ship]) -> None:
        source, target, ship = what
        weight = len(ship.blocks) * self.num_layers
        self.ether.gate.open(source.slot, target.slot, "shipment", ship.key, weight)
        super()._shipped(what)

    def cut_off(self, one: SimNode, other: SimNode, reason: str = "cut") -> None:
        self.ether.cut(one.slot, other.slot)
        super().cut_off(one, other, reason)


class VirtualLinks:
    """The simulator's `KVTransfers` under the nodes of a `ManualLoop`: their actions take its times."""

    def __init__(self, deployment: Deployment, loop: ManualLoop, layout: KVLayout) -> None:
        self.deployment, self.loop = deployment, loop
        self.nodes: list[SimNode] = [build_node(deployment, slot) for slot in range(len(deployment.nodes))]
        self.slots = {node.facts.node: node.slot for node in self.nodes}
        self.jobs: dict[RequestId, SimJob] = {}
        network, carried = MemoryNetwork(lambda at: loop.call_soon), Carried(self.nodes, layout)
        self.ether = Ether(network, self.slots, carried)
        self._due: Due = []
        self.moves = VirtualMoves(deployment, self, self.nodes, self.jobs, self._due)  # type: ignore[arg-type]
        self.moves.ether, self.moves.num_layers = self.ether, layout.num_layers
        self.ether.are_cut = lambda one, other: self.moves.sessions.are_cut(self.nodes[one], self.nodes[other])
        self._ends_of: dict[RequestId, tuple[int, int]] = {}
        """Of every hand-over there ever was: what is said of it may come late."""
        self._sources = self.moves.sources = {}
        self._broken_off = self.moves.broken_off = set()
        self._movers: dict[int, VirtualMover] = {}
        self.entering = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._version = -1
        self._settling = False

    def enter(self, mover: VirtualMover) -> int:
        self._movers[self.entering] = mover
        return self.entering

    # As the simulator's clock.

    @property
    def now(self) -> int:
        return self.loop.now_ns

    def call(self, time: int, priority: int, call: Callable[[], None]) -> None:
        def due() -> None:
            call()
            self.settle()

        self.loop.set(time, TRANSFER, due)

    # What the head decided, and what nodes do about it.

    def route(self, route: Route, num_tokens: int) -> None:
        """The simulator keeps books of each attempt."""
        job = SimJob(0, Request(0, num_tokens, 1))
        job.name, job.length = route.request, num_tokens
        job.route, job.key = route, key_of(route.request, route.attempt)
        job.prefill_slot, job.decode_slot = self.slots[route.prefill], self.slots[route.decode]
        self.jobs[job.key] = job
        self._ends_of[job.key] = job.prefill_slot, job.decode_slot

    def withdraw(self, request: RequestId) -> None:
        """Its last attempt is over."""
        job = next(job for job in reversed(self.jobs.values()) if job.name == request)
        del self.jobs[job.key]
        job.withdraw()
        self._due.append((self.nodes[job.prefill_slot], None))
        self.settle()

    def do(self, slot: int, action: Any) -> None:
        if isinstance(action, Fetch):
            self._sources[slot, action.key] = self.slots[action.source]
        handler = self.moves.handlers.get(type(action))
        if handler is not None:
            handler(self.nodes[slot], action)
            self.settle()

    def is_broken_off(self, slot: int, key: RequestId) -> bool:
        """Whether a fetch of this node is, which has not heard of it."""
        return (slot, key) in self._broken_off

    def mover_of(self, node: NodeId) -> VirtualMover:
        return self._movers[self.slots[node]]

    def settle(self) -> None:
        """What is due is told, and a timer is set for the next flow that ends."""
        if self._settling:
            return
        self._settling = True
        for node, event in self._due:
            assert node is not None
            self.loop.set(self.loop.now_ns, MESSAGE, self._tell, node, event)
        self._due.clear()
        self._settling = False
        self._set_timer()

    def _set_timer(self) -> None:
        network = self.moves.network
        if network.version != self._version:
            self._version, ends = network.version, network.next_finish()
            if ends is not None:
                self.loop.set(ends, FLOWS, self._ends, network.version)

    def _ends(self, version: int) -> None:
        if version == self.moves.network.version:
            self.moves.end(self.loop.now_ns)
        self.settle()

    def _tell(self, node: SimNode, event: Event | None) -> None:
        """Opens the way of what tells this. Of the rest, the node's own mover hears."""
        mover = self._movers.get(node.slot)
        if mover is None:
            return  # it died
        slot, opened = node.slot, self.ether.gate.open
        match event:
            case None:
                # Nodes report what came before its run ends with that.
                self.loop.set(0, ARRIVAL, self._look, slot)
            case LetterReceived():
                opened(self.slots[event.peer], slot, type(event.letter).__name__, event.letter.key, 1)
            case HandoverComplete():
                opened(self._ends_of[event.key][0], slot, "kv", event.key)
            case BlocksFetched(ended=True) if (slot, event.key) in self._sources:
                opened(self._sources.pop((slot, event.key)), slot, "blocks", event.key)
            case BlocksFetched(ended=True) if (slot, event.key) in self._broken_off:
                self._broken_off.remove((slot, event.key))
                mover.tell_broken_off(event.key)
            case Loaded():
                mover.load_now(event.key)

    def _look(self, slot: int) -> None:
        """At what its run waits for."""
        waiting = self._waiting.pop(slot, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def lose(self, node: SimNode) -> None:
        """A node is gone with all that it held."""
        self._movers.pop(node.slot).alive = False
        self.ether.lose(node.slot)
        self.moves.lose(node)
        self.settle()

    async def changed(self, slot: int) -> None:
        self._waiting[slot] = self.loop.create_future()
        await self._waiting[slot]
