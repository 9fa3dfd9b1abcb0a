"""KV of an attempt on other nodes: what its home asks of holders, and what a holder keeps for others.

    home ──Reserve──> holder: Asked ──Host──> home: Reserved        when it has memory, or to move some while it decodes
         ──Ship────>                                Shipped         whole blocks, in their order, as they are computed
         ──Vacate──> holder: Left ──Unhost                          when the home is through with it
    next ──Claim──>  holder: Claimed ──Rekey──> next: Found         before it begins, if the home before it is gone

A holder says at once whether there is room, and an attempt asks when it has memory where it is computed and where it
decodes: so of two attempts neither waits for what the other has. A prefill node and the decode node that follows it
each ask for the same room, and the holder keeps it until both left.
"""

from __future__ import annotations

from isthmus.attempts import Holding, holdings_of, key_of
from isthmus.node import events
from isthmus.node.attempt import Attempt, shares
from isthmus.scheduler import Actions, Scheduler
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

Holders = tuple[NodeId, ...]
"""Who share the blocks of a holding."""


class Away:
    """At home: attempts with KV elsewhere."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._size = scheduler, scheduler.limits.block_size
        self.attempts: dict[RequestId, Attempt] = {}
        """All that have, or are to have, KV elsewhere."""
        self._moving: dict[RequestId, Attempt] = {}  # not all that is to lie elsewhere does
        self._growing: dict[RequestId, Attempt] = {}  # what fills is to lie elsewhere, too

    def begin(self, attempt: Attempt) -> str:
        """Its leading blocks are to lie where its route says. Returns why that cannot be, or nothing."""
        route = attempt.begin.route
        if route.growth and attempt.begin.part is not PREFILL:
            self._growing[attempt.request], attempt.grows = attempt, True
        holdings = holdings_of(route, attempt.length, self._size)
        if not holdings:
            return ""
        count = sum([holding.num_blocks for holding in holdings])
        holders = [holder for holding in holdings for holder in holding.holders]
        if len(set(holders)) < len(holders):
            return "a route names a holder twice"
        if route.handover_start:
            return "a route recalls blocks and has holders for them"
        if count > (attempt.length - 1) // self._size:
            return f"a route has holders for {count} blocks, of {attempt.length} tokens, whose last block stays here"
        attempt.keep_away(holdings)
        self.attempts[attempt.request] = attempt
        if attempt.begin.part is DECODE:  # they lie there when it comes
            attempt.moved(count)
        else:
            attempt.waits = True
        return ""

    def claim(self, attempt: Attempt) -> Actions:
        """Before it begins, its holders say what they keep of the attempt before it."""
        route, key = attempt.begin.route, attempt.request
        old = key_of(route.request, route.taken)
        found = [events.Claim(key, holder, old, share) for holder, _, share in shares(attempt.holdings)]
        attempt.claimed = {action.holder: None for action in found}
        attempt.holders = dict.fromkeys(attempt.claimed)
        return [*found]

    def found(self, attempt: Attempt, event: events.Found) -> bool:
        """One of them did; whether all have now. What is whole is gone on with, up to the first block that one of them
        does not have: all are of tokens that are known, since no more are to lie there."""
        claimed = attempt.claimed
        if claimed.get(event.holder, 0) is not None:
            return False
        claimed[event.holder] = event.num_blocks
        if None in claimed.values():
            return False
        count = 0
        for holding in attempt.holdings:
            whole = min([holding.num_blocks, *[claimed[holder] or 0 for holder in holding.holders]])
            count += whole
            if whole < holding.num_blocks:
                break
        if attempt.begin.part is not DECODE:  # it gets it with the rest
            attempt.moved(count)
        return True

    def grow(self, now: int, actions: Actions) -> None:
        """Asks for room for what is full of answers that are to lie elsewhere."""
        for attempt in self._growing.values():
            if attempt.state is DECODING and not attempt.asked and now >= attempt.ask_again_ns:
                self.move(attempt, attempt.begin.route.growth, GROWTH, actions)

    def move(self, attempt: Attempt, holders: Holders, num_blocks: int, actions: Actions) -> bool:
        """Asks for room for so many more of its blocks. False if it has not so many, some are coming back, or one of
        these has some before those of another: what lies with a holder follows each other."""
        most = self._scheduler.num_computed(attempt) // self._size - attempt.num_away
        num_blocks = min(num_blocks, most)
        if num_blocks <= 0 or attempt.asked or attempt.returning:
            return False
        holdings = _with(attempt.holdings, Holding(holders, num_blocks))
        if not {holder for holding in holdings[:-1] for holder in holding.holders}.isdisjoint(holders):
            return False
        attempt.asked, attempt.has_asked = dict.fromkeys(holders), True
        attempt.more = Holding(holders, num_blocks)
        attempt.holders |= attempt.asked
        self.attempts[attempt.request] = attempt
        actions += [
            events.Reserve(attempt.request, *each) for each in shares(holdings) if each[0] in attempt.asked
        ]
        return True

    def reserved(self, attempt: Attempt, event: events.Reserved, now: int) -> bool:
        """An answer came; whether it goes on. Without room for more it does as it was."""
        del attempt.asked[event.holder]
        if not event.granted:
            if attempt.more is None:
                return False
            attempt.more = Holding(attempt.more.holders, 0)
            attempt.ask_again_ns = now + AGAIN_NS
        if attempt.asked:
            return True
        more, attempt.more = attempt.more, None
        if more is not None and more.num_blocks:
            attempt.keep_away(_with(attempt.holdings, more))
        attempt.waits = False
        if attempt.num_held < attempt.num_away:
            self._moving[attempt.request] = attempt
        return True

    def ship(self, actions: Actions) -> None:
        """The next full blocks of each go where they are to lie; at most `FREE_TOKENS` at a time beside decodes."""
        for key, attempt in self._moving.items():
            computed = self._scheduler.num_computed(attempt)
            if attempt.num_shipping or attempt.landed or computed <= attempt.cached:
                continue  # what is cached of it is loaded with its first chunk
            full = min(computed // self._size, attempt.num_away)
            holders, first, stop = self._next(attempt)
            count = min(full, stop) - attempt.num_held
            if attempt.state is DECODING:  # the last stays
                count = min(count, len(attempt.blocks) - 1)
            if attempt.sampled and not attempt.departs:
                count = min(count, max(1, FREE_TOKENS // self._size))
            if count > 0:
                attempt.num_shipping, blocks = count, attempt.blocks[:count]
                attempt.shipping_to = dict.fromkeys(holders)
                actions += [events.Ship(key, holder, first, blocks) for holder in holders]

    @staticmethod
    def _next(attempt: Attempt) -> tuple[Holders, int, int]:
        """Holders of the next block, how many of the attempt they have, and the first block that is not for them."""
        stop = 0
        for holding in attempt.holdings:
            start, stop = stop, stop + holding.num_blocks
            if attempt.num_held < stop:
                return holding.holders, attempt.num_held - start, stop
        raise AssertionError("all that is to lie elsewhere does")

    def shipped(self, attempt: Attempt, event: events.Shipped) -> None:
        """What was on its way to one of its holders is there."""
        if event.holder in attempt.shipping_to:
            _, first, _ = self._next(attempt)
            if event.stop >= first + attempt.num_shipping:
                del attempt.shipping_to[event.holder]
                attempt.landed = not attempt.shipping_to

    def settle(self) -> list[Attempt]:
        """Those whose shipped blocks no run uses are elsewhere now; returns who has nothing left to ship."""
        if not self._moving:
            return []
        for attempt in self._moving.values():
            if attempt.landed and not self._scheduler.computes(attempt):
                attempt.landed = False
                self._scheduler.shipped(attempt, attempt.num_shipping)
        through = [attempt for attempt in self._moving.values() if attempt.num_held == attempt.num_away]
        for attempt in through:
            del self._moving[attempt.request]
        return through

    def stop(self, attempt: Attempt) -> None:
        """Nothing more of it is shipped."""
        for books in (self.attempts, self._moving, self._growing):
            books.pop(attempt.request, None)

    def end(self, attempt: Attempt, actions: Actions) -> None:
        """It is over here; comes with its `Release`."""
        self.stop(attempt)
        actions += [events.Vacate(attempt.request, holder) for holder in attempt.holders]

    def check_idle(self) -> None:
        assert not self._moving and not self._growing, "KV is still on its way to another node"


def _with(holdings: tuple[Holding, ...], more: Holding) -> tuple[Holding, ...]:
    """With more at the end, of the same holders or of others."""
    if not holdings or holdings[-1].holders != more.holders:
        return (*holdings, more)
    return (*holdings[:-1], Holding(more.holders, holdings[-1].num_blocks + more.num_blocks))


class Guests:
    """At a holder: whose KV lies here, and who needs it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._needed: dict[RequestId, set[NodeId]] = {}
        self._leases: dict[RequestId, int] = {}  # until when it is kept, though nobody that is here needs it

    def asked(self, event: events.Asked, actions: Actions) -> None:
        """Room that there is, is given at once; nobody waits for it. Where a block has all heads there is room for as
        many with a part of them as there are parts."""
        blocks = self._scheduler.host(event.key, -(-event.num_blocks // event.share.parts), actions)
        if blocks:
            self._needed.setdefault(event.key, set()).add(event.peer)
        actions.append(events.Host(event.key, event.peer, blocks))

    def claimed(self, event: events.Claimed, actions: Actions) -> None:
        """The attempt before it is over: nobody who asked in its name is heard any more."""
        key, old, needed = event.key, event.old, self._needed
        is_new = old in needed and key not in needed
        if is_new:
            self._scheduler.rekey(old, key)
            self._leases.pop(old, None)
            del needed[old]
            needed[key] = set()
        if key in needed:
            needed[key].add(event.peer)
        actions.append(events.Rekey(old if is_new else NOBODY, key, event.peer))

    def shrunk(self, event: events.Shrunk, actions: Actions) -> bool:
        """Whether some of its room is free: who asks decodes, and so is the last that needs it."""
        blocks = self._scheduler.num_hosted_of(event.key)
        if event.peer not in self._needed.get(event.key, ()) or not 0 < event.num_blocks < blocks:
            return False
        self._scheduler.shrink(event.key, event.num_blocks)
        actions.append(events.Trim(event.key, event.num_blocks))
        return True

    def left(self, event: events.Left, now: int, actions: Actions) -> bool:
        """Whether nobody needs it any more, and its blocks are free. If one was lost it stays for a while: another may
        go on with it."""
        key, needed = event.key, self._needed.get(event.key, set())
        if event.peer not in needed:
            return False
        needed.remove(event.peer)
        if event.lost:
            self._leases[key] = now + LEASE_NS
            actions.append(events.Wake(now + LEASE_NS))
        return not needed and self._expire(key, now, actions)

    def expire(self, now: int, actions: Actions) -> bool:
        """Whether any blocks are free since nobody came for them."""
        if not self._leases:
            return False
        freed = [self._expire(key, now, actions) for key in list(self._leases)]
        return any(freed)

    def _expire(self, key: RequestId, now: int, actions: Actions) -> bool:
        if self._leases.get(key, 0) > now:
            return False
        self._leases.pop(key, None)
        if self._needed[key]:
            return False
        del self._needed[key]
        self._scheduler.unhost(key)
        actions.append(events.Unhost(key))
        return True

    def check_idle(self) -> None:
        assert not self._needed and not self._leases, "room for another node's KV was never left"
