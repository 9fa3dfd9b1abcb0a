"""Equations (1) to (8) of Prefill-as-a-Service over a fleet: a grid of thresholds and of splits of the home cluster.

Each point is reckoned twice: with one representative length for each class of requests, as the paper does, and with
the mean over the class, which is exact. Several remote clusters add up, each bound by its own nodes and its own link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property

import msgspec

from isthmus.core.cost import compile_cost
from isthmus.core.cost.offload import (
    Classes,
    RequestWork,
    Solution,
    Split,
    bear,
    decode_rate,
    expected,
    highest_rate,
    remote_rate,
    representative,
)
from isthmus.core.cost.offload import PrefillFleet as Stages
from isthmus.core.types import NS_PER_S
from isthmus.facts import NodeFacts
from isthmus.lab.planner.decode import decode_batch
from isthmus.lab.planner.demand import Demand
from isthmus.lab.planner.fleet import Fleet, kept

GBPS = 1e9 / 8
"""Bytes per second."""
_MOST_THRESHOLDS = 1000
_NUM_QUANTILES = 1000


class Method(StrEnum):
    """How a class of requests enters the equations."""

    REPRESENTATIVE = "representative"
    EXACT = "exact"


_SPLITS: dict[Method, Split] = {Method.REPRESENTATIVE: representative, Method.EXACT: expected}


class FleetShape(msgspec.Struct, frozen=True):
    """How many instances there are, and bytes per second from each remote cluster to the home."""

    home: int
    remotes: tuple[int, ...]
    egress: tuple[float, ...]


class ThresholdColumn(msgspec.Struct, frozen=True):
    """One threshold: its classes, and what a request above it takes in each remote cluster, in seconds."""

    classes: Classes
    remote_s: tuple[float, ...]


class Solver:
    """One fleet, one demand. `codec`: what KV is encoded with on the links, the configuration's unless given."""

    def __init__(self, fleet: Fleet, demand: Demand, codec: str | None = None) -> None:
        self.fleet, self.demand = fleet, demand
        self.shape = FleetShape(
            fleet.home.nodes,
            tuple(remote.nodes for remote in fleet.remotes),
            tuple(remote.egress for remote in fleet.remotes),
        )
        self.codec = fleet.codec if codec is None else codec
        self.batch = decode_batch(fleet.home.decode, demand.context, fleet.tbt_ms, fleet.home.attending)
        self._made_columns: dict[Method, list[ThresholdColumn]] = {}

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """Ascending multiples of a round number of tokens up to the longest prompt, and none at all (infinity)."""
        if not self.fleet.remotes:
            return (math.inf,)
        longest = self.demand.lengths.quantile(1.0)
        step = round_step(longest / _MOST_THRESHOLDS)
        return (*(float(step * index) for index in range(math.ceil(longest / step))), math.inf)

    @cached_property
    def quantiles(self) -> list[float]:
        """Lengths evenly spaced in share, each as likely as the others."""
        lengths = self.demand.lengths
        return [lengths.quantile((index + 0.5) / _NUM_QUANTILES) for index in range(_NUM_QUANTILES)]

    def solve(self, shape: FleetShape, method: Method) -> list[Solution]:
        """The best threshold of every split, the best split first; of equals the one with fewer prefill nodes."""
        found = [self.best_threshold(shape, split, method) for split in self.splits(shape)]
        return sorted(found, key=lambda each: (-each.rate, each.num_prefill))

    def best(self, shape: FleetShape, method: Method) -> Solution:
        return self.solve(shape, method)[0]

    def best_threshold(self, shape: FleetShape, num_prefill: int, method: Method) -> Solution:
        """Of thresholds with the same rate, as where decode binds, the one that leaves prefill the most room."""
        return max(
            self.over_thresholds(shape, num_prefill, method), key=lambda each: (each.rate, _prefill(each))
        )

    def splits(self, shape: FleetShape) -> Sequence[int]:
        """Numbers of prefill nodes at home. The configured one alone where nodes cannot change their role."""
        home = self.fleet.home
        return (home.configured,) if home.fixed and shape.home == home.nodes else range(shape.home)

    def over_thresholds(self, shape: FleetShape, num_prefill: int, method: Method) -> list[Solution]:
        """One split at every threshold."""
        columns = self._columns(method) if sum(shape.remotes) else [self.column(method, math.inf)]
        return [self._bear(shape, column, num_prefill) for column in columns]

    def at(self, shape: FleetShape, threshold: float, num_prefill: int, method: Method) -> Solution:
        return self._bear(shape, self.column(method, threshold), num_prefill)

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes that cross a link for a prompt: KV of its uncached tokens, and the whole recurrent state."""
        cost = compile_cost(self._link_source.cost)
        return cost.state_bytes + kept(self._link_source, self.codec) * cost.kv_token_bytes * num_tokens

    def service_s(self, where: NodeFacts) -> PrefillSeconds:
        return PrefillSeconds(where, self.demand.cached)

    def column(self, method: Method, threshold: float) -> ThresholdColumn:
        """Request classes at a threshold; those of the grid are computed once."""
        at = self._at.get(threshold)
        if at is None:
            return self._made(method, (threshold,))[0]
        return self._columns(method)[at]

    @cached_property
    def _at(self) -> dict[float, int]:
        return {threshold: at for at, threshold in enumerate(self.thresholds)}

    def _columns(self, method: Method) -> list[ThresholdColumn]:
        found = self._made_columns.get(method)
        if found is None:
            found = self._made_columns[method] = self._made(method, self.thresholds)
        return found

    @property
    def _link_source(self) -> NodeFacts:
        return self.fleet.remotes[0].prefill if self.fleet.remotes else self.fleet.home.prefill

    def _made(self, method: Method, thresholds: Sequence[float]) -> list[ThresholdColumn]:
        lengths, split = self.demand.lengths, _SPLITS[method]
        local_s = self.service_s(self.fleet.home.prefill)
        sources = [remote.prefill for remote in self.fleet.remotes] or [self.fleet.home.prefill]
        classes = [
            split(lengths, RequestWork(self.service_s(source), local_s, self.kv_bytes), thresholds)
            for source in sources
        ]
        return [
            ThresholdColumn(column[0], tuple(each.remote_s for each in column))
            for column in zip(*classes, strict=True)
        ]

    def _bear(self, shape: FleetShape, column: ThresholdColumn, num_prefill: int) -> Solution:
        classes, num_remote = column.classes, sum(shape.remotes)
        if len(shape.remotes) > 1 and classes.share > 0:
            # Each cluster is bound by its own nodes and its own link: take what all bear together as their nodes' rate.
            rates = [
                remote_rate(nodes, remote_s, classes.kv_bytes, egress)
                for nodes, egress, remote_s in zip(shape.remotes, shape.egress, column.remote_s, strict=True)
            ]
            classes = msgspec.structs.replace(classes, remote_s=num_remote / sum(rates))
        decode = decode_rate(1, self.batch.size, self.batch.step_s, self.demand.output_tokens)
        return bear(classes, Stages(num_remote, shape.home, sum(shape.egress), decode), num_prefill)


class PrefillSeconds:
    """Seconds that the uncached part of a prompt takes on an instance, `cached` tokens of it being there.

    In chunks, as the engine computes it: each pays anew for what every iteration costs.
    """

    def __init__(self, instance: NodeFacts, cached: float) -> None:
        self._prefill_ns = compile_cost(instance.cost).prefill_ns
        self._cached, self._budget = round(cached), instance.token_budget

    def __call__(self, num_tokens: float) -> float:
        start, stop = self._cached, self._cached + max(1, round(num_tokens))
        total_ns = 0
        while stop - start > self._budget:
            total_ns += self._prefill_ns(self._budget, start)
            start += self._budget
        return (total_ns + self._prefill_ns(stop - start, start)) / NS_PER_S


def _prefill(solution: Solution) -> float:
    """What both prefill stages bear together: (6) without decode."""
    return highest_rate(solution.remote, solution.local, math.inf, solution.classes.share)


def tokens(threshold: float) -> int | None:
    """A threshold as it is reported: None offloads nothing."""
    return None if math.isinf(threshold) else round(threshold)


def round_step(at_least: float) -> int:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10 ** max(0, math.floor(math.log10(max(1.0, at_least))))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= at_least)
