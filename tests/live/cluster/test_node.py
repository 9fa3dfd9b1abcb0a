"""A node's process, on a network of memory; and its worker, which executes what the node decides: facts that come in an
iteration are heard at once, and cut the run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.core.attempts import FetchOrder, Route
from isthmus.core.conductor import Rules
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.errors import ProtocolError, StartError
from isthmus.core.node import Node
from isthmus.core.node.events import Cut, DropAttempt, Event, StartAttempt, Woken
from isthmus.core.scheduler import Admitted, BlockPool, Run, Scheduler, SchedulerLimits
from isthmus.core.types import NS_PER_S, FinishReason, NodeId, RequestId, Role, Sampling, Tenant
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess, ThreadWorker
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.cluster.runs import Runs
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, layout_of
from isthmus.live.engine.interface import Row, Sampled
from isthmus.live.peers.messages import GroupGathered, Output, Scores
from tests.live.cluster.test_trust import CARD, RECIPE, facts
from tests.memory_network import MemoryNetwork
from tests.tape import MemoryTape

CURVE = Curve(kv_token_bytes=1, num_layers=2, prefill_token_s=1e-3, decode_fixed_s=1e-3)
HERE = NodeId("here")
WAIT_S = 60


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
        limits = SchedulerLimits(num_blocks=64, block_size=4, token_budget=8)
        self.node = Node(dict.fromkeys(Role, limits), Scheduler(limits, None, BlockPool(64), node=HERE))
        self.scores: list[Scores] = []
        self.runs = Runs(self.engine, None, self.hear, self.scores.append, lambda: 1000)  # type: ignore[arg-type]
        self.worker = ThreadWorker(self)  # type: ignore[arg-type]
        self.told: list[str] = []
        self.actions: list[Any] = []
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended = threading.Condition()
        self.num_ended = 0
        self.error: BaseException | None = None

    def begin(self, name: str, num_tokens: int, stop_length: int) -> None:
        route = Route(RequestId(name), 1, HERE, HERE)
        begin = StartAttempt(RequestId(f"{name}#1"), Role.MIXED, route, num_tokens, stop_length)
        with self.worker.lock:
            text = {"tokens": tuple(range(num_tokens)), "num_prompt": num_tokens}
            self.runs.begin(replace(begin, sampling=Sampling(temperature=0), **text))
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
        for request, _, token in outputs:
            self.outputs.setdefault(request, []).append(token.token)
            if token.finish is FinishReason.LENGTH:
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
    assert owner.told[:5] == ["StartAttempt", "Stepped", "Stepped", "StartAttempt", "Stepped"]
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
        owner.tell(DropAttempt(RequestId("a#1")))
        assert owner.node.scheduler.pool.available == free, "its blocks are in use"

    owner.engine.meanwhile[2] = forget
    owner.run(1)
    assert owner.node.scheduler.pool.available == 64
    assert len(owner.outputs[RequestId("b")]) == 17 > len(owner.outputs[RequestId("a")])


def test_a_worker_that_is_stopped_ends_its_run_with_the_present_iteration() -> None:
    owner, begun = Owner(), threading.Event()

    def wait() -> None:
        begun.set()
        while owner.worker._running:
            time.sleep(0.0001)

    async def work() -> None:
        owner.worker.start()
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        owner.worker.stop()

    owner.engine.meanwhile[4] = wait
    owner.begin("a", 3, 90)
    asyncio.run(work())
    assert len(owner.outputs[RequestId("a")]) == 5 and not owner.worker._thread.is_alive()


# The process.


@asynccontextmanager
async def process_of(
    tape: Any = None, clock_ns: Callable[[], int] = time.monotonic_ns
) -> AsyncIterator[tuple[NodeProcess, MemoryTape, asyncio.Task[str]]]:
    """A mixed node in its cluster, what the conductor hears, and how the process ends. Sixteen tokens are a block."""
    network, heard = MemoryNetwork(), MemoryTape()
    head = Head(Rules(), CARD, silence_s=30, rejoin_s=30, network=network, recorder=heard)
    join = await head.open("head", 1)
    engine = EmulatedEngine(RECIPE, compile_cost(CURVE), 64, max_length=1000)
    options = NodeOptions(facts("m", Role.MIXED), join, transfer_s=30)
    process = NodeProcess(engine, options, Runtime(network, clock_ns), tape=tape)
    running = asyncio.create_task(process.run())
    async with asyncio.timeout(WAIT_S):
        await head.wait_for([NodeId("m")])
        try:
            yield process, heard, running
        finally:
            await head.close()
            await asyncio.wait([running])


async def test_a_node_that_stood_still_gives_up_no_transfer_for_it() -> None:
    """Its time is that in which it ran, whoever asks."""
    stood_ns, tape = 0, MemoryTape()
    async with process_of(tape, lambda: time.monotonic_ns() + stood_ns) as (process, _, _running):

        async def woken() -> int:
            known = len(tape.entries)
            while not any(isinstance(entry.event, Woken) for entry in tape.entries[known:]):
                await asyncio.sleep(0.001)
            return tape.entries[-1].at_ns

        before_ns = await woken()
        stood_ns = 3600 * NS_PER_S
        process.tell(Woken())
        assert tape.entries[-1].at_ns - before_ns < 1800 * NS_PER_S
        assert await woken() - before_ns < 1800 * NS_PER_S


async def test_a_bug_in_a_decision_ends_the_process() -> None:
    """Nobody knows what was done and what was not."""
    async with process_of() as (process, _, running):

        def broken(fact: Event, now: int) -> list[Any]:
            raise KeyError("block 7")

        process.node.on = broken  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            process.tell(Woken())
        with pytest.raises(StartError, match="the node failed: KeyError: 'block 7'"):
            await running


async def test_a_node_of_its_own_has_no_stages() -> None:
    async with process_of() as (process, _, _running):
        with pytest.raises(ProtocolError, match="stages came to a node that has none"):
            process.heard(GroupGathered(("nobody:1",)))


async def test_gauges_tell_what_a_node_holds() -> None:
    async with process_of() as (process, _, _running):
        found = process.gauges()
        assert {name: found[name] for name in (*HOLDS, "kv_blocks")} == dict.fromkeys(HOLDS, 0) | {
            "kv_blocks_available": 64, "kv_blocks": 64,
        }  # fmt: skip
        process.worker.submit = lambda run: None  # type: ignore[method-assign]
        process._handlers[Run] = process.worker.submit
        for name in "abcdef":  # four may run at once
            key, route = RequestId(f"{name}#1"), Route(RequestId(name), 1, NodeId("m"), NodeId("m"))
            process.begin(StartAttempt(key, Role.MIXED, route, 16, 100, tokens=tuple(range(16)), num_prompt=16))
        found = process.gauges()
        assert found["node_requests_running"] + found["node_requests_waiting"] == 6
        assert found["node_requests_waiting"] > 0 and found["kv_blocks_available"] < 64


async def test_a_bug_in_the_background_ends_the_process() -> None:
    """One that beats no more, say, would only seem to be well."""
    async with process_of() as (process, _, running):

        async def broken() -> None:
            raise KeyError("a gauge")

        process.spawn(broken())
        with pytest.raises(StartError, match="the node failed: KeyError: 'a gauge'"):
            await running


HOLDS = (
    "node_requests_running",
    "node_requests_waiting",
    "kv_blocks_available",
    "kv_blocks_cached",
    "kv_blocks_transfer",
    "kv_blocks_evicted_total",
)


async def test_the_heads_times_become_this_clocks() -> None:
    async with process_of() as (process, _, _running):
        told = list[Any]()
        process.tell = told.append  # type: ignore[method-assign]
        process._clock_ns = lambda: 5000
        for deadline, now, until in ((0, 1000, 0), (700, 1000, 4700), (700, 5000, 700), (3, 9000, 1)):
            fetch = FetchOrder(NodeId("other"), 0, 1, 900)
            route = Route(RequestId("a"), 1, NodeId("m"), NodeId("m"), fetch, deadline_ns=deadline)
            begin = StartAttempt(RequestId("a#1"), Role.MIXED, route, 16, 100, tenant=Tenant("t"))
            process.begin(replace(begin, now_ns=now, tokens=tuple(range(16)), num_prompt=16, salt="s"))
            moved = told[-1].route
            assert told.pop() == replace(begin, route=moved), "who decides is told of no tokens"
            assert moved.deadline_ns == until and moved.fetch.until_ns == 900 + 5000 - now
