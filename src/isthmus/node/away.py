"""KV of an attempt on other nodes: what its home asks of holders, and what a holder keeps for others.

    home ──Reserve──> holder: Asked ──Host──> home: Reserved        when it has memory, or to move some while it decodes
         ──Ship────>                                Shipped         whole blocks, in their order, as they are computed
         ──Reclaim─>                                Reclaimed       the last of them come home: the conductor says so
         ──Shrink──> holder: Shrunk ──Trim                          and so much less is kept there
         ──Vacate──> holder: Left ──Unhost                          when the home is through with it
    next ──Claim──>  holder: Claimed ──Rekey──> next: Found         before it begins, if the home before it is gone

A holder says at once whether there is room, and an attempt asks when it has memory where it is computed and where it
decodes: so of two attempts neither waits for what the other has. A prefill node and the decode node that follows it
each ask for the same room, and the holder keeps it until both left. What comes home is attended to at the holder until
all of it is here and no run touches the attempt. Only what lay elsewhere last comes, so what lies with a holder stays
its leading blocks there.
"""

from __future__ import annotations

from isthmus.attempts import Holding, key_of
from isthmus.node import events
from isthmus.node.attempt import Attempt
from isthmus.node.extent import holdings_of
from isthmus.scheduler import Actions, Scheduler
from isthmus.scheduler.pool import Blocks
from isthmus.scheduler.remote import ALL_HERE, Holders, RemoteKV, Return, Shipment
from isthmus.scheduler.sequence import DECODING
from isthmus.types import DECODE, NS_PER_S, PREFILL, NodeId, RequestId

AGAIN_NS = NS_PER_S // 4
"""So long holders that had no room for more of an answer are not asked for that again."""
LEASE_NS = 5 * NS_PER_S
"""So long KV is kept whose home is gone: the head finds that out within seconds, and routes the next attempt."""
FREE_TOKENS = 16
"""That are shipped in an iteration beside decodes: so much costs nothing, twice as much 8.6 % (Infinite-LLM, section on
overlap)."""
GROWTH = 8
"""Blocks of an answer for which holders are asked at a time, at most."""
NOBODY = RequestId("")


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
        return [events.Claim(key, holder, old, share) for holder, share in attempt.remote.claim()]

    def found(self, attempt: Attempt, event: events.Found) -> bool:
        """One of them did; whether all have now. What is whole is gone on with."""
        num_blocks = attempt.remote.found(event.holder, event.num_blocks)
        if num_blocks is not None and attempt.begin.part is not DECODE:  # it gets it with the rest
            attempt.moved(num_blocks)
        return num_blocks is not None

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

    def reserved(self, attempt: Attempt, event: events.Reserved, now: int) -> bool:
        """An answer came; whether it goes on."""
        goes_on = attempt.remote.answered(event.holder, event.granted, now + AGAIN_NS)
        self._note(attempt)
        return goes_on

    def take_back(self, attempt: Attempt, event: events.Return, actions: Actions) -> bool:
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
            actions.append(events.Reclaim(key, event.holder, there - count, blocks))
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
        if left:
            actions.append(events.Shrink(key, holder, left))
        else:
            del remote.holders[holder]
            actions.append(events.Vacate(key, holder))
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
                    actions += [events.Ship(key, holder, first, blocks) for holder in holders]
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
        """It is over here; comes with its `Release`."""
        self.stop(attempt)
        actions += [events.Vacate(attempt.request, holder) for holder in attempt.remote.holders]

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


class Guest:
    """KV of one attempt of another node."""

    __slots__ = ("blocks", "lease_ns", "needed")

    def __init__(self) -> None:
        self.blocks: Blocks = ()
        self.needed: set[NodeId] = set()  # nodes that have not left it
        self.lease_ns = 0  # until when it is kept, though nobody that is here needs it


class Guests:
    """At a holder: whose KV lies here, and who needs it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._guests: dict[RequestId, Guest] = {}

    @property
    def num_blocks(self) -> int:
        return sum([len(guest.blocks) for guest in self._guests.values()])

    def asked(self, event: events.Asked, actions: Actions) -> None:
        """Room that there is, is given at once; nobody waits for it. Where a block has all heads there is room for as
        many with a part of them as there are parts."""
        guest = self._guests.get(event.key) or Guest()
        blocks, count = guest.blocks, -(-event.num_blocks // event.share.parts)
        if count > len(blocks):
            # One spare block for each guest, which may grow.
            spare = 0 if blocks else min(len(self._guests), self._scheduler.pool.num_blocks // 8)
            more = self._scheduler.set_aside(count - len(blocks), actions, spare)
            blocks = blocks + more if more else ()
        if blocks:
            self._guests[event.key], guest.blocks = guest, blocks
            guest.needed.add(event.peer)
        actions.append(events.Host(event.key, event.peer, blocks))

    def claimed(self, event: events.Claimed, actions: Actions) -> None:
        """The attempt before it is over: nobody who asked in its name is heard any more."""
        key, old, guests = event.key, event.old, self._guests
        is_new = old in guests and key not in guests
        if is_new:
            guests[key] = guests.pop(old)
            guests[key].needed, guests[key].lease_ns = set(), 0
        if key in guests:
            guests[key].needed.add(event.peer)
        actions.append(events.Rekey(old if is_new else NOBODY, key, event.peer))

    def shrunk(self, event: events.Shrunk, actions: Actions) -> bool:
        """Whether some of its room is free: who asks decodes, and so is the last that needs it."""
        guest, count = self._guests.get(event.key), event.num_blocks
        if guest is None or event.peer not in guest.needed or not 0 < count < len(guest.blocks):
            return False
        self._scheduler.put_back(guest.blocks[count:])
        guest.blocks = guest.blocks[:count]
        actions.append(events.Trim(event.key, count))
        return True

    def left(self, event: events.Left, now: int, actions: Actions) -> bool:
        """Whether nobody needs it any more, and its blocks are free. If one was lost it stays for a while: another may
        go on with it."""
        guest = self._guests.get(event.key)
        if guest is None or event.peer not in guest.needed:
            return False
        guest.needed.remove(event.peer)
        if event.lost:
            guest.lease_ns = now + LEASE_NS
            actions.append(events.Wake(guest.lease_ns))
        return self.expire(now, actions)

    def expire(self, now: int, actions: Actions) -> bool:
        """Whether any blocks are free since nobody came for them."""
        over = [key for key, guest in self._guests.items() if not guest.needed and guest.lease_ns <= now]
        for key in over:
            self._scheduler.put_back(self._guests.pop(key).blocks)
            actions.append(events.Unhost(key))
        return bool(over)

    def check_idle(self) -> None:
        assert not self._guests, "room for another node's KV was never left"
