"""A whole cluster in one event loop and in virtual time: the live head and nodes, and nothing that takes time
but the emulated engine's iterations.

The loop jumps to the next timer when nothing is left to do, and takes timers one by one: whatever follows
from one without time passing is done before the next, even when both are due at the same instant. Arrivals come
first then, as in the simulator, iterations of prompts alone next, then what nodes send each other, then iterations
with decodes. So a run depends on nothing but its input, and messages, however many, take no time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from itertools import count
from typing import Any

import msgspec

from isthmus.blocks import BlockNamer
from isthmus.cluster.head import Head
from isthmus.cluster.node import Node, NodeOptions, World
from isthmus.cluster.recorder import Entry, MemoryTape
from isthmus.cluster.stepper import Stepper
from isthmus.cluster.ways import Ways
from isthmus.cluster.worker import Entry as MailboxEntry
from isthmus.config import Config
from isthmus.cost import Cost, compile_cost
from isthmus.deploy import NodeFacts, Rates, clusters_of, links_of, nodes_of, rules_of
from isthmus.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of
from isthmus.errors import IsthmusError
from isthmus.messenger import MemoryNetwork
from isthmus.types import NS_PER_S, BlockName, Job, ModelCard, RequestId, Role, Sampling

VOCABULARY = 1 << 31
"""Far more than any workload draws, so that one token of an answer can be told from all others."""
MAX_LENGTH = 1 << 30
AT_ONCE = Rates(network=1 << 62, memory=1 << 62, disk_read=1 << 62, disk_write=1 << 62)
"""Messages and KV take no time."""
ARRIVAL, PREFILL_ENDS, TRANSFER, STEP_ENDS, OTHERS = range(5)
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

    def _set(self, when_ns: int, priority: int, timer: asyncio.TimerHandle) -> None:
        entry = (max(when_ns, self.now_ns), priority, next(self._sequence), timer)
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
    """Drives a stepper with an emulated engine inside a `ManualLoop`: an iteration is a wait of its length.

    Iterations end at the start of their run plus the exact sum of their lengths, rounded down to nanoseconds.
    """

    def __init__(self, stepper: Stepper, loop: ManualLoop) -> None:
        self._stepper, self._loop = stepper, loop
        self._mailbox: deque[MailboxEntry] = deque()
        self._formed = asyncio.Event()
        self._busy = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._main())

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def post(self, entry: MailboxEntry) -> None:
        if self._busy or self._stepper.run is not None:
            self._mailbox.append(entry)
            return
        entry()
        if self._stepper.run is not None:
            self._formed.set()

    def insert(self, entry: MailboxEntry) -> None:
        entry()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _main(self) -> None:
        try:
            while True:
                await self._formed.wait()
                self._formed.clear()
                self._busy = True
                while self._stepper.run is not None:
                    await self._execute()
                    self._serve_mailbox()
                self._busy = False
        except Exception as error:
            self._stepper.died(error)
            raise

    def _serve_mailbox(self) -> None:
        while self._mailbox and self._stepper.run is None:
            self._mailbox.popleft()()

    async def _execute(self) -> None:
        """As `ThreadWorker`: to the end of the run or of a request, or until a message waits."""
        stepper, engine = self._stepper, self._stepper.engine
        assert isinstance(engine, EmulatedEngine)
        execution = stepper.start()
        started_ns, elapsed_ps = self._loop.now_ns, 0
        priority = STEP_ENDS if execution.run.num_decodes else PREFILL_ENDS
        while True:
            elapsed_ps += engine.step_ps(execution.batch)
            await self._loop.sleep_until(started_ns + elapsed_ps // 1000, priority)
            stepper.compute(execution)
            stepper.book(execution)
            if execution.over or self._mailbox:
                break
            stepper.advance(execution)
        self._serve_mailbox()
        stepper.finish(execution)


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


class VirtualCluster:
    """The nodes of a configuration, with emulated engines and no caches. `costs`: what work takes on those of each
    role."""

    def __init__(self, config: Config, costs: Mapping[Role, Cost]) -> None:
        size = config.engine.block_size
        self._config = config
        self._nodes = [
            msgspec.structs.replace(facts, rates=AT_ONCE, dram_blocks=0, transit_blocks=0, ssd_blocks=0)
            for facts in nodes_of(config, size, costs=costs)
        ]
        states = self._nodes[0].state_blocks * size
        self.recipe = Recipe("virtual", layout_of(size, state_tokens=states), VOCABULARY)

    def names(self, tokens: Sequence[int], salt: str = "") -> tuple[BlockName, ...]:
        """Names of the full blocks of a prompt, as the conductor sees them."""
        recipe = self.recipe
        return tuple(BlockNamer(revision=recipe.revision, layout=recipe.layout, salt=salt).names(tokens))

    def run(self, requests: Sequence[VirtualRequest]) -> Flight:
        """All requests to their ends. Request number i, in the order given, is called `i`."""
        with asyncio.Runner(loop_factory=ManualLoop) as runner:
            return runner.run(self._run(requests))

    async def _run(self, requests: Sequence[VirtualRequest]) -> Flight:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ManualLoop)
        network = MemoryNetwork(lambda at: loop.call_soon if at == join else loop.call_as_transfer)
        tape, limits = MemoryTape(), self._config.limits
        head = Head(
            rules_of(self._config),
            ModelCard("virtual", MAX_LENGTH, VOCABULARY, created_s=0),
            token="virtual",
            silence_s=limits.silence_s,
            rejoin_s=limits.rejoin_s,
            recorder=tape,
            ways=Ways([cluster.name for cluster in clusters_of(self._config)], links_of(self._config)),
            network=network,
            clock_ns=loop.clock_ns,
        )
        join = await head.open("head", 0)
        world = World(network, loop.clock_ns, lambda stepper: LoopWorker(stepper, loop))
        async with asyncio.TaskGroup() as group:
            for facts in self._nodes:
                group.create_task(Node(self._engine(facts), self._options(facts, join), world).run())
            await head.wait_for([facts.node for facts in self._nodes])
            clients = [
                group.create_task(self._ask(loop, head, RequestId(str(index)), request))
                for index, request in enumerate(requests)
            ]
            outcomes = [await client for client in clients]
            await loop.settle()
            log = list(tape.entries)
            await head.close()
        return Flight(log, outcomes)

    def _options(self, facts: NodeFacts, join: str) -> NodeOptions:
        """Links between clusters take no time here either, and none is watched."""
        return NodeOptions(
            facts=facts,
            join=join,
            token="virtual",
            transfer_s=self._config.limits.transfer_s,
            host=facts.node,
        )

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
        job, outcome = self._job(name, request), Outcome([], [])
        try:
            async for batch in head.submit(job):
                outcome.tokens += [generated.token for generated in batch]
                outcome.at_ns += [loop.now_ns] * len(batch)
        except IsthmusError as error:
            outcome.error = error
        return outcome

    def _job(self, name: RequestId, request: VirtualRequest) -> Job:
        max_tokens = request.max_tokens or request.output_tokens
        stops = self._last_token(request) if request.output_tokens < max_tokens else ()
        return Job(
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
        answer = expected_tokens(self.recipe, request.tokens, request.output_tokens, salt=request.salt)
        assert answer[-1] not in answer[:-1], "another vocabulary is needed"
        return (answer[-1],)
