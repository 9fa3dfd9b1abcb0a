"""The engine's memory: which blocks a sequence gets, and when they are free again. Blocks being saved are not free."""

from __future__ import annotations

from collections import abc

from isthmus.core.scheduler.events import SchedulerLimits
from isthmus.core.scheduler.pool import Blocks, Pool
from isthmus.core.scheduler.sequence import CachedPrefix, Sequence
from isthmus.core.scheduler.states import AnyStates, NoStates, States
from isthmus.core.types import RequestId


class Memory:
    """Blocks of sequences, for KV and for snapshots of recurrent states."""

    def __init__(self, limits: SchedulerLimits, pool: Pool) -> None:
        self.pool = pool
        self.states: AnyStates = NoStates(limits.block_size)
        if limits.state_blocks:
            self.states = States(limits.state_blocks, limits.block_size, pool)
        self._size = limits.block_size
        # A prompt whose blocks go to holders fills some blocks while others are on their way.
        window = -(-limits.token_budget // limits.block_size) * 2
        self._window = max(1, min(window, limits.num_blocks // 4))
        self.num_aside = 0  # blocks for KV of no sequence here: of other nodes' requests, or on its way home
        self._saving: dict[RequestId, int] = {}  # number of `SaveBlocks` in progress
        self._unsaved: dict[RequestId, list[int]] = {}  # blocks given back meanwhile

    def admit(self, sequence: Sequence, prefix: CachedPrefix, headroom: int) -> bool:
        """Allocates blocks for its known tokens, scratch and snapshots. Returns False, and allocates nothing, if fewer
        than `headroom` would be left."""
        pool, states = self.pool, self.states
        positions = states.positions(sequence, prefix)
        num_scratch = sequence.num_scratch
        needed = self.at_home(sequence) - len(prefix.blocks)
        cached = prefix.blocks + prefix.state
        idle = pool.idle_among(cached) if cached else 0
        state_blocks = (len(positions) + prefix.loads) * states.num_blocks
        if needed + num_scratch + state_blocks + idle + headroom > pool.available:
            return False
        if cached:
            pool.acquire(cached)
        if num_scratch:
            sequence.scratch = pool.allocate(num_scratch)
        sequence.blocks = prefix.blocks + pool.allocate(needed)
        states.admit(sequence, prefix, positions)
        sequence.cached = sequence.computed = prefix.num_tokens
        sequence.named = max(len(prefix.blocks), sequence.num_absent)
        return True

    def at_home(self, sequence: Sequence) -> int:
        """Blocks with which it can compute its known tokens: of those that go to holders a window is enough."""
        whole, remote = -(-sequence.length // self._size), sequence.remote
        go = remote.num_planned
        return whole - go + min(go - remote.num_there, self._window) if go else whole

    def extend(self, sequence: Sequence) -> None:
        """Allocates blocks for a prompt in place of shipped ones, as far as there are any."""
        wanted = self.at_home(sequence) - len(sequence.blocks)
        if wanted > 0:
            sequence.blocks += self.pool.allocate(min(wanted, self.pool.available))

    def set_aside(self, num_blocks: int, headroom: int) -> Blocks:
        """Allocates blocks for KV of no sequence here; none if fewer than `headroom` would be left."""
        if num_blocks + headroom > self.pool.available:
            return ()
        self.num_aside += num_blocks
        return self.pool.allocate(num_blocks)

    def put_back(self, blocks: Blocks) -> None:
        """Undoes `set_aside` for these blocks."""
        self.num_aside -= len(blocks)
        self.pool.release(blocks)

    def reserve(self, sequence: Sequence, headroom: int) -> bool:
        """Allocates blocks for the KV that is sent to it; returns False as `admit` does."""
        needed = self.to_receive(sequence)
        if needed + self.states.num_blocks + headroom > self.pool.available:
            return False
        sequence.blocks = self.pool.allocate(needed)
        self.states.reserve(sequence)
        return True

    def to_receive(self, sequence: Sequence) -> int:
        """Blocks for the KV that is sent to it, its next token included."""
        return -(-(sequence.length + 1) // self._size) - sequence.num_absent

    def assembled(self, sequence: Sequence) -> None:
        """Frees its scratch, and what packing drops, now that its prompt is computed."""
        gone, sequence.scratch = sequence.scratch, ()
        if sequence.assembly is not None:
            sequence.scratch = gone
            gone = sequence.assembled()
        self.give_back(sequence.request, gone)

    def release(self, sequence: Sequence) -> None:
        """Gives back all blocks that it holds."""
        self.give_back(sequence.request, sequence.blocks + sequence.scratch)
        for snapshot in self.states.release(sequence):
            self.give_back(sequence.request, snapshot.blocks)

    def give_back(self, request: RequestId, blocks: Blocks) -> None:
        """Frees blocks, at once or when they are saved."""
        if request in self._saving:
            self._unsaved.setdefault(request, []).extend(blocks)
        else:
            self.pool.release(blocks)

    def saving(self, request: RequestId) -> None:
        """Notes a `SaveBlocks` of its blocks: one `saved` is to come."""
        self._saving[request] = self._saving.get(request, 0) + 1

    def saved(self, request: RequestId) -> None:
        """Notes the end of one `SaveBlocks`."""
        self._saving[request] -= 1
        if not self._saving[request]:
            del self._saving[request]
            self.pool.release(self._unsaved.pop(request, ()))

    def check(self, sequences: abc.Collection[Sequence]) -> None:
        """Checks that blocks held by sequences, set aside, or being saved add up to those held in the pool."""
        self.pool.check()
        self.states.check(sequences)
        assert self._unsaved.keys() <= self._saving.keys() and all(self._saving.values())
        held = self.num_aside + sum([len(blocks) for blocks in self._unsaved.values()])
        for each in sequences:
            held += len(each.blocks) + len(each.scratch) + len(each.restore)
            held += sum([len(shot.blocks) for shot in each.snapshots])
        assert held == self.pool.num_held, "requests and the pool do not agree on what is held"
