"""Two nodes without engines, and a wire between them that does harm: for `faults` and for tests of the cluster.

A `Side` moves bytes as a node does, with a real store and with KV memory of bytes.
`Harm` counts the bytes of all connections of its network, both ways, and does what it is told at a byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from random import Random
from typing import Any

from isthmus.core.blocks import KVLayout
from isthmus.core.node import events
from isthmus.core.node.extent import Extent
from isthmus.core.node.letters import Enough, Granted, Landed, Want
from isthmus.core.types import BlockName, NodeId, RequestId
from isthmus.live.engine.emulated import EmulatedMemory
from isthmus.live.kv.cache import EngineCache
from isthmus.live.kv.fetches import Fetching
from isthmus.live.kv.mover import KVMover
from isthmus.live.messenger import MemoryNetwork, Network, Server, Session
from isthmus.live.messenger.memory import Link, MemoryPort
from isthmus.live.peers.messages import PROTOCOL, PeerHello, PeerMessage
from isthmus.live.peers.sessions import Peers
from isthmus.live.store import Arena, Log, Shape, Store

LAYOUT = KVLayout(dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=1, head_dim=8)
"""Of the nodes here: small, and of more than one of everything but heads."""
OTHER = NodeId("other")
"""What each of two nodes calls the other."""


def store_of(layout: KVLayout, num_slots: int, log: Log | None = None) -> Store:
    return Store(Arena(Shape(layout.num_layers, layout.slice_bytes), num_slots), log)


class Side:
    """One node, as the other one sees it, and its only session. `reasons`: why its sessions ended; `facts`: what it was
    told; `tokens`: that came with hand-overs.

    It decides the least that goes on: whatever is there is given, what a fetch brings is adopted, and a hand-over ends
    when it is whole (`landed`) or broken; then `failed` says why.
    """

    def __init__(self, store: Store, layout: KVLayout, num_blocks: int, *, shares_memory: bool = False) -> None:
        self.memory = EmulatedMemory(layout, num_blocks)
        self.store = store
        self.cache = EngineCache(self.memory, store)
        self.network: Network | None = None
        self.addresses: dict[NodeId, str] = {}
        self.hello = PeerHello(PROTOCOL, OTHER, "revision", layout)
        self.peers = Peers(
            self,  # type: ignore[arg-type]
            self.hello,
            lambda: self,
            self.addresses.__getitem__,
            lambda node, reason: self.mover.gone(node, reason),
        )
        self.session: Session | None = None
        self.facts: list[events.Event] = []
        self.tokens: dict[RequestId, int] = {}
        self.reasons: list[str] = []
        self.failed = ""
        self.landed = False
        self._moving: set[RequestId] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.mover = KVMover(
            memory=self.memory,
            attends=lambda layer, asked, q, parts: q,
            first_layer=0,
            cache=self.cache,
            peers=self.peers,
            tell=self._told,
            spawn=self._spawn,
            shares_memory=shares_memory,
            answer_s=30.0,
            received=self.tokens.__setitem__,
        )

    async def connect(self, *arguments: Any, **more: Any) -> Session:
        assert self.network is not None
        return await self.network.connect(*arguments, **more)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        self.cache.close()
        self.store.close()

    def do(self, *actions: events.Action) -> None:
        for action in actions:
            self.mover.do(action)

    def _told(self, fact: events.Event) -> None:
        self.facts.append(fact)
        match fact:
            case events.Heard(peer, Want(key, names, start)):
                stop = next((at for at, name in enumerate(names) if not self.store.contains(name)), len(names))
                self.do(events.Give(key, peer, names, start, max(start, stop), 0))
            case events.Heard(peer, Enough(key)):
                self.do(events.EndGive(key, peer))
            case events.Came(key, stop) | events.FetchEnded(key, stop):
                self._adopt(key, stop)
                if isinstance(fact, events.FetchEnded) and self.peers.open_to(OTHER) is not None:
                    self.do(events.Tell(OTHER, Enough(key)))
            case events.Heard(_, Granted(key)):
                self.mover.send(key)
            case events.Received(key):
                self.landed = True
                self.do(events.Tell(OTHER, Landed(key)))
            case events.Broken(key, reason):
                self.give_up(key, reason)
            case events.Gone(_, reason):
                self.do(*[events.EndFetch(key) for key in self.mover._fetches])
                for key in list(self._moving):
                    self.give_up(key, reason)

    def want(self, fetch: events.Fetch) -> None:
        self.do(events.Tell(OTHER, Want(fetch.key, fetch.names, fetch.start, fetch.whole)), fetch)

    def fetch(self, order: events.Fetch) -> Fetching:
        """To be run by `fetching`; whoever holds it may read from it."""
        return Fetching(order, self.cache)

    async def fetching(self, fetch: Fetching) -> None:
        """Returns when all that came is adopted."""
        fetch.hold()
        self.mover._fetches[fetch.key] = fetch
        self.do(events.Tell(OTHER, Want(fetch.key, fetch.names, fetch.start, fetch.order.whole)))
        await self.mover._run_fetch(fetch, self.mover.fetcher.begin(fetch))
        await asyncio.sleep(0)  # what it told is heard
        await asyncio.wrap_future(self.cache.kept())

    def _adopt(self, key: RequestId, stop: int) -> None:
        fetch = self.mover._fetches.get(key)
        names = fetch.names[fetch.start : stop] if fetch is not None else ()
        new = tuple([name for name in names if not self.store.contains(name)])
        if new:
            self.mover.do(events.Adopt(key, new))

    def send(self, key: RequestId, extent: Extent) -> None:
        self._moving.add(key)
        self.do(events.Offer(key, OTHER, extent))

    def expect(self, key: RequestId, extent: Extent, blocks: Sequence[int]) -> None:
        self.failed, self.landed = "", False
        self._moving.add(key)
        self.do(events.Receive(key, OTHER, extent, tuple(blocks)), events.Tell(OTHER, Granted(key)))

    def give_up(self, key: RequestId, reason: str) -> None:
        """Ends a hand-over on this side. Its blocks may serve another request when this returns."""
        if not self.landed:
            self.failed = self.failed or reason
        self._moving.discard(key)
        self.do(events.Release(key))

    def heard(self, kind: type) -> list[Any]:
        """Letters of this kind."""
        letters = [fact.letter for fact in self.facts if isinstance(fact, events.Heard)]
        return [letter for letter in letters if isinstance(letter, kind)]

    # What a session calls.

    def on_message(self, session: Session, message: PeerMessage) -> None:
        if isinstance(message, PeerHello):
            self.session = self.session or session
            self.peers.entered(session, message)
            session.answer_lines(self.mover.hosts.answer)
        elif (peer := self.peers.node_of(session)) is not None:
            self.mover.on_peer(session, peer, message)

    def place(self, session: Session, message: PeerMessage, size: int) -> Sequence[memoryview]:
        return self.mover.place(session, message, size)

    def on_void(self, session: Session, message: PeerMessage) -> None:
        self.mover.on_void(session, message)

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)
        self.peers.ended(session, reason)


async def join(network: Network, here: Side, there: Side) -> Server:
    """A session between the two, opened by `here`. It may be over already where the wire does harm."""
    here.session = there.session = None
    for side in (here, there):
        side.network = network
        side.mover.open(asyncio.get_running_loop())
    server, port = await network.listen("127.0.0.1", 0, PeerMessage, lambda: there)
    here.addresses[OTHER] = f"127.0.0.1:{port}"
    here.session = await network.connect(here.addresses[OTHER], PeerMessage, here, timeout_s=60)
    here.session.send(here.hello)
    here.peers.entered(here.session, there.hello)
    while there.session is None and not here.session.ended:
        await asyncio.sleep(0)
    return server


class Fault(StrEnum):
    """What happens to the wire at one byte."""

    FLIP = "flip"
    """One bit of the byte is another."""
    LOST = "lost"
    """The connection is gone with what follows."""
    CANCEL = "cancel"
    """Nothing happens to the wire; `Harm.then` is called when the byte is delivered."""


class Harm:
    """`at`: which byte of those that the network carries, counted from 0 over all connections; None: no harm.

    What is sent is delivered in pieces of random length, so that anything can come in between.
    """

    def __init__(self, fault: Fault, at: int | None, random: Random) -> None:
        self.fault, self.at, self.random = fault, at, random
        self.then: Callable[[], object] = bool
        self.num_bytes = 0
        self.is_done = False

    def carry(self, link: Link, end: Any, data: bytes) -> None:
        first, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
        at = None if self.at is None else self.at - first
        if at is None or not 0 <= at < len(data):
            self._deliver(link, end, data)
            return
        self.is_done = True
        if self.fault is Fault.FLIP:
            damaged = bytearray(data)
            damaged[at] ^= 1 << self.random.randrange(8)
            self._deliver(link, end, bytes(damaged))
            return
        self._deliver(link, end, data[: at + 1])
        if self.fault is Fault.CANCEL:
            link.do(end.port, self.then)
            self._deliver(link, end, data[at + 1 :])
        else:
            link.do(end.port, lambda: link.lose())

    def _deliver(self, link: Link, end: Any, data: bytes) -> None:
        while data:
            count = self.random.randrange(1, len(data) + 1) if len(data) > 64 else len(data)
            part, data = data[:count], data[count:]
            link.do(end.port, lambda part=part: end.receive(part))  # type: ignore[misc]


class HarmfulNetwork(MemoryNetwork):
    """A memory network with one fault."""

    def __init__(self, harm: Harm, connections: int = 1) -> None:
        super().__init__(connections=connections)
        self._harm = harm

    def _link(self, here: Any, there: Any, number: int) -> None:
        self.links.append(_HarmfulLink(self._harm, here, there, number))


class _HarmfulLink(Link):
    """One piece comes after the other, so that what it gives rise to comes in between."""

    def __init__(self, harm: Harm, here: Any, there: Any, number: int) -> None:
        self._harm = harm
        self._waiting: deque[Callable[[], object]] = deque()
        super().__init__(here, there, number)

    def do(self, port: MemoryPort, function: Callable[[], object]) -> None:
        self._waiting.append(function)
        if len(self._waiting) == 1:
            port.loop.call_soon(self._next, port)

    def _next(self, port: MemoryPort) -> None:
        self._waiting[0]()
        self._waiting.popleft()
        if self._waiting:
            port.loop.call_soon(self._next, port)

    def carry(self, end: Any, data: bytes) -> None:
        self._harm.carry(self, end, data)


def kv_block(layout: KVLayout, number: int) -> bytes:
    """Numbers that KV could be; every block has its own."""
    random = Random(number)
    count = layout.block_bytes // 2
    return b"".join(
        (0x3C00 + random.randrange(0x600) | random.randrange(2) << 15).to_bytes(2, "little")
        for _ in range(count)
    )


def put_chain(store: Store, names: Sequence[BlockName], blocks: Sequence[bytes]) -> None:
    for head, name, data in zip((None, *names), names, blocks, strict=False):
        assert store.put(name, head, data), "the store is too small"
