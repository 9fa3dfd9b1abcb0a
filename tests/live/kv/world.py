"""Nodes without engines in one event loop, liars among them, and a network that does harm.

A `Node` moves bytes as a node does: a real mover, cache, store, sessions, and KV memory of bytes. A `Liar` has real
sessions with a node and says whatever a test says. Judged is what nodes and liars hear, and what lies in memory:
`played` runs a test in such a world and sees that nothing is left over afterwards.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.node import events
from isthmus.core.node.letters import FetchDone, FetchRequest, HandoverConfirmed, HandoverGranted, HandoverSpan
from isthmus.core.types import BlockName, NodeId, RequestId, Span
from isthmus.live.engine.emulated import EmulatedMemory
from isthmus.live.engine.interface import KVBytes
from isthmus.live.kv.cache import EngineCache
from isthmus.live.kv.mover import KVMover
from isthmus.live.messenger import Network, Sending, Server, Session, TcpNetwork, Terms
from isthmus.live.messenger.ports import STANDARD
from isthmus.live.peers.messages import PROTOCOL, PeerHello, PeerMessage
from isthmus.live.peers.sessions import Peers
from isthmus.live.store import Arena, Log, Shape, Store
from tests.memory_network import Link, MemoryNetwork

LAYOUT = KVLayout(dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=1, head_dim=8)
"""Of the nodes here: small, and of more than one of everything but heads."""
OTHER, THIRD = NodeId("other"), NodeId("third")
"""What each of two nodes calls the other; and somebody else."""
KEY = RequestId("a#1")
LIMIT_S = 60
"""Only so that a bug ends a test."""
PIECE = 24
"""Bytes that arrive at once: less than any payload."""


def kv_block(layout: KVLayout, number: int) -> bytes:
    """Numbers that KV could be; every block has its own."""
    random = Random(number)
    count = layout.block_bytes // 2
    return b"".join(
        (0x3C00 + random.randrange(0x600) | random.randrange(2) << 15).to_bytes(2, "little")
        for _ in range(count)
    )


NAMES: tuple[BlockName, ...] = tuple([bytes([7, *divmod(number, 256), *[0] * 13]) for number in range(300)])
BLOCKS = [kv_block(LAYOUT, number) for number in range(len(NAMES))]
"""What the blocks of these names hold."""


def layer_of(data: bytes, layer: int, layout: KVLayout = LAYOUT) -> bytes:
    return data[layer * layout.slice_bytes :][: layout.slice_bytes]


def sealed(parts: Sequence[bytes | memoryview]) -> tuple[bytes, ...]:
    return tuple(map(seal, parts))


# Harm.


class Fault(StrEnum):
    """What happens to the wire at one byte."""

    FLIP = "flip"
    """One bit of the byte is another."""
    LOST = "lost"
    """The connection is gone with what follows."""
    CANCEL = "cancel"
    """Nothing happens to the wire; `HarmfulNetwork.then` is called when the byte is delivered."""


class HarmfulNetwork(MemoryNetwork):
    """Delivers in pieces of random length, so that anything can come in between, and does one harm: at byte `at` of all
    that it carries, counted from 0 over all connections."""

    def __init__(
        self,
        connections: int = 1,
        fault: Fault = Fault.CANCEL,
        at: int | None = None,
        seed: object = 0,
        piece: int = PIECE,  # 0: it comes whole
        terms: Terms = STANDARD,
    ) -> None:
        super().__init__(connections=connections, terms=terms)
        self.piece = piece
        self.fault, self.at, self.random = fault, at, Random(str(seed))
        self.then: Callable[[], object] = bool
        self.num_bytes = 0
        self.is_done = False
        self.current: HarmfulLink | None = None
        """Over which something is being delivered."""

    def _link(self, here: Any, there: Any, number: int) -> None:
        if here.session.closed or there.session.closed:
            return  # a listener knows nothing of it any more
        self.links.append(HarmfulLink(self, here, there, number))

    def length(self) -> int:
        return self.random.randrange(1, self.piece + 1) if self.piece else 1 << 30

    @property
    def is_quiet(self) -> bool:
        """Nothing is on its way, but over frozen connections."""
        return not any(link.waiting and not link.is_frozen for link in self.links)

    def thaw(self) -> None:
        for link in self.links:
            link.thaw()


class HarmfulLink(Link):
    """One piece comes after the other, so that what it gives rise to comes in between."""

    def __init__(self, network: HarmfulNetwork, here: Any, there: Any, number: int) -> None:
        self._network, self.is_frozen = network, False
        self.waiting: deque[Callable[[], object]] = deque()
        self._loop = here.loop
        super().__init__(here, there, number)

    def do(self, port: Any, function: Callable[[], object]) -> None:
        self.waiting.append(function)
        if len(self.waiting) == 1:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self.is_frozen or not self.waiting:
            return
        self._network.current = self
        try:
            self.waiting[0]()
        finally:
            self.waiting.popleft()
            if self.waiting:
                self._loop.call_soon(self._next)

    def freeze(self) -> None:
        """What is on its way stays there, and what is sent goes another way if there is one."""
        self.is_frozen = self.is_lost = True

    def thaw(self) -> None:
        if self.is_frozen:
            self.is_frozen = self.is_lost = False
            if self.waiting:
                self._loop.call_soon(self._next)
            for end in self.ends:
                end.port.wake()

    def carry(self, end: Any, data: bytes) -> None:
        network = self._network
        first, network.num_bytes = network.num_bytes, network.num_bytes + len(data)
        at = -1 if network.at is None else network.at - first
        if not 0 <= at < len(data):
            self._deliver(end, data)
            return
        network.is_done = True
        if network.fault is Fault.FLIP:
            damaged = bytearray(data)
            damaged[at] ^= 1 << network.random.randrange(8)
            self._deliver(end, bytes(damaged))
            return
        self._deliver(end, data[: at + 1])
        if network.fault is Fault.CANCEL:
            self.do(end.port, lambda: network.then())
            self._deliver(end, data[at + 1 :])
        else:
            self.do(end.port, lambda: self.lose())

    def _deliver(self, end: Any, data: bytes) -> None:
        while data:
            count = self._network.length()
            part, data = data[:count], data[count:]
            self.do(end.port, lambda part=part: end.receive(part))  # type: ignore[misc]


# Who is there.

Before = Callable[[str, Any], object]
"""Is called with what is about to be done, and to which layer or block: it may wait, or raise."""


def nothing(what: str, which: Any) -> None:
    """Let it be done."""


class WatchedMemory(EmulatedMemory):
    before: Before = staticmethod(nothing)

    def fill(self, layer: int, *more: Any) -> None:
        self.before("fill", layer)
        super().fill(layer, *more)

    def save(self, layer: int, *more: Any) -> None:
        self.before("save", layer)
        super().save(layer, *more)


class WatchedArena(Arena):
    before: Before = staticmethod(nothing)

    def slice(self, slot: int, layer: int) -> memoryview:
        self.before("slice", layer)
        return super().slice(slot, layer)


class WatchedStore(Store):
    before: Before = staticmethod(nothing)

    def read(self, name: BlockName, *more: Any) -> bool:
        self.before("read", name)
        found = super().read(name, *more)
        self.before("give what was read", name)
        return found

    def drop(self, names: Sequence[BlockName]) -> None:
        self.before("drop", names)
        super().drop(names)


class Node:
    """One node, as the other one sees it. `facts`: what it was told; `reasons`: why its sessions ended; `tokens`: that
    came with hand-overs.

    It decides the least that goes on, unless it is told not to (`decides`): whatever is there is given, what a fetch
    brings is adopted, and a hand-over ends when it is whole (`landed`) or broken; then `failed` says why.
    """

    def __init__(
        self,
        network: Network,
        layout: KVLayout = LAYOUT,
        *,
        slots: int = 64,
        blocks: int = 16,
        log: Log | None = None,
        shares: bool = False,
        memory: KVBytes | None = None,
        first_layer: int = 0,
        stage: int = 0,
        max_staged: int | None = None,
        answer_s: float = LIMIT_S,
    ) -> None:
        self.layout = layout
        self.memory: Any = memory or WatchedMemory(layout, blocks)
        self.arena = WatchedArena(Shape(layout.num_layers, layout.slice_bytes), slots)
        self.store = WatchedStore(self.arena, log)
        self.cache = EngineCache(self.memory, self.store, self._lost, max_staged=max_staged)
        self.network = network
        self.addresses: dict[NodeId, str] = {}
        self.hello = PeerHello(PROTOCOL, OTHER, "revision", layout, stage)
        self.peers = Peers(
            network, self.hello, lambda: self, self.addresses.__getitem__,
            lambda node, reason: self.mover.gone(node, reason),
        )  # fmt: skip
        self.server: Server | None = None
        self.address = ""
        self.session: Session | None = None
        self.taken: list[int] = []
        """Slots that somebody else has until the end."""
        self.facts: list[events.Event] = []
        self.decides: Callable[[events.Event], bool] = lambda fact: True
        self.placed: list[PeerMessage] = []
        self.at_place: Callable[[], object] = bool
        self.at_message: Callable[[], object] = bool
        self.attends: Callable[[memoryview], memoryview] = lambda q: q
        self.tokens: dict[RequestId, int] = {}
        self.reasons: list[str] = []
        self.failed = ""
        self.landed = False
        self._moving: set[RequestId] = set()
        self._fetches: dict[RequestId, events.Fetch] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.mover = KVMover(
            memory=self.memory,
            attends=lambda layer, asked, q, parts: self.attends(q),
            first_layer=first_layer,
            cache=self.cache,
            peers=self.peers,
            tell=self._told,
            spawn=self._spawn,
            shares_memory=shares,
            answer_s=answer_s,
            received=self.tokens.__setitem__,
        )
        self.mover.open(asyncio.get_running_loop())

    def _lost(self, names: Sequence[BlockName]) -> None:
        self.mover.lost_bytes(names)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def listen(self) -> str:
        if self.server is None:
            self.server, port = await self.network.listen("127.0.0.1", 0, PeerMessage, lambda: self)
            self.address = f"127.0.0.1:{port}"
        return self.address

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.cache.close()
        self.store.close()

    # What it decides.

    def do(self, *actions: Any) -> None:
        for action in actions:
            self.mover.do(action)

    def _told(self, fact: events.Event) -> None:
        self.facts.append(fact)
        if not self.decides(fact):
            return
        match fact:
            case events.LetterReceived(peer, FetchRequest(key, names, start)):
                stop = next((at for at, name in enumerate(names) if not self.store.contains(name)), len(names))
                self.do(events.Give(key, peer, names, start, max(start, stop), 0))
            case events.LetterReceived(peer, FetchDone(key)):
                self.do(events.EndGive(key, peer))
            case events.BlocksFetched(key, stop, ended):
                self._adopt(key, stop)
                if ended:
                    if self.peers.open_to(OTHER) is not None:
                        self.do(events.SendLetter(OTHER, FetchDone(key)))
                    self._fetches.pop(key, None)
            case events.LetterReceived(_, HandoverGranted(key)):
                self.mover.send(key)
            case events.HandoverComplete(key):
                self.landed = True
                self.do(events.SendLetter(OTHER, HandoverConfirmed(key)))
            case events.Broken(key, reason):
                self.give_up(key, reason)
            case events.Gone(peer, reason) if peer == OTHER:
                self.do(*[events.EndFetch(key) for key in self._fetches])
                for key in list(self._moving):
                    self.give_up(key, reason)

    def fetch(self, stop: int, start: int = 0, codec: str = "none", key: RequestId = KEY) -> events.Fetch:
        """Begins to fetch the first blocks."""
        order = self._fetches[key] = events.Fetch(key, OTHER, NAMES[:stop], start, codec=codec)
        self.do(events.SendLetter(OTHER, FetchRequest(key, order.names, start, order.whole)), order)
        return order

    async def fetched(self, *arguments: Any, **more: Any) -> int:
        """Fetches, and returns up to where the blocks came, when they are adopted."""
        key = self.fetch(*arguments, **more).key
        return (await self.fetch_ended(key)).stop

    async def fetch_ended(self, key: RequestId = KEY) -> events.BlocksFetched:
        def found() -> list[events.BlocksFetched]:
            return [fact for fact in self.of(events.BlocksFetched, key) if fact.ended]

        await until(lambda: bool(found()))
        ended = found()[-1]
        await asyncio.wrap_future(self.cache.kept())
        return ended

    def _adopt(self, key: RequestId, stop: int) -> None:
        fetch = self._fetches.get(key)
        names = fetch.names[fetch.start : stop] if fetch is not None else ()
        new = tuple([name for name in names if not self.store.contains(name)])
        if new:
            self.mover.do(events.AdoptBlocks(key, new))

    def send(self, extent: HandoverSpan, key: RequestId = KEY) -> None:
        """Offers a hand-over; it goes when there is room for it."""
        self._moving.add(key)
        self.do(events.OfferHandover(key, OTHER, extent))

    def expect(self, extent: HandoverSpan, blocks: Sequence[int], key: RequestId = KEY) -> None:
        self.failed, self.landed = "", False
        self._moving.add(key)
        self.do(
            events.ReceiveHandover(key, OTHER, extent, tuple(blocks)),
            events.SendLetter(OTHER, HandoverGranted(key)),
        )

    def give_up(self, key: RequestId, reason: str) -> None:
        """Ends a hand-over on this side. Its blocks may serve another request when this returns."""
        if not self.landed:
            self.failed = self.failed or reason
        self._moving.discard(key)
        self.do(events.ReleaseResources(key))

    # What it hears, and has.

    async def told(self, kind: type, count: int = 1, of: RequestId | None = None) -> Any:
        """The last fact of this kind, once there are so many."""
        await until(lambda: len(self.of(kind, of)) >= count)
        return self.of(kind, of)[-1]

    def of(self, kind: type, key: RequestId | None = None) -> list[Any]:
        found = [fact for fact in self.facts if isinstance(fact, kind)]
        return [fact for fact in found if key is None or fact.key == key]  # type: ignore[attr-defined]

    def letters(self, kind: type) -> list[Any]:
        return [fact.letter for fact in self.of(events.LetterReceived) if isinstance(fact.letter, kind)]

    async def heard(self, kind: type, count: int = 1) -> None:
        await until(lambda: len(self.letters(kind)) >= count)

    @property
    def mismatches(self) -> float:
        return self.mover.gauges()["seal_mismatches_total"]

    def write(self, number: int, data: bytes) -> None:
        """A whole block of KV memory, as an engine computes it."""
        for layer in range(self.layout.num_layers):
            EmulatedMemory.fill(
                self.memory, layer, [number], memoryview(data), [layer * self.layout.slice_bytes]
            )

    def block(self, number: int, num_tokens: int | None = None) -> bytes:
        first, count = number * self.layout.block_size, num_tokens or self.layout.block_size
        layers = range(self.layout.num_layers)
        return b"".join(bytes(self.memory.export(layer, first, first + count)) for layer in layers)

    def put(self, start: int, stop: int) -> None:
        """These blocks of the chain are cached."""
        for at in range(start, stop):
            data = BLOCKS[at] if self.layout == LAYOUT else Random(at).randbytes(self.layout.block_bytes)
            assert self.store.put(NAMES[at], NAMES[at - 1] if at else None, data), "the store is too small"

    def put_on_disk(self, start: int, stop: int) -> None:
        """In no slot."""
        self.put(start, stop)
        self.store.flush()
        self.store.demote(NAMES[start:stop])

    def stored(self, name: BlockName) -> bytes | None:
        into = memoryview(bytearray(self.layout.block_bytes))
        return bytes(into) if self.store.get(name, into) else None

    def chain(self, stop: int) -> list[bytes | None]:
        return [self.stored(name) for name in NAMES[:stop]]

    def held(self) -> tuple[int, int]:
        """Pins, reservations. Raises AssertionError when the store's books do not agree."""
        self.store.check()
        stat = self.store.stat()
        return stat.num_pinned, stat.num_reserved

    def leave_room(self, num_slots: int) -> None:
        self.taken += self.store.reserve(self.arena.num_slots - num_slots)

    async def idle(self) -> None:
        await until(lambda: self.held() == (0, 0))
        stat = self.store.stat()
        assert stat.memory.used_bytes == stat.memory.num_blocks * self.layout.block_bytes, "slots nobody knows"

    # What a session calls.

    def on_message(self, session: Session, message: PeerMessage) -> None:
        if isinstance(message, PeerHello):
            self.session = self.session or session
            self.peers.entered(session, message)
            session.answer_lines(self.mover.hosts.answer)
        elif (peer := self.peers.node_of(session)) is not None:
            self.mover.on_peer(session, peer, message)
            self.at_message()

    def place(self, session: Session, message: PeerMessage, size: int) -> Sequence[memoryview]:
        placed = self.mover.place(session, message, size)
        self.placed.append(message)
        self.at_place()
        return placed

    def on_void(self, session: Session, message: PeerMessage) -> None:
        self.mover.on_void(session, message)

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)
        self.peers.ended(session, reason)


