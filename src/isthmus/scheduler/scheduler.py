"""The node's scheduler: stall-free batches within a token budget (Sarathi-Serve, section 4).

One request's way:

    WAITING ──blocks──> COMPUTING ──ended──> gone
       ▲                  │   │ └─detach, prompt done──> DETACHED ──Released──> gone
       └────preempted─────┘   │
    EXPECTED ──blocks──> RECEIVING ──Imported──> COMPUTING

Every iteration takes, in this order: one token of each request that decodes, the unfinished prompts, then
new requests, until the token budget is spent. A prompt therefore never stalls the decodes.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

import msgspec

from isthmus.scheduler.events import (
    Action,
    Admitted,
    Arrived,
    Cancelled,
    Event,
    Evicted,
    Expected,
    Imported,
    Piece,
    Preempted,
    Released,
    Reserved,
    Run,
    Stepped,
    Stored,
)
from isthmus.scheduler.pool import BlockPool
from isthmus.types import BlockName, RequestId


class Limits(msgspec.Struct, frozen=True):
    """What one node may use.

    `token_budget`: tokens computed in one iteration (decodes are never cut, prompts get what is left, at
    least one); `max_sequences`: requests that hold blocks; `max_steps`: iterations of one run.
    """

    num_blocks: int
    block_size: int
    token_budget: int = 512
    max_sequences: int = 64
    max_steps: int = 16


class _State(Enum):
    WAITING = auto()
    COMPUTING = auto()
    DETACHED = auto()
    EXPECTED = auto()
    RECEIVING = auto()


class _Sequence:
    """One request here. Tokens `[0, computed)` have KV in `blocks`; tokens `[0, length)` are known."""

    __slots__ = (
        "blocks",
        "computed",
        "detach",
        "length",
        "named",
        "names",
        "request",
        "state",
        "stop_length",
    )

    def __init__(self, request: RequestId, length: int, stop_length: int, state: _State) -> None:
        self.request, self.length, self.stop_length, self.state = request, length, stop_length, state
        self.names: tuple[BlockName, ...] = ()
        self.detach = False
        self.computed = 0
        self.named = 0
        self.blocks: list[int] = []

    @property
    def decodes(self) -> bool:
        # One that leaves after its prompt never decodes here, even with one prompt token left.
        return self.length - self.computed == 1 and self.computed > 0 and not self.detach


class Scheduler:
    """Driven by `on`. It has at most one run out at a time: the next comes with the answer to `Stepped`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._expected: deque[_Sequence] = deque()
        self._computing: list[_Sequence] = []  # oldest first: the last one is pre-empted first
        self._run: Run | None = None

    def on(self, event: Event) -> list[Action]:
        """Takes one fact, returns what follows from it, in order. Mutates."""
        actions: list[Action] = []
        match event:
            case Arrived():
                self._arrive(event)
            case Expected():
                sequence = self._add(event.request, event.num_tokens, event.stop_length, _State.EXPECTED)
                self._expected.append(sequence)
            case Imported():
                self._import(event.request)
            case Stepped():
                self._advance(event, actions)
            case Released() | Cancelled():
                self._remove(event.request)
        if self._run is None:
            self._plan(actions)
        return actions

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._expected)

    @property
    def num_running(self) -> int:
        return len(self._sequences) - self.num_waiting

    def check(self) -> None:
        """Invariants, for tests and the simulator: blocks add up, and each request holds what it needs."""
        self.pool.check()
        size = self.limits.block_size
        for sequence in self._sequences.values():
            assert 0 <= sequence.computed <= sequence.length
            assert len(sequence.blocks) * size >= sequence.computed, "computed tokens without a block"
            waits = sequence.state in (_State.WAITING, _State.EXPECTED)
            assert not (waits and sequence.blocks), "a waiting request holds blocks"

    def _add(self, request: RequestId, length: int, stop_length: int, state: _State) -> _Sequence:
        assert request not in self._sequences, f"request {request} arrived twice"
        sequence = self._sequences[request] = _Sequence(request, length, stop_length, state)
        return sequence

    def _arrive(self, event: Arrived) -> None:
        sequence = self._add(event.request, event.num_tokens, event.stop_length, _State.WAITING)
        sequence.names, sequence.detach = event.names, event.detach
        self._waiting.append(sequence)

    def _import(self, request: RequestId) -> None:
        sequence = self._sequences[request]
        assert sequence.state is _State.RECEIVING
        sequence.state = _State.COMPUTING
        sequence.computed = sequence.length
        sequence.length += 1
        self._computing.append(sequence)

    def _remove(self, request: RequestId) -> None:
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return
        match sequence.state:
            case _State.WAITING:
                self._waiting.remove(sequence)
            case _State.EXPECTED:
                self._expected.remove(sequence)
            case _State.COMPUTING:
                self._computing.remove(sequence)
        self.pool.release(sequence.blocks)

    def _advance(self, event: Stepped, actions: list[Action]) -> None:
        """Books an executed run: positions computed, full prompt blocks named, ended requests gone."""
        assert self._run is not None and 0 <= event.steps <= self._run.steps
        stored: list[BlockName] = []
        for piece in self._run.pieces if event.steps else ():
            sequence = self._sequences.get(piece.request)
            if sequence is None:
                continue
            sequence.computed = piece.start + piece.count + event.steps - 1
            if piece.samples:
                sequence.length = sequence.computed + 1
            if sequence.named < len(sequence.names):
                self._name_blocks(sequence, stored)
            if piece.samples and sequence.detach:
                sequence.state = _State.DETACHED
                self._computing.remove(sequence)
        if stored:
            actions.append(Stored(tuple(stored)))
        for request in event.ended:
            self._remove(request)
        self._run = None

    def _name_blocks(self, sequence: _Sequence, stored: list[BlockName]) -> None:
        full = min(sequence.computed // self.limits.block_size, len(sequence.names))
        for index in range(sequence.named, full):
            if self.pool.store(sequence.blocks[index], sequence.names[index]):
                stored.append(sequence.names[index])
        sequence.named = full

    def _plan(self, actions: list[Action]) -> None:
        """Forms the next run. Reservations come last: what runs has the first claim on blocks."""
        pieces = self._decode_pieces(actions)
        num_decodes = len(pieces)
        # One token at least, so that prompts go on however many requests decode.
        budget = max(1, self.limits.token_budget - num_decodes)
        for sequence in self._computing:
            if not sequence.decodes and budget > 0:
                budget -= self._append_chunk(sequence, budget, pieces)
        while budget > 0 and self._admit(actions):
            budget -= self._append_chunk(self._computing[-1], budget, pieces)
        self._reserve(actions)
        evicted = self.pool.take_evicted()
        if evicted:
            actions.append(Evicted(evicted))
        if pieces:
            steps = self._steps(pieces) if len(pieces) == num_decodes else 1
            self._run = Run(tuple(pieces), steps)
            actions.append(self._run)

    def _decode_pieces(self, actions: list[Action]) -> list[Piece]:
        """One token each, oldest request first; under memory pressure the newest gives its blocks back."""
        decodes = [sequence for sequence in self._computing if sequence.decodes]
        for sequence in decodes:
            while sequence.state is _State.COMPUTING and not self._grow(sequence, 1):
                self._preempt(actions)
        decodes = [sequence for sequence in decodes if sequence.state is _State.COMPUTING]
        self._look_ahead(decodes)
        return [self._piece(sequence, 1) for sequence in decodes]

    def _look_ahead(self, decodes: list[_Sequence]) -> None:
        """Takes the blocks of the next `max_steps` iterations at once, while that leaves half the pool."""
        if self.pool.available > self.pool.num_blocks // 2:
            for sequence in decodes:
                self._grow(sequence, min(self.limits.max_steps, sequence.stop_length - sequence.length + 1))

    def _grow(self, sequence: _Sequence, steps: int) -> bool:
        """Makes room for `steps` more tokens after the computed ones; False when the pool is empty."""
        size = self.limits.block_size
        while len(sequence.blocks) * size < sequence.computed + steps:
            if not self.pool.available:
                return False
            sequence.blocks += self.pool.allocate(1, after=sequence.blocks[-1])
        return True

    def _preempt(self, actions: list[Action]) -> None:
        victim = self._computing.pop()
        self.pool.release(victim.blocks)
        victim.blocks, victim.computed, victim.named = [], 0, 0
        victim.state = _State.WAITING
        self._waiting.appendleft(victim)
        actions.append(Preempted(victim.request))

    def _admit(self, actions: list[Action]) -> bool:
        """Gives the first waiting request all blocks of its known tokens; False when it must wait on."""
        if not self._waiting or self.num_running >= self.limits.max_sequences:
            return False
        sequence, size = self._waiting[0], self.limits.block_size
        # At least one token is computed, for it yields the logits.
        cached = self.pool.match(sequence.names[: (sequence.length - 1) // size])
        needed = -(-sequence.length // size) - len(cached)
        if needed + self.pool.idle_among(cached) + self._headroom() > self.pool.available:
            return False
        self._waiting.popleft()
        self.pool.acquire(cached)
        sequence.blocks = cached + self.pool.allocate(needed)
        sequence.computed = len(cached) * size
        sequence.named = len(cached)
        sequence.state = _State.COMPUTING
        self._computing.append(sequence)
        actions.append(Admitted(sequence.request, sequence.computed, tuple(sequence.blocks)))
        return True

    def _headroom(self) -> int:
        """One spare block for each running request, so that admitting does not pre-empt at once."""
        return min(len(self._computing), self.limits.num_blocks // 8)

    def _reserve(self, actions: list[Action]) -> None:
        # A pre-empted request that waits for blocks comes first, or newer ones would starve it.
        while self._expected and not self._waiting and self.num_running < self.limits.max_sequences:
            sequence = self._expected[0]
            needed = -(-(sequence.length + 1) // self.limits.block_size)
            if needed + self._headroom() > self.pool.available:
                return
            self._expected.popleft()
            sequence.blocks = self.pool.allocate(needed)
            sequence.state = _State.RECEIVING
            actions.append(Reserved(sequence.request, tuple(sequence.blocks)))

    def _append_chunk(self, sequence: _Sequence, budget: int, pieces: list[Piece]) -> int:
        count = min(budget, sequence.length - sequence.computed)
        pieces.append(self._piece(sequence, count))
        return count

    def _piece(self, sequence: _Sequence, count: int) -> Piece:
        samples = sequence.computed + count == sequence.length
        return Piece(sequence.request, sequence.computed, count, tuple(sequence.blocks), samples)

    def _steps(self, pieces: list[Piece]) -> int:
        """Iterations for which no request needs a block or reaches its end, unless somebody waits."""
        if self._waiting:
            return 1
        steps = self.limits.max_steps
        for piece in pieces:
            room = len(piece.blocks) * self.limits.block_size - piece.start
            steps = min(steps, room, self._sequences[piece.request].stop_length - piece.start - 1)
        return max(1, steps)
