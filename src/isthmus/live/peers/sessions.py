"""Sessions of a process with other nodes, and the configured network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from isthmus.config import Config
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import NodeId
from isthmus.live.messenger import (
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
from isthmus.live.peers.messages import PeerHello, PeerMessage

CONNECT_S = 5.0
REFUSED = "connections_refused_total"

Reach = Callable[[NodeId], Awaitable[Session]]
"""Returns the session with a node. Raises OSError or TimeoutError."""
Tell = Callable[[events.Event], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a coroutine in the event loop and owns it: cancels and awaits it in the end."""


class NoPayloads:
    """Handler of a session that carries no payloads: one that comes is the peer's mistake."""

    def place(self, session: Session, message: Any, size: int) -> Sequence[memoryview]:
        raise ProtocolError(f"a {type(message).__name__} from {session.peer} carried {size} bytes")

    def on_void(self, session: Session, message: Any) -> None:
        """Does nothing: no memory was given."""


def disowned(identity: Identity | None, node: NodeId | None) -> str:
    """Says why the owner of this certificate is not `node` (None: the head); empty when it is, and where certificates
    name nobody."""
    if identity is None or identity.node == node:
        return ""
    return f"its certificate is that of {identity}, not that of {'the head' if node is None else node}"


def check_peer(session: Session, node: NodeId | None) -> None:
    """Ends a session that was dialled and is not with `node` (None: the head), and raises ConnectionRefusedError."""
    if wrong := disowned(session.identity, node):
        session.abort(wrong)
        raise ConnectionRefusedError(wrong)


class Peers:
    """Sessions with other nodes. Letters and shipments to a node go over one session, in order, whichever side opened
    it. A second one exists where both dialled at once, and for lines, which only the opener of a session can open.
    All sessions with a node end together, since messages over one may rest on messages over another.

    `address_of`: raises OSError or LookupError for a node that is gone. `gone`: hears once of a node that cannot be
    reached or whose session ended, before anything is said to it again.
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
        self._names: dict[Session, NodeId] = {}
        self._sessions: dict[NodeId, Session] = {}
        self._dialled: dict[NodeId, Session] = {}
        self._dialling: dict[NodeId, asyncio.Task[Session]] = {}
        self._unsaid: dict[NodeId, list[Any]] = {}
        """Letters to nodes that are being dialled."""

    def say(self, node: NodeId, letter: Any) -> None:
        """Sends a letter, after all that was sent to this node before."""
        session = self.open_to(node)
        if session is not None:
            session.send(letter)
            return
        self._unsaid.setdefault(node, []).append(letter)
        self._dial(node)

    async def get(self, node: NodeId) -> Session:
        """Returns the session over which letters go: the other node may open one while it is dialled. Raises OSError
        or TimeoutError."""
        session = self.open_to(node)
        if session is not None:
            return session
        try:
            dialled = await self.dialled(node)
        except OSError:
            if (other := self.open_to(node)) is not None:
                return other
            raise
        return self.open_to(node) or dialled

    async def dialled(self, node: NodeId) -> Session:
        """Returns the session that this side opened. Raises OSError or TimeoutError."""
        self._end_closed(node)
        session = self._dialled.get(node)
        return session if session is not None else await asyncio.shield(self._dial(node))

    def open_to(self, node: NodeId) -> Session | None:
        """Returns the session over which letters to this node go, if it has been reached."""
        self._end_closed(node)
        return self._sessions.get(node)

    def _end_closed(self, node: NodeId) -> None:
        """Ends sessions that are closing: their `on_close` may come late."""
        for session in (self._sessions.get(node), self._dialled.get(node)):
            if session is not None and session.closed:
                self.ended(session, "its session is closed")

    def _dial(self, node: NodeId) -> asyncio.Task[Session]:
        task = self._dialling.get(node)
        if task is None:
            task = self._dialling[node] = asyncio.get_running_loop().create_task(self._reach(node))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `gone` hears of it
        return task

    async def _reach(self, node: NodeId) -> Session:
        try:
            address = self._address_of(node)
            session = await self._network.connect(address, PeerMessage, self._handler_of(), timeout_s=CONNECT_S)
            check_peer(session, node)
            if session.closed:
                raise ConnectionError("its session is closed")
        except (OSError, TimeoutError, LookupError, ValueError) as error:
            if self.open_to(node) is None:
                self._unsaid.pop(node, None)
                self._gone(node, f"it cannot be reached: {error or 'it is silent'}")
            raise ConnectionError(f"{node} cannot be reached: {error}") from error
        finally:
            del self._dialling[node]
        session.send(self._hello)
        self._dialled[node] = session
        self._open(node, session)
        return session

    def entered(self, session: Session, hello: PeerHello) -> None:
        """Takes a session that another node opened."""
        if hello.stage:
            self._names[session] = hello.node
        else:
            self._open(hello.node, session)

    def _open(self, node: NodeId, session: Session) -> None:
        self._names[session] = node
        if self.open_to(node) is None:
            self._sessions[node] = session
            for letter in self._unsaid.pop(node, ()):
                session.send(letter)

    def left(self, node: NodeId) -> None:
        """Ends the sessions with a node that the head reports gone. A session that waits for lost connections does
        not know, and another process may come under this name."""
        session = next((session for session, name in self._names.items() if name == node), None)
        if session is not None:
            self.ended(session, "it left the cluster")

    def node_of(self, session: Session) -> NodeId | None:
        """Returns the node of a session; None for one without letters yet, or any more."""
        return self._names.get(session)

    def ended(self, session: Session, reason: str) -> None:
        node = self._names.get(session)
        if node is None:
            return
        self._sessions.pop(node, None)
        self._dialled.pop(node, None)
        for other in [other for other, name in self._names.items() if name == node]:
            del self._names[other]
            other.close(reason)
        self._gone(node, reason)


def network_of(config: Config, token: str, credentials: Credentials | None = None) -> TcpNetwork:
    """Returns the configured TCP network, for processes that know the cluster's token; with TLS where there are
    `credentials` or files. Raises ConfigError for a file that cannot be used."""
    files = config.tls
    if files.certificate and files.key and files.authority:
        credentials = TlsFiles(files.certificate, files.key, files.authority)
    terms = Terms(resume_s=config.network.resume_s)
    greetings = Greetings(config.limits.greeting_s, config.limits.greetings)
    return TcpNetwork(
        config.network.connections, credentials, terms, secret=token.encode(), greetings=greetings
    )
