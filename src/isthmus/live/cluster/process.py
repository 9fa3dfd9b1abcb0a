"""One process of a node: its sessions with the head and with other nodes, its cache, and the mover of its blocks.

Most nodes are one process with an engine (`node.py`). A pipeline group has a process for each stage; the later stages
carry out the first one's decisions (`stage.py`). Beside a vLLM server is a process without an engine
(`servers/process.py`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from isthmus.core.attempts import BlocksEvicted, Report, RoleChanged
from isthmus.core.blocks import KVLayout
from isthmus.core.errors import ProtocolError, StartError
from isthmus.core.node import events
from isthmus.core.types import NS_PER_S, BlockName, NodeId, RequestId
from isthmus.facts import NodeFacts
from isthmus.live.cluster.runs import Runs
from isthmus.live.engine.interface import Engine
from isthmus.live.kv.cache import EngineCache, NodeCache, PoolOf
from isthmus.live.kv.mover import BlockMover, KVMover
from isthmus.live.messenger import Handler, Network, RunningClock, Session, address_of
from isthmus.live.peers import messages
from isthmus.live.peers.link_monitor import LinkMonitor
from isthmus.live.peers.sessions import CONNECT_S, REFUSED, NoPayloads, Peers, check_peer, disowned
from isthmus.live.store import Store

if TYPE_CHECKING:
    from isthmus.live.cluster.authority import NodeCredentials

log = logging.getLogger(__name__)

RETRY_S = 0.5
ABSENT = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
STOPPED = "stopped by the head"
"""The reason with which a process ends normally."""

OnLost = Callable[[Sequence[BlockName]], None]
Opener = Callable[[OnLost], Store] | None
"""Opens the store of a node's cache; None where there is none."""


@dataclass(frozen=True)
class NodeOptions:
    """Options of a node's process."""

    facts: NodeFacts
    join: str  # the head's host:port
    transfer_s: float  # how long a transfer that began may bring no byte
    host: str = "127.0.0.1"
    shares_memory: bool = True  # copies blocks of nodes on this host from their memory
    link_s: float | None = None  # how long a link to another cluster may bring nothing; None: unwatched
    stage: int = 0  # of the pipeline group
    join_s: float = 0.0  # how long to wait for a head that does not listen yet


@dataclass(frozen=True)
class Runtime:
    """The world of a process, replaced as a whole in virtual time."""

    network: Network
    clock_ns: Callable[[], int] = time.monotonic_ns
    mover_of: Callable[..., KVMover] = KVMover
    pool_of: PoolOf = ThreadPoolExecutor
    worker_of: Callable[[Any], Any] | None = None  # executes a node's runs; None: a thread
    credentials: NodeCredentials | None = None  # of the network, if the head signs them


