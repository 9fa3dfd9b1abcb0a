"""What a node tells its scheduler, and what the scheduler answers. Token positions are 0-based, half-open."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from isthmus.types import BlockName, RequestId, Tier


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """A request to compute here. It ends at the latest when it has `stop_length` tokens in all.

    `detach`: after its prompt is computed the request leaves for another node; its blocks stay held
    until `Released`. `num_cached`: leading blocks it was sent here for; of these `[fetch_start, fetch_stop)`
    are being fetched, until about `fetch_until_ns`. `work_ns`: time its prefill is expected to take;
    `deadline_ns`: when its first token was promised, 0 without a promise.
    """

    request: RequestId
    num_tokens: int
    stop_length: int
    names: tuple[BlockName, ...] = ()
    detach: bool = False
    num_cached: int = 0
    fetch_start: int = 0
    fetch_stop: int = 0
    fetch_until_ns: int = 0
    work_ns: int = 0
    deadline_ns: int = 0


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The fetch of a request is over. `stop`: its leading blocks that are here now; with recurrent states, all that
    was fetched is here, or less and no state.
    """

    request: RequestId
    stop: int


class Offered(msgspec.Struct, frozen=True, tag=True):
    """A prefix for the cache to keep that belongs to no prompt here: it came from another node, or a request that
    ended here generated the end of it."""

    names: tuple[BlockName, ...]


class Missing(msgspec.Struct, frozen=True, tag=True):
    """Of the cached prefix that a request was admitted with, only the first `num_blocks` could be loaded."""

    request: RequestId
    num_blocks: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The bytes of these blocks are gone or damaged, in whichever tier they were."""

    names: tuple[BlockName, ...]


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """Prefixes found whole on the SSD when the node started."""

    chains: tuple[tuple[BlockName, ...], ...]


class Expected(msgspec.Struct, frozen=True, tag=True):
    """A request whose KV for `num_tokens` tokens another node will send."""

    request: RequestId
    num_tokens: int
    stop_length: int


class Imported(msgspec.Struct, frozen=True, tag=True):
    """All KV of an expected request is here and checked; its first new token is known."""

    request: RequestId


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """`steps` iterations of the current run were executed; the requests in `ended` are over."""

    steps: int
    ended: tuple[RequestId, ...] = ()


class Released(msgspec.Struct, frozen=True, tag=True):
    """The blocks of a detached request are no longer needed by its transfer."""

    request: RequestId


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """Forget a request in whatever state; unknown requests are no error (the message may be late)."""

    request: RequestId


Event = (
    Arrived
    | Expected
    | Imported
    | Fetched
    | Offered
    | Missing
    | Lost
    | Recovered
    | Stepped
    | Released
    | Cancelled
)


class Piece(msgspec.Struct, frozen=True):
    """Compute tokens `[start, start + count)` of one request, whose KV lies in `blocks`.

    When `samples`, this piece reaches the end of the known tokens and yields the next one.

    Of a model with recurrent layers: the live state is in `slot`. At `start` 0 it is zero; else it is what the blocks
    `restore` hold, if there are any; else it goes on. `snapshots`: (position, blocks to write the state after so many
    tokens to), those that this piece reaches.
    """

    request: RequestId
    start: int
    count: int
    blocks: tuple[int, ...]
    samples: bool
    slot: int = 0
    restore: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Run:
    """Execute this batch, unchanged, for up to `steps` iterations; decodes first.

    `chunks`: the prompts' pieces. `num_decodes` requests decode, and their contexts, with the tokens of the first
    iteration, sum to `context`. Iteration i computes position `start + i` of a decode; a chunk repeats only when
    it is alone, and iteration i then computes `[start + i * count, start + (i + 1) * count)`.
    """

    __slots__ = ("_expand", "_pieces", "chunks", "context", "num_decodes", "steps")

    def __init__(
        self,
        chunks: tuple[Piece, ...],
        num_decodes: int,
        context: int,
        steps: int,
        expand: Callable[[], list[Piece]],
    ) -> None:
        self.chunks, self.num_decodes, self.context, self.steps = chunks, num_decodes, context, steps
        self._expand = expand
        self._pieces: tuple[Piece, ...] | None = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Every piece of the first iteration. Made when first asked for, which must be before the next event:
        a simulator never asks, since times need only the sums."""
        if self._pieces is None:
            self._pieces = (*self._expand(), *self.chunks) if self.num_decodes else self.chunks
        return self._pieces


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request got its blocks; its first `cached_tokens` tokens need no computing.

    They are in `blocks` already, or, on a node with a tiered cache, are to be loaded from there, `disk_blocks`
    of them from SSD, and a fetch may be under way. `state`: blocks that hold the recurrent state after these tokens,
    or that it is to be loaded to.
    """

    request: RequestId
    cached_tokens: int
    blocks: tuple[int, ...]
    disk_blocks: int = 0
    state: tuple[int, ...] = ()


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """An expected request may be received into `blocks`, its recurrent state into `state`."""

    request: RequestId
    blocks: tuple[int, ...]
    state: tuple[int, ...] = ()


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A request that was imported decodes from the next run on: there is a place for it."""

    request: RequestId


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A request lost its blocks to an older one; it is queued again and computed anew."""

    request: RequestId


class Stored(msgspec.Struct, frozen=True, tag=True):
    """These blocks are now cached here, in `tier`."""

    names: tuple[BlockName, ...]
    tier: Tier = Tier.MEMORY


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """These blocks are no longer cached here."""

    names: tuple[BlockName, ...]


Action = Run | Admitted | Reserved | Joined | Preempted | Stored | Evicted
