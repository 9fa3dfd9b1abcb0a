"""Executes a node's runs in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from isthmus.core.cost import compile_cost
from isthmus.core.node.events import Missing, Woken
from isthmus.core.scheduler import Run
from isthmus.core.types import NS_PER_S, NodeId
from isthmus.lab.sim.node import SimNode
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.engine.emulated import EmulatedEngine
from isthmus.live.engine.interface import HolderLost
from tests.virtual.loop import MESSAGE, PREFILL_ENDS, STEP_ENDS, ManualLoop
from tests.virtual.mover import VirtualMover


class LoopWorker:
    """Executes a node's runs inside a `ManualLoop`: an iteration of the emulated engine is a wait of its length, and a
    run whose prompts need KV that is not there waits for it, as the simulator's do.

    Iterations end at the start of their run plus the exact sum of their lengths, rounded down to nanoseconds.
    """

    def __init__(self, process: NodeProcess, loop: ManualLoop, mover_of: Callable[[], VirtualMover]) -> None:
        self._process, self._loop, self._mover_of = process, loop, mover_of
        self.lock = contextlib.nullcontext()
        self._submitted = asyncio.Event()
        self._run: Run | None = None
        self._is_cut = False
        self._timer: asyncio.TimerHandle | None = None
        self._until: tuple[int, int, asyncio.Future[None]]
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._main())

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """What a node reports comes after what other nodes were told before, at the same instant."""
        if function == self._process.report:
            self._loop.set(0, MESSAGE, function, *arguments)
        elif function == self._process.wake:
            [wake] = arguments
            when_ns = self._loop.now_ns + max(0, wake.at_ns - self._process._clock_ns())
            self._loop.wake(when_ns, self._mover_of().slot, self._woken)
        else:
            function(*arguments)

    def _woken(self) -> None:
        """Unless it was lost since."""
        if self._mover_of().alive:
            self._process.fact(Woken())

    def submit(self, run: Run) -> None:
        self._run, self._is_cut = run, False
        self._clock.begin(run, self._loop.now_ns)
        _ = run.pieces
        self._submitted.set()

    def cut(self) -> None:
        """As in the simulator, the end of the run is set anew then, and comes after others of that instant."""
        self._is_cut = True
        self._clock.cut(self._loop.now_ns)
        if self._timer is not None:
            self._timer.cancel()
            self._sleep(self._loop.turn())

    def lose_holder(self, holder: NodeId) -> None:
        """A run that asks it breaks off."""
        self._clock.lose_holder(holder)
        if self._clock.is_broken and self._timer is not None:
            self._timer.cancel()
            self._until = self._loop.now_ns, *self._until[1:]
            self._sleep(self._loop.turn())

    @property
    def _clock(self) -> SimNode:
        """What an iteration takes that asks holders, or gives time to others' attention."""
        return self._mover_of().clock

    def _sleep(self, turn: int) -> None:
        when_ns, priority, over = self._until
        self._timer = asyncio.TimerHandle(when_ns / NS_PER_S, over.set_result, (None,), self._loop)
        self._loop._set(when_ns, priority, self._timer, turn)

    def _step_ps(self, run: Run) -> int:
        """How long the first stage of a group works on a run: a stage takes as long as any other."""
        facts = self._process._facts
        if facts.pipeline == 1:
            return 0
        pieces = [(piece.count, piece.start) for piece in run.chunks]
        return -(-compile_cost(facts.cost).step_ps(pieces, 0, 0) // facts.pipeline)

    def _leaves(self, run: Run) -> None:
        """The other stages are through with it so much later; that they are quicker here, nobody hears."""
        if (group := self._process._group) is None:
            return
        mover = self._mover_of()
        tail_ns = (group.stages - 1) * self._step_ps(run) // 1000
        if any(piece.samples for piece in run.chunks) and tail_ns:
            self._loop.set(self._loop.now_ns + tail_ns, PREFILL_ENDS, mover.stages_through, group._num_runs)
        else:
            mover.stages_through(group._num_runs)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _main(self) -> None:
        try:
            while True:
                await self._submitted.wait()
                self._submitted.clear()
                while self._run is not None:
                    run, self._run = self._run, None
                    await self._execute(run)
        except Exception as error:
            self._process.died(error)
            raise

    async def _execute(self, run: Run) -> None:
        runs, engine, mover = self._process.runs, self._process.runs.engine, self._mover_of()
        assert isinstance(engine, EmulatedEngine)
        execution = runs.start(run)
        started_ns, elapsed_ps, clock = self._loop.now_ns, 0, self._clock
        shares = clock._asked is not None or clock._owed > 0 or any(p.assembly for p in run.chunks)
        priority, turn = STEP_ENDS if run.num_decodes else PREFILL_ENDS, self._loop.turn()
        while True:
            if not mover.misses(run):
                elapsed_ps += self._step_ps(run) or engine.step_ps(execution.batch)
                if shares:
                    elapsed_ps = clock._after(execution.steps + 1)
            self._until = started_ns + elapsed_ps // 1000, priority, self._loop.create_future()
            self._sleep(turn)
            await self._until[2]
            self._timer = None
            missed = list[Missing]()
            if not clock.is_broken:
                await mover.wait_for(run)
                mover.load_for(run)
                missed = mover.take_missed(run)
            if clock.is_broken and mover.is_waiting(run):
                execution.lost, execution.broken = True, runs._lost(run, HolderLost("a holder", "it is gone"))
            else:
                runs.compute(execution)
            if (missing := execution.missing) is not None:
                others = [each for each in missed if each.key != missing.key]
                clock.break_off(self._loop.now_ns)
                self._process.tell_all([*others, *runs.finish(execution)])
                return
            assert not missed, "what did not come was loaded"
            self._leaves(run)
            runs.add_tokens(execution)
            if execution.over or self._is_cut or (shares and execution.steps == clock._limit):
                break
            runs.advance(execution)
        clock._limit = execution.steps if not run.chunks else 1
        clock.end(self._loop.now_ns)
        self._process.tell_all(runs.finish(execution))
