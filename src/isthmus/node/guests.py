"""KV of other nodes' attempts on this node, the holder: whose it is, how much of it is whole, and who needs it."""

from __future__ import annotations

from isthmus.attempts import Share
from isthmus.node import events
from isthmus.node.letters import Claim, Found, Reserve, Reserved, SendBack, Shipped, Shrink, Vacate
from isthmus.scheduler import Actions, Scheduler
from isthmus.types import NS_PER_S, NodeId, RequestId

LEASE_NS = 5 * NS_PER_S
"""How long KV is kept whose home is gone: the head finds that out within seconds, and routes the next attempt."""


class _Guest:
    """A share of an attempt's KV. `num_stowed`: leading blocks that are whole; `needed`: by these nodes; `lease_ns`:
    until when it is kept though none of them needs it any more, 0 for not at all."""

    __slots__ = ("lease_ns", "needed", "num_stowed", "share")

    def __init__(self, share: Share, num_stowed: int = 0) -> None:
        self.share, self.num_stowed = share, num_stowed
        self.needed: dict[NodeId, None] = {}
        self.lease_ns = 0


class Guests:
    """`kv_heads`: into so many equal parts the KV of a token can be cut; 0 where nothing is held for others."""

    def __init__(self, scheduler: Scheduler, kv_heads: int) -> None:
        self._scheduler, self._kv_heads = scheduler, kv_heads
        self._guests: dict[RequestId, _Guest] = {}

    def reserve(self, peer: NodeId, asked: Reserve, actions: Actions) -> None:
        """Room that there is, is given at once; no node waits for it. Where a block has all heads there is room for as
        many with a part of them as there are parts."""
        key, share, guest = asked.key, asked.share, self._guests.get(asked.key)
        can = asked.num_blocks > 0 and self._can_hold(share) and (guest is None or guest.share == share)
        blocks = self._scheduler.host(key, -(-asked.num_blocks // share.parts), actions) if can else ()
        if blocks:
            guest = self._guests.setdefault(key, _Guest(share))
            guest.needed[peer] = None
            actions.append(events.Host(key, peer, share, blocks))
        actions.append(events.Tell(peer, Reserved(key, bool(blocks))))

    def _can_hold(self, share: Share) -> bool:
        return 0 < share.parts <= self._kv_heads and not self._kv_heads % share.parts

    def claim(self, peer: NodeId, claim: Claim, actions: Actions) -> None:
        """The attempt before it is over: whoever asked in its name is not heard any more."""
        key, old, share = claim.key, self._guests.get(claim.old), claim.share
        if key not in self._guests and old is not None and self._can_hold(share):
            self._scheduler.rekey(claim.old, key)
            del self._guests[claim.old]
            self._guests[key] = _Guest(share, old.num_stowed if old.share == share else 0)
            num_stowed = self._guests[key].num_stowed
            actions.append(events.Rekey(claim.old, key, peer, share, num_stowed))
        elif key in self._guests:  # the other node of the attempt claimed it before
            actions.append(events.Host(key, peer, self._guests[key].share, self._scheduler.hosted(key)))
        guest = self._guests.get(key)
        if guest is not None:
            guest.needed[peer] = None
        found = guest.num_stowed if guest is not None and guest.share == share else 0
        actions.append(events.Tell(peer, Found(key, found)))

    def stowed(self, event: events.Stowed, actions: Actions) -> None:
        """Bytes came, or are being written anew."""
        guest = self._guests.get(event.key)
        if guest is None or event.peer not in guest.needed:
            return
        is_more, guest.num_stowed = event.stop > guest.num_stowed, event.stop
        if is_more or event.damaged:
            actions.append(events.Tell(event.peer, Shipped(event.key, event.stop, event.damaged)))

    def send_back(self, peer: NodeId, wanted: SendBack, actions: Actions) -> None:
        """Blocks go home; where they are not whole here, as after a lost session, the home hears that it lost them."""
        guest, stop = self._guests.get(wanted.key), wanted.first + wanted.num_blocks
        if guest is None or peer not in guest.needed or guest.share.parts > 1:
            return
        if 0 <= wanted.first < stop <= guest.num_stowed:
            blocks = self._scheduler.hosted(wanted.key)[wanted.first : stop]
            actions.append(events.Ship(wanted.key, peer, 0, blocks))

    def shrink(self, peer: NodeId, wanted: Shrink, actions: Actions) -> bool:
        """Whether some of its room is free: who asks decodes, and so is the last that needs it."""
        key, guest = wanted.key, self._guests.get(wanted.key)
        blocks = self._scheduler.hosted(key)
        if guest is None or peer not in guest.needed or not 0 < wanted.num_blocks < len(blocks):
            return False
        guest.num_stowed = min(guest.num_stowed, wanted.num_blocks)
        self._scheduler.shrink(key, wanted.num_blocks)
        actions.append(events.Trim(key, wanted.num_blocks))
        return True

    def vacate(self, peer: NodeId, left: Vacate, now: int, actions: Actions) -> bool:
        """Whether no node needs it any more, and its blocks are free."""
        return self._left(left.key, peer, now, actions, lease_ns=0)

    def gone(self, peer: NodeId, now: int, actions: Actions) -> bool:
        """What it needed stays for a while: another node may go on with it. Whether any blocks are free."""
        keys = [key for key, guest in self._guests.items() if peer in guest.needed]
        freed = [self._left(key, peer, now, actions, lease_ns=now + LEASE_NS) for key in keys]
        return any(freed)

    def _left(self, key: RequestId, peer: NodeId, now: int, actions: Actions, *, lease_ns: int) -> bool:
        guest = self._guests.get(key)
        if guest is None or peer not in guest.needed:
            return False
        del guest.needed[peer]
        actions.append(events.Unhost(key, peer))
        if lease_ns:
            guest.lease_ns = lease_ns
            actions.append(events.Wake(lease_ns))
        return self._expire(key, now, actions)

    def expire(self, now: int, actions: Actions) -> bool:
        """Whether any blocks are free since no node came for them."""
        keys = [key for key, guest in self._guests.items() if guest.lease_ns]
        freed = [self._expire(key, now, actions) for key in keys]
        return any(freed)

    def _expire(self, key: RequestId, now: int, actions: Actions) -> bool:
        guest = self._guests[key]
        if guest.lease_ns > now:
            return False
        guest.lease_ns = 0
        if guest.needed:
            return False
        del self._guests[key]
        self._scheduler.unhost(key)
        actions.append(events.Unhost(key))
        return True

    def num_stowed(self, key: RequestId) -> int:
        """Leading blocks of an attempt's share that are whole here."""
        guest = self._guests.get(key)
        return guest.num_stowed if guest is not None else 0

    def check_idle(self) -> None:
        assert not self._guests, "room for another node's KV was never left"
