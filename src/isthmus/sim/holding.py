"""KV that lies with holders, in virtual time: room is asked for, blocks cross links. What attention there takes is in
`node.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from isthmus.attempts import Share
from isthmus.node import events
from isthmus.sim.network import Flow
from isthmus.sim.node import SimNode
from isthmus.types import NodeId, RequestId


class _Guest:
    """A share of an attempt's KV with one holder: how much of it is there, who asked for room and has not left, and
    whether there is any."""

    __slots__ = ("askers", "hosted", "share", "stowed")

    def __init__(self, share: Share) -> None:
        self.share = share
        self.stowed, self.hosted = 0, False
        self.askers: dict[NodeId, None] = {}


class Holding:
    """Carries out what nodes decide about it. `say`: tells a node what another one says, if they are not cut off;
    `start`, `cancel`: flows from one node's memory to another's."""

    def __init__(
        self,
        named: dict[NodeId, SimNode],
        say: Callable[[SimNode, SimNode, events.Event], None],
        tell: Callable[[SimNode, events.Event | None], None],
        start: Callable[[str, SimNode, SimNode, RequestId, int, Callable[[], None]], Flow],
        cancel: Callable[[Flow], None],
        are_cut: Callable[[SimNode, SimNode], bool],
    ) -> None:
        self._named, self._say, self._tell, self._start, self._cancel = named, say, tell, start, cancel
        self._are_cut = are_cut
        self._flows: dict[tuple[RequestId, int], dict[NodeId, Flow]] = {}
        self._back: dict[RequestId, tuple[SimNode, Flow]] = {}
        """What comes back, and to which home."""
        self._guests: dict[tuple[RequestId, NodeId], _Guest] = {}
        """Of an attempt and a holder."""
        self.handlers: dict[type, Callable[[SimNode, Any], None]] = {
            events.Reserve: self._reserve,
            events.Claim: self._claim,
            events.Host: self._host,
            events.Rekey: self._rekey,
            events.Ship: self._ship,
            events.Reclaim: self._reclaim,
            events.Shrink: self._shrink,
            events.Vacate: self._vacate,
            events.Trim: self._trim,
            events.Unhost: self._unhost,
        }

    def _reserve(self, node: SimNode, reserve: events.Reserve) -> None:
        holder, name = self._named[reserve.holder], node.facts.node
        if not holder.alive or self._are_cut(node, holder):
            self._tell(node, events.Reserved(reserve.key, reserve.holder, False))
            return
        self._guest(reserve).askers[name] = None
        self._say(node, holder, events.Asked(reserve.key, name, reserve.num_blocks, reserve.share))

    def _guest(self, action: events.Reserve | events.Claim) -> _Guest:
        at = action.key, action.holder
        if at not in self._guests:
            self._guests[at] = _Guest(action.share)
        return self._guests[at]

    def _claim(self, node: SimNode, claim: events.Claim) -> None:
        holder, name = self._named[claim.holder], node.facts.node
        if not holder.alive or self._are_cut(node, holder):
            self._tell(node, events.Found(claim.key, claim.holder, 0))
            return
        self._guest(claim).askers[name] = None
        self._say(node, holder, events.Claimed(claim.key, name, claim.old))

    def _rekey(self, node: SimNode, rekey: events.Rekey) -> None:
        name = node.facts.node
        guest, old = self._guests.get((rekey.key, name)), self._guests.pop((rekey.old, name), None)
        if guest is None:
            return  # who claimed it left
        if old is not None and old.share == guest.share:
            guest.stowed = old.stowed
        guest.hosted |= old is not None
        self._say(node, self._named[rekey.peer], events.Found(rekey.key, name, guest.stowed))

    def _host(self, node: SimNode, host: events.Host) -> None:
        guest = self._guests.get((host.key, node.facts.node))
        if guest is not None and host.blocks:
            guest.hosted = True
        self._say(node, self._named[host.peer], events.Reserved(host.key, node.facts.node, bool(host.blocks)))

    def _ship(self, node: SimNode, ship: events.Ship) -> None:
        holder, guest = self._named[ship.holder], self._guests[ship.key, ship.holder]
        guest.stowed = min(guest.stowed, ship.first)
        size = len(ship.blocks) * node.facts.block_size * node.cost.kv_token_bytes // guest.share.parts
        there = partial(
            self._stowed, node, holder, events.Shipped(ship.key, ship.holder, ship.first + len(ship.blocks))
        )
        flows = self._flows.setdefault((ship.key, node.slot), {})
        flows[ship.holder] = self._start("shipment", node, holder, ship.key, size, there)

    def _stowed(self, node: SimNode, holder: SimNode, shipped: events.Shipped) -> None:
        flows = self._flows[shipped.key, node.slot]
        del flows[shipped.holder]
        if not flows:
            del self._flows[shipped.key, node.slot]
        self._guests[shipped.key, shipped.holder].stowed = shipped.stop
        self._say(holder, node, shipped)

    def _reclaim(self, node: SimNode, reclaim: events.Reclaim) -> None:
        holder, key = self._named[reclaim.holder], reclaim.key
        if not holder.alive:
            self._tell(node, events.Reclaimed(key, whole=False))
            return
        size = len(reclaim.blocks) * node.facts.block_size * node.cost.kv_token_bytes
        flow = self._start("return", holder, node, key, size, partial(self._came_back, node, key))
        self._back[key] = node, flow

    def _came_back(self, node: SimNode, key: RequestId) -> None:
        del self._back[key]
        self._tell(node, events.Reclaimed(key, whole=True))

    def _shrink(self, node: SimNode, shrink: events.Shrink) -> None:
        holder = self._named[shrink.holder]
        if holder.alive:
            self._say(node, holder, events.Shrunk(shrink.key, node.facts.node, shrink.num_blocks))

    def _vacate(self, node: SimNode, vacate: events.Vacate) -> None:
        name, guest = node.facts.node, self._guests.get((vacate.key, vacate.holder))
        if guest is not None and name in guest.askers:
            self._left(vacate.key, vacate.holder, name)
            self._say(node, self._named[vacate.holder], events.Left(vacate.key, name))

    def _left(self, key: RequestId, holder: NodeId, asker: NodeId) -> None:
        guest = self._guests[key, holder]
        del guest.askers[asker]
        if not guest.askers and not guest.hosted:
            del self._guests[key, holder]

    def _trim(self, node: SimNode, trim: events.Trim) -> None:
        guest = self._guests.get((trim.key, node.facts.node))
        if guest is not None:
            guest.stowed = min(guest.stowed, trim.num_blocks)

    def _unhost(self, node: SimNode, unhost: events.Unhost) -> None:
        guest = self._guests.get((unhost.key, node.facts.node))
        if guest is None:
            return
        guest.hosted, guest.stowed = False, 0
        if not guest.askers:  # else it was asked for again since
            del self._guests[unhost.key, node.facts.node]

    def release(self, node: SimNode, key: RequestId) -> None:
        """Nothing more is read from its blocks here, or written to what comes back."""
        for flow in self._flows.pop((key, node.slot), {}).values():
            self._cancel(flow)
        if key in self._back and self._back[key][0] is node:
            self._cancel(self._back.pop(key)[1])
            self._tell(node, events.Reclaimed(key, whole=False))

    def part(self, one: SimNode, other: SimNode) -> None:
        """The sessions of two nodes ended: what lies with one of them is lost to the other."""
        names = {one.facts.node: other, other.facts.node: one}
        for (key, holder), guest in list(self._guests.items()):
            home = names.get(holder)
            if home is not None and home.facts.node in guest.askers:
                self._lost(key, self._named[holder], home)

    def lose(self, node: SimNode) -> None:
        """It is gone, with what it held and what it had elsewhere."""
        name = node.facts.node
        for (key, holder), guest in list(self._guests.items()):
            for asker in list(guest.askers):
                if name in (holder, asker):
                    self._lost(key, self._named[holder], self._named[asker])
            if holder == name:
                self._guests.pop((key, holder), None)

    def _lost(self, key: RequestId, holder: SimNode, home: SimNode) -> None:
        self._left(key, holder.facts.node, home.facts.node)
        self.release(home, key)
        if holder.alive:
            self._tell(holder, events.Left(key, home.facts.node, lost=True))
        if home.alive:
            self._tell(home, events.Broken(key, f"{holder.facts.node}, which has its KV, is gone"))
            home.lose_holder(holder.facts.node)
            self._tell(home, None)

    def check_idle(self) -> None:
        assert not self._flows and not self._back and not self._guests, "KV is left with a holder"
