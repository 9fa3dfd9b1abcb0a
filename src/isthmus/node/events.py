"""What a node is told, and what it answers: facts in, actions out, both values that may be sent and written down.

Actions name whole spans of blocks, never single layers: whoever carries them out moves bytes as it likes, layer by
layer live, as flows in virtual time. Reports are the conductor's events and are passed on as they are.

`key` is that of an attempt (`attempts.key_of`); what comes for a key that a node does not know is void.
"""

from __future__ import annotations

import msgspec

from isthmus.attempts import Become as Become
from isthmus.attempts import Begin as Begin
from isthmus.attempts import Forget as Forget
from isthmus.attempts import Move as Move
from isthmus.attempts import Report, Share
from isthmus.attempts import Return as Return
from isthmus.node.extent import Extent
from isthmus.scheduler import Admitted, Joined, Preempted, Run, Saved, Stepped
from isthmus.scheduler import Adopt as Adopt
from isthmus.scheduler import Demote as Demote
from isthmus.scheduler import Drop as Drop
from isthmus.scheduler import Load as Load
from isthmus.scheduler import Promote as Promote
from isthmus.scheduler import Save as Save
from isthmus.types import NOBODY, BlockName, NodeId, RequestId, Tenant

# From other nodes.


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The decode node has room for an attempt: its KV may be sent."""

    key: RequestId


class Landed(msgspec.Struct, frozen=True, tag=True):
    """All KV of an attempt is at its decode node, whole: the sender may let go of it. `unread`: nothing of it is there
    and nothing will be taken."""

    key: RequestId
    unread: bool = False


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Another node wants the blocks of this prefix from `start` on. `whole`: all of them or none."""

    key: RequestId
    peer: NodeId
    names: tuple[BlockName, ...]
    start: int
    whole: bool = False


class Enough(msgspec.Struct, frozen=True, tag=True):
    """What another node wanted is there, or is not wanted any more. Unknown ones are no error."""

    key: RequestId
    peer: NodeId


class Asked(msgspec.Struct, frozen=True, tag=True):
    """Another node asks for room for `num_blocks` blocks of an attempt's KV, or says that it too needs the room that
    was given to its first node."""

    key: RequestId
    peer: NodeId
    num_blocks: int
    share: Share = Share()


class Claimed(msgspec.Struct, frozen=True, tag=True):
    """Another node goes on with what lies here of an attempt `old`, whose home is gone, as `key`."""

    key: RequestId
    peer: NodeId
    old: RequestId


class Left(msgspec.Struct, frozen=True, tag=True):
    """A node needs the room for an attempt's KV no more, or, `lost`, is gone. Unknown ones are no error."""

    key: RequestId
    peer: NodeId
    lost: bool = False


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Reserve`. Not `granted`: there is no room."""

    key: RequestId
    holder: NodeId
    granted: bool


class Found(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Claim`: of the share that was named `num_blocks` blocks are there whole."""

    key: RequestId
    holder: NodeId
    num_blocks: int


class Shipped(msgspec.Struct, frozen=True, tag=True):
    """Of what was to lie at `holder` the first `stop` blocks are there, all layers of them, and their seals matched."""

    key: RequestId
    holder: NodeId
    stop: int


class Shrunk(msgspec.Struct, frozen=True, tag=True):
    """Of the room for an attempt's KV a node needs only that for the first `num_blocks` blocks."""

    key: RequestId
    peer: NodeId
    num_blocks: int


class Reclaimed(msgspec.Struct, frozen=True, tag=True):
    """A `Reclaim` is over: all is in the engine and its seals matched, or not `whole`. Nothing is written there any
    more."""

    key: RequestId
    whole: bool


class Severed(msgspec.Struct, frozen=True, tag=True):
    """The session is gone over which these attempts are handed over, or stood still for too long."""

    keys: tuple[RequestId, ...]
    reason: str


# From who carries the actions out. `Stepped` and `Saved` are the scheduler's.


class Missing(msgspec.Struct, frozen=True, tag=True):
    """Of a cached prefix in the run only the first `num_blocks` blocks could be loaded. Comes just before a `Stepped`
    of no steps."""

    key: RequestId
    num_blocks: int


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """The last stage of a pipeline group has the first tokens of these; `ended`: of them, those that are over."""

    keys: tuple[RequestId, ...]
    ended: tuple[RequestId, ...] = ()


class Came(msgspec.Struct, frozen=True, tag=True):
    """Of a prefix that is being fetched all up to `stop` came. More may."""

    key: RequestId
    stop: int


