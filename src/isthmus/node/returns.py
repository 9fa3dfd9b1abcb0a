"""KV of an attempt comes home from its holders again.

    home ──SendBack──> holder       when the conductor says so and there is memory at home
         <══════════                whole blocks, the last of those that lie elsewhere: `Reclaimed`
         ──Shrink, or Vacate if nothing is left there──> holder

It is attended to at the holder until all that comes is here and no run touches the attempt. Only what lay elsewhere
last comes back, so what lies with a holder stays its leading blocks there.
"""

from __future__ import annotations

from isthmus.node import events
from isthmus.node.attempt import Attempt
from isthmus.node.letters import SendBack, Shrink, Vacate
from isthmus.scheduler import Actions, Scheduler
from isthmus.types import RequestId


class Returns:
    """At home: attempts of which something comes back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._attempts: dict[RequestId, Attempt] = {}

    def begin(self, attempt: Attempt, event: events.Return, actions: Actions) -> bool:
        """False where there is no memory for it, now or when it has grown to its end, it does not lie there last, or
        something of it is under way."""
        holdings = attempt.holdings
        moves = attempt.asked or attempt.returning or attempt.grows or attempt.num_held < attempt.num_away
        if moves or not holdings or holdings[-1].holders != (event.holder,):
            return False
        there = holdings[-1].num_blocks
        count = min(event.num_blocks, there)
        if not self._scheduler.fits(attempt, attempt.num_away - count):
            return False
        blocks = self._scheduler.reclaim(attempt, count, actions) if count > 0 else ()
        if not blocks:
            return False
        attempt.returning = count
        self._attempts[attempt.request] = attempt
        actions.append(events.Reclaim(attempt.request, event.holder, blocks))
        actions.append(events.Tell(event.holder, SendBack(attempt.request, there - count, count)))
        return True

    def reclaimed(self, event: events.Reclaimed) -> Attempt | None:
        """It is over. Returns the attempt, if that is here still."""
        attempt = self._attempts.get(event.key)
        if attempt is None:
            self._scheduler.unclaim(event.key)
        elif event.whole:
            attempt.is_back = True
        else:
            self._forget(attempt)
            self._scheduler.unclaim(event.key)
        return attempt

    def settle(self, actions: Actions) -> list[Attempt]:
        """What came back of those that no run uses lies here now; returns these."""
        if not self._attempts:
            return []
        back = [
            attempt
            for attempt in self._attempts.values()
            if attempt.is_back and not self._scheduler.computes(attempt)
        ]
        for attempt in back:
            key, last = attempt.request, attempt.holdings[-1]
            left = last.num_blocks - attempt.returning
            self._forget(attempt)
            self._scheduler.reclaimed(attempt)
            [holder] = last.holders
            if left:
                actions.append(events.Tell(holder, Shrink(key, left)))
            else:
                del attempt.holders[holder]
                actions.append(events.Tell(holder, Vacate(key)))
        return back

    def stop(self, attempt: Attempt) -> None:
        """It is over here. What is still under way stays nobody's until that is over."""
        if attempt.is_back:
            self._scheduler.unclaim(attempt.request)
        self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.request, None)
        attempt.returning, attempt.is_back = 0, False

    def check_idle(self) -> None:
        assert not self._attempts, "KV is still on its way back"
