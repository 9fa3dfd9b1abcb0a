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
    """Sessions with other nodes, one with each, whichever of the two opened it. Of two that were opened at once the one
    counts that the node with the lesser name opened; what went over the other still counts.

    `address_of`: raises OSError or LookupError for a node that is gone. `gone`: hears of a node that cannot be reached,
    or a session with which ended.
    """

    def __init__(
        self,
        network: Network,
        hello: PeerHello,
        handler_of: Callable[[], Handler],
        address_of: Callable[[NodeId], str],
        gone: Callable[[NodeId, str], None],
    ) -> None:
        self._network, self._hello, self._handler_of = network, hello, handler_of
        self._address_of, self._gone = address_of, gone
        self._sessions: dict[NodeId, Session] = {}
        self._dialling: dict[NodeId, asyncio.Task[Session]] = {}
        self._names: dict[Session, NodeId] = {}

    async def get(self, node: NodeId) -> Session:
        """Raises OSError or TimeoutError."""
        session = self.open_to(node)
        if session is not None:
            return session
        if node not in self._dialling:
            self._dialling[node] = asyncio.get_running_loop().create_task(self._dial(node))
        return await asyncio.shield(self._dialling[node])

    def open_to(self, node: NodeId) -> Session | None:
        """The session with this node, if there is one."""
        session = self._sessions.get(node)
        return None if session is None or session.closed else session

    async def _dial(self, node: NodeId) -> Session:
        try:
            address = self._address_of(node)
            handler = self._handler_of()
            session = await self._network.connect(address, PeerMessage, handler, timeout_s=CONNECT_S)
            check_peer(session, node)
            if session.closed:
                raise ConnectionError("its session is closed")
        except (OSError, TimeoutError, LookupError) as error:
            if (other := self.open_to(node)) is not None:
                return other
            self._gone(node, f"it cannot be reached: {error or 'it is silent'}")
            raise ConnectionError(f"{node} cannot be reached: {error}") from error
        finally:
            del self._dialling[node]
        session.send(self._hello)
        self._names[session] = node
        if self.open_to(node) is None or self._hello.node < node:
            self._sessions[node] = session
        return self._sessions[node]

    def entered(self, session: Session, hello: PeerHello) -> None:
        """Another node opened this session."""
        node = hello.node
        self._names[session] = node
        if hello.stage:
            return
        if self.open_to(node) is None or node < self._hello.node:
            self._sessions[node] = session

    def node_of(self, session: Session) -> NodeId | None:
        """With whom it is; None for one that is not open to letters yet, or any more."""
        return self._names.get(session)

    def ended(self, session: Session, reason: str) -> None:
        node = self._names.pop(session, None)
        if node is not None:
            if self._sessions.get(node) is session:
                del self._sessions[node]
            self._gone(node, reason)


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
