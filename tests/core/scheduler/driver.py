"""A node without torch: it does what the scheduler says to an imagined KV memory, and believes nothing.

Each slot of that memory remembers for which sequence of tokens it was written. A piece may run only if every
position before it is there, written for exactly its request's tokens; so sharing, resuming, caching and
eviction are all judged by what attention would read. So are recurrent states: a slot remembers after which tokens
its state is, and snapshots are written to blocks and read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import blake3
import msgspec

from isthmus.core.attempts import BlocksEvicted, BlocksStored
from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus.core.scheduler import (
    Admitted,
    Joined,
    Limits,
    Piece,
    Preempted,
    Run,
    Stepped,
)
from isthmus.core.types import BlockName, RequestId

from .told import Fact, Reserved, Told, arrived, expected, forgotten, imported


class State(Enum):
    WAITING = auto()
    COMPUTING = auto()
    EXPECTED = auto()
    RECEIVING = auto()
    JOINING = auto()
    DETACHED = auto()


@dataclass
class Guest:
    """One request as the node sees it. `computed`: positions with KV in `blocks` since it last (re)started, `cached` of
    them from the start; `known`: tokens that it had then."""

    request: RequestId
    tokens: list[int]
    stop_length: int
    state: State
    names: tuple[BlockName, ...] = ()
    hands_over: bool = False
    blocks: tuple[int, ...] = ()
    state_blocks: tuple[int, ...] = ()
    final: tuple[int, ...] = ()
    computed: int = 0
    cached: int = 0
    known: int = 0
    prints: list[bytes] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return 0 < self.known <= self.computed and not self.hands_over

    def fingerprint(self, position: int) -> bytes:
        """Stands for the KV of one position: it depends on all tokens up to there."""
        while len(self.prints) <= position:
            before = self.prints[-1] if self.prints else b""
            token = self.tokens[len(self.prints)].to_bytes(8, "little")
            self.prints.append(blake3.blake3(before + token).digest(length=8))
        return self.prints[position]


class Node:
    """Drives one scheduler. `log`: every action, in order; `ended`: how each request ended, once."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.scheduler = limits, Told(limits)
        layout = KVLayout("float32", limits.block_size, 1, 1, 1)
        self.namer = BlockNamer(revision="test", layout=layout)
        self.guests: dict[RequestId, Guest] = {}
        self.computing: list[RequestId] = []  # oldest admission first
        self.leaving: list[RequestId] = []  # cancelled, and still in the run
        self.run: Run | None = None
        self.cached: dict[BlockName, None] = {}
        self.memory: dict[int, bytes] = {}
        self.live: dict[int, bytes] = {}
        self.log: list[Any] = []
        self.ended: dict[RequestId, str] = {}
        self.num_arrived = 0
        self.num_preempted = 0
        self._fresh = 1 << 20

    # What happens to a node.

    def arrive(self, tokens: Sequence[int], max_tokens: int, *, hands_over: bool = False) -> RequestId:
        guest = self._add(tokens, max_tokens, State.WAITING)
        guest.hands_over, guest.names = hands_over, tuple(self.namer.names(tokens))
        self._tell(arrived(guest.request, len(tokens), guest.stop_length, guest.names, hands_over=hands_over))
        return guest.request

    def expect(self, tokens: Sequence[int], max_tokens: int) -> RequestId:
        guest = self._add(tokens, max_tokens, State.EXPECTED)
        self._tell(expected(guest.request, len(tokens), guest.stop_length))
        return guest.request

    def import_(self, request: RequestId) -> None:
        """All KV of a receiving request lands, and its first token is known."""
        guest = self.guests[request]
        assert guest.state is State.RECEIVING
        self._write(guest, 0, len(guest.tokens))
        self._write_state(guest, len(guest.tokens), guest.state_blocks)
        guest.state, guest.computed = State.JOINING, len(guest.tokens)
        guest.known = guest.computed
        guest.tokens.append(self._sample())
        self._tell(imported(request))

    def release(self, request: RequestId) -> None:
        assert self.guests[request].state is State.DETACHED
        guest = self.guests[request]
        self._check_readable(guest, guest.computed)
        if self.limits.state_blocks:
            assert self._state_in(guest.final) == guest.fingerprint(guest.computed - 1), (
                "its state did not leave"
            )
            assert self.scheduler.num_transfer >= self.limits.state_blocks
        self._end(request, "left")
        self._tell(forgotten(request))

    def cancel(self, request: RequestId) -> None:
        """At once; or, while a run may touch its blocks, when that is over."""
        guest, runs = self.guests.get(request), self.scheduler.computes(self.scheduler.of(request))
        if guest is not None:
            self._end(request, "cancelled")
            assert runs == (guest.state is State.COMPUTING and self.run is not None)
        if guest is not None and runs:
            self.leaving.append(request)
        else:
            self._tell(forgotten(request))

    def step(self, limit: int = 1 << 30, stopping: Sequence[RequestId] = ()) -> None:
        """Executes the run as a node does: until its steps are done, `limit` are, or a request ends.

        `stopping` meet a stop token when they next sample.
        """
        run, steps, ended = self.run, 0, []
        assert run is not None
        while steps < min(run.steps, max(1, limit)) and not ended:
            for piece in run.pieces:
                if self._execute(piece, piece.start + steps * piece.count) and (
                    piece.request in stopping
                    or len(self.guests[piece.request].tokens) == self.guests[piece.request].stop_length
                ):
                    ended.append(piece.request)
            steps += 1
        while self.leaving:
            self._tell(forgotten(self.leaving.pop(0)))
        for piece in run.pieces:
            guest = self.guests.get(piece.request)
            if guest is not None and guest.hands_over and piece.samples:
                guest.state = State.DETACHED
                self.computing.remove(piece.request)
        for request in ended:
            self._end(request, "finished")
        self.run = None
        self._tell(Stepped(steps, tuple(ended)))

    def in_state(self, state: State) -> list[RequestId]:
        return [guest.request for guest in self.guests.values() if guest.state is state]

    def drain(self, limit: int = 5000) -> None:
        """Lets everything that is here come to its end; fails when it never does."""
        for _ in range(limit):
            for request in self.in_state(State.RECEIVING):
                self.import_(request)
            for request in self.in_state(State.DETACHED):
                self.release(request)
            if self.run is not None:
                self.step()
            elif not self.guests:
                break
            else:
                movable = self.in_state(State.RECEIVING) + self.in_state(State.DETACHED)
                assert movable, f"nothing runs, and these wait for ever: {list(self.guests)}"
        assert not self.guests, "requests went on and on"
        assert set(self.ended) == {RequestId(f"r{number}") for number in range(self.num_arrived)}
        assert self.scheduler.pool.available == self.limits.num_blocks, "blocks did not come back"
        assert self.scheduler.num_transfer == 0, "a transfer is over and its blocks are not"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def encoded_log(self) -> bytes:
        return msgspec.json.encode([_plain(action) for action in self.log])

    # The node's own books.

    def _add(self, tokens: Sequence[int], max_tokens: int, state: State) -> Guest:
        stop_length = len(tokens) + max_tokens
        assert stop_length <= self.limits.capacity_tokens, "the conductor refuses such"
        guest = Guest(RequestId(f"r{self.num_arrived}"), list(tokens), stop_length, state)
        self.num_arrived += 1
        self.guests[guest.request] = guest
        return guest

    def _end(self, request: RequestId, how: str) -> None:
        assert request not in self.ended
        guest = self.guests.pop(request)
        if guest.state is State.COMPUTING:
            self.computing.remove(request)
        self.ended[request] = how

    def _sample(self) -> int:
        self._fresh += 1
        return self._fresh

    def _execute(self, piece: Piece, start: int) -> bool:
        """Computes a piece in one iteration; True when a request that still lives got a token.

        A request cancelled while the run was out is computed all the same: the engine learns of it later.
        """
        guest = self.guests.get(piece.request)
        if guest is None:
            for position in range(start, start + piece.count):
                self.memory[self._slot(piece.blocks, position)] = b"left over"
            return False
        self._check_readable(guest, start)
        self._write(guest, start, start + piece.count)
        guest.computed = start + piece.count
        if self.limits.state_blocks:
            self._recur(guest, piece, start)
        if piece.samples:
            guest.tokens.append(self._sample())
        return piece.samples

    def _recur(self, guest: Guest, piece: Piece, start: int) -> None:
        """Takes the live state over these tokens, with snapshots on the way."""
        if start:
            restores = piece.restore and start == piece.start
            found = self._state_in(piece.restore) if restores else self.live.get(piece.slot)
            assert found == guest.fingerprint(start - 1), f"{guest.request} goes on from a wrong state"
        else:
            assert not piece.restore, "a state before the first token is zero"
        self.live[piece.slot] = guest.fingerprint(start + piece.count - 1)
        for position, blocks in piece.snapshots:
            assert start < position <= start + piece.count, "a state that this piece does not reach"
            self._write_state(guest, position, blocks)
            if position == len(guest.tokens) and guest.hands_over:
                guest.final = blocks

    def _write_state(self, guest: Guest, position: int, blocks: Sequence[int]) -> None:
        assert len(set(blocks)) == self.limits.state_blocks
        for other in self.guests.values():
            assert not set(blocks) & set(other.blocks), "a snapshot is written over KV"
        for part, block in enumerate(blocks):
            self.memory[block * self.limits.block_size] = bytes([part]) + guest.fingerprint(position - 1)

    def _state_in(self, blocks: Sequence[int]) -> bytes | None:
        """Of which position the snapshot in these blocks is."""
        found = [self.memory.get(block * self.limits.block_size, b"?") for block in blocks]
        whole = all(part[0] == index and part[1:] == found[0][1:] for index, part in enumerate(found))
        return found[0][1:] if len(found) == self.limits.state_blocks and whole else None

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.limits.block_size] * self.limits.block_size + (
            position % self.limits.block_size
        )

    def _write(self, guest: Guest, start: int, stop: int) -> None:
        size = self.limits.block_size
        written = set(guest.blocks[start // size : -(-stop // size)])
        for other in self.guests.values():
            assert other is guest or not written & set(other.blocks), f"{guest.request} writes over others"
        for position in range(start, stop):
            self.memory[self._slot(guest.blocks, position)] = guest.fingerprint(position)

    def _check_readable(self, guest: Guest, stop: int) -> None:
        for position in range(stop):
            found = self.memory.get(self._slot(guest.blocks, position))
            assert found == guest.fingerprint(position), f"{guest.request} would read wrong KV at {position}"

    # Judging what the scheduler answers.

    def _tell(self, event: Fact) -> None:
        decoding = {request for request in self.computing if self.guests[request].decodes}
        actions = self.scheduler.on(event)
        self.log += actions
        self.scheduler.check()
        for index, action in enumerate(actions):
            match action:
                case Admitted():
                    self._on_admitted(action)
                case Reserved():
                    self._on_reserved(action)
                case Joined():
                    assert self.guests[action.request].state is State.JOINING
                    self.guests[action.request].state = State.COMPUTING
                    self.computing.append(action.request)
                    decoding.add(action.request)
                case Preempted():
                    assert action.request == self.computing.pop(), "not the newest was pre-empted"
                    decoding.discard(action.request)
                    guest = self.guests[action.request]
                    guest.state, guest.blocks, guest.computed = State.WAITING, (), 0
                    guest.state_blocks = ()
                    self.num_preempted += 1
                case BlocksStored():
                    assert not self.cached.keys() & set(action.names)
                    self.cached.update(dict.fromkeys(action.names))
                case BlocksEvicted():
                    for name in action.names:
                        del self.cached[name]
                case Run():
                    assert self.run is None, "two runs are out"
                    assert index == len(actions) - 1, "a run comes last"
                    self._on_run(action, decoding)
        assert self.scheduler.pool.cached == len(self.cached)
        waiting = len(self.in_state(State.WAITING)) + len(self.in_state(State.EXPECTED))
        assert self.scheduler.num_waiting == waiting
        running = len(self.guests) + len(self.leaving) - waiting
        assert self.scheduler.num_running == running <= 2 * self.limits.max_sequences
        assert self.run is not None or not self.computing, "work is there and nothing runs"

    def _on_admitted(self, action: Admitted) -> None:
        guest = self.guests[action.request]
        size, length = self.limits.block_size, len(guest.tokens)
        assert guest.state is State.WAITING
        assert action.cached_tokens % size == 0
        assert action.cached_tokens < length, "nothing is left to compute, and so nothing to sample from"
        assert len(action.blocks) == -(-length // size)
        guest.state, guest.blocks, guest.computed = State.COMPUTING, action.blocks, action.cached_tokens
        guest.cached, guest.known = action.cached_tokens, length
        guest.final = ()
        assert bool(action.state) == bool(self.limits.state_blocks and action.cached_tokens)
        self._check_readable(guest, action.cached_tokens)
        self._check_exclusive(guest, action.blocks[action.cached_tokens // size :])
        self.computing.append(action.request)

    def _on_reserved(self, action: Reserved) -> None:
        guest = self.guests[action.request]
        assert guest.state is State.EXPECTED
        assert len(action.blocks) * self.limits.block_size > len(guest.tokens)
        guest.state, guest.blocks, guest.state_blocks = State.RECEIVING, action.blocks, action.state
        assert len(action.state) == self.limits.state_blocks
        self._check_exclusive(guest, action.blocks)

    def _check_exclusive(self, guest: Guest, blocks: Sequence[int]) -> None:
        """New blocks are nobody else's; what other requests may share is only what is cached by name."""
        assert len(set(guest.blocks)) == len(guest.blocks)
        for other in self.guests.values():
            assert other is guest or not set(blocks) & set(other.blocks), "a new block is held by another"

    def _on_run(self, run: Run, decoding: set[RequestId]) -> None:
        self.run = run
        placed = len(self.computing) + len(self.in_state(State.DETACHED))
        assert placed <= self.limits.max_sequences
        assert placed == self.limits.max_sequences or not self.in_state(State.JOINING)
        requests = [piece.request for piece in run.pieces]
        assert requests and len(set(requests)) == len(requests)
        assert set(requests[: len(decoding)]) == decoding, "decodes come first, and none of them waits"
        budget = max(1, self.limits.token_budget - len(decoding))
        prompts = run.pieces[len(decoding) :]
        assert sum(piece.count for piece in prompts) <= budget
        alone = len(run.pieces) == 1 and self.limits.partial_prefills == 1
        most = self.limits.max_steps
        if prompts:
            most = self.limits.max_chunks if alone and not prompts[0].samples else 1
        assert 1 <= run.steps <= most
        if not prompts:  # as long as nobody ends or lacks a block
            ends = [self.guests[piece.request].stop_length - 1 - piece.start for piece in run.pieces]
            rooms = [len(piece.blocks) * self.limits.block_size - piece.start for piece in run.pieces]
            assert run.steps == min(most, *ends, *rooms)
            assert run.context == sum(piece.start + 1 for piece in run.pieces)
        for piece in run.pieces:
            self._check_piece(piece, run.steps, alone=alone)
        unfinished = [request for request in self.computing if request not in requests]
        assert not unfinished or sum(piece.count for piece in prompts) == budget, "budget is left over"

    def _check_piece(self, piece: Piece, steps: int, *, alone: bool) -> None:
        guest, size = self.guests[piece.request], self.limits.block_size
        assert guest.state is State.COMPUTING
        assert piece.start == guest.computed, "positions are consecutive"
        end = piece.start + piece.count
        assert piece.count >= 1 and end <= len(guest.tokens)
        assert piece.samples == (end == len(guest.tokens))
        if piece.samples:
            assert end + steps <= guest.stop_length, "the run goes past the last token"
        else:
            end += (steps - 1) * piece.count
            assert end < len(guest.tokens), "the last chunk is a run of its own"
            is_loaded = piece.start > 0 and piece.start == guest.cached
            assert steps == 1 or not is_loaded, "only what follows a cached prefix may have to wait for it"
            might = min(self.limits.max_chunks, (len(guest.tokens) - 1 - piece.start) // piece.count)
            assert steps == (1 if is_loaded or not alone else max(1, might))
        assert end + (steps - 1 if piece.samples else 0) <= len(piece.blocks) * size, (
            "the run goes past the blocks"
        )
        assert (len(piece.blocks) - 1) * size < guest.stop_length - 1, "a block that it will never need"
        assert piece.blocks[: len(guest.blocks)] == guest.blocks, "a request's blocks never change place"
        new, guest.blocks = piece.blocks[len(guest.blocks) :], piece.blocks
        self._check_exclusive(guest, new)
        assert steps == 1 or not guest.hands_over or not piece.samples, "a request that leaves runs on"


def _plain(action: Any) -> object:
    return ("Run", action.pieces, action.steps) if isinstance(action, Run) else action
