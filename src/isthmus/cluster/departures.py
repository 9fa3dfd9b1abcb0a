"""Attempts whose KV leaves this process, and those whose KV comes to it, and the sessions it goes over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from isthmus.cluster.messages import Offer, Sent, Slices
from isthmus.cluster.sessions import Reach
from isthmus.cluster.transfers import Incoming, Outgoing
from isthmus.engine.interface import KVBytes
from isthmus.errors import ProtocolError
from isthmus.messenger import Session
from isthmus.node import events
from isthmus.types import NodeId, RequestId, Span

MAX_OFFERS = 4096
"""Attempts that were offered and have not begun here; more are of attempts that never will."""

Tell = Callable[[events.Event], None]


class Departures:
    """For an event loop. `spawn` owns what it starts."""

    def __init__(
        self,
        memory: KVBytes,
        first_layer: int,
        reach: Reach,
        tell: Tell,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._memory, self._first_layer, self._reach = memory, first_layer, reach
        self._tell, self._spawn = tell, spawn
        self._outgoing: dict[RequestId, Outgoing] = {}
        self._bytes_out = 0

    def offer(self, offer: events.Offer) -> None:
        self._outgoing[offer.key] = Outgoing(offer.key, offer.extent, self._memory, self._first_layer)
        self._spawn(self._attach(offer.key, offer.peer))

    async def _attach(self, key: RequestId, peer: NodeId) -> None:
        try:
            connection = await self._reach(peer)
            if connection.closed:
                raise ConnectionError("its session is closed")
        except (OSError, TimeoutError) as error:
            self._tell(events.Severed((key,), f"cannot reach {peer}, where it decodes: {error}"))
        else:
            self.on(key, Outgoing.attach, connection)

    def on(self, key: RequestId, does: Callable[..., None], *arguments: object) -> None:
        """Calls a method of `Outgoing` if this attempt departs."""
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            does(outgoing, *arguments)

    def send(self, send: events.Send) -> None:
        if send.computed:
            self.on(send.key, Outgoing.computed)
        self.on(send.key, Outgoing.send)

    def granted(self, connection: Session, key: RequestId) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is not None and outgoing.is_on(connection):
            self._tell(events.Granted(key))

    def landed(self, connection: Session, key: RequestId) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is not None and outgoing.is_on(connection):
            if not outgoing.is_sent:
                raise ProtocolError(f"{key} landed before it was sent")
            self.release(key)
            self._tell(events.Landed(key))

    def release(self, key: RequestId) -> None:
        outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            self._bytes_out += outgoing.bytes_out
            outgoing.cancel()

    def lost(self, connection: Session) -> list[RequestId]:
        return [key for key, outgoing in self._outgoing.items() if outgoing.is_on(connection)]

    @property
    def bytes_out(self) -> int:
        return self._bytes_out + sum([outgoing.bytes_out for outgoing in self._outgoing.values()])


class Arrivals:
    """For an event loop. `received` hears of the first token of an attempt that is whole, before `tell`."""

    def __init__(self, memory: KVBytes, tell: Tell, received: Callable[[RequestId, int], object]) -> None:
        self._memory, self._tell, self._received = memory, tell, received
        self._incoming: dict[RequestId, Incoming] = {}
        self._offers: OrderedDict[RequestId, dict[Session, Span]] = OrderedDict()
        """Of attempts for which there is no room yet, or which have not begun here."""
        self.bytes_in = self.seal_mismatches = 0

    def offered(self, connection: Session, offer: Offer) -> None:
        """Raises ProtocolError for layers that are not the model's, or that were offered already."""
        incoming = self._incoming.get(offer.key)
        known = incoming.senders if incoming is not None else self._offers.get(offer.key, {})
        layers = Span(offer.first_layer, offer.stop_layer)
        taken = any(layers.start < other.stop and other.start < layers.stop for other in known.values())
        num_layers = self._memory.layout.num_layers
        if taken or connection in known or not 0 <= layers.start < layers.stop <= num_layers:
            raise ProtocolError(f"layers {layers.start} to {layers.stop} of {offer.key} cannot be taken")
        if incoming is not None:
            incoming.grant(connection, layers)
            return
        self._offers[offer.key] = {**known, connection: layers}
        if len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)

    def grant(self, grant: events.Grant) -> None:
        incoming = Incoming(grant.key, grant.extent, grant.blocks, self._memory)
        self._incoming[grant.key] = incoming
        for connection, layers in self._offers.pop(grant.key, {}).items():
            incoming.grant(connection, layers)

    def place(self, connection: Session, slices: Slices, size: int) -> Sequence[memoryview]:
        """Raises ProtocolError for what is not expected."""
        incoming = self._incoming.get(slices.key)
        if incoming is None:
            return [memoryview(bytearray(size))]  # an attempt given up: read past it
        targets = incoming.place(connection, slices, size)
        if targets is None:
            raise ProtocolError(f"KV of {slices.key}, layer {slices.layer}, is not what must come next")
        self._tell(events.Moved(slices.key))
        return targets

    def receive(self, slices: Slices) -> None:
        incoming = self._incoming.get(slices.key)
        if incoming is None:
            return
        layout = self._memory.layout
        self.bytes_in += (slices.stop - slices.first_block * layout.block_size) * layout.token_bytes
        if incoming.receive(slices):
            self._maybe_whole(incoming)
            return
        self.seal_mismatches += 1
        self.release(slices.key)
        reason = f"a KV block of layer {slices.layer} came damaged (seal mismatch)"
        self._tell(events.Broken(slices.key, reason))

    def sent(self, connection: Session, sent: Sent) -> None:
        incoming = self._incoming.get(sent.key)
        if incoming is not None and connection in incoming.senders and incoming.sent is None:
            incoming.sent = sent
            self._maybe_whole(incoming)

    def _maybe_whole(self, incoming: Incoming) -> None:
        if incoming.complete and incoming.sent is not None:
            self._received(incoming.key, incoming.sent.token)
            self._tell(events.Received(incoming.key))

    def void(self, slices: Slices) -> None:
        """The sender gave up in the midst of a frame."""
        incoming = self._incoming.get(slices.key)
        if incoming is not None:
            incoming.void(slices)

    def land(self, key: RequestId) -> None:
        incoming = self._incoming.get(key)
        if incoming is not None:
            incoming.land()
            self.release(key)

    def release(self, key: RequestId) -> None:
        """Nothing more is written into its blocks when this returns."""
        self._offers.pop(key, None)
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            incoming.refuse()

    def lost(self, connection: Session) -> list[RequestId]:
        """Those that are not whole, and will not be."""
        offered = [key for key, offers in self._offers.items() if connection in offers]
        for key in offered:
            del self._offers[key]
        expected = [
            key for key, each in self._incoming.items() if connection in each.senders and not each.complete
        ]
        return offered + expected
