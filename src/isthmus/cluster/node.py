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
from functools import partial
from typing import Any

from isthmus.cluster.cache import Load, NodeCache, chains_of, gauges_of, prefix_with_state
from isthmus.cluster.crossings import Crossings
from isthmus.cluster.departures import CONNECT_S, Departures, Peers
from isthmus.cluster.fetches import Fetch, Fetcher
from isthmus.cluster.keeper import Keeper
from isthmus.cluster.lending import Lender
from isthmus.cluster.messages import (
    PROTOCOL,
    AttemptFailed,
    Beat,
    Became,
    Become,
    Begin,
    CacheChanged,
    Copy,
    Ended,
    Enough,
    FetchEnded,
    Forget,
    Gathered,
    Given,
    Grant,
    HandedOver,
    Hello,
    Landed,
    Lent,
    Linked,
    NodeBound,
    Offer,
    Output,
    Outputs,
    PeerHello,
    PeerMessage,
    Probe,
    Sent,
    Slices,
    StageHello,
    Stop,
    Turned,
    Want,
    Welcome,
    Withdrawn,
    key_of,
)
from isthmus.cluster.pipeline import Group, GroupCache
from isthmus.cluster.stage_messages import StageOpen
from isthmus.cluster.stepper import Stepper
from isthmus.cluster.transfers import Incoming
from isthmus.cluster.worker import Requests, ThreadWorker, Worker
from isthmus.deploy import NodeFacts
from isthmus.engine.interface import Engine
from isthmus.errors import ProtocolError, StartError
from isthmus.messenger import Network, Session
from isthmus.scheduler import BlockPool, Scheduler
from isthmus.store import Store
from isthmus.types import BlockName, RequestId, Role, Span, TokenLogprobs

log = logging.getLogger(__name__)

MAX_FORGOTTEN = 4096
LOST_S = 0.25
"""A node that loses a peer leaves the head so long to find out itself: one death is to cost one attempt."""
OnLost = Callable[[Sequence[BlockName]], None]


@dataclass(frozen=True)
class NodeOptions:
    """What a process of a node knows beside its `facts`. `join`: the head's `host:port`. `transfer_s`: how long a
    granted transfer may bring no byte.

    `shares_memory`: reads blocks of nodes on this host where they lie; `link_s`: how long a link to another cluster may
    bring nothing, None does not watch links. `stage`: of the pipeline group, each with some of the layers.
    """

    facts: NodeFacts
    join: str
    token: str
    transfer_s: float
    host: str = "127.0.0.1"
    shares_memory: bool = True
    link_s: float | None = None
    stage: int = 0


@dataclass(frozen=True)
class World:
    """Where a node lives: what its sessions run over, what the time is, and who drives its engine."""

    network: Network
    clock_ns: Callable[[], int]
    worker_of: Callable[[Stepper], Worker]


def this_machine(network: Network) -> World:
    return World(network, time.monotonic_ns, ThreadWorker)


