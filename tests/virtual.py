"""A whole cluster in one event loop and in virtual time: the live head and node processes, and links and stores whose
times are the simulator's.

The loop jumps to the next timer when nothing is left to do, and takes timers one by one: whatever follows
from one without time passing is done before the next, even when both are due at the same instant. Arrivals come
first then, as in the simulator, iterations of prompts alone next, then what moves between nodes, then iterations
with decodes. So a run depends on nothing but its input, and messages, however many, take no time.

Bytes of KV are really there: what a store holds and what is handed over is copied between the engines' memories when
the simulator says that it has come. The emulated engine draws its tokens from them, so a wrong one shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from itertools import count
from typing import Any

import msgspec

from isthmus.attempts import key_of
from isthmus.blocks import BlockNamer
from isthmus.cluster.cache import PrefixMissing
from isthmus.cluster.head import Head
from isthmus.cluster.node import NodeProcess, World
from isthmus.cluster.process import NodeOptions
from isthmus.cluster.recorder import Entry, MemoryTape
from isthmus.cluster.ways import Ways
from isthmus.conductor import Abort, LinkState, Route
from isthmus.config import Config
from isthmus.cost import compile_cost
from isthmus.deploy import NodeFacts, clusters_of
from isthmus.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of
from isthmus.engine.interface import KVBytes
from isthmus.errors import IsthmusError
from isthmus.messenger import MemoryNetwork
from isthmus.node.events import (
    Demote,
    Drop,
    Event,
    FetchEnded,
    Grant,
    Load,
    Loaded,
    Missing,
    Received,
    Save,
)
from isthmus.scheduler import Run, Stepped
from isthmus.sim.build import build_node
from isthmus.sim.deployment import Deployment
from isthmus.sim.job import Job
from isthmus.sim.moves import Due, Moves
from isthmus.sim.node import SimNode
from isthmus.sim.workloads import Request
from isthmus.types import NS_PER_S, BlockName, ModelCard, RequestId, Sampling, Span
from isthmus.types import Job as Asked

VOCABULARY = 1 << 31
"""Far more than any workload draws, so that one token of an answer can be told from all others."""
MAX_LENGTH = 1 << 30
ARRIVAL, PREFILL_ENDS, TRANSFER, FLOWS, STEP_ENDS, OTHERS = range(6)
"""Whose timer comes first at equal times; of the same kind, the one that was set first."""


class ManualLoop(asyncio.BaseEventLoop):
    """An event loop without sockets whose clock moves only from one timer to the next. Raises RuntimeError when
    it is run and nothing can ever happen again."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self._timers: list[tuple[int, int, int, asyncio.TimerHandle]] = []
        self._sequence = count()

    def clock_ns(self) -> int:
        return self.now_ns

    def time(self) -> float:
        """Seconds. Below 2**50 ns, which is 13 days, nanoseconds survive the way through a float."""
        return self.now_ns / NS_PER_S

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._set(round(when * NS_PER_S), OTHERS, timer)
        return timer

    def set(self, when_ns: int, priority: int, callback: Callable[..., Any], *args: Any) -> None:
        """Calls it then."""
        self._set(when_ns, priority, asyncio.TimerHandle(when_ns / NS_PER_S, callback, args, self))

    def turn(self) -> int:
        """Whose timer comes first of those of one kind at one instant: a lower one."""
        return next(self._sequence)

    def _set(self, when_ns: int, priority: int, timer: asyncio.TimerHandle, turn: int | None = None) -> None:
        entry = (max(when_ns, self.now_ns), priority, self.turn() if turn is None else turn, timer)
        heapq.heappush(self._timers, entry)

    async def sleep_until(self, when_ns: int, priority: int = OTHERS) -> None:
        over = self.create_future()
        timer = asyncio.TimerHandle(when_ns / NS_PER_S, over.set_result, (None,), self)
        self._set(when_ns, priority, timer)
        try:
            await over
        finally:
            timer.cancel()

    def call_as_transfer(self, callback: Callable[..., Any], *args: Any) -> None:
        """Calls it at this instant, when the prompts that end now have ended."""
        self._set(self.now_ns, TRANSFER, asyncio.TimerHandle(self.time(), callback, args, self))

    async def settle(self) -> None:
        """Returns when all that follows without time passing is done."""
        await self.sleep_until(self.now_ns)

    # What asyncio's own loop is made of, in as far as there is no selector.

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if not ready:
            ready.append(self._next_timer())
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _next_timer(self) -> asyncio.Handle:
        while self._timers:
            when_ns, _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self.now_ns = when_ns
                return timer
        raise RuntimeError("nothing is left that could happen: what is waited for never comes")

    def _write_to_self(self) -> None:
        """There is no selector to wake."""


