"""KV of other nodes' attempts on this node, the holder: whose it is, how much of it is whole, and who needs it."""

from __future__ import annotations

from isthmus.core.attempts import Holding, Share, holdings_of, key_of
from isthmus.core.node import events
from isthmus.core.node.attempts import Attempt
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
from isthmus.core.scheduler.remote import ALL_HERE, Holders, RemoteKV, Return, Shipment, shares
from isthmus.core.scheduler.sequence import DECODING
from isthmus.core.types import DECODE, NS_PER_S, PREFILL, NodeId, RequestId

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

    def reserve(self, peer: NodeId, asked: ReserveRequest, now: int, actions: Actions) -> None:
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

    def claim(self, peer: NodeId, claim: ClaimRequest, now: int, actions: Actions) -> None:
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

    def stowed(self, event: events.ShipmentStored, now: int, actions: Actions) -> None:
        """Bytes came, or are being written anew."""
        guest = self._guests.get(event.key)
        if guest is None or event.peer not in guest.needed:
            return
        stop = min(event.stop, len(guest.blocks) * guest.share.parts)  # it may have shrunk meanwhile
        is_more, guest.num_stowed = stop > guest.num_stowed, stop
        if is_more or event.damaged:
            actions.append(events.SendLetter(event.peer, ShipmentConfirmed(event.key, stop, event.damaged)))

    def send_back(self, peer: NodeId, wanted: SendBack, now: int, actions: Actions) -> None:
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


# KV of an attempt on other nodes: what its home asks of holders. `guests.py` is the holder's side.
#
# home ──ReserveRequest──> holder ──ReserveReply──────> home      when it has memory, or to move some while it decodes
# ══blocks══════════>        ──ShipmentConfirmed─>           whole ones, in their order, as they are computed
# ──SendBack────────>        ══blocks════════════>           the last of them come home: the conductor says so
# ──Shrink──────────>                                        so much less is kept there: nothing, at last
# next ──ClaimRequest────> holder ──ClaimReply────────> next      before it begins, if the home before it is gone
#
# A holder says at once whether there is room, and an attempt asks when it has memory where it is computed and where
# it decodes: so of two attempts neither waits for what the other has. A prefill node and the decode node that follows
# it each ask for the same room, and the holder keeps it until both left. What comes home is attended to at the holder
# until all of it is here and no run touches the attempt. Only what lay elsewhere last comes, so what lies with a
# holder stays its leading blocks there.


AGAIN_NS = NS_PER_S // 4
"""So long holders that had no room for more of an answer are not asked for that again."""
FREE_TOKENS = 16
"""That are shipped in an iteration beside decodes: so much costs nothing, twice as much 8.6 % (Infinite-LLM, section on
overlap)."""
GROWTH = 8
"""Blocks of an answer for which holders are asked at a time, at most."""