class Liar:
    """A peer of a node, called `name`, that says what a test says. `heard`: what the node said to it, with payloads."""

    def __init__(self, name: NodeId) -> None:
        self.name = name
        self.heard: list[tuple[Any, bytes]] = []
        self.reasons: list[str] = []
        self.sessions: list[Session] = []
        self._buffers: dict[int, bytearray] = {}

    async def meet(self, world: World, layout: KVLayout = LAYOUT, stage: int = 0) -> None:
        """Opens a session, maybe one more."""
        session = await world.network.connect(world.address, PeerMessage, self, timeout_s=LIMIT_S)
        session.send(PeerHello(PROTOCOL, self.name, "revision", layout, stage))
        self.sessions.append(session)
        await world.quiet()

    def say(self, message: Any, *payload: bytes | memoryview, over: int = 0, **how: Any) -> Sending:
        return self.sessions[over].send(message, *map(memoryview, payload), **how)

    def of(self, kind: type) -> list[Any]:
        return [message for message, _ in self.heard if isinstance(message, kind)]

    async def hears(self, kind: type, count: int = 1) -> Any:
        await until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[-1]

    def on_message(self, session: Session, message: Any) -> None:
        self.heard.append((message, bytes(self._buffers.pop(id(message), b""))))

    def place(self, session: Session, message: Any, size: int) -> Sequence[memoryview]:
        self._buffers[id(message)] = bytearray(size)
        return [memoryview(self._buffers[id(message)])]

    def on_void(self, session: Session, message: Any) -> None:
        self._buffers.pop(id(message), None)

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await asyncio.sleep(0.0005)


