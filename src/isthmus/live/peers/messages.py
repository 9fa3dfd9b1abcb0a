"""What head, nodes and the stages of a pipeline group say to each other. Schema-checked msgpack; token ids and KV
bytes, nothing executable.

Reports of nodes are the conductor's events, orders to nodes are what its desk answers, and both travel as they are
(`isthmus.core.attempts`). `key`, of an attempt, goes with everything about a request: what comes late from an earlier
attempt is void.

Between nodes go letters (`isthmus.core.node.letters`), which nodes write and read, and frames of KV.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.core.attempts import Order, Report, StartAttempt
from isthmus.core.blocks import KVLayout
from isthmus.core.conductor import LinkState, NodeJoined
from isthmus.core.node import events
from isthmus.core.node.letters import Letter
from isthmus.core.scheduler import Piece, Preempted
from isthmus.core.types import BlockName, Generated, NodeId, RequestId, TokenLogprobs
from isthmus.live.store import ArenaHandle

PROTOCOL = 13
MAX_NAMES = 1 << 16
"""In one message: far from the limit of its length."""
MAX_METRICS = 1 << 14
"""Of one process, those of its tenants included."""


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """A node offers itself. `joined`: what the conductor is to hear of it; `address`: where other nodes reach it for
    KV, `host:port`. For people: `products`, how its engine multiplies; `remark`, what they are to know of it."""

    protocol: int
    joined: NodeJoined
    address: str
    revision: str
    layout: KVLayout
    max_length: int
    products: tuple[str, ...] = ()
    remark: str = ""


Output = tuple[RequestId, int, Generated]
"""A token of a request and an attempt. `Generated.index` counts from the first token of the first attempt."""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The tokens of one iteration."""

    outputs: tuple[Output, ...]


class Scores(msgspec.Struct, frozen=True, tag=True):
    """Of an attempt's prompt, in their order, the tokens from number `first` on; number 0 is the prompt's second token.

    They go before the first output token, by the same way, in as many messages as the engine tells. A `first` below
    what came already takes the place of that: the prompt is computed anew.
    """

    request: RequestId
    attempt: int
    first: int
    logprobs: tuple[TokenLogprobs, ...]


Metric = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_]{0,99}(/[^/\x00-\x1f]{1,256})?\Z")]
"""Of a process, or of one tenant, whose name is behind it. They are shown to operators as they came."""
Measured = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
"""A number: what is compared finds NaN to be none."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life with this node's gauges and counters. `links`: to each linked cluster, over all sessions of this
    node with its nodes, counted since the node started."""

    gauges: Annotated[dict[Metric, Measured], msgspec.Meta(max_length=MAX_METRICS)]
    links: tuple[LinkState, ...] = ()


class StageHello(msgspec.Struct, frozen=True, tag=True):
    """One stage of the pipeline group `group` offers itself; the first says Hello for all once they are joined.

    `address`: where the stage before reaches it.
    """

    protocol: int
    group: NodeId
    stage: int
    stages: int
    address: str


class Enrol(msgspec.Struct, frozen=True, tag=True):
    """Stage `stage` of `node` asks for a certificate. `request`: PKCS 10, in DER form."""

    node: NodeId
    stage: int
    request: bytes


class Directions(msgspec.Struct, frozen=True, tag=True):
    """Rows of the table that signatures of prompts are made of (`engine.interface.Engine.directions`), from number
    `first` on. In their order, until all are told."""

    first: int
    rows: bytes


HeadBound = NodeHello | StageHello | Enrol | Outputs | Scores | Heartbeat | Directions | Report


class NodeWelcome(msgspec.Struct, frozen=True, tag=True):
    """The node is part of the cluster. `beat_ms`: how often it must send a Beat."""

    beat_ms: int


class Enrolled(msgspec.Struct, frozen=True, tag=True):
    """The certificate that was asked for, and that of the authority which signed it. In PEM form."""

    certificate: bytes
    authority: bytes


class GroupGathered(msgspec.Struct, frozen=True, tag=True):
    """To the first stage: the others are at these addresses, in their order."""

    addresses: tuple[str, ...]


class NodeRefused(msgspec.Struct, frozen=True, tag=True):
    """The node is not wanted, and why."""

    reason: str


class TellDirections(msgspec.Struct, frozen=True, tag=True):
    """Say what signatures are made of, as `Directions`."""


class Neighbours(msgspec.Struct, frozen=True, tag=True):
    """All nodes of a cluster, this node's own or a linked one, and where this node reaches each."""

    cluster: str
    addresses: dict[NodeId, str]


class Poll(msgspec.Struct, frozen=True, tag=True):
    """Send a Beat now."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave: the cluster shuts down."""


NodeBound = (
    NodeWelcome | Enrolled | GroupGathered | NodeRefused | Neighbours | Poll | Stop | TellDirections | Order
)


class PeerHello(msgspec.Struct, frozen=True, tag=True):
    """First message on a session between nodes, of the one that opened it. `stage`: of its pipeline group; the first
    alone writes letters."""

    protocol: int
    node: NodeId
    revision: str
    layout: KVLayout
    stage: int = 0


