"""A simulated node: a scheduler, and the time that its runs take.

A run of decodes is folded: iteration i of a batch of B takes `fixed + slope * (C + i * B)`, so k iterations take
`k * first + growth * k * (k - 1) / 2` picoseconds with `first = fixed + slope * C` and `growth = slope * B`. Its
end is one event, however long it is; what comes in between cuts it at the end of the iteration under way, as a live
worker breaks off. The sums are integers, so they equal a step-by-step simulation bit for bit.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import sqrt

from isthmus.cost import NodeCost, pipeline
from isthmus.scheduler import Event, Run, Scheduler
from isthmus.sim.deployment import NodeSpec
from isthmus.sim.job import Job
from isthmus.sim.records import NodeRecord


class SimNode:
    """`run`: what it executes; `ending`: its compute is done; `stalled`: but KV it needs is not here. `version`:
    of the present run's end on the heap. `steps`: iterations with decodes so far.

    `log_*`: one entry for each run with decodes: iterations before it, its start (ns), first step and growth (ps).
    """

    __slots__ = (
        "_first", "_growth", "_limit", "_run_start", "cost", "ending", "ends", "inbox", "links",
        "log_first", "log_growth", "log_start", "log_steps", "record", "run", "scheduler", "slot", "spec", "stalled",
        "stalled_since", "steps", "tail_ns", "version",
    )  # fmt: skip

    def __init__(self, spec: NodeSpec, slot: int, scheduler: Scheduler, cost: NodeCost) -> None:
        self.spec, self.slot, self.scheduler, self.cost = spec, slot, scheduler, cost
        self.record = NodeRecord(spec.node, spec.role)
        self.links = Links()
        self.inbox: list[Event] = []
        self.run: Run | None = None
        self.version = self.steps = 0
        self.stalled = self.ending = False
        self.stalled_since = self.tail_ns = 0
        self.ends: list[tuple[int, int, Job]] = []  # (steps at its last token, index, who)
        self.log_steps: list[int] = []
        self.log_start: list[int] = []
        self.log_first: list[int] = []
        self.log_growth: list[int] = []
        self._run_start = self._limit = self._first = self._growth = 0

    # Runs.

    def begin(self, run: Run, now: int) -> int:
        """Starts a run; returns when it ends if nothing cuts it short."""
        self.run, self._run_start, self._limit = run, now, run.steps
        self.version += 1
        if not run.chunks:
            fixed, slope = self.cost.decode_step_ps(run.num_decodes)
            self._first = fixed + slope * run.context
            self._growth = slope * run.num_decodes
            return now + self._after(run.steps) // 1000
        if run.steps == 1:
            chunks = [(piece.count, piece.start) for piece in run.chunks]
            times = [self.cost.step_ps(chunks, run.num_decodes, run.context)]
        else:
            (piece,) = run.chunks
            count, start, step_ps = piece.count, piece.start, self.cost.step_ps
            times = [step_ps(((count, start + at * count),), 0, 0) for at in range(run.steps)]
        if self.spec.pipeline == 1:
            self._first, self.tail_ns = sum(times), 0
        else:
            # The group is free for the next prompt when its first stage is; the last chunk still passes the others.
            self._first, latency = pipeline(times, self.spec.pipeline)
            self.tail_ns = (latency - self._first) // 1000
        self._growth, self._limit = 0, 1
        return now + self._first // 1000

    def cut(self, now: int) -> int | None:
        """Ends a run of decodes with the iteration under way; None when it would not end sooner for that."""
        assert self.run is not None
        if self.run.chunks:
            return None
        steps = max(1, self._steps_until(now))
        if steps >= self._limit:
            return None
        self._limit = steps
        self.version += 1
        return self._run_start + self._after(steps) // 1000

    def end(self, now: int) -> tuple[int, list[Job]]:
        """Books the run that ends now; returns its iterations and the requests that got their last token."""
        run = self.run
        assert run is not None
        self.stalled = False
        record = self.record
        record.busy_ns += now - self._run_start
        if not run.num_decodes:
            record.iterations += run.steps
            return run.steps, []
        steps = self._limit
        self.log_steps.append(self.steps)
        self.log_start.append(self._run_start)
        self.log_first.append((now - self._run_start) * 1000 if run.chunks else self._first)
        self.log_growth.append(self._growth)
        self.steps += steps
        record.iterations += steps
        record.tokens_decoded += steps * run.num_decodes
        ended = []
        while self.ends and self.ends[0][0] <= self.steps:
            last_step, _, job = heappop(self.ends)
            if job.last_step == last_step and job.decodes_on == self.slot:
                ended.append(job)
        return steps, ended

    def join(self, job: Job, num_tokens: int) -> None:
        """`job` decodes here from the next run on and will get `num_tokens` more tokens."""
        job.decodes_on, job.first_step, job.last_step = self.slot, self.steps, self.steps + num_tokens
        heappush(self.ends, (job.last_step, job.index, job))

    def _after(self, steps: int) -> int:
        """Picoseconds that the first `steps` iterations take."""
        return steps * self._first + self._growth * (steps * (steps - 1) // 2)

    def _steps_until(self, now: int) -> int:
        """The fewest iterations that end at or after `now`: an estimate in floats, repaired exactly."""
        elapsed = (now - self._run_start) * 1000
        first, growth = self._first, self._growth
        half = first - 0.5 * growth
        steps = int(2.0 * elapsed / (half + sqrt(half * half + 2.0 * growth * elapsed)))
        while self._after(steps) // 1000 < now - self._run_start:
            steps += 1
        while steps > 0 and self._after(steps - 1) // 1000 >= now - self._run_start:
            steps -= 1
        return steps


class Links:
    """Numbers of one node's links in the network."""

    __slots__ = (
        "disk_read",
        "disk_write",
        "handover_in",
        "handover_out",
        "memory_in",
        "memory_out",
        "net_in",
        "net_out",
    )

    net_in: int
    net_out: int
    handover_in: int
    handover_out: int
    memory_in: int
    memory_out: int
    disk_read: int
    disk_write: int
