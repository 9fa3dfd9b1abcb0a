"""A later pipeline stage alone: what it computes, in which order, and what it never lets out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.core.attempts import Route
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.node.events import (
    Action,
    BlocksLost,
    Broken,
    DropBlocks,
    Event,
    LoadBlocks,
    ReleaseResources,
    SaveBlocks,
    Shorten,
    StartAttempt,
)
from isthmus.core.scheduler import Piece, Preempted, Run, Saved
from isthmus.core.types import BlockName, NodeId, RequestId, Role, Sampling, Span
from isthmus.live.cluster import pipeline
from isthmus.live.cluster.pipeline import Group
from isthmus.live.cluster.stage import StageStepper
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, layout_of
from isthmus.live.engine.interface import Chunk, Hidden, Row
from isthmus.live.kv.cache import EngineCache, Loading
from isthmus.live.kv.mover import KVMover
from isthmus.live.messenger import Session
from isthmus.live.peers.messages import StageRun, StageSampled, StageSaved
from isthmus.live.peers.sessions import Peers
from isthmus.live.store import Arena, Shape, Store

SIZE, LAYERS = 4, 3
MODEL = Recipe("model", layout_of(SIZE, layers=LAYERS), 1000)
COST = compile_cost(Curve(kv_token_bytes=16, num_layers=4, prefill_token_s=1e-6, decode_fixed_s=1e-6))
NAMES: tuple[BlockName, ...] = tuple(bytes([number]) * 16 for number in range(8))
ROW = Row(Sampling(), ())
A, B, C = RequestId("a#1"), RequestId("b#1"), RequestId("c#1")
ROUTE = Route(RequestId("r"), 1, NodeId("p"), NodeId("d"))


def engine_of(layers: tuple[int, int]) -> EmulatedEngine:
    return EmulatedEngine(MODEL, COST, 16, max_length=1000, layers=layers)


def begin(key: RequestId, num_tokens: int) -> StartAttempt:
    names, tokens = NAMES[: num_tokens // SIZE], tuple(range(num_tokens))
    return StartAttempt(key, Role.PREFILL, ROUTE, num_tokens, 100, names, tokens=tokens, num_prompt=num_tokens)


def load(key: RequestId, blocks: tuple[int, ...], first: int = 0) -> LoadBlocks:
    return LoadBlocks(key, NAMES[first : first + len(blocks)], blocks, len(blocks) * SIZE)


def save(key: RequestId, blocks: tuple[int, ...]) -> SaveBlocks:
    return SaveBlocks(key, NAMES[: len(blocks)], None, blocks)


class Owner:
    """Keeps what it is told; what comes from other threads is carried out at once."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.changed = threading.Condition()

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: Any) -> None:
        with self.changed:
            function(*arguments)
            self.changed.notify_all()

    def up(self, message: Any) -> None:
        self.told.append(message)

    def down(self, message: Any, data: memoryview | None = None) -> None:
        self.told.append(message)

    def fact(self, fact: Event) -> None:
        """Of the mover, as a stage's process hands it on."""
        self.up(StageSaved(1, fact.request) if isinstance(fact, Saved) else fact)

    def died(self, error: BaseException) -> None:
        self.told.append(error)

    def wait_for(self, kind: type) -> Any:
        """The last thing told of this kind."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(isinstance(each, kind) for each in self.told), 20), (
                self.told
            )
            return next(each for each in reversed(self.told) if isinstance(each, kind))


class Nobody(Peers):
    """There are no other nodes."""

    def __init__(self) -> None:
        pass

    async def get(self, node: NodeId) -> Session:
        raise OSError("nobody is there")


class Watched(KVMover):
    """`ready`: attempts of which KV may leave; `released`: those of which nothing may leave any more."""

    def __init__(self, engine: EmulatedEngine, cache: EngineCache, owner: Owner) -> None:
        super().__init__(
            memory=engine.memory,
            attends=engine.attend,
            first_layer=engine.layers[0],
            cache=cache,
            peers=Nobody(),
            tell=owner.fact,
            spawn=lambda work: work.close(),
            shares_memory=False,
            answer_s=30.0,
            received=lambda key, token: None,
        )
        self.ready: list[RequestId] = []
        self.released: list[RequestId] = []

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Any) -> None:
        if key not in self.released:
            self.ready.append(key)

    def do(self, action: Action) -> None:
        if isinstance(action, ReleaseResources):
            self.released.append(action.key)
        super().do(action)


class Stage:
    """The last of two stages, with a cache of 8 blocks; `first`: the engine of the one before."""

    def __init__(self, engine: EmulatedEngine | None = None) -> None:
        self.first, self.engine, self.owner = engine_of((0, 1)), engine or engine_of((1, LAYERS)), Owner()
        layout = self.engine.memory.layout
        self.store = Store(Arena(Shape(layout.num_layers, layout.slice_bytes), 8))
        self.cache = EngineCache(self.engine.memory, self.store)
        self.mover = Watched(self.engine, self.cache, self.owner)
        self.mover.open(self.owner)  # type: ignore[arg-type]
        later = self.owner.call_soon_threadsafe
        self.stepper = StageStepper(self.engine, 1, self.mover, self.owner, later)  # type: ignore[arg-type]

    def receive(self, *messages: Any) -> None:
        for message in messages:
            self.stepper.receive(message)

    def put(self, *numbers: int) -> None:
        """Each block is full of its number and one; the first has no head, and each other follows the one before."""
        layout = self.engine.memory.layout
        for at, number in enumerate(numbers):
            head = NAMES[numbers[at - 1]] if at else None
            self.store.put(NAMES[number], head, bytes([number + 1]) * layout.num_layers * layout.slice_bytes)

    def run(self, number: int, *pieces: Piece, poisoned: tuple[RequestId, ...] = ()) -> None:
        """What the stage before gives for chunks of prompts 0, 1, 2, …"""
        chunks = [
            Chunk(range(each.start, each.start + each.count), each.start, each.blocks, each.samples)
            for each in pieces
        ]
        hidden = self.first.relay(self.first.build(chunks))
        message = StageRun(number, pieces, hidden.shape, hidden.dtype, poisoned)
        self.stepper.receive(message, hidden.data)

    def close(self) -> None:
        self.stepper.stop()
        self.cache.close()
        self.store.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    made.stepper.start()
    yield made
    made.close()


def whole(key: RequestId, num_tokens: int, blocks: tuple[int, ...], start: int = 0) -> Piece:
    return Piece(key, start, num_tokens - start, blocks, True)


def token_of(num_tokens: int) -> int:
    """What a whole model says after the tokens 0, 1, 2, …"""
    engine = engine_of((0, LAYERS))
    batch = engine.build([Chunk(range(num_tokens), 0, tuple(range(15)), True)])
    return engine.step(batch, [ROW])[0][0]


def test_a_prompt_that_no_token_can_be_chosen_for_breaks_alone(stage: Stage) -> None:
    """Its leader gives it up."""
    wrong = begin(A, 10)
    stage.receive(replace(wrong, sampling=Sampling(grammar="there is no tokenizer here")))
    stage.receive(begin(B, 7))
    stage.run(1, whole(A, 10, (0, 1, 2)), whole(B, 7, (5, 6)))
    assert stage.owner.wait_for(StageSampled) == StageSampled(1, (B,), (token_of(7),), (None,))
    broken = stage.owner.wait_for(Broken)
    assert broken.key == A and "grammar" in broken.reason and not broken.distrust


def poisoned(stage: Stage) -> None:
    """A prefix of two blocks of which nothing is here, beside a request that needs none."""
    stage.receive(begin(A, 10))
    stage.receive(begin(B, 7))
    stage.receive(load(A, (0, 1)))
    stage.first.relay(stage.first.build([Chunk(range(8), 0, (0, 1), False)]))
    stage.run(1, whole(A, 10, (0, 1, 2), start=8), whole(B, 7, (5, 6)))


def test_what_misses_a_block_poisons_only_itself(stage: Stage) -> None:
    poisoned(stage)
    assert stage.owner.wait_for(StageSampled) == StageSampled(1, (B,), (token_of(7),), (None,))
    told = stage.owner.told
    assert BlocksLost((NAMES[0],)) in told
    failed = next(each for each in told if isinstance(each, Broken))
    assert failed.key == A and told.index(BlocksLost((NAMES[0],))) < told.index(failed)
    assert stage.mover.released == [A]
    assert A not in stage.mover.ready and B in stage.mover.ready


def test_blocks_of_a_poisoned_attempt_are_not_kept(stage: Stage) -> None:
    poisoned(stage)
    stage.receive(save(A, (0, 1)))
    assert stage.owner.wait_for(StageSaved) == StageSaved(1, A)
    assert stage.owner.told.index(BlocksLost(NAMES[:2])) < stage.owner.told.index(StageSaved(1, A))
    assert not any(map(stage.store.contains, NAMES))
    stage.receive(ReleaseResources(A))
    stage.receive(begin(C, 8))
    stage.run(2, whole(C, 8, (0, 1)))
    stage.receive(save(C, (0, 1)))
    stage.stepper.stop()
    stage.cache.kept().result(20)
    assert StageSaved(1, C) in stage.owner.told
    assert stage.owner.told.count(BlocksLost(NAMES[:2])) == 1, "the blocks hold something else now"
    assert all(map(stage.store.contains, NAMES[:2]))


def test_poison_of_a_stage_before_goes_on(stage: Stage) -> None:
    stage.receive(begin(A, 10))
    stage.run(1, whole(A, 10, (0, 1, 2)), poisoned=(A,))
    assert stage.owner.wait_for(StageSampled) == StageSampled(1, (), (), ())
    assert stage.mover.released == [A] and not stage.mover.ready


def test_a_prefix_that_the_leader_misses_too_is_no_failure(stage: Stage) -> None:
    stage.receive(begin(A, 10))
    stage.receive(load(A, (0, 1)))
    stage.receive(Shorten(A, 0))
    stage.run(1, whole(A, 10, (0, 1, 2)))
    assert stage.owner.wait_for(StageSampled) == StageSampled(1, (A,), (token_of(10),), (None,))
    assert not stage.mover.released


class Held(EmulatedEngine):
    """Goes on with an iteration that has begun only when it is let go."""

    def __init__(self) -> None:
        super().__init__(MODEL, COST, 16, max_length=1000, layers=(1, LAYERS))
        self.begun, self.go = threading.Event(), threading.Event()

    def step(self, batch: Any, rows: Any, *hooks: Any, **named: Any) -> Any:
        self.begun.set()
        assert self.go.wait(20)
        return super().step(batch, rows, *hooks, **named)


class Loads:
    """Those that a cache has begun."""

    def __init__(self, cache: EngineCache) -> None:
        self.begun: list[Loading] = []
        self._real, cache.load = cache.load, self._load  # type: ignore[method-assign, assignment]

    def _load(self, *arguments: Any) -> Loading:
        self.begun.append(self._real(*arguments))
        return self.begun[-1]

    @property
    def blocks(self) -> list[tuple[int, ...]]:
        return [tuple(load.blocks) for load in self.begun]


@pytest.fixture
def held() -> Iterator[Stage]:
    """A stage that computes when its engine's `go` is set."""
    made = Stage(Held())
    made.stepper.start()
    yield made
    made.close()


