"""What the conductor is told and what it answers; also what the flight recorder writes."""

from __future__ import annotations

import msgspec

from isthmus.cost import Cost
from isthmus.types import BlockName, NodeId, RequestId, Role, Tier


class Paths(msgspec.Struct, frozen=True):
    """How fast KV moves to and from one node, in bytes per second; 0: not at all.

    `network`: between its cache and another node's, each way; `memory`: from its DRAM to its device;
    `disk`: from its SSD; `handover`: between prefill and decode, 0 when that shares `network`.
    """

    network: int = 0
    memory: int = 0
    disk: int = 0
    handover: int = 0


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """A node is ready. `capacity_tokens`: the longest request, prompt and answer, its KV memory can hold.

    `cost`: what work takes there, None when nobody knows; `cache_blocks`: how many blocks its cache keeps;
    `kv_dtype`: of its KV, "" when nobody knows; `cluster`: where it stands, "" if there is only one;
    `state_blocks`: how many blocks the recurrent state of a sequence fills, 0 for models without: a prefix is of use
    up to a block whose state is kept as well (`blocks.state_name`). `max_sequences`: so many decode there at once,
    0 for no limit known.
    """

    node: NodeId
    role: Role
    capacity_tokens: int
    block_size: int
    cost: Cost | None = None
    paths: Paths = Paths()
    cache_blocks: int = 0
    kv_dtype: str = ""
    cluster: str = ""
    state_blocks: int = 0
    max_sequences: int = 0


class RoleChanged(msgspec.Struct, frozen=True, tag=True):
    """A node does what `Convert` asked: it has this role now, and its cache still."""

    node: NodeId
    role: Role


class LinkState(msgspec.Struct, frozen=True):
    """One direction of a link between clusters, over the period just past.

    `up`: at least one session crosses it, or could; `sent_bytes`: that left; `busy_ns`: how long something was on its
    way; `queued_bytes`: handed over to be sent and not out yet; `retransmits`: of TCP segments; `rtt_ns`: 0 if not
    known.
    """

    source: str
    target: str
    up: bool
    sent_bytes: int = 0
    busy_ns: int = 0
    queued_bytes: int = 0
    retransmits: int = 0
    rtt_ns: int = 0


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Comes every `Rules.period_ns` where there are links, or nodes may be converted."""

    links: tuple[LinkState, ...] = ()


class NodeLeft(msgspec.Struct, frozen=True, tag=True):
    """A node closed its session or fell silent; whatever it held is lost."""

    node: NodeId


class RequestArrived(msgspec.Struct, frozen=True, tag=True):
    """A request of `num_tokens` prompt tokens whose full blocks have `names`.

    `ttft_ms`, `tbt_ms`: its own limits, None takes the deployment's. A higher `priority` is refused last.
    """

    request: RequestId
    tenant: str
    num_tokens: int
    max_tokens: int
    names: tuple[BlockName, ...]
    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The prompt of this attempt is computed: its prefill node works on something else now."""

    request: RequestId
    attempt: int


class FetchFinished(msgspec.Struct, frozen=True, tag=True):
    """The blocks that an attempt's route fetches are at its prefill node, or will never be."""

    request: RequestId
    attempt: int


class PrefillFinished(msgspec.Struct, frozen=True, tag=True):
    """All KV of this attempt is where it decodes: the prefill node is free of it."""

    request: RequestId
    attempt: int


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """The last token of a request was produced, its `num_generated`-th."""

    request: RequestId
    num_generated: int = 0


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """A node could not go on with an attempt (transfer broken, seal wrong); another attempt may succeed."""

    request: RequestId
    attempt: int
    reason: str


class HoldExpired(msgspec.Struct, frozen=True, tag=True):
    """No node came in time for a request on hold since `attempt`."""

    request: RequestId
    attempt: int


class RequestCancelled(msgspec.Struct, frozen=True, tag=True):
    """The client does not want the rest."""

    request: RequestId


class BlocksStored(msgspec.Struct, frozen=True, tag=True):
    """These blocks are now in `tier` of a node's cache, wherever in it they were before."""

    node: NodeId
    names: tuple[BlockName, ...]
    tier: Tier = Tier.MEMORY


class BlocksEvicted(msgspec.Struct, frozen=True, tag=True):
    """These blocks are in no tier of a node's cache any more."""

    node: NodeId
    names: tuple[BlockName, ...]


Event = (
    NodeJoined
    | NodeLeft
    | RequestArrived
    | FetchFinished
    | FirstToken
    | PrefillFinished
    | RequestEnded
    | RequestFailed
    | HoldExpired
    | RequestCancelled
    | BlocksStored
    | BlocksEvicted
    | RoleChanged
    | Measured
)


class Fetch(msgspec.Struct, frozen=True):
    """Copy the request's blocks `[start, stop)` from another node's cache; `[0, start)` are at hand.

    `until_ns`: when the conductor expects them; `codec`: in which form they travel.
    """

    source: NodeId
    start: int
    stop: int
    until_ns: int = 0
    codec: str = "none"


class Route(msgspec.Struct, frozen=True, tag=True):
    """Prefill and decode a request on these nodes; the same node twice means that its KV does not move.

    `attempt` counts from 1. Later attempts go on from the tokens already generated. `num_cached`: leading
    blocks the conductor counts on, fetched ones included; `work_ns`: node time it expects the prefill to take;
    `deadline_ns`: when the first token was promised, 0 without a promise; `codec`: in which form its KV goes to where
    it decodes.

    `handover_start`: leading blocks that are not handed over, since the decode node has them or gets them in its own
    cluster: with `recall`, from a node there, or its own cache where `recall.source` is itself.
    """

    request: RequestId
    attempt: int
    prefill: NodeId
    decode: NodeId
    fetch: Fetch | None = None
    num_cached: int = 0
    work_ns: int = 0
    deadline_ns: int = 0
    codec: str = "none"
    handover_start: int = 0
    recall: Fetch | None = None


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Turn a request away that has got no token yet. `code`: `overloaded`, `unavailable` or `too_long`.

    `stage`: who could not take it, `prefill` or `decode`.
    """

    request: RequestId
    code: str
    reason: str
    retry_after_ms: int = 0
    stage: str = ""


class Replicate(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks that many ask for, a prefix in order, to another node's cache, when nothing else needs the link."""

    names: tuple[BlockName, ...]
    source: NodeId
    target: NodeId


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Tell `nodes` to forget a request and free its blocks."""

    request: RequestId
    attempt: int
    nodes: tuple[NodeId, ...]


class Hold(msgspec.Struct, frozen=True, tag=True):
    """No node can go on with an accepted request now: wait for one to join, then say `HoldExpired`."""

    request: RequestId
    attempt: int
    reason: str


class Fail(msgspec.Struct, frozen=True, tag=True):
    """End an accepted request with an error that the client sees."""

    request: RequestId
    reason: str


class Convert(msgspec.Struct, frozen=True, tag=True):
    """Give a node, which nothing needs any more, another role; then say `RoleChanged`. It keeps its cache."""

    node: NodeId
    role: Role


class ThresholdSet(msgspec.Struct, frozen=True, tag=True):
    """From now on prompts with more uncached tokens are prefilled in another cluster; None: no prompt is."""

    threshold: int | None
    reason: str


Action = Route | Refuse | Replicate | Abort | Hold | Fail | Convert | ThresholdSet
