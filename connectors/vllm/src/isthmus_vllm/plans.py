"""What the scheduler side decides: which blocks of which request are loaded and saved, and which are pinned meanwhile.

Knows requests by id, blocks by number, and nothing of vLLM, sockets or clocks. `Planner.step` turns what is scheduled
into a `Plan` for the worker; the worker's answers come back through `reported` and `loaded`.

A block is saved once in a request's life, in the order of its chain, and only when its KV is computed and all its
tokens are known. It is pinned from the plan that says so until the worker has reported that job, whatever becomes of
the request meanwhile: a preempted request's blocks may go to others, pinned ones not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from isthmus.core.blocks import KEY_BYTES, names_by

FIELD = "isthmus"
FORGET_S = 1.0
"""So long the worker's word that it has no connection is believed. A load without one fails at once, a prompt computed
for nothing takes longer."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the adapter says of a request: `blocks` leading blocks of it can be loaded."""

    v: Literal[1]
    key: Annotated[str, msgspec.Meta(min_length=1)]
    blocks: Annotated[int, msgspec.Meta(ge=0)]
    namer: str


def ticket_of(params: object) -> tuple[Ticket, bytes] | None:
    """The ticket in a request's `kv_transfer_params` and the namer's key; None without. ValueError if ill-formed."""
    if not isinstance(params, dict) or FIELD not in params:
        return None
    ticket = msgspec.convert(params[FIELD], Ticket)
    key = bytes.fromhex(ticket.namer)
    if len(key) != KEY_BYTES:
        raise ValueError(f"namer: {KEY_BYTES} bytes are expected, not {len(key)}")
    return ticket, key


class Chain:
    """Names of the full blocks of one sequence of tokens, made as far as they are asked for."""

    def __init__(self, key: bytes, block_size: int) -> None:
        self._key, self._block_size = key, block_size
        self._names: list[bytes] = []

    def names(self, tokens: Sequence[int], first: int, end: int) -> tuple[bytes, ...]:
        """Names of blocks `first` to `end`, not including `end`. `tokens` may have grown since, never changed."""
        size, known = self._block_size, len(self._names)
        assert end * size <= len(tokens), "a block has no name before all its tokens are known"
        new = tokens[known * size : end * size]
        self._names += names_by(self._key, size, new, parent=self.parent(known))
        return tuple(self._names[first:end])

    def parent(self, first: int) -> bytes | None:
        """Name of the block before `first`, which must have been made; None for the first block."""
        return self._names[first - 1] if first else None


