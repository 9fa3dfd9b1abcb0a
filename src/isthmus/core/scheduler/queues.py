"""Queues for memory and a place in the batch: `PromptQueue` of prompts to compute here, and `Incoming` of requests
whose prompt another node computes. The latter get memory as soon as there is some, since the other node waits for it,
and a place when their KV is here.
"""

from __future__ import annotations

import math
from collections import abc, deque
from itertools import islice

from isthmus.core.blocks import MAX_SNAPSHOTS
from isthmus.core.scheduler import events
from isthmus.core.scheduler.batch import RunningBatch
from isthmus.core.scheduler.events import Actions, SchedulerLimits
from isthmus.core.scheduler.memory import Memory
from isthmus.core.scheduler.prefixes import Prefixes
from isthmus.core.scheduler.sequence import (
    ADMITTED,
    EXPECTED,
    JOINED,
    JOINING,
    PREEMPTED,
    QUEUED,
    RECEIVING,
    RESERVED,
    WHOLE,
    CachedPrefix,
    Sequence,
)

_NOTHING = CachedPrefix()


def promise_order(queue: abc.Sequence[Sequence], now: int, ready: abc.Callable[[Sequence], bool]) -> int:
    """Index of the request to start at `now`. `queue` is in order of arrival.

    A request's slack is its deadline less the time at which it would end in that order. The shortest request goes first
    that fits into the least slack of those before it and is `ready`. With admission control nobody starves.
    """
    end, least_slack, choice = now, math.inf, 0
    shortest = queue[0].work_ns
    for index, request in enumerate(queue):
        work = request.work_ns
        if work < shortest and work <= least_slack and ready(request):
            choice, shortest = index, work
        end += work
        if request.deadline_ns:
            slack = request.deadline_ns - end
            if 0 <= slack < least_slack:
                least_slack = slack
    return choice


