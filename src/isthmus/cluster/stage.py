"""What a later stage of a pipeline group computes: batches as they come down the chain, in one thread.

Everything is carried out in the order of its coming, for the leader gave blocks to one attempt after another in this
order. Only a load may begin ahead of it, when nothing that waits here touches its blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from isthmus.cluster.cache import Load, NodeCache, PrefixMissing
from isthmus.cluster.messages import Begin
from isthmus.cluster.stage_messages import (
    Downward,
    StageBegin,
    StageDemote,
    StageDrop,
    StageFailed,
    StageForget,
    StageLoad,
    StageLost,
    StageRun,
    StageSampled,
    StageSave,
    StageSaved,
    StageShorten,
    Upward,
)
from isthmus.engine.interface import Chunk, Engine, Hidden, Row
from isthmus.scheduler import Piece
from isthmus.types import BlockName, RequestId, Span


class StageOwner(Protocol):
    """What is told, in the event loop, in order."""

    def up(self, message: Upward) -> None:
        """For the leader."""

    def down(self, message: Downward, data: memoryview | None = None) -> None:
        """For the stages after this one, if there are any."""

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV of an attempt is in place for these layers of this stage and these token positions."""

    def over(self, key: RequestId) -> None:
        """Nothing more of this attempt leaves from here."""

    def died(self, error: BaseException) -> None:
        """The stage cannot go on."""


class _Live:
    """An attempt in this stage. `num_loaded`: blocks that it needs of `load`; `poisoned`: its KV here is not what it
    should be, and never leaves."""

    __slots__ = ("begin", "blocks", "load", "num_loaded", "poisoned", "row")

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self.blocks: tuple[int, ...] = ()
        self.load: Load | None = None
        self.num_loaded = 0
        self.poisoned = False
        self.row = Row(begin.sampling, begin.tokens[begin.num_prompt :])


class _Broken(Exception):
    """Of a cached prefix that is attended to, only `num_blocks` are there."""

    def __init__(self, live: _Live, num_blocks: int) -> None:
        super().__init__(live.begin.key, num_blocks)
        self.live, self.num_blocks = live, num_blocks