@dataclass(frozen=True)
class LoadOrder:
    """Blocks to be filled, in order."""

    load: int
    request: str
    key: str
    names: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SaveOrder:
    """Blocks number `first`… of the request's chain, pinned until `job` is reported."""

    job: int
    request: str
    key: str
    first: int
    parent: bytes | None
    names: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """For the worker, one step. Loads and aborts may be taken up at once, saves after the step's forward; `over` (ids
    and keys of requests) after all saves before."""

    loads: tuple[LoadOrder, ...] = ()
    aborts: tuple[int, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """From the worker: jobs that are through, saved or not; requests of which no further save would be of use; whether
    there is a connection, if there is news of it."""

    jobs: tuple[int, ...] = ()
    ended: tuple[str, ...] = ()
    connected: bool | None = None

    def __add__(self, other: Report) -> Report:
        connected = self.connected if other.connected is None else other.connected
        return Report(self.jobs + other.jobs, self.ended + other.ended, connected)


@dataclass(frozen=True)
class Scheduled:
    """A request in this step: `computed` tokens have KV once it is done; `hashed` blocks have all their tokens for
    good, as vLLM says."""

    request: str
    computed: int
    hashed: int


@dataclass
class _Request:
    ticket: Ticket
    chain: Chain
    tokens: Sequence[int]  # a live view
    saved: int  # blocks before this one are the adapter's, or on their way there
    local: int = 0  # tokens that vLLM found itself, when last asked
    load: int | None = None
    may_load: bool = True
    may_save: bool = True


@dataclass
class Planner:
    """`pin` and `unpin` count references on blocks of vLLM's pool."""

    block_size: int
    pin: Callable[[tuple[int, ...]], None]
    unpin: Callable[[tuple[int, ...]], None]
    _requests: dict[str, _Request] = field(default_factory=dict)
    _pinned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _loads: list[LoadOrder] = field(default_factory=list)
    _aborts: list[int] = field(default_factory=list)
    _over: list[tuple[str, str]] = field(default_factory=list)
    _last: int = 0
    _lost_at: float | None = None

    def begin(self, request: str, ticket: Ticket, key: bytes, tokens: Sequence[int]) -> None:
        """A request with a ticket arrives."""
        chain = Chain(key, self.block_size)
        self._requests[request] = _Request(ticket, chain, tokens, saved=ticket.blocks)

    def matched(self, request: str, local: int, now: float) -> int:
        """Tokens after the `local` ones that can be loaded. May be asked again and again."""
        known = self._requests.get(request)
        if known is None or not known.may_load or self._is_lost(now):
            return 0
        known.local = local
        blocks = min(known.ticket.blocks, len(known.tokens) // self.block_size)
        return max(0, blocks * self.block_size - local)

    def allocated(self, request: str, num_tokens: int, blocks: Sequence[int]) -> None:
        """The request has its blocks, and `num_tokens` tokens after the local ones are to be loaded into them."""
        known = self._requests.get(request)
        if known is None or not num_tokens:
            return
        assert known.load is None, "one load of a request at a time"
        first, end = known.local // self.block_size, (known.local + num_tokens) // self.block_size
        known.load = self._number()
        names = known.chain.names(known.tokens, first, end)
        self._loads.append(LoadOrder(known.load, request, known.ticket.key, names, tuple(blocks[first:end])))

    def loaded(self, request: str, *, whole: bool) -> None:
        """The worker is through with the request's load. If it failed, vLLM computes all, and the adapter's promise is
        void: all is saved anew, which may mend what was damaged."""
        if (known := self._requests.get(request)) is not None:
            known.load = None
            if not whole:
                known.may_load = False
                known.saved = 0

    def step(self, scheduled: Iterable[Scheduled], blocks_of: Callable[[str], Sequence[int]]) -> Plan:
        """The plan of one step. `blocks_of`: a scheduled request's blocks as they are now."""
        saves = tuple([order for facts in scheduled if (order := self._save(facts, blocks_of)) is not None])
        plan = Plan(tuple(self._loads), tuple(self._aborts), saves, tuple(self._over))
        self._loads, self._aborts, self._over = [], [], []
        return plan

    def finished(self, request: str) -> None:
        """The request has ended, in whatever way. What is pinned stays so until its job is reported."""
        if (known := self._requests.pop(request, None)) is None:
            return
        if known.load is not None:
            self._aborts.append(known.load)
        self._over.append((request, known.ticket.key))

    def reported(self, report: Report, now: float) -> None:
        """The worker's news."""
        for job in report.jobs:
            self.unpin(self._pinned.pop(job))
        for request in report.ended:
            if (known := self._requests.get(request)) is not None:
                known.may_save = False
        if report.connected is not None:
            self._lost_at = None if report.connected else now

    @property
    def has_work(self) -> bool:
        """Whether there is something that only another step can bring on."""
        return bool(self._pinned or self._loads or self._aborts or self._over)

    def check(self) -> None:
        """Raises AssertionError on a state that must not be."""
        assert all(self._pinned.values())
        for known in self._requests.values():
            assert known.may_load or known.load is None

    def _save(self, facts: Scheduled, blocks_of: Callable[[str], Sequence[int]]) -> SaveOrder | None:
        known = self._requests.get(facts.request)
        if known is None or not known.may_save:
            return None
        first, end = known.saved, min(facts.computed // self.block_size, facts.hashed)
        if end <= first:
            return None
        blocks = tuple(blocks_of(facts.request)[first:end])
        assert len(blocks) == end - first, "what is computed has its place"
        names = known.chain.names(known.tokens, first, end)
        job, known.saved = self._number(), end
        self.pin(blocks)
        self._pinned[job] = blocks
        parent = known.chain.parent(first)
        return SaveOrder(job, facts.request, known.ticket.key, first, parent, names, blocks)

    def _is_lost(self, now: float) -> bool:
        return self._lost_at is not None and now < self._lost_at + FORGET_S

    def _number(self) -> int:
        self._last += 1
        return self._last
