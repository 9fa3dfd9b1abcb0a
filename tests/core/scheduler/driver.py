"""A node without torch: it does what the scheduler says to an imagined KV memory, and believes nothing.

Each slot of that memory remembers for which sequence of tokens it was written. A piece may run only if every
position before it is there, written for exactly its request's tokens; so sharing, resuming, caching and
eviction are all judged by what attention would read. So are recurrent states: a slot remembers after which tokens
its state is, and snapshots are written to blocks and read back.

With tiers beside the memory, blocks are saved some time after they were computed, and loaded some time after a prompt
was admitted: until then nobody else may have them, and what a prompt counts on stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import blake3
import msgspec

from isthmus.core.attempts import BlocksEvicted, BlocksStored, FetchOrder
from isthmus.core.blocks import MAX_SNAPSHOTS, BlockNamer, KVLayout, state_names
from isthmus.core.scheduler import (
    Actions,
    Admitted,
    AdoptBlocks,
    BlockPool,
    Demote,
    DropBlocks,
    Joined,
    LoadBlocks,
    Piece,
    Preempted,
    Promote,
    Run,
    SaveBlocks,
    Scheduler,
    SchedulerLimits,
    Sequence,
    Stepped,
    TbtTarget,
    TierCache,
)
from isthmus.core.types import NOBODY, BlockName, NodeId, RequestId, Tenant, Tier

Fact = Callable[["Told", Actions], None] | Stepped


class Reserved(msgspec.Struct, frozen=True):
    """An expected request may be received into `blocks`, its recurrent state into `state`."""

    request: RequestId
    blocks: tuple[int, ...]
    state: tuple[int, ...] = ()


class Expected(Sequence):
    def reserved(self) -> Actions:
        return [Reserved(self.request, self.blocks, self.restore)]


class Told(Scheduler):
    """Is told one fact at a time, and answers with what follows and the next run."""

    def on(self, fact: Fact, now: int = 0) -> list[Any]:
        actions: list[Any] = []
        if isinstance(fact, Stepped):
            self.step(fact, actions)
        else:
            fact(self, actions)
        self.plan(actions, now)
        return actions

    def of(self, request: RequestId) -> Sequence:
        """Who nobody knows any more is nobody."""
        return self._sequences.get(request) or Sequence(request, 1, 2)


def arrived(
    request: RequestId, num_tokens: int, stop_length: int, names: tuple[BlockName, ...] = (), **about: Any
) -> Fact:
    sequence = _with(Sequence(request, num_tokens, stop_length, names), about)
    return lambda scheduler, actions: scheduler.arrive(sequence)


def expected(request: RequestId, num_tokens: int, stop_length: int, **about: Any) -> Fact:
    sequence = _with(Expected(request, num_tokens, stop_length), about)
    return lambda scheduler, actions: scheduler.expect(sequence, actions)


def _with(sequence: Sequence, about: dict[str, Any]) -> Sequence:
    for name, value in about.items():
        setattr(sequence, name, value)
    return sequence


def imported(request: RequestId) -> Fact:
    return lambda scheduler, actions: scheduler.imported(scheduler.of(request))


def fetched(request: RequestId, stop: int) -> Fact:
    return lambda scheduler, actions: scheduler.fetched(scheduler.of(request), stop, actions)


def offered(names: tuple[BlockName, ...]) -> Fact:
    return lambda scheduler, actions: scheduler.keep(names, actions, RequestId("fetched"))


def missing(request: RequestId, num_blocks: int) -> Fact:
    return lambda scheduler, actions: scheduler.missing(scheduler.of(request), num_blocks)


def lost(names: tuple[BlockName, ...]) -> Fact:
    return lambda scheduler, actions: scheduler.lose(names, actions)


def recovered(chains: tuple[tuple[BlockName, ...], ...]) -> Fact:
    return lambda scheduler, actions: scheduler.recover(chains, actions)


def forgotten(request: RequestId) -> Fact:
    return lambda scheduler, actions: scheduler.forget(scheduler.of(request))


TENANTS = (Tenant("acme"), Tenant("globex", 2.0), NOBODY)


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
    them from the start; `known`: tokens that it had then. `kept`: blocks that it was sent here for, which stay until it
    is admitted; `load`: what is to come into its blocks before it is computed; `excused`: something of that was lost,
    or may not come."""

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
    kept: tuple[BlockName, ...] = ()
    fetch: FetchOrder | None = None
    load: LoadBlocks | None = None
    excused: bool = False
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

    def __init__(
        self,
        limits: SchedulerLimits,
        tiers: tuple[int, int] | None = None,
        target: TbtTarget | None = None,
        tenants: bool = False,
    ) -> None:
        self.limits, self.target, self.tenants = limits, target, tenants
        self.tiers = TierCache(*tiers) if tiers else None
        self.scheduler = Told(limits, self.tiers, BlockPool(limits.num_blocks), target)
        layout = KVLayout("float32", limits.block_size, 1, 1, 1)
        self.namer = BlockNamer(revision="test", layout=layout)
        self.guests: dict[RequestId, Guest] = {}
        self.computing: list[RequestId] = []  # oldest admission first
        self.leaving: list[RequestId] = []  # cancelled, and still in the run
        self.run: Run | None = None
        self.queue: list[RequestId] = []  # who waits for memory and a place, next first
        self.cached: dict[BlockName, Tier] = {}  # as the conductor heard
        self.bytes: dict[BlockName, Tier] = {}  # as the store was told
        self.meaning: dict[BlockName, list[bytes]] = {}  # what a block of this name holds
        self.owner: dict[BlockName, Tenant] = {}
        self.came: set[BlockName] = set()  # by the fetch that ended last
        self.saves: list[SaveBlocks] = []  # under way
        self.was_short = False  # a load brought less than was counted on
        self.memory: dict[int, bytes] = {}
        self.live: dict[int, bytes] = {}
        self.log: list[Any] = []
        self.ended: dict[RequestId, str] = {}
        self.num_arrived = 0
        self.num_preempted = 0
        self._fresh = 1 << 20

    # What happens to a node.

    def arrive(
        self, tokens: Tokens[int], max_tokens: int, *, hands_over: bool = False, sent: int = 0, **about: Any
    ) -> RequestId:
        """`sent`: chooses for what of its prompt it was sent here."""
        guest = self._add(tokens, max_tokens, State.WAITING)
        guest.hands_over, guest.names = hands_over, tuple(self.namer.names(tokens))
        self._learn(guest, about.get("tenant", NOBODY))
        num_blocks = len(guest.names)
        num_cached = (0, self._num_here(guest.names), num_blocks, num_blocks, num_blocks)[sent % 5]
        if self.tiers is not None and num_blocks:
            guest.kept = guest.names[: min(num_cached, self._num_here(guest.names))]
            if sent % 5 > 2:
                stop = 1 + sent % num_blocks
                guest.fetch, num_cached = FetchOrder(NodeId("peer"), sent // 5 % stop, stop), stop
                guest.excused, guest.kept = True, ()
        self.queue.append(guest.request)
        about |= {"hands_over": hands_over, "num_cached": num_cached, "fetch": guest.fetch}
        self._tell(arrived(guest.request, len(tokens), guest.stop_length, guest.names, **about))
        return guest.request

    def expect(self, tokens: Tokens[int], max_tokens: int, **about: Any) -> RequestId:
        guest = self._add(tokens, max_tokens, State.EXPECTED)
        self._tell(expected(guest.request, len(tokens), guest.stop_length, **about))
        return guest.request

    def end_fetch(self, request: RequestId, num_blocks: int) -> None:
        """So many blocks came; of a state all or nothing is of use."""
        guest = self.guests[request]
        fetch, guest.fetch, parts = guest.fetch, None, self.limits.state_blocks
        assert fetch is not None
        stop = min(fetch.stop, fetch.start + num_blocks)
        self.came = set(guest.names[fetch.start : stop])
        if parts and stop == fetch.stop:
            self.came |= set(state_names(guest.names[stop - 1], parts))
        here = self.came | self.cached.keys()
        lead = next((at for at, name in enumerate(guest.names[:stop]) if name not in here), stop)
        self._tell(fetched(request, lead))

    def offer(self, tokens: Tokens[int]) -> None:
        """Another node gave the blocks of this prompt."""
        guest = Guest(RequestId("offered"), list(tokens), 0, State.WAITING, tuple(self.namer.names(tokens)))
        self._learn(guest)
        self.came = set(guest.names)
        self._tell(offered(guest.names))

    def lose(self, number: int) -> None:
        """The bytes of a block are gone, and so nobody can go on from what follows it."""
        name = list(self.cached)[number % len(self.cached)]
        for guest in self.guests.values():
            guest.excused |= name in guest.names or self.limits.state_blocks > 0
        self._tell(lost((name,)))

    def saved(self, number: int) -> None:
        save = self.saves[number % len(self.saves)]
        self._check_saved(save)
        self.saves.remove(save)
        self._tell(lambda scheduler, actions: scheduler.saved(save.request))

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

    def step(self, limit: int = 1 << 30, stopping: Tokens[RequestId] = ()) -> None:
        """Executes the run as a node does: until its steps are done, `limit` are, or a request ends.

        `stopping` meet a stop token when they next sample.
        """
        run, steps, ended = self.run, 0, []
        assert run is not None
        for piece in run.chunks:
            if not self._is_loaded(piece.request):
                self._tell(Stepped(0))
                return
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
        answers = [self._answer(self.guests[request]) for request in ended]
        for request in ended:
            self._end(request, "finished")
        self.run = None
        self._tell(Stepped(steps, tuple(ended), tuple(answers)))

    def in_state(self, state: State) -> list[RequestId]:
        return [guest.request for guest in self.guests.values() if guest.state is state]

    def drain(self, limit: int = 5000) -> None:
        """Lets everything that is here come to its end; fails when it never does."""
        for _ in range(limit):
            for request in self.in_state(State.RECEIVING):
                self.import_(request)
            for request in self.in_state(State.DETACHED):
                self.release(request)
            while self.saves:
                self.saved(0)
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
        assert self.tiers is None or not self.tiers.num_pinned, "the tiers keep what nobody needs"

    def encoded_log(self) -> bytes:
        return msgspec.json.encode([_plain(action) for action in self.log])

    # The node's own books.

    def _add(self, tokens: Tokens[int], max_tokens: int, state: State) -> Guest:
        stop_length = len(tokens) + max_tokens
        assert stop_length <= self.limits.capacity_tokens, "the conductor refuses such"
        guest = Guest(RequestId(f"r{self.num_arrived}"), list(tokens), stop_length, state)
        self.num_arrived += 1
        self.guests[guest.request] = guest
        return guest

    def _learn(self, guest: Guest, tenant: Tenant = NOBODY) -> None:
        size, parts = self.limits.block_size, self.limits.state_blocks
        for depth, name in enumerate(guest.names, 1):
            stop = depth * size
            self.owner[name] = tenant
            self.meaning[name] = [guest.fingerprint(position) for position in range(stop - size, stop)]
            for part, its in enumerate(state_names(name, parts) if parts else ()):
                self.owner[its] = tenant
                self.meaning[its] = [bytes([part]) + guest.fingerprint(stop - 1)]

    def _num_here(self, names: Tokens[BlockName]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.cached), len(names))

    def _answer(self, guest: Guest) -> tuple[BlockName, ...]:
        if self.tiers is None or self.limits.state_blocks:
            return ()
        guest.names = tuple(self.namer.names(guest.tokens[: guest.computed]))
        self._learn(guest)
        return guest.names

    def _is_loaded(self, request: RequestId) -> bool:
        """Brings what it counts on into its blocks, after its fetch is over; False if some of it is not here."""
        guest = self.guests.get(request)
        if guest is None or guest.load is None:
            return True
        if guest.load.arriving and guest.fetch is not None:
            self.end_fetch(request, guest.fetch.stop)
        load, guest.load = guest.load, None
        found = self._num_here(load.names)
        for name, block in zip(load.names[:found], load.blocks, strict=False):
            for at, content in enumerate(self.meaning[name]):
                self.memory[block * self.limits.block_size + at] = content
        if found < len(load.names):
            assert guest.excused, "what it was to load went"
            self.was_short = True
            guest.computed = (
                0 if self.limits.state_blocks else min(guest.computed, found * self.limits.block_size)
            )
            run = self.run
            self._tell(missing(request, found))
            assert self.run is run
            self.run = None
            return False
        return True

    def _end(self, request: RequestId, how: str) -> None:
        assert request not in self.ended
        guest = self.guests.pop(request)
        if request in self.queue:
            self.queue.remove(request)
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

    def _write_state(self, guest: Guest, position: int, blocks: Tokens[int]) -> None:
        assert len(set(blocks)) == self.limits.state_blocks
        for other in self.guests.values():
            assert not set(blocks) & set(other.blocks), "a snapshot is written over KV"
        for part, block in enumerate(blocks):
            self.memory[block * self.limits.block_size] = bytes([part]) + guest.fingerprint(position - 1)

    def _state_in(self, blocks: Tokens[int]) -> bytes | None:
        """Of which position the snapshot in these blocks is."""
        found = [self.memory.get(block * self.limits.block_size, b"?") for block in blocks]
        whole = all(part[0] == index and part[1:] == found[0][1:] for index, part in enumerate(found))
        return found[0][1:] if len(found) == self.limits.state_blocks and whole else None

    def _slot(self, blocks: Tokens[int], position: int) -> int:
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
                    guest.state_blocks, guest.load = (), None
                    self.queue.insert(0, action.request)
                    self.num_preempted += 1
                case Run():
                    assert self.run is None, "two runs are out"
                    assert index == len(actions) - 1, "a run comes last"
                    self._on_run(action, decoding)
                    self._check_room(actions)
                case _:
                    self._on_cache(action)
        self._check_cache()
        waiting = len(self.in_state(State.WAITING)) + len(self.in_state(State.EXPECTED))
        assert self.scheduler.num_waiting == waiting
        running = len(self.guests) + len(self.leaving) - waiting
        assert self.scheduler.num_running == running <= 2 * self.limits.max_sequences
        assert self.run is not None or not self.computing, "work is there and nothing runs"

    def _on_cache(self, action: Any) -> None:
        """What becomes of blocks, in the order in which it is done."""
        match action:
            case BlocksStored():
                assert self.tiers is not None or not self.cached.keys() & set(action.names)
                self.cached |= dict.fromkeys(action.names, action.tier)
            case BlocksEvicted():
                for name in action.names:
                    del self.cached[name]
            case LoadBlocks():
                guest = self.guests[action.key]
                count = -(-guest.computed // self.limits.block_size)
                parts = self.limits.state_blocks
                state = state_names(guest.names[count - 1], parts) if parts else ()
                assert action.names == (*guest.names[:count], *state)
                assert action.blocks == guest.blocks[:count] + guest.state_blocks
                guest.load = action
            case SaveBlocks():
                stays = len(action.names) - action.num_sunk
                self.bytes |= dict.fromkeys(action.names[:stays], Tier.MEMORY)
                self.bytes |= dict.fromkeys(action.names[stays:], Tier.DISK)
                self._check_saved(action)
                self.saves.append(action)
                assert self.tiers is not None
                room = {Tier.MEMORY: self.tiers.dram.capacity_blocks, Tier.DISK: self.tiers.ssd.capacity_blocks}
                used = Counter(self.bytes.values())
                assert all(used[tier] <= room[tier] for tier in room), "no room was made first"
            case AdoptBlocks():
                assert set(action.names) <= self.came, "what did not come is adopted"
                self.bytes |= dict.fromkeys(action.names, Tier.MEMORY)
            case Promote() | Demote():
                assert set(action.names) <= self.bytes.keys(), "what is not here is moved"
                to = Tier.MEMORY if isinstance(action, Promote) else Tier.DISK
                self.bytes |= dict.fromkeys(action.names, to)
            case DropBlocks():
                for name in action.names:
                    del self.bytes[name]
            case _:
                raise AssertionError(f"what is {action}?")

    def _check_cache(self) -> None:
        """What the conductor believes is what the store has, and nothing went that somebody counts on."""
        if self.tiers is None:
            assert self.scheduler.pool.cached == len(self.cached)
            sizes = Counter({tenant.name: 0 for tenant in self.owner.values()})
            sizes.update(self.owner[name].name for name in self.cached)
            assert Counter(self.scheduler.pool.sizes()) == sizes, "a block is in another tenant's share"
            return
        self.tiers.check()
        held = dict.fromkeys(self.tiers.dram.held, Tier.MEMORY) | dict.fromkeys(self.tiers.ssd.held, Tier.DISK)
        assert self.cached == self.bytes == held
        for guest in self.guests.values():
            if not guest.excused:
                assert self.cached.keys() >= set(guest.kept), "what it was sent here for went"
                assert guest.load is None or self.cached.keys() >= set(guest.load.names), (
                    "what it is to load went"
                )

    def _check_saved(self, save: SaveBlocks) -> None:
        for name, block in zip(save.names, save.blocks, strict=True):
            for at, content in enumerate(self.meaning[name]):
                found = self.memory.get(block * self.limits.block_size + at)
                assert found == content, "what is saved is not what its name says"

    def _check_room(self, actions: list[Any]) -> None:
        """Memory is kept for those that run, and nobody waits for more than that."""
        limits, available = self.limits, self.scheduler.pool.available
        running = len([request for request in self.computing if request in self.guests])
        reserved = any(isinstance(action, Reserved) for action in actions)
        if reserved or any(isinstance(action, Admitted) for action in actions):
            assert available >= min(running - (not reserved), limits.num_blocks // 8), "none is kept free"
        assert self.run is not None
        taken = sum(piece.count for piece in self.run.chunks)
        placed = len(self.computing) + len(self.in_state(State.DETACHED))
        most = min(limits.prompt_batch, max(1, limits.token_budget - self.run.num_decodes))
        is_full = placed == limits.max_sequences or taken >= most
        if self.queue and self._is_plain and self.tiers is None and not is_full:
            needed = -(-len(self.guests[self.queue[0]].tokens) // limits.block_size)
            needed += MAX_SNAPSHOTS * limits.state_blocks + min(running, limits.num_blocks // 8)
            assert needed > available, "it waits though there is room"

    @property
    def _is_plain(self) -> bool:
        """Whether prompts are computed in the order in which they came."""
        plain = self.limits.order == "fcfs" and self.limits.partial_prefills == 1
        return plain and not self.tenants and self.target is None

    def _on_admitted(self, action: Admitted) -> None:
        guest = self.guests[action.request]
        size, length, loads = self.limits.block_size, len(guest.tokens), self.tiers is not None
        assert guest.state is State.WAITING
        assert action.request == self.queue[0] or not self._is_plain, "somebody else came first"
        self.queue.remove(action.request)
        assert action.cached_tokens % size == 0 or (loads and not action.state)
        assert action.cached_tokens < length, "nothing is left to compute, and so nothing to sample from"
        assert len(action.blocks) == -(-length // size)
        guest.state, guest.blocks, guest.computed = State.COMPUTING, action.blocks, action.cached_tokens
        guest.cached, guest.known, guest.state_blocks = action.cached_tokens, length, action.state
        guest.final, guest.kept = (), ()
        assert bool(action.state) == bool(self.limits.state_blocks and action.cached_tokens)
        if not loads:
            self._check_readable(guest, action.cached_tokens)
        self._check_exclusive(guest, action.blocks[0 if loads else action.cached_tokens // size :])
        self.computing.append(action.request)

    def _on_reserved(self, action: Reserved) -> None:
        guest = self.guests[action.request]
        assert guest.state is State.EXPECTED
        assert len(action.blocks) * self.limits.block_size > len(guest.tokens)
        guest.state, guest.blocks, guest.state_blocks = State.RECEIVING, action.blocks, action.state
        assert len(action.state) == self.limits.state_blocks
        self._check_exclusive(guest, action.blocks)

    def _check_exclusive(self, guest: Guest, blocks: Tokens[int]) -> None:
        """New blocks are nobody else's; what other requests may share is only what is cached by name."""
        assert len(set(guest.blocks)) == len(guest.blocks)
        for other in self.guests.values():
            assert other is guest or not set(blocks) & set(other.blocks), "a new block is held by another"
        for save in self.saves:
            assert save.request == guest.request or not set(blocks) & set(save.blocks), (
                "a new block is being saved"
            )

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
            available = self.scheduler.pool.available
            ahead = run.steps == min(most, *ends) or available <= max(most, self.limits.num_blocks // 2)
            assert ahead or self.num_preempted, "a run is short though there are blocks"
        assert run.context == sum(piece.start + 1 for piece in run.pieces[: run.num_decodes])
        for piece in run.pieces:
            self._check_piece(piece, run.steps, alone=alone)
        unfinished = [request for request in self.computing if request not in requests]
        taken = sum(piece.count for piece in prompts)
        if self.target is None or not decoding:
            assert not unfinished or taken == budget, "budget is left over"
        else:
            assert prompts or not unfinished, "prompts starve"
            sizes = [(piece.count, piece.start) for piece in prompts]
            took_ps = self.target.step_ps(sizes, len(decoding), run.context)
            assert taken <= self.target.minimum(len(decoding)) or took_ps <= self.target.limit_ps
        begun = len(self.computing) - len(decoding) - sum(piece.samples for piece in prompts)
        assert begun <= self.limits.partial_prefills or self.was_short, "too many are computed in parts"

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
