"""Facts that a node is told, and actions that it answers: values that may be sent and written down.

Actions name whole spans of blocks, never single layers: their executor moves bytes layer by layer live, as flows in
virtual time. Reports are events of the conductor. `key` is that of an attempt (`attempts.key_of`); a fact about an
unknown key is void.
"""

from __future__ import annotations

import msgspec

from isthmus.core.attempts import Convert as Convert
from isthmus.core.attempts import DropAttempt as DropAttempt
from isthmus.core.attempts import FetchOrder, Report, Share
from isthmus.core.attempts import Lend as Lend
from isthmus.core.attempts import Repay as Repay
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
    peer: NodeId
    letter: Letter


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Another node cannot be reached, or the session with it ended and lost what was on its way."""

    peer: NodeId
    reason: str


# From the executor of the actions. `Stepped` and `Saved` are the scheduler's.


class Missing(msgspec.Struct, frozen=True, tag=True):
    """Only the first `num_blocks` blocks of a cached prefix in the run could be loaded. Comes just before a `Stepped`
    of no steps."""

    key: RequestId
    num_blocks: int


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """The last stage of a pipeline group has sampled the first tokens of `keys`, of which `ended` are over."""

    keys: tuple[RequestId, ...]
    ended: tuple[RequestId, ...] = ()


class BlocksFetched(msgspec.Struct, frozen=True, tag=True):
    """All blocks of a fetched prefix up to `stop` are here. Until it `ended`, more may come. It may end with a `stop`
    below its start, if blocks before that were evicted."""

    key: RequestId
    stop: int
    ended: bool = True


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The decode node has loaded `num_blocks` prefix blocks that the hand-over leaves out (its own cache had them)."""

    key: RequestId
    num_blocks: int


class HandoverComplete(msgspec.Struct, frozen=True, tag=True):
    """All KV of a hand-over is in the engine, its seals matched, and the first token is known."""

    key: RequestId


class ShipmentStored(msgspec.Struct, frozen=True, tag=True):
    """The first `stop` blocks of an attempt that `peer` ships here are in the engine, in all layers, and their seals
    matched; or, if `damaged`, one did not. A lower `stop` than before: the rest is being written anew."""

    key: RequestId
    peer: NodeId
    stop: int
    damaged: bool = False


class Reclaimed(msgspec.Struct, frozen=True, tag=True):
    """A `Reclaim` is over and writes nothing more. `whole`: all blocks are in the engine and their seals matched."""

    key: RequestId
    whole: bool


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a hand-over came; or, with `fetched`, of a fetch, or its source was asked for them."""

    key: RequestId
    fetched: bool = False


class Broken(msgspec.Struct, frozen=True, tag=True):
    """An attempt cannot go on here, nor anywhere if `final`. `distrust`: blocks it took from the cache may be why."""

    key: RequestId
    reason: str
    distrust: bool = False
    final: bool = False


class BlocksLost(msgspec.Struct, frozen=True, tag=True):
    """The bytes of cached blocks are gone or damaged, in any tier."""

    names: tuple[BlockName, ...]


class PrefixesRecovered(msgspec.Struct, frozen=True, tag=True):
    """Prefixes found whole on the SSD when the node started."""

    chains: tuple[tuple[BlockName, ...], ...]


# To a node whose engine plans its own batches (`server_node.py`).


class EnginePrefilled(msgspec.Struct, frozen=True, tag=True):
    """The engine has computed a submitted prompt; fields as in `PromptComputed`. A PREFILL part ends with it."""

    key: RequestId
    cached_tokens: int = 0
    params: bytes = b""


class SavesDone(msgspec.Struct, frozen=True, tag=True):
    """No more `SlotsFilled` comes of an attempt."""

    key: RequestId


class AnswerComplete(msgspec.Struct, frozen=True, tag=True):
    key: RequestId


class SlotsFilled(msgspec.Struct, frozen=True, tag=True):
    """The engine has put the new blocks of a prefix into slots of the store: an `AdoptBlocks` for `key` keeps some."""

    key: RequestId
    names: tuple[BlockName, ...]


class EngineBlocks(msgspec.Struct, frozen=True, tag=True):
    """The engine's own memory has one more copy of each block in `stored`, one less of each in `removed`; or, if
    `cleared`, none of any."""

    stored: tuple[BlockName, ...] = ()
    removed: tuple[BlockName, ...] = ()
    cleared: bool = False


class Woken(msgspec.Struct, frozen=True, tag=True):
    """Time has passed: a `Wake` is due, or it is time to look for transfers that stand still."""


Event = (
    StartAttempt | DropAttempt | Lend | Repay | Convert
    | LetterReceived | Gone
    | Stepped | Saved | Missing | Sampled | BlocksFetched | Loaded | HandoverComplete | ShipmentStored | Reclaimed
    | Progress | Broken | BlocksLost | PrefixesRecovered
    | EnginePrefilled | SavesDone | AnswerComplete | SlotsFilled | EngineBlocks
    | Woken
)  # fmt: skip

# Actions, beside those of the scheduler for runs and the cache. A `LoadBlocks` that is `told` is followed by `Loaded`.


class Cut(msgspec.Struct, frozen=True, tag=True):
    """End the run that is out with the iteration under way."""


class Read(msgspec.Struct, frozen=True, tag=True):
    """Begin to read blocks from the SSD that a load will need."""

    key: RequestId
    names: tuple[BlockName, ...]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Get blocks `names[start:]` of a prefix from another node's cache into DRAM; answer with `BlocksFetched`, the last
    of which `ended`, even after `ReleaseResources`. An `AdoptBlocks` may follow each at once. `whole`: as in
    `FetchRequest`; `tenant`: in whose share fetched blocks are kept."""

    key: RequestId
    source: NodeId
    names: tuple[BlockName, ...]
    start: int
    whole: bool = False
    codec: str = "none"
    tenant: Tenant = NOBODY


