"""What happens beside the requests: links are measured, and faults come and go."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Protocol

from isthmus.conductor import Event, Measured, NodeLeft
from isthmus.sim.build import joined, scheduler_of
from isthmus.sim.clock import OTHERS, Clock
from isthmus.sim.deployment import Deployment
from isthmus.sim.job import Job
from isthmus.sim.node import SimNode
from isthmus.sim.nodes import Nodes


class Host(Protocol):
    """Whose nodes and links these are."""

    @property
    def is_over(self) -> bool:
        """No request is left, and none will come."""

    def decide(self, event: Event) -> None:
        """Tells the conductor, and does what it answers."""

    def requests(self) -> Iterable[Job]:
        """Those that have come and not ended, in order of arrival."""


class Upkeep:
    """Starts with `start`, and goes on by the clock."""

    def __init__(self, deployment: Deployment, clock: Clock, nodes: Nodes, host: Host) -> None:
        self._deployment, self._clock, self._nodes, self._host = deployment, clock, nodes, host

    def start(self) -> None:
        rules, clock = self._deployment.rules, self._clock
        if rules.links or rules.convert:
            clock.call(clock.now + rules.period_ns, OTHERS, self._measure)
        for time in self._deployment.faults.times():
            clock.call(time, OTHERS, self._change)

    def _measure(self) -> None:
        if self._host.is_over:
            return
        now = self._clock.now
        self._host.decide(Measured(self._nodes.moves.link_states(now)))
        self._clock.call(now + self._deployment.rules.period_ns, OTHERS, self._measure)

    def _change(self) -> None:
        """One of the faults begins or ends."""
        faults, now = self._deployment.faults, self._clock.now
        self._nodes.moves.change_links(partial(faults.factor, now=now), now)
        for node in self._nodes.nodes:
            dead = faults.is_dead((node.spec.node, node.spec.cluster), now)
            if node.alive and dead:
                self._die(node)
            elif not node.alive and not dead:
                node.alive = True
                self._host.decide(joined(self._deployment, node.spec))

    def _die(self, node: SimNode) -> None:
        """All that it held is lost; what others were getting from it does not come."""
        node.die(self._clock.now)
        self._nodes.moves.forget_copies(node, self._clock.now)
        waiting = [(job, job.attempt) for job in self._host.requests() if job.waits_for(node.tiers)]
        node.begin_anew(node.spec, scheduler_of(self._deployment, node.spec))
        node.alive = False
        self._host.decide(NodeLeft(node.spec.node))
        for job, attempt in waiting:
            if job.attempt == attempt:  # none of its own nodes is gone
                self._nodes.lost(job, f"node {node.spec.node} is gone, and with it what was to come from there")
