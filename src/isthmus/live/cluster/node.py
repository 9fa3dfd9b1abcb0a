"""A node with an engine as a process: sessions in the event loop, a worker thread that computes.

    head ──StartAttempt─> node ──worker──> tokens ──Outputs──> head
    decode node ──HandoverGranted──> prefill node ──Slices…, Sent──> decode node ──HandoverConfirmed──>

Event loop and worker tell facts to `isthmus.core.node.Node` under one lock, which is free while the engine computes:
grants and arrivals are heard during an iteration. The node's actions are carried out by `Runs` (tokens), `KVMover`
(bytes), the session with the head (reports), and this module (time).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, get_args

from isthmus.core.attempts import Report
from isthmus.core.errors import ProtocolError, StartError
from isthmus.core.node import events
from isthmus.core.scheduler import Admitted, BlockPool, Joined, Preempted, Run
from isthmus.core.types import NS_PER_S, RequestId
from isthmus.live.cluster.donors import parts_of
from isthmus.live.cluster.pipeline import Group
from isthmus.live.cluster.process import EngineProcess, NodeOptions, Opener, Runtime
from isthmus.live.cluster.recorder import Recorder
from isthmus.live.cluster.runs import Execution, Runs
from isthmus.live.engine.interface import Engine, Hidden
from isthmus.live.kv.cache import chains_of
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import CONNECT_S

log = logging.getLogger(__name__)


class NodeProcess(EngineProcess):
    """A node, or the first stage (leader) of a pipeline group. `tape`: records the node's events and actions."""

    def __init__(
        self,
        engine: Engine,
        options: NodeOptions,
        runtime: Runtime,
        store_of: Opener = None,
        tape: Recorder | None = None,
    ) -> None:
        facts = options.facts
        assert engine.num_blocks >= facts.kv_blocks, "its memory holds less than its facts say"
        assert engine.layout.state_blocks == facts.state_blocks, "its states are others than its facts say"
        super().__init__(engine, options, runtime, store_of)
        self._tape = tape
        self._preparing = set[RequestId]()
        """Attempts whose grammar is being compiled."""
        self.node = facts.node_of(BlockPool(facts.kv_blocks), transfer_ns=int(options.transfer_s * NS_PER_S))
        self._group: Group | None = None
        onward: Callable[[Run, Hidden], None] | None = None
        if facts.pipeline > 1:

            def later(function: Callable[..., None], *arguments: Any) -> None:
                self.worker.later(function, *arguments)  # which is made further down

            self._group = Group(facts.pipeline, self.tell, self.sampled, self._send_scores, self.end, later)
            onward = self._group.compute
        self.runs = Runs(engine, self.mover, self._send_outputs, self._send_scores, runtime.clock_ns, onward)
        self.runs.saves, self.runs.keeps_answers = self.node.tiers is not None, self.node.keeps_answers
        self.worker: ThreadWorker = (runtime.worker_of or ThreadWorker)(self)
        self._run_handlers: dict[type, Callable[[Any], None]] = {
            Admitted: self.runs.admitted,
            events.LoadBlocks: self.runs.loading,
            events.Shorten: self.runs.shortened,
            Preempted: self.runs.preempted,
            events.ReleaseResources: self.runs.released,
        }
        self._handlers: dict[type, Callable[[Any], None]] = {
            Run: self.worker.submit,
            events.Cut: lambda _: self.worker.cut(),
            events.Wake: lambda action: self.worker.later(self.wake, action),
            **dict.fromkeys(get_args(Report), lambda action: self.worker.later(self.report, action)),
            **dict.fromkeys((Admitted, Joined), lambda _: None),
        }

    def start(self) -> None:
        self.worker.start()

    def stop(self) -> None:
        if self._group is not None:
            self._group.close()
        self.worker.stop()
        super().stop()
        if self._tape is not None:
            self._tape.close()

    # Facts and actions.

    def tell(self, fact: events.Event) -> None:
        """Tells the node a fact and carries out its actions, from any thread. A bug on the way ends the process, since
        some actions may be done and others not."""
        with self.worker.lock:
            try:
                now = self._clock_ns()
                actions = self.node.on(fact, now)
                if self._tape is not None:
                    self._tape.record(now, fact, actions)
                for action in actions:
                    self._carry_out(action)
            except BaseException as error:
                self.died(error)
                raise

    def _carry_out(self, action: events.Action) -> None:
        kind = type(action)
        if kind in self._run_handlers:
            self._run_handlers[kind](action)
        if kind in self._handlers:
            self._handlers[kind](action)
            return
        self.mover.do(action)  # bytes of this engine, and of the later stages'
        if self._group is not None:
            self._group.do(action)

    def fact(self, fact: events.Event) -> None:
        if self._group is None:
            self.tell(fact)
        else:
            self._group.tell(fact)

    def received(self, key: RequestId, token: int) -> None:
        with self.worker.lock:
            self.runs.received(key, token)

    def _send_outputs(self, outputs: Sequence[messages.Output]) -> None:
        self.worker.later(self._send, messages.Outputs(tuple(outputs)))

    def _send_scores(self, scores: messages.Scores) -> None:
        self.worker.later(self._send, scores)

    # The worker.

    def take_turn(self) -> None:
        """Waits until the later stages, if any, can take another run."""
        if self._group is not None:
            self._group.take_turn()

    def tell_all(self, facts: list[Any]) -> None:
        for fact in facts:
            self.tell(fact)

    # The head.

    def hello(self) -> messages.NodeHello | messages.StageHello:
        return self._hello() if self._group is None else super().hello()

    def _hello(self) -> messages.NodeHello:
        engine = self._engine
        return messages.NodeHello(
            messages.PROTOCOL, self._facts.joined(), self._address,
            engine.revision, engine.layout, engine.max_length, engine.products,
        )  # fmt: skip

    def heard(self, message: messages.NodeBound) -> None:
        match message:
            case events.StartAttempt():
                self._arrived(message)
            case messages.TellDirections():
                self.spawn(self._tell_directions())
            case events.DropAttempt() | events.Lend() | events.Repay() | events.Convert():
                if isinstance(message, events.DropAttempt):
                    self._preparing.discard(message.key)
                self.tell(message)
            case messages.GroupGathered():
                self._gathered(message.addresses)

    def welcome(self, message: messages.NodeWelcome) -> None:
        super().welcome(message)
        found = self._found
        if self._cache is not None and self._group is not None:
            found, useless = self._group.common(found)
            self._cache.drop(useless)
        chains = chains_of(found)
        if chains:
            self.tell(events.PrefixesRecovered(chains))

    def gauges(self) -> dict[str, float]:
        scheduler = self.node.scheduler
        pool = scheduler.pool
        with self.worker.lock:
            found: dict[str, float] = {
                "node_requests_running": scheduler.num_running,
                "node_requests_waiting": scheduler.num_waiting,
                "kv_blocks": pool.num_blocks,
                "kv_blocks_available": pool.available,
                "kv_blocks_cached": pool.cached,
                "kv_blocks_transfer": scheduler.num_transfer,
                "kv_blocks_hosted": self.node.num_hosted,
                "kv_blocks_evicted_total": self._blocks_evicted,
            } | self.tenant_gauges((scheduler.tiers or pool).sizes())
        found |= super().gauges()
        return found | (self._group.gauges() if self._group is not None else {})

    def _arrived(self, begin: events.StartAttempt) -> None:
        """Begins an attempt, once its grammar is compiled: else its whole batch would wait for that."""
        prepared = self.runs.prepare(begin)
        if prepared is None or prepared.done():
            self.begin(begin)
        else:
            self._preparing.add(begin.key)
            self.spawn(self._prepared(begin, prepared))

    async def _prepared(self, begin: events.StartAttempt, prepared: Future[None]) -> None:
        await asyncio.wrap_future(prepared)
        if begin.key in self._preparing:
            self._preparing.remove(begin.key)
            self.begin(begin)

    def begin(self, begin: events.StartAttempt) -> None:
        with self.worker.lock:
            self.runs.begin(begin)
            if self._group is not None:
                self._group.begin(begin)
            self.tell(begin.to_decide(self._clock_ns()))

    async def _tell_directions(self) -> None:
        for part in parts_of(await asyncio.to_thread(self._engine.directions)):
            self._send(part)

    # The later stages of a pipeline group.

    def _gathered(self, addresses: Sequence[str]) -> None:
        """Connects the stages, which have all started, and then joins the cluster."""
        if self._group is None:
            raise ProtocolError("stages came to a node that has none")
        self.spawn(self._form(self._group, addresses))

    async def _form(self, group: Group, addresses: Sequence[str]) -> None:
        try:
            await group.form(self._network, self._introduction, self._facts, addresses, timeout_s=CONNECT_S)
        except (OSError, TimeoutError) as error:
            self.end(StartError(f"cannot reach the next pipeline stage at {addresses[0]}: {error}"))
            return
        self._send(self._hello())

    def sampled(self, message: messages.StageSampled) -> None:
        """Takes the tokens of a batch that the last stage has computed."""
        with self.worker.lock:
            ended = self.runs.sampled(message)
            self.tell(events.Sampled(message.keys, ended))