class LoopWorker:
    """Executes a node's runs inside a `ManualLoop`: an iteration of the emulated engine is a wait of its length, and a
    run whose prompts need KV that is not there waits for it, as the simulator's do.

    Iterations end at the start of their run plus the exact sum of their lengths, rounded down to nanoseconds.
    """

    def __init__(self, process: NodeProcess, loop: ManualLoop, bytes_of: Callable[[], VirtualHands]) -> None:
        self._process, self._loop, self._hands_of = process, loop, bytes_of
        self.lock = contextlib.nullcontext()
        self._formed = asyncio.Event()
        self._run: Run | None = None
        self._is_cut = False
        self._timer: asyncio.TimerHandle | None = None
        self._until: tuple[int, int, asyncio.Future[None]]
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._main())

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def form(self, run: Run) -> None:
        self._run, self._is_cut = run, False
        _ = run.pieces
        self._formed.set()

    def cut(self) -> None:
        """As in the simulator, the end of the run is set anew then, and comes after others of that instant."""
        self._is_cut = True
        if self._timer is not None:
            self._timer.cancel()
            self._sleep(self._loop.turn())

    def _sleep(self, turn: int) -> None:
        when_ns, priority, over = self._until
        self._timer = asyncio.TimerHandle(when_ns / NS_PER_S, over.set_result, (None,), self._loop)
        self._loop._set(when_ns, priority, self._timer, turn)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _main(self) -> None:
        try:
            while True:
                await self._formed.wait()
                self._formed.clear()
                while self._run is not None:
                    run, self._run = self._run, None
                    await self._execute(run)
        except Exception as error:
            self._process.died(error)
            raise

    async def _execute(self, run: Run) -> None:
        runs, engine, hands = self._process.runs, self._process.runs.engine, self._hands_of()
        assert isinstance(engine, EmulatedEngine)
        execution = runs.start(run)
        started_ns, elapsed_ps = self._loop.now_ns, 0
        priority, turn = STEP_ENDS if run.num_decodes else PREFILL_ENDS, self._loop.turn()
        while True:
            if not hands.misses(run):
                elapsed_ps += engine.step_ps(execution.batch)
            self._until = started_ns + elapsed_ps // 1000, priority, self._loop.create_future()
            self._sleep(turn)
            await self._until[2]
            self._timer = None
            await hands.wait_for(run)
            if missed := hands.take_missed(run):
                self._process.stepped([*missed, Stepped(0)])
                return
            runs.compute(execution)
            runs.book(execution)
            if execution.over or self._is_cut:
                break
            runs.advance(execution)
        self._process.stepped(runs.finish(execution))


class VirtualLoad:
    """A prefix that a run needs: its bytes are copied layer by layer as the engine asks for them."""

    def __init__(self, hands: VirtualHands, load: Load) -> None:
        self._hands, self._load = hands, load

    def wait(self, layer: int, num_blocks: int) -> None:
        load = self._load
        self._hands.fill(load.key, layer, load.names[:num_blocks], load.blocks)


