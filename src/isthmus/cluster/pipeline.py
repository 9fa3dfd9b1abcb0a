"""A pipeline group as its leader sees it: the stages after the first, behind one session (Mooncake, FAST'25, 5.1).

    leader (stage 0: scheduler, first layers) ══ hidden states ══> stage 1 ══> … ══> last stage ── tokens ──> leader

The leader computes the next chunk while later stages have the one before. Each stage keeps the KV of its own layers
under the same block numbers, and sends them to the decode node itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from isthmus.cluster.cache import NodeCache, Staging
from isthmus.cluster.messages import Begin
from isthmus.cluster.stage_messages import (
    StageBegin,
    StageDemote,
    StageDrop,
    StageFailed,
    StageForget,
    StageFound,
    StageLoad,
    StageLost,
    StageOpen,
    StageReady,
    StageRun,
    StageSampled,
    StageSave,
    StageSaved,
    StageShorten,
    Upward,
)
from isthmus.engine.interface import Hidden, KVBytes
from isthmus.errors import ProtocolError
from isthmus.messenger import Network, Priority, Session
from isthmus.scheduler import Run
from isthmus.store import Store
from isthmus.types import BlockName, RequestId, TokenLogprobs

log = logging.getLogger(__name__)

MAX_DISTRUSTED = 1024

Saved = Callable[[Sequence[BlockName]], None]


class Leader(Protocol):
    """What a group tells its leader, in the event loop."""

    def sampled(
        self, keys: Sequence[RequestId], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> None:
        """A batch has left the last stage."""

    def stage_failed(self, begin: Begin, reason: str) -> None:
        """A later stage cannot go on with an attempt."""

    def stage_lost(self, names: tuple[BlockName, ...]) -> None:
        """Some stage no longer has these blocks in its cache."""

    def group_ended(self, reason: str) -> None:
        """A later stage is gone: nothing more can be computed."""


class Group:
    """The later stages. Methods up to `save` are for whoever drives the scheduler; what they send keeps its order.

    `tell` calls something in the event loop, in order.
    """

    def __init__(self, stages: int, leader: Leader, tell: Callable[..., None]) -> None:
        assert stages > 1
        self.stages, self._leader, self._tell = stages, leader, tell
        self._connection: Session | None = None
        self._ready: set[int] = set()
        self._formed = asyncio.Event()
        self._found: list[set[BlockName]] = [set() for _ in range(stages - 1)]
        self._begun: dict[RequestId, Begin] = {}
        self._distrusted: OrderedDict[RequestId, None] = OrderedDict()
        self._turn = threading.Condition()
        self._in_flight = 0
        self._closed = False
        self._num_runs = self._num_saves = self._max_in_flight = 0
        self._wait_s = 0.0
        self._saves: dict[int, _JointSave] = {}

    # While the scheduler decides, and while the engine computes.

    def begin(self, begin: Begin) -> None:
        self._begun[begin.key] = begin
        self._send(StageBegin(begin))

    def forget(self, key: RequestId) -> None:
        del self._begun[key]
        self._send(StageForget(key))

    def load(self, key: RequestId, blocks: Sequence[int]) -> None:
        self._send(StageLoad(key, tuple(blocks)))

    def shorten(self, key: RequestId, num_blocks: int) -> None:
        self._send(StageShorten(key, num_blocks))

    def take_turn(self) -> None:
        """Waits until the stages are ready for one more batch: a slow one holds the leader back."""
        started_ns = time.monotonic_ns()
        with self._turn:
            self._turn.wait_for(lambda: self._in_flight <= self.stages or self._closed)
        self._wait_s += (time.monotonic_ns() - started_ns) / 1e9

    def compute(self, run: Run, hidden: Hidden) -> None:
        """The first stage is done with a batch."""
        with self._turn:
            self._in_flight += 1
            self._max_in_flight = max(self._max_in_flight, self._in_flight)
        self._num_runs += 1
        self._send(StageRun(self._num_runs, run.pieces, hidden.shape, hidden.dtype), hidden.data)

    def save(
        self, names: Sequence[BlockName], heads: Sequence[BlockName | None], blocks: Sequence[int], done: Saved
    ) -> Saved:
        """Has the later stages save their layers of these blocks. The leader calls what this returns when it has saved
        its own; `done` is told when all stages have, with what found no room in one of them."""
        self._num_saves += 1
        number = self._num_saves

        def finish(lost: Sequence[BlockName]) -> None:
            del self._saves[number]
            done(lost)

        joint = self._saves[number] = _JointSave(self.stages, finish)
        self._send(StageSave(number, tuple(names), tuple(heads), tuple(blocks)))
        return joint.saved

    def demote(self, names: Sequence[BlockName]) -> None:
        self._send(StageDemote(tuple(names)))

    def drop(self, names: Sequence[BlockName]) -> None:
        self._send(StageDrop(tuple(names)))

    def _send(self, message: Any, *payload: memoryview) -> None:
        self._tell(self._send_now, message, *payload)

    def _send_now(self, message: Any, *payload: memoryview) -> None:
        if self._connection is not None:  # one priority for all, or they would overtake each other
            self._connection.send(message, *payload, priority=Priority.URGENT)

    # In the event loop.

    async def form(self, network: Network, address: str, opening: StageOpen, *, timeout_s: float) -> None:
        """Returns when all stages are ready. Raises OSError or TimeoutError."""
        self._connection = await network.connect(address, Upward, self, timeout_s=timeout_s)
        self._send_now(opening)
        await self._formed.wait()

    def _distrust(self, request: RequestId) -> None:
        """A later stage failed an attempt, perhaps for want of a cached block: another attempt is to need none."""
        self._distrusted[request] = None
        if len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)

    def trusted(self, begin: Begin) -> Begin:
        """The attempt, without what of it cannot be relied upon: it uses no cache then, and leaves nothing there."""
        return replace(begin, names=(), num_cached=0) if begin.request in self._distrusted else begin

    def common(
        self, found: list[tuple[BlockName, BlockName | None]]
    ) -> tuple[list[tuple[BlockName, BlockName | None]], tuple[BlockName, ...]]:
        """Of the blocks that the leader found on its disk, those that every stage has; and all others of any stage,
        which are of no use."""
        names = [name for name, _ in found]
        everywhere = set(names).intersection(*self._found)
        anywhere = dict.fromkeys(names)
        for stage in self._found:
            anywhere |= dict.fromkeys(sorted(stage, key=repr))
        self._found = []
        useless = tuple([name for name in anywhere if name not in everywhere])
        return [pair for pair in found if pair[0] in everywhere], useless

    def gauges(self) -> dict[str, float]:
        """Present state and totals, by metric name."""
        with self._turn:
            return {
                "pipeline_runs_in_flight": self._in_flight,
                "pipeline_runs_in_flight_max": self._max_in_flight,
                "pipeline_runs_total": self._num_runs,
                "pipeline_wait_seconds_total": self._wait_s,
            }

    def close(self) -> None:
        """Lets go of a leader that waits for its turn."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._connection is not None:
            self._connection.close()

    def on_message(self, connection: Session, message: Upward) -> None:
        match message:
            case StageFound():
                self._found[message.stage - 1].update(message.names)
            case StageReady():
                self._ready.add(message.stage)
                if len(self._ready) == self.stages - 1:
                    self._formed.set()
            case StageSampled():
                with self._turn:
                    self._in_flight -= 1
                    self._turn.notify_all()
                self._leader.sampled(message.keys, message.tokens, message.logprobs)
            case StageSaved():
                self._saves[message.save].saved(message.lost)
            case StageLost():
                self._leader.stage_lost(message.names)
            case StageFailed():
                begin = self._begun.get(message.key)
                if begin is not None:
                    self._distrust(begin.request)
                    self._leader.stage_failed(begin, message.reason)

    def place(self, connection: Session, message: Upward, size: int) -> Sequence[memoryview]:
        raise ProtocolError(f"a {type(message).__name__} from {connection.peer} carried {size} bytes")

    def on_void(self, connection: Session, message: Upward) -> None:
        """Nothing is ever placed."""

    def on_close(self, connection: Session, reason: str) -> None:
        self._leader.group_ended(f"the session with the next stage at {connection.peer} ended: {reason}")


