"""Two nodes without engines, and a wire between them that does harm: for `faults` and for tests of the cluster.

A `Side` does with the messages of another node what a node does, with a real store and with KV memory of bytes.
`Harm` counts the bytes of all connections of its network, both ways, and does what it is told at a byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from random import Random
from typing import Any

from isthmus.blocks import KVLayout
from isthmus.cluster.cache import NodeCache
from isthmus.cluster.fetches import Fetcher
from isthmus.cluster.lending import Lender
from isthmus.cluster.messages import (
    Begin,
    Ended,
    Enough,
    Given,
    Grant,
    Landed,
    Lent,
    Offer,
    PeerMessage,
    Sent,
    Slices,
    Want,
    Withdrawn,
)
from isthmus.cluster.transfers import Incoming, Outgoing
from isthmus.engine.emulated import EmulatedMemory
from isthmus.errors import ProtocolError
from isthmus.messenger import MemoryNetwork, Network, Server, Session
from isthmus.messenger.memory import Link, MemoryPort
from isthmus.store import Arena, Log, Shape, Store
from isthmus.types import BlockName, RequestId

NOTHING = RequestId("")
"""Nobody wants anything under this key."""


def store_of(layout: KVLayout, num_slots: int, log: Log | None = None) -> Store:
    return Store(Arena(Shape(layout.num_layers, layout.slice_bytes), num_slots), log)


class Side:
    """One node, as the other one sees it. `reasons`: why its sessions ended; `offered`: prefixes it was told are here.

    `incoming`, `outgoing`: the hand-over under way; it is given up here as a node does, and then `failed` says why.
    """

    def __init__(self, store: Store, layout: KVLayout, num_blocks: int, *, shares_memory: bool = False) -> None:
        self.memory = EmulatedMemory(layout, num_blocks)
        self.store = store
        self.cache = NodeCache(self.memory, store)
        self.offered: list[Sequence[BlockName]] = []
        self.session: Session | None = None
        self.fetcher = Fetcher(self.cache, self._connected, self.offered.append, shares_memory=shares_memory)
        self.lender = Lender(self.cache)
        self.incoming: Incoming | None = None
        self.outgoing: Outgoing | None = None
        self.failed = ""
        self.num_damaged = 0
        self.reasons: list[str] = []

    async def _connected(self, address: str) -> Session:
        if self.session is None:
            raise OSError("nobody is there")
        return self.session

    def close(self) -> None:
        self.cache.close()
        self.store.close()

    # Hand-overs.

    def send(self, begin: Begin) -> Outgoing:
        assert self.session is not None
        self.outgoing, self.failed = Outgoing(begin, self.memory), ""
        self.outgoing.attach(self.session)
        return self.outgoing

    def expect(self, begin: Begin, blocks: Sequence[int]) -> Incoming:
        self.incoming, self.failed = Incoming(begin, self.memory), ""
        self.incoming.blocks = blocks
        return self.incoming

    def give_up(self, reason: str) -> None:
        """Ends the hand-over under way on this side. Its blocks may serve another request when this returns."""
        for transfer in (self.incoming, self.outgoing):
            if transfer is not None:
                transfer.withdraw()
                self.failed = self.failed or reason
        self.incoming = self.outgoing = None

    # What a session calls.

    def on_message(self, session: Session, message: PeerMessage) -> None:
        self.session = session
        match message:
            case Want():
                self.lender.wanted(session, message)
            case Enough():
                self.lender.enough(session, message.key)
            case Given():
                self.fetcher.receive(session, message)
            case Lent() | Ended():
                self.fetcher.answer(session, message)
            case Withdrawn():
                self.give_up("withdrawn by the other side")
            case Grant() | Landed():
                self._on_outgoing(message)
            case Offer() | Slices() | Sent():
                self._on_incoming(session, message)

    def _on_outgoing(self, message: Grant | Landed) -> None:
        if self.outgoing is not None and isinstance(message, Grant):
            self.outgoing.grant()
        elif isinstance(message, Landed):
            self.outgoing = None

    def _on_incoming(self, session: Session, message: Offer | Slices | Sent) -> None:
        incoming = self.incoming
        if incoming is None:
            return
        match message:
            case Offer():
                incoming.offered(session, message)
            case Slices():
                if not incoming.receive(message):
                    self.num_damaged += 1
                    self.give_up("seal mismatch")
            case Sent():
                incoming.sent = message
        if incoming.complete and self.incoming is incoming:
            self.incoming = None
            incoming.landed()

    def place(self, session: Session, message: PeerMessage, size: int) -> Sequence[memoryview]:
        if isinstance(message, Given):
            return self.fetcher.place(session, message, size)
        if not isinstance(message, Slices):
            raise ProtocolError(f"a {type(message).__name__} carried {size} bytes")
        if self.incoming is None:
            return [memoryview(bytearray(size))]
        targets = self.incoming.place(session, message, size)
        if targets is None:
            raise ProtocolError(f"KV of layer {message.layer} is not what must come next")
        return targets

    def on_void(self, session: Session, message: PeerMessage) -> None:
        if isinstance(message, Given):
            self.fetcher.void(session, message)
        elif isinstance(message, Slices) and self.incoming is not None:
            self.incoming.void(message)

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)
        self.fetcher.lost(session)
        self.lender.lost(session)
        self.give_up(f"the session ended: {reason}")


async def join(network: Network, here: Side, there: Side) -> Server:
    """A session between the two, opened by `here`. It may be over already where the wire does harm."""
    there.session = None
    server, port = await network.listen("127.0.0.1", 0, PeerMessage, lambda: there)
    here.session = await network.connect(f"127.0.0.1:{port}", PeerMessage, here, timeout_s=5)
    here.session.send(Enough(NOTHING))
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
