"""A later stage of a pipeline group as a process: sessions in the event loop, a thread that computes.

head <── StageHello, Beat ── stage <── everything ── the stage before ;  stage ── KV of its layers ──> decode nodes
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from isthmus.cluster.cache import NodeCache, gauges_of
from isthmus.cluster.crossings import Crossings
from isthmus.cluster.departures import CONNECT_S, Departures, Peers
from isthmus.cluster.messages import (
    PROTOCOL,
    Beat,
    Begin,
    Grant,
    Landed,
    Linked,
    NodeBound,
    PeerHello,
    PeerMessage,
    Probe,
    StageHello,
    Stop,
    Turned,
    Welcome,
    Withdrawn,
    key_of,
)
from isthmus.cluster.node import NodeOptions, OnLost
from isthmus.cluster.stage import StageStepper
from isthmus.cluster.stage_messages import (
    Downward,
    StageBegin,
    StageFailed,
    StageFound,
    StageLost,
    StageOpen,
    StageReady,
    StageRun,
    Upward,
)
from isthmus.engine.interface import Engine
from isthmus.errors import ProtocolError, StartError
from isthmus.messenger import Network, Priority, Session
from isthmus.store import Store
from isthmus.types import BlockName, RequestId, Role, Span

log = logging.getLogger(__name__)

FOUND_NAMES = 1 << 16
"""Names in one message: far from the limit of its length."""


class StageNode:
    """Runs until the head says Stop or any session of its group ends. `run` returns the reason.

    `options.facts.node` is the group, which is the leader's name. `store_of`: as for a `Node`.
    """

    def __init__(
        self,
        engine: Engine,
        options: NodeOptions,
        network: Network,
        store_of: Callable[[OnLost], Store] | None = None,
    ) -> None:
        facts = self._facts = options.facts
        assert 0 < options.stage < facts.pipeline
        self._engine, self._options, self._network = engine, options, network
        store = store_of(self._lost) if store_of is not None else None
        self._cache = NodeCache(engine.memory, store, self._lost) if store is not None else None
        self._stepper = StageStepper(engine, self._cache, self, self._tell)
        hello = PeerHello(PROTOCOL, options.token, facts.node, engine.revision, engine.layout)
        peers = Peers(self._network, hello, lambda: _FromDecode(self))
        self.crossings = Crossings(peers, options.link_s, self._spawn)
        self.departures = Departures(engine.memory, engine.layers[0], peers, self._spawn, self._failed)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._before: Session | None = None
        self._after: Session | None = None
        self._head: Session | None = None

    async def run(self) -> str:
        """Joins its group and computes. Raises StartError when it cannot."""
        self.loop = asyncio.get_running_loop()
        self._over: asyncio.Future[str] = self.loop.create_future()
        options, facts = self._options, self._facts
        server, port = await self._network.listen(options.host, 0, Downward, lambda: _FromBefore(self))
        self._stepper.start()
        try:
            self._head = await self._network.connect(
                options.join, NodeBound, _FromHead(self), timeout_s=CONNECT_S
            )
        except (OSError, TimeoutError, ValueError) as error:
            raise StartError(f"cannot reach the head at {options.join}: {error}") from None
        address = f"{options.host}:{port}"
        self._head.send(StageHello(PROTOCOL, options.token, facts.node, options.stage, facts.pipeline, address))
        try:
            return await self._over
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            for connection in (self._head, self._before, self._after):
                if connection is not None:
                    connection.close("the stage ends")
            self._stepper.stop()
            if self._cache is not None:
                self._cache.close()
                self._cache.store.close()

    def end(self, reason: str | Exception) -> None:
        if not self._over.done():
            if isinstance(reason, Exception):
                self._over.set_exception(reason)
            else:
                self._over.set_result(reason)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The head.

    def welcome(self, message: Welcome) -> None:
        self._spawn(self._beat(message.beat_ms))

    async def _beat(self, every_ms: int) -> None:
        while True:
            assert self._head is not None
            self._head.send(Beat(self._gauges(), tuple(self.crossings.report())))
            await asyncio.sleep(every_ms / 1000)

    def _gauges(self) -> dict[str, float]:
        found: dict[str, float] = {f"{name}_total": value for name, value in self._stepper.counters.items()}
        found["kv_bytes_out_total"] = self.departures.bytes_out
        if self._cache is not None:
            found |= gauges_of(self._cache.store.stat())
        return found

    # The stages before and after.

    def open(self, connection: Session, opening: StageOpen) -> None:
        """The group forms. Raises ProtocolError when the one that opens it does not belong to it."""
        mine = (PROTOCOL, self._facts.node, self._options.stage, self._engine.revision, self._engine.layout)
        theirs = (opening.protocol, opening.group, opening.stage, opening.revision, opening.layout)
        trusted = hmac.compare_digest(opening.token.encode(), self._options.token.encode())
        if self._before is not None or not trusted or theirs != mine:
            raise ProtocolError("it is no stage of this group, or runs another model or KV layout")
        self._before = connection
        if shortage := self._shortage(opening):
            self.end(StartError(f"pipeline stage {self._options.stage} of {self._facts.node}: {shortage}"))
            return
        self._spawn(self._join_up(opening))

    def _shortage(self, opening: StageOpen) -> str:
        """Why this stage could not hold what the leader does."""
        store = self._cache.store if self._cache is not None else None
        slots = store.arena.num_slots if store is not None else 0
        records = store.log.num_records if store is not None and store.log is not None else 0
        if self._engine.num_blocks < opening.num_blocks:
            return (
                f"its KV memory holds {self._engine.num_blocks} blocks, the first stage's {opening.num_blocks}"
            )
        if slots < opening.num_slots or records < opening.num_records:
            return (
                f"its cache holds {slots} and {records} blocks (DRAM, SSD), the first stage's "
                f"{opening.num_slots} and {opening.num_records}"
            )
        return ""

    async def _join_up(self, opening: StageOpen) -> None:
        """Opens the next stage, and tells the leader what was found on disk here."""
        stage = self._options.stage
        if opening.later:
            try:
                self._after = await self._network.connect(
                    opening.later[0], Upward, _FromAfter(self), timeout_s=CONNECT_S
                )
            except (OSError, TimeoutError) as error:
                self.end(f"cannot reach the next stage at {opening.later[0]}: {error}")
                return
            onward = StageOpen(
                protocol=opening.protocol,
                token=opening.token,
                group=opening.group,
                stage=stage + 1,
                revision=opening.revision,
                layout=opening.layout,
                num_blocks=opening.num_blocks,
                num_slots=opening.num_slots,
                num_records=opening.num_records,
                later=opening.later[1:],
            )
            self.down(onward)
        found = [name for name, _ in self._cache.store.recover()] if self._cache is not None else []
        for at in range(0, len(found), FOUND_NAMES):
            self.up(StageFound(stage, tuple(found[at : at + FOUND_NAMES])))
        self.up(StageReady(stage))

    def receive(self, message: Downward, data: memoryview | None) -> None:
        """Something to do. Hands KV over from the moment the leader does."""
        if isinstance(message, StageBegin) and message.begin.part is Role.PREFILL:
            self.departures.begin(message.begin)
        self._stepper.receive(message, data)

    def up(self, message: Upward) -> None:
        if self._before is not None:
            self._before.send(message)

    def down(self, message: Downward, data: memoryview | None = None) -> None:
        if self._after is not None:
            payload = () if data is None else (data,)
            self._after.send(message, *payload, priority=Priority.URGENT)

    def died(self, error: BaseException) -> None:
        self.end(StartError(f"the engine failed: {type(error).__name__}: {error}"))

    def _lost(self, names: Sequence[BlockName]) -> None:
        """From a thread of the store: bytes are gone that the leader counts on."""
        self._tell(self.up, StageLost(tuple(names)))

    # KV on its way to decode nodes.

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        self.departures.ready(key, layers, tokens, blocks)

    def over(self, key: RequestId) -> None:
        self.departures.withdraw(key)

    def _failed(self, begin: Begin, reason: str) -> None:
        self.up(StageFailed(begin.key, f"pipeline stage {self._options.stage}: {reason}"))


class _Watched:
    """A session that the stage cannot do without."""

    what = ""

    def __init__(self, node: StageNode) -> None:
        self._node = node

    def place(self, connection: Session, message: Any, size: int) -> Sequence[memoryview]:
        raise ProtocolError(f"a {type(message).__name__} from {connection.peer} carried {size} bytes")

    def on_void(self, connection: Session, message: Any) -> None:
        """Nothing of a stage's is ever cancelled; the end of the session follows."""

    def on_close(self, connection: Session, reason: str) -> None:
        self._node.end(f"the session with {self.what} ended: {reason}")


