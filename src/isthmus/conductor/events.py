"""What the conductor is told and what it answers; also what the flight recorder writes."""

from __future__ import annotations

import msgspec

from isthmus.types import BlockName, NodeId, RequestId, Role


class NodeJoined(msgspec.Struct, frozen=True, tag=True):
    """A node is ready. `capacity_tokens`: the longest request, prompt and answer, its KV memory can hold."""

    node: NodeId
    role: Role
    capacity_tokens: int
    block_size: int


class NodeLeft(msgspec.Struct, frozen=True, tag=True):
    """A node closed its session or fell silent; whatever it held is lost."""

    node: NodeId


class RequestArrived(msgspec.Struct, frozen=True, tag=True):
    """A request of `num_tokens` prompt tokens whose full blocks have `names`."""

    request: RequestId
    tenant: str
    num_tokens: int
    max_tokens: int
    names: tuple[BlockName, ...]


class PrefillFinished(msgspec.Struct, frozen=True, tag=True):
    """The prompt of this attempt is computed and its KV is where it decodes: the prefill node is free of it."""

    request: RequestId
    attempt: int


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """The last token of a request was produced."""

    request: RequestId


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
    node: NodeId
    names: tuple[BlockName, ...]


class BlocksEvicted(msgspec.Struct, frozen=True, tag=True):
    node: NodeId
    names: tuple[BlockName, ...]


Event = (
    NodeJoined
    | NodeLeft
    | RequestArrived
    | PrefillFinished
    | RequestEnded
    | RequestFailed
    | HoldExpired
    | RequestCancelled
    | BlocksStored
    | BlocksEvicted
)


class Route(msgspec.Struct, frozen=True, tag=True):
    """Prefill and decode a request on these nodes; the same node twice means that its KV does not move.

    `attempt` counts from 1. Later attempts go on from the tokens already generated.
    """

    request: RequestId
    attempt: int
    prefill: NodeId
    decode: NodeId


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Turn an arriving request away. `code`: `overloaded`, `unavailable` or `too_long`."""

    request: RequestId
    code: str
    reason: str
    retry_after_ms: int = 0


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


Action = Route | Refuse | Abort | Hold | Fail