def go(stage: Stage) -> None:
    """Lets the engine go, and waits until all that came is done."""
    assert isinstance(stage.engine, Held)
    stage.engine.go.set()
    stage.receive(DropBlocks(()))
    stage.owner.wait_for(DropBlocks)


def held_block(stage: Stage, number: int) -> int:
    """What all bytes of a block of the engine's are."""
    (found,) = set(bytes(stage.engine.memory.export(0, number * SIZE, (number + 1) * SIZE)))
    return found


def test_a_load_waits_for_what_still_writes_its_blocks(held: Stage) -> None:
    """The leader gave up one attempt and gave its blocks to another, while the first is still computed here."""
    held.put(0, 1)
    loads = Loads(held.cache)
    held.receive(begin(A, 10))
    held.run(1, whole(A, 10, (0, 1, 2)))
    held.receive(ReleaseResources(A), begin(B, 10), begin(C, 10), load(B, (1, 2)), load(C, (7, 8)))
    assert loads.blocks == [(7, 8)], "only a load of blocks that nothing else touches may begin at once"
    go(held)
    assert loads.blocks == [(7, 8), (1, 2)]
    for each in loads.begun:
        each.wait(held.engine.memory.layout.num_layers - 1, 2)
    assert held_block(held, 1) == 1, "the load came after the computing"


