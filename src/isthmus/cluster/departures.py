"""Attempts whose KV leaves this process for their decode nodes, and the sessions it leaves over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from isthmus.cluster.messages import Begin, PeerHello, PeerMessage
from isthmus.cluster.transfers import Outgoing
from isthmus.engine.interface import KVBytes
from isthmus.messenger import Handler, Network, Session
from isthmus.types import RequestId, Span, TokenLogprobs

CONNECT_S = 5.0


class Peers:
    """Sessions with other nodes that were opened here: one for each address, on first use."""

    def __init__(self, network: Network, hello: PeerHello, handler_of: Callable[[], Handler]) -> None:
        self._network, self._hello, self._handler_of = network, hello, handler_of
        self._sessions: dict[str, asyncio.Task[Session]] = {}

    async def get(self, address: str) -> Session:
        """Raises OSError or TimeoutError."""
        task = self._sessions.get(address)
        if task is None or (task.done() and (task.exception() is not None or task.result().closed)):
            task = self._sessions[address] = asyncio.get_running_loop().create_task(self._connect(address))
        return await asyncio.shield(task)

    def open_to(self, address: str) -> Session | None:
        """The session with this address, if there is one."""
        task = self._sessions.get(address)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return None if task.result().closed else task.result()

    async def _connect(self, address: str) -> Session:
        connection = await self._network.connect(address, PeerMessage, self._handler_of(), timeout_s=CONNECT_S)
        connection.send(self._hello)
        return connection


class Departures:
    """For an event loop. `spawn` owns what it starts; `failed` hears of attempts given up here, with the reason."""

    def __init__(
        self,
        memory: KVBytes,
        first_layer: int,
        peers: Peers,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        failed: Callable[[Begin, str], None],
    ) -> None:
        self._memory, self._first_layer, self._peers = memory, first_layer, peers
        self._spawn, self._failed = spawn, failed
        self._outgoing: dict[RequestId, Outgoing] = {}
        self._bytes_out = 0

    def begin(self, begin: Begin) -> None:
        self._outgoing[begin.key] = Outgoing(begin, self._memory, self._first_layer)
        self._spawn(self._attach(begin))

    async def _attach(self, begin: Begin) -> None:
        try:
            connection = await self._peers.get(begin.peer)
        except (OSError, TimeoutError) as error:
            self._fail(begin.key, f"cannot reach the decode node at {begin.peer}: {error}")
            return
        outgoing = self._outgoing.get(begin.key)
        if outgoing is not None and connection.closed:
            self._fail(begin.key, f"the session with the decode node at {begin.peer} is closed")
        elif outgoing is not None:
            outgoing.attach(connection)

    def ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV is in place, in layers of `memory`."""
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            outgoing.ready(layers, tokens, blocks)

    def prefilled(self, key: RequestId, token: int, logprobs: TokenLogprobs | None) -> None:
        """Its first token is known, and all its KV was told."""
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            outgoing.prefilled(token, logprobs)

    def grant(self, key: RequestId) -> None:
        if key in self._outgoing:
            self._outgoing[key].grant()

    def land(self, key: RequestId) -> Begin | None:
        """All of it has arrived. None when nothing of this attempt was under way."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is None:
            return None
        self._bytes_out += outgoing.bytes_out
        return outgoing.begin

    def withdraw(self, key: RequestId) -> None:
        """Gives it up here, or does nothing."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            self._bytes_out += outgoing.bytes_out
            outgoing.withdraw()

    def withdrawn(self, key: RequestId) -> None:
        self._fail(key, "the decode node gave it up")

    def lost(self, connection: Session, reason: str) -> None:
        """A session ended, and what was under way over it with it."""
        for key, outgoing in list(self._outgoing.items()):
            if outgoing.is_on(connection):
                self._fail(key, f"the session with {connection.peer} ended: {reason}")

    def _fail(self, key: RequestId, reason: str) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            self.withdraw(key)
            self._failed(outgoing.begin, reason)

    @property
    def bytes_out(self) -> int:
        return self._bytes_out + sum(outgoing.bytes_out for outgoing in self._outgoing.values())
