"""The worker executes what its node decides: facts that come in an iteration are heard at once, and cut the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from isthmus.attempts import Route
from isthmus.cluster.messages import Output, Task
from isthmus.cluster.node import ThreadWorker
from isthmus.cluster.runs import Runs
from isthmus.cost import Curve, compile_cost
from isthmus.engine.emulated import EmulatedEngine, Recipe, layout_of
from isthmus.engine.interface import Row, Sampled
from isthmus.node import Node
from isthmus.node.events import Begin, Cut, Event, Forget, Shorten
from isthmus.scheduler import Admitted, BlockPool, Limits, Run, Scheduler
from isthmus.types import FinishReason, NodeId, RequestId, Role, Sampling

CURVE = Curve(kv_token_bytes=1, num_layers=2, prefill_token_s=1e-3, decode_fixed_s=1e-3)
HERE = NodeId("here")


class Interrupted(EmulatedEngine):
    """In iterations of these numbers, counted from 0, something else happens as well."""

    def __init__(self) -> None:
        super().__init__(Recipe("model", layout_of(4), 1000), compile_cost(CURVE), 64, max_length=100)
        self.meanwhile: dict[int, Callable[[], None]] = {}
        self._count = -1

    def step(self, batch: Any, rows: Sequence[Row], *hooks: Any) -> Sampled:
        self._count += 1
        self.meanwhile.get(self._count, int)()
        return super().step(batch, rows, *hooks)


class Owner:
    """A node without sessions or a cache. `told`: the kinds of facts it heard; `outputs`: by request."""

    def __init__(self) -> None:
        self.engine = Interrupted()
        limits = Limits(num_blocks=64, block_size=4, token_budget=8)
        self.node = Node(dict.fromkeys(Role, limits), Scheduler(limits, None, BlockPool(64), node=HERE))
        self.runs = Runs(self.engine, None, self.hear, lambda: 1000)  # type: ignore[arg-type]
        self.worker = ThreadWorker(self)  # type: ignore[arg-type]
        self.told: list[str] = []
        self.actions: list[Any] = []
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended = threading.Condition()
        self.num_ended = 0
        self.error: BaseException | None = None

    def begin(self, name: str, num_tokens: int, stop_length: int) -> None:
        route = Route(RequestId(name), 1, HERE, HERE)
        begin = Begin(RequestId(f"{name}#1"), Role.MIXED, route, num_tokens, stop_length)
        with self.worker.lock:
            self.runs.begin(Task(begin, 0, tuple(range(num_tokens)), num_tokens, Sampling(temperature=0)))
            self.tell(begin)

    def tell(self, fact: Event) -> None:
        with self.worker.lock:
            self.told.append(type(fact).__name__)
            for action in self.node.on(fact, 0):
                self.actions.append(action)
                match action:
                    case Run():
                        self.worker.submit(action)
                    case Cut():
                        self.worker.cut()
                    case Admitted():
                        self.runs.admitted(action)

    def take_turn(self) -> None:
        """Nobody else computes."""

    def tell_all(self, facts: list[Any]) -> None:
        for fact in facts:
            self.tell(fact)

    def hear(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request, []).append(output.token.token)
            if output.token.finish is FinishReason.LENGTH:
                with self.ended:
                    self.num_ended += 1
                    self.ended.notify()

    def died(self, error: BaseException) -> None:
        self.error = error
        with self.ended:
            self.ended.notify()

    def run(self, count: int) -> None:
        """Until so many requests ended."""

        def wait() -> bool:
            with self.ended:
                return self.ended.wait_for(lambda: self.num_ended == count or self.error is not None, 30)

        async def work() -> None:
            self.worker.start()
            assert await asyncio.to_thread(wait)
            self.worker.stop()

        asyncio.run(work())


def test_what_comes_in_an_iteration_cuts_the_run_and_is_in_the_next() -> None:
    """The prompt of 10 tokens takes two iterations, then the answer is a run of many, which the second request
    breaks off after its first iteration (the third in all)."""
    owner = Owner()
    owner.begin("a", 10, 15)
    owner.engine.meanwhile[2] = lambda: owner.begin("b", 3, 5)
    owner.run(2)
    assert owner.told[:5] == ["Begin", "Stepped", "Stepped", "Begin", "Stepped"]
    steps = [action for action in owner.actions if isinstance(action, Run | Cut)]
    assert [type(step).__name__ for step in steps[:5]] == ["Run", "Run", "Run", "Cut", "Run"]
    assert [len(piece.request) for piece in steps[4].chunks] == [3]
    assert {name: len(tokens) for name, tokens in owner.outputs.items()} == {"a": 5, "b": 2}


def test_a_request_forgotten_in_an_iteration_keeps_its_blocks_until_that_is_over() -> None:
    owner = Owner()
    owner.begin("a", 3, 40)
    owner.begin("b", 3, 20)

    def forget() -> None:
        free = owner.node.scheduler.pool.available
        owner.tell(Forget(RequestId("a#1")))
        assert owner.node.scheduler.pool.available == free, "its blocks are in use"

    owner.engine.meanwhile[2] = forget
    owner.run(1)
    assert owner.node.scheduler.pool.available == 64
    assert len(owner.outputs[RequestId("b")]) == 17 > len(owner.outputs[RequestId("a")])


def test_a_prefix_that_could_not_be_loaded_is_no_hit() -> None:
    """Only once counted, though the attempt is pre-empted and admitted again."""
    owner, key = Owner(), RequestId("a#1")
    begin = Begin(key, Role.MIXED, Route(RequestId("a"), 1, HERE, HERE), 20, 30)
    owner.runs.begin(Task(begin, 0, tuple(range(20)), 20, Sampling()))
    counters = owner.runs.counters
    for _ in range(2):
        owner.runs.admitted(Admitted(key, 16, (), ()))
        assert (counters["prefix_cache_hits"], counters["prefix_cache_queries"]) == (16, 20)
    owner.runs.shortened(Shorten(key, 4))
    assert (counters["prefix_cache_hits"], counters["prefix_cache_queries"]) == (4, 20)
    owner.runs.shortened(Shorten(key, 8))
    assert counters["prefix_cache_hits"] == 4, "it was shorter before"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_is_told() -> None:
    owner = Owner()

    def fail() -> None:
        raise ValueError("broken")

    owner.engine.meanwhile[1] = fail
    owner.begin("a", 3, 40)
    owner.run(1)
    assert str(owner.error) == "broken"