class MemberProcess(ABC):
    """A process that `run`s until the head stops it or a required session ends. Closes the store that `store_of`
    opens."""

    entrance: ClassVar[Any] = messages.PeerMessage
    """Messages of sessions that other processes open."""

    def __init__(
        self,
        options: NodeOptions,
        runtime: Runtime,
        revision: str,
        layout: KVLayout,
        store_of: Opener,
        cache_of: Callable[..., NodeCache],
        mover_of: Callable[..., BlockMover],
    ) -> None:
        self._options, self._network, self._facts = options, runtime.network, options.facts
        self._credentials = runtime.credentials
        self._cache = None
        if store_of is not None:
            self._cache = cache_of(store=store_of(self._lost), pool_of=runtime.pool_of)
        self._introduction = messages.PeerHello(
            messages.PROTOCOL, self._facts.node, revision, layout, options.stage
        )
        self.peers = Peers(
            runtime.network,
            self._introduction,
            lambda: FromPeer(self, introduced=True),
            self._address_of,
            lambda node, reason: self.mover.gone(node, reason),
        )
        self._link_monitor = LinkMonitor(self.peers, options.link_s, self.spawn)
        self._addresses: dict[str, Mapping[NodeId, str]] = {}
        self.mover = mover_of(
            cache=self._cache,
            peers=self.peers,
            tell=self.fact,
            spawn=self.spawn,
            shares_memory=options.shares_memory,
        )
        self._running, self._blocks_evicted = RunningClock(runtime.clock_ns), 0
        self._clock_ns = self._running.now_ns
        self._head: Session | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._found: list[tuple[BlockName, BlockName | None]] = []
        """Blocks found on disk at the start, each with its parent."""

    async def run(self) -> str:
        """Joins the cluster and serves; returns why it ended. Raises StartError if the head is not reached or
        refuses."""
        self.loop = asyncio.get_running_loop()
        self._over: asyncio.Future[str] = self.loop.create_future()
        self.mover.open(self.loop)
        if self._cache is not None:  # a large disk takes a while, in which sessions would seem dead
            self._found = await asyncio.to_thread(self._cache.store.recover)
        host = self._options.host
        try:
            self._listener, port = await self._network.listen(host, 0, self.entrance, self.entering)
        except OSError as error:
            raise StartError(f"cannot listen for other nodes at {host}: {error.strerror}") from None
        self.start()
        try:
            self._head = await self._reach_head()
            self._address = address_of(host, port)
            self._send(self.hello())
            return await self._over
        finally:
            self._listener.close()
            await self.mover.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.stop()

    async def _reach_head(self) -> Session:
        """Raises StartError."""
        join = self._options.join
        wait_s = self._options.join_s
        until, said = self.loop.time() + wait_s, False
        while True:
            try:
                return await self._dial_head(join)
            except (OSError, TimeoutError, ValueError) as error:
                if not _may_come(error) or self.loop.time() >= until:
                    raise StartError(f"cannot reach the head at {join}: {_in_words(error)}") from None
                if not said:
                    log.warning("waiting up to %g s for the head at %s: %s", wait_s, join, _in_words(error))
                    said = True
            await asyncio.sleep(RETRY_S)

    async def _dial_head(self, join: str) -> Session:
        """Raises OSError, TimeoutError, ValueError, StartError."""
        own = self._credentials
        if own is not None and not own.is_enrolled:
            await own.enrol(self._network, join, self._options.stage, CONNECT_S)
        handler = RequiredSession(self, "the head", self.on_head)
        session = await self._network.connect(join, messages.NodeBound, handler, timeout_s=CONNECT_S)
        check_peer(session, None)
        return session

    def end(self, reason: str | Exception) -> None:
        if not self._over.done():
            if isinstance(reason, Exception):
                self._over.set_exception(reason)
            else:
                self._over.set_result(reason)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """Ends the process if one of its tasks failed: without it the node would only seem healthy."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.died(error)

    # Overridden by each kind of process.

    @abstractmethod
    def start(self) -> None:
        """Starts computing."""

    def stop(self) -> None:
        """Stops computing and closes the cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache.store.close()

    def heard(self, message: messages.NodeBound) -> None:
        """Takes a message of the head that only some kinds of processes get."""
        raise ProtocolError(f"a {type(message).__name__} came from the head")

    @abstractmethod
    def fact(self, fact: events.Event) -> None:
        """Takes a fact of the mover, or that time has passed. In the event loop."""

    def entering(self) -> Handler:
        """Returns the handler of a session that another process opens."""
        return FromPeer(self, introduced=False)

    # The head.

    @abstractmethod
    def hello(self) -> messages.NodeHello | messages.StageHello:
        """Returns the first message to the head."""

    def welcome(self, message: messages.NodeWelcome) -> None:
        log.info("%s joined the cluster", self._facts.node)
        self.spawn(self._beat(message.beat_ms))

    async def _beat(self, every_ms: int) -> None:
        while True:
            stood_still = self._running.tick()
            self._say()
            self._renew()
            if not stood_still:
                self.fact(events.Woken())
            await asyncio.sleep(every_ms / 1000)

    def _say(self) -> None:
        self._send(messages.Heartbeat(self.gauges(), tuple(self._link_monitor.report())))

    def _renew(self) -> None:
        """Requests the next certificate when it is due. Open sessions keep the previous one."""
        if self._credentials is not None and self._credentials.is_due:
            self._send(messages.Enrol(self._facts.node, self._options.stage, self._credentials.request()))

    def _renewed(self, message: messages.Enrolled) -> None:
        try:
            if self._credentials is None:
                raise ValueError("nobody asked for a certificate")
            self._credentials.take(message.certificate, message.authority)
        except ValueError as error:
            raise ProtocolError(f"from the head came a certificate that cannot be used: {error}") from None

    def gauges(self) -> dict[str, float]:
        """Returns present state and totals, by metric name."""
        found = {REFUSED: self._listener.refused} | self.mover.gauges()
        if self._credentials is not None:
            found["tls_certificate_seconds"] = self._credentials.left_s
        return found

    def tenant_gauges(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Returns cached bytes of each tenant that has a share. `sizes`: in blocks."""
        size = self._introduction.layout.block_bytes
        return {f"tenant_cache_bytes/{name}": count * size for name, count in sizes.items() if name}

    def wake(self, wake: events.Wake) -> None:
        delay_s = max(0, wake.at_ns - self._clock_ns()) / NS_PER_S
        self.loop.call_later(delay_s, self.fact, events.Woken())

    def report(self, report: Report) -> None:
        """Sends a report of the node to the head."""
        if isinstance(report, RoleChanged):
            log.info("%s is a %s node now", report.node, report.role)
        elif isinstance(report, BlocksEvicted):
            self._blocks_evicted += len(report.names)
        self._send(report)

    def _send(self, message: Any) -> None:
        if self._head is not None:
            self._head.send(message)

    def on_head(self, message: messages.NodeBound) -> None:
        match message:
            case messages.NodeWelcome():
                self.welcome(message)
            case messages.Enrolled():
                self._renewed(message)
            case messages.Neighbours():
                before = self._addresses.get(message.cluster, {})
                self._addresses[message.cluster] = message.addresses
                for node in before:
                    if node not in message.addresses:
                        self.peers.left(node)
                if message.cluster != self._facts.cluster:
                    self._link_monitor.linked(message)
            case messages.Poll():
                self._say()
            case messages.NodeRefused():
                self.end(StartError(f"the head turned this node away: {message.reason}"))
            case messages.Stop():
                self.end(STOPPED)
            case _:
                self.heard(message)

    # Other nodes.

    def _address_of(self, node: NodeId) -> str:
        """Returns where a node is reached. Raises OSError for an unknown one: it is gone."""
        for addresses in self._addresses.values():
            if node in addresses:
                return addresses[node]
        raise OSError(f"{node} is not there")

    def trusts(self, session: Session, hello: messages.PeerHello) -> bool:
        """Whether a peer is whom its certificate names, and has the same model and KV layout."""
        mine = self._introduction
        alike = (hello.protocol, hello.revision, hello.layout) == (mine.protocol, mine.revision, mine.layout)
        return alike and not disowned(session.identity, hello.node)

    def introduced(self, session: Session, hello: messages.PeerHello) -> None:
        self.peers.entered(session, hello)
        self._link_monitor.introduced(session, hello.node)

    def _lost(self, names: Sequence[BlockName]) -> None:
        """Hears from a thread of the store which blocks' bytes are lost."""
        self.mover.lost_bytes(names)

    def died(self, error: BaseException) -> None:
        """Ends the process after a bug, from any thread."""
        self.loop.call_soon_threadsafe(
            self.end, StartError(f"the node failed: {type(error).__name__}: {error}")
        )


class EngineProcess(MemberProcess):
    """A process with an engine. Without a store prefixes are reused from the engine's memory only."""

    mover: KVMover
    runs: Runs

    def __init__(self, engine: Engine, options: NodeOptions, runtime: Runtime, store_of: Opener) -> None:
        self._engine, memory = engine, engine.memory
        num_staged, answer_s = options.facts.transit_blocks // 2, options.transfer_s
        cache_of = partial(EngineCache, memory, on_lost=self._lost, max_staged=num_staged)
        handover = partial(runtime.mover_of, first_layer=engine.layers[0], received=self.received)
        mover_of = partial(handover, memory=memory, attends=engine.attend, answer_s=answer_s)
        super().__init__(options, runtime, engine.revision, engine.layout, store_of, cache_of, mover_of)

    def introduced(self, session: Session, hello: messages.PeerHello) -> None:
        super().introduced(session, hello)
        session.answer_lines(self.mover.hosts.answer)

    @abstractmethod
    def received(self, key: RequestId, token: int) -> None:
        """Takes the first token of an attempt that was handed over."""

    def hello(self) -> messages.NodeHello | messages.StageHello:
        options, facts = self._options, self._facts
        return messages.StageHello(messages.PROTOCOL, facts.node, options.stage, facts.pipeline, self._address)

    def gauges(self) -> dict[str, float]:
        counters = {f"{name}_total": value for name, value in self.runs.counters.items()}
        return counters | self._engine.constraints.gauges() | super().gauges()


def _may_come(error: Exception) -> bool:
    """Whether the head may just not have started: nobody listens, or its machine or name is unknown."""
    return isinstance(error, (TimeoutError, socket.gaierror)) or (
        isinstance(error, OSError) and error.errno in ABSENT
    )


def _in_words(error: Exception) -> str:
    """Returns why a session could not begin, as one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate: {error.verify_message}"
    cut = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
    if cut or isinstance(error, ssl.SSLEOFError) or getattr(error, "reason", "") == "WRONG_VERSION_NUMBER":
        return f"{error}; has one of the two TLS, and the other none? (--join isthmus://HOST:PORT#TOKEN has)"
    return str(error) or "it is silent"


class RequiredSession(NoPayloads):
    """A session with `what`, whose end ends the process; `heard` takes its messages."""

    def __init__(self, process: MemberProcess, what: str, heard: Callable[[Any], None]) -> None:
        self._process, self._what, self._heard = process, what, heard

    def on_message(self, session: Session, message: Any) -> None:
        self._heard(message)

    def on_close(self, session: Session, reason: str) -> None:
        self._process.end(f"the session with {self._what} ended: {reason}")


class FromPeer(NoPayloads):
    """A session with another node. `introduced`: this side opened it, or a valid PeerHello has come."""

    def __init__(self, process: MemberProcess, *, introduced: bool) -> None:
        self._process, self._introduced = process, introduced

    def on_message(self, session: Session, message: messages.PeerMessage) -> None:
        if not self._introduced:
            if not isinstance(message, messages.PeerHello) or not self._process.trusts(session, message):
                raise ProtocolError("it is not a node of this cluster, or runs another model or KV layout")
            self._introduced = True
            self._process.introduced(session, message)
        elif isinstance(message, messages.PeerHello):
            raise ProtocolError("a second PeerHello")
        elif not isinstance(message, messages.Probe):
            peer = self._process.peers.node_of(session)
            if peer is not None:
                self._process.mover.on_peer(session, peer, message)

    def place(self, session: Session, message: messages.PeerMessage, size: int) -> Sequence[memoryview]:
        if self._introduced:
            return self._process.mover.place(session, message, size)
        return super().place(session, message, size)

    def on_void(self, session: Session, message: messages.PeerMessage) -> None:
        self._process.mover.on_void(session, message)

    def on_close(self, session: Session, reason: str) -> None:
        self._process.peers.ended(session, reason)
