"""Sessions of a process: those with other nodes that it opened, and what a session without payloads answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from isthmus.cluster.messages import PeerHello, PeerMessage
from isthmus.errors import ProtocolError
from isthmus.messenger import Handler, Network, Session
from isthmus.node import events
from isthmus.types import NodeId

CONNECT_S = 5.0

Reach = Callable[[NodeId], Awaitable[Session]]
"""The session with a node. Raises OSError or TimeoutError."""
Tell = Callable[[events.Event], None]


class Bare:
    """The side of a session to which nobody sends payloads."""

    def place(self, connection: Session, message: Any, size: int) -> Sequence[memoryview]:
        raise ProtocolError(f"a {type(message).__name__} from {connection.peer} carried {size} bytes")

    def on_void(self, connection: Session, message: Any) -> None:
        """Nothing was placed."""


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
