"""A node's process and its worker on a network of memory, and the runs of its engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.core.attempts import FetchOrder, RequestFailed, Route
from isthmus.core.conductor import Rules
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.errors import ProtocolError, StartError, UnavailableError
from isthmus.core.node import SEVERED_NS, Node
from isthmus.core.node.events import (
    Broken,
    Cut,
    DropAttempt,
    Event,
    LoadBlocks,
    Missing,
    Shorten,
    StartAttempt,
    Woken,
)
from isthmus.core.scheduler import (
    Admitted,
    BlockPool,
    Piece,
    Preempted,
    Run,
    Scheduler,
    SchedulerLimits,
    Stepped,
)
from isthmus.core.types import (
    NS_PER_S,
    BlockName,
    FinishReason,
    Job,
    NodeId,
    RequestId,
    Role,
    Sampling,
    Span,
    Tenant,
)
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess, ThreadWorker
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.cluster.runs import Runs
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, layout_of
from isthmus.live.engine.interface import Row, Sampled
from isthmus.live.kv.cache import PrefixMissing
from isthmus.live.messenger import Session
from isthmus.live.peers.messages import GroupGathered, Output, PeerMessage, Scores
from tests.live.cluster.test_trust import CARD, RECIPE, facts, joined
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


async def test_a_node_that_stood_still_gives_up_no_transfer_for_it() -> None:
    """Its time is that in which it ran, whoever asks."""
    stood_ns, tape = 0, MemoryTape()
    async with joined(tape, lambda: time.monotonic_ns() + stood_ns) as (process, _, _):

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
    async with joined() as (process, running, _):

        def broken(fact: Event, now: int) -> list[Any]:
            raise KeyError("block 7")

        process.node.on = broken  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            process.tell(Woken())
        with pytest.raises(StartError, match="the node failed: KeyError: 'block 7'"):
            await running


async def test_a_node_of_its_own_has_no_stages() -> None:
    async with joined() as (process, _, _):
        with pytest.raises(ProtocolError, match="stages came to a node that has none"):
            process.heard(GroupGathered(("nobody:1",)))


async def test_gauges_tell_what_a_node_holds() -> None:
    async with joined() as (process, _, _):
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
    async with joined() as (process, running, _):

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
    async with joined() as (process, _, _):
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


A, B = RequestId("a#1"), RequestId("b#1")
NAMES: tuple[BlockName, ...] = (b"x", b"y", b"z")
LAYERS = 2


class Loading:
    """A prefix of which `num_blocks` come. `waited`: for which layers, and how many blocks of each."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.waited: list[tuple[int, int]] = []

    def wait(self, layer: int, num_blocks: int) -> None:
        self.waited.append((layer, num_blocks))
        if self.num_blocks < num_blocks:
            raise PrefixMissing(self.num_blocks)


class Mover:
    """`loads`: under way; `ready`: what could leave, `first`: the tokens that go with it."""

    def __init__(self) -> None:
        self.loads: dict[RequestId, Loading] = {}
        self.done: list[RequestId] = []
        self.ready: list[tuple[RequestId, Span, Span]] = []
        self.first: list[tuple[RequestId, int]] = []

    def load_of(self, key: RequestId) -> Loading | None:
        return self.loads.get(key)

    def loaded(self, key: RequestId) -> None:
        self.done.append(key)

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Any) -> None:
        self.ready.append((key, layers, tokens))

    def first_token(self, key: RequestId, token: int) -> None:
        self.first.append((key, token))


class Kit:
    """Runs of an engine of two layers. Each look at the clock finds it a second later."""

    def __init__(self) -> None:
        self.mover, self.outputs, self.scores = Mover(), list[Output](), list[Scores]()
        clock = count(0, 10**9)
        self.runs = Runs(
            Interrupted(), self.mover, self.outputs.extend, self.scores.append, lambda: next(clock)
        )  # type: ignore[arg-type]

    def begin(self, key: RequestId, num_tokens: int, part: Role = Role.MIXED, **asked: Any) -> None:
        route = Route(RequestId(key[0]), 1, HERE, HERE if part is Role.MIXED else NodeId("there"))
        text = {"tokens": tuple(range(num_tokens)), "num_prompt": num_tokens}
        sampling = Sampling(temperature=0, **asked)
        self.runs.begin(StartAttempt(key, part, route, num_tokens, 100, sampling=sampling, **text))

    def run(self, *pieces: Piece) -> list[Missing | Stepped]:
        execution = self.runs.start(Run(pieces, 0, 0, 1, list))
        self.runs.compute(execution)
        self.runs.add_tokens(execution)
        return self.runs.finish(execution)


