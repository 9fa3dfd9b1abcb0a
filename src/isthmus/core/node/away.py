"""KV of an attempt on other nodes: what its home asks of holders, and what a holder does.

    home ──ReserveRequest──> holder ──ReserveReply──────> home      when it has memory, or moves blocks as it decodes
         ══blocks══════════>        ──ShipmentConfirmed─>           full ones, in their order, as they are computed
         ──SendBack────────>        ══blocks════════════>           the last of them, when the conductor says `Repay`
         ──Shrink──────────>                                        so many blocks stay: none, at last
    next ──ClaimRequest────> holder ──ClaimReply────────> next      before it begins, if the home before it is gone

A holder answers at once, and an attempt asks only when it has memory where it is computed and where it decodes, so
no two attempts wait for each other's memory. Prefill and decode node of an attempt ask for the same room, which the
holder keeps until both left. Blocks on their way home are attended to at the holder until all are here and no run
touches the attempt. Only an attempt's last remote blocks come home: the others stay the leading ones at their holder.
"""

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
"""How long a holder keeps KV whose home is gone: the head notices within seconds, and routes the next attempt."""


class _Guest:
    """A share of another node's attempt, in `blocks` of the engine here."""

    __slots__ = ("blocks", "lease_ns", "needed", "num_stowed", "share")

    def __init__(self, share: Share, blocks: Blocks = (), num_stowed: int = 0) -> None:
        self.share, self.blocks = share, blocks
        self.num_stowed = num_stowed  # leading blocks that are whole
        self.needed: dict[NodeId, None] = {}  # nodes that asked for it and have not left it
        self.lease_ns = 0  # kept until then, though no node needs it


