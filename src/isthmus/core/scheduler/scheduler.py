"""The node's scheduler: stall-free batches within a token budget (Sarathi-Serve, section 4).

Every iteration takes one token of each request that decodes, then unfinished prompts, then new requests, until the
token budget is spent. A prompt therefore never stalls the decodes. A request's way:

    arrive ──> `PromptQueue` ──> `Batch.prompts`, cut by `Chunks` ──> `Batch.decoding`, the `DecodeClock` ──> over
                                                              └──> leaves for another node ──────────────> over
    expect ──> `Incoming` ─────────────────────────────────────> `Batch.decoding`

`Memory` gives blocks of the engine and takes them back; `Prefixes` know what is computed already.
"""

from __future__ import annotations

from itertools import count

from isthmus.core.attempts import BlocksEvicted, BlocksStored
from isthmus.core.scheduler.batch import PLACED, RunningBatch
from isthmus.core.scheduler.chunks import Chunks, TbtTarget
from isthmus.core.scheduler.events import Actions, Preempted, Run, SchedulerLimits, Stepped
from isthmus.core.scheduler.memory import Memory
from isthmus.core.scheduler.pool import BlockPool, Blocks, Pool
from isthmus.core.scheduler.prefixes import PoolPrefixes, Prefixes, TierPrefixes
from isthmus.core.scheduler.queues import Incoming, PromptQueue
from isthmus.core.scheduler.sequence import (
    COMPUTED,
    COMPUTING,
    DECODING,
    DEPARTING,
    DEPARTS,
    ENDED,
    QUEUED,
    RECEIVING,
    Sequence,
)
from isthmus.core.scheduler.tiers import TierCache
from isthmus.core.types import NOBODY, BlockName, NodeId, RequestId, Tenant

Names = tuple[BlockName, ...]