def test_a_prefix_that_could_not_be_loaded_is_no_hit() -> None:
    """Only once counted, though the attempt is pre-empted and admitted again."""
    owner, key = Owner(), RequestId("a#1")
    route = Route(RequestId("a"), 1, HERE, HERE)
    owner.runs.begin(StartAttempt(key, Role.MIXED, route, 20, 30, tokens=tuple(range(20)), num_prompt=20))
    counters = owner.runs.counters
    for _ in range(2):
        owner.runs.admitted(Admitted(key, 16, (), ()))
        assert (counters["prefix_cache_hits"], counters["prefix_cache_queries"]) == (16, 20)
    owner.runs.shortened(Shorten(key, 4))
    assert (counters["prefix_cache_hits"], counters["prefix_cache_queries"]) == (4, 20)
    owner.runs.shortened(Shorten(key, 8))
    assert counters["prefix_cache_hits"] == 4, "it was shorter before"


def test_a_prefix_is_waited_for_layer_by_layer_and_once() -> None:
    kit, load = Kit(), Loading(2)
    kit.begin(A, 10)
    kit.runs.loading(LoadBlocks(A, NAMES[:2], (0, 1), 8))
    kit.mover.loads[A] = load
    assert kit.run(Piece(A, 8, 1, (0, 1, 2), False)) == [Stepped(1, (), ())]
    assert load.waited == [(layer, 2) for layer in range(LAYERS)] and kit.mover.done == [A]
    assert kit.runs.counters["kv_wait_seconds"] == LAYERS
    kit.run(Piece(A, 9, 1, (0, 1, 2), True))
    assert len(load.waited) == LAYERS and len(kit.outputs) == 1


def test_what_is_missing_is_the_prefix_that_was_waited_for_last_and_the_iteration_does_not_count() -> None:
    kit = Kit()
    for key, blocks, here in ((A, (0, 1, 2), 2), (B, (3, 4, 5), 1)):
        kit.begin(key, 10)
        kit.runs.loading(LoadBlocks(key, NAMES[:2], blocks[:2], 8))
        kit.mover.loads[key] = Loading(here)
    pieces = [Piece(A, 8, 2, (0, 1, 2), True), Piece(B, 8, 2, (3, 4, 5), True)]
    assert kit.run(*pieces) == [Missing(B, 1), Stepped(0, (), ())]
    assert not kit.outputs and not kit.mover.done and kit.runs.counters["iterations"] == 0
    kit.runs.shortened(Shorten(B, 4))
    assert kit.run(pieces[0], Piece(B, 4, 6, (3, 4, 5), True)) == [Stepped(1, (), ())]
    assert [request for request, _, _ in kit.outputs] == ["a", "b"] and kit.mover.done == [A, B]


def test_of_a_prompt_whole_blocks_leave_as_they_are_computed_and_the_rest_at_its_end() -> None:
    kit = Kit()
    kit.begin(A, 10, Role.PREFILL)
    kit.begin(B, 3)
    kit.run(Piece(A, 0, 3, (0, 1, 2), False), Piece(B, 0, 3, (3,), True))
    assert not kit.mover.ready, "no block is whole"
    kit.run(Piece(A, 3, 6, (0, 1, 2), False))
    kit.run(Piece(A, 9, 1, (0, 1, 2), True))
    layers = [Span(layer, layer + 1) for layer in range(LAYERS)]
    assert kit.mover.ready == [(A, layer, Span(0, stop)) for stop in (8, 10) for layer in layers]
    assert kit.mover.first == [(A, kit.outputs[-1][2].token)]


