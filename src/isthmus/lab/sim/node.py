"""A simulated node: what decides there, and the time that its runs take.

A run of decodes is folded: iteration i of a batch of B takes `fixed + slope * (C + i * B)`, so k iterations take
`k * first + growth * k * (k - 1) / 2` picoseconds with `first = fixed + slope * C` and `growth = slope * B`. Its
end is one event, however long it is; what comes in between cuts it at the end of the iteration under way, as a live
worker breaks off. The sums are integers, so they equal a step-by-step simulation bit for bit.

Attention over KV that lies with holders adds to an iteration. What is asked of a holder is the same throughout a run
but for what home adds to its own part. A holder attends beside its own iterations, which take longer by that; for
several homes it attends in turns, so that each finds it slower by the share of its time that the others take now. A run
that asks is looked at again after `LOOK_STEPS` iterations.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import sqrt
from typing import NamedTuple

from isthmus.core.attempts import Holding
from isthmus.core.cost import NodeCost, Part, Path, Wait, compile_cost, pipeline, slowest
from isthmus.core.cost.elsewhere import lines
from isthmus.core.cost.node_cost import AssembledChunk, assembled_step_ps, assembled_weight
from isthmus.core.node import Node
from isthmus.core.scheduler import BlockPool, CountingPool, Piece, Run
from isthmus.core.types import NodeId, RequestId, Role
from isthmus.facts import NodeFacts
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.links import NodeLinks, Wiring
from isthmus.lab.sim.records import NodeRecord, SimJob

Gaps = tuple[int, int, int]
"""Gaps between tokens that grow evenly: minus the largest, growth per gap (both ps), and how many."""


LOOK_STEPS = 16
"""So long a live node's run lasts at most."""


class Questions(NamedTuple):
    """What an iteration of a home asks: how long it would wait for the slowest holder; `away`: tokens of its decodes
    that lie elsewhere; `work`: what each holder takes for it, in ps; `num_bytes`: there and back."""

    wait: Wait
    away: int
    work: dict[NodeId, float]
    num_bytes: int


class Occupancy:
    """Of a holder, by attention for others. `by_home`: the part of its time that each home takes now."""

    __slots__ = ("by_home",)

    def __init__(self) -> None:
        self.by_home: dict[int, float] = {}

    def factor(self, home: int) -> float:
        """By how much attention for one more home takes longer than alone; never less than an equal part is left."""
        others = [part for slot, part in self.by_home.items() if slot != home]
        return 1 / max(1 - sum(others), 1 / (1 + len(others))) if others else 1.0