class StageStepper:
    """`tell` calls something in the event loop, in order. `receive` what comes down; `stop` in the end."""

    def __init__(
        self, engine: Engine, cache: NodeCache | None, owner: StageOwner, tell: Callable[..., None]
    ) -> None:
        self._engine, self._cache, self._owner, self._tell = engine, cache, owner, tell
        self._is_last = engine.layers[1] == engine.layout.num_layers
        self._live: dict[RequestId, _Live] = {}
        self._queue: SimpleQueue[tuple[Downward, memoryview | None] | None] = SimpleQueue()
        self._waiting: dict[int, StageRun] = {}  # runs that came and are not computed
        self._thread = threading.Thread(target=self._main, name="stage", daemon=True)
        self.counters = {
            "engine_seconds": 0.0,
            "kv_wait_seconds": 0.0,
            "iterations": 0.0,
            "tokens_computed": 0.0,
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def receive(self, message: Downward, data: memoryview | None = None) -> None:
        """From the event loop. `data`: the hidden states of a run."""
        match message:
            case StageBegin():
                self._live[message.begin.key] = _Live(message.begin)
            case StageRun():
                self._waiting[message.run] = message
            case StageLoad() if not self._touches(message):
                self._load(message)
        self._queue.put((message, data))

    def _touches(self, load: StageLoad) -> bool:
        """Whether something that came before still reads or writes these blocks."""
        wanted = set(load.blocks)
        runs = [piece.blocks for run in list(self._waiting.values()) for piece in run.pieces]
        loads = [live.load for live in list(self._live.values()) if live.load is not None]
        busy = runs + [tuple(load.blocks) for load in loads if not load.over.is_set()]
        return any(not wanted.isdisjoint(blocks) for blocks in busy)

    # The thread that computes.

    def _main(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                self._perform(*entry)
        except BaseException as error:
            self._tell(self._owner.died, error)
            raise

    def _perform(self, message: Downward, data: memoryview | None) -> None:
        match message:
            case StageRun():
                assert data is not None
                self._run(message, Hidden(message.shape, message.dtype, data))
                del self._waiting[message.run]
                return
            case StageLoad():
                self._load(message)
            case StageShorten():
                live = self._live[message.key]
                live.num_loaded = min(live.num_loaded, message.num_blocks)
            case StageForget():
                self._forget(message.key)
            case StageSave():
                self._save(message)
            case StageDemote() if self._cache is not None:
                self._cache.demote(message.names)
            case StageDrop() if self._cache is not None:
                self._cache.drop(message.names)
        self._tell(self._owner.down, message)

    def _load(self, message: StageLoad) -> None:
        live = self._live[message.key]
        if live.load is None and self._cache is not None:
            names = live.begin.names[: len(message.blocks)]
            live.load = self._cache.load(names, message.blocks[: len(names)])
            live.num_loaded = len(names)

    def _forget(self, key: RequestId) -> None:
        live = self._live.pop(key)
        if live.load is not None:
            live.load.cancel()  # before anybody else gets its blocks
        self._tell(self._owner.over, key)

    # One batch.

    def _run(self, run: StageRun, hidden: Hidden) -> None:
        started_ns = time.monotonic_ns()
        pairs = [(self._live[piece.request], piece) for piece in run.pieces]
        for live, piece in pairs:
            live.blocks = piece.blocks
            if live.begin.key in run.poisoned:
                self._poison(live)
        batch = self._engine.build([self._chunk(live, piece) for live, piece in pairs])
        while not self._try(run, batch, pairs, hidden):
            pass  # of whom it missed something is poisoned, so that the next one goes on without
        for live, _ in pairs:
            live.load = None
        self.counters["iterations"] += 1
        self.counters["tokens_computed"] += sum(piece.count for piece in run.pieces)
        self.counters["engine_seconds"] += (time.monotonic_ns() - started_ns) / 1e9

    def _try(self, run: StageRun, batch: Any, pairs: Sequence[tuple[_Live, Piece]], hidden: Hidden) -> bool:
        """One iteration, and on with what it gives. False when a cached prefix in it is not all there."""

        def on_layer(layer: int) -> None:
            for live, piece in pairs:
                if not live.poisoned:
                    self._announce(layer, piece)

        def before_layer(layer: int) -> None:
            for live, _ in pairs:
                self._await_load(layer, live)

        try:
            if self._is_last:
                rows = [pairs[index][0].row for index in batch.order]
                tokens, logprobs = self._engine.step(batch, rows, on_layer, before_layer, hidden)
                found = zip([pairs[index][0] for index in batch.order], tokens, logprobs, strict=True)
                good = [(live.begin.key, *rest) for live, *rest in found if not live.poisoned]
                keys, chosen, probabilities = zip(*good, strict=True) if good else ((), (), ())
                self._tell(self._owner.up, StageSampled(run.run, keys, chosen, probabilities))
            else:
                given = self._engine.relay(batch, on_layer, before_layer, hidden)
                poisoned = tuple([live.begin.key for live, _ in pairs if live.poisoned])
                onward = StageRun(run.run, run.pieces, given.shape, given.dtype, poisoned)
                self._tell(self._owner.down, onward, given.data)
        except _Broken as broken:
            self._give_up(broken)
            return False
        return True

    def _chunk(self, live: _Live, piece: Piece) -> Chunk:
        tokens = live.begin.tokens[piece.start : piece.start + piece.count]
        return Chunk(tokens, piece.start, piece.blocks, piece.samples, False, live.begin.salt)

    def _announce(self, layer: int, piece: Piece) -> None:
        """All whole blocks so far, cached ones too; the last chunk also gives the unfinished block."""
        size, end = self._engine.layout.block_size, piece.start + piece.count
        stop = end if piece.samples else end // size * size
        if stop:
            self._tell(self._owner.kv_ready, piece.request, Span(layer, layer + 1), Span(0, stop), piece.blocks)

    def _await_load(self, layer: int, live: _Live) -> None:
        if live.load is None:
            return
        started_ns = time.monotonic_ns()
        try:
            live.load.wait(layer, live.num_loaded)
        except PrefixMissing as missing:
            raise _Broken(live, missing.num_blocks) from None
        self.counters["kv_wait_seconds"] += (time.monotonic_ns() - started_ns) / 1e9

    def _give_up(self, broken: _Broken) -> None:
        """A cached block is missing here and not in the stages before: only a new attempt can compute it."""
        load = broken.live.load
        assert load is not None
        load.cancel()
        self._tell(self._owner.up, StageLost(tuple(load.names[broken.num_blocks : broken.num_blocks + 1])))
        self._poison(broken.live)

    def _poison(self, live: _Live) -> None:
        if live.poisoned:
            return
        live.poisoned, live.load = True, None
        key = live.begin.key
        self._tell(self._owner.over, key)
        self._tell(self._owner.up, StageFailed(key, "a cached block is missing in a later pipeline stage"))

    # Keeping blocks.

    def _save(self, message: StageSave) -> None:
        """What belongs to a poisoned attempt is not kept, nor what follows it."""
        bad = {block for live in list(self._live.values()) if live.poisoned for block in live.blocks}
        good = next((at for at, block in enumerate(message.blocks) if block in bad), len(message.blocks))
        refused = message.names[good:]

        def done(lost: Iterable[BlockName]) -> None:
            self._tell(self._owner.up, StageSaved(message.save, (*lost, *refused)))

        if self._cache is None or not good:
            done(message.names[:good])
        else:
            self._cache.save(message.names[:good], message.heads[:good], message.blocks[:good], (), done)