def test_a_load_waits_for_the_save_that_brings_its_blocks(held: Stage) -> None:
    """The next one with the same prefix comes before this stage has computed it: nothing is missing."""
    loads = Loads(held.cache)
    held.receive(begin(A, 10))
    held.run(1, whole(A, 10, (0, 1, 2)))
    held.receive(save(A, (0, 1)), begin(B, 10), load(B, (7, 8)))
    assert loads.blocks == []
    go(held)
    held.first.relay(held.first.build([Chunk(range(8), 0, (7, 8), False)]))
    held.run(2, whole(B, 10, (7, 8, 9), start=8))
    held.stepper.stop()
    assert held.owner.wait_for(StageSampled) == StageSampled(2, (B,), (token_of(10),), (None,))
    assert not [each for each in held.owner.told if isinstance(each, BlocksLost | Broken)]


def test_loads_into_the_same_blocks_keep_their_order(held: Stage) -> None:
    """The first has not begun when it is given up: it must not be what lies there in the end."""
    held.put(2, 3)
    loads = Loads(held.cache)
    held.receive(begin(A, 10))
    held.run(1, whole(A, 10, (0, 1, 2)))
    held.receive(save(A, (0, 1)), begin(B, 10), load(B, (7, 8)), ReleaseResources(B))
    held.receive(begin(C, 20), load(C, (7, 8), first=2))
    assert loads.blocks == []
    go(held)
    assert [each.names for each in loads.begun] == [NAMES[:2], NAMES[2:4]]
    loads.begun[-1].wait(held.engine.memory.layout.num_layers - 1, 2)
    assert (held_block(held, 7), held_block(held, 8)) == (3, 4)