class Away:
    """At home: attempts with KV elsewhere."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._size = scheduler, scheduler.limits.block_size
        self.attempts: dict[RequestId, Attempt] = {}
        """All that have, or are to have, KV elsewhere."""
        self._under_way: dict[RequestId, Attempt] = {}  # of these, whose KV moves or may begin to
        self._orphans: dict[RequestId, Blocks] = {}  # into which KV comes back of attempts that are over

    def begin(self, attempt: Attempt) -> str:
        """Its leading blocks are to lie where its route says. Returns why that cannot be, or nothing."""
        route, part = attempt.begin.route, attempt.begin.part
        planned = holdings_of(route, attempt.length, self._size)
        remote = attempt.remote = RemoteKV(planned, () if part is PREFILL else route.growth)
        count, holders = remote.num_planned, [holder for holding in planned for holder in holding.holders]
        if len(set(holders)) < len(holders):
            return "a route names a holder twice"
        if planned and route.handover_start:
            return "a route recalls blocks and has holders for them"
        if count > (attempt.length - 1) // self._size:
            return f"a route has holders for {count} blocks, of {attempt.length} tokens, whose last block stays here"
        if part is DECODE:  # they lie there when it comes
            attempt.moved(count)
        self._note(attempt)
        return ""

    def claim(self, attempt: Attempt) -> Actions:
        """Before it begins, its holders say what they keep of the attempt before it."""
        key, old = attempt.request, key_of(attempt.begin.route.request, attempt.begin.route.taken)
        return [
            events.SendLetter(holder, ClaimRequest(key, old, share)) for holder, share in attempt.remote.claim()
        ]

    def found(self, attempt: Attempt, holder: NodeId, num_blocks: int) -> bool:
        """One of them did; whether all have now. What is whole is gone on with."""
        num_whole = attempt.remote.found(holder, num_blocks)
        if num_whole is not None and attempt.begin.part is not DECODE:  # it gets it with the rest
            attempt.moved(num_whole)
        return num_whole is not None

    def move(self, attempt: Attempt, holders: Holders, num_blocks: int, actions: Actions) -> bool:
        """Asks for room for so many more of its blocks. False if it has not so many, or cannot ask now."""
        num_blocks = min(num_blocks, self._num_full(attempt) - attempt.remote.num_planned)
        if num_blocks <= 0:
            return False
        if attempt.remote is ALL_HERE:
            attempt.remote = RemoteKV()
        asked = attempt.remote.ask(Holding(holders, num_blocks))
        actions += attempt.reserve(asked)
        self._note(attempt)
        return bool(asked)

    def reserved(self, attempt: Attempt, holder: NodeId, granted: bool, now: int) -> bool:
        """An answer came; whether it goes on."""
        goes_on = attempt.remote.answered(holder, granted, now + AGAIN_NS)
        self._note(attempt)
        return goes_on

    def take_back(self, attempt: Attempt, event: events.Repay, actions: Actions) -> bool:
        """False where there is no memory for it, now or when it has grown to its end, it does not lie there last, or
        something of it is under way."""
        remote, scheduler, key = attempt.remote, self._scheduler, attempt.request
        is_last = remote.there and remote.there[-1].holders == (event.holder,)
        if not is_last or remote.asked or remote.is_under_way:
            return False
        there = remote.there[-1].num_blocks
        count = min(event.num_blocks, there)
        fits = count > 0 and scheduler.fits(attempt, remote.num_there - count)
        blocks = scheduler.set_aside(count, actions) if fits else ()
        if blocks:
            remote.returning = Return(blocks)
            actions.append(events.Reclaim(key, event.holder, blocks))
            actions.append(events.SendLetter(event.holder, SendBack(key, there - count, count)))
            self._note(attempt)
        return bool(blocks)

    def reclaimed(self, event: events.Reclaimed) -> Attempt | None:
        """It is over. Returns the attempt, if that waits for it still."""
        attempt = self.attempts.get(event.key)
        returning = attempt.remote.returning if attempt is not None else None
        if attempt is not None and returning is not None and event.whole:
            returning.is_here = True
            return attempt
        if attempt is None or returning is None:
            self._scheduler.put_back(self._orphans.pop(event.key, ()))
            return None
        self._scheduler.put_back(returning.blocks)
        attempt.remote.returning = None
        self._note(attempt)
        return attempt

    def settle(self, actions: Actions) -> list[Attempt]:
        """What came to a holder, or home, is there now, if no run uses the attempt. Returns attempts all of whose KV is
        where it is to lie since."""
        through = []
        for attempt in list(self._under_way.values()):
            remote = attempt.remote
            shipment, returning = remote.shipment, remote.returning
            came = shipment is not None and not shipment.to
            is_back = returning is not None and returning.is_here
            if not (came or is_back) or self._scheduler.computes(attempt):
                continue
            if came:
                self._scheduler.shipped(attempt)
                through += [attempt] if remote.is_there else []
            else:
                self._settle_return(attempt, actions)
            self._note(attempt)
        return through

    def _settle_return(self, attempt: Attempt, actions: Actions) -> None:
        """What lies with the holder still is told to it."""
        key, remote, last = attempt.request, attempt.remote, attempt.remote.there[-1]
        assert remote.returning is not None
        [holder], blocks = last.holders, remote.returning.blocks
        left = last.num_blocks - len(blocks)
        self._scheduler.returned(attempt, blocks)
        if not left:
            del remote.holders[holder]
        actions.append(events.SendLetter(holder, Shrink(key, left)))
        actions.append(attempt.spread())

    def ship(self, now: int, actions: Actions) -> None:
        """The next full blocks of each go where they are to lie; at most `FREE_TOKENS` at a time beside decodes. Asks
        for room for what is full of answers that are to lie elsewhere."""
        for key, attempt in self._under_way.items():
            remote = attempt.remote
            # What is cached of it is loaded with its first chunk.
            ready = remote.shipment is None and self._scheduler.num_computed(attempt) > attempt.cached
            if ready and not remote.is_there and not remote.waits:
                holders, first, stop = remote.next_span()
                count = min(self._num_full(attempt), stop) - remote.num_there
                if attempt.state is DECODING:  # the last stays
                    count = min(count, len(attempt.blocks) - 1)
                if attempt.sampled and not attempt.hands_over:
                    count = min(count, max(1, FREE_TOKENS // self._size))
                if count > 0:
                    remote.shipment, blocks = Shipment(count, dict.fromkeys(holders)), attempt.blocks[:count]
                    for holder, _, share in shares(remote.planned):
                        if holder in remote.shipment.to:
                            actions.append(events.Ship(key, holder, first, blocks, share))
            if remote.growing and attempt.state is DECODING and not remote.asked and now >= remote.ask_again_ns:
                self.move(attempt, remote.growing, GROWTH, actions)

    def stop(self, attempt: Attempt) -> None:
        """Nothing more of it is shipped. What is still on its way back stays nobody's until that is over."""
        returning = attempt.remote.returning
        if returning is not None:
            attempt.remote.returning = None
            if returning.is_here:
                self._scheduler.put_back(returning.blocks)
            else:
                self._orphans[attempt.request] = returning.blocks
        self.attempts.pop(attempt.request, None)
        self._under_way.pop(attempt.request, None)

    def end(self, attempt: Attempt, actions: Actions) -> None:
        """It is over here; comes with its `ReleaseResources`."""
        self.stop(attempt)
        actions += [events.SendLetter(holder, Shrink(attempt.request, 0)) for holder in attempt.remote.holders]

    def _num_full(self, attempt: Attempt) -> int:
        return self._scheduler.num_computed(attempt) // self._size

    def _note(self, attempt: Attempt) -> None:
        """Its books changed."""
        key, remote = attempt.request, attempt.remote
        for book, belongs in (
            (self.attempts, remote.num_planned or remote.growing or remote.asked),
            (self._under_way, remote.is_under_way),
        ):
            if belongs:
                book[key] = attempt
            else:
                book.pop(key, None)

    def check_idle(self) -> None:
        assert not self._under_way and not self._orphans, "KV is still on its way to another node, or back"
