"""A later pipeline stage alone: what it computes, in which order, and what it never lets out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from isthmus.cluster.cache import Load, NodeCache
from isthmus.cluster.messages import Begin
from isthmus.cluster.stage import StageStepper
from isthmus.cluster.stage_messages import (
    StageBegin,
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
)
from isthmus.cost import Curve, compile_cost
from isthmus.engine.emulated import EmulatedEngine, Recipe, layout_of
from isthmus.engine.interface import BeforeLayer, Chunk, Hidden, OnLayer, Row
from isthmus.scheduler import Piece
from isthmus.store import Arena, Shape, Store
from isthmus.types import BlockName, RequestId, Role, Sampling

SIZE, LAYERS = 4, 3
MODEL = Recipe("model", layout_of(SIZE, layers=LAYERS), 1000)
COST = compile_cost(Curve(kv_token_bytes=16, num_layers=4, prefill_token_s=1e-6, decode_fixed_s=1e-6))
NAMES: tuple[BlockName, ...] = tuple(bytes([number]) * 16 for number in range(8))
ROW = Row(Sampling(), ())
A, B = RequestId("a#1"), RequestId("b#1")


def engine_of(layers: tuple[int, int]) -> EmulatedEngine:
    return EmulatedEngine(MODEL, COST, 16, max_length=1000, layers=layers)


def begin(name: str, num_tokens: int) -> StageBegin:
    prompt = tuple(range(num_tokens))
    names = NAMES[: num_tokens // SIZE]
    return StageBegin(Begin(RequestId(name), 1, Role.PREFILL, prompt, num_tokens, 100, Sampling(), names))


class Owner:
    """Keeps what it is told; `calls` come from the stage's thread, where they are carried out at once."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.ready: list[RequestId] = []
        self.withdrawn: list[RequestId] = []
        self.data: dict[int, memoryview] = {}
        self.changed = threading.Condition()

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with self.changed:
            function(*arguments)
            self.changed.notify_all()

    def up(self, message: Any) -> None:
        self.told.append(message)

    def down(self, message: Any, data: memoryview | None = None) -> None:
        self.told.append(message)
        if data is not None:
            self.data[message.run] = data

    def kv_ready(self, key: RequestId, *_: Any) -> None:
        self.ready.append(key)

    def over(self, key: RequestId) -> None:
        self.withdrawn.append(key)

    def died(self, error: BaseException) -> None:
        self.told.append(error)

    def wait_for(self, kind: type) -> Any:
        """The last thing told of this kind."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(isinstance(each, kind) for each in self.told), 20), (
                self.told
            )
            return next(each for each in reversed(self.told) if isinstance(each, kind))


class Stage:
    """A stage with a cache of 8 blocks; `first`: the stages before, in one engine."""

    def __init__(self, layers: tuple[int, int] = (1, LAYERS)) -> None:
        self.first, self.engine, self.owner = engine_of((0, layers[0])), engine_of(layers), Owner()
        layout = self.engine.memory.layout
        self.store = Store(Arena(Shape(layout.num_layers, layout.slice_bytes), 8))
        self.cache = NodeCache(self.engine.memory, self.store)
        self.stepper = StageStepper(self.engine, self.cache, self.owner, self.owner.tell)

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


def test_the_tokens_are_the_whole_models(stage: Stage) -> None:
    stage.stepper.receive(begin("a", 10))
    stage.stepper.receive(begin("b", 7))
    stage.run(1, Piece(A, 0, 6, (0, 1, 2), False), whole(B, 7, (5, 6)))
    stage.run(2, whole(A, 10, (0, 1, 2), start=6))
    stage.owner.wait_for(StageSampled)
    stage.stepper.stop()
    found = [each for each in stage.owner.told if isinstance(each, StageSampled)]
    assert [(each.run, each.keys, each.tokens) for each in found] == [
        (1, (B,), (token_of(7),)),
        (2, (A,), (token_of(10),)),
    ]


def test_a_middle_stage_hands_on_what_the_next_one_takes() -> None:
    middle = Stage((1, 2))
    middle.stepper.start()
    middle.stepper.receive(begin("a", 10))
    middle.run(1, whole(A, 10, (0, 1, 2)))
    onward = middle.owner.wait_for(StageRun)
    last = engine_of((2, LAYERS))
    batch = last.build([Chunk(range(10), 0, (0, 1, 2), True)])
    hidden = Hidden(onward.shape, onward.dtype, middle.owner.data[1])
    assert last.step(batch, [ROW], hidden=hidden)[0] == [token_of(10)]
    middle.close()


def test_a_saved_prefix_is_loaded_again(stage: Stage) -> None:
    stage.stepper.receive(begin("a", 10))
    stage.run(1, whole(A, 10, (0, 1, 2)))
    stage.stepper.receive(StageSave(1, NAMES[:2], (None, NAMES[0]), (0, 1)))
    assert stage.owner.wait_for(StageSaved) == StageSaved(1, ())
    stage.stepper.receive(StageForget(A))
    stage.stepper.receive(begin("b", 10))
    stage.stepper.receive(StageLoad(B, (7, 8)))
    stage.first.relay(stage.first.build([Chunk(range(8), 0, (7, 8), False)]))
    stage.run(2, whole(B, 10, (7, 8, 9), start=8))
    stage.stepper.stop()
    assert stage.owner.wait_for(StageSampled) == StageSampled(2, (B,), (token_of(10),), (None,))


def poisoned(stage: Stage) -> None:
    """A prefix of two blocks of which nothing is here, beside a request that needs none."""
    stage.stepper.receive(begin("a", 10))
    stage.stepper.receive(begin("b", 7))
    stage.stepper.receive(StageLoad(A, (0, 1)))
    stage.first.relay(stage.first.build([Chunk(range(8), 0, (0, 1), False)]))
    stage.run(1, whole(A, 10, (0, 1, 2), start=8), whole(B, 7, (5, 6)))


def test_what_misses_a_block_poisons_only_itself(stage: Stage) -> None:
    poisoned(stage)
    assert stage.owner.wait_for(StageSampled) == StageSampled(1, (B,), (token_of(7),), (None,))
    told = stage.owner.told
    assert StageLost((NAMES[0],)) in told
    failed = next(each for each in told if isinstance(each, StageFailed))
    assert failed.key == A and told.index(StageLost((NAMES[0],))) < told.index(failed)
    assert stage.owner.withdrawn == [A]
    assert A not in stage.owner.ready and B in stage.owner.ready


def test_blocks_of_a_poisoned_attempt_are_not_kept(stage: Stage) -> None:
    poisoned(stage)
    stage.stepper.receive(StageSave(1, NAMES[:2], (None, NAMES[0]), (0, 1)))
    assert stage.owner.wait_for(StageSaved) == StageSaved(1, NAMES[:2])
    assert not any(map(stage.store.contains, NAMES))
    stage.stepper.receive(StageForget(A))
    stage.stepper.receive(begin("c", 8))
    stage.run(2, whole(RequestId("c#1"), 8, (0, 1)))
    stage.stepper.receive(StageSave(2, NAMES[:2], (None, NAMES[0]), (0, 1)))
    stage.stepper.stop()
    assert stage.owner.wait_for(StageSaved) == StageSaved(2, ()), "the blocks hold something else now"


def test_poison_of_a_stage_before_goes_on(stage: Stage) -> None:
    stage.stepper.receive(begin("a", 10))
    stage.run(1, whole(A, 10, (0, 1, 2)), poisoned=(A,))
    assert stage.owner.wait_for(StageSampled) == StageSampled(1, (), (), ())
    assert stage.owner.withdrawn == [A] and not stage.owner.ready


def test_a_prefix_that_the_leader_misses_too_is_no_failure(stage: Stage) -> None:
    stage.stepper.receive(begin("a", 10))
    stage.stepper.receive(StageLoad(A, (0, 1)))
    stage.stepper.receive(StageShorten(A, 0))
    stage.run(1, whole(A, 10, (0, 1, 2)))
    assert stage.owner.wait_for(StageSampled) == StageSampled(1, (A,), (token_of(10),), (None,))
    assert not stage.owner.withdrawn


class Held(EmulatedEngine):
    """Begins an iteration only when it is let go."""

    def __init__(self) -> None:
        super().__init__(MODEL, COST, 16, max_length=1000, layers=(1, LAYERS))
        self.go = threading.Event()

    def step(
        self,
        batch: Any,
        rows: Any,
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        hidden: Hidden | None = None,
    ) -> Any:
        assert self.go.wait(20)
        return super().step(batch, rows, on_layer, before_layer, hidden)


class Loads:
    """Those that a cache has begun."""

    def __init__(self, cache: NodeCache) -> None:
        self.begun: list[Load] = []
        self._real, cache.load = cache.load, self._load  # type: ignore[method-assign, assignment]

    def _load(self, *arguments: Any) -> Load:
        self.begun.append(self._real(*arguments))
        return self.begun[-1]

    @property
    def blocks(self) -> list[tuple[int, ...]]:
        return [tuple(load.blocks) for load in self.begun]


def test_a_load_waits_for_what_still_writes_its_blocks() -> None:
    """The leader gave up one attempt and gave its blocks to another, while the first is still computed here."""
    stage = Stage()
    stage.engine = held = Held()
    stage.cache = NodeCache(held.memory, stage.store)
    stage.stepper = StageStepper(held, stage.cache, stage.owner, stage.owner.tell)
    layers, width = held.memory.layout.num_layers, held.memory.layout.slice_bytes
    for at in (0, 1):
        stage.store.put(NAMES[at], NAMES[at - 1] if at else None, bytes([at + 1]) * layers * width)
    loads = Loads(stage.cache)
    stage.stepper.start()
    stage.stepper.receive(begin("a", 10))
    stage.run(1, whole(A, 10, (0, 1, 2)))
    stage.stepper.receive(StageForget(A))
    stage.stepper.receive(begin("b", 10))
    stage.stepper.receive(begin("c", 10))
    stage.stepper.receive(StageLoad(B, (1, 2)))
    stage.stepper.receive(StageLoad(RequestId("c#1"), (7, 8)))
    assert loads.blocks == [(7, 8)], "only a load of blocks that nothing else touches may begin at once"
    held.go.set()
    stage.stepper.receive(StageDrop(()))
    stage.owner.wait_for(StageDrop)
    assert loads.blocks == [(7, 8), (1, 2)]
    for load in loads.begun:
        load.wait(layers - 1, 2)
    stage.close()
    assert bytes(held.memory.export(0, 1 * SIZE, 2 * SIZE)) == b"\1" * width, (
        "the load came after the computing"
    )