def test_a_load_follows_the_pre_emption_before_it(held: Stage) -> None:
    """Or that would take it back."""
    held.put(0, 1)
    loads = Loads(held.cache)
    held.receive(begin(A, 10), begin(B, 10), load(B, (7, 8)))
    loads.begun[0].over.wait(20)
    held.run(1, whole(A, 10, (0, 1, 2)))
    assert isinstance(held.engine, Held) and held.engine.begun.wait(20)
    held.receive(Preempted(B), load(B, (7, 8)))
    assert len(loads.begun) == 1
    go(held)
    assert len(loads.begun) == 2 and not loads.begun[1].cancelled


# The leader, which is ahead of it.


def test_a_slow_stage_holds_the_leader_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many batches are under way as there are stages, and one more waits at the first. Each look at the clock finds
    it a second later."""
    clock = count(0, 10**9)
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic_ns=lambda: next(clock)))
    group = Group(2, bool, bool, bool, bool, lambda *_: None)  # type: ignore[arg-type]
    run, hidden = Run((), 0, 0, 1, list), Hidden((0,), "uint8", memoryview(b""))
    for _ in range(3):
        group.take_turn()
        group.compute(run, hidden)
    turns = threading.Thread(target=group.take_turn)
    turns.start()
    turns.join(0.05)
    assert turns.is_alive()
    assert group.gauges()["pipeline_runs_in_flight"] == group.gauges()["pipeline_runs_in_flight_max"] == 3
    group.on_message(None, StageSampled(1, (), (), ()))  # type: ignore[arg-type]
    turns.join(60)
    assert not turns.is_alive() and group.gauges()["pipeline_runs_in_flight"] == 2
    assert group.gauges()["pipeline_runs_total"] == 3
    assert group.gauges()["pipeline_wait_seconds_total"] == 4
    for _ in range(2):
        group.compute(run, hidden)
    turns = threading.Thread(target=group.take_turn)
    turns.start()
    group.close()
    turns.join(60)
    assert not turns.is_alive(), "who waits is let go at the end"