def fetch_of(key: RequestId, order: FetchOrder, names: tuple[BlockName, ...], tenant: Tenant) -> Fetch:
    """The fetch that a route orders, of a prefix of `names`."""
    return Fetch(key, order.source, names[: order.stop], order.start, codec=order.codec, tenant=tenant)


class EndFetch(msgspec.Struct, frozen=True, tag=True):
    """End a fetch that brought nothing for too long, or for which nobody waits."""

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
    """Send a letter to another node, after all letters before it; answer with `Gone` if it cannot be sent."""

    peer: NodeId
    letter: Letter


class EndGive(msgspec.Struct, frozen=True, tag=True):
    """Stop giving: `peer` has the blocks, or needs none."""

    key: RequestId
    peer: NodeId


class OfferHandover(msgspec.Struct, frozen=True, tag=True):
    """Note which KV of an attempt is computed: it goes to `peer` from `SendHandover` on."""

    key: RequestId
    peer: NodeId
    extent: HandoverSpan


class ReceiveHandover(msgspec.Struct, frozen=True, tag=True):
    """Receive an attempt's KV from `peer` into these blocks of the engine; answer with `HandoverComplete`."""

    key: RequestId
    peer: NodeId
    extent: HandoverSpan
    blocks: tuple[int, ...]


class SendHandover(msgspec.Struct, frozen=True, tag=True):
    """Send offered KV to `peer` as it is computed. `computed`: all of it is already."""

    key: RequestId
    peer: NodeId
    extent: HandoverSpan
    computed: bool


class FinishHandover(msgspec.Struct, frozen=True, tag=True):
    """Send the rest of a hand-over, all of which is computed now."""

    key: RequestId


class Ship(msgspec.Struct, frozen=True, tag=True):
    """Copy computed blocks of the engine, the share's heads of them, to `peer`: there they are block `first` of the
    attempt, and following ones. They stay until `peer` has them or until `ReleaseResources`."""

    key: RequestId
    peer: NodeId
    first: int
    blocks: tuple[int, ...]
    share: Share = Share()


class OpenLine(msgspec.Struct, frozen=True, tag=True):
    """Open a line to `peer`, which runs will ask for attention to KV that lies there."""

    peer: NodeId


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """Take blocks of an attempt that `holder` sends back into these blocks of the engine; answer with one `Reclaimed`
    in any case, even after `ReleaseResources`."""

    key: RequestId
    holder: NodeId
    blocks: tuple[int, ...]


class Host(msgspec.Struct, frozen=True, tag=True):
    """Hold a share of an attempt's KV in these blocks of the engine: `peer` ships it, answered with `ShipmentStored`,
    and other nodes ask for attention to it."""

    key: RequestId
    peer: NodeId
    share: Share
    blocks: tuple[int, ...]


class Rekey(msgspec.Struct, frozen=True, tag=True):
    """Hold the KV of `old` for `key` from now on, to which `peer` alone ships more. `num_blocks` of it are whole: 0 if
    `share` is another one than before."""

    old: RequestId
    key: RequestId
    peer: NodeId
    share: Share
    num_blocks: int


class Trim(msgspec.Struct, frozen=True, tag=True):
    """Keep only the first `num_blocks` blocks of a hosted attempt."""

    key: RequestId
    num_blocks: int


class Unhost(msgspec.Struct, frozen=True, tag=True):
    """Let `peer` write no more to the blocks of a hosted attempt; without a peer, let nobody write or read them."""

    key: RequestId
    peer: NodeId | None = None


class Shorten(msgspec.Struct, frozen=True, tag=True):
    """Use only the first `num_tokens` tokens of a cached prefix, and compute the rest."""

    key: RequestId
    num_tokens: int


class ReleaseResources(msgspec.Struct, frozen=True, tag=True):
    """End all that is under way for an attempt, so that nothing is written into its blocks any more. The other node of
    its hand-over hears from the head."""

    key: RequestId


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Submit an attempt to the engine, which may use its first `num_blocks` blocks of the cache, and KV that lies where
    `params` say; answer with `EnginePrefilled` and `AnswerComplete`, or with `Broken`."""

    key: RequestId
    num_blocks: int
    params: bytes = b""
    cached_tokens: int | None = None


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Free KV that lies where `params` say in the engine, since no node takes it."""

    params: bytes


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Tell the node `Woken` at this time."""

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
