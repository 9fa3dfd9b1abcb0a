"""Letters between nodes, one class each, and the span of a hand-over. Sessions carry letters and know none of them.

A node answers `SendLetter(peer, letter)` and is told `LetterReceived(peer, letter)`; a letter about an unknown attempt
is void, except those that may come before the head's `StartAttempt` (`HandoverGranted`, `PromptComputed`). KV travels
apart, as frames of bytes; the node that received it writes the letter about it, so no letter overtakes its KV.

    decode  ──HandoverGranted──> prefill  ══KV══> decode   ──HandoverConfirmed──> prefill
    prefill ──PromptComputed───> decode   ──HandoverConfirmed──> prefill    where engines hand over by themselves
    fetcher ──FetchRequest─────> source   ══KV══> fetcher  ──FetchDone──> source

and those of homes and holders: `away.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.core.attempts import Route, Share, num_left_out
from isthmus.core.types import BlockName, RequestId

NONE = "none"


class HandoverSpan(msgspec.Struct, frozen=True):
    """Token positions whose KV is handed over, coded as `codec`; whole blocks of the recurrent state follow.

    0          start                        num_tokens   states          stop
    ├─ recalled ─┼────── KV of the prompt ───────┤ (pad) ├─ whole blocks ─┤
                                                         of the recurrent state
    """

    block_size: int
    start: int
    num_tokens: int
    states: int
    stop: int
    codec: str = NONE

    def codec_at(self, position: int) -> str:
        """Codec of the frame at a position; recurrent states are sent as they are."""
        return self.codec if position < self.states else NONE

    def resumes(self, received: int) -> int:
        """Position at which the next frame of a layer starts, after `received` tokens."""
        if received == self.num_tokens < self.stop:
            return self.states
        return received // self.block_size * self.block_size


def extent_of(route: Route, num_tokens: int, block_size: int, state_blocks: int) -> HandoverSpan:
    states = -(-num_tokens // block_size) * block_size
    stop = states + state_blocks * block_size if state_blocks else num_tokens
    start = num_left_out(route, num_tokens, block_size) * block_size
    return HandoverSpan(block_size, start, num_tokens, states, stop, route.codec)


Count = Annotated[int, msgspec.Meta(ge=0)]
"""Checked when a letter is decoded, since nodes rely on it."""


class HandoverGranted(msgspec.Struct, frozen=True, tag=True):
    """The decode node has room for an attempt: its KV may be sent."""

    key: RequestId


class HandoverConfirmed(msgspec.Struct, frozen=True, tag=True):
    """The decode node has all KV of an attempt, whole, and the prefill node may free it. `unread`: the decode node has
    read none of it and will read none."""

    key: RequestId
    unread: bool = False


class PromptComputed(msgspec.Struct, frozen=True, tag=True):
    """The prefill node has computed an attempt's prompt, of which `cached_tokens` tokens were cached. `params`: where
    its KV lies, in the engine's own format, to be used once; empty where the cache has it."""

    key: RequestId
    cached_tokens: Count
    params: bytes = b""


class FetchRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for the blocks of a prefix from `start` on. `whole`: for all of them or none."""

    key: RequestId
    names: tuple[BlockName, ...]
    start: Count
    whole: bool = False


class FetchDone(msgspec.Struct, frozen=True, tag=True):
    """A fetch has ended, and its source may unpin the blocks. An unknown key is no error."""

    key: RequestId


class ReserveRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for room for the first `num_blocks` blocks of a share of an attempt's KV, or to keep it for this node,
    too."""

    key: RequestId
    num_blocks: Count
    share: Share = Share()


class ReserveReply(msgspec.Struct, frozen=True, tag=True):
    """Answers `ReserveRequest`. Not `granted`: there is no room."""

    key: RequestId
    granted: bool


class ClaimRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for the KV of the attempt `old`, whose home is gone, for the attempt `key`, if it is the same share."""

    key: RequestId
    old: RequestId
    share: Share


class ClaimReply(msgspec.Struct, frozen=True, tag=True):
    """Answers `ClaimRequest`: the first `num_blocks` blocks are there, in all layers, and their seals matched."""

    key: RequestId
    num_blocks: Count


class ShipmentConfirmed(msgspec.Struct, frozen=True, tag=True):
    """The first `stop` blocks of an attempt's share are with the holder, in all layers, and their seals matched; or, if
    `damaged`, one did not."""

    key: RequestId
    stop: Count
    damaged: bool = False


class SendBack(msgspec.Struct, frozen=True, tag=True):
    """Asks for blocks `[first, first + num_blocks)` of an attempt's share. The holder keeps them until `Shrink`."""

    key: RequestId
    first: Count
    num_blocks: Count


class Shrink(msgspec.Struct, frozen=True, tag=True):
    """The sender needs room for only the first `num_blocks` blocks of an attempt; 0: for none. An unknown key is no
    error."""

    key: RequestId
    num_blocks: Count


Letter = (
    HandoverGranted | HandoverConfirmed | PromptComputed
    | FetchRequest | FetchDone
    | ReserveRequest | ReserveReply | ClaimRequest | ClaimReply | ShipmentConfirmed | SendBack | Shrink
)  # fmt: skip