class Node:
    """Runs until the head says Stop or its session ends. `run` returns the reason.

    `store_of`: opens the store of its cache, which it closes; None: prefixes are reused from the engine's memory
    alone.
    """

    def __init__(
        self,
        engine: Engine,
        options: NodeOptions,
        world: World,
        store_of: Callable[[OnLost], Store] | None = None,
    ) -> None:
        store = store_of(self._lost) if store_of is not None else None
        self._engine, self._options, self._network = engine, options, world.network
        facts = self._facts = options.facts
        assert engine.num_blocks >= facts.kv_blocks, "its memory holds less than its facts say"
        assert engine.layout.state_blocks == facts.state_blocks, "its states are others than its facts say"
        hello = PeerHello(PROTOCOL, options.token, facts.node, engine.revision, engine.layout)
        peers = Peers(self._network, hello, lambda: _FromPeer(self, introduced=True))
        self._crossings = Crossings(peers, options.link_s, self._spawn)
        self.departures = Departures(engine.memory, engine.layers[0], peers, self._spawn, self.fail)
        pool = BlockPool(facts.kv_blocks)
        self._tiers = facts.tiers() if store is not None else None
        self._group = Group(facts.pipeline, self, self._later) if facts.pipeline > 1 else None
        self._cache = self._cache_over(store)
        keeper: Keeper | None = None
        self._fetcher: Fetcher | None = None
        self._lender: Lender | None = None
        if self._cache is not None and self._tiers is not None:
            keeper = Keeper(engine.revision, engine.layout, pool, self._tiers, self._cache)
        if self._cache is not None and self._group is None:  # a stage's blocks are of no use elsewhere
            self._fetcher = Fetcher(self._cache, peers.get, self._offer, shares_memory=options.shares_memory)
            self._lender = Lender(self._cache)
        scheduler = self._scheduler = Scheduler(facts.limits(facts.role), self._tiers, pool, facts.target)
        self._stepper = Stepper(engine, scheduler, _FromWorker(self), world.clock_ns, keeper, self._group)
        self.worker = world.worker_of(self._stepper)
        if keeper is not None:
            keeper.post = self.worker.post
        self._requests = Requests(self._stepper, self.worker)
        self._head: Session | None = None
        self._incoming: dict[RequestId, Incoming] = {}
        self._offers: dict[RequestId, list[tuple[Session, Offer]]] = {}
        self._forgotten: OrderedDict[RequestId, None] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_copies = 0
        self._recovered: list[tuple[BlockName, BlockName | None]] = []
        self._traffic = {"kv_bytes_in_total": 0.0, "seal_mismatches_total": 0.0}

    async def run(self) -> str:
        """Joins the cluster and serves. Raises StartError when the head cannot be reached or says no."""
        self.loop = asyncio.get_running_loop()
        self._over: asyncio.Future[str] = self.loop.create_future()
        if self._cache is not None:  # a large disk takes a while, in which sessions would seem dead
            self._recovered = await asyncio.to_thread(self._cache.store.recover)
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
        self._address = f"{self._options.host}:{port}"
        if self._group is None:
            self._head.send(self._hello(self._address))
        else:
            facts, token = self._facts, self._options.token
            stage = StageHello(PROTOCOL, token, facts.node, 0, facts.pipeline, self._address)
            self._head.send(stage)
        try:
            return await self._over
        finally:
            server.close()
            if self._lender is not None:
                await self._lender.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # fetches end, so that no load waits for them
            if self._group is not None:
                self._group.close()
            self.worker.stop()
            if self._cache is not None:
                self._cache.close()
                self._cache.store.close()

    def _hello(self, address: str) -> Hello:
        engine, joined = self._engine, self._facts.joined()
        return Hello(
            protocol=PROTOCOL,
            token=self._options.token,
            node=joined.node,
            role=joined.role,
            address=address,
            revision=engine.revision,
            layout=engine.layout,
            num_blocks=self._facts.kv_blocks,
            max_length=engine.max_length,
            vocab_size=engine.vocab_size,
            cost=joined.cost,
            paths=joined.paths,
            kv_dtype=joined.kv_dtype,
            cluster=joined.cluster,
            max_sequences=joined.max_sequences,
            cache_blocks=joined.cache_blocks,
        )

    def _cache_over(self, store: Store | None) -> NodeCache | None:
        if store is None:
            return None
        if self._group is None:
            return NodeCache(self._engine.memory, store, self._lost)
        return GroupCache(self._engine.memory, store, self._group, self._lost)

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
            self._head.send(Beat(self._gauges(), tuple(self._crossings.report())))
            self._fail_stalled()
            await asyncio.sleep(every_ms / 1000)

    def _gauges(self) -> dict[str, float]:
        found = self._stepper.gauges() | self._traffic | {"kv_bytes_out_total": self.departures.bytes_out}
        if self._cache is not None:
            found |= gauges_of(self._cache.store.stat())
        if self._group is not None:
            found |= self._group.gauges()
        if self._fetcher is not None and self._lender is not None:
            found["kv_bytes_fetched_total"] = self._fetcher.bytes_in
            found["kv_bytes_borrowed_total"] = self._fetcher.bytes_lent
            found["kv_bytes_given_total"] = self._lender.bytes_out
            found["seal_mismatches_total"] += self._fetcher.seal_mismatches
        return found

    # From the head.

    def welcome(self, message: Welcome) -> None:
        log.info("%s joined the cluster", self._facts.node)
        self._spawn(self.beat(message.beat_ms))
        if self._cache is not None:
            found = self._recovered
            if self._group is not None:
                found, useless = self._group.common(found)
                self._cache.drop(useless)
            chains = chains_of(found)
            if chains:
                self.worker.post(lambda: self._stepper.recovered(chains))

    def linked(self, message: Linked) -> None:
        self._crossings.linked(message)

    def become(self, role: Role) -> None:
        """Takes another role: the same engine and caches, and as many requests at once as nodes of that role take."""

        def change() -> None:
            self._scheduler.limits = self._facts.limits(role)
            self.worker.tell(self.tell, Became(role))

        log.info("%s becomes a %s node", self._facts.node, role)
        self.worker.post(change)

    # The later stages of a pipeline.

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        self.worker.tell(function, *arguments)

    def gathered(self, addresses: Sequence[str]) -> None:
        """All stages are there: joins them, and then the cluster."""
        if self._group is None:
            raise ProtocolError("stages came to a node that has none")
        self._spawn(self._form(self._group, addresses))

    async def _form(self, group: Group, addresses: Sequence[str]) -> None:
        engine, cache = self._engine, self._cache
        store = cache.store if cache is not None else None
        opening = StageOpen(
            protocol=PROTOCOL,
            token=self._options.token,
            group=self._facts.node,
            stage=1,
            revision=engine.revision,
            layout=engine.layout,
            num_blocks=self._facts.kv_blocks,
            num_slots=store.arena.num_slots if store is not None else 0,
            num_records=store.log.num_records if store is not None and store.log is not None else 0,
            later=tuple(addresses[1:]),
        )
        try:
            await group.form(self._network, addresses[0], opening, timeout_s=CONNECT_S)
        except (OSError, TimeoutError) as error:
            self.end(StartError(f"cannot reach the next pipeline stage at {addresses[0]}: {error}"))
            return
        self.tell(self._hello(self._address))

    def sampled(
        self, keys: Sequence[RequestId], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> None:
        over: list[RequestId] = []
        self.worker.insert(lambda: over.extend(self._stepper.sampled(keys, tokens, logprobs)))
        for key in over:
            self._requests.released(key)

    def stage_failed(self, begin: Begin, reason: str) -> None:
        self.fail(begin, reason)

    def stage_lost(self, names: tuple[BlockName, ...]) -> None:
        self._lost(names)

    def group_ended(self, reason: str) -> None:
        self.end(reason)

    def _lost(self, names: Sequence[BlockName]) -> None:
        """From a thread of the store: bytes are gone that the scheduler counts on."""
        self.worker.post(lambda: self._stepper.lost(tuple(names)))

    def copy(self, message: Copy) -> None:
        """A prefix that many ask for, before anybody asks here."""
        if self._fetcher is not None:
            self._num_copies += 1
            self._spawn(self._run_copy(self._fetcher, message, RequestId(f"copy-{self._num_copies}")))

    async def _run_copy(self, fetcher: Fetcher, message: Copy, key: RequestId) -> None:
        held = next(
            (at for at, name in enumerate(message.names) if not fetcher.cache.store.contains(name)),
            len(message.names),
        )
        fetch = Fetch(key, message.names, held, fetcher.cache)
        try:
            await fetcher.run(fetch, message.source, background=True)
        finally:
            fetch.release()

    def _begin_fetch(self, fetcher: Fetcher, begin: Begin) -> Fetch:
        """For a prefill also the state at its end; one that is not handed over decodes with the state that is."""
        assert begin.fetch is not None
        names = begin.names[: begin.fetch.stop]
        if begin.part is not Role.DECODE:
            names = prefix_with_state(self._engine.layout, begin.names, begin.fetch.stop)
        fetch = Fetch(begin.key, names, begin.fetch.start, fetcher.cache, begin.fetch.codec)
        fetch.hold()
        self._spawn(self._run_fetch(fetcher, begin, fetch, begin.fetch.source))
        return fetch

    async def _run_fetch(self, fetcher: Fetcher, begin: Begin, fetch: Fetch, source: str) -> None:
        assert begin.fetch is not None
        try:
            await fetcher.run(fetch, source)
            kept = not fetch.is_lent or await asyncio.wrap_future(fetcher.cache.submit(fetch.keep_lent))
            if kept:  # else it is stored when the prompt is computed
                self._offer(fetch.names[: fetch.start + fetch.num_whole])
                found, stop = fetch.start + fetch.num_whole, len(begin.names[: begin.fetch.stop])
                self._requests.fetched(begin.key, stop if found == len(fetch.names) else min(found, stop - 1))
            self.tell(FetchEnded(begin.request, begin.attempt))
        finally:
            fetch.release()

    def _offer(self, names: Sequence[BlockName]) -> None:
        self._requests.offered(tuple(names))

    def begin(self, begin: Begin) -> None:
        if self._group is not None:
            begin = self._group.trusted(begin)
        if begin.part is Role.PREFILL:
            self.departures.begin(begin)
        elif begin.part is Role.DECODE:
            incoming = self._incoming[begin.key] = Incoming(begin, self._engine.memory)
            for connection, offer in self._offers.pop(begin.key, ()):
                incoming.offered(connection, offer)
        fetch = None
        if begin.fetch is not None and self._fetcher is not None:
            fetch = self._begin_fetch(self._fetcher, begin)
        if begin.part is Role.DECODE and fetch is not None:
            self._incoming[begin.key].fetch, fetch = fetch, None
        self._requests.begin(begin, fetch)

    def forget(self, key: RequestId) -> None:
        """Drops an attempt wherever it stands. Nothing is written into its blocks any more."""
        if self._fetcher is not None:
            self._fetcher.cancel(key)
        self.departures.withdraw(key)
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            incoming.withdraw()
        self._offers.pop(key, None)
        self._forgotten[key] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
        self._requests.forget(key)

    def fail(self, begin: Begin, reason: str) -> None:
        """Gives an attempt up and tells the head, which may try again."""
        self.forget(begin.key)
        self.tell(AttemptFailed(begin.request, begin.attempt, f"{self._facts.node}: {reason}"))

    def tell(self, message: Any) -> None:
        if self._head is not None:
            self._head.send(message)

    # Sending KV: this node prefills.

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        self.departures.ready(key, layers, tokens, blocks)

    def prefilled(self, key: RequestId, token: int, logprobs: TokenLogprobs | None) -> None:
        self.departures.prefilled(key, token, logprobs)

    def finished(self, key: RequestId) -> None:
        """A request ended here; one that was to depart has nothing to send any more."""
        self._requests.ended(key)
        self.departures.withdraw(key)

    def landed(self, key: RequestId) -> None:
        begin = self.departures.land(key)
        if begin is not None:
            self.tell(HandedOver(begin.request, begin.attempt))
            self._requests.released(key)

    # Cached blocks from and for other nodes.

    @property
    def fetcher(self) -> Fetcher:
        """Raises ProtocolError on a node without a cache: nobody there can have asked for blocks."""
        if self._fetcher is None:
            raise ProtocolError("blocks came to a node without a cache")
        return self._fetcher

    @property
    def lender(self) -> Lender:
        if self._lender is None:
            raise ProtocolError("blocks are wanted from a node without a cache")
        return self._lender

    # Receiving KV: this node decodes.

    def welcomes(self, hello: PeerHello) -> bool:
        mine = (PROTOCOL, self._engine.revision, self._engine.layout)
        trusted = hmac.compare_digest(hello.token.encode(), self._options.token.encode())
        return trusted and (hello.protocol, hello.revision, hello.layout) == mine

    def introduced(self, connection: Session, hello: PeerHello) -> None:
        self._crossings.introduced(connection, hello.node)

    def offered(self, connection: Session, offer: Offer) -> None:
        key = key_of(offer.request, offer.attempt)
        incoming = self._incoming.get(key)
        if incoming is not None:
            incoming.offered(connection, offer)
        elif key in self._forgotten:
            connection.send(Withdrawn(offer.request, offer.attempt))
        else:
            self._offers.setdefault(key, []).append((connection, offer))

    def reserved(self, key: RequestId, blocks: Sequence[int]) -> None:
        incoming = self._incoming.get(key)
        if incoming is not None:
            incoming.blocks = blocks
            incoming.match()
            if incoming.begin.handover_start:
                self._recall(key, incoming)

    def _recall(self, key: RequestId, incoming: Incoming) -> None:
        """Loads what is not handed over from this node's cache, or from what is being fetched."""
        if self._cache is None or incoming.blocks is None:
            self.fail(incoming.begin, "it has no cache to take a prefix from")
            return
        count, fetch = incoming.begin.handover_start, incoming.fetch
        incoming.fetch = None
        load = incoming.recall = self._cache.load(incoming.begin.names[:count], incoming.blocks[:count], fetch)
        load.on_end(partial(self.loop.call_soon_threadsafe, self._recalled, key, load))

    def _recalled(self, key: RequestId, load: Load) -> None:
        incoming = self._incoming.get(key)
        if incoming is None or incoming.recall is not load:
            return
        if incoming.recalled():
            self._maybe_complete(key, incoming)
        else:
            self.fail(incoming.begin, "a prefix it counted on is not in its cache any more")

    def place(self, connection: Session, slices: Slices, size: int) -> Sequence[memoryview]:
        incoming = self._incoming.get(key_of(slices.request, slices.attempt))
        if incoming is None:
            return [memoryview(bytearray(size))]  # an attempt given up: read past it
        incoming.progressed_s = self.loop.time()
        targets = incoming.place(connection, slices, size)
        if targets is None:
            raise ProtocolError(f"KV of {slices.request}, layer {slices.layer}, is not what must come next")
        return targets

    def received(self, slices: Slices) -> None:
        key = key_of(slices.request, slices.attempt)
        incoming = self._incoming.get(key)
        if incoming is None:
            return
        incoming.progressed_s = self.loop.time()
        intact = incoming.receive(slices)
        self._traffic["kv_bytes_in_total"] += (
            slices.stop - slices.first_block * self._engine.layout.block_size
        ) * self._engine.layout.token_bytes
        if not intact:
            self._traffic["seal_mismatches_total"] += 1
            self.fail(incoming.begin, f"a KV block of layer {slices.layer} came damaged (seal mismatch)")
        else:
            self._maybe_complete(key, incoming)

    def voided(self, slices: Slices) -> None:
        """The sender gave up in the midst of a frame; it says why in a message of its own."""
        incoming = self._incoming.get(key_of(slices.request, slices.attempt))
        if incoming is not None:
            incoming.void(slices)

    def sent(self, message: Sent) -> None:
        key = key_of(message.request, message.attempt)
        incoming = self._incoming.get(key)
        if incoming is not None:
            incoming.sent = message
            self._maybe_complete(key, incoming)

    def _fail_stalled(self) -> None:
        """A transfer that began and brought nothing for `transfer_s` is given up."""
        limit = self.loop.time() - self._options.transfer_s
        if self._fetcher is not None:
            self._fetcher.end_stalled(limit)
        for incoming in list(self._incoming.values()):
            if incoming.progressed_s < limit:
                self.fail(incoming.begin, f"no KV came for {self._options.transfer_s:g} s")

    def _maybe_complete(self, key: RequestId, incoming: Incoming) -> None:
        if incoming.complete and incoming.sent is not None:
            del self._incoming[key]
            incoming.landed()
            self._requests.imported(key, incoming.sent.token)

    def _lose(self, incoming: Incoming, reason: str) -> None:
        if self._incoming.get(incoming.begin.key) is incoming:
            self.fail(incoming.begin, reason)

    # Either direction.

    def withdrawn(self, message: Withdrawn) -> None:
        """The other side gave up. The head decides what follows; here the attempt is over."""
        key = key_of(message.request, message.attempt)
        self._offers.pop(key, None)
        self.departures.withdrawn(key)
        if key in self._incoming:
            self.forget(key)

    def peer_lost(self, connection: Session, reason: str) -> None:
        """Whatever was under way over a session fails with it."""
        if self._fetcher is not None and self._lender is not None:
            self._fetcher.lost(connection)
            self._lender.lost(connection)
        self.departures.lost(connection, reason)
        for incoming in [each for each in self._incoming.values() if each.is_from(connection)]:
            self.loop.call_later(
                LOST_S, self._lose, incoming, f"the session with {connection.peer} ended: {reason}"
            )
        for key, offers in list(self._offers.items()):
            if any(offered is connection for offered, _ in offers):
                del self._offers[key]


class _FromHead:
    """The session with the head, from the node's side."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def on_message(self, connection: Session, message: NodeBound) -> None:
        match message:
            case Begin():
                self._node.begin(message)
            case Forget():
                self._node.forget(key_of(message.request, message.attempt))
            case Welcome():
                self._node.welcome(message)
            case Gathered():
                self._node.gathered(message.addresses)
            case Turned():
                self._node.end(StartError(f"the head turned this node away: {message.reason}"))
            case Copy():
                self._node.copy(message)
            case Linked():
                self._node.linked(message)
            case Become():
                self._node.become(message.role)
            case Stop():
                self._node.end("stopped by the head")

    def place(self, connection: Session, message: NodeBound, size: int) -> Sequence[memoryview]:
        raise ProtocolError(f"a {type(message).__name__} from {connection.peer} carried {size} bytes")

    def on_void(self, connection: Session, message: NodeBound) -> None:
        """The head sends no payloads."""

    def on_close(self, connection: Session, reason: str) -> None:
        self._node.end(f"the session with the head ended: {reason}")


class _FromPeer:
    """A session with another node. `introduced`: this side opened it, or a valid PeerHello came first."""

    def __init__(self, node: Node, *, introduced: bool) -> None:
        self._node, self._introduced = node, introduced

    def on_message(self, connection: Session, message: PeerMessage) -> None:
        if not self._introduced:
            if not isinstance(message, PeerHello) or not self._node.welcomes(message):
                raise ProtocolError("it is not a node of this cluster, or runs another model or KV layout")
            self._introduced = True
            self._node.introduced(connection, message)
            return
        match message:
            case Slices():
                self._node.received(message)
            case Sent():
                self._node.sent(message)
            case Grant():
                self._node.departures.grant(key_of(message.request, message.attempt))
            case Landed():
                self._node.landed(key_of(message.request, message.attempt))
            case Offer():
                self._node.offered(connection, message)
            case Withdrawn():
                self._node.withdrawn(message)
            case Want():
                self._node.lender.wanted(connection, message)
            case Enough():
                self._node.lender.enough(connection, message.key)
            case Given():
                self._node.fetcher.receive(connection, message)
            case Lent() | Ended():
                self._node.fetcher.answer(connection, message)
            case Probe():
                pass
            case PeerHello():
                raise ProtocolError("a second PeerHello")

    def place(self, connection: Session, message: PeerMessage, size: int) -> Sequence[memoryview]:
        if isinstance(message, Slices) and self._introduced:
            return self._node.place(connection, message, size)
        if isinstance(message, Given) and self._introduced:
            return self._node.fetcher.place(connection, message, size)
        raise ProtocolError(f"a {type(message).__name__} from {connection.peer} carried {size} bytes")

    def on_void(self, connection: Session, message: PeerMessage) -> None:
        if isinstance(message, Slices):
            self._node.voided(message)
        elif isinstance(message, Given):
            self._node.fetcher.void(connection, message)

    def on_close(self, connection: Session, reason: str) -> None:
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

    def cache_changed(
        self,
        stored: tuple[BlockName, ...] = (),
        demoted: tuple[BlockName, ...] = (),
        evicted: tuple[BlockName, ...] = (),
    ) -> None:
        self._node.worker.tell(self._node.tell, CacheChanged(stored, demoted, evicted))

    def died(self, error: BaseException) -> None:
        self._node.worker.tell(
            self._node.end, StartError(f"the engine failed: {type(error).__name__}: {error}")
        )
