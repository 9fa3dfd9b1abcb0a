"""Moves a node's bytes in virtual time: real loads, saves, sessions and stores, that wait for the simulator's times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from isthmus.core.node.events import BlocksFetched, EndFetch, Event, Missing, OfferHandover
from isthmus.core.node.letters import Letter
from isthmus.core.scheduler import Run, Saved
from isthmus.core.types import BlockName, NodeId, RequestId
from isthmus.facts import NodeFacts
from isthmus.lab.sim.node import SimNode
from isthmus.lab.sim.records import SimJob
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.engine.interface import Engine
from isthmus.live.kv.hosting import HostedKV
from isthmus.live.kv.hosting import _decode as decode
from isthmus.live.kv.hosting import _Line as Line
from isthmus.live.kv.mover import KVMover
from isthmus.live.messenger import Handler, LineLost, Priority, Sending, Server, Session
from isthmus.live.peers import messages
from isthmus.live.store import Arena, Log, RecordFormat, Shape, Store
from tests.live.store.support import CrashingFiles
from tests.memory_network import Link, MemoryNetwork
from tests.virtual.carried import Carried
from tests.virtual.loop import ARRIVAL, MESSAGE, TRANSFER

if TYPE_CHECKING:
    from tests.virtual.links import VirtualLinks


# No threads.


class Inline(Executor):
    """Does everything at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **more))
        except BaseException as error:
            done.set_exception(error)
        return done


class Lazy(Executor):
    """Does what it is given when somebody says so."""

    def __init__(self) -> None:
        self._work: dict[Future[Any], Callable[[], Any]] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work[future] = partial(fn, *args, **more)
        return future

    def run(self, future: Future[Any]) -> None:
        work = self._work.pop(future)
        if future.set_running_or_notify_cancel():
            future.set_result(work())


def pool_of(_: int, name: str) -> Executor:
    """Loads begin when all that they need is there: they would wait for it."""
    return Lazy() if name == "load" else Inline()


