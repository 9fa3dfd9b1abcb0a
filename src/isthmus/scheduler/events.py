"""What a node tells its scheduler, and what the scheduler answers. Token positions are 0-based, half-open."""

from __future__ import annotations

import msgspec

from isthmus.types import BlockName, RequestId


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """A request to compute here. It ends at the latest when it has `stop_length` tokens in all.

    `detach`: after its prompt is computed the request leaves for another node; its blocks stay held
    until `Released`.
    """

    request: RequestId
    num_tokens: int
    stop_length: int
    names: tuple[BlockName, ...] = ()
    detach: bool = False


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


Event = Arrived | Expected | Imported | Stepped | Released | Cancelled


class Piece(msgspec.Struct, frozen=True):
    """Compute tokens `[start, start + count)` of one request, whose KV lies in `blocks`.

    When `samples`, this piece reaches the end of the known tokens and yields the next one.
    """

    request: RequestId
    start: int
    count: int
    blocks: tuple[int, ...]
    samples: bool


class Run(msgspec.Struct, frozen=True, tag=True):
    """Execute this batch, unchanged, for up to `steps` iterations; decodes first.

    `steps > 1` only when every piece is a decode: iteration i then computes position `start + i`.
    """

    pieces: tuple[Piece, ...]
    steps: int = 1


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request got its blocks; its first `cached_tokens` tokens need no computing."""

    request: RequestId
    cached_tokens: int
    blocks: tuple[int, ...]


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """An expected request may be received into `blocks`."""

    request: RequestId
    blocks: tuple[int, ...]


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A request lost its blocks to an older one; it is queued again and computed anew."""

    request: RequestId


class Stored(msgspec.Struct, frozen=True, tag=True):
    """These blocks are now cached here."""

    names: tuple[BlockName, ...]


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """These blocks are no longer cached here."""

    names: tuple[BlockName, ...]


Action = Run | Admitted | Reserved | Preempted | Stored | Evicted
