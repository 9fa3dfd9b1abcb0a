"""Rules of the operator, events and actions of the conductor: the values that a flight recording consists of."""

from __future__ import annotations

from typing import Annotated

import msgspec

from isthmus.core.attempts import (
    BlocksEvicted,
    BlocksStored,
    Convert,
    FetchFinished,
    HoldingsChanged,
    Lend,
    MemoryUsed,
    PrefillFinished,
    Repay,
    RequestFailed,
    RoleChanged,
    Route,
)
from isthmus.core.cost import Cost
from isthmus.core.types import NS_PER_S, BlockName, NodeId, RequestId, Reuse, Role

Parameters = tuple[tuple[str, float], ...]
"""Parameters of a policy, by name."""


class LinkRule(msgspec.Struct, frozen=True):
    """One direction of a link between two clusters."""

    source: str
    target: str
    bytes_per_s: int
    rtt_ns: int = 0


class Rules(msgspec.Struct, frozen=True):
    """Options of `scheduling`, `offload`, `lending` and `reuse` in docs/configuration.md explain the others."""

    policy: str = "least_loaded"
    policy_parameters: Parameters = ()
    max_requests: int = 1024  # in progress at once
    max_attempts: int = 3  # of one request, beside those that lost a node or a link
    retry_after_ms: int = 1000
    wait_ms: int = 0  # of a new request for a node of a missing role
    admission: str = "none"
    admission_parameters: Parameters = ()
    reserve: float = 0.0
    load_limit: float = 1.0
    codecs: tuple[str, ...] = ()  # that KV may be encoded by, where it then arrives earlier
    # Limits of requests that bring none; None for no limit.
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    links: tuple[LinkRule, ...] = ()  # between clusters, both directions of each
    threshold: int | None = None  # prompts with more uncached tokens are offloaded; None: solved
    priced: bool = False  # no threshold: each prompt goes where it costs least
    cache_mode: str = "scarce"
    control: bool = False
    convert: bool = False
    cool_down_s: float = 60.0
    period_ns: int = NS_PER_S  # between two `LinksMeasured`
    lending: str = "none"
    lending_reserve: float = 0.1
    reuse_selector: str = "cacheblend"
    reuse_packs: bool = True
    reuse_prompts: int = 1024
    reuse_tokens: int = 700


RECORDING_FORMAT = 10
"""Of flight recordings: changes with rules, events and actions of conductor or nodes."""