class MemoryFiles(CrashingFiles):
    """An SSD that takes no time; `clock_s` is its clock. Once it `fails`, nothing can be read or written."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        super().__init__()
        self._clock_s = clock_s
        self.fails = False

    def read(self, fd: int, into: Sequence[Any], offset: int) -> int:
        self._check()
        return super().read(fd, into, offset)

    def write(self, fd: int, pieces: Sequence[Any], offset: int) -> int:
        self._check()
        return super().write(fd, pieces, offset)

    def sync(self, fd: int) -> None:
        self._check()

    def sync_folder(self, folder: int) -> None:
        self._check()

    def now(self) -> float:
        return self._clock_s()

    def _check(self) -> None:
        if self.fails:
            raise OSError("the disk failed")


class VirtualStore(Store):
    """What is to be written is written at once."""

    def commit(self, *arguments: Any) -> None:
        super().commit(*arguments)
        self.flush()

    def adopt(self, *arguments: Any) -> Any:
        pinned = super().adopt(*arguments)
        self.flush()
        return pinned

    def demote(self, names: Any) -> None:
        super().demote(names)
        self.flush()


def store_opener(
    facts: NodeFacts, engine: Engine, files: MemoryFiles, spare_slots: int
) -> Callable[[Callable[[Sequence[BlockName]], None]], Store] | None:
    """As `isthmus node` opens it, with slots to spare for what is on its way."""
    if not facts.cache_blocks:
        return None
    layout = engine.memory.layout
    shape, revision = Shape(layout.num_layers, layout.slice_bytes), bytes(32)

    def opened(on_lost: Callable[[Sequence[BlockName]], None]) -> Store:
        log = None
        if facts.ssd_blocks:
            size = RecordFormat(shape, revision).file_bytes(facts.ssd_blocks)
            log = Log("/virtual", shape, size, revision, direct=False, files=files)
        return VirtualStore(Arena(shape, facts.num_slots + spare_slots), log, on_lost, writes_behind=False)

    return opened


# What nodes say to each other.

KINDS: dict[type, str] = {
    messages.HandoverSlices: "kv",
    messages.HandoverSent: "kv",
    messages.FetchedSlices: "blocks",
    messages.LentBlocks: "blocks",
    messages.FetchServed: "blocks",
    messages.StageSampled: "sampled",
    messages.ShipmentSlices: "shipment",
    **{letter: letter.__name__ for letter in get_args(Letter)},
}
"""What has a time in the simulator. The rest takes none."""

Way = tuple[int, int, str, str]
"""Sender, receiver, kind, and attempt."""


class Held:
    """A message that is sent later: as `Sending`."""

    def __init__(self, send: Callable[[], Sending], weight: int, done: Callable[[bool], None] | None) -> None:
        self._send, self.weight, self._done = send, weight, done
        self._sending: Sending | None = None
        self.is_cancelled = False

    def go(self) -> None:
        self._sending = self._send()

    @property
    def over(self) -> bool:
        return self.is_cancelled if self._sending is None else self._sending.over

    def cancel(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        elif not self.is_cancelled:
            self.is_cancelled = True
            if self._done is not None:
                self._done(False)


class Gate:
    """Between the nodes, by number. A message waits until the way of its kind and attempt is opened, for good or for so
    many."""

    def __init__(self, carried: Carried) -> None:
        self.carried = carried
        self._opened: dict[Way, float] = {}
        """How much more may pass."""
        self._held: dict[Way, deque[Held]] = {}

    def guard(self, session: Session, sender: int, receiver: int) -> None:
        session.send = partial(self._send, sender, receiver, session.send)  # type: ignore[method-assign]

    def _send(
        self,
        sender: int,
        receiver: int,
        send: Callable[..., Sending],
        message: Any,
        *payload: memoryview,
        priority: Priority | None = None,
        done: Callable[[bool], None] | None = None,
    ) -> Any:
        kind = KINDS.get(type(message))

        def now() -> Sending:
            self.carried.add(sender, receiver, message, sum([len(part) for part in payload]))
            return send(message, *payload, priority=priority, done=done)

        if kind is None:
            return now()
        way = sender, receiver, kind, str(message.run) if kind == "sampled" else message.key
        held = Held(now, len(message.seals) if kind == "shipment" else 1, done)
        self._held.setdefault(way, deque()).append(held)
        self._pass(way)
        return held

    def open(self, sender: int, receiver: int, kind: str, key: str, count: float = math.inf) -> None:
        """`count`: of messages, or blocks in their layers."""
        way = sender, receiver, kind, key
        self._opened[way] = self._opened.get(way, 0) + count
        self._pass(way)

    def _pass(self, way: Way) -> None:
        waiting = self._held.get(way, ())
        while waiting and (waiting[0].is_cancelled or waiting[0].weight <= self._opened.get(way, 0)):
            held = waiting.popleft()
            if not held.is_cancelled:
                self._opened[way] -= held.weight
                held.go()

    def lose(self, pair: set[int]) -> None:
        """Nothing of what is under way between two nodes comes; it begins anew."""
        self._opened = {way: left for way, left in self._opened.items() if set(way[:2]) != pair}
        for way in [way for way in self._held if set(way[:2]) == pair]:
            for held in self._held.pop(way):
                held.cancel()


class Ether:
    """What all nodes' networks have in common."""

    def __init__(self, network: MemoryNetwork, slots: dict[NodeId, int], carried: Carried) -> None:
        self.network, self.slots, self.gate = network, slots, Gate(carried)
        self.connecting = -1
        self._links: list[tuple[int, int, Link]] = []
        self.are_cut: Callable[[int, int], bool] = lambda one, other: False

    def view(self, slot: int) -> NodeNetwork:
        return NodeNetwork(self, slot)

    def add(self, one: int, other: int, links: Sequence[Link]) -> None:
        self._links += [(one, other, link) for link in links]

    def lose(self, node: int) -> None:
        """Cuts all that a node has to do with other nodes."""
        for peer in self.slots.values():
            self.cut(node, peer)

    def cut(self, one: int, other: int) -> None:
        """Ends the sessions of two nodes."""
        pair = {one, other}
        self.gate.lose(pair)
        for between in [each for each in self._links if set(each[:2]) == pair]:
            self._links.remove(between)
            between[2].lose("cut")


class NodeNetwork:
    """The network as one node sees it: what it says to other nodes, and they to it, goes through the gate."""

    def __init__(self, ether: Ether, slot: int) -> None:
        self._ether, self._slot = ether, slot

    async def listen(
        self, host: str, port: int, types: Any, handler_of: Callable[[], Handler]
    ) -> tuple[Server, int]:
        ether = self._ether
        server, port = await ether.network.listen(host, port, types, handler_of)
        accept = ether.network._listeners[f"{host}:{port}"]

        def accepted(side: Any) -> Session:
            session = accept(side)
            ether.gate.guard(session, self._slot, ether.connecting)
            return session

        ether.network._listeners[f"{host}:{port}"] = accepted
        return server, port

    async def connect(
        self, address: str, types: Any, handler: Handler, *, timeout_s: float, connections: int | None = None
    ) -> Session:
        ether, peer = self._ether, self._ether.slots.get(NodeId(address.rpartition(":")[0]), -1)
        if peer >= 0 and ether.are_cut(self._slot, peer):
            raise ConnectionError("cut")
        ether.connecting, known = self._slot, len(ether.network.links)
        session = await ether.network.connect(
            address, types, handler, timeout_s=timeout_s, connections=connections
        )
        if peer >= 0:
            ether.gate.guard(session, self._slot, peer)
            ether.add(self._slot, peer, ether.network.links[known:])
        return session


class LazyMover(KVMover):
    """Loads begin when they are told to."""

    def load_now(self, key: RequestId) -> None:
        """All that a load waits for is there."""
        load = self._loads.get(key)
        if load is not None and not load.task.done():
            loaders = self.cache._loaders
            assert isinstance(loaders, Lazy)
            loaders.run(load.task)


