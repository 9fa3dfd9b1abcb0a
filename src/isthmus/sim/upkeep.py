"""What happens beside the requests: links are measured, and faults come and go."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from isthmus.conductor import Event, Measured, NodeLeft
from isthmus.sim.clock import OTHERS, Clock
from isthmus.sim.deployment import Deployment
from isthmus.sim.nodes import Nodes
from isthmus.sim.records import LinkSample
from isthmus.types import NS_PER_S

PATIENCE_NS = 600 * NS_PER_S
"""How long measuring goes on when nothing else happens: only another role for some node can help what is left."""


class Host(Protocol):
    """Whose nodes and links these are."""

    @property
    def has_all_come(self) -> bool:
        """No request is still to come."""

    @property
    def is_over(self) -> bool:
        """No request is left either."""

    def decide(self, event: Event) -> None:
        """Tells the conductor, and does what it answers."""


class Upkeep:
    """Starts with `start`, and goes on by the clock. `samples`: what was measured."""

    def __init__(self, deployment: Deployment, clock: Clock, nodes: Nodes, host: Host) -> None:
        self._deployment, self._clock, self._nodes, self._host = deployment, clock, nodes, host
        self.samples: list[LinkSample] = []
        self._idle_since = 0

    def start(self) -> None:
        rules, clock = self._deployment.rules, self._clock
        if rules.links or rules.convert:
            clock.call(clock.now + rules.period_ns, OTHERS, self._measure)
        for time in self._deployment.faults.times():
            clock.call(time, OTHERS, self._change)

    def _measure(self) -> None:
        if self._host.is_over:
            return
        now, clock = self._clock.now, self._clock
        if clock.heap or self._nodes.moves.network.next_finish() is not None or not self._host.has_all_come:
            self._idle_since = now
        if now - self._idle_since > PATIENCE_NS:
            return
        states = self._nodes.moves.link_states(now)
        sent, queued = [state.sent_bytes for state in states], [state.queued_bytes for state in states]
        self.samples.append(LinkSample(now, tuple(sent), tuple(queued)))
        self._host.decide(Measured(states))
        clock.call(now + self._deployment.rules.period_ns, OTHERS, self._measure)

    def _change(self) -> None:
        """One of the faults begins or ends."""
        faults, now = self._deployment.faults, self._clock.now
        self._nodes.moves.change_links(partial(faults.factor, now=now), now)
        for node in self._nodes.nodes:
            dead = faults.is_dead((node.facts.node, node.facts.cluster), now)
            if node.alive and dead:
                self._nodes.lose(node, partial(self._host.decide, NodeLeft(node.facts.node)))
            elif not node.alive and not dead:
                node.alive = True
                self._host.decide(node.facts.joined())
        self._nodes.moves.sessions.change(self._nodes.nodes)
        self._nodes.moves.disks.change(self._nodes.nodes, now)