class World:
    """`here`, and `there` if the test has two nodes: `here` opened the session."""

    here: Node
    there: Node
    address: str
    """Of `here`."""
    folder: Path | None
    """Of the log of `here`."""

    def __init__(self, network: Any, log: Callable[[], Log | None], how: dict[str, Any]) -> None:
        self.network, self._log, self._how = network, log, how
        self.nodes: list[Node] = []
        self.liars: list[Liar] = []
        self.leaves = False
        """What is held when the test is over is given back when sessions end, not before."""

    def node(self, **how: Any) -> Node:
        self.nodes.append(Node(self.network, **(self._how | how)))
        return self.nodes[-1]

    async def begin(self, *, alone: bool, there: dict[str, Any]) -> None:
        self.here = self.node(log=self._log())
        self.address = await self.here.listen()
        if not alone:
            self.there = self.node(**there)
            await self.join(self.here, self.there)

    async def join(self, here: Node, there: Node) -> None:
        """A session between the two, opened by `here`. It may be over already where the network does harm."""
        address = await there.listen()
        here.addresses[OTHER], there.addresses[OTHER] = address, self.address
        here.session = await self.network.connect(address, PeerMessage, here, timeout_s=LIMIT_S)
        here.session.send(here.hello)
        here.peers.entered(here.session, there.hello)
        while there.session is None and not here.session.ended:
            await asyncio.sleep(0)

    async def liar(self, name: NodeId = OTHER, sessions: int = 1, **how: Any) -> Liar:
        self.liars.append(Liar(name))
        for _ in range(sessions):
            await self.liars[-1].meet(self, **how)
        return self.liars[-1]

    async def quiet(self) -> None:
        """All that was said has come, and what comes of it; but over frozen connections."""
        turns = 0
        while turns < 20:
            turns = turns + 1 if self.network.is_quiet else 0
            await asyncio.sleep(0)

    async def under_way(self, liar: Liar, *message: Any, **how: Any) -> Sending:
        """Says something whose payload stops in the midst, and what follows over this connection with it."""
        await self.quiet()
        before, here = len(self.here.placed), self.here
        here.at_place = lambda: self.network.current.freeze()
        sending = liar.say(*message, **how)
        await until(lambda: len(here.placed) > before or here.reasons)
        here.at_place = bool
        await self.quiet()
        return sending

    async def end(self) -> None:
        """All nodes must be idle, and after that everything must end."""
        for node in self.nodes:
            node.store.give_back(node.taken)
        if not self.leaves:
            for node in self.nodes:
                await node.idle()
        if isinstance(self.network, HarmfulNetwork):
            self.network.thaw()
        for node in self.nodes:
            node.do(events.ReleaseResources(KEY))
            await node.mover.close()
            for peer in (OTHER, THIRD):
                node.peers.left(peer)
        for liar in self.liars:
            for session in liar.sessions:
                session.close()
        for node in self.nodes:
            await until(lambda node=node: not node.tasks)
            await node.idle()