class _JointSave:
    """Blocks that every stage saves. Stages report from different threads."""

    def __init__(self, stages: int, done: Saved) -> None:
        self._left, self._done = stages, done
        self._lost: dict[BlockName, None] = {}
        self._lock = threading.Lock()

    def saved(self, lost: Sequence[BlockName]) -> None:
        """One more stage is done."""
        with self._lock:
            self._lost |= dict.fromkeys(lost)
            self._left -= 1
            over = not self._left
        if over:
            self._done(tuple(self._lost))


class GroupCache(NodeCache):
    """The leader's cache: what becomes of a block here becomes of it in all stages."""

    def __init__(
        self, memory: KVBytes, store: Store, group: Group, on_lost: Callable[[Sequence[BlockName]], None]
    ) -> None:
        super().__init__(memory, store, on_lost)
        self._group = group

    def save(
        self,
        names: Sequence[BlockName],
        heads: Sequence[BlockName | None],
        blocks: Sequence[int],
        staged: Sequence[Staging],
        done: Saved,
    ) -> None:
        super().save(names, heads, blocks, staged, self._group.save(names, heads, blocks, done))

    def demote(self, names: Sequence[BlockName]) -> None:
        super().demote(names)
        self._group.demote(names)

    def drop(self, names: Sequence[BlockName]) -> None:
        super().drop(names)
        self._group.drop(names)