class FetchEnded(msgspec.Struct, frozen=True, tag=True):
    """A fetch is over; all up to `stop` came, or less than it starts with: that much is still here."""

    key: RequestId
    stop: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """What a DECODE part does not get handed over is in the engine: `num_blocks` of it."""

    key: RequestId
    num_blocks: int


class Received(msgspec.Struct, frozen=True, tag=True):
    """All that is handed over of an attempt is in the engine, its seals matched, and its first token is known."""

    key: RequestId


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Some bytes came of what is handed over; or, with `fetched`, is fetched, or that was asked for."""

    key: RequestId
    fetched: bool = False


class Broken(msgspec.Struct, frozen=True, tag=True):
    """An attempt cannot go on here. `distrust`: what it uses of the cache may be why; `final`: nor on another."""

    key: RequestId
    reason: str
    distrust: bool = False
    final: bool = False


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The bytes of these cached blocks are gone or damaged, in whichever tier they were."""

    names: tuple[BlockName, ...]


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """Prefixes found whole on the SSD when the node started."""

    chains: tuple[tuple[BlockName, ...], ...]


# Of a node whose engine plans its own batches (`adapter.py`).


class Passed(msgspec.Struct, frozen=True, tag=True):
    """The prompt of an attempt is computed at its prefill node, of whose tokens `cached_tokens` needed no computing.
    `params`: where its KV lies, in the engine's own words, to be used once; none where the cache has it."""

    key: RequestId
    cached_tokens: int
    params: bytes = b""


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The engine has computed a prompt that was submitted, as `Passed` says; the rest of its answer follows, but of a
    PREFILL part there is none."""

    key: RequestId
    cached_tokens: int = 0
    params: bytes = b""


class Settled(msgspec.Struct, frozen=True, tag=True):
    """All that is to be saved of an attempt's KV was told as `Filled`, or will not be."""

    key: RequestId


class Over(msgspec.Struct, frozen=True, tag=True):
    """An attempt's answer is complete."""

    key: RequestId


class Filled(msgspec.Struct, frozen=True, tag=True):
    """The engine has put what is new of this prefix into the store's slots: an `Adopt` for `key` keeps some of it."""

    key: RequestId
    names: tuple[BlockName, ...]


class Held(msgspec.Struct, frozen=True, tag=True):
    """The engine's own memory has one more copy of each of these blocks."""

    names: tuple[BlockName, ...]


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The engine's own memory has one copy less of each of these; `all`: it has nothing any more."""

    names: tuple[BlockName, ...] = ()
    all: bool = False


class Woken(msgspec.Struct, frozen=True, tag=True):
    """Some time has passed: a `Wake` is due, or it is time to look at what stands still."""


Event = (
    Begin | Forget | Move | Return | Become
    | Granted | Landed | Wanted | Enough | Severed
    | Asked | Left | Shrunk | Claimed | Reserved | Found | Shipped | Reclaimed
    | Stepped | Saved | Missing | Sampled | Came | FetchEnded | Loaded | Received | Moved | Broken | Lost | Recovered
    | Passed | Answered | Settled | Over | Filled | Held | Dropped
    | Woken
)  # fmt: skip

# Actions. What is to be done for a run and for the cache, the scheduler says; of a `Load` that is `told`, say `Loaded`.


class Cut(msgspec.Struct, frozen=True, tag=True):
    """End the run with the iteration under way."""


class Read(msgspec.Struct, frozen=True, tag=True):
    """Begin to read these blocks from the SSD: a load will need them."""

    key: RequestId
    names: tuple[BlockName, ...]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Get blocks `names[start:]` of a prefix from another node's cache into DRAM; say `Came`, and `FetchEnded` once in
    any case, even after `Release`. An `Adopt` may follow either at once. `whole`: as in `Wanted`; `tenant`: in whose
    share what comes is kept."""

    key: RequestId
    source: NodeId
    names: tuple[BlockName, ...]
    start: int
    whole: bool = False
    codec: str = "none"
    tenant: Tenant = NOBODY


class EndFetch(msgspec.Struct, frozen=True, tag=True):
    """It brought nothing for too long, or nobody waits for it."""

    key: RequestId


class Give(msgspec.Struct, frozen=True, tag=True):
    """Send, or lend, another node the blocks `[start, stop)` of a prefix, `on_disk` of them from the SSD."""

    key: RequestId
    peer: NodeId
    names: tuple[BlockName, ...]
    start: int
    stop: int
    on_disk: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Receive an attempt's KV into these blocks of the engine: tell `peer` to send."""

    key: RequestId
    peer: NodeId
    extent: Extent
    blocks: tuple[int, ...]


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Tell `peer` that KV of an attempt will come from here; it is sent when `peer` has granted it."""

    key: RequestId
    peer: NodeId
    extent: Extent


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send what was offered, as it is computed. `computed`: all of it is."""

    key: RequestId
    computed: bool


