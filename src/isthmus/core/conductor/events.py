"""What the operator decides, in one frozen value that a flight recording begins with."""

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
"""What a policy is given by name, beside the facts."""


class LinkRule(msgspec.Struct, frozen=True):
    """One direction of a link between two clusters."""

    source: str
    target: str
    bytes_per_s: int
    rtt_ns: int = 0


class Rules(msgspec.Struct, frozen=True):
    """What is not explained here is an option of `scheduling` or `offload` in docs/configuration.md."""

    policy: str = "least_loaded"
    policy_parameters: Parameters = ()
    max_requests: int = 1024  # accepted at once
    max_attempts: int = 3  # routes of one request, beside those that lost a node or a link
    retry_after_ms: int = 1000
    wait_ms: int = 0  # how long a new request waits for a node of a kind of which there is none
    admission: str = "none"
    admission_parameters: Parameters = ()
    reserve: float = 0.0
    load_limit: float = 1.0
    codecs: tuple[str, ...] = ()  # by which KV may be encoded on its way, where that is sooner there
    # Limits of requests that bring none; None for no limit.
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    links: tuple[LinkRule, ...] = ()  # between clusters, both directions of each
    threshold: int | None = None  # uncached tokens; prompts with more are prefilled elsewhere; None: is solved
    priced: bool = False  # no threshold: each prompt goes where it is predicted to cost least
    cache_mode: str = "scarce"
    control: bool = False
    convert: bool = False
    cool_down_s: float = 60.0
    period_ns: int = NS_PER_S  # how often the driver says `LinksMeasured`
    lending: str = "none"
    lending_reserve: float = 0.1
    # Of prompts that may be computed with more than their own prefix; see `reuse` in docs/configuration.md.
    reuse_selector: str = "cacheblend"
    reuse_packs: bool = True
    reuse_prompts: int = 1024
    reuse_tokens: int = 700


# What the conductor is told and what it answers; also what the flight recorder writes.


RECORDING_FORMAT = 9
"""Of flight recordings: changes whenever rules, an event or an action of conductor or nodes do."""


class Paths(msgspec.Struct, frozen=True):
    """How fast KV moves to and from one node, in bytes per second; 0: not at all.

    `network`: between its cache and another node's, each way; `memory`: from its DRAM to its device;
    `disk`: from its SSD; `handover`: between prefill and decode, 0 when that shares `network`. `rtt_ns`: of a question
    to another node of its cluster and the answer, what does not depend on their size.
    """

    network: int = 0
    memory: int = 0
    disk: int = 0
    handover: int = 0
    rtt_ns: int = 0


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """A node is ready. `capacity_tokens`: the longest request, prompt and answer, its KV memory can hold.

    `cost`: what work takes there, None when nobody knows; `cache_blocks`: how many blocks its cache keeps;
    `kv_dtype`: of its KV, "" when nobody knows; `cluster`: where it stands, "" if there is only one;
    `state_blocks`: how many blocks the recurrent state of a sequence fills, 0 for models without: a prefix is of use
    up to a block whose state is kept as well (`blocks.state_name`). `max_sequences`: so many decode there at once,
    0 for no limit known. `lends`: it may hold KV of requests that are computed elsewhere, and have others hold its own.
    `kv_heads`: into so many equal parts the KV of a token can be cut. `reuse_layers`: those that keep KV, where prompts
    can be assembled from others' KV; else 0.
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
    """One direction of a link between clusters, over the period just past; or as one node of the `source` sees it,
    since it started.

    `up`: at least one session crosses it, or could; `sent_bytes`: that left; `busy_ns`: how long something was on its
    way; `queued_bytes`: handed over to be sent and not there yet; `retransmits`: of TCP segments; `rtt_ns`: 0 if not
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


class LinksMeasured(msgspec.Struct, frozen=True, tag=True):
    """Comes every `Rules.period_ns` where there are links, or nodes may be converted."""

    links: tuple[LinkState, ...] = ()


class NodeLeft(msgspec.Struct, frozen=True, tag=True):
    """A node closed its session or fell silent; whatever it held is lost."""

    node: NodeId


class PromptContent(msgspec.Struct, frozen=True):
    """What a prompt says, as far as others with the same can be found: only of requests that may be computed with
    more than their own prefix, as `reuse` says. Digests `pieces` of what it is cut into (`isthmus.core.reuse.cut`),
    where each ends, and the `signature` of its embedding. `scope`: prompts of other scopes are none of its
    business."""

    reuse: Reuse
    scope: bytes
    pieces: tuple[bytes, ...]
    stops: tuple[int, ...]
    signature: bytes = b""


class RequestArrived(msgspec.Struct, frozen=True, tag=True):
    """A request of `num_tokens` prompt tokens whose full blocks have `names`.

    `ttft_ms`, `tbt_ms`: its own limits, None takes the deployment's. A higher `priority` is refused last. `weight`: of
    its tenant's share next to others', 0: it has none, as where there are no API keys.
    """

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


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The prompt of this attempt is computed: its prefill node works on something else now."""

    request: RequestId
    attempt: int


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """The last token of a request was produced, its `num_generated`-th."""

    request: RequestId
    num_generated: int = 0


class HoldExpired(msgspec.Struct, frozen=True, tag=True):
    """No node came in time for a request on hold since `attempt`."""

    request: RequestId
    attempt: int


class RequestCancelled(msgspec.Struct, frozen=True, tag=True):
    """The client does not want the rest."""

    request: RequestId


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
    | LinksMeasured
    | HoldingsChanged
    | MemoryUsed
)


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Turn a request away that has got no token yet. `code`: `overloaded`, `unavailable` or `too_long`.

    `stage`: who could not take it, `prefill` or `decode`.
    """

    request: RequestId
    code: str
    reason: str
    retry_after_ms: int = 0
    stage: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """An attempt that a `Route` began is over: tell `nodes`, those of it that are here, to forget it. Each attempt ends
    so, once, before the next one begins or the request ends; after `RequestEnded` and `RequestCancelled`, too."""

    request: RequestId
    attempt: int
    nodes: tuple[NodeId, ...]


class Hold(msgspec.Struct, frozen=True, tag=True):
    """No node can go on with an accepted request now: wait `wait_ms` for one to join or to have memory, or as long as
    the desk has it wait if that is 0, then say `HoldExpired`. `attempt` 0: it had none yet."""

    request: RequestId
    attempt: int
    reason: str
    wait_ms: int = 0


class Fail(msgspec.Struct, frozen=True, tag=True):
    """End an accepted request with an error that the client sees. `final`: the fault is the request's own."""

    request: RequestId
    reason: str
    final: bool = False


class ThresholdSet(msgspec.Struct, frozen=True, tag=True):
    """From now on prompts with more uncached tokens are prefilled in another cluster; None: no prompt is."""

    threshold: int | None
    reason: str


class Remember(msgspec.Struct, frozen=True, tag=True):
    """Other prompts may be assembled from this request's: keep the tokens of its full blocks, until `Unremember`."""

    request: RequestId


class Unremember(msgspec.Struct, frozen=True, tag=True):
    """No route will name this request as a donor any more."""

    request: RequestId


Action = Route | Refuse | Abort | Hold | Fail | Convert | ThresholdSet | Lend | Repay | Remember | Unremember
