"""What head and nodes say to each other. Schema-checked msgpack; token ids and KV bytes, nothing executable.

`attempt` goes with everything about a request: what comes late from an earlier attempt is void.
"""

from __future__ import annotations

import msgspec

from isthmus.blocks import KVLayout
from isthmus.conductor import Paths
from isthmus.cost import Cost
from isthmus.store import ArenaHandle
from isthmus.types import BlockName, Generated, NodeId, RequestId, Role, Sampling, TokenLogprobs

PROTOCOL = 4


def key_of(request: RequestId, attempt: int) -> RequestId:
    """What a node calls an attempt, so that two attempts of one request never share state."""
    return RequestId(f"{request}#{attempt}")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A node offers itself. `address`: where other nodes reach it for KV, `host:port`.

    `cost`: what work takes on it, None when nobody knows; `paths`: how fast KV moves to and from it;
    `cache_blocks`: how many blocks its cache keeps beside the engine's memory; `kv_dtype`: of its KV, for codecs;
    `cluster`: where it stands, "" if there is only one; `max_sequences`: so many decode there at once.
    """

    protocol: int
    token: str
    node: NodeId
    role: Role
    address: str
    revision: str
    layout: KVLayout
    num_blocks: int
    max_length: int
    vocab_size: int
    cost: Cost | None = None
    paths: Paths = Paths()
    cache_blocks: int = 0
    kv_dtype: str = ""
    cluster: str = ""
    max_sequences: int = 0


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One generated token of one request; `token.index` counts from the first token of the first attempt."""

    request: RequestId
    attempt: int
    token: Generated


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The tokens of one iteration."""

    outputs: tuple[Output, ...]


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """All KV of an attempt is where it decodes; this node, where it was computed, has let go of it."""

    request: RequestId
    attempt: int


class AttemptFailed(msgspec.Struct, frozen=True, tag=True):
    """This node cannot go on with an attempt, and has forgotten it."""

    request: RequestId
    attempt: int
    reason: str


class CacheChanged(msgspec.Struct, frozen=True, tag=True):
    """Blocks that are now in the memory of this node's cache, on its disk only, and no longer in it."""

    stored: tuple[BlockName, ...] = ()
    demoted: tuple[BlockName, ...] = ()
    evicted: tuple[BlockName, ...] = ()


class FetchEnded(msgspec.Struct, frozen=True, tag=True):
    """What an attempt fetches is here, or will not come."""

    request: RequestId
    attempt: int


class Crossing(msgspec.Struct, frozen=True):
    """What goes from this node to those of the linked cluster `target`, over all sessions with them.

    `up`: one of them works. Counted since the node started: `sent_bytes`, which arrived there; `busy_ns`, in which KV
    was on its way; `retransmits` of TCP segments. Now: `queued_bytes`, handed over to be sent and not there;
    `rtt_ns`, 0 if not known.
    """

    target: str
    up: bool
    sent_bytes: int = 0
    busy_ns: int = 0
    queued_bytes: int = 0
    retransmits: int = 0
    rtt_ns: int = 0


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life with this node's gauges and counters."""

    gauges: dict[str, float]
    crossings: tuple[Crossing, ...] = ()


class Became(msgspec.Struct, frozen=True, tag=True):
    """This node has the role it was to take."""

    role: Role


class StageHello(msgspec.Struct, frozen=True, tag=True):
    """One stage of the pipeline group `group` offers itself; the first says Hello for all once they are joined.

    `address`: where the stage before reaches it.
    """

    protocol: int
    token: str
    group: NodeId
    stage: int
    stages: int
    address: str