class Finish(msgspec.Struct, frozen=True, tag=True):
    """All KV of an attempt that is being sent is computed: send the rest, and say so."""

    key: RequestId


class Land(msgspec.Struct, frozen=True, tag=True):
    """Tell `peer` that it may let go of an attempt, as `Landed`."""

    key: RequestId
    peer: NodeId
    unread: bool = False


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Ask `holder` for room for so many of an attempt's blocks in all; say `Reserved`."""

    key: RequestId
    holder: NodeId
    num_blocks: int
    share: Share = Share()


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Ask `holder` for what it keeps of the attempt `old`, if it is this share, to go on with it as `key`; say
    `Found`."""

    key: RequestId
    holder: NodeId
    old: RequestId
    share: Share


class Ship(msgspec.Struct, frozen=True, tag=True):
    """Copy these blocks of the engine to `holder`, its part of the heads, where they are numbers `first` and following
    of what lies there of the attempt; say `Shipped`. Their KV is in place, and stays until then or until `Release`."""

    key: RequestId
    holder: NodeId
    first: int
    blocks: tuple[int, ...]


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """Copy what `holder` has of an attempt, from block number `first` of it on, into these blocks of the engine; say
    `Reclaimed` once in any case, even after `Release`. It stays there as it is until `Shrink` or `Vacate`."""

    key: RequestId
    holder: NodeId
    first: int
    blocks: tuple[int, ...]


class Shrink(msgspec.Struct, frozen=True, tag=True):
    """Tell `holder` that of the room for an attempt's KV only that for the first `num_blocks` blocks is needed."""

    key: RequestId
    holder: NodeId
    num_blocks: int


class Vacate(msgspec.Struct, frozen=True, tag=True):
    """Tell `holder` that an attempt's KV is needed there no more, by this node."""

    key: RequestId
    holder: NodeId


class Host(msgspec.Struct, frozen=True, tag=True):
    """Tell `peer` that its attempt's KV may lie in these blocks of the engine, which others attend to from then on; or,
    without any, that there is no room."""

    key: RequestId
    peer: NodeId
    blocks: tuple[int, ...]


class Rekey(msgspec.Struct, frozen=True, tag=True):
    """What lies here of `old` is of `key` from now on, and nobody else's, if there is an `old`; tell `peer` how much of
    `key` is whole."""

    old: RequestId
    key: RequestId
    peer: NodeId


class Trim(msgspec.Struct, frozen=True, tag=True):
    """Of the blocks of an attempt that is hosted only the first `num_blocks` are for it any more."""

    key: RequestId
    num_blocks: int


class Unhost(msgspec.Struct, frozen=True, tag=True):
    """Nothing is written to the blocks of an attempt that was hosted any more when this is done, nor read from them."""

    key: RequestId


class Shorten(msgspec.Struct, frozen=True, tag=True):
    """Of a cached prefix only the first `num_tokens` tokens are used: what follows is computed."""

    key: RequestId
    num_tokens: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let go of all that is under way for an attempt. Nothing is written into its blocks any more when this is done.
    The other node of its hand-over hears from the head."""

    key: RequestId


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Hand an attempt to the engine, which may count on the first `num_blocks` blocks of the cache, and on what lies
    where `params` say; say `Answered`, then `Over`, or `Broken`."""

    key: RequestId
    num_blocks: int
    params: bytes = b""
    cached_tokens: int | None = None


class Pass(msgspec.Struct, frozen=True, tag=True):
    """Tell `peer` that an attempt's prompt is computed, as `Passed`."""

    key: RequestId
    peer: NodeId
    cached_tokens: int
    params: bytes = b""


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Nobody takes what lies where `params` say: its engine may let go of it."""

    params: bytes


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Say `Woken` then."""

    at_ns: int


Action = (
    Run | Cut | Joined | Preempted
    | Admitted | Load | Read | Save | Adopt | Promote | Demote | Drop | Shorten
    | Reserve | Claim | Ship | Reclaim | Shrink | Vacate | Host | Rekey | Trim | Unhost
    | Fetch | EndFetch | Give | Offer | Grant | Send | Finish | Land | Release | Wake
    | Submit | Pass | Discard
    | Report
)  # fmt: skip
