"""Messages between head, nodes and the stages of a pipeline group: schema-checked msgpack of token ids and KV bytes,
nothing executable.

Nodes report the conductor's events, and the desk's orders go to nodes, as they are (`isthmus.core.attempts`). Each
message about a request carries `key`, of its attempt: late messages of an earlier attempt are void. Nodes send each
other letters (`isthmus.core.node.letters`) and frames of KV.
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
"""Block names in one message: far below the limit of its length."""
MAX_METRICS = 1 << 14
"""Metrics of one process, those of its tenants included."""


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """A node offers itself. `joined`: what the conductor hears of it. `address`: `host:port` where other nodes reach
    it for KV. Shown to operators: `products`, how its engine multiplies; `remark`."""

    protocol: int
    joined: NodeJoined
    address: str
    revision: str
    layout: KVLayout
    max_length: int
    products: tuple[str, ...] = ()
    remark: str = ""


Output = tuple[RequestId, int, Generated]
"""Request, attempt, token. `Generated.index` counts from the first token of the first attempt."""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Tokens of one iteration."""

    outputs: tuple[Output, ...]


class Scores(msgspec.Struct, frozen=True, tag=True):
    """Logprobs of an attempt's prompt tokens, in order, from number `first` on; number 0 is the prompt's second
    token.

    They precede the first output token, in as many messages as the engine tells. A `first` below earlier ones
    replaces them: the prompt is computed anew.
    """

    request: RequestId
    attempt: int
    first: int
    logprobs: tuple[TokenLogprobs, ...]


Metric = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_]{0,99}(/[^/\x00-\x1f]{1,256})?\Z")]
"""Name of a metric of a process, or of one tenant, whose name follows "/". Operators see it as it came."""
Measured = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
"""A finite number: comparisons with NaN would be meaningless."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life with this node's gauges and counters. `links`: one for each linked cluster, over all sessions of
    this node with its nodes, counted since the node started."""

    gauges: Annotated[dict[Metric, Measured], msgspec.Meta(max_length=MAX_METRICS)]
    links: tuple[LinkState, ...] = ()


class StageHello(msgspec.Struct, frozen=True, tag=True):
    """A stage of the pipeline group `group` offers itself; the first stage sends NodeHello for all once they are
    joined.

    `address`: where the stage before reaches it.
    """

    protocol: int
    group: NodeId
    stage: int
    stages: int
    address: str


class Enrol(msgspec.Struct, frozen=True, tag=True):
    """Stage `stage` of `node` asks for a certificate. `request`: PKCS 10, DER."""

    node: NodeId
    stage: int
    request: bytes


class Directions(msgspec.Struct, frozen=True, tag=True):
    """Rows, from number `first` on, of the table that prompt signatures are made with
    (`engine.interface.Engine.directions`). Sent in order until all are told."""

    first: int
    rows: bytes


HeadBound = NodeHello | StageHello | Enrol | Outputs | Scores | Heartbeat | Directions | Report


class NodeWelcome(msgspec.Struct, frozen=True, tag=True):
    """The node is part of the cluster. `beat_ms`: time between its heartbeats."""

    beat_ms: int


class Enrolled(msgspec.Struct, frozen=True, tag=True):
    """The certificate asked for, and that of the authority which signed it. PEM."""

    certificate: bytes
    authority: bytes


class GroupGathered(msgspec.Struct, frozen=True, tag=True):
    """To the first stage: addresses of the later stages, in order."""

    addresses: tuple[str, ...]


class NodeRefused(msgspec.Struct, frozen=True, tag=True):
    """The node may not join, and why."""

    reason: str


class TellDirections(msgspec.Struct, frozen=True, tag=True):
    """Asks for `Directions`."""


class Neighbours(msgspec.Struct, frozen=True, tag=True):
    """Addresses at which this node reaches each node of its own cluster or a linked one."""

    cluster: str
    addresses: dict[NodeId, str]


class Poll(msgspec.Struct, frozen=True, tag=True):
    """Asks for a heartbeat now."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave: the cluster shuts down."""