class _FromHead(_Watched):
    what = "the head"

    def on_message(self, connection: Session, message: NodeBound) -> None:
        match message:
            case Welcome():
                self._node.welcome(message)
            case Linked():
                self._node.crossings.linked(message)
            case Turned():
                self._node.end(StartError(f"the head turned this node away: {message.reason}"))
            case Stop():
                self._node.end("stopped by the head")
            case _:
                raise ProtocolError(f"a {type(message).__name__} for a later stage")


class _FromBefore(_Watched):
    """The stage before. Hidden states are received into memory of their own."""

    what = "the stage before"

    def __init__(self, node: StageNode) -> None:
        super().__init__(node)
        self._opened = False
        self._hidden: dict[int, memoryview] = {}

    def on_message(self, connection: Session, message: Downward) -> None:
        if isinstance(message, StageOpen):
            self._node.open(connection, message)
            self._opened = True
        elif not self._opened:
            raise ProtocolError("a message came before StageOpen")
        else:
            data = self._hidden.pop(message.run, memoryview(b"")) if isinstance(message, StageRun) else None
            self._node.receive(message, data)

    def place(self, connection: Session, message: Downward, size: int) -> Sequence[memoryview]:
        if not isinstance(message, StageRun) or not self._opened:
            return super().place(connection, message, size)
        data = self._hidden[message.run] = memoryview(bytearray(size))
        return [data]

    def on_close(self, connection: Session, reason: str) -> None:
        if self._opened:
            super().on_close(connection, reason)


class _FromAfter(_Watched):
    """The stage after: everything it says is for the leader."""

    what = "the next stage"

    def on_message(self, connection: Session, message: Upward) -> None:
        self._node.up(message)


class _FromDecode:
    """A session with a decode node, opened here."""

    def __init__(self, node: StageNode) -> None:
        self._departures = node.departures

    def on_message(self, connection: Session, message: PeerMessage) -> None:
        match message:
            case Grant():
                self._departures.grant(key_of(message.request, message.attempt))
            case Landed():
                self._departures.land(key_of(message.request, message.attempt))
            case Withdrawn():
                self._departures.withdrawn(key_of(message.request, message.attempt))
            case Probe():
                pass
            case _:
                raise ProtocolError(f"a {type(message).__name__} for a later stage")

    def place(self, connection: Session, message: PeerMessage, size: int) -> Sequence[memoryview]:
        raise ProtocolError(f"a {type(message).__name__} from {connection.peer} carried {size} bytes")

    def on_void(self, connection: Session, message: PeerMessage) -> None:
        """Nothing is ever placed."""

    def on_close(self, connection: Session, reason: str) -> None:
        self._departures.lost(connection, reason)