class ThreadWorker:
    """Executes the runs of one node in a thread, started once from the event loop. `lock`: guards the node."""

    def __init__(self, owner: NodeProcess) -> None:
        self._owner = owner
        self.lock = threading.RLock()
        self._submitted = threading.Condition(self.lock)
        self._run: Run | None = None
        self._is_cut = False
        self._running = True
        self._thread = threading.Thread(target=self._main, name="worker", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls `function` in the event loop, from any thread; in the order of these calls."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def submit(self, run: Run) -> None:
        """Queues the next run. Under the lock, as `cut`."""
        self._run, self._is_cut = run, False
        self._submitted.notify()

    def cut(self) -> None:
        """Ends the present run after its iteration."""
        self._is_cut = True

    def stop(self) -> None:
        with self.lock:
            self._running, self._is_cut = False, True
            self._submitted.notify()
        self._thread.join(timeout=5)

    def _main(self) -> None:
        try:
            while (run := self._next()) is not None:
                self._owner.take_turn()
                self._execute(run)
        except BaseException as error:
            self._owner.died(error)
            raise

    def _next(self) -> Run | None:
        with self.lock:
            self._submitted.wait_for(lambda: self._run is not None or not self._running)
            run, self._run = self._run, None
            return run if self._running else None

    def _execute(self, run: Run) -> None:
        """Iterates a run until it is over or cut."""
        runs = self._owner.runs
        with self.lock:
            execution: Execution = runs.start(run)
        while True:
            runs.compute(execution)
            with self.lock:
                runs.add_tokens(execution)
                if execution.over or self._is_cut:
                    self._owner.tell_all(runs.finish(execution))
                    return
            runs.advance(execution)
