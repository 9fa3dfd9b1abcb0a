"""What a node is told, and what it answers: facts in, actions out, both values that may be sent and written down.

Actions name whole spans of blocks, never single layers: whoever carries them out moves bytes as it likes, layer by
layer live, as flows in virtual time. Reports are the conductor's events and are passed on as they are.

`key` is that of an attempt (`attempts.key_of`); what comes for a key that a node does not know is void.
"""

from __future__ import annotations

import msgspec

from isthmus.core.attempts import Convert as Convert
from isthmus.core.attempts import DropAttempt as DropAttempt
from isthmus.core.attempts import Lend as Lend
from isthmus.core.attempts import Repay as Repay
from isthmus.core.attempts import Report, Share
from isthmus.core.attempts import StartAttempt as StartAttempt
from isthmus.core.node.letters import HandoverSpan, Letter
from isthmus.core.scheduler import Admitted, Joined, Preempted, Run, Saved, Stepped
from isthmus.core.scheduler import AdoptBlocks as AdoptBlocks
from isthmus.core.scheduler import Demote as Demote
from isthmus.core.scheduler import DropBlocks as DropBlocks
from isthmus.core.scheduler import LoadBlocks as LoadBlocks
from isthmus.core.scheduler import Promote as Promote
from isthmus.core.scheduler import SaveBlocks as SaveBlocks
from isthmus.core.types import NOBODY, BlockName, NodeId, RequestId, Tenant

# From other nodes.


class LetterReceived(msgspec.Struct, frozen=True, tag=True):
    """Another node says this."""

    peer: NodeId
    letter: Letter


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Another node cannot be reached, or the session with it ended, and with it what was on its way over it."""

    peer: NodeId
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


class BlocksFetched(msgspec.Struct, frozen=True, tag=True):
    """Of a prefix that is being fetched all up to `stop` came. Not `ended`: more may. Ended with less than it starts
    with: that much is still here."""

    key: RequestId
    stop: int
    ended: bool = True


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """What a DECODE part does not get handed over is in the engine: `num_blocks` of it."""

    key: RequestId
    num_blocks: int


class HandoverComplete(msgspec.Struct, frozen=True, tag=True):
    """All that is handed over of an attempt is in the engine, its seals matched, and its first token is known."""

    key: RequestId


class ShipmentStored(msgspec.Struct, frozen=True, tag=True):
    """Of what `peer` ships of an attempt that is hosted here the first `stop` blocks are in the engine, in all layers,
    and their seals matched; or, if `damaged`, one did not. Fewer than before: what follows is being written anew."""

    key: RequestId
    peer: NodeId
    stop: int
    damaged: bool = False


class Reclaimed(msgspec.Struct, frozen=True, tag=True):
    """A `Reclaim` is over: all is in the engine and its seals matched, or not `whole`. Nothing is written there any
    more."""

    key: RequestId
    whole: bool


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Some bytes came of what is handed over; or, with `fetched`, is fetched, or that was asked for."""

    key: RequestId
    fetched: bool = False


class Broken(msgspec.Struct, frozen=True, tag=True):
    """An attempt cannot go on here. `distrust`: what it uses of the cache may be why; `final`: nor on another."""

    key: RequestId
    reason: str
    distrust: bool = False
    final: bool = False


class BlocksLost(msgspec.Struct, frozen=True, tag=True):
    """The bytes of these cached blocks are gone or damaged, in whichever tier they were."""

    names: tuple[BlockName, ...]


class PrefixesRecovered(msgspec.Struct, frozen=True, tag=True):
    """Prefixes found whole on the SSD when the node started."""

    chains: tuple[tuple[BlockName, ...], ...]


# Of a node whose engine plans its own batches (`server_node.py`).


class EnginePrefilled(msgspec.Struct, frozen=True, tag=True):
    """The engine has computed a prompt that was submitted, as `PromptComputed` says; the rest of its answer follows,
    but of a PREFILL part there is none."""

    key: RequestId
    cached_tokens: int = 0
    params: bytes = b""


class SavesDone(msgspec.Struct, frozen=True, tag=True):
    """All that is to be saved of an attempt's KV was told as `SlotsFilled`, or will not be."""

    key: RequestId


class AnswerComplete(msgspec.Struct, frozen=True, tag=True):
    """An attempt's answer is complete."""

    key: RequestId


class SlotsFilled(msgspec.Struct, frozen=True, tag=True):
    """The engine has put what is new of this prefix into the store's slots: an `AdoptBlocks` for `key` keeps some of
    it."""

    key: RequestId
    names: tuple[BlockName, ...]


class EngineBlocks(msgspec.Struct, frozen=True, tag=True):
    """The engine's own memory has one more copy of each of `stored`, and one less of each of `removed`; `cleared`: it
    has nothing any more."""

    stored: tuple[BlockName, ...] = ()
    removed: tuple[BlockName, ...] = ()
    cleared: bool = False


class Woken(msgspec.Struct, frozen=True, tag=True):
    """Some time has passed: a `Wake` is due, or it is time to look at what stands still."""


Event = (
    StartAttempt | DropAttempt | Lend | Repay | Convert
    | LetterReceived | Gone
    | Stepped | Saved | Missing | Sampled | BlocksFetched | Loaded | HandoverComplete | ShipmentStored | Reclaimed
    | Progress | Broken | BlocksLost | PrefixesRecovered
    | EnginePrefilled | SavesDone | AnswerComplete | SlotsFilled | EngineBlocks
    | Woken
)  # fmt: skip