def played(
    *,
    network: Callable[[], Any] = lambda: HarmfulNetwork(connections=2),
    alone: bool = False,
    disk: bool = False,
    there: dict[str, Any] | None = None,
    **how: Any,
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """A test in a world of one node (`alone`) or two, of this kind (`how`, see `Node`; `there` what the second has
    else). Whatever it does, everything is given back, and nothing is unhandled."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def play(folder: Path | None, given: dict[str, Any]) -> None:
            faults: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            shape = how.get("layout", LAYOUT)

            def log() -> Log | None:
                if folder is None:
                    return None
                return Log(folder, Shape(shape.num_layers, shape.slice_bytes), 1 << 20, b"test")

            world = World(given.get("network", network)(), log, how)
            world.folder = folder
            try:
                async with asyncio.timeout(LIMIT_S):
                    await world.begin(alone=alone, there=there or {})
                    await test(world, **given)
                    await world.end()
            finally:
                for node in world.nodes:
                    node.close()
            assert faults == []

        _, *others = inspect.signature(test).parameters.values()

        @wraps(test)
        def run(*drawn: Any, **given: Any) -> None:
            given |= zip([each.name for each in others], drawn, strict=False)
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log" if disk else None
                asyncio.run(play(folder, given))

        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


NETWORKS: dict[str, Callable[[], Network]] = {
    "memory": HarmfulNetwork,
    "tcp": TcpNetwork,
    "several connections": lambda: TcpNetwork(connections=3),
    "a small window": lambda: HarmfulNetwork(terms=msgspec.structs.replace(STANDARD, window=1 << 10)),
}


def plain(num_tokens: int, *, start: int = 0, codec: str = "none", state_blocks: int = 0) -> HandoverSpan:
    """Of a hand-over from block `start` on, with a recurrent state in so many blocks."""
    size = LAYOUT.block_size
    states = -(-num_tokens // size) * size
    stop = states + state_blocks * size if state_blocks else num_tokens
    return HandoverSpan(size, start * size, num_tokens, states, stop, codec)


def chunks(num_tokens: int, ends: Sequence[int] = ()) -> list[Span]:
    """What an engine announces that computes a prompt in chunks: whole blocks, and at last the rest."""
    spans, done = list[Span](), 0
    for end in sorted({*(end for end in ends if end < num_tokens), num_tokens}):
        stop = end if end == num_tokens else end // LAYOUT.block_size * LAYOUT.block_size
        if stop > done:
            spans.append(Span(done, stop))
            done = stop
    return spans


def ready(node: Node, tokens: Span, blocks: Sequence[int], key: RequestId = KEY) -> None:
    """These tokens are computed, layer by layer. From any thread."""
    for layer in range(node.layout.num_layers):
        node.mover.kv_ready(key, Span(layer, layer + 1), tokens, tuple(blocks))
