"""What head and nodes say to each other. Schema-checked msgpack; token ids and KV bytes, nothing executable.

`attempt` goes with everything about a request: what comes late from an earlier attempt is void.
"""

from __future__ import annotations

import msgspec

from isthmus.blocks import KVLayout
from isthmus.conductor import Paths
from isthmus.cost import Cost
from isthmus.types import BlockName, Generated, NodeId, RequestId, Role, Sampling, TokenLogprobs

PROTOCOL = 2


def key_of(request: RequestId, attempt: int) -> RequestId:
    """What a node calls an attempt, so that two attempts of one request never share state."""
    return RequestId(f"{request}#{attempt}")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A node offers itself. `address`: where other nodes reach it for KV, `host:port`.

    `cost`: what work takes on it, None when nobody knows; `paths`: how fast KV moves to and from it.
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
    """Blocks that are now, and no longer, in this node's cache."""

    stored: tuple[BlockName, ...] = ()
    evicted: tuple[BlockName, ...] = ()


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life with this node's gauges and counters."""

    gauges: dict[str, float]


HeadBound = Hello | Outputs | HandedOver | AttemptFailed | CacheChanged | Beat


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The node is part of the cluster. `beat_ms`: how often it must send a Beat."""

    beat_ms: int


class Turned(msgspec.Struct, frozen=True, tag=True):
    """The node is not wanted, and why."""

    reason: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Take part in an attempt.

    `tokens`: prompt and what earlier attempts generated; the first `num_prompt` are the client's prompt.
    `part`: PREFILL computes the prompt and sends its KV to `peer`; DECODE receives it and goes on; MIXED does
    both here. The answer ends at `stop_length` tokens in all. `work_ns`: node time the conductor expects the
    prefill to take; `budget_ns`: what was left until the promised first token when this was sent, None without
    a promise (a duration, for clocks of machines differ). `salt`: of the request's caches.
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

    @property
    def key(self) -> RequestId:
        return key_of(self.request, self.attempt)


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop an attempt and free its blocks. Unknown ones are no error."""

    request: RequestId
    attempt: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave: the cluster shuts down."""


NodeBound = Welcome | Turned | Begin | Forget | Stop


class PeerHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a prefill node to a decode node."""

    protocol: int
    token: str
    node: NodeId
    revision: str
    layout: KVLayout


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: KV of this attempt will come over this session."""

    request: RequestId
    attempt: int


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: blocks are reserved, send."""

    request: RequestId
    attempt: int


class Slices(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: one layer of blocks `[first_block, first_block + len(seals))`, tokens up to `stop`.

    Payload: the bytes of token positions `[first_block * block_size, stop)`; each block's slice has a seal.
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


PeerMessage = PeerHello | Offer | Grant | Slices | Sent | Landed | Withdrawn