class Scheduler:
    """Is told facts, then asked to `plan`. At most one run is out at a time: the next comes after `step`.

    Prefixes are reused from the pool; with `tiers`, from a cache beside it. With a `target`, iterations with decodes
    take as many prompt tokens as meet it, within the token budget.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        tiers: TierCache | None = None,
        pool: Pool | None = None,
        target: TbtTarget | None = None,
        node: NodeId = NodeId(""),  # noqa: B008
    ) -> None:
        self.tiers, self._target, self.node = tiers, target, node
        self.pool = pool if pool is not None else BlockPool(limits.num_blocks)
        self._memory = memory = Memory(limits, self.pool)
        self._states = memory.states
        size = limits.block_size
        self._prefixes: Prefixes = (
            PoolPrefixes(memory, size) if tiers is None else TierPrefixes(tiers, memory, size, node)
        )
        # Facts for one part alone.
        self.lose, self.recover, self.unpin = self._prefixes.lose, self._prefixes.recover, self._prefixes.unpin
        self.saved, self.put_back = memory.saved, memory.put_back
        self._sequences: dict[RequestId, Sequence] = {}
        self._arrivals = count(1)
        self.run: Run | None = None
        """The run that is out."""
        self.dropped: list[Sequence] = []
        """Pre-empted sequences that cannot be computed anew and were forgotten; the node takes them from here."""
        self.change(limits)

    def change(self, limits: SchedulerLimits) -> None:
        """Takes another role, with the same memory and caches. Needs a scheduler without sequences."""
        assert not self._sequences, "somebody needs a node that was given another role"
        self.limits = limits
        self._batch = batch = RunningBatch(limits)
        self._admission = PromptQueue(limits, self._memory, self._prefixes, batch)
        self._incoming = Incoming(limits, self._memory, batch)
        self._chunks = Chunks(limits, self._target, batch, self._admission)

    def computes(self, sequence: Sequence) -> bool:
        """Whether the run that is out may touch its blocks."""
        return self.run is not None and (sequence.state is COMPUTING or sequence.state is DECODING)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting) + len(self._incoming.expected)

    @property
    def num_running(self) -> int:
        return len(self._sequences) - self.num_waiting

    @property
    def num_transfer(self) -> int:
        """Blocks without a name of sequences that are handed over, and of recurrent states not in use yet."""
        num_blocks = 0
        for each in self._sequences.values():
            if each.state is not COMPUTING:
                num_blocks += len(each.restore) + sum([len(snapshot.blocks) for snapshot in each.snapshots])
            if each.state in (DEPARTING, RECEIVING):
                num_blocks += len(each.blocks) - each.named
        return num_blocks

    def check(self) -> None:
        """Checks invariants, for tests and the simulator: each sequence is in one place, with the blocks it needs."""
        assert self.run is not None or not self._states.restoring, (
            "who went on from a snapshot is through with it"
        )
        sequences = self._sequences.values()
        self._memory.check(sequences)
        self._batch.check(sequences)
        self._admission.check()
        self._incoming.check(sequences)
        assert len(self._admission.waiting) == sum([each.state is QUEUED for each in sequences])
        for each in sequences:
            each.check()
            room = (each.num_absent + len(each.blocks)) * self.limits.block_size
            assert each.state is DECODING or room >= each.computed, "computed tokens without a block"

    # Facts. Each may add to `actions`, and change the next plan.

    def arrive(self, sequence: Sequence) -> None:
        """Queues a request to compute here."""
        self._enter(sequence)
        if sequence.num_cached:
            self._prefixes.arrive(sequence)
        self._admission.waiting.append(sequence)

    def expect(self, sequence: Sequence, actions: Actions) -> None:
        """Queues a request whose KV another node will send."""
        self._enter(sequence)
        self._incoming.expect(sequence)
        # The run has its blocks. A waiting prompt comes first: newer requests would starve pre-empted ones.
        if self.run is not None and not self._admission.waiting:
            self._incoming.reserve(actions)
            self._tell_evicted(actions)

    def _enter(self, sequence: Sequence) -> None:
        assert sequence.request not in self._sequences, f"request {sequence.request} arrived twice"
        self._sequences[sequence.request] = sequence
        sequence.arrival = next(self._arrivals)
        self._batch.turns.arrive(sequence.tenant)

    def shipped(self, sequence: Sequence) -> None:
        """Frees the blocks of an arrived shipment. No run touches the sequence."""
        shipment = sequence.remote.shipment
        assert not self.computes(sequence) and shipment is not None
        self._memory.give_back(sequence.request, sequence.moved(shipment.num_blocks))

    def num_computed(self, sequence: Sequence) -> int:
        """Tokens of it that have KV."""
        if sequence.state is DECODING:
            return self._batch.decoding.now + sequence.offset
        return sequence.computed

    def set_aside(self, num_blocks: int, actions: Actions, spare: int = 0) -> Blocks:
        """Allocates blocks for KV of no sequence here: of another node's request, or on its way home. None, unless
        `spare` blocks stay free, and one for each running sequence."""
        blocks = self._memory.set_aside(num_blocks, max(spare, self._batch.headroom))
        self._tell_evicted(actions)
        return blocks

    def returned(self, sequence: Sequence, blocks: Blocks) -> None:
        """Takes blocks that were set aside, and hold its last remote KV. No run touches the sequence."""
        assert not self.computes(sequence)
        self._memory.num_aside -= len(blocks)
        sequence.returned(blocks)

    def fits(self, sequence: Sequence, num_away: int) -> bool:
        """Whether it fits here at its end, with so many blocks elsewhere."""
        return sequence.stop_length - num_away * self.limits.block_size <= self.limits.capacity_tokens

    def has_room(self, sequence: Sequence) -> bool:
        """Whether its prompt and scratch fit into the pool at all."""
        whole = -(-sequence.length // self.limits.block_size) + sequence.num_scratch
        return whole <= self.pool.num_blocks

    def disassemble(self, sequence: Sequence, names: Names) -> None:
        """Has an assembled prompt computed without donors. It keeps its scratch until then, for a load may still write
        there. `names`: of all its blocks."""
        sequence.assembly, sequence.names, sequence.is_exact = None, names, True

    @property
    def num_aside(self) -> int:
        """Blocks for KV of no sequence here."""
        return self._memory.num_aside

    @property
    def num_spare(self) -> int:
        """Blocks kept free for running sequences."""
        return self._batch.headroom

    @property
    def num_wanted(self) -> int:
        """Blocks for which requests wait."""
        waiting = self._admission.waiting
        wanted = sum([self._memory.at_home(each) + each.num_scratch for each in waiting])
        return wanted + sum([self._memory.to_receive(each) for each in self._incoming.expected])

    def imported(self, sequence: Sequence) -> None:
        """Notes that all KV of an expected request is here and checked, and its first new token known."""
        self._incoming.imported(sequence)

    def fetched(self, sequence: Sequence, stop: int, actions: Actions) -> None:
        """Ends the fetch of a request. `stop`: its leading blocks that are here now; with recurrent states, all of
        them, or fewer and no state."""
        names, fetch, sequence.fetch = sequence.names, sequence.fetch, None
        complete = fetch is not None and 0 < fetch.stop <= stop
        names = self._states.chain(names, stop) if complete else names[:stop]
        self.keep(names, actions, sequence.request, sequence.tenant)

    def keep(self, names: Names, actions: Actions, request: RequestId, tenant: Tenant = NOBODY) -> None:
        """Keeps a prefix in the tenant's share, whose new blocks were fetched for this request."""
        self._prefixes.keep(names, actions, request, tenant=tenant)

    def missing(self, sequence: Sequence, num_blocks: int) -> None:
        """Shortens the cached prefix that a sequence was admitted with to the blocks that could be loaded."""
        if sequence.state is COMPUTING:
            self._states.missing(sequence, num_blocks)

    def forget(self, sequence: Sequence) -> None:
        """Removes a sequence in any state, if it is here, and frees its blocks."""
        if self._sequences.pop(sequence.request, None) is None:
            return
        if sequence.state in PLACED:
            self._batch.remove(sequence)
        elif sequence.state is QUEUED:
            self._admission.waiting.remove(sequence)
        else:
            self._incoming.remove(sequence)
        if sequence.pinned:
            self._prefixes.unpin(sequence)
        self._memory.release(sequence)

    def step(self, event: Stepped, actions: Actions) -> None:
        """Takes the result of a run: advances positions, names full prompt blocks, forgets ended requests."""
        run, steps = self.run, event.steps
        assert run is not None and 0 <= steps <= run.steps
        self.run = None
        if run.num_decodes:
            self._batch.decoding.now += steps
        if self._states.restoring and steps:
            self._states.ran()
        if run.chunks and steps:
            self._computed(run, steps, actions)
        if not event.ended:
            return
        ended = [self._sequences[request] for request in event.ended if request in self._sequences]
        if event.answers:
            answers = dict(zip(event.ended, event.answers, strict=True))
            for sequence in ended:
                if sequence.is_exact:
                    self._prefixes.answered(sequence, answers[sequence.request], actions)
        for sequence in ended:
            assert sequence.state in ENDED
            self.forget(sequence)

    def _computed(self, run: Run, steps: int, actions: Actions) -> None:
        """Advances prompts by their chunks; computed ones decode from the next run on, or are handed over."""
        stored: list[BlockName] = []
        for piece in run.chunks:
            sequence = self._sequences.get(piece.request)
            if sequence is None:
                continue  # cancelled meanwhile
            sequence.computed = piece.start + piece.count * steps
            if sequence.restore:
                self._states.restored(sequence)
            if sequence.names:
                stored += self._prefixes.computed(sequence, piece.samples, actions)
            if piece.samples:
                if sequence.assembly is not None or sequence.scratch:
                    self._memory.assembled(sequence)
                self._batch.prompts.remove(sequence)
                if sequence.hands_over:  # it keeps its blocks until it is forgotten
                    sequence.state = DEPARTS[sequence.state]
                    self._states.leave(sequence)
                else:
                    sequence.state = COMPUTED[sequence.state]
                    self._batch.decoding.start(sequence)
        if stored:
            actions.append(BlocksStored(self.node, tuple(stored)))

    # The next run.

    def plan(self, actions: Actions, now: int = 0) -> Run | None:
        """Forms the next run, if none is out and a request waits for one; it is the last action. `now`, in ns, is for
        promises. Running sequences have the first claim on blocks, reservations the last."""
        if self.run is not None:
            return None
        batch, waiting, incoming = self._batch, self._admission.waiting, self._incoming
        decoding, prompts = batch.decoding, batch.prompts
        if not (decoding.sequences or waiting or prompts or incoming.joining or incoming.expected):
            return None
        if incoming.joining:
            incoming.join(actions)
        if decoding.fills:
            while not decoding.make_room(self.pool):
                self._preempt(actions)
            if incoming.joining:  # a pre-emption freed a place
                incoming.join(actions)
        for prompt in prompts:
            if prompt.remote.num_planned:
                self._memory.extend(prompt)
        chunks = self._chunks.cut(actions, now) if prompts or waiting else []
        if incoming.expected and (not waiting or batch.turns.has_ahead):
            # Blocks that a pre-empted prompt needs may be held by requests that passed others, whose other node may
            # wait for this one: so the oldest are received all the same.
            incoming.reserve(actions, in_order=bool(waiting))
        if self.pool.evicted:
            self._tell_evicted(actions)
        if decoding.sequences:
            run = decoding.run(chunks)
        elif chunks:
            run = Run(tuple(chunks), 0, 0, self._chunks.steps(chunks), list)
        else:
            return None
        self.run = run
        actions.append(run)
        return run

    def _tell_evicted(self, actions: Actions) -> None:
        if self.pool.evicted:
            actions.append(BlocksEvicted(self.node, self.pool.take_evicted()))

    def _preempt(self, actions: Actions) -> None:
        """Puts the youngest sequence back to the head of the queue; or drops it, if its KV at holders, or what packing
        dropped, cannot be computed anew here."""
        victim = self._batch.youngest()
        if victim.is_bound:
            self.forget(victim)
            self.dropped.append(victim)
        else:
            self._batch.remove(victim)
            self._memory.release(victim)
            self._admission.put_back(victim)
        actions.append(Preempted(victim.request))