class HolderSide:
    """KV of other nodes' attempts here. `kv_heads`: number of equal parts into which the KV of a token can be cut; 0:
    nothing is held for others."""

    def __init__(self, scheduler: Scheduler, kv_heads: int) -> None:
        self._scheduler, self._kv_heads = scheduler, kv_heads
        self._guests: dict[RequestId, _Guest] = {}

    def reserve(self, peer: NodeId, asked: ReserveRequest, now: int, actions: Actions) -> None:
        """Grants room at once, or refuses it. One block of the engine has room for a share of `parts` blocks' heads."""
        key, share, guest = asked.key, asked.share, self._guests.get(asked.key)
        can = asked.num_blocks > 0 and self._can_hold(share) and (guest is None or guest.share == share)
        granted = can and self._has_room(key, share, -(-asked.num_blocks // share.parts), actions)
        if granted:
            guest = self._guests[key]
            guest.needed[peer] = None
            actions.append(events.Host(key, peer, share, guest.blocks))
        actions.append(events.SendLetter(peer, ReserveReply(key, granted)))

    def _has_room(self, key: RequestId, share: Share, count: int, actions: Actions) -> bool:
        """Sets room for `count` blocks in all aside. Returns False if there is none."""
        guest = self._guests.get(key) or _Guest(share)
        if count > len(guest.blocks):
            # One spare block for each share held here, which may grow.
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
        """Gives the KV of an attempt whose home is gone to the next attempt; nodes of the old one are heard no more."""
        key, old, share = claim.key, self._guests.get(claim.old), claim.share
        if key not in self._guests and old is not None and self._can_hold(share):
            del self._guests[claim.old]
            num_stowed = old.num_stowed if old.share == share else 0
            self._guests[key] = _Guest(share, old.blocks, num_stowed)
            actions.append(events.Rekey(claim.old, key, peer, share, num_stowed))
        elif key in self._guests:  # claimed before by the other node of the attempt
            actions.append(events.Host(key, peer, self._guests[key].share, self._guests[key].blocks))
        guest = self._guests.get(key)
        if guest is not None:
            guest.needed[peer] = None
        found = guest.num_stowed if guest is not None and guest.share == share else 0
        actions.append(events.SendLetter(peer, ClaimReply(key, found)))

    def stowed(self, event: events.ShipmentStored, now: int, actions: Actions) -> None:
        """Counts the blocks that are whole, and confirms new ones to their home."""
        guest = self._guests.get(event.key)
        if guest is None or event.peer not in guest.needed:
            return
        stop = min(event.stop, len(guest.blocks) * guest.share.parts)  # room may have shrunk meanwhile
        is_more, guest.num_stowed = stop > guest.num_stowed, stop
        if is_more or event.damaged:
            actions.append(events.SendLetter(event.peer, ShipmentConfirmed(event.key, stop, event.damaged)))

    def send_back(self, peer: NodeId, wanted: SendBack, now: int, actions: Actions) -> None:
        """Ships whole blocks home; a request for others is void, for its sender was told which are whole."""
        guest, stop = self._guests.get(wanted.key), wanted.first + wanted.num_blocks
        if guest is None or peer not in guest.needed or guest.share.parts > 1:
            return
        if 0 <= wanted.first < stop <= guest.num_stowed:
            actions.append(events.Ship(wanted.key, peer, 0, guest.blocks[wanted.first : stop]))

    def shrink(self, peer: NodeId, wanted: Shrink, now: int, actions: Actions) -> bool:
        """Gives up room that a home needs no more. Returns whether blocks are free. A home that keeps some of it is the
        decode node, the last that needs it."""
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
        """Keeps a lost home's KV for LEASE_NS, for the next attempt. Returns whether blocks are free."""
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
        """Frees KV that no node needs and whose lease is over. Returns whether there was any."""
        over = [key for key, guest in self._guests.items() if not guest.needed and guest.lease_ns <= now]
        for key in over:
            self._scheduler.put_back(self._guests.pop(key).blocks)
            actions.append(events.Unhost(key))
        return bool(over)

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine set aside for other nodes' attempts."""
        return sum([len(guest.blocks) for guest in self._guests.values()])

    def num_stowed(self, key: RequestId) -> int:
        """Leading blocks of an attempt's share that are whole."""
        guest = self._guests.get(key)
        return guest.num_stowed if guest is not None else 0

    def check_idle(self) -> None:
        assert not self._guests, "room for another node's KV was never left"


AGAIN_NS = NS_PER_S // 4
"""Pause before holders that had no room for more of an answer are asked again."""
FREE_TOKENS = 16
"""Tokens shipped in an iteration beside decodes: 16 cost nothing, 32 cost 8.6 % (Infinite-LLM, section on overlap)."""
GROWTH = 8
"""Most blocks of an answer for which holders are asked at a time."""


class HomeSide:
    """Attempts of this node with KV on other nodes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._size = scheduler, scheduler.limits.block_size
        self.attempts: dict[RequestId, Attempt] = {}
        """All attempts that have, or are to have, KV elsewhere."""
        self._under_way: dict[RequestId, Attempt] = {}  # those whose KV moves, or may begin to
        self._orphans: dict[RequestId, Blocks] = {}  # KV of attempts that are over still comes back into these

    def begin(self, attempt: Attempt) -> str:
        """Plans its leading blocks where its route says. Returns why that cannot be, else an empty text."""
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
        if part is DECODE:  # the prefill node ships them before it hands over
            attempt.moved(count)
        self._note(attempt)
        return ""

    def claim(self, attempt: Attempt) -> Actions:
        """Asks its holders, before it begins, how much they keep of the attempt before it."""
        key, old = attempt.request, key_of(attempt.begin.route.request, attempt.begin.route.taken)
        return [
            events.SendLetter(holder, ClaimRequest(key, old, share)) for holder, share in attempt.remote.claim()
        ]

    def found(self, attempt: Attempt, holder: NodeId, num_blocks: int) -> bool:
        """Notes a holder's reply. Returns whether all have replied; then whole blocks need no computing."""
        num_whole = attempt.remote.found(holder, num_blocks)
        if num_whole is not None and attempt.begin.part is not DECODE:
            attempt.moved(num_whole)
        return num_whole is not None

    def move(self, attempt: Attempt, holders: Holders, num_blocks: int, actions: Actions) -> bool:
        """Asks holders for room for more of its blocks. Returns False if it has no full ones, or cannot ask now."""
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
        """Notes a holder's reply. Returns whether the attempt goes on."""
        goes_on = attempt.remote.answered(holder, granted, now + AGAIN_NS)
        self._note(attempt)
        return goes_on

    def take_back(self, attempt: Attempt, event: events.Repay, actions: Actions) -> bool:
        """Asks a holder for blocks back. Returns False if there is no memory for them, now or at the attempt's end, if
        they are not its last remote ones, or if any of its KV moves."""
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
        """Notes the end of a return. Returns its attempt, unless that is over."""
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
        """Moves arrived shipments and returns in the books of attempts that no run uses. Returns attempts whose last
        planned blocks arrived."""
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
        """Takes returned blocks into the attempt, and has the holder shrink."""
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
        """Ships the next full blocks of each attempt, at most `FREE_TOKENS` at a time beside decodes; asks for room for
        full blocks of answers that grow at holders."""
        for key, attempt in self._under_way.items():
            remote = attempt.remote
            # Its cached prefix is loaded only with its first chunk.
            ready = remote.shipment is None and self._scheduler.num_computed(attempt) > attempt.cached
            if ready and not remote.is_there and not remote.waits:
                holders, first, stop = remote.next_span()
                count = min(self._num_full(attempt), stop) - remote.num_there
                if attempt.state is DECODING:  # the last block stays
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
        """Ships no more of it. Blocks into which KV still comes back stay set aside until that is over."""
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
        """Tells its holders that it is over; comes with its `ReleaseResources`."""
        self.stop(attempt)
        actions += [events.SendLetter(holder, Shrink(attempt.request, 0)) for holder in attempt.remote.holders]

    def _num_full(self, attempt: Attempt) -> int:
        return self._scheduler.num_computed(attempt) // self._size

    def _note(self, attempt: Attempt) -> None:
        """Puts an attempt whose remote KV changed into the books where it belongs."""
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
