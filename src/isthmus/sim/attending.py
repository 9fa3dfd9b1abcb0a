"""Attention over KV that lies with holders, in virtual time: what it adds to an iteration, and what it takes there.

What is asked of a holder is the same throughout a run but for what home adds to its own part. A holder attends beside
its own iterations, which take longer by that; for several homes it attends in turns, so that each finds it slower by
the share of its time that the others take now. A run that asks is looked at again after `LOOK_STEPS` iterations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from isthmus.attempts import Holding
from isthmus.cost import Part, Path, Wait, slowest
from isthmus.deploy import NodeFacts
from isthmus.scheduler import Run
from isthmus.types import NodeId

if TYPE_CHECKING:
    from isthmus.sim.links import Wiring
    from isthmus.sim.node import SimNode

LOOK_STEPS = 16
"""So long a live node's run lasts at most."""


class Questions(NamedTuple):
    """What an iteration of a home asks: how long it would wait for the slowest holder; `away`: tokens of its decodes
    that lie elsewhere; `work`: what each holder takes for it, in ps; `num_bytes`: there and back."""

    wait: Wait
    away: int
    work: dict[NodeId, float]
    num_bytes: int


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


class Occupancy:
    """Of a holder, by attention for others. `by_home`: the part of its time that each home takes now."""

    __slots__ = ("by_home",)

    def __init__(self) -> None:
        self.by_home: dict[int, float] = {}

    def factor(self, home: int) -> float:
        """By how much attention for one more home takes longer than alone; never less than an equal part is left."""
        others = [part for slot, part in self.by_home.items() if slot != home]
        return 1 / max(1 - sum(others), 1 / (1 + len(others))) if others else 1.0
