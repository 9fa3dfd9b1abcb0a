"""KV of an attempt on other nodes: what its home asks of holders. `guests.py` is the holder's side.

    home ──Reserve──> holder ──Reserved──> home         when it has memory, or to move some while it decodes
         ══blocks══>         ──Shipped───>              whole ones, in their order, as they are computed
         ──Vacate───>                                   when the home is through with it
    next ──Claim────> holder ──Found─────> next         before it begins, if the home before it is gone

A holder says at once whether there is room, and an attempt asks when it has memory where it is computed and where it
decodes: so of two attempts neither waits for what the other has. A prefill node and the decode node that follows it
each ask for the same room, and the holder keeps it until both left.
"""

from __future__ import annotations

from isthmus.attempts import Holding, holdings_of, key_of
from isthmus.node import events
from isthmus.node.attempt import Attempt, shares
from isthmus.node.letters import Claim, Reserve, Vacate
from isthmus.scheduler import Actions, Scheduler
from isthmus.scheduler.sequence import DECODING
from isthmus.types import DECODE, NS_PER_S, PREFILL, NodeId, RequestId

AGAIN_NS = NS_PER_S // 4
"""So long holders that had no room for more of an answer are not asked for that again."""
FREE_TOKENS = 16
"""That are shipped in an iteration beside decodes: so much costs nothing, twice as much 8.6 % (Infinite-LLM, section on
overlap)."""
GROWTH = 8
"""Blocks of an answer for which holders are asked at a time, at most."""
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
        found = list(shares(attempt.holdings))
        attempt.claimed = {holder: None for holder, _, _ in found}
        attempt.holders = dict.fromkeys(attempt.claimed)
        return [events.Tell(holder, Claim(key, old, share)) for holder, _, share in found]

    def found(self, attempt: Attempt, holder: NodeId, num_blocks: int) -> bool:
        """One of them did; whether all have now. What is whole is gone on with, up to the first block that one of them
        does not have: all are of tokens that are known, since no more are to lie there."""
        claimed = attempt.claimed
        if claimed.get(holder, 0) is not None:
            return False
        claimed[holder] = num_blocks
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

    @staticmethod
    def has_some(attempt: Attempt, holder: NodeId) -> bool:
        """Whether some of it lies with this holder, which is asked for more, or is planned to."""
        holdings = attempt.held if attempt.more is None else attempt.holdings
        return any(holder in holding.holders for holding in holdings)

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
        wanted = [each for each in shares(holdings) if each[0] in attempt.asked]
        actions += [
            events.Tell(holder, Reserve(attempt.request, count, share)) for holder, count, share in wanted
        ]
        return True

    def reserved(self, attempt: Attempt, holder: NodeId, granted: bool, now: int) -> bool:
        """An answer came; whether it goes on. Without room for more it does as it was."""
        del attempt.asked[holder]
        if not granted:
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
                for holder, _, share in shares(attempt.holdings):
                    if holder in attempt.shipping_to:
                        actions.append(events.Ship(key, holder, first, blocks, share))

    @staticmethod
    def _next(attempt: Attempt) -> tuple[Holders, int, int]:
        """Holders of the next block, how many of the attempt they have, and the first block that is not for them."""
        stop = 0
        for holding in attempt.holdings:
            start, stop = stop, stop + holding.num_blocks
            if attempt.num_held < stop:
                return holding.holders, attempt.num_held - start, stop
        raise AssertionError("all that is to lie elsewhere does")

    def shipped(self, attempt: Attempt, holder: NodeId, stop: int) -> None:
        """What was on its way to one of its holders is there."""
        if holder in attempt.shipping_to:
            _, first, _ = self._next(attempt)
            if stop >= first + attempt.num_shipping:
                del attempt.shipping_to[holder]
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
        actions += [events.Tell(holder, Vacate(attempt.request)) for holder in attempt.holders]

    def check_idle(self) -> None:
        assert not self._moving and not self._growing, "KV is still on its way to another node"


def _with(holdings: tuple[Holding, ...], more: Holding) -> tuple[Holding, ...]:
    """With more at the end, of the same holders or of others."""
    if not holdings or holdings[-1].holders != more.holders:
        return (*holdings, more)
    return (*holdings[:-1], Holding(more.holders, holdings[-1].num_blocks + more.num_blocks))