class PromptQueue:
    """Prompts to compute here that wait for memory and a place."""

    def __init__(
        self, limits: SchedulerLimits, memory: Memory, prefixes: Prefixes, batch: RunningBatch
    ) -> None:
        self.waiting: deque[Sequence] = deque()  # in order of arrival; pre-empted ones come first
        self._turns = batch.turns
        self._limits, self._memory, self._prefixes, self._batch = limits, memory, prefixes, batch
        self._in_order = limits.order == "fcfs"

    def admit(self, actions: Actions, now: int, index: int | None = None) -> bool:
        """Gives the next request, or that at `index`, a place and blocks for its known tokens. Returns False if it must
        wait on."""
        batch = self._batch
        if batch.num_placed >= self._limits.max_sequences:
            return False
        if index is None:
            index = self._next(now)
            if self.waiting[index].awaits:
                index = self._pass_by()
        if index is None:
            return False
        sequence = self.waiting[index]
        prefix: CachedPrefix | None = _NOTHING
        if sequence.num_absent:  # holders have it of an earlier attempt
            prefix = CachedPrefix(sequence.num_absent * self._limits.block_size)
        elif sequence.names:
            prefix = self._prefixes.find(sequence, batch.prompts)
        if prefix is None or not self._memory.admit(sequence, prefix, batch.headroom):
            return False
        del self.waiting[index]
        # Tokens computed anew after a pre-emption were counted before.
        self._turns.take(sequence, 0 if sequence.age else sequence.length - prefix.num_tokens)
        if index and sequence.hands_over:
            self._turns.passed(sequence, self._blocks(sequence))
        sequence.state = ADMITTED[sequence.state]
        batch.place(sequence)
        batch.prompts.append(sequence)
        tokens, held, state = prefix.num_tokens, sequence.blocks, sequence.restore
        actions.append(events.Admitted(sequence.request, tokens, held, prefix.num_on_disk, state))
        if prefix.loads or sequence.assembly is not None:
            count, donated = -(-tokens // self._limits.block_size), sequence.donated
            names = self._memory.states.chain(sequence.names, count) + donated
            blocks = held[:count] + state + sequence.scratch[: len(donated)]
            actions.append(
                events.LoadBlocks(sequence.request, names, blocks, tokens, sequence.fetch is not None)
            )
        actions += sequence.admitted()
        return True

    def overtake(self, sequence: Sequence, actions: Actions, now: int) -> bool:
        """Admits a request out of order, unless that takes memory for which those before it wait."""
        index = self.waiting.index(sequence)
        if sequence.awaits:
            return False
        if index and not (self._is_ready(sequence, now) and self._leaves_enough(index)):
            return False
        if index and self._turns.is_shared and not self._may_pass(index):
            return False
        return self.admit(actions, now, index)

    def put_back(self, sequence: Sequence) -> None:
        """Queues a pre-empted sequence before all others."""
        sequence.start_over()
        sequence.state = PREEMPTED[sequence.state]
        self.waiting.appendleft(sequence)

    def _next(self, now: int) -> int:
        """Index of the request that comes first in the limits' order, of the tenant whose turn it is."""
        if len(self.waiting) == 1:
            return 0
        if not self._turns.is_shared:
            return 0 if self._in_order else self._choose(self.waiting, range(len(self.waiting)), now)
        own = self._turns.indexes(self.waiting)
        index = own[0] if self._in_order else self._choose([self.waiting[at] for at in own], own, now)
        return index if not index or self._may_pass(index) else 0

    def _choose(self, queue: abc.Sequence[Sequence], indexes: abc.Sequence[int], now: int) -> int:
        """Index of the first of `queue` in promise order. `indexes`: of its requests among all that wait."""
        index = indexes[promise_order(queue, now, lambda request: self._is_ready(request, now))]
        # A request that is handed over holds its blocks until its decode node takes it, in the order of routes: that
        # node may wait for one overtaken here, and both would wait for each other.
        waits = index != indexes[0] and self.waiting[index].hands_over and not self._leaves_enough(index)
        return indexes[0] if waits else index

    def _may_pass(self, index: int) -> bool:
        """Whether a request may pass those of other tenants before it."""
        hands_over = self.waiting[index].hands_over
        return self._turns.may_pass(self.waiting, index, self._blocks, holds=hands_over)

    def _pass_by(self) -> int | None:
        """Index of the first whose donors are here, unless it takes memory for which those before it wait."""
        ready = [at for at, each in enumerate(self.waiting) if not each.awaits]
        if ready and self._turns.is_shared and ready[0] and not self._may_pass(ready[0]):
            return None
        return ready[0] if ready and (not ready[0] or self._leaves_enough(ready[0])) else None

    def _is_ready(self, sequence: Sequence, now: int) -> bool:
        """Whether its fetch will end while it computes, and the prefix for which it was routed here is here."""
        if sequence.awaits:
            return False
        if sequence.fetch is not None and sequence.fetch.stop:
            return sequence.fetch.until_ns <= now + sequence.work_ns
        return not sequence.num_cached or self._prefixes.is_here(sequence)

    def _leaves_enough(self, index: int) -> bool:
        """Whether any single one of those before it could still be admitted after this one."""
        batch = self._batch
        needed = [self._blocks(each) for each in islice(self.waiting, index + 1)]
        fits = needed.pop() + max(needed) + batch.headroom <= self._memory.pool.available
        return fits and batch.num_placed + 1 < self._limits.max_sequences

    def _blocks(self, sequence: Sequence) -> int:
        """Most blocks that a request may need for its known tokens."""
        whole = -(-sequence.length // self._limits.block_size) + sequence.num_scratch
        return whole + MAX_SNAPSHOTS * self._limits.state_blocks

    def check(self) -> None:
        """Checks that waiting requests hold no blocks."""
        for each in self.waiting:
            assert each.state is QUEUED
            held = each.blocks or each.scratch or each.restore or each.snapshots
            assert not held, "a waiting request holds blocks"


class Incoming:
    """Requests that come from other nodes, in the order of their routes."""

    def __init__(self, limits: SchedulerLimits, memory: Memory, batch: RunningBatch) -> None:
        self.expected: deque[Sequence] = deque()  # wait for blocks
        self.joining: deque[Sequence] = deque()  # received, and wait for a place
        self._num_reserved = 0  # RECEIVING and JOINING: hold blocks and no place yet
        self._max_sequences, self._memory, self._batch = limits.max_sequences, memory, batch

    def expect(self, sequence: Sequence) -> None:
        sequence.state = EXPECTED
        self.expected.append(sequence)

    def reserve(self, actions: Actions, *, in_order: bool = False) -> None:
        """Allocates blocks for as many as possible; `in_order` of routes, whichever tenant's turn it is."""
        while self.expected and self._num_reserved < self._max_sequences:
            index = 0 if in_order else self._next()
            sequence = self.expected[index]
            if not self._memory.reserve(sequence, self._batch.headroom):
                return
            del self.expected[index]
            self._batch.turns.take(sequence, sequence.length)
            if index:
                self._batch.turns.passed(sequence, self._blocks(sequence))
            sequence.state = RESERVED[sequence.state]
            self._num_reserved += 1
            actions += sequence.reserved()

    def _next(self) -> int:
        """Index of the first request of the tenant whose turn it is."""
        turns = self._batch.turns
        index = turns.indexes(self.expected)[0] if turns.is_shared else 0
        return index if not index or turns.may_pass(self.expected, index, self._blocks, holds=True) else 0

    def _blocks(self, sequence: Sequence) -> int:
        return self._memory.to_receive(sequence) + self._memory.states.num_blocks

    def imported(self, sequence: Sequence) -> None:
        """Queues a received sequence for a place: its KV is here and checked, its first new token known."""
        sequence.state = WHOLE[sequence.state]
        sequence.computed = sequence.length
        self.joining.append(sequence)

    def join(self, actions: Actions) -> None:
        """Lets received sequences decode, as far as there are places."""
        batch = self._batch
        while self.joining and batch.num_placed < self._max_sequences:
            sequence = self.joining.popleft()
            self._num_reserved -= 1
            batch.turns.gone(sequence)
            batch.place(sequence)
            self._memory.states.join(sequence)
            sequence.state = JOINED[sequence.state]
            batch.decoding.start(sequence)
            actions.append(events.Joined(sequence.request))

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence in any state of its way here."""
        if sequence.state is EXPECTED:
            self.expected.remove(sequence)
            return
        self._batch.turns.gone(sequence)
        self._num_reserved -= 1
        if sequence.state is JOINING:
            self.joining.remove(sequence)

    def check(self, sequences: abc.Iterable[Sequence]) -> None:
        states = [each.state for each in sequences]
        assert self._num_reserved == states.count(RECEIVING) + states.count(JOINING)
        assert self._num_reserved <= self._max_sequences, "more was reserved than may come"
        assert len(self.expected) == states.count(EXPECTED) and len(self.joining) == states.count(JOINING)
        for each in self.expected:
            assert not (each.blocks or each.restore), "a waiting request holds blocks"
