"""Sessions of a process: over which network, those with other nodes that it opened, and what a session without payloads
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from isthmus.cluster.messages import PeerHello, PeerMessage
from isthmus.config import Config
from isthmus.errors import ProtocolError
from isthmus.messenger import (
    Credentials,
    Greetings,
    Handler,
    Identity,
    Network,
    Session,
    TcpNetwork,
    Terms,
    TlsFiles,
)
from isthmus.node import events
from isthmus.types import NodeId

CONNECT_S = 5.0
REFUSED = "connections_refused_total"

Reach = Callable[[NodeId], Awaitable[Session]]
"""The session with a node. Raises OSError or TimeoutError."""
Tell = Callable[[events.Event], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs it in the event loop and owns it: cancels and awaits it in the end."""


class NoPayloads:
    """The side of a session to which nobody sends payloads: one that comes all the same is the peer's mistake."""

    def place(self, session: Session, message: Any, size: int) -> Sequence[memoryview]:
        raise ProtocolError(f"a {type(message).__name__} from {session.peer} carried {size} bytes")

    def on_void(self, session: Session, message: Any) -> None:
        """Nothing was placed."""


def disowned(identity: Identity | None, node: NodeId | None) -> str:
    """Why whoever has this certificate is not `node` (None: the head); empty when it is, and where certificates name
    nobody."""
    if identity is None or identity.node == node:
        return ""
    return f"its certificate is that of {identity}, not that of {'the head' if node is None else node}"


def check_peer(session: Session, node: NodeId | None) -> None:
    """Ends a session that was dialled when it is not with `node` (None: the head). Raises
    ConnectionRefusedError then."""
    if wrong := disowned(session.identity, node):
        session.abort(wrong)
        raise ConnectionRefusedError(wrong)


class Peers:
    """Sessions with other nodes that were opened here: one for each address, on first use. `node_at`: who is to be
    reached at an address."""

    def __init__(
        self,
        network: Network,
        hello: PeerHello,
        handler_of: Callable[[], Handler],
        node_at: Callable[[str], NodeId],
    ) -> None:
        self._network, self._hello, self._handler_of, self._node_at = network, hello, handler_of, node_at
        self._sessions: dict[str, asyncio.Task[Session]] = {}
        self._open: dict[str, Session] = {}

    async def get(self, address: str) -> Session:
        """Raises OSError or TimeoutError."""
        task = self._sessions.get(address)
        if task is None or (task.done() and (task.exception() is not None or task.result().closed)):
            task = self._sessions[address] = asyncio.get_running_loop().create_task(self._connect(address))
        return await asyncio.shield(task)

    def open_to(self, address: str) -> Session | None:
        """The session with this address, if there is one."""
        session = self._open.get(address)
        return None if session is None or session.closed else session

    async def _connect(self, address: str) -> Session:
        session = await self._network.connect(address, PeerMessage, self._handler_of(), timeout_s=CONNECT_S)
        if session.identity is not None:
            check_peer(session, self._node_at(address))
        session.send(self._hello)
        self._open[address] = session
        return session


def network_of(config: Config, token: str, credentials: Credentials | None = None) -> TcpNetwork:
    """TCP as configured, for those who know the cluster's token; with TLS where there are `credentials`, or files for
    it. Raises ConfigError for a file that cannot be used."""
    files = config.tls
    if files.certificate and files.key and files.authority:
        credentials = TlsFiles(files.certificate, files.key, files.authority)
    terms = Terms(resume_s=config.network.resume_s)
    greetings = Greetings(config.limits.greeting_s, config.limits.greetings)
    return TcpNetwork(
        config.network.connections, credentials, terms, secret=token.encode(), greetings=greetings
    )