class Paths(msgspec.Struct, frozen=True):
    """Rates of KV to and from one node, in bytes per second; 0: not at all. `network`: between its cache and another
    node's, each way; `memory`: from DRAM to its device; `disk`: from its SSD; `handover`: between prefill and decode, 0
    when that shares `network`. `rtt_ns`: round trip to another node of its cluster."""

    network: int = 0
    memory: int = 0
    disk: int = 0
    handover: int = 0
    rtt_ns: int = 0


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """A node is ready. `capacity_tokens`: the longest request, prompt and answer, that its KV memory can hold.

    `cost`: None if not known; `cache_blocks`: capacity of its cache; `kv_dtype`: "" if not known; `cluster`: "" if
    there is only one; `state_blocks`: blocks that the recurrent state of a sequence fills, 0 without one (a prefix is
    of use up to a block whose state is cached as well: `blocks.state_name`); `max_sequences`: that decode at once, 0
    for no known limit; `lends`: may hold KV of requests computed elsewhere, and lend out its own; `kv_heads`: equal
    parts that the KV of a token can be cut into; `reuse_layers`: layers that keep KV if prompts can be assembled
    here, else 0.
    """

    node: NodeId
    role: Role
    capacity_tokens: Annotated[int, msgspec.Meta(ge=0)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    cost: Cost | None = None
    paths: Paths = Paths()
    cache_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_dtype: str = ""
    cluster: str = ""
    state_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_sequences: Annotated[int, msgspec.Meta(ge=0)] = 0
    lends: bool = True
    kv_heads: Annotated[int, msgspec.Meta(ge=1)] = 1
    reuse_layers: Annotated[int, msgspec.Meta(ge=0)] = 0


class LinkState(msgspec.Struct, frozen=True):
    """One direction of a link between clusters over the last period, or, from one node of `source`, since its start.

    `up`: a session crosses it, or could; `busy_ns`: time with bytes under way; `queued_bytes`: sent and not yet
    arrived; `retransmits`: of TCP segments; `rtt_ns`: 0 if not known.
    """

    source: str
    target: str
    up: bool
    sent_bytes: int = 0
    busy_ns: int = 0
    queued_bytes: int = 0
    retransmits: int = 0
    rtt_ns: int = 0


class LinksMeasured(msgspec.Struct, frozen=True, tag=True):
    """Link reports, every `Rules.period_ns` if there are links, or nodes may be converted."""

    links: tuple[LinkState, ...] = ()


class NodeLeft(msgspec.Struct, frozen=True, tag=True):
    """A node closed its session or fell silent; its KV is lost."""

    node: NodeId


class NodeDrains(msgspec.Struct, frozen=True, tag=True):
    """A node is to leave: it gets no new request. `Dismiss` follows as soon as no request needs it."""

    node: NodeId


class NodeStays(msgspec.Struct, frozen=True, tag=True):
    """A node that drains is to stay after all."""

    node: NodeId


class PromptContent(msgspec.Struct, frozen=True):
    """Digests of a prompt by which others with equal text are found, for requests that may reuse more than their own
    prefix. `pieces`, `stops`: digests and ends of its pieces (`isthmus.core.reuse.cut`); `signature`: of its embedding;
    `scope`: prompts of different scopes never share KV."""

    reuse: Reuse
    scope: bytes
    pieces: tuple[bytes, ...]
    stops: tuple[int, ...]
    signature: bytes = b""


class RequestArrived(msgspec.Struct, frozen=True, tag=True):
    """A request of `num_tokens` prompt tokens whose full blocks have `names`. `ttft_ms`, `tbt_ms`: its own limits, None
    takes the deployment's. A higher `priority` is refused last. `weight`: of its tenant's share, 0 without one;
    `whole`: its KV cannot be handed over, so that a mixed node must compute it."""

    request: RequestId
    tenant: str
    num_tokens: int
    max_tokens: int
    names: tuple[BlockName, ...]
    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    content: PromptContent | None = None
    weight: float = 0.0
    whole: bool = False


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The prompt of this attempt is computed; its prefill node goes on to the next.

    `presumed`: so it is expected, of an answer that says nothing before its end; another one follows when that comes.
    `teaches`: it took as long as the prefill."""

    request: RequestId
    attempt: int
    presumed: bool = False
    teaches: bool = True


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """A request has got its last token, the `num_generated`-th. `tbt_ns`: mean of the longest tenth of the gaps between
    its tokens as its client got them; 0 where nobody measured, or where its answer came whole."""

    request: RequestId
    num_generated: int = 0
    tbt_ns: int = 0


class HoldExpired(msgspec.Struct, frozen=True, tag=True):
    """The wait of a request on hold since `attempt` is over."""

    request: RequestId
    attempt: int


class TimePassed(msgspec.Struct, frozen=True, tag=True):
    """The time, told while requests wait for a node that is late (`Slowness.is_any_late`)."""


class NodeProbed(msgspec.Struct, frozen=True, tag=True):
    """A node that tells no cost computed a prompt of `num_tokens` that was no request, in `took_ns`. 0 tokens: it
    answered, and computes no such prompts."""

    node: NodeId
    num_tokens: int
    took_ns: int


class RequestCancelled(msgspec.Struct, frozen=True, tag=True):
    """The client does not want the rest."""

    request: RequestId


Event = (
    NodeJoined
    | NodeLeft
    | NodeDrains
    | NodeStays
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
    | LinksMeasured
    | HoldingsChanged
    | MemoryUsed
    | TimePassed
    | NodeProbed
)


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Turns a request away that has no token yet. `code`: `overloaded`, `unavailable` or `too_long`; `stage`: the pool
    that could not take it, `prefill` or `decode`."""

    request: RequestId
    code: str
    reason: str
    retry_after_ms: int = 0
    stage: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends an attempt on `nodes`, those of its nodes that have not left. Each attempt ends so once, before the next one
    begins or the request ends, also after `RequestEnded` and `RequestCancelled`."""

    request: RequestId
    attempt: int
    nodes: tuple[NodeId, ...]


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Keeps an accepted request waiting for a node or for memory: `HoldExpired` follows after `wait_ms`, or after the
    desk's own wait if that is 0. `attempt` 0: it had none yet."""

    request: RequestId
    attempt: int
    reason: str
    wait_ms: int = 0


class Fail(msgspec.Struct, frozen=True, tag=True):
    """Ends an accepted request with an error that the client sees. `final`: the fault is the request's own."""

    request: RequestId
    reason: str
    final: bool = False


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """Lets a node go that drains: no request needs it any more."""

    node: NodeId


class ThresholdSet(msgspec.Struct, frozen=True, tag=True):
    """From now on prompts with more uncached tokens are prefilled in another cluster; None: no prompt is."""

    threshold: int | None
    reason: str


class Remember(msgspec.Struct, frozen=True, tag=True):
    """Keep the tokens of a request's full blocks, until `Unremember`: its prompt may become a donor."""

    request: RequestId


class Unremember(msgspec.Struct, frozen=True, tag=True):
    """No further route will name this request as a donor."""

    request: RequestId


Action = (
    Route
    | Refuse
    | Abort
    | Hold
    | Fail
    | Convert
    | Dismiss
    | ThresholdSet
    | Lend
    | Repay
    | Remember
    | Unremember
)