# Actions. What is to be done for a run and for the cache, the scheduler says; of a `LoadBlocks` that is `told`, say
# `Loaded`.


class Cut(msgspec.Struct, frozen=True, tag=True):
    """End the run with the iteration under way."""


class Read(msgspec.Struct, frozen=True, tag=True):
    """Begin to read these blocks from the SSD: a load will need them."""

    key: RequestId
    names: tuple[BlockName, ...]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Get blocks `names[start:]` of a prefix from another node's cache into DRAM; say `BlocksFetched`, and once
    that it `ended`, even after `ReleaseResources`. An `AdoptBlocks` may follow each at once. `whole`: as in
    `FetchRequest`; `tenant`: in whose share what comes is kept."""

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


class SendLetter(msgspec.Struct, frozen=True, tag=True):
    """Say this to another node, after all that was said to it before; or, if it cannot be said, say `Gone`."""

    peer: NodeId
    letter: Letter


class EndGive(msgspec.Struct, frozen=True, tag=True):
    """It needs nothing more of that."""

    key: RequestId
    peer: NodeId


class OfferHandover(msgspec.Struct, frozen=True, tag=True):
    """KV of an attempt will go from here to `peer`: what is computed of it is noted, and sent from `SendHandover`
    on."""

    key: RequestId
    peer: NodeId
    extent: HandoverSpan


class ReceiveHandover(msgspec.Struct, frozen=True, tag=True):
    """Take an attempt's KV that comes from `peer` into these blocks of the engine; say `HandoverComplete`."""

    key: RequestId
    peer: NodeId
    extent: HandoverSpan
    blocks: tuple[int, ...]


class SendHandover(msgspec.Struct, frozen=True, tag=True):
    """Send what was offered to `peer`, as it is computed. `computed`: all of it is."""

    key: RequestId
    peer: NodeId
    extent: HandoverSpan
    computed: bool


class FinishHandover(msgspec.Struct, frozen=True, tag=True):
    """All KV of an attempt that is being sent is computed: send the rest, and say so."""

    key: RequestId


class Ship(msgspec.Struct, frozen=True, tag=True):
    """Copy these blocks of the engine to `peer`, of the share's heads, where they are numbers `first` and following of
    what lies there of the attempt. Their KV is in place, and stays until `peer` has it or until `ReleaseResources`."""

    key: RequestId
    peer: NodeId
    first: int
    blocks: tuple[int, ...]
    share: Share = Share()


class OpenLine(msgspec.Struct, frozen=True, tag=True):
    """Runs will ask `peer` for attention to what lies there: the first question waits for a line."""

    peer: NodeId


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """Take what `holder` sends back of an attempt into these blocks of the engine; say `Reclaimed` once in any case,
    even after `ReleaseResources`."""

    key: RequestId
    holder: NodeId
    blocks: tuple[int, ...]


class Host(msgspec.Struct, frozen=True, tag=True):
    """A share of an attempt's KV may lie in these blocks of the engine: `peer` ships it, for which say
    `ShipmentStored`, and others attend to it."""

    key: RequestId
    peer: NodeId
    share: Share
    blocks: tuple[int, ...]


class Rekey(msgspec.Struct, frozen=True, tag=True):
    """What lies here of `old` is of `key` from now on, and `peer` alone ships more. `num_blocks` of it are whole:
    nothing where it is another share."""

    old: RequestId
    key: RequestId
    peer: NodeId
    share: Share
    num_blocks: int


class Trim(msgspec.Struct, frozen=True, tag=True):
    """Of the blocks of an attempt that is hosted only the first `num_blocks` are for it any more."""

    key: RequestId
    num_blocks: int


class Unhost(msgspec.Struct, frozen=True, tag=True):
    """`peer` writes nothing more to the blocks of an attempt that is hosted when this is done; without one nobody does,
    or reads from them."""

    key: RequestId
    peer: NodeId | None = None


class Shorten(msgspec.Struct, frozen=True, tag=True):
    """Of a cached prefix only the first `num_tokens` tokens are used: what follows is computed."""

    key: RequestId
    num_tokens: int


class ReleaseResources(msgspec.Struct, frozen=True, tag=True):
    """Let go of all that is under way for an attempt. Nothing is written into its blocks any more when this is done.
    The other node of its hand-over hears from the head."""

    key: RequestId


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Hand an attempt to the engine, which may count on the first `num_blocks` blocks of the cache, and on what lies
    where `params` say; say `EnginePrefilled`, then `AnswerComplete`, or `Broken`."""

    key: RequestId
    num_blocks: int
    params: bytes = b""
    cached_tokens: int | None = None


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Nobody takes what lies where `params` say: its engine may let go of it."""

    params: bytes


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Say `Woken` then."""

    at_ns: int


Action = (
    SendLetter
    | Run | Cut | Joined | Preempted
    | Admitted | LoadBlocks | Read | SaveBlocks | AdoptBlocks | Promote | Demote | DropBlocks | Shorten
    | OfferHandover | SendHandover | FinishHandover | ReceiveHandover
    | Ship | OpenLine | Reclaim | Host | Rekey | Trim | Unhost
    | Fetch | EndFetch | Give | EndGive | ReleaseResources | Wake
    | Submit | Discard
    | Report
)  # fmt: skip