def test_a_prompt_is_scored_chunk_by_chunk_and_not_again_when_its_answer_has_begun() -> None:
    """The last token of a chunk is scored against the first of the next. Who does not ask is not scored."""
    kit = Kit()
    kit.begin(A, 9, prompt_logprobs=1)
    kit.begin(B, 3)
    blocks = (0, 1, 2)
    kit.run(Piece(A, 0, 4, blocks, False), Piece(B, 0, 3, (3,), True))
    kit.run(Piece(A, 4, 4, blocks, False))
    kit.runs.preempted(Preempted(A))
    kit.run(Piece(A, 0, 8, blocks, False))
    kit.run(Piece(A, 8, 1, blocks, True))
    told = [
        (each.request, each.attempt, each.first, [score.top[0][0] for score in each.logprobs])
        for each in kit.scores
    ]
    assert told == [
        ("a", 1, 0, [1, 2, 3, 4]), ("a", 1, 4, [5, 6, 7, 8]), ("a", 1, 0, [1, 2, 3, 4, 5, 6, 7, 8]),
    ]  # fmt: skip
    kit.run(Piece(A, 9, 1, blocks, True))
    kit.runs.preempted(Preempted(A))
    kit.run(Piece(A, 0, 11, blocks, True))
    assert len(kit.scores) == 3 and len(kit.outputs) == 4


def test_what_no_token_can_be_chosen_for_breaks_and_what_is_computed_beside_it_goes_on() -> None:
    """The node hears of it before it plans anew."""
    kit = Kit()
    kit.begin(A, 10)
    kit.begin(B, 6, grammar="there is no tokenizer here")
    execution = kit.runs.start(
        Run((Piece(B, 0, 6, (4, 5), True), Piece(A, 0, 10, (0, 1, 2), True)), 0, 0, 9, list)
    )
    kit.runs.compute(execution)
    assert execution.over and not execution.ended, "its run is over"
    kit.runs.add_tokens(execution)
    broken, stepped = kit.runs.finish(execution)
    assert isinstance(broken, Broken) and broken.key == B and not broken.distrust
    assert "grammar" in broken.reason
    assert stepped == Stepped(1, ())
    assert [request for request, _, _ in kit.outputs] == [RequestId("a")]


class Deaf(MemoryNetwork):
    """Nodes cannot be reached by each other."""

    async def connect(self, address: str, types: Any, *rest: Any, **named: Any) -> Session:
        if types is PeerMessage:
            raise ConnectionRefusedError("nobody listens")
        return await super().connect(address, types, *rest, **named)


async def test_a_node_that_cannot_be_reached_is_given_time_to_be_missed() -> None:
    """Whoever finds a dead node before the head does would use up all attempts with it."""
    tape, network = MemoryTape(), Deaf()
    head = Head(Rules(), CARD, silence_s=30, rejoin_s=30, recorder=tape, network=network)  # type: ignore[arg-type]
    join = await head.open("head", 0)
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for node in (facts("p", Role.PREFILL), facts("d", Role.DECODE)):
            engine = EmulatedEngine(RECIPE, compile_cost(CURVE), 64, max_length=1000)
            process = NodeProcess(engine, NodeOptions(node, join, transfer_s=30), Runtime(network))
            group.create_task(process.run())
        await head.wait_for([NodeId("p"), NodeId("d")])
        with pytest.raises(UnavailableError, match="attempt 3 of 3"):
            async for _ in head.submit(Job(RequestId("a"), tuple(range(40)), 10, Sampling(temperature=0.0))):
                pass
        await head.close()
    routed = [each.at_ns for each in tape.entries for action in each.actions if isinstance(action, Route)]
    failed: dict[int, int] = {}  # both nodes may say so of an attempt
    for each in tape.entries:
        if isinstance(each.event, RequestFailed):
            failed.setdefault(each.event.attempt, each.at_ns)
    assert len(routed) == 3
    assert all(end - begin >= SEVERED_NS for begin, end in zip(routed, failed.values(), strict=True))


def test_of_a_shorter_prefix_the_block_in_which_it_ends_is_waited_for_too() -> None:
    kit, load = Kit(), Loading(3)
    kit.begin(A, 12)
    kit.runs.loading(LoadBlocks(A, NAMES, (0, 1, 2), 12))
    kit.mover.loads[A] = load
    kit.runs.shortened(Shorten(A, 5))
    kit.run(Piece(A, 5, 7, (0, 1, 2), True))
    assert load.waited == [(layer, 2) for layer in range(LAYERS)]
