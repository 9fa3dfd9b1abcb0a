"""A later stage of a pipeline group as a process: sessions in the event loop, a thread that computes.

head <── StageHello, Beat ── stage <── everything ── the stage before ;  stage ── KV of its layers ──> decode nodes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from isthmus.cluster.messages import NodeBound, StageHello
from isthmus.cluster.process import EngineProcess, NodeOptions, OnLost, Vital
from isthmus.cluster.sessions import CONNECT_S
from isthmus.cluster.stage import StageStepper
from isthmus.cluster.stage_messages import (
    MAX_NAMES,
    Downward,
    StageFound,
    StageOpen,
    StageRun,
    StageSaved,
    Upward,
)
from isthmus.engine.interface import Engine
from isthmus.errors import ProtocolError, StartError
from isthmus.messenger import Handler, Network, Priority, Session
from isthmus.node.events import Broken, Event, Granted, Lost, Send, Severed
from isthmus.scheduler import Saved
from isthmus.store import Store
from isthmus.types import RequestId


class StageNode(EngineProcess):
    """Ends with any session of its group. `options.facts.node` is the group, which is the leader's name."""

    entrance = Downward

    def __init__(
        self,
        engine: Engine,
        options: NodeOptions,
        network: Network,
        store_of: Callable[[OnLost], Store] | None = None,
    ) -> None:
        assert 0 < options.stage < options.facts.pipeline
        super().__init__(engine, options, network, store_of)
        self._stepper = StageStepper(engine, options.stage, self.hands, self, self._later)
        self.runs = self._stepper.runs
        self._before: Session | None = None
        self._after: Session | None = None

    def start(self) -> None:
        self._stepper.start()

    def stop(self) -> None:
        for connection in (self._head, self._before, self._after):
            if connection is not None:
                connection.close("the stage ends")
        self._stepper.stop()

    def entering(self) -> Handler:
        return _FromBefore(self)

    def hello(self) -> StageHello:
        return self.stage_hello()

    def heard(self, message: NodeBound) -> None:
        raise ProtocolError(f"a {type(message).__name__} for a later stage")

    def received(self, key: RequestId, token: int) -> None:
        """Nothing is handed over to a stage."""

    def fact(self, fact: Event) -> None:
        """It concerns the leader, but for what this stage's own sessions are granted."""
        match fact:
            case Granted():
                self.hands.do(Send(fact.key, computed=False))
            case Saved():
                self.up(StageSaved(self._options.stage, fact.request))
            case Broken() | Severed() | Lost():
                self.up(fact)

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    # The stages before and after.

    def open(self, connection: Session, opening: StageOpen) -> None:
        """The group forms. Raises ProtocolError when the one that opens it does not belong to it."""
        group, stage = self._facts.node, self._options.stage
        is_mine = (opening.hello.node, opening.stage) == (group, stage)
        if self._before is not None or not is_mine or not self.trusts(opening.hello):
            raise ProtocolError("it is no stage of this group, or runs another model or KV layout")
        self._before = connection
        if shortage := self._shortage(opening):
            self.end(StartError(f"pipeline stage {stage} of {group}: {shortage}"))
            return
        self.spawn(self._join_up(opening))

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
            self.down(replace(opening, stage=stage + 1, later=opening.later[1:]))
        found = [name for name, _ in self._found]
        for at in range(0, len(found) + 1, MAX_NAMES):
            self.up(StageFound(stage, tuple(found[at : at + MAX_NAMES]), at + MAX_NAMES > len(found)))

    def receive(self, message: Downward, data: memoryview | None) -> None:
        """Something to do."""
        self._stepper.receive(message, data)

    def up(self, message: Upward) -> None:
        if self._before is not None:
            self._before.send(message)

    def down(self, message: Downward, data: memoryview | None = None) -> None:
        if self._after is not None:
            payload = () if data is None else (data,)
            self._after.send(message, *payload, priority=Priority.URGENT)


class _FromBefore(Vital):
    """The stage before. Hidden states are received into memory of their own."""

    what = "the stage before"

    _process: StageNode

    def __init__(self, node: StageNode) -> None:
        super().__init__(node)
        self._opened = False
        self._hidden: dict[int, memoryview] = {}

    def on_message(self, connection: Session, message: Downward) -> None:
        if isinstance(message, StageOpen):
            self._process.open(connection, message)
            self._opened = True
        elif not self._opened:
            raise ProtocolError("a message came before StageOpen")
        else:
            data = self._hidden.pop(message.run, memoryview(b"")) if isinstance(message, StageRun) else None
            self._process.receive(message, data)

    def place(self, connection: Session, message: Downward, size: int) -> Sequence[memoryview]:
        if not isinstance(message, StageRun) or not self._opened:
            return super().place(connection, message, size)
        data = self._hidden[message.run] = memoryview(bytearray(size))
        return [data]

    def on_close(self, connection: Session, reason: str) -> None:
        if self._opened:
            super().on_close(connection, reason)


class _FromAfter(Vital):
    """The stage after: everything it says is for the leader."""

    what = "the next stage"
    _process: StageNode

    def on_message(self, connection: Session, message: Upward) -> None:
        self._process.up(message)
