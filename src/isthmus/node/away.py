"""KV of an attempt on other nodes: what its home asks of holders, and what a holder keeps for others.

    home ──Reserve──> holder: Asked ──Host──> home: Reserved        when it has memory, or to move some while it decodes
         ──Ship────>                                Shipped         whole blocks, in their order, as they are computed
         ──Vacate──> holder: Left ──Unhost                          when the home is through with it

A holder says at once whether there is room, and an attempt asks when it has memory where it is computed and where it
decodes: so of two attempts neither waits for what the other has. A prefill node and the decode node that follows it
each ask for the same room, and the holder keeps it until both left.
"""

from __future__ import annotations

from isthmus.attempts import Holding
from isthmus.node import events
from isthmus.node.attempt import Attempt, reserves
from isthmus.scheduler import Actions, Scheduler
from isthmus.types import DECODE, NodeId, RequestId

FREE_TOKENS = 16
"""That are shipped in an iteration beside decodes: so much costs nothing, twice as much 8.6 % (Infinite-LLM, section on
overlap)."""


Holders = tuple[NodeId, ...]
"""Who share the blocks of a holding."""


class Away:
    """At home: attempts with KV elsewhere."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._size = scheduler, scheduler.limits.block_size
        self.attempts: dict[RequestId, Attempt] = {}
        """All that have, or are to have, KV elsewhere."""
        self._moving: dict[RequestId, Attempt] = {}  # not all that is to lie elsewhere does

    def begin(self, attempt: Attempt) -> str:
        """Its leading blocks are to lie where its route says. Returns why that cannot be, or nothing."""
        holdings = attempt.begin.route.holdings
        count = sum([holding.num_blocks for holding in holdings])
        holders = [holder for holding in holdings for holder in holding.holders]
        if len(set(holders)) < len(holders):
            return "a route names a holder twice"
        if attempt.begin.route.handover_start:
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

    def move(self, attempt: Attempt, holders: Holders, num_blocks: int, actions: Actions) -> None:
        """Asks for room for so many more of its blocks, unless one of these has some before those of another: what lies
        with a holder follows each other."""
        last = attempt.holdings[-1:]
        others, there = attempt.holdings, 0
        if last and last[0].holders == holders:
            others, there = others[:-1], last[0].num_blocks
        most = self._scheduler.num_computed(attempt) // self._size - attempt.num_away
        num_blocks = min(num_blocks, most)
        taken = {holder for holding in others for holder in holding.holders}
        if num_blocks <= 0 or attempt.asked or not taken.isdisjoint(holders):
            return
        attempt.asked = dict.fromkeys(holders)
        attempt.more = Holding(holders, num_blocks)
        attempt.holders |= attempt.asked
        self.attempts[attempt.request] = attempt
        actions += reserves(attempt.request, Holding(holders, there + num_blocks))

    def reserved(self, attempt: Attempt, event: events.Reserved) -> bool:
        """An answer came; whether it goes on. Without room for more it does as it was."""
        del attempt.asked[event.holder]
        if not event.granted:
            if attempt.more is None:
                return False
            attempt.more = Holding(attempt.more.holders, 0)
        if attempt.asked:
            return True
        more, attempt.more = attempt.more, None
        if more is not None and more.num_blocks:
            last = attempt.holdings[-1:]
            if last and last[0].holders == more.holders:
                more = Holding(more.holders, last[0].num_blocks + more.num_blocks)
                attempt.keep_away((*attempt.holdings[:-1], more))
            else:
                attempt.keep_away((*attempt.holdings, more))
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
        self.attempts.pop(attempt.request, None)
        self._moving.pop(attempt.request, None)

    def end(self, attempt: Attempt, actions: Actions) -> None:
        """It is over here; comes with its `Release`."""
        self.stop(attempt)
        actions += [events.Vacate(attempt.request, holder) for holder in attempt.holders]

    def check_idle(self) -> None:
        assert not self._moving, "KV is still on its way to another node"


class Guests:
    """At a holder: whose KV lies here, and who needs it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._needed: dict[RequestId, set[NodeId]] = {}

    def asked(self, event: events.Asked, actions: Actions) -> None:
        """Room that there is, is given at once; nobody waits for it. Where a block has all heads there is room for as
        many with a part of them as there are parts."""
        blocks = self._scheduler.host(event.key, -(-event.num_blocks // event.parts), actions)
        if blocks:
            self._needed.setdefault(event.key, set()).add(event.peer)
        actions.append(events.Host(event.key, event.peer, blocks))

    def left(self, event: events.Left, actions: Actions) -> bool:
        """Whether nobody needs it any more, and its blocks are free."""
        needed = self._needed.get(event.key, set())
        if event.peer not in needed:
            return False
        needed.remove(event.peer)
        if needed:
            return False
        del self._needed[event.key]
        self._scheduler.unhost(event.key)
        actions.append(events.Unhost(event.key))
        return True

    def check_idle(self) -> None:
        assert not self._needed, "room for another node's KV was never left"