class SimNode:
    """What a node has to do, by its `decider`, and when that is done.

    `run`: what it executes; `version`: of the present end of that on the heap. `sampling`: whose
    prompts the run completes; `loading`: whose cached prefixes were not all in the engine when it began; `stalled`: its
    compute is done but KV of these is not here, since `stalled_since`.
    `is_broken`: a holder that the run asks is gone.
    `missing`: prompts with a cached prefix of which less came than they were started with, and how many blocks.
    `tail_ns`: how long the last chunk of a run goes on in a pipeline group. `alive`: it has not failed.
    `owed_ps`: what attention for other nodes takes of its next iterations; `occupancy`: by whose attention.

    `steps`: iterations with decodes so far. `run_*`: one entry for each run with decodes: iterations before it, its
    start (ns), and its iterations as gaps between tokens.
    """

    __slots__ = (
        "_asked", "_ends", "_first", "_growth", "_limit", "_num_admitted", "_owed", "_owed_part", "_run_start",
        "alive", "attending", "cost", "decider", "facts", "is_broken", "links", "loading", "missing", "occupancy",
        "owed_ps", "record", "run", "run_gaps", "run_start", "run_steps", "sampling", "slot", "stalled",
        "stalled_since", "steps", "tail_ns", "version",
    )  # fmt: skip

    links: NodeLinks
    attending: Attending

    def __init__(self, facts: NodeFacts, slot: int, decider: Node, cost: NodeCost) -> None:
        self.facts, self.slot, self.cost = facts, slot, cost
        self.record = NodeRecord(facts.node, facts.role, cluster=facts.cluster)
        self.version = self.steps = self.stalled_since = self.tail_ns = 0
        self.run_steps: list[int] = []
        self.run_start: list[int] = []
        self.run_gaps: list[Gaps] = []
        # (steps at its last token, age, who); some are out of date.
        self._ends: list[tuple[int, int, SimJob]] = []
        self._run_start = self._limit = self._first = self._growth = self._num_admitted = 0
        self.occupancy = Occupancy()
        self.begin_anew(decider)

    @property
    def names(self) -> tuple[str, str]:
        """Its own and its cluster's, as faults are given."""
        return self.facts.node, self.facts.cluster

    def begin_anew(self, decider: Node) -> None:
        """With nothing under way."""
        self.decider = decider
        self.run: Run | None = None
        self.sampling: list[SimJob] = []
        self.loading: list[SimJob] = []
        self.missing: dict[RequestId, int] = {}
        self._asked: Questions | None = None  # of holders, in each iteration of the run
        # To be paid; with this run, and with each iteration of it.
        self.owed_ps = self._owed = self._owed_part = 0
        self.stalled = self.is_broken = False
        self.alive = True
        self.version += 1

    def begin(self, run: Run, now: int) -> int:
        """Starts a run; returns when it ends if nothing cuts it short."""
        self.run, self._run_start = run, now
        self.is_broken = False
        self.version += 1
        if self.decider.has_holders:
            self._asked = self.attending.asks(self, run)
        if run.chunks:
            self._limit, self._growth, self._first = 1, 0, self._chunks_ps(run)
        else:
            self._limit, batch = run.steps, run.num_decodes
            fixed, slope = self.cost.decode_step_ps(batch)
            self._first, self._growth = fixed + slope * run.context, slope * batch
            if self._asked is not None:
                self._wait_for_holders(self._asked, batch, slope * (run.context - self._asked.away))
        if self.owed_ps:
            self._owed, self.owed_ps = self.owed_ps, 0
            self._owed_part = self._owed // self._limit
            self._first += self._owed_part
        if self._asked is not None:
            self.attending.began(self, self._asked, self._first)
        return now + self._after(self._limit) // 1000

    def _wait_for_holders(self, asked: Questions, batch: int, here: int) -> None:
        """An iteration lasts as long as the longest of what bounds it. Of these each grows evenly, so a run lasts no
        longer than the same one does, and not much longer than others' use of holders stays as it is."""
        batches = min(self.facts.batches, batch)
        model, _ = self.cost.decode_step_ps(-(-batch // batches))
        bounds = lines(batches, model, here, self._growth, asked.wait)
        first, growth = max(bounds)
        self._limit = min(self._limit, LOOK_STEPS)
        for other, more in bounds:
            if more > growth:
                self._limit = min(self._limit, (first - other) // (more - growth) + 1)
        self._first, self._growth = first, growth

    def cut(self, now: int) -> int | None:
        """Ends a run of decodes with the iteration under way; None when it would not end sooner for that."""
        assert self.run is not None
        if self._limit == 1:
            return None
        steps = self._steps_until(now) or 1
        if steps >= self._limit:
            return None
        self._limit = steps
        self.version += 1
        return self._run_start + self._after(steps) // 1000

    def end(self, now: int) -> tuple[int, list[SimJob]]:
        """The run ends now; returns its iterations and the requests that got their last token."""
        run, record, start = self.run, self.record, self._run_start
        assert run is not None
        self.run = None
        record.busy_ns += now - start
        if self._asked is not None or self._owed:
            self._settle(run.steps if run.chunks else self._limit, self._limit)
        if not run.num_decodes:
            record.iterations += run.steps
            return run.steps, []
        if run.chunks:
            self._first = (now - start) * 1000
        steps = self._limit
        self._count_tokens(run, steps)
        done = self.steps
        ended = []
        ends = self._ends
        while ends and ends[0][0] <= done:
            last_step, _, job = heappop(ends)
            if job.last_step == last_step and job.decodes_on == self.slot:
                job.leave(last_step)
                ended.append(job)
        return steps, ended

    def _settle(self, asked: int, paid: int) -> None:
        """So many iterations asked holders, so many parts of what is owed are paid; the next run pays the rest."""
        if self._asked is not None:
            self.attending.ended(self, self._asked, asked)
            self._asked = None
        if self._owed:
            self.owed_ps += self._owed - paid * self._owed_part
            self._owed = 0

    def _count_tokens(self, run: Run, steps: int) -> None:
        """So many iterations of a run with decodes gave a token each."""
        record, growth = self.record, self._growth
        self.run_steps.append(self.steps)
        self.run_start.append(self._run_start)
        self.run_gaps.append((-self._first - growth * (steps - 1), growth, steps))
        self.steps += steps
        record.iterations += steps
        record.tokens_decoded += steps * run.num_decodes

    def steps_by(self, now: int) -> int:
        """Iterations with decodes that are over, those of the run that is out included."""
        return self.steps + self._num_over(now)

    def _num_over(self, now: int) -> int:
        """Of a run of decodes that is out, how many iterations are over; a mixed one is one iteration."""
        run = self.run
        if run is None or run.chunks:
            return 0
        steps = self._steps_until(now)
        return steps - (self._after(steps) // 1000 > now - self._run_start)

    def lose_holder(self, holder: NodeId) -> None:
        """A run that asks it cannot end its iteration."""
        self.is_broken |= self._asked is not None and holder in self._asked.work

    def interrupt(self, now: int) -> int:
        """The iteration under way is for nothing. Returns how many of the run were over."""
        run, steps = self.run, self._num_over(now)
        assert run is not None
        self.break_off(now, steps)
        if steps:
            self._count_tokens(run, steps)
        return steps

    def break_off(self, now: int, steps: int = 0) -> None:
        """The run that was out gave nothing but so many iterations."""
        self.run = None
        self._settle(steps, steps)
        self.record.busy_ns += now - self._run_start
        self.sampling, self.loading = [], []
        self.stalled = self.is_broken = False
        self.version += 1

    def die(self, now: int) -> None:
        """Ends whatever it does. Requests that decode here have the tokens of the iterations that were over."""
        if self.run is not None:
            self.interrupt(now)
        for last_step, _, job in self._ends:
            if job.last_step == last_step and job.decodes_on == self.slot:
                job.leave(self.steps)
        self._ends.clear()
        self.alive = False

    def admit(self, job: SimJob) -> None:
        """`job` has blocks and is the youngest here, as its scheduler counts: of one iteration's tokens, those of
        older requests go out first."""
        self._num_admitted += 1
        job.age = self._num_admitted

    def join(self, job: SimJob) -> None:
        """`job` decodes here from the next run on."""
        job.join(self.slot, self.steps)
        heappush(self._ends, (job.last_step, job.age, job))

    def _chunks_ps(self, run: Run) -> int:
        """How long a run with prompts keeps the node: a mixed iteration, or one prompt's chunks in turn."""
        step_ps, pieces, context, asked = self.cost.step_ps, [], run.context, self._asked
        assembled: list[AssembledChunk] = []
        for piece in run.chunks:
            count, start = piece.count, piece.start
            if piece.assembly is not None:
                assembled.append(self._assembled(piece))
                continue
            self.record.tokens_prefilled += run.steps * count
            pieces.append((count, start - self.facts.block_size * piece.num_absent if piece.remote else start))
        if asked is not None:
            context -= asked.away
        if assembled:
            times = [assembled_step_ps(self.cost, assembled, pieces, run.num_decodes, context)]
        elif run.steps == 1:
            times = [step_ps(pieces, run.num_decodes, context)]
        else:
            [(count, start)] = pieces
            times = [step_ps(((count, start + at * count),), 0, 0) for at in range(run.steps)]
        if asked is not None:  # what attention here does not cover
            here = self.cost.decode_step_ps(1)[1] * context
            here += sum([round(self.cost.attend_ps(count, start + count / 2)) for count, start in pieces])
            times = [time + max(0, asked.wait.whole - here) for time in times]
        if self.facts.pipeline == 1:
            return sum(times)
        # The group is free for the next prompt when its first stage is; the last chunk still passes the others.
        occupancy, latency = pipeline(times, self.facts.pipeline)
        self.tail_ns = (latency - occupancy) // 1000
        return occupancy

    def _assembled(self, piece: Piece) -> AssembledChunk:
        """A piece that is put together from donors' KV: of its tokens fewer are computed from layer to layer."""
        assembly = piece.assembly
        assert assembly is not None
        selection, count, reused = assembly.selection, piece.count, assembly.num_reused
        self.record.tokens_prefilled += assembled_weight(selection, count, reused, self.cost.num_layers)
        return AssembledChunk(selection, count, piece.start, reused)

    def _after(self, steps: int) -> int:
        """Picoseconds that the first `steps` iterations take."""
        return steps * self._first + self._growth * (steps * (steps - 1) // 2)

    def _steps_until(self, now: int) -> int:
        """The fewest iterations that end at or after `now`: an estimate in floats, repaired exactly."""
        elapsed = now - self._run_start
        if not elapsed:
            return 0
        first, growth = self._first, self._growth
        half, scaled = first - 0.5 * growth, elapsed * 1000
        steps = int(2.0 * scaled / (half + sqrt(half * half + 2.0 * growth * scaled)))
        while self._after(steps) // 1000 < elapsed:
            steps += 1
        while steps > 0 and self._after(steps - 1) // 1000 >= elapsed:
            steps -= 1
        return steps


class Attending:
    """Between all nodes. `bytes_moved`: where what crosses is counted, as `queries`."""

    def __init__(self, named: dict[NodeId, SimNode], wiring: Wiring, bytes_moved: dict[str, int]) -> None:
        self._named, self._wiring, self._bytes_moved = named, wiring, bytes_moved

    def asks(self, home: SimNode, run: Run) -> Questions | None:
        """What an iteration of this run asks of holders, if anything."""
        rows: dict[NodeId, float] = {}
        work: dict[NodeId, float] = {}
        away = 0
        for attempt in home.decider.held_elsewhere() if run.num_decodes else ():
            for holding in attempt.remote.there:
                tokens = holding.num_blocks * home.facts.block_size
                self._add(rows, work, holding, 1, tokens)
                away += tokens
        for piece in run.chunks:
            for holding in piece.remote:
                self._add(rows, work, holding, piece.count, holding.num_blocks * home.facts.block_size)
        if not rows:
            return None
        queries, parts, size = home.cost.queries, [], 0
        for name, count in rows.items():
            there, num_bytes = self._named[name], round(queries.num_bytes(count))
            size += num_bytes
            takes = work[name] * there.occupancy.factor(home.slot)
            parts.append(Part(self.path(home.facts, there.facts), num_bytes, takes))
        wait = slowest(parts, queries.layers, home.facts.rates.network)
        return Questions(wait, away, work, size)

    def _add(
        self, rows: dict[NodeId, float], work: dict[NodeId, float], holding: Holding, count: int, tokens: int
    ) -> None:
        """Each of several holders has an equal part of the heads."""
        share = 1 / len(holding.holders)
        for name in holding.holders:
            rows[name] = rows.get(name, 0.0) + share * count
            work[name] = work.get(name, 0.0) + share * self._named[name].cost.attend_ps(count, tokens)

    def path(self, home: NodeFacts, holder: NodeFacts) -> Path:
        """Both nodes' links, and what joins their clusters. KV on the same links does not slow queries down."""
        rtt_ns = max(home.rates.rtt_ns, holder.rates.rtt_ns)
        rate: float = min(home.rates.network, holder.rates.network)
        link = self._wiring.link_between(home, holder)
        if link is not None:
            rtt_ns, rate = rtt_ns + link.rule.rtt_ns, min(rate, link.rule.bytes_per_s * max(link.factor, 1e-6))
        return Path(1000 * rtt_ns, rate)

    def began(self, home: SimNode, asked: Questions, iteration_ps: int) -> None:
        """From now on holders give it so much of their time."""
        for name, work_ps in asked.work.items():
            self._named[name].occupancy.by_home[home.slot] = min(1.0, work_ps / max(1, iteration_ps))

    def ended(self, home: SimNode, asked: Questions, steps: int) -> None:
        """So many iterations. A holder's own run that is out takes longer for it."""
        self._bytes_moved["queries"] += steps * asked.num_bytes
        for name, each_ps in asked.work.items():
            holder, work_ps = self._named[name], round(steps * each_ps)
            holder.occupancy.by_home.pop(home.slot, None)
            if holder.run is None:
                holder.record.busy_ns += work_ps // 1000
            else:
                holder.owed_ps += work_ps


def build_node(deployment: Deployment, slot: int) -> SimNode:
    """The node number `slot` without its links."""
    facts = deployment.nodes[slot]
    return SimNode(facts, slot, node_of(deployment, facts), compile_cost(facts.cost))


def node_of(deployment: Deployment, facts: NodeFacts) -> Node:
    """What decides there, of a node that holds nothing yet."""
    pool: BlockPool | CountingPool
    cached = deployment.has_cache(facts)
    decodes = facts.role is Role.DECODE and not deployment.rules.convert
    if cached or decodes or not deployment.has_names:
        pool = CountingPool(facts.kv_blocks)
    else:
        pool = BlockPool(facts.kv_blocks)
    return facts.node_of(pool, cached=cached)
