"""The node's scheduler: stall-free batches within a token budget (Sarathi-Serve, section 4).

Every iteration takes, in this order: one token of each request that decodes, the unfinished prompts, then
new requests, until the token budget is spent. A prompt therefore never stalls the decodes.

Decodes advance together, so nothing is touched per request and iteration: a request that decodes keeps its
distance to a common clock of iterations, and two heaps know who ends next and who needs a block next.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import islice

import msgspec

from isthmus.attempts import BlocksEvicted, BlocksStored
from isthmus.scheduler import events
from isthmus.scheduler.budget import Room, TbtTarget, TimedRoom
from isthmus.scheduler.events import Actions, Piece, Run, Stepped
from isthmus.scheduler.order import promise_order
from isthmus.scheduler.pool import BlockPool, CountingPool
from isthmus.scheduler.sequence import (
    ADMITTED,
    COMPUTED,
    COMPUTING,
    DECODING,
    DEPARTING,
    ENDED,
    EXPECTED,
    JOINED,
    JOINING,
    LEAVES,
    PREEMPTED,
    QUEUED,
    RECEIVING,
    RESERVED,
    WHOLE,
    Sequence,
)
from isthmus.scheduler.states import Snapshot, States, capacity_tokens
from isthmus.scheduler.tiers import Change, TierCache
from isthmus.types import DISK, BlockName, NodeId, RequestId


class Limits(msgspec.Struct, frozen=True):
    """What one node may use.

    `token_budget`: tokens computed in one iteration (decodes are never cut, prompts get what is left, at
    least one); `prompt_batch`: no further prompt joins an iteration that has so many prompt tokens already;
    `partial_prefills`: prompts that are computed in parts at the same time, 1: each waits until the one before it is
    through; `max_sequences`: requests that compute or leave, and as many again that arrive; `max_steps`: iterations of
    one run of decodes, `max_chunks` of one prompt's chunks; `order`: of waiting requests, `fcfs` or `promise`;
    `state_blocks`: that a snapshot of the model's recurrent state fills, 0 for models without.
    """

    num_blocks: int
    block_size: int
    token_budget: int = 512
    max_sequences: int = 64
    max_steps: int = 16
    max_chunks: int = 1
    prompt_batch: int = 1 << 30
    partial_prefills: int = 1
    order: str = "fcfs"
    state_blocks: int = 0

    @property
    def capacity_tokens(self) -> int:
        """The longest request, prompt and answer, that fits alone."""
        return capacity_tokens(self.num_blocks, self.block_size, self.state_blocks)


_LOOKAHEAD = 64
"""Of longer queues only so many are looked through for who may overtake: that is done in every iteration."""


class Scheduler:
    """Is told facts, then asked to `plan`. It has at most one run out at a time: the next comes after `step`.

    Prefixes are reused from the pool itself; or, with `tiers`, from a cache beside it, and the pool only counts.
    With a `target`, iterations with decodes take as many prompt tokens as meet it, within the token budget.
    """

    def __init__(
        self,
        limits: Limits,
        tiers: TierCache | None = None,
        pool: BlockPool | CountingPool | None = None,
        target: TbtTarget | None = None,
        node: NodeId = NodeId(""),  # noqa: B008
    ) -> None:
        self.limits, self.tiers, self._target, self.node = limits, tiers, target, node
        self.pool = pool if pool is not None else BlockPool(limits.num_blocks)
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._expected: deque[Sequence] = deque()
        self._prompts: list[Sequence] = []  # oldest first
        self._decoding: dict[Sequence, None] = {}
        self._clock = 0  # iterations of decodes so far
        self._offsets = 0  # sum over `_decoding`
        self._ends: list[tuple[int, int, Sequence]] = []  # (clock at its last token, age, who): some are stale
        self._rooms: list[tuple[int, int, Sequence]] = []
        self._arrivals = self._admissions = 0
        self._joining: deque[Sequence] = deque()  # will decode as soon as there is a place
        self._num_arriving = 0  # RECEIVING and JOINING: they hold blocks and no place yet
        self._restoring: list[Sequence] = []  # decode in the next run from a snapshot
        self._saving: dict[RequestId, int] = {}  # how often `Saved` is still to come
        self._unsaved: dict[RequestId, list[int]] = {}  # blocks given back that are still being saved
        self._states: States | None = None
        if limits.state_blocks:
            self._states = States(limits.state_blocks, limits.block_size)
        self.run: Run | None = None
        """The run that is out."""

    def computes(self, sequence: Sequence) -> bool:
        """Whether the run that is out may touch its blocks."""
        return self.run is not None and (sequence.state is COMPUTING or sequence.state is DECODING)

    def change(self, limits: Limits) -> None:
        """Another role, with the same memory and caches. Nothing of the old one is under way."""
        assert not self._sequences, "somebody needs a node that was given another role"
        self.limits = limits

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._expected)

    @property
    def num_running(self) -> int:
        return len(self._sequences) - self.num_waiting

    @property
    def _num_placed(self) -> int:
        """Requests that count against `max_sequences`."""
        return len(self._sequences) - len(self._waiting) - len(self._expected) - self._num_arriving

    @property
    def num_transfer(self) -> int:
        """Blocks without a name of requests that leave or come, and of states that came and are not in use yet."""
        count = 0
        for each in self._sequences.values():
            if each.state is not COMPUTING:
                count += len(each.restore) + sum([len(snapshot.blocks) for snapshot in each.snapshots])
            if each.state in (DEPARTING, RECEIVING):
                count += len(each.blocks) - each.named
        return count

    def check(self) -> None:
        """Invariants, for tests and the simulator: blocks add up, and each request holds what it needs."""
        self.pool.check()
        size = self.limits.block_size
        arriving = [each for each in self._sequences.values() if each.state in (RECEIVING, JOINING)]
        assert self._num_arriving == len(arriving)
        assert self._num_placed <= self.limits.max_sequences, "more requests than places"
        assert self._offsets == sum(sequence.offset for sequence in self._decoding)
        for sequence in self._sequences.values():
            decodes = sequence.state is DECODING
            computed = self._clock + sequence.offset if decodes else sequence.computed
            assert decodes == (sequence in self._decoding)
            assert (sequence.state is COMPUTING) == (sequence in self._prompts)
            assert decodes or 0 <= computed <= sequence.length
            assert len(sequence.blocks) * size >= computed, "computed tokens without a block"
            waits = sequence.state in (QUEUED, EXPECTED)
            held = sequence.blocks or sequence.restore or sequence.snapshots
            assert not (waits and held), "a waiting request holds blocks"
            if self._states is not None:
                computes = sequence.state in (COMPUTING, DECODING)
                assert computes == (sequence.slot >= 0), "who computes has a slot, and nobody else"
        if self._states is not None:
            slots = [sequence.slot for sequence in self._sequences.values() if sequence.slot >= 0]
            assert len(slots) == len(set(slots)), "two requests have one slot"
            assert len(slots) + self._states.num_free == self._states.num_slots, "slots were lost"

    # Facts. What follows at once is added to `actions`; each may change what `plan` gives.

    def arrive(self, sequence: Sequence) -> None:
        """A request to compute here."""
        self._add(sequence)
        if self.tiers is not None and sequence.num_cached:
            present, _ = self.tiers.match(sequence.names)
            expected = present if present < sequence.num_cached else sequence.num_cached
            self._pin(sequence, expected if expected > sequence.fetch_stop else sequence.fetch_stop)
        self._waiting.append(sequence)

    def expect(self, sequence: Sequence, actions: Actions) -> None:
        """A request whose KV another node will send."""
        self._add(sequence)
        sequence.state = EXPECTED
        self._expected.append(sequence)
        if self.run is not None:  # what runs has all it needs
            self._reserve(actions)
            if self.pool.evicted:
                self._evicted(self.pool.take_evicted(), actions)

    def _add(self, sequence: Sequence) -> None:
        assert sequence.request not in self._sequences, f"request {sequence.request} arrived twice"
        self._sequences[sequence.request] = sequence
        self._arrivals += 1
        sequence.arrival = self._arrivals

    def imported(self, sequence: Sequence) -> None:
        """All KV of an expected request is here and checked; its first new token is known."""
        sequence.state = WHOLE[sequence.state]
        sequence.computed = sequence.length
        self._joining.append(sequence)

    def fetched(self, sequence: Sequence, stop: int, actions: Actions) -> None:
        """The fetch of a request is over. `stop`: its leading blocks that are here now; with recurrent states, all that
        was fetched is here, or less and no state."""
        complete = 0 < sequence.fetch_stop <= stop
        sequence.fetch_start = sequence.fetch_stop = 0
        names = sequence.names[:stop]
        if self._states is not None and complete:
            names = self._states.chain(sequence.names, stop)
        self.keep(names, actions)

    def keep(
        self,
        names: tuple[BlockName, ...],
        actions: Actions,
        request: RequestId | None = None,
        blocks: list[int] | None = None,
    ) -> None:
        """A prefix for the cache to keep. `blocks` of the engine hold it, computed for `request`; without, it is there
        already: it came from another node."""
        if self.tiers is None or not names:
            return
        change = self.tiers.put(names)
        start, fresh = change.start, len(change.stored) + len(change.sunk)
        save = None
        if fresh and blocks and request is not None:
            self._saving[request] = self._saving.get(request, 0) + 1
            span, head = slice(start, start + fresh), names[start - 1] if start else None
            save = events.Save(request, names[span], head, tuple(blocks[span]), len(change.sunk))
        self._tell(change, actions, save)

    def missing(self, sequence: Sequence, num_blocks: int) -> None:
        """Of the cached prefix that it was admitted with only so much could be loaded: the rest is computed, from the
        next run on."""
        if sequence.state is not COMPUTING:
            return
        if self._states is None:
            sequence.computed = min(sequence.computed, num_blocks * self.limits.block_size)
        elif sequence.restore:  # no state but the one that was to be loaded
            sequence.computed = 0
            self._restored(sequence)

    def lose(self, names: tuple[BlockName, ...], actions: Actions) -> None:
        """The bytes of these blocks are gone or damaged, in whichever tier they were."""
        if self.tiers is not None:
            self._tell(self.tiers.remove(names), actions)

    def recover(self, chains: tuple[tuple[BlockName, ...], ...], actions: Actions) -> None:
        """Prefixes were found whole on the SSD when the node started."""
        if self.tiers is not None:
            for chain in chains:
                self._tell(self.tiers.restore(chain), actions)

    def forget(self, sequence: Sequence) -> None:
        """It is over, whatever it had come to; if it is here at all."""
        if self._sequences.pop(sequence.request, None) is None:
            return
        state = sequence.state
        if state is DECODING:
            self._stop_decoding(sequence)
        elif state is COMPUTING:
            self._prompts.remove(sequence)
        elif state is JOINING:
            self._joining.remove(sequence)
            self._num_arriving -= 1
        elif state is RECEIVING:
            self._num_arriving -= 1
        elif state is QUEUED:
            self._waiting.remove(sequence)
        elif state is EXPECTED:
            self._expected.remove(sequence)
        if sequence.pinned:
            self.unpin(sequence)
        self._release(sequence)

    def _give_back(self, request: RequestId, blocks: list[int]) -> None:
        """At once, or when they are saved."""
        if request in self._saving:
            self._unsaved.setdefault(request, []).extend(blocks)
        else:
            self.pool.release(blocks)

    def saved(self, request: RequestId) -> None:
        """What one `Save` wanted is done."""
        self._saving[request] -= 1
        if not self._saving[request]:
            del self._saving[request]
            self.pool.release(self._unsaved.pop(request, ()))

    def _release(self, sequence: Sequence) -> None:
        """Gives back all that it holds of the engine."""
        if self._saving:
            self._give_back(sequence.request, sequence.blocks)
        else:
            self.pool.release(sequence.blocks)
        if self._states is None:
            return
        self._restored(sequence)
        for snapshot in sequence.snapshots:
            self._give_back(sequence.request, snapshot.blocks)
        sequence.snapshots = []
        self._give_slot(sequence)

    def _restored(self, sequence: Sequence) -> None:
        """Its live state does not need the snapshot any more that it goes on from."""
        self.pool.release(sequence.restore)
        sequence.restore = []

    def _give_slot(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            assert self._states is not None
            self._states.give_slot(sequence.slot)
            sequence.slot = -1

    def step(self, event: Stepped, actions: Actions) -> None:
        """Books an executed run: positions computed, full prompt blocks named, ended requests gone."""
        run = self.run
        assert run is not None and 0 <= event.steps <= run.steps
        self.run = None
        if run.num_decodes:
            self._clock += event.steps
        if self._restoring and event.steps:
            for sequence in self._restoring:
                if sequence.state is DECODING:  # else it was pre-empted, and holds something else
                    self._restored(sequence)
            self._restoring.clear()
        if run.chunks and event.steps:
            self._book_chunks(run, event, actions)
        if not event.ended:
            return
        ended = [self._sequences[request] for request in event.ended if request in self._sequences]
        if event.answers:
            answers = dict(zip(event.ended, event.answers, strict=True))
            for sequence in ended:
                self.keep(answers[sequence.request], actions, sequence.request, sequence.blocks)
        for sequence in ended:
            assert sequence.state in ENDED
            self.forget(sequence)

    def _book_chunks(self, run: Run, event: Stepped, actions: Actions) -> None:
        stored: list[BlockName] = []
        for piece in run.chunks:
            sequence = self._sequences.get(piece.request)
            if sequence is None:
                continue  # cancelled meanwhile
            sequence.computed = piece.start + piece.count * event.steps
            if self.tiers is None and sequence.named < len(sequence.names):
                self._name_blocks(sequence, stored)
            if sequence.restore:
                self._restored(sequence)
            if piece.samples:
                self._prompts.remove(sequence)
                if self.tiers is not None:
                    self.keep(sequence.names, actions, sequence.request, sequence.blocks)
                    self.unpin(sequence)
                if self._states is not None:
                    self._keep_snapshots(sequence, stored, actions)
                if sequence.detach:  # what has no name leaves with it, and is free when it is gone
                    sequence.state = LEAVES[sequence.state]
                    self._give_slot(sequence)
                else:
                    sequence.state = COMPUTED[sequence.state]
                    self._start_decoding(sequence)
        if stored:
            actions.append(BlocksStored(self.node, tuple(stored)))

    def _keep_snapshots(self, sequence: Sequence, stored: list[BlockName], actions: Actions) -> None:
        """Its prompt is computed: snapshots are cached behind the prefix they belong to; the one that travels stays."""
        assert self._states is not None
        leaves = []
        for snapshot in sequence.snapshots:
            if not snapshot.depth:
                leaves.append(snapshot)
                continue
            if self.tiers is not None:
                chain = self._states.chain(sequence.names, snapshot.depth)
                blocks = sequence.blocks[: snapshot.depth] + snapshot.blocks
                self.keep(chain, actions, sequence.request, blocks)
            else:
                names = self._states.parts(sequence.names, snapshot.depth)
                named = zip(snapshot.blocks, names, strict=True)
                stored += [name for block, name in named if self.pool.store(block, name)]
            self._give_back(sequence.request, snapshot.blocks)
        sequence.snapshots = leaves

    def _name_blocks(self, sequence: Sequence, stored: list[BlockName]) -> None:
        full = min(sequence.computed // self.limits.block_size, len(sequence.names))
        for index in range(sequence.named, full):
            if self.pool.store(sequence.blocks[index], sequence.names[index]):
                stored.append(sequence.names[index])
        sequence.named = full

    # The tiered cache.

    def _tell(self, change: Change, actions: Actions, save: events.Save | None = None) -> None:
        """In the order in which it can be done: room is made first. What goes from the SSD to DRAM comes before what
        takes its place there. `save`: all that is new."""
        node = self.node
        if change.evicted:
            self._evicted(change.evicted, actions)
        if change.promoted:
            actions += (events.Promote(change.promoted), BlocksStored(node, change.promoted))
        if change.demoted:
            actions += (events.Demote(change.demoted), BlocksStored(node, change.demoted, DISK))
        if save is not None:
            actions += (save, BlocksStored(node, save.names))
        elif change.stored:
            actions.append(BlocksStored(node, change.stored))
        if change.sunk:
            if save is None:
                actions.append(events.Demote(change.sunk))
            actions.append(BlocksStored(node, change.sunk, DISK))

    def _evicted(self, names: tuple[BlockName, ...], actions: Actions) -> None:
        if self.tiers is not None:
            actions.append(events.Drop(names))
        actions.append(BlocksEvicted(self.node, names))

    def _pin(self, sequence: Sequence, num_blocks: int) -> None:
        """Instead of what it had pinned: so many leading blocks, and the state after them."""
        assert self.tiers is not None
        names = sequence.names[:num_blocks]
        if self._states is not None:
            names = self._states.chain(sequence.names, num_blocks)
        self.tiers.pin(names)
        self.unpin(sequence)
        sequence.pinned, sequence.num_pinned = names, num_blocks

    def unpin(self, sequence: Sequence) -> None:
        """What it needed of the tiers is in the engine, or not needed any more."""
        if sequence.pinned and self.tiers is not None:
            self.tiers.unpin(sequence.pinned)
            sequence.pinned, sequence.num_pinned = (), 0

    # Decoding together.

    def _start_decoding(self, sequence: Sequence) -> None:
        """Its prompt is computed and its next token is known."""
        sequence.offset = sequence.computed - self._clock
        self._offsets += sequence.offset
        self._decoding[sequence] = None
        heapq.heappush(self._ends, (sequence.stop_length - 1 - sequence.offset, sequence.age, sequence))
        self._note_room(sequence)

    def _join_arrived(self, actions: Actions) -> None:
        """Those that came from elsewhere decode, as far as there are places."""
        while self._joining and self._num_placed < self.limits.max_sequences:
            sequence = self._joining.popleft()
            self._num_arriving -= 1
            self._admissions += 1
            sequence.age = self._admissions
            if self._states is not None:
                sequence.slot = self._states.take_slot()
                self._restoring.append(sequence)
            sequence.state = JOINED[sequence.state]
            self._start_decoding(sequence)
            actions.append(events.Joined(sequence.request))

    def _stop_decoding(self, sequence: Sequence) -> None:
        sequence.computed = self._clock + sequence.offset
        sequence.length = sequence.computed + 1
        self._offsets -= sequence.offset
        del self._decoding[sequence]

    def _note_room(self, sequence: Sequence) -> None:
        """Only who has too few blocks for all its tokens will ever need one."""
        size = self.limits.block_size
        sequence.room = len(sequence.blocks) * size - sequence.offset
        if sequence.room < sequence.stop_length - 1 - sequence.offset:
            heapq.heappush(self._rooms, (sequence.room, sequence.age, sequence))

    def _next_end(self) -> int:
        """Clock at which the first of those that decode has its last token."""
        ends, decoding = self._ends, self._decoding
        while True:
            end, age, sequence = ends[0]
            if sequence in decoding and age == sequence.age:
                return end
            heapq.heappop(ends)

    def _next_room(self) -> Sequence | None:
        """The first of those that decode to need a block."""
        rooms, decoding = self._rooms, self._decoding
        while rooms:
            room, age, sequence = rooms[0]
            if sequence in decoding and age == sequence.age and room == sequence.room:
                return sequence
            heapq.heappop(rooms)
        return None

    # The next run.

    def plan(self, actions: Actions, now: int = 0) -> Run | None:
        """Forms the next run, if none is out and somebody waits for one; it comes last. `now`, in ns, matters to
        promises. Reservations come after all else: what runs has the first claim on blocks."""
        if self.run is not None or not (
            self._decoding or self._waiting or self._prompts or self._joining or self._expected
        ):
            return None
        if self._joining:
            self._join_arrived(actions)
        if self._rooms:
            self._make_room(actions)
            self._join_arrived(actions)  # who was pre-empted left a place; they have the blocks for this run
        num_decodes = len(self._decoding)
        chunks: list[Piece] = []
        if self._prompts or self._waiting:
            self._add_prompts(num_decodes, chunks, actions, now)
        if self._expected:
            self._reserve(actions)
        if self.pool.evicted:
            self._evicted(self.pool.take_evicted(), actions)
        if num_decodes:
            context = self._offsets + num_decodes * (self._clock + 1)
            steps = 1 if chunks else self._decode_steps()
            run = Run(tuple(chunks), num_decodes, context, steps, self._decode_pieces)
        elif chunks:
            run = Run(tuple(chunks), 0, 0, self._chunk_steps(chunks), list)
        else:
            return None
        self.run = run
        actions.append(run)
        return run

    def _add_prompts(self, num_decodes: int, chunks: list[Piece], actions: Actions, now: int) -> None:
        # One token at least, so that prompts go on however many requests decode.
        rest = self.limits.token_budget - num_decodes
        room = Room(rest if rest > 0 else 1, chunks)
        if num_decodes and self._target is not None:
            context = self._offsets + num_decodes * (self._clock + 1)
            room = TimedRoom(self._target, room.budget, chunks, num_decodes, context)
        if self.limits.partial_prefills > 1:
            self._share(room, actions, now)
            return
        for sequence in self._prompts:
            if not self._append_chunk(sequence, room):
                return
        budget, batch = room.budget, self.limits.prompt_batch
        while room.taken < budget and room.taken < batch and self._waiting and self._admit(actions, now):
            if not self._append_chunk(self._prompts[-1], room):
                return

    def _share(self, room: Room, actions: Actions, now: int) -> None:
        """Prompts in order of arrival; but of what the first that does not fit whole would get, shorter ones get half.

        So a prompt is through when at most twice as many tokens are computed as in order of arrival, and a short one
        does not wait for a long one to end.
        """
        prompts = deque(sorted(self._prompts, key=lambda sequence: sequence.arrival))
        while room.taken < room.budget:
            oldest = self._next_in_order(prompts, room, actions, now)
            if oldest is None:
                return
            left = oldest.length - oldest.computed
            count = room.fit(oldest.computed, left)
            if count < left:
                self._overtake(oldest, count // 2, room, actions, now)
            if not self._append_chunk(oldest, room):
                return

    def _next_in_order(
        self, prompts: deque[Sequence], room: Room, actions: Actions, now: int
    ) -> Sequence | None:
        """The first of `prompts`, which it takes, or a request that arrived before it and is admitted now."""
        waiting = self._waiting
        if (
            waiting
            and room.taken < self.limits.prompt_batch
            and (not prompts or waiting[0].arrival < prompts[0].arrival)
            and self._num_partial(room) < self.limits.partial_prefills
            and self._admit(actions, now)
        ):
            return self._prompts[-1]
        return prompts.popleft() if prompts else None

    def _overtake(self, oldest: Sequence, spare: int, room: Room, actions: Actions, now: int) -> None:
        """Gives up to `spare` tokens to prompts that have less left than `oldest`, the shortest first."""
        served = {oldest.request, *[piece.request for piece in room.chunks]}
        size, longest = self.limits.block_size, oldest.length - oldest.computed
        others = [(each.length - each.computed, each.arrival, each) for each in self._prompts]
        if room.taken < self.limits.prompt_batch:
            heads = islice(self._waiting, _LOOKAHEAD)
            others += [(each.length - each.num_cached * size, each.arrival, each) for each in heads]
        for left, _, sequence in sorted(others):
            if left >= longest or not spare:
                return
            if sequence.request in served:
                continue
            if sequence.state is QUEUED:
                has_place = left <= spare or self._num_partial(room) + 1 <= self.limits.partial_prefills
                if not has_place or not self._let_in(sequence, actions, now):
                    continue
            before = room.taken
            self._append_chunk(sequence, room, spare)
            spare -= room.taken - before

    def _num_partial(self, room: Room) -> int:
        """Prompts that will be left unfinished by an iteration with these chunks."""
        return len(self._prompts) - sum([piece.samples for piece in room.chunks])

    def _let_in(self, sequence: Sequence, actions: Actions, now: int) -> bool:
        """Admits a request out of order if that takes no memory which those before it wait for."""
        index = self._waiting.index(sequence)
        if index and not (self._is_ready(sequence, now) and self._leaves_enough(index)):
            return False
        return self._admit(actions, now, index)

    def _append_chunk(self, sequence: Sequence, room: Room, most: int = 1 << 30) -> bool:
        """The next chunk of a prompt, at most `most` tokens, if there is room for any; whether it is the last."""
        start, left = sequence.computed, sequence.length - sequence.computed
        count = room.fit(start, left if left < most else most)
        if not count:
            return False
        table = sequence.table
        if self._states is None:
            room.take(Piece(sequence.request, start, count, table, count == left))
        else:
            taken = [(shot.position, tuple(shot.blocks)) for shot in sequence.snapshots]
            within = tuple([shot for shot in taken if start < shot[0] <= start + count])
            restore = tuple(sequence.restore)
            piece = Piece(sequence.request, start, count, table, count == left, sequence.slot, restore, within)
            room.take(piece)
        return count == left

    def _chunk_steps(self, chunks: list[Piece]) -> int:
        """How often a prompt's chunk may repeat while it fills the budget alone. Its last chunk is a run of its own,
        and so is one that follows a cached prefix: only that may have to wait for it."""
        limits = self.limits
        if len(chunks) > 1 or chunks[0].samples or limits.max_chunks == 1 or limits.partial_prefills > 1:
            return 1
        piece = chunks[0]
        sequence = self._sequences[piece.request]
        if piece.start and piece.start == sequence.cached:
            return 1
        return min(limits.max_chunks, (sequence.length - piece.start - 1) // piece.count)

    def _decode_steps(self) -> int:
        """Iterations for which no request needs a block or reaches its end."""
        until = self._next_end()
        first = self._next_room() if self._rooms else None
        if first is not None and first.room < until:
            until = first.room
        steps, most = until - self._clock, self.limits.max_steps
        return 1 if steps < 1 else steps if steps < most else most

    def _decode_pieces(self) -> list[Piece]:
        """One token of each that decodes, oldest admission first."""
        return [
            Piece(
                sequence.request,
                self._clock + sequence.offset,
                1,
                sequence.table,
                True,
                max(0, sequence.slot),
                tuple(sequence.restore),
            )
            for sequence in sorted(self._decoding, key=lambda sequence: sequence.age)
        ]

    def _make_room(self, actions: Actions) -> None:
        """A block for each that needs one now; under memory pressure the youngest gives its blocks back.

        While half the pool is left, also the blocks of the next `max_steps` iterations.
        """
        first = self._next_room()
        while first is not None and first.room <= self._clock:
            if not self._grow(first, 1):
                self._preempt(actions)
            first = self._next_room()
        ahead = self._clock + self.limits.max_steps
        while first is not None and first.room < ahead and self.pool.available > self.limits.num_blocks // 2:
            end = first.stop_length - 1 - first.offset
            if not self._grow(first, min(ahead, end) - self._clock):
                break
            first = self._next_room()

    def _grow(self, sequence: Sequence, steps: int) -> bool:
        """Makes room for `steps` more tokens after the computed ones; False when the pool is empty."""
        size = self.limits.block_size
        needed = -(-(self._clock + sequence.offset + steps) // size) - len(sequence.blocks)
        if needed > self.pool.available:
            return False
        for _ in range(needed):
            sequence.blocks += self.pool.allocate(1, after=sequence.blocks[-1])
        self._note_room(sequence)
        return True

    def _preempt(self, actions: Actions) -> None:
        """The youngest of all that compute, prompts included, goes back to the head of the queue."""
        victim = max([*self._decoding, *self._prompts], key=lambda sequence: sequence.age)
        if victim.state is DECODING:
            self._stop_decoding(victim)
        else:
            self._prompts.remove(victim)
        self._release(victim)
        victim.start_over()
        victim.state = PREEMPTED[victim.state]
        self._waiting.appendleft(victim)
        actions.append(events.Preempted(victim.request))

    # Admission.

    def _admit(self, actions: Actions, now: int, index: int | None = None) -> bool:
        """Gives the next waiting request, or that at `index`, all blocks of its known tokens; False when it must
        wait on."""
        if self._num_placed >= self.limits.max_sequences:
            return False
        if index is None:
            index = self._choose(now)
        sequence, size = self._waiting[index], self.limits.block_size
        # At least one token is computed, for it yields the logits.
        held: list[int] = []
        restore: list[int] = []
        disk_blocks = 0
        if self.tiers is None:
            held = self.pool.match(sequence.names[: (sequence.length - 1) // size])
            found = len(held)
            if self._states is not None:
                held, restore = self._with_state(sequence, held)
            computed = len(held) * size
        else:
            num_cached, disk_blocks, found = self._find(sequence)
            if num_cached < sequence.num_cached and self._is_computed(sequence.names, num_cached):
                return False  # it was sent here for what is in this very iteration
            computed = num_cached * size if num_cached * size < sequence.length else sequence.length - 1
        needed = -(-sequence.length // size) - len(held)
        more, positions, loaded = 0, [], False
        if self._states is not None:
            positions = self._states.positions(
                sequence.length, len(sequence.names), computed, found, leaves=sequence.detach
            )
            loaded = self.tiers is not None and computed > 0
            more = (len(positions) + loaded) * self._states.num_blocks
        cached = held + restore
        idle = self.pool.idle_among(cached) if cached else 0
        if needed + more + idle + self._headroom() > self.pool.available:
            return False
        del self._waiting[index]
        if cached:
            self.pool.acquire(cached)
        sequence.blocks = held + self.pool.allocate(needed)
        if self._states is not None:
            count = self._states.num_blocks
            sequence.restore = self.pool.allocate(count) if loaded else restore
            sequence.snapshots = [Snapshot(*position, self.pool.allocate(count)) for position in positions]
            sequence.slot = self._states.take_slot()
        sequence.cached = sequence.computed = computed
        sequence.named = len(held)
        sequence.state = ADMITTED[sequence.state]
        self._admissions += 1
        sequence.age = self._admissions
        self._prompts.append(sequence)
        table, state = sequence.table, tuple(sequence.restore)
        actions.append(events.Admitted(sequence.request, computed, table, disk_blocks, state))
        if computed and self.tiers is not None:
            count = -(-computed // size)
            names = (
                sequence.names[:count] if self._states is None else self._states.chain(sequence.names, count)
            )
            actions.append(
                events.Load(sequence.request, names, table[:count] + state, computed, sequence.fetches)
            )
        return True

    def _with_state(self, sequence: Sequence, held: list[int]) -> tuple[list[int], list[int]]:
        """Of the cached blocks of a prompt those up to the deepest snapshot, and its blocks."""
        assert self._states is not None
        depth = self._states.usable(sequence.names, len(held), self.pool.holds)
        state = self.pool.match(self._states.parts(sequence.names, depth)) if depth else []
        if len(state) < self._states.num_blocks:  # some of it was evicted
            return [], []
        return held[:depth], state

    def _choose(self, now: int) -> int:
        if self.limits.order == "fcfs" or len(self._waiting) == 1:
            return 0
        index = promise_order(self._waiting, now, lambda request: self._is_ready(request, now))  # type: ignore[arg-type]
        # A request that leaves holds its blocks until its decode node takes it. That takes requests in the order of
        # their routes, so it may first wait for one that was overtaken here: they would wait for each other.
        waits = index and self._waiting[index].detach and not self._leaves_enough(index)
        return 0 if waits else index

    def _leaves_enough(self, index: int) -> bool:
        """When this waiting request is admitted, any single one of those before it still could be."""
        overtaken = max([self._waiting[at].length for at in range(index)])
        size = self.limits.block_size
        needed = -(-self._waiting[index].length // size) - (-overtaken // size)
        return (
            needed + self._headroom() <= self.pool.available
            and self._num_placed + 1 < self.limits.max_sequences
        )

    def _is_ready(self, sequence: Sequence, now: int) -> bool:
        """Its fetch ends while it computes, and what it was sent here for is here: else it would compute what
        a request before it is about to leave behind."""
        if sequence.fetch_stop:
            return sequence.fetch_until_ns <= now + sequence.work_ns
        if self.tiers is None or not sequence.num_cached:
            return True
        return (
            sequence.num_pinned >= sequence.num_cached
            or self.tiers.match(sequence.names)[0] >= sequence.num_cached
        )

    def _find(self, sequence: Sequence) -> tuple[int, int, int]:
        """Leading blocks in the tiers that can be used, those of a fetch under way included; how many of what is to be
        loaded is on disk; and how many leading blocks there are, with a state or not."""
        assert self.tiers is not None
        present, on_disk = self.tiers.match(sequence.names)
        arrives = sequence.fetch_start <= present < sequence.fetch_stop
        if self._states is not None and sequence.fetch_stop * self.limits.block_size >= sequence.length:
            arrives = False  # a state at its end would leave nothing to compute
        found = usable = sequence.fetch_stop if arrives else present
        if self._states is not None and not arrives:
            usable = min(present, (sequence.length - 1) // self.limits.block_size)
            usable = self._states.usable(sequence.names, usable, self.tiers.holds)
            on_disk = self.tiers.match(self._states.chain(sequence.names, usable))[1]
        if usable > sequence.num_pinned:
            self._pin(sequence, usable)
        return usable, on_disk, found

    def _is_computed(self, names: tuple[BlockName, ...], index: int) -> bool:
        """Whether a prompt that is being computed will leave this block behind."""
        name = names[index]
        return any(index < len(prompt.names) and prompt.names[index] == name for prompt in self._prompts)

    def _headroom(self) -> int:
        """One spare block for each running request, so that admitting does not pre-empt at once."""
        running, most = len(self._decoding) + len(self._prompts), self.limits.num_blocks // 8
        return running if running < most else most

    def _reserve(self, actions: Actions) -> None:
        # A pre-empted request that waits for blocks comes first, or newer ones would starve it.
        while self._expected and not self._waiting and self._num_arriving < self.limits.max_sequences:
            sequence = self._expected[0]
            needed = -(-(sequence.length + 1) // self.limits.block_size)
            if needed + self.limits.state_blocks + self._headroom() > self.pool.available:
                return
            self._expected.popleft()
            sequence.blocks = self.pool.allocate(needed)
            if self._states is not None:
                sequence.restore = self.pool.allocate(self._states.num_blocks)
            sequence.state = RESERVED[sequence.state]
            self._num_arriving += 1
            actions += sequence.reserved()
