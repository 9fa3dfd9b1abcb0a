"""One node: sessions in the event loop, a worker that computes.

head ──Begin──> node ──worker──> tokens ──Outputs──> head
prefill node ──Offer──> decode node ──Grant──> ──Slices…, Sent──> ──Landed──>
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.cluster.messages import (
    PROTOCOL,
    AttemptFailed,
    Beat,
    Begin,
    CacheChanged,
    Forget,
    Grant,
    HandedOver,
    Hello,
    Landed,
    NodeBound,
    Offer,
    Output,
    Outputs,
    PeerHello,
    PeerMessage,
    Sent,
    Slices,
    Stop,
    Turned,
    Welcome,
    Withdrawn,
    key_of,
)
from isthmus.cluster.stepper import Stepper
from isthmus.cluster.transfers import Incoming, Outgoing
from isthmus.cluster.worker import Requests, ThreadWorker, Worker
from isthmus.conductor import Paths
from isthmus.cost import Cost
from isthmus.engine.interface import Engine
from isthmus.errors import ProtocolError, StartError
from isthmus.messenger import Connection, Network, TcpNetwork
from isthmus.scheduler import Limits, Scheduler
from isthmus.types import BlockName, NodeId, RequestId, Role, Span, TokenLogprobs

log = logging.getLogger(__name__)

CONNECT_S = 5.0
MAX_FORGOTTEN = 4096


@dataclass(frozen=True)
class NodeOptions:
    """`join`: the head's `host:port`. `transfer_s`: how long a granted transfer may bring no byte.

    `prompt_batch`: prompt tokens from which on no further prompt joins an iteration, None for no such limit;
    `order`: of waiting requests; `cost`, `paths`: what work takes here and how fast KV moves, for predictions.
    """

    node: NodeId
    role: Role
    join: str
    token: str
    token_budget: int
    max_sequences: int
    transfer_s: float
    host: str = "127.0.0.1"
    prompt_batch: int | None = None
    order: str = "fcfs"
    cost: Cost | None = None
    paths: Paths | None = None


@dataclass(frozen=True)
class World:
    """Where a node lives: what its sessions run over, what the time is, and who drives its engine."""

    network: Network
    clock_ns: Callable[[], int]
    worker_of: Callable[[Stepper], Worker]


THIS_MACHINE = World(TcpNetwork(), time.monotonic_ns, ThreadWorker)


class Node:
    """Runs until the head says Stop or its session ends. `run` returns the reason."""

    def __init__(self, engine: Engine, options: NodeOptions, world: World = THIS_MACHINE) -> None:
        self._engine, self._options, self._network = engine, options, world.network
        limits = Limits(
            num_blocks=engine.num_blocks,
            block_size=engine.layout.block_size,
            token_budget=options.token_budget,
            prompt_batch=options.prompt_batch or options.token_budget,
            max_sequences=options.max_sequences,
            order=options.order,
        )
        self._stepper = Stepper(engine, Scheduler(limits), _FromWorker(self), world.clock_ns)
        self.worker = world.worker_of(self._stepper)
        self._requests = Requests(self._stepper, self.worker)
        self._head: Connection | None = None
        self._outgoing: dict[RequestId, Outgoing] = {}
        self._incoming: dict[RequestId, Incoming] = {}
        self._offers: dict[RequestId, Connection] = {}
        self._forgotten: OrderedDict[RequestId, None] = OrderedDict()
        self._peers: dict[str, asyncio.Task[Connection]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._traffic = {"kv_bytes_in_total": 0.0, "kv_bytes_out_total": 0.0, "seal_mismatches_total": 0.0}

    async def run(self) -> str:
        """Joins the cluster and serves. Raises StartError when the head cannot be reached or says no."""
        self.loop = asyncio.get_running_loop()
        self._over: asyncio.Future[str] = self.loop.create_future()
        server, port = await self._network.listen(
            self._options.host, 0, PeerMessage, lambda: _FromPeer(self, introduced=False)
        )
        self.worker.start()
        try:
            self._head = await self._network.connect(
                self._options.join, NodeBound, _FromHead(self), timeout_s=CONNECT_S
            )
        except (OSError, TimeoutError, ValueError) as error:
            raise StartError(f"cannot reach the head at {self._options.join}: {error}") from None
        self._head.send(self._hello(f"{self._options.host}:{port}"))
        try:
            return await self._over
        finally:
            server.close()
            self.worker.stop()
            for task in self._tasks:
                task.cancel()

    def _hello(self, address: str) -> Hello:
        engine = self._engine
        return Hello(
            protocol=PROTOCOL,
            token=self._options.token,
            node=self._options.node,
            role=self._options.role,
            address=address,
            revision=engine.revision,
            layout=engine.layout,
            num_blocks=engine.num_blocks,
            max_length=engine.max_length,
            vocab_size=engine.vocab_size,
            cost=self._options.cost,
            paths=self._options.paths or Paths(),
        )

    def end(self, reason: str | Exception) -> None:
        if not self._over.done():
            if isinstance(reason, Exception):
                self._over.set_exception(reason)
            else:
                self._over.set_result(reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def beat(self, every_ms: int) -> None:
        while True:
            assert self._head is not None
            self._head.send(Beat(self._stepper.gauges() | self._traffic))
            self._fail_stalled()
            await asyncio.sleep(every_ms / 1000)

    # From the head.

    def welcome(self, message: Welcome) -> None:
        log.info("%s joined the cluster", self._options.node)
        self._spawn(self.beat(message.beat_ms))

    def begin(self, begin: Begin) -> None:
        if begin.part is Role.PREFILL:
            self._outgoing[begin.key] = Outgoing(begin, self._engine.memory)
            self._spawn(self._attach(begin))
        elif begin.part is Role.DECODE:
            incoming = self._incoming[begin.key] = Incoming(begin, self._engine.memory)
            incoming.connection = self._offers.pop(begin.key, None)
        self._requests.begin(begin)

    def forget(self, key: RequestId) -> None:
        """Drops an attempt wherever it stands. Blocks being received into are freed when the frame ends."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            outgoing.withdraw()
        incoming = self._incoming.get(key)
        if incoming is not None and incoming.receiving:
            incoming.doomed = True
            return
        if incoming is not None:
            del self._incoming[key]
            incoming.withdraw()
        self._offers.pop(key, None)
        self._forgotten[key] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
        self._requests.forget(key)

    def fail(self, begin: Begin, reason: str) -> None:
        """Gives an attempt up and tells the head, which may try again."""
        self.forget(begin.key)
        self.tell(AttemptFailed(begin.request, begin.attempt, f"{self._options.node}: {reason}"))

    def tell(self, message: Any) -> None:
        if self._head is not None:
            self._head.send(message)

    # Sending KV: this node prefills.

    async def _attach(self, begin: Begin) -> None:
        try:
            connection = await self._peer(begin.peer)
        except (OSError, TimeoutError) as error:
            self.fail(begin, f"cannot reach the decode node at {begin.peer}: {error}")
            return
        outgoing = self._outgoing.get(begin.key)
        if outgoing is not None and connection.closed:
            self.fail(begin, f"the session with the decode node at {begin.peer} is closed")
        elif outgoing is not None:
            outgoing.attach(connection)

    async def _peer(self, address: str) -> Connection:
        """The session with a decode node; one for all requests, opened on first use."""
        task = self._peers.get(address)
        if task is None or (task.done() and (task.exception() is not None or task.result().closed)):
            task = self._peers[address] = self.loop.create_task(self._connect_peer(address))
        return await asyncio.shield(task)

    async def _connect_peer(self, address: str) -> Connection:
        connection = await self._network.connect(
            address, PeerMessage, _FromPeer(self, introduced=True), timeout_s=CONNECT_S
        )
        layout, revision = self._engine.layout, self._engine.revision
        connection.send(PeerHello(PROTOCOL, self._options.token, self._options.node, revision, layout))
        return connection

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            outgoing.ready(layers, tokens, blocks)
            self._traffic["kv_bytes_out_total"] += len(layers) * len(tokens) * self._engine.layout.token_bytes

    def prefilled(self, key: RequestId, token: int, logprobs: TokenLogprobs | None) -> None:
        outgoing = self._outgoing.get(key)
        if outgoing is not None:
            outgoing.prefilled(token, logprobs)

    def finished(self, key: RequestId) -> None:
        """A request ended here; one that was to depart has nothing to send any more."""
        self._requests.ended(key)
        outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            outgoing.withdraw()

    def granted(self, key: RequestId) -> None:
        if key in self._outgoing:
            self._outgoing[key].grant()

    def landed(self, key: RequestId) -> None:
        outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            self.tell(HandedOver(outgoing.begin.request, outgoing.begin.attempt))
            self._requests.released(key)

    # Receiving KV: this node decodes.

    def welcomes(self, hello: PeerHello) -> bool:
        mine = (PROTOCOL, self._engine.revision, self._engine.layout)
        trusted = hmac.compare_digest(hello.token.encode(), self._options.token.encode())
        return trusted and (hello.protocol, hello.revision, hello.layout) == mine

    def offered(self, connection: Connection, offer: Offer) -> None:
        key = key_of(offer.request, offer.attempt)
        incoming = self._incoming.get(key)
        if incoming is not None:
            incoming.connection = connection
            incoming.match()
        elif key in self._forgotten:
            connection.send(Withdrawn(offer.request, offer.attempt))
        else:
            self._offers[key] = connection

    def reserved(self, key: RequestId, blocks: Sequence[int]) -> None:
        incoming = self._incoming.get(key)
        if incoming is not None:
            incoming.blocks = blocks
            incoming.match()

    def place(self, connection: Connection, slices: Slices, size: int) -> Sequence[memoryview]:
        incoming = self._incoming.get(key_of(slices.request, slices.attempt))
        if incoming is None or incoming.doomed:
            return [memoryview(bytearray(size))]  # an attempt given up: read past it
        if incoming.connection is not connection:
            raise ProtocolError("KV came over a session that did not offer it")
        incoming.progressed_s = self.loop.time()
        targets = incoming.place(slices, size)
        if targets is None:
            raise ProtocolError(f"KV of {slices.request}, layer {slices.layer}, is not what must come next")
        return targets

    def received(self, slices: Slices) -> None:
        key = key_of(slices.request, slices.attempt)
        incoming = self._incoming.get(key)
        if incoming is None or not incoming.receiving:
            return
        incoming.progressed_s = self.loop.time()
        intact = incoming.receive(slices)
        self._traffic["kv_bytes_in_total"] += (
            slices.stop - slices.first_block * self._engine.layout.block_size
        ) * self._engine.layout.token_bytes
        if incoming.doomed:
            self.forget(key)
        elif not intact:
            self._traffic["seal_mismatches_total"] += 1
            self.fail(incoming.begin, f"a KV block of layer {slices.layer} came damaged (seal mismatch)")
        else:
            self._maybe_complete(key, incoming)

    def sent(self, message: Sent) -> None:
        key = key_of(message.request, message.attempt)
        incoming = self._incoming.get(key)
        if incoming is not None:
            incoming.sent = message
            self._maybe_complete(key, incoming)

    def _fail_stalled(self) -> None:
        """A transfer that began and brought nothing for `transfer_s` is given up."""
        limit = self.loop.time() - self._options.transfer_s
        for incoming in list(self._incoming.values()):
            if incoming.progressed_s >= limit:
                continue
            if incoming.receiving and incoming.connection is not None:
                incoming.connection.abort("it stalled in mid-frame")  # peer_lost frees what came over it
            else:
                self.fail(incoming.begin, f"no KV came for {self._options.transfer_s:g} s")

    def _maybe_complete(self, key: RequestId, incoming: Incoming) -> None:
        if incoming.complete and incoming.sent is not None:
            del self._incoming[key]
            incoming.landed()
            self._requests.imported(key, incoming.sent.token)

    # Either direction.

    def withdrawn(self, message: Withdrawn) -> None:
        """The other side gave up. The head decides what follows; here the attempt is over."""
        key = key_of(message.request, message.attempt)
        self._offers.pop(key, None)
        if key in self._outgoing or key in self._incoming:
            outgoing = self._outgoing.pop(key, None)
            self.forget(key)
            if outgoing is not None:
                self.tell(AttemptFailed(message.request, message.attempt, "the decode node gave it up"))

    def peer_lost(self, connection: Connection, reason: str) -> None:
        """Whatever was under way over a session fails with it."""
        lost: list[Outgoing | Incoming] = [o for o in self._outgoing.values() if o.is_on(connection)]
        lost += [incoming for incoming in self._incoming.values() if incoming.connection is connection]
        for transfer in lost:
            if isinstance(transfer, Incoming):
                transfer.receiving = False
            self.fail(transfer.begin, f"the session with {connection.peer} ended: {reason}")
        for key in [key for key, offered in self._offers.items() if offered is connection]:
            del self._offers[key]


