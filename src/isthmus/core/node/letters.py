"""What of a request's KV is handed over, in token positions.

0          start                        num_tokens   states          stop
├─ recalled ─┼────── KV of the prompt ───────┤ (pad) ├─ whole blocks ─┤
                                                     of the recurrent state
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.core.attempts import Route, Share, num_left_out
from isthmus.core.types import BlockName, RequestId

NONE = "none"


class HandoverSpan(msgspec.Struct, frozen=True):
    """Tokens `[start, num_tokens)`, then whole blocks from `states` on that hold the recurrent state, up to `stop`.
    `codec`: of the KV."""

    block_size: int
    start: int
    num_tokens: int
    states: int
    stop: int
    codec: str = NONE

    def codec_at(self, position: int) -> str:
        """States are not KV: no codec of numbers fits them."""
        return self.codec if position < self.states else NONE

    def resumes(self, received: int) -> int:
        """Where the next frame of a layer starts that has so much."""
        if received == self.num_tokens < self.stop:
            return self.states
        return received // self.block_size * self.block_size


def extent_of(route: Route, num_tokens: int, block_size: int, state_blocks: int) -> HandoverSpan:
    states = -(-num_tokens // block_size) * block_size
    stop = states + state_blocks * block_size if state_blocks else num_tokens
    start = num_left_out(route, num_tokens, block_size) * block_size
    return HandoverSpan(block_size, start, num_tokens, states, stop, route.codec)


# Letters: what one node says to another, one class each. Sessions and links carry them and know none of them.
#
# A node answers `SendLetter(peer, letter)` and hears `LetterReceived(peer, letter)`; a letter about an attempt that its
# reader does not know is void, but for those that may come before the head's word (`HandoverGranted`,
# `PromptComputed`). KV travels apart, as frames of bytes, and a letter never overtakes the KV it speaks of: it is said
# when that has come, by the node to which it came.
#
# decode  ──HandoverGranted──> prefill  ══KV══> decode   ──HandoverConfirmed──> prefill
# prefill ──PromptComputed───> decode   ──HandoverConfirmed──> prefill    where engines hand over by themselves
# fetcher ──FetchRequest─────> source   ══KV══> fetcher  ──FetchDone──> source
# home    ──ReserveRequest───> holder   ──ReserveReply──> home
# home    ══KV══>              holder   ──ShipmentConfirmed──> home       then Shrink, when less is to lie there
# home    ──SendBack─────────> holder   ══KV══> home
# next    ──ClaimRequest─────> holder   ──ClaimReply──> next              when the home before it is gone


Count = Annotated[int, msgspec.Meta(ge=0)]
"""Checked where a letter is read from a session: a node counts on it."""


class HandoverGranted(msgspec.Struct, frozen=True, tag=True):
    """The decode node has room for an attempt: its KV may be sent."""

    key: RequestId


class HandoverConfirmed(msgspec.Struct, frozen=True, tag=True):
    """All KV of an attempt is at its decode node, whole: the prefill node may let go of it. `unread`: the decode node
    has taken nothing and will take nothing."""

    key: RequestId
    unread: bool = False


class PromptComputed(msgspec.Struct, frozen=True, tag=True):
    """The prompt of an attempt is computed at its prefill node, of whose tokens `cached_tokens` needed no computing.
    `params`: where its KV lies, in the engine's own words, to be used once; none where the cache has it."""

    key: RequestId
    cached_tokens: Count
    params: bytes = b""


class FetchRequest(msgspec.Struct, frozen=True, tag=True):
    """The blocks of this prefix from `start` on are wanted. `whole`: all of them or none."""

    key: RequestId
    names: tuple[BlockName, ...]
    start: Count
    whole: bool = False


class FetchDone(msgspec.Struct, frozen=True, tag=True):
    """What was wanted is there, or is not wanted any more. Unknown ones are no error."""

    key: RequestId


class ReserveRequest(msgspec.Struct, frozen=True, tag=True):
    """Keep room for the first `num_blocks` blocks of a share of an attempt's KV, or go on keeping it for this node
    too."""

    key: RequestId
    num_blocks: Count
    share: Share = Share()


class ReserveReply(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReserveRequest`. Not `granted`: there is no room."""

    key: RequestId
    granted: bool


class ClaimRequest(msgspec.Struct, frozen=True, tag=True):
    """What lies here of the attempt `old`, whose home is gone, is of the attempt `key` from now on, if it is this
    share."""

    key: RequestId
    old: RequestId
    share: Share


class ClaimReply(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ClaimRequest`: the first `num_blocks` blocks are there, in all layers, and their seals matched."""

    key: RequestId
    num_blocks: Count


class ShipmentConfirmed(msgspec.Struct, frozen=True, tag=True):
    """The first `stop` blocks of an attempt's share are with the holder, in all layers, and their seals matched; or, if
    `damaged`, one did not."""

    key: RequestId
    stop: Count
    damaged: bool = False


class SendBack(msgspec.Struct, frozen=True, tag=True):
    """Blocks `[first, first + num_blocks)` of an attempt's share are wanted at home. They stay with the holder until
    `Shrink`."""

    key: RequestId
    first: Count
    num_blocks: Count


class Shrink(msgspec.Struct, frozen=True, tag=True):
    """Of the room for an attempt's KV the node that says so needs only that for the first `num_blocks` blocks; 0: none.
    Unknown ones are no error."""

    key: RequestId
    num_blocks: Count


Letter = (
    HandoverGranted | HandoverConfirmed | PromptComputed
    | FetchRequest | FetchDone
    | ReserveRequest | ReserveReply | ClaimRequest | ClaimReply | ShipmentConfirmed | SendBack | Shrink
)  # fmt: skip