class VirtualHands:
    """`Hands` whose bytes lie in dictionaries, and whose times are those of the simulator's `Moves`."""

    def __init__(
        self, links: VirtualLinks, *, memory: KVBytes, tell: Callable[[Event], None], **others: Any
    ) -> None:
        self._links, self.memory, self.told = links, memory, tell
        self.process: NodeProcess = tell.__self__  # type: ignore[attr-defined]
        self._received = others["received"]
        self.slot = links.enter(self)
        self.store: dict[BlockName, list[bytes]] = {}
        self.fetched: dict[RequestId, dict[BlockName, list[bytes]]] = {}
        self._loads: dict[RequestId, Load] = {}
        self.granted: dict[RequestId, Grant] = {}
        self.ready: dict[RequestId, tuple[int, Sequence[int]]] = {}
        self.states: dict[RequestId, tuple[Span, Sequence[int]]] = {}
        self._tokens: dict[RequestId, int] = {}

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """The links are there."""

    async def close(self) -> None:
        """Nothing is left open."""

    def __getattr__(self, name: str) -> Any:
        """What sessions between nodes would bring: there are none."""
        return {"gauges": dict, "save_layer": lambda *_: None, "stage": lambda *_: None}.get(
            name, lambda *_: None
        )

    def do(self, action: Any) -> None:
        match action:
            case Load():
                self._loads[action.key] = action
            case Save():
                for name, block in zip(action.names, action.blocks, strict=True):
                    self.store[name] = [bytes(self._block(layer, block)) for layer in self._layers]
            case Drop():
                for name in action.names:
                    self.store.pop(name, None)
            case Grant():
                self.granted[action.key] = action
            case Demote():
                assert set(action.names) <= self.store.keys()
        self._links.do(self.slot, action)

    # A run.

    def load_of(self, key: RequestId) -> VirtualLoad | None:
        load = self._loads.get(key)
        return None if load is None else VirtualLoad(self, load)

    def loaded(self, key: RequestId) -> None:
        self._loads.pop(key, None)

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        if layers.stop - layers.start == self.memory.layout.num_layers and tokens.start:
            self.states[key] = tokens, blocks
        else:
            self.ready[key] = tokens.stop, blocks

    def first_token(self, key: RequestId, token: int, logprobs: object) -> None:
        self._tokens[key] = token

    def _pending(self, run: Run) -> list[Job]:
        jobs = [self._links.jobs.get(piece.request) for piece in run.chunks]
        return [job for job in jobs if job is not None and job.prefill_slot == self.slot]

    async def wait_for(self, run: Run) -> None:
        """All KV that its chunks attend to is there, or will not come."""
        loop = self._links.loop
        while True:
            if self.misses(run):
                return
            jobs = self._pending(run)
            if any(job.pending for job in jobs):
                await self._links.changed(self.slot)
            elif (until := max([job.loaded_ns for job in jobs], default=0)) > loop.now_ns:
                await loop.sleep_until(until, TRANSFER)
            else:
                return

    def misses(self, run: Run) -> bool:
        missing = self._links.nodes[self.slot].missing
        return any(piece.request in missing for piece in run.chunks)

    def take_missed(self, run: Run) -> list[Missing]:
        missing = self._links.nodes[self.slot].missing
        keys = [piece.request for piece in run.chunks if piece.request in missing]
        return [Missing(key, missing.pop(key)) for key in keys]

    # Bytes.

    @property
    def _layers(self) -> range:
        return range(self.memory.layout.num_layers)

    def _block(self, layer: int, block: int) -> memoryview:
        size = self.memory.layout.block_size
        return self.memory.export(layer, block * size, (block + 1) * size)

    def fill(self, key: RequestId, layer: int, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """From what was fetched for it, though that found no room here, or from the store. Raises PrefixMissing."""
        here = ChainMap(self.fetched.get(key, {}), self.store)
        for at, name in enumerate(names):
            if name not in here:
                raise PrefixMissing(at)
            self._block(layer, blocks[at])[:] = here[name][layer]

    def recall(self, key: RequestId, num_blocks: int) -> None:
        load = self._loads.pop(key)
        for layer in self._layers:
            self.fill(key, layer, load.names[:num_blocks], load.blocks)

    def receive(self, key: RequestId, source: VirtualHands) -> None:
        """All that is handed over lands at once."""
        grant, size = self.granted.pop(key), self.memory.layout.block_size
        extent, (stop, blocks) = grant.extent, source.ready[key]
        assert stop == extent.num_tokens, "not all of it was computed"
        first, last = extent.start // size, -(-extent.num_tokens // size)
        spans = [(blocks[at], grant.blocks[at]) for at in range(first, last)]
        if extent.stop > extent.states:
            _, state = source.states[key]
            spans += [(state[at], grant.blocks[at]) for at in range(extent.states // size, extent.stop // size)]
        for layer in self._layers:
            for there, here in spans:
                self._block(layer, here)[:] = source._block(layer, there)
        self._received(key, source._tokens[key])


class VirtualLinks:
    """The simulator's `Moves` under the nodes of a `ManualLoop`: their actions take its times."""

    def __init__(self, deployment: Deployment, loop: ManualLoop) -> None:
        self.deployment, self.loop = deployment, loop
        self.nodes: list[SimNode] = [build_node(deployment, slot) for slot in range(len(deployment.nodes))]
        self.slots = {node.facts.node: node.slot for node in self.nodes}
        self.jobs: dict[RequestId, Job] = {}
        self._due: Due = []
        self.moves = Moves(deployment, self, self.nodes, self.jobs, self._due)  # type: ignore[arg-type]
        self._hands: dict[int, VirtualHands] = {}
        self.entering = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._version = -1
        self._settling = False

    def enter(self, hands: VirtualHands) -> int:
        self._hands[self.entering] = hands
        return self.entering

    # As the simulator's clock.

    @property
    def now(self) -> int:
        return self.loop.now_ns

    def call(self, time: int, priority: int, call: Callable[[], None]) -> None:
        def due() -> None:
            call()
            self.settle()

        self.loop.set(time, TRANSFER, due)

    # What the head decided, and what nodes do about it.

    def route(self, route: Route, num_tokens: int) -> None:
        """The simulator keeps books of each attempt."""
        job = Job(0, Request(0, num_tokens, 1))
        job.name, job.length = route.request, num_tokens
        job.route, job.attempt, job.key = route, route.attempt, key_of(route.request, route.attempt)
        job.prefill_slot, job.target = self.slots[route.prefill], self.slots[route.decode]
        self.jobs[job.key] = job

    def withdraw(self, key: RequestId) -> None:
        job = self.jobs.pop(key, None)
        if job is not None:
            job.withdraw()
            self._due.append((self.nodes[job.prefill_slot], None))
            self.settle()

    def do(self, slot: int, action: Any) -> None:
        effect = self.moves.effects.get(type(action))
        if effect is not None:
            effect(self.nodes[slot], action)
            self.settle()

    def settle(self) -> None:
        """What is due is told, and a timer is set for the next flow that ends."""
        if self._settling:
            return
        self._settling = True
        for node, event in self._due:
            assert node is not None
            self.loop.call_soon(self._tell, node, event)
        self._due.clear()
        self._settling = False
        self._set_timer()

    def _set_timer(self) -> None:
        network = self.moves.network
        if network.version != self._version:
            self._version, ends = network.version, network.next_finish()
            if ends is not None:
                self.loop.set(ends, FLOWS, self._ends, network.version)

    def _ends(self, version: int) -> None:
        if version == self.moves.network.version:
            self.moves.end(self.loop.now_ns)
        self.settle()

    def _tell(self, node: SimNode, event: Event | None) -> None:
        hands = self._hands.get(node.slot)
        if hands is None:
            return  # it died
        if event is None:
            waiting = self._waiting.pop(node.slot, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
            return
        self._carry(hands, event)
        hands.told(event)

    def _carry(self, hands: VirtualHands, event: Event) -> None:
        """The bytes that an event speaks of are where it says."""
        match event:
            case Received() if event.key in hands.granted:
                hands.receive(event.key, self._hands[self.jobs[event.key].prefill_slot])
            case Loaded():
                hands.recall(event.key, event.num_blocks)
            case FetchEnded():
                fetch, _ = hands.process.node._fetches[event.key]
                source = self._hands[self.slots[fetch.source]]
                came = {name: source.store[name] for name in fetch.names[fetch.start : event.stop]}
                hands.store |= came
                hands.fetched[event.key] = came

    def lose(self, node: SimNode) -> None:
        """A node is gone with all that it held."""
        self._hands.pop(node.slot)
        self.moves.lose(node)
        self.settle()

    async def changed(self, slot: int) -> None:
        self._waiting[slot] = self.loop.create_future()
        await self._waiting[slot]


class VirtualRequest(msgspec.Struct, frozen=True):
    """One request of a workload. It asks for up to `max_tokens` (0: as many as it gets); its answer ends by
    itself after `output_tokens`."""

    arrival_ns: int
    tokens: tuple[int, ...]
    output_tokens: int
    max_tokens: int = 0
    salt: str = ""
    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None


class Outcome(msgspec.Struct):
    """What a client saw: each token and when it came (ns), or the error instead of the rest."""

    tokens: list[int]
    at_ns: list[int]
    error: IsthmusError | None = None


class Flight(msgspec.Struct, frozen=True):
    """A whole run: what the conductor saw and answered, nodes joining included, and what clients saw."""

    log: list[Entry]
    outcomes: list[Outcome]


class VirtualHead(Head):
    """Tells the links what it decides, since the simulator keeps books of attempts."""

    links: VirtualLinks

    def _act(self, action: Any, now: int) -> None:
        match action:
            case Route():
                stream = self._streams[action.request]
                self.links.route(action, len(stream.job.tokens) + len(stream.generated))
            case Abort():
                self.links.withdraw(key_of(action.request, action.attempt))
        super()._act(action, now)


class VirtualMeasures:
    """What crosses links between clusters, as the links themselves know it."""

    def __init__(self, links: VirtualLinks) -> None:
        self._links = links

    def take(self) -> tuple[LinkState, ...]:
        return self._links.moves.link_states(self._links.now)

    def heard(self, *_: Any) -> None:
        """Nodes know less."""

    left = heard


class VirtualCluster:
    """The nodes of a deployment, with emulated engines. Its `faults` come and go as in the simulator."""

    def __init__(self, config: Config, deployment: Deployment) -> None:
        size = deployment.block_size
        self._config, self.deployment = config, deployment
        states = deployment.nodes[0].state_blocks * size
        self.recipe = Recipe("virtual", layout_of(size, state_tokens=states), VOCABULARY)

    def names(self, tokens: Sequence[int], salt: str = "") -> tuple[BlockName, ...]:
        """Names of the full blocks of a prompt, as the conductor sees them."""
        recipe = self.recipe
        return tuple(BlockNamer(revision=recipe.revision, layout=recipe.layout, salt=salt).names(tokens))

    def answer(self, request: VirtualRequest) -> list[int]:
        """The tokens it must get."""
        return expected_tokens(self.recipe, request.tokens, request.output_tokens, salt=request.salt)

    def run(self, requests: Sequence[VirtualRequest]) -> Flight:
        """All requests to their ends. Request number i, in the order given, is called `i`."""
        with asyncio.Runner(loop_factory=ManualLoop) as runner:
            return runner.run(self._run(requests))

    async def _run(self, requests: Sequence[VirtualRequest]) -> Flight:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ManualLoop)
        network = MemoryNetwork(lambda at: loop.call_soon)
        tape, limits, rules = MemoryTape(), self._config.limits, self.deployment.rules
        head = VirtualHead(
            rules,
            ModelCard("virtual", MAX_LENGTH, VOCABULARY, created_s=0),
            token="virtual",
            silence_s=limits.silence_s,
            rejoin_s=limits.rejoin_s,
            recorder=tape,
            ways=Ways([cluster.name for cluster in clusters_of(self._config)], rules.links),
            network=network,
            clock_ns=loop.clock_ns,
        )
        head.links = VirtualLinks(self.deployment, loop)
        head._measures = VirtualMeasures(head.links)  # type: ignore[assignment]
        join = await head.open("head", 0)
        world = World(
            network,
            loop.clock_ns,
            lambda process: LoopWorker(process, loop, lambda: process.hands),  # type: ignore[arg-type, return-value]
            partial(VirtualHands, head.links),  # type: ignore[arg-type]
        )
        async with asyncio.TaskGroup() as group:
            running: dict[int, tuple[NodeProcess, asyncio.Task[str]]] = {}

            def start(slot: int) -> None:
                head.links.entering = slot
                facts = self.deployment.nodes[slot]
                options = NodeOptions(facts, join, "virtual", limits.transfer_s, host=facts.node)
                process = NodeProcess(self._engine(facts), options, world)
                running[slot] = process, group.create_task(process.run())

            for slot in range(len(self.deployment.nodes)):
                start(slot)
            await head.wait_for([facts.node for facts in self.deployment.nodes])
            assert not loop.now_ns
            for time in self.deployment.faults.times():
                loop.set(time, OTHERS, self._change, head, running, start)
            clients = [
                group.create_task(self._ask(loop, head, RequestId(str(index)), request))
                for index, request in enumerate(requests)
            ]
            outcomes = [await client for client in clients]
            await loop.settle()
            log = list(tape.entries)
            for slot, (process, _) in running.items():
                if head.links.nodes[slot].alive:
                    process.node.check_idle()
            await head.close()
        return Flight(log, outcomes)

    def _change(
        self,
        head: VirtualHead,
        running: Mapping[int, tuple[NodeProcess, asyncio.Task[str]]],
        start: Callable[[int], None],
    ) -> None:
        """One of the faults begins or ends."""
        links, faults = head.links, self.deployment.faults
        now = links.now
        links.moves.change_links(partial(faults.factor, now=now), now)
        for node in links.nodes:
            dead = faults.is_dead((node.facts.node, node.facts.cluster), now)
            if node.alive and dead:
                node.alive = False
                process, task = running[node.slot]
                task.cancel()
                process.worker.stop()
                head.leave(node.facts.node, "killed")
                links.lose(node)
            elif not node.alive and not dead:
                node.alive = True
                start(node.slot)
        links.settle()

    def _engine(self, facts: NodeFacts) -> EmulatedEngine:
        return EmulatedEngine(
            self.recipe,
            compile_cost(facts.cost),
            facts.kv_blocks,
            max_length=MAX_LENGTH,
            max_sequences=facts.live_states,
        )

    async def _ask(self, loop: ManualLoop, head: Head, name: RequestId, request: VirtualRequest) -> Outcome:
        await loop.sleep_until(request.arrival_ns, ARRIVAL)
        outcome = Outcome([], [])
        try:
            async for batch in head.submit(self._job(name, request)):
                outcome.tokens += [generated.token for generated in batch]
                outcome.at_ns += [loop.now_ns] * len(batch)
        except IsthmusError as error:
            outcome.error = error
        return outcome

    def _job(self, name: RequestId, request: VirtualRequest) -> Asked:
        max_tokens = request.max_tokens or request.output_tokens
        stops = self._last_token(request) if request.output_tokens < max_tokens else ()
        return Asked(
            request=name,
            tokens=request.tokens,
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0.0, stop_tokens=stops),
            salt=request.salt,
            priority=request.priority,
            ttft_ms=request.ttft_ms,
            tbt_ms=request.tbt_ms,
        )

    def _last_token(self, request: VirtualRequest) -> tuple[int, ...]:
        """The token at which the answer is to end. It must not come earlier."""
        answer = self.answer(request)
        assert answer[-1] not in answer[:-1], "another vocabulary is needed"
        return (answer[-1],)
