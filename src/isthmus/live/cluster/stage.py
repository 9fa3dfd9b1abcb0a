"""A later stage of a pipeline group as a process: carries out its leader's actions on its layers, and computes batches.

head <── StageHello, Beat ── stage <── everything ── the stage before ;  stage ── KV of its layers ──> decode nodes

One thread carries out all messages in order, since the leader gave blocks to attempts in this order. Only SSD reads
begin at once, and loads whose blocks and names no waiting message touches. Sessions are in the event loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from isthmus.core.errors import ProtocolError, StartError
from isthmus.core.node import events
from isthmus.core.scheduler import Piece, Preempted, Run, Saved
from isthmus.core.types import RequestId
from isthmus.live.cluster.process import EngineProcess, NodeOptions, Opener, RequiredSession, Runtime
from isthmus.live.cluster.runs import Execution, Runs
from isthmus.live.engine.interface import Engine, Hidden
from isthmus.live.kv.mover import KVMover
from isthmus.live.messenger import Handler, Priority, Session
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import CONNECT_S, check_peer


class StageStepper:
    """The thread of a stage: `start` it, `receive` messages from the stage before, `stop` it. `later` calls a
    function in the event loop."""

    def __init__(
        self, engine: Engine, stage: int, mover: KVMover, owner: StageNode, later: Callable[..., None]
    ) -> None:
        self._stage, self._mover, self._owner, self._later = stage, mover, owner, later
        self._is_last = engine.layers[1] == engine.layout.num_layers
        onward = None if self._is_last else self._pass_on
        self.runs = Runs(
            engine, mover, lambda outputs: None, partial(later, owner.up), time.monotonic_ns, onward
        )
        self._begun: dict[RequestId, events.StartAttempt] = {}
        self._poisoned: dict[RequestId, tuple[int, ...]] = {}
        """Blocks of attempts whose KV here is wrong, since a cached block was missing: it is neither sent nor saved."""
        self._queue: SimpleQueue[tuple[messages.Downward, memoryview | None, bool] | None] = SimpleQueue()
        self._waiting: deque[messages.Downward] = deque()  # received and not carried out
        self._computing: messages.StageRun
        self._thread = threading.Thread(target=self._main, name="stage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def receive(self, message: messages.Downward, data: memoryview | None = None) -> None:
        """Queues a message, from the event loop. `data`: the hidden states of a run."""
        ahead = isinstance(message, events.LoadBlocks) and not self._must_wait(message)
        match message:
            case events.StartAttempt():
                self._begun[message.key] = message
                self.runs.begin(message)
            case events.OfferHandover() | events.SendHandover() | events.Read():
                self._mover.do(message)
            case events.LoadBlocks() if ahead:
                self._load(message)
        self._waiting.append(message)
        self._queue.put((message, data, ahead))

    def _must_wait(self, load: events.LoadBlocks) -> bool:
        """Whether an earlier message still uses these blocks, or has yet to save the blocks to be loaded."""
        blocks, names = set(load.blocks), set(load.names)
        for earlier in list(self._waiting):
            match earlier:
                case messages.StageRun():
                    if any(not blocks.isdisjoint(piece.blocks) for piece in earlier.pieces):
                        return True
                case events.LoadBlocks():
                    if not blocks.isdisjoint(earlier.blocks):
                        return True
                case events.SaveBlocks():
                    if not names.isdisjoint(earlier.names):
                        return True
                case Preempted():
                    if earlier.request == load.key:
                        return True
        return self._mover.is_loading(blocks)

    # The thread that computes.

    def _main(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                message, data, ahead = entry
                self._perform(message, data, ahead=ahead)
                self._waiting.popleft()
        except BaseException as error:
            self._later(self._owner.died, error)
            raise

    def _perform(self, message: messages.Downward, data: memoryview | None, *, ahead: bool) -> None:
        """Carries out a message. `ahead`: its load has begun already."""
        match message:
            case messages.StageRun():
                assert data is not None
                self._run(message, Hidden(message.shape, message.dtype, data))
                return
            case events.LoadBlocks() if not ahead:
                self._load(message)
            case events.SaveBlocks():
                self._save(message)
            case events.Shorten():
                self.runs.shortened(message)
                self._mover.do(message)
            case events.ReleaseResources():
                self._begun.pop(message.key, None)
                self._poisoned.pop(message.key, None)
                self.runs.released(message)
                self._mover.do(message)
            case events.Promote() | events.Demote() | events.DropBlocks() | Preempted():
                self._mover.do(message)
        self._later(self._owner.down, message)

    def _load(self, message: events.LoadBlocks) -> None:
        if message.key in self._begun:
            self.runs.loading(message)
            self._mover.do(message)

    # One batch.

    def _run(self, message: messages.StageRun, hidden: Hidden) -> None:
        self._computing = message
        run = Run(message.pieces, 0, 0, 1, list)
        for piece in message.pieces:
            if piece.request in message.poisoned or piece.request in self._poisoned:
                self._poison(piece)
        while (execution := self._computed(run, hidden)).missing is not None:
            missing = execution.missing
            names = self._begun[missing.key].names
            # Only a new attempt can compute the block: the stages before have theirs.
            self._later(self._owner.up, events.BlocksLost(names[missing.num_blocks : missing.num_blocks + 1]))
            self._poison(next(piece for piece in run.chunks if piece.request == missing.key))
        self.runs.finish(execution)

    def _computed(self, run: Run, hidden: Hidden) -> Execution:
        """Computes one iteration and sends its result on, unless a cached prefix in it is incomplete."""
        execution = self.runs.start(run)
        self.runs.compute(execution, hidden)
        if self._is_last and execution.missing is None:
            keys = [piece.request for _, piece in execution.sampled]
            found = zip(keys, execution.tokens, execution.logprobs, strict=True)
            good = [each for each in found if each[0] not in self._poisoned and each[0] not in execution.broken]
            for broken in execution.broken.values():
                self._later(self._owner.up, broken)
            sampled = zip(*good, strict=True) if good else ((), (), ())
            self._later(self._owner.up, messages.StageSampled(self._computing.run, *sampled))
        return execution

    def _pass_on(self, run: Run, hidden: Hidden) -> None:
        """Sends hidden states to the next stage."""
        poisoned = tuple([piece.request for piece in run.chunks if piece.request in self._poisoned])
        onward = replace(self._computing, shape=hidden.shape, dtype=hidden.dtype, poisoned=poisoned)
        self._later(self._owner.down, onward, hidden.data)

    def _poison(self, piece: Piece) -> None:
        key, known = piece.request, piece.request in self._poisoned
        self._poisoned[key] = piece.blocks
        self.runs.shortened(events.Shorten(key, 0))
        if not known:
            self._mover.do(events.ReleaseResources(key))
            reason = "a cached block is missing in a later pipeline stage"
            self._later(self._owner.up, events.Broken(key, reason, distrust=True))

    # Keeping blocks.

    def _save(self, message: events.SaveBlocks) -> None:
        """Saves blocks up to the first one of a poisoned attempt; reports the rest as lost."""
        bad = {block for blocks in self._poisoned.values() for block in blocks}
        good = next((at for at, block in enumerate(message.blocks) if block in bad), len(message.blocks))
        if good < len(message.blocks):
            self._later(self._owner.up, events.BlocksLost(message.names[good:]))
        if good:
            num_sunk = max(0, message.num_sunk - len(message.names) + good)
            kept = replace(message, names=message.names[:good], blocks=message.blocks[:good], num_sunk=num_sunk)
            self._mover.do(kept)
        else:
            self._later(self._owner.up, messages.StageSaved(self._stage, message.request))


class StageNode(EngineProcess):
    """A stage's process, which ends with any session of its group. `options.facts.node`: the group, named as its
    leader."""

    entrance = messages.Downward

    def __init__(self, engine: Engine, options: NodeOptions, runtime: Runtime, store_of: Opener = None) -> None:
        assert 0 < options.stage < options.facts.pipeline
        super().__init__(engine, options, runtime, store_of)
        self.stepper = StageStepper(engine, options.stage, self.mover, self, self._later)
        self.runs = self.stepper.runs
        self._before: Session | None = None
        self._after: Session | None = None

    def start(self) -> None:
        self.stepper.start()

    def stop(self) -> None:
        for session in (self._head, self._before, self._after):
            if session is not None:
                session.close("the stage ends")
        self.stepper.stop()
        super().stop()

    def entering(self) -> Handler:
        return _FromBefore(self)

    def received(self, key: RequestId, token: int) -> None:
        """Nothing is handed over to a stage."""

    def fact(self, fact: events.Event) -> None:
        """Passes facts on that the leader must know."""
        match fact:
            case Saved():
                self.up(messages.StageSaved(self._options.stage, fact.request))
            case events.Broken() | events.Gone() | events.BlocksLost():
                self.up(fact)

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    # The stages before and after.

    def open(self, session: Session, opening: messages.StageOpen) -> None:
        """Opens the session with the stage before. Raises ProtocolError for a process of another group."""
        group, stage = self._facts.node, self._options.stage
        is_mine = (opening.hello.node, opening.stage) == (group, stage)
        if self._before is not None or not is_mine or not self.trusts(session, opening.hello):
            raise ProtocolError("it is no stage of this group, or runs another model or KV layout")
        self._before = session
        store = self._cache.store if self._cache is not None else None
        slots = store.arena.num_slots if store is not None else 0
        records = store.log.num_records if store is not None and store.log is not None else 0
        mine = (self._engine.num_blocks, slots, records)
        wanted = (opening.num_blocks, opening.num_slots, opening.num_records)
        if any(here < there for here, there in zip(mine, wanted, strict=True)):
            why = f"it holds {mine} blocks in KV memory, DRAM and SSD, the first stage {wanted}"
            self.end(StartError(f"pipeline stage {stage} of {group}: {why}"))
        else:
            self.spawn(self._join_up(opening))

    async def _join_up(self, opening: messages.StageOpen) -> None:
        """Connects the next stage, and tells the leader which blocks are on this stage's disk."""
        stage = self._options.stage
        if opening.later:
            try:
                after = RequiredSession(self, "the next stage", self.up)  # all it says is for the leader
                self._after = await self._network.connect(
                    opening.later[0], messages.Upward, after, timeout_s=CONNECT_S
                )
                check_peer(self._after, self._facts.node)
            except (OSError, TimeoutError) as error:
                self.end(f"cannot reach the next stage at {opening.later[0]}: {error}")
                return
            self.down(replace(opening, stage=stage + 1, later=opening.later[1:]))
        found = [name for name, _ in self._found]
        for at in range(0, len(found) + 1, messages.MAX_NAMES):
            stop = at + messages.MAX_NAMES
            self.up(messages.StageFound(stage, tuple(found[at:stop]), stop > len(found)))

    def up(self, message: messages.Upward) -> None:
        if self._before is not None:
            self._before.send(message)

    def down(self, message: messages.Downward, data: memoryview | None = None) -> None:
        if self._after is not None:
            payload = () if data is None else (data,)
            self._after.send(message, *payload, priority=Priority.URGENT)


class _FromBefore(RequiredSession):
    """The session with the stage before. Receives hidden states into their own memory."""

    def __init__(self, node: StageNode) -> None:
        super().__init__(node, "the stage before", node.stepper.receive)
        self._node, self._opened = node, False
        self._hidden: dict[int, memoryview] = {}

    def on_message(self, session: Session, message: messages.Downward) -> None:
        if isinstance(message, messages.StageOpen):
            self._node.open(session, message)
            self._opened = True
        elif not self._opened:
            raise ProtocolError("a message came before StageOpen")
        elif isinstance(message, messages.StageRun):
            self._node.stepper.receive(message, self._hidden.pop(message.run, memoryview(b"")))
        else:
            self._heard(message)

    def place(self, session: Session, message: messages.Downward, size: int) -> Sequence[memoryview]:
        if not isinstance(message, messages.StageRun) or not self._opened:
            return super().place(session, message, size)
        data = self._hidden[message.run] = memoryview(bytearray(size))
        return [data]

    def on_close(self, session: Session, reason: str) -> None:
        if self._opened:
            super().on_close(session, reason)