class HandoverSlices(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: one layer of blocks `[first_block, first_block + len(seals))`, tokens up to `stop`.

    Payload: the bytes of token positions `[first_block * block_size, stop)`, encoded by the attempt's codec; each
    block's slice has a seal. The blocks of a recurrent state come last, as they are, as if they followed the prompt's
    last block.
    """

    key: RequestId
    layer: int
    first_block: int
    stop: int
    seals: tuple[bytes, ...]


class HandoverSent(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: everything was sent; the first new token is `token` (the client has it already)."""

    key: RequestId
    token: int


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Give wanted blocks from number `start` of the prefix on: there is room for `room` of them.

    `host`: this machine, if blocks may be read where they lie; `codec`: in which form.
    """

    key: RequestId
    start: int
    room: int
    host: str = ""
    codec: str = "none"


class LentBlocks(msgspec.Struct, frozen=True, tag=True):
    """The leading blocks that are here, in slots of this node's arena, with the seals of their layers.

    They stay as they are until `FetchDone`.
    """

    key: RequestId
    arena: ArenaHandle
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class FetchedSlices(msgspec.Struct, frozen=True, tag=True):
    """One layer of the blocks `[first, first + len(seals))` of a `Pull`. Payload: their slices, one after the other,
    encoded by the codec that was asked for."""

    key: RequestId
    layer: int
    first: int
    seals: tuple[bytes, ...]


class FetchServed(msgspec.Struct, frozen=True, tag=True):
    """All that can be given of a `Pull` was sent: the first `count` blocks."""

    key: RequestId
    count: int


class ShipmentSlices(msgspec.Struct, frozen=True, tag=True):
    """To a holder, or from it back home: one layer of blocks `[first, first + len(seals))` of those that there is room
    for; what was there from `first` on is void. Payload: their bytes."""

    key: RequestId
    layer: int
    first: int
    seals: tuple[bytes, ...]


KNOWN_ROWS = 16


class Attend(msgspec.Struct, frozen=True, tag=True):
    """On a line (`live/messenger/line.py`): attend to what lies here, a `parts`-th of the heads. Payload: queries
    `[R, H, D]`, float32, of these heads alone. `rows`: (attempt, how many of them, tokens that they see, position of
    the first query in its request, position of the first token that lies here). They are the same in all layers of a
    step, and so have a number below KNOWN_ROWS: none means those that had it last.

    Answered by `out [R, H, D]`, then `lse [R, H]`, float32; by nothing where an attempt has no KV, or not so much."""

    layer: int
    number: int
    rows: tuple[tuple[RequestId, int, int, int, int], ...] = ()
    parts: int = 1


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Asks for nothing but to be acknowledged: the link between the clusters is there."""


PeerMessage = (
    Probe
    | PeerHello
    | Letter
    | HandoverSlices
    | HandoverSent
    | Pull
    | LentBlocks
    | FetchedSlices
    | FetchServed
    | ShipmentSlices
)

# Along the chain that the stages of a pipeline group form. Downwards go the leader's own actions, as they are, and what
# is to be computed: each stage passes them on in their order when it has carried them out itself. Upwards go facts for
# the leader, at once.


class StageOpen(msgspec.Struct, frozen=True, tag=True):
    """First message down: be this stage. `hello`: of the leader; `later`: addresses of the stages that follow.

    `num_blocks`, `num_slots`, `num_records`: of the leader's KV memory, and of its cache in DRAM and on disk, which
    every stage must be able to follow block by block.
    """

    hello: PeerHello
    stage: int
    num_blocks: int
    num_slots: int
    num_records: int
    later: tuple[str, ...]


class StageRun(msgspec.Struct, frozen=True, tag=True):
    """Compute this batch. Payload: the hidden states of the stage before, a dense array.

    `poisoned`: attempts whose hidden states mean nothing, since a stage before misses some of their KV.
    """

    run: int
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    dtype: str
    poisoned: tuple[RequestId, ...] = ()


Followed = (
    events.LoadBlocks
    | events.Read
    | events.SaveBlocks
    | events.Promote
    | events.Demote
    | events.DropBlocks
    | events.Shorten
    | events.OfferHandover
    | events.SendHandover
    | events.ReleaseResources
    | Preempted
)
"""Actions of the leader's node that every stage carries out for its layers."""

Downward = StageOpen | StartAttempt | StageRun | Followed


class StageFound(msgspec.Struct, frozen=True, tag=True):
    """Blocks that this stage found on its disk when it started. `last`: all of them are told, and it can begin."""

    stage: int
    names: tuple[BlockName, ...]
    last: bool = False


class StageSampled(msgspec.Struct, frozen=True, tag=True):
    """A batch has left the last stage, with these tokens; `keys`: of the attempts that they belong to."""

    run: int
    keys: tuple[RequestId, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class StageSaved(msgspec.Struct, frozen=True, tag=True):
    """A stage has carried out a `SaveBlocks` of this request's blocks."""

    stage: int
    request: RequestId


Upward = StageFound | Scores | StageSampled | StageSaved | events.BlocksLost | events.Broken | events.Gone