NodeBound = (
    NodeWelcome | Enrolled | GroupGathered | NodeRefused | Neighbours | Poll | Stop | TellDirections | Order
)


class PeerHello(msgspec.Struct, frozen=True, tag=True):
    """First message on a session between nodes, from the side that opened it. `stage`: of its pipeline group; only
    stage 0 writes letters."""

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
    """Asks for the fetched blocks from number `start` of the prefix on, with room for `room` of them. `host`: this
    machine, if blocks may be read from shared memory; `codec`: their encoding."""

    key: RequestId
    start: int
    room: int
    host: str = ""
    codec: str = "none"


class LentBlocks(msgspec.Struct, frozen=True, tag=True):
    """Answers a Pull on the same host: leading blocks of the pull, in `slots` of this node's arena, with the seals of
    their layers. The slots keep their bytes until `FetchDone`."""

    key: RequestId
    arena: ArenaHandle
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class FetchedSlices(msgspec.Struct, frozen=True, tag=True):
    """Answers a Pull: one layer of the blocks `[first, first + len(seals))`. Payload: their slices, in order, encoded
    by the codec that was asked for."""

    key: RequestId
    layer: int
    first: int
    seals: tuple[bytes, ...]


class FetchServed(msgspec.Struct, frozen=True, tag=True):
    """Ends the answer to a Pull: the first `count` blocks were sent."""

    key: RequestId
    count: int


class ShipmentSlices(msgspec.Struct, frozen=True, tag=True):
    """To a holder, or back home: one layer of the attempt's blocks `[first, first + len(seals))`; blocks from `first`
    on that came before are void. Payload: their bytes."""

    key: RequestId
    layer: int
    first: int
    seals: tuple[bytes, ...]


KNOWN_ROWS = 16


class Attend(msgspec.Struct, frozen=True, tag=True):
    """Over a line (`live/messenger/line.py`): attend to KV that lies at the holder, a `parts`-th of the heads.
    Payload: queries `[R, H, D]`, float32, of these heads alone. `rows`: (attempt, number of queries, tokens that they
    see, position of the first query in its request, position of the first token at the holder). All layers of a step
    have the same rows, under a `number` below KNOWN_ROWS; empty `rows` mean those last sent with this number.

    Answered by `out [R, H, D]`, then `lse [R, H]`, float32; by 0 bytes where the holder lacks KV of an attempt.
    """

    layer: int
    number: int
    rows: tuple[tuple[RequestId, int, int, int, int], ...] = ()
    parts: int = 1


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Asks for an acknowledgement only: a sign that the link between the clusters is up."""


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

    `num_blocks`, `num_slots`, `num_records`: size of the leader's KV memory and of its cache in DRAM and on SSD,
    which every stage must match block by block.
    """

    hello: PeerHello
    stage: int
    num_blocks: int
    num_slots: int
    num_records: int
    later: tuple[str, ...]


class StageRun(msgspec.Struct, frozen=True, tag=True):
    """Compute this batch. Payload: hidden states of the stage before, a dense array.

    `poisoned`: attempts whose hidden states are invalid, since an earlier stage misses some of their KV.
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
"""Actions of the leader's node that every stage carries out for its own layers."""

Downward = StageOpen | StartAttempt | StageRun | Followed


class StageFound(msgspec.Struct, frozen=True, tag=True):
    """Blocks that this stage found on its SSD when it started. `last`: all are told, and the stage can begin."""

    stage: int
    names: tuple[BlockName, ...]
    last: bool = False


class StageSampled(msgspec.Struct, frozen=True, tag=True):
    """A batch has left the last stage with these tokens; `keys`: the attempts they belong to."""

    run: int
    keys: tuple[RequestId, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class StageSaved(msgspec.Struct, frozen=True, tag=True):
    """A stage has carried out a `SaveBlocks` of this request's blocks."""

    stage: int
    request: RequestId


Upward = StageFound | Scores | StageSampled | StageSaved | events.BlocksLost | events.Broken | events.Gone