HeadBound = (
    Hello | StageHello | Outputs | HandedOver | AttemptFailed | CacheChanged | FetchEnded | Beat | Became
)


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The node is part of the cluster. `beat_ms`: how often it must send a Beat."""

    beat_ms: int


class Gathered(msgspec.Struct, frozen=True, tag=True):
    """To the first stage: the others are at these addresses, in their order."""

    addresses: tuple[str, ...]


class Turned(msgspec.Struct, frozen=True, tag=True):
    """The node is not wanted, and why."""

    reason: str


class FetchOrder(msgspec.Struct, frozen=True):
    """Copy blocks `[start, stop)` of the prompt from the node at `source`, expected to take `within_ns`, in the
    form that `codec` gives them."""

    source: str
    start: int
    stop: int
    within_ns: int
    codec: str = "none"


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Take part in an attempt.

    `tokens`: prompt and what earlier attempts generated; the first `num_prompt` are the client's prompt.
    `part`: PREFILL computes the prompt and sends its KV to `peer`; DECODE receives it and goes on; MIXED does
    both here. The answer ends at `stop_length` tokens in all. `work_ns`: node time the conductor expects the
    prefill to take; `budget_ns`: what was left until the promised first token when this was sent, None without
    a promise (a duration, for clocks of machines differ). `salt`: of the request's caches. `num_cached`: leading
    blocks the conductor counts on, those of `fetch` included; `codec`: in which form its KV is handed over.
    `handover_start`: leading blocks that are not handed over: DECODE has them in its cache, or gets them by `fetch`.
    """

    request: RequestId
    attempt: int
    part: Role
    tokens: tuple[int, ...]
    num_prompt: int
    stop_length: int
    sampling: Sampling
    names: tuple[BlockName, ...]
    peer: str = ""
    work_ns: int = 0
    budget_ns: int | None = None
    salt: str = ""
    num_cached: int = 0
    fetch: FetchOrder | None = None
    codec: str = "none"
    handover_start: int = 0

    @property
    def key(self) -> RequestId:
        return key_of(self.request, self.attempt)


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop an attempt and free its blocks. Unknown ones are no error."""

    request: RequestId
    attempt: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy a prefix from the node at `source`, when nothing else needs the link."""

    names: tuple[BlockName, ...]
    source: str


class Linked(msgspec.Struct, frozen=True, tag=True):
    """The nodes of a linked cluster, all of them, and where this node reaches each."""

    cluster: str
    addresses: dict[NodeId, str]


class Become(msgspec.Struct, frozen=True, tag=True):
    """Take this role and answer `Became`. Nothing of the old one is under way here."""

    role: Role


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave: the cluster shuts down."""


NodeBound = Welcome | Gathered | Turned | Begin | Forget | Copy | Linked | Become | Stop


class PeerHello(msgspec.Struct, frozen=True, tag=True):
    """First message on a session between nodes: of the one that hands over or fetches."""

    protocol: int
    token: str
    node: NodeId
    revision: str
    layout: KVLayout


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: KV of this attempt, layers `[first_layer, stop_layer)`, will come over this session."""

    request: RequestId
    attempt: int
    first_layer: int
    stop_layer: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: blocks are reserved, send."""

    request: RequestId
    attempt: int


class Slices(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: one layer of blocks `[first_block, first_block + len(seals))`, tokens up to `stop`.

    Payload: the bytes of token positions `[first_block * block_size, stop)`, encoded by the attempt's codec; each
    block's slice has a seal. The blocks of a recurrent state come last, as they are, as if they followed the prompt's
    last block.
    """

    request: RequestId
    attempt: int
    layer: int
    first_block: int
    stop: int
    seals: tuple[bytes, ...]


class Sent(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: everything was sent; the first new token is `token` (the client has it already)."""

    request: RequestId
    attempt: int
    token: int
    logprobs: TokenLogprobs | None = None


class Landed(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: all KV is here and its seals match; the sender may let go."""

    request: RequestId
    attempt: int


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """Either side gave the attempt up: no more of it will be sent or accepted."""

    request: RequestId
    attempt: int


class Want(msgspec.Struct, frozen=True, tag=True):
    """Give these blocks, consecutive ones of a prefix; there is room for the first `room`.

    `host`: this machine, if blocks may be read where they lie; `background`: when nothing else needs the link;
    `codec`: in which form.
    """

    key: RequestId
    names: tuple[BlockName, ...]
    room: int
    host: str = ""
    background: bool = False
    codec: str = "none"


class Lent(msgspec.Struct, frozen=True, tag=True):
    """The leading blocks that are here, in slots of this node's arena, with the seals of their layers.

    They stay as they are until `Enough`.
    """

    key: RequestId
    arena: ArenaHandle
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class Given(msgspec.Struct, frozen=True, tag=True):
    """One layer of the wanted blocks `[first, first + len(seals))`. Payload: their slices, one after the other,
    encoded by the codec that was asked for."""

    key: RequestId
    layer: int
    first: int
    seals: tuple[bytes, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All that can be given of what was wanted was sent: the first `count` blocks."""

    key: RequestId
    count: int


class Enough(msgspec.Struct, frozen=True, tag=True):
    """What was wanted has been read, or is not wanted any more. Unknown ones are no error."""

    key: RequestId


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Asks for nothing but to be acknowledged: the link between the clusters is there."""


PeerMessage = (
    Probe
    | PeerHello
    | Offer
    | Grant
    | Slices
    | Sent
    | Landed
    | Withdrawn
    | Want
    | Lent
    | Given
    | Ended
    | Enough
)