class _FromHead:
    """The session with the head, from the node's side."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def on_message(self, connection: Connection, message: NodeBound) -> None:
        match message:
            case Begin():
                self._node.begin(message)
            case Forget():
                self._node.forget(key_of(message.request, message.attempt))
            case Welcome():
                self._node.welcome(message)
            case Turned():
                self._node.end(StartError(f"the head turned this node away: {message.reason}"))
            case Stop():
                self._node.end("stopped by the head")

    def place(self, connection: Connection, message: NodeBound, size: int) -> Sequence[memoryview]:
        raise ProtocolError(f"a {type(message).__name__} from {connection.peer} carried {size} bytes")

    def on_close(self, connection: Connection, reason: str) -> None:
        self._node.end(f"the session with the head ended: {reason}")


class _FromPeer:
    """A session with another node. `introduced`: this side opened it, or a valid PeerHello came first."""

    def __init__(self, node: Node, *, introduced: bool) -> None:
        self._node, self._introduced = node, introduced

    def on_message(self, connection: Connection, message: PeerMessage) -> None:
        if not self._introduced:
            self._introduced = isinstance(message, PeerHello) and self._node.welcomes(message)
            if not self._introduced:
                raise ProtocolError("it is not a node of this cluster, or runs another model or KV layout")
            return
        match message:
            case Slices():
                self._node.received(message)
            case Sent():
                self._node.sent(message)
            case Grant():
                self._node.granted(key_of(message.request, message.attempt))
            case Landed():
                self._node.landed(key_of(message.request, message.attempt))
            case Offer():
                self._node.offered(connection, message)
            case Withdrawn():
                self._node.withdrawn(message)
            case PeerHello():
                raise ProtocolError("a second PeerHello")

    def place(self, connection: Connection, message: PeerMessage, size: int) -> Sequence[memoryview]:
        if not isinstance(message, Slices) or not self._introduced:
            raise ProtocolError(f"a {type(message).__name__} from {connection.peer} carried {size} bytes")
        return self._node.place(connection, message, size)

    def on_close(self, connection: Connection, reason: str) -> None:
        self._node.peer_lost(connection, reason)


class _FromWorker:
    """Carries the worker's calls over to the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def outputs(self, outputs: Sequence[Output]) -> None:
        self._node.worker.tell(self._node.tell, Outputs(tuple(outputs)))

    def reserved(self, key: RequestId, blocks: Sequence[int]) -> None:
        self._node.worker.tell(self._node.reserved, key, blocks)

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        self._node.worker.tell(self._node.kv_ready, key, layers, tokens, blocks)

    def prefilled(self, key: RequestId, token: int, logprobs: TokenLogprobs | None) -> None:
        self._node.worker.tell(self._node.prefilled, key, token, logprobs)

    def finished(self, key: RequestId) -> None:
        self._node.worker.tell(self._node.finished, key)

    def cache_changed(self, stored: tuple[BlockName, ...], evicted: tuple[BlockName, ...]) -> None:
        self._node.worker.tell(self._node.tell, CacheChanged(stored, evicted))

    def died(self, error: BaseException) -> None:
        self._node.worker.tell(
            self._node.end, StartError(f"the engine failed: {type(error).__name__}: {error}")
        )
