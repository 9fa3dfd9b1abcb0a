"""What a later stage of a pipeline group does: its leader's actions on its own layers, and batches as they come down
the chain, in one thread.

Everything is carried out in the order of its coming, for the leader gave blocks to one attempt after another in this
order. Only reading from the SSD begins at once, and a load where nothing that waits here touches its blocks or saves
what it loads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from msgspec.structs import replace

from isthmus.cluster.hands import Hands
from isthmus.cluster.messages import Task
from isthmus.cluster.runs import Execution, Runs
from isthmus.cluster.stage_messages import Downward, StageRun, StageSampled, StageSaved, Upward
from isthmus.engine.interface import Engine, Hidden
from isthmus.node.events import (
    Broken,
    Demote,
    Drop,
    Load,
    Lost,
    Offer,
    Promote,
    Read,
    Release,
    Save,
    Shorten,
)
from isthmus.scheduler import Piece, Preempted, Run
from isthmus.types import RequestId


class StageOwner(Protocol):
    """What is told, in the event loop, in order."""

    def up(self, message: Upward) -> None:
        """For the leader."""

    def down(self, message: Downward, data: memoryview | None = None) -> None:
        """For the stages after this one, if there are any."""

    def died(self, error: BaseException) -> None:
        """The stage cannot go on."""


class StageStepper:
    """`later` calls something in the event loop, in order. `receive` what comes down; `stop` in the end."""

    def __init__(
        self, engine: Engine, stage: int, hands: Hands, owner: StageOwner, later: Callable[..., None]
    ) -> None:
        self._stage, self._hands, self._owner, self._later = stage, hands, owner, later
        self._is_last = engine.layers[1] == engine.layout.num_layers
        onward = None if self._is_last else self
        self.runs = Runs(engine, hands, lambda outputs: None, time.monotonic_ns, onward)
        self._tasks: dict[RequestId, Task] = {}
        self._poisoned: dict[RequestId, tuple[int, ...]] = {}
        """Attempts whose KV here is not what it should be, and never leaves; the blocks where it lies."""
        self._queue: SimpleQueue[tuple[int, Downward, memoryview | None, bool] | None] = SimpleQueue()
        self._waiting: dict[int, Downward] = {}  # what came and is not done, by its number
        self._num_received = 0
        self._computing: StageRun
        self._thread = threading.Thread(target=self._main, name="stage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def receive(self, message: Downward, data: memoryview | None = None) -> None:
        """From the event loop. `data`: the hidden states of a run."""
        ahead = isinstance(message, Load) and not self._must_wait(message)
        match message:
            case Task():
                self._tasks[message.begin.key] = message
                self.runs.begin(message)
            case Offer() | Read():
                self._hands.do(message)
            case Load() if ahead:
                self._load(message)
        self._num_received += 1
        self._waiting[self._num_received] = message
        self._queue.put((self._num_received, message, data, ahead))

    def _must_wait(self, load: Load) -> bool:
        """Whether something that came before still reads or writes these blocks, or has yet to save what is loaded."""
        blocks, names = set(load.blocks), set(load.names)
        for earlier in list(self._waiting.values()):
            match earlier:
                case StageRun():
                    if any(not blocks.isdisjoint(piece.blocks) for piece in earlier.pieces):
                        return True
                case Load():
                    if not blocks.isdisjoint(earlier.blocks):
                        return True
                case Save():
                    if not names.isdisjoint(earlier.names):
                        return True
                case Preempted():
                    if earlier.request == load.key:
                        return True
        return self._hands.is_loading(blocks)

    # The thread that computes.

    def _main(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                number, message, data, ahead = entry
                self._perform(message, data, ahead=ahead)
                del self._waiting[number]
        except BaseException as error:
            self._later(self._owner.died, error)
            raise

    def _perform(self, message: Downward, data: memoryview | None, *, ahead: bool) -> None:
        """`ahead`: a load that has begun."""
        match message:
            case StageRun():
                assert data is not None
                self._run(message, Hidden(message.shape, message.dtype, data))
                return
            case Load() if not ahead:
                self._load(message)
            case Save():
                self._save(message)
            case Shorten():
                self.runs.shortened(message)
                self._hands.do(message)
            case Release():
                self._tasks.pop(message.key, None)
                self._poisoned.pop(message.key, None)
                self.runs.released(message)
                self._hands.do(message)
            case Promote() | Demote() | Drop() | Preempted():
                self._hands.do(message)
        self._later(self._owner.down, message)

    def _load(self, message: Load) -> None:
        if message.key in self._tasks:
            self.runs.loading(message)
            self._hands.do(message)

    # One batch.

    def _run(self, message: StageRun, hidden: Hidden) -> None:
        self._computing = message
        run = Run(message.pieces, 0, 0, 1, list)
        for piece in message.pieces:
            if piece.request in message.poisoned or piece.request in self._poisoned:
                self._poison(piece)
        while (execution := self._computed(run, hidden)).missing is not None:
            missing = execution.missing
            names = self._tasks[missing.key].begin.names
            # Only a new attempt can compute it: the stages before do not miss it.
            self._later(self._owner.up, Lost(names[missing.num_blocks : missing.num_blocks + 1]))
            self._poison(next(piece for piece in run.chunks if piece.request == missing.key))
        self.runs.finish(execution)

    def _computed(self, run: Run, hidden: Hidden) -> Execution:
        """One iteration, and on with what it gives, unless a cached prefix in it is not all there."""
        execution = self.runs.start(run)
        self.runs.compute(execution, hidden)
        if self._is_last and execution.missing is None:
            keys = [piece.request for _, piece in execution.sampled]
            found = zip(keys, execution.tokens, execution.logprobs, strict=True)
            good = [each for each in found if each[0] not in self._poisoned]
            sampled = zip(*good, strict=True) if good else ((), (), ())
            self._later(self._owner.up, StageSampled(self._computing.run, *sampled))
        return execution

    def compute(self, run: Run, hidden: Hidden) -> None:
        """It is for the stages that follow."""
        poisoned = tuple([piece.request for piece in run.chunks if piece.request in self._poisoned])
        onward = replace(self._computing, shape=hidden.shape, dtype=hidden.dtype, poisoned=poisoned)
        self._later(self._owner.down, onward, hidden.data)

    def take_turn(self) -> None:
        """The leader holds itself back."""

    def _poison(self, piece: Piece) -> None:
        key, known = piece.request, piece.request in self._poisoned
        self._poisoned[key] = piece.blocks
        self.runs.shortened(Shorten(key, 0))
        if not known:
            self._hands.do(Release(key))
            reason = "a cached block is missing in a later pipeline stage"
            self._later(self._owner.up, Broken(key, reason, distrust=True))

    # Keeping blocks.

    def _save(self, message: Save) -> None:
        """What belongs to a poisoned attempt is not kept, nor what follows it."""
        bad = {block for blocks in self._poisoned.values() for block in blocks}
        good = next((at for at, block in enumerate(message.blocks) if block in bad), len(message.blocks))
        if good < len(message.blocks):
            self._later(self._owner.up, Lost(message.names[good:]))
        if good:
            num_sunk = max(0, message.num_sunk - len(message.names) + good)
            kept = replace(message, names=message.names[:good], blocks=message.blocks[:good], num_sunk=num_sunk)
            self._hands.do(kept)
        else:
            self._later(self._owner.up, StageSaved(self._stage, message.request))