class InlineAsker:
    """A line to a holder that answers at once: an iteration asks when its time is over. `hosts`: of the holder."""

    def __init__(self, session: Session, hosts: HostedKV) -> None:
        self._session, self._hosts = session, hosts
        self._known: dict[int, Any] = {}
        self._is_hung_up = False

    @property
    def is_over(self) -> bool:
        return self._is_hung_up or self._session.closed

    def hang_up(self) -> None:
        self._is_hung_up = True

    def ask(self, data: bytes, q: memoryview) -> memoryview | None:
        if self.is_over:
            raise LineLost("its session ended")
        head = decode(data)
        if head.rows:
            self._known[head.number] = self._hosts._asked(head)
        return self._hosts._answer(head, self._known.get(head.number), q)

    def answer(self, answer: memoryview | None) -> memoryview | None:
        return answer


class VirtualMover(LazyMover):
    """What it carries out takes the times of the simulator's `Moves`."""

    def __init__(self, links: VirtualLinks, *, tell: Callable[[Event], None], **others: Any) -> None:
        super().__init__(tell=tell, **others)
        self._links = links
        self.process: NodeProcess = tell.__self__  # type: ignore[attr-defined]
        self.alive = True
        self._broken_off: dict[RequestId, BlocksFetched] = {}
        self.slot = links.enter(self)
        self.holders.open_line = self._open_line  # type: ignore[method-assign]

    def gone(self, node: NodeId, reason: str) -> None:
        super().gone(node, reason)
        worker: Any = self.process.worker
        self._links.loop.set(0, ARRIVAL, worker.lose_holder, node)

    @property
    def clock(self) -> SimNode:
        return self._links.nodes[self.slot]

    def _open_line(self, holder: NodeId) -> None:
        """One to each holder, as that of `Holders`."""
        lines, session = self.holders._lines, self._peers.open_to(holder)
        if session is not None and (holder not in lines or lines[holder].result().asker.is_over):
            hosts = self._links.mover_of(holder).hosts
            lines[holder] = Future()
            lines[holder].set_result(Line(InlineAsker(session, hosts)))  # type: ignore[arg-type]

    def do(self, action: Any) -> None:
        if isinstance(action, OfferHandover):
            self._links.ether.gate.carried.offered(self.slot, action.key, action.extent)
        super().do(action)
        if self.alive:
            self._links.do(self.slot, action)

    def _tell(self, fact: Event) -> None:
        if not self.alive:
            return
        if isinstance(fact, BlocksFetched) and fact.ended:
            self._links.do(self.slot, EndFetch(fact.key))  # it may have found no room, which nobody else knows
            if self._links.is_broken_off(self.slot, fact.key):
                self._broken_off[fact.key] = fact
                return
        if isinstance(fact, Saved):  # it takes no time, and is heard after all that came of the run
            self._links.loop.set(0, MESSAGE, super()._tell, fact)
        else:
            super()._tell(fact)

    def tell_broken_off(self, key: RequestId) -> None:
        """As late as in the simulator: after all that was said at this instant before."""
        fact = self._broken_off.pop(key, None)
        if fact is not None:
            super()._tell(fact)

    def stages_through(self, run: int) -> None:
        """The later stages of the group have computed a run."""
        self._links.ether.gate.open(self.slot, self.slot, "sampled", str(run))

    # A run.

    def _pending(self, run: Run) -> list[SimJob]:
        jobs = [self._links.jobs.get(piece.request) for piece in run.chunks]
        return [job for job in jobs if job is not None and job.prefill_slot == self.slot]

    async def wait_for(self, run: Run) -> None:
        """All KV that its chunks attend to is there, or will not come."""
        loop = self._links.loop
        while not self.misses(run):
            jobs = self._pending(run)
            if any(self._links.moves.awaits(job) for job in jobs):
                await self._links.changed(self.slot)
            elif (until := max([job.loaded_ns for job in jobs], default=0)) > loop.now_ns:
                await loop.sleep_until(until, TRANSFER)
            else:
                return

    def is_waiting(self, run: Run) -> bool:
        """What its engine waits for before it asks any holder is not there."""
        now, awaits = self._links.loop.now_ns, self._links.moves.awaits
        return any(job.loaded_ns > now or awaits(job) for job in self._pending(run))

    def load_for(self, run: Run) -> None:
        for piece in run.chunks:
            self.load_now(piece.request)

    def loaded(self, key: RequestId) -> None:
        super().loaded(key)
        self._links.moves.disks.over(self._links.nodes[self.slot], key)

    def misses(self, run: Run) -> bool:
        node = self._links.nodes[self.slot]
        self._links.moves.disks.look(node, run)
        missing = node.missing
        return any(piece.request in missing for piece in run.chunks)

    def take_missed(self, run: Run) -> list[Missing]:
        missing = self._links.nodes[self.slot].missing
        keys = [piece.request for piece in run.chunks if piece.request in missing]
        for key in keys:
            self._links.moves.disks.missed(self._links.nodes[self.slot], key)
        return [Missing(key, missing.pop(key)) for key in keys]
