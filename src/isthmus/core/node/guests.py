"""KV of other nodes' attempts on this node, the holder: whose it is, how much of it is whole, and who needs it."""

from __future__ import annotations

from isthmus.core.attempts import Share
from isthmus.core.node import events
from isthmus.core.node.letters import (
    ClaimReply,
    ClaimRequest,
    ReserveReply,
    ReserveRequest,
    SendBack,
    ShipmentConfirmed,
    Shrink,
)
from isthmus.core.scheduler import Actions, Scheduler
from isthmus.core.scheduler.pool import Blocks
from isthmus.core.types import NS_PER_S, NodeId, RequestId

LEASE_NS = 5 * NS_PER_S
"""How long KV is kept whose home is gone: the head finds that out within seconds, and routes the next attempt."""


class _Guest:
    """A share of an attempt's KV."""

    __slots__ = ("blocks", "lease_ns", "needed", "num_stowed", "share")

    def __init__(self, share: Share, blocks: Blocks = (), num_stowed: int = 0) -> None:
        self.share, self.blocks = share, blocks
        self.num_stowed = num_stowed  # leading blocks that are whole
        self.needed: dict[NodeId, None] = {}  # nodes that have not left it
        self.lease_ns = 0  # until when it is kept, though no node that is here needs it


class Guests:
    """`kv_heads`: into so many equal parts the KV of a token can be cut; 0 where nothing is held for others."""

    def __init__(self, scheduler: Scheduler, kv_heads: int) -> None:
        self._scheduler, self._kv_heads = scheduler, kv_heads
        self._guests: dict[RequestId, _Guest] = {}

    def reserve(self, peer: NodeId, asked: ReserveRequest, actions: Actions) -> None:
        """Room that there is, is given at once; no node waits for it. Where a block has all heads there is room for as
        many with a part of them as there are parts."""
        key, share, guest = asked.key, asked.share, self._guests.get(asked.key)
        can = asked.num_blocks > 0 and self._can_hold(share) and (guest is None or guest.share == share)
        granted = can and self._has_room(key, share, -(-asked.num_blocks // share.parts), actions)
        if granted:
            guest = self._guests[key]
            guest.needed[peer] = None
            actions.append(events.Host(key, peer, share, guest.blocks))
        actions.append(events.SendLetter(peer, ReserveReply(key, granted)))

    def _has_room(self, key: RequestId, share: Share, count: int, actions: Actions) -> bool:
        """Whether there is room for `count` blocks in all; then it is set aside."""
        guest = self._guests.get(key) or _Guest(share)
        if count > len(guest.blocks):
            # One spare block for each guest, which may grow.
            spare = 0 if guest.blocks else min(len(self._guests), self._scheduler.pool.num_blocks // 8)
            more = self._scheduler.set_aside(count - len(guest.blocks), actions, spare)
            if not more:
                return False
            guest.blocks += more
        self._guests[key] = guest
        return True

    def _can_hold(self, share: Share) -> bool:
        return 0 < share.parts <= self._kv_heads and not self._kv_heads % share.parts

    def claim(self, peer: NodeId, claim: ClaimRequest, actions: Actions) -> None:
        """The attempt before it is over: whoever asked in its name is not heard any more."""
        key, old, share = claim.key, self._guests.get(claim.old), claim.share
        if key not in self._guests and old is not None and self._can_hold(share):
            del self._guests[claim.old]
            num_stowed = old.num_stowed if old.share == share else 0
            self._guests[key] = _Guest(share, old.blocks, num_stowed)
            actions.append(events.Rekey(claim.old, key, peer, share, num_stowed))
        elif key in self._guests:  # the other node of the attempt claimed it before
            actions.append(events.Host(key, peer, self._guests[key].share, self._guests[key].blocks))
        guest = self._guests.get(key)
        if guest is not None:
            guest.needed[peer] = None
        found = guest.num_stowed if guest is not None and guest.share == share else 0
        actions.append(events.SendLetter(peer, ClaimReply(key, found)))

    def stowed(self, event: events.ShipmentStored, actions: Actions) -> None:
        """Bytes came, or are being written anew."""
        guest = self._guests.get(event.key)
        if guest is None or event.peer not in guest.needed:
            return
        stop = min(event.stop, len(guest.blocks) * guest.share.parts)  # it may have shrunk meanwhile
        is_more, guest.num_stowed = stop > guest.num_stowed, stop
        if is_more or event.damaged:
            actions.append(events.SendLetter(event.peer, ShipmentConfirmed(event.key, stop, event.damaged)))

    def send_back(self, peer: NodeId, wanted: SendBack, actions: Actions) -> None:
        """Blocks go home, where they are whole here: who asks was told so, or the session with it ended since."""
        guest, stop = self._guests.get(wanted.key), wanted.first + wanted.num_blocks
        if guest is None or peer not in guest.needed or guest.share.parts > 1:
            return
        if 0 <= wanted.first < stop <= guest.num_stowed:
            actions.append(events.Ship(wanted.key, peer, 0, guest.blocks[wanted.first : stop]))

    def shrink(self, peer: NodeId, wanted: Shrink, now: int, actions: Actions) -> bool:
        """Whether some of its room is free. Who needs some of it still decodes, and so is the last that needs it."""
        if not wanted.num_blocks:
            return self._left(wanted.key, peer, now, actions, lease_ns=0)
        guest, count = self._guests.get(wanted.key), wanted.num_blocks
        if guest is None or peer not in guest.needed or not 0 < count < len(guest.blocks):
            return False
        self._scheduler.put_back(guest.blocks[count:])
        guest.blocks, guest.num_stowed = guest.blocks[:count], min(guest.num_stowed, count)
        actions.append(events.Trim(wanted.key, count))
        return True

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
        return self.expire(now, actions)

    def expire(self, now: int, actions: Actions) -> bool:
        """Whether any blocks are free since no node came for them."""
        over = [key for key, guest in self._guests.items() if not guest.needed and guest.lease_ns <= now]
        for key in over:
            self._scheduler.put_back(self._guests.pop(key).blocks)
            actions.append(events.Unhost(key))
        return bool(over)

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine in which they lie."""
        return sum([len(guest.blocks) for guest in self._guests.values()])

    def num_stowed(self, key: RequestId) -> int:
        """Leading blocks of an attempt's share that are whole here."""
        guest = self._guests.get(key)
        return guest.num_stowed if guest is not None else 0

    def check_idle(self) -> None:
        assert not self._guests, "room for another node's KV was never left"
