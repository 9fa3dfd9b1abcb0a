"""KV that lies with holders, in virtual time: room is asked for, blocks cross links. What attention there takes is in
`node.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from isthmus.node import events
from isthmus.sim.network import Flow
from isthmus.sim.node import SimNode
from isthmus.types import NodeId, RequestId


class Holding:
    """Carries out what nodes decide about it. `say`: tells a node what another one says; `start`, `cancel`: flows from
    one node's memory to another's."""

    def __init__(
        self,
        named: dict[NodeId, SimNode],
        say: Callable[[SimNode, SimNode, events.Event], None],
        tell: Callable[[SimNode, events.Event], None],
        start: Callable[[SimNode, SimNode, int, tuple[Any, Any]], Flow],
        cancel: Callable[[Flow], None],
    ) -> None:
        self._named, self._say, self._tell, self._start, self._cancel = named, say, tell, start, cancel
        self._flows: dict[tuple[RequestId, int], dict[NodeId, Flow]] = {}
        self._parts: dict[tuple[RequestId, NodeId], int] = {}
        """Into how many parts the heads are cut of which a holder has one."""
        self._askers: dict[tuple[RequestId, NodeId], dict[NodeId, None]] = {}
        """Of an attempt and a holder, who asked it for room and has not left."""
        self.handlers: dict[type, Callable[[SimNode, Any], None]] = {
            events.Reserve: self._reserve,
            events.Host: self._host,
            events.Ship: self._ship,
            events.Vacate: self._vacate,
            events.Unhost: lambda node, action: None,
        }

    def _reserve(self, node: SimNode, reserve: events.Reserve) -> None:
        holder, name = self._named[reserve.holder], node.facts.node
        if not holder.alive:
            self._tell(node, events.Reserved(reserve.key, reserve.holder, False))
            return
        self._askers.setdefault((reserve.key, reserve.holder), {})[name] = None
        self._parts[reserve.key, reserve.holder] = reserve.parts
        self._say(node, holder, events.Asked(reserve.key, name, reserve.num_blocks, reserve.parts))

    def _host(self, node: SimNode, host: events.Host) -> None:
        self._say(node, self._named[host.peer], events.Reserved(host.key, node.facts.node, bool(host.blocks)))

    def _ship(self, node: SimNode, ship: events.Ship) -> None:
        holder = self._named[ship.holder]
        size = len(ship.blocks) * node.facts.block_size * node.cost.kv_token_bytes
        size //= self._parts[ship.key, ship.holder]
        there = partial(
            self._stowed, node, holder, events.Shipped(ship.key, ship.holder, ship.first + len(ship.blocks))
        )
        flows = self._flows.setdefault((ship.key, node.slot), {})
        flows[ship.holder] = self._start(node, holder, size, (_call, there))

    def _stowed(self, node: SimNode, holder: SimNode, shipped: events.Shipped) -> None:
        del self._flows[shipped.key, node.slot][shipped.holder]
        if not self._flows[shipped.key, node.slot]:
            del self._flows[shipped.key, node.slot]
        self._say(holder, node, shipped)

    def _vacate(self, node: SimNode, vacate: events.Vacate) -> None:
        holder, name = self._named[vacate.holder], node.facts.node
        askers = self._askers.get((vacate.key, vacate.holder), {})
        if name in askers:
            del askers[name]
            if not askers:
                del self._askers[vacate.key, vacate.holder], self._parts[vacate.key, vacate.holder]
            self._say(node, holder, events.Left(vacate.key, name))

    def release(self, node: SimNode, key: RequestId) -> None:
        """Nothing more is read from its blocks here."""
        for flow in self._flows.pop((key, node.slot), {}).values():
            self._cancel(flow)

    def part(self, one: SimNode, other: SimNode) -> None:
        """The sessions of two nodes ended: what lies with one of them is lost to the other."""
        names = {one.facts.node: other, other.facts.node: one}
        for (key, holder), askers in list(self._askers.items()):
            home = names.get(holder)
            if home is not None and home.facts.node in askers:
                self._lost(key, self._named[holder], home)

    def lose(self, node: SimNode) -> None:
        """It is gone, with what it held and what it had elsewhere."""
        name = node.facts.node
        for (key, holder), askers in list(self._askers.items()):
            for asker in list(askers):
                if name in (holder, asker):
                    self._lost(key, self._named[holder], self._named[asker])

    def _lost(self, key: RequestId, holder: SimNode, home: SimNode) -> None:
        askers = self._askers[key, holder.facts.node]
        del askers[home.facts.node]
        if not askers:
            del self._askers[key, holder.facts.node], self._parts[key, holder.facts.node]
        self.release(home, key)
        if holder.alive:
            self._tell(holder, events.Left(key, home.facts.node))
        if home.alive:
            self._tell(home, events.Broken(key, f"{holder.facts.node}, which has its KV, is gone"))

    def check_idle(self) -> None:
        assert not self._flows and not self._askers, "KV is left with a holder"


def _call(there: Callable[[], None]) -> None:
    there()
