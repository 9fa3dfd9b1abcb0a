"""What the gateway asks of a cluster. The real one is the cluster's client handle; tests bring a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from isthmus.core.types import Generated, Job, ModelCard, NodeId, Role


class TokenStream(Protocol):
    """The output of one job: batches of tokens, in order; the last token carries `finish`."""

    def __aiter__(self) -> AsyncIterator[Sequence[Generated]]:
        """Iterates once. Raises IsthmusError if the request fails."""
        ...

    def cancel(self) -> None:
        """Frees the request everywhere at once. Idempotent, also after the end."""
        ...


class BlockShape(Protocol):
    """How large a KV block is on one node."""

    @property
    def block_size(self) -> int:
        """In tokens."""
        ...

    @property
    def block_bytes(self) -> int: ...


class GatewayLink(Protocol):
    """One direction of a link between clusters. `sent_bytes` since the gateway started; the rate and what waits for the
    link, of late; `rtt_ns` 0 when it is not known."""

    @property
    def source(self) -> str: ...

    @property
    def target(self) -> str: ...

    @property
    def up(self) -> bool: ...

    @property
    def rated_bytes_per_s(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...

    @property
    def bytes_per_s(self) -> int: ...

    @property
    def queued_bytes(self) -> int: ...

    @property
    def rtt_ns(self) -> int: ...


class OffloadView(Protocol):
    """`threshold`: prompts with more uncached tokens are prefilled in another cluster, None: no prompt is; `reason`: of
    its latest change; `changes`; `requests` sent to another cluster; `conversions` of nodes to another role."""

    @property
    def threshold(self) -> int | None: ...

    @property
    def reason(self) -> str: ...

    @property
    def changes(self) -> int: ...

    @property
    def requests(self) -> int: ...

    @property
    def conversions(self) -> int: ...

    @property
    def links(self) -> Sequence[GatewayLink]: ...


class Backend(Protocol):
    @property
    def card(self) -> ModelCard:
        """The served model. Does not change while the gateway runs."""
        ...

    @property
    def healthy(self) -> bool:
        """At least one prefill and decode pair, or one mixed node, is ready."""
        ...

    def submit(self, job: Job) -> TokenStream:
        """Starts a job. Raises RequestError, OverloadedError or UnavailableError."""
        ...

    async def ready_to_reuse(self) -> None:
        """To be awaited before jobs that may be computed with more than their own prefix: returns when prompts can be
        told apart by what they mean. The first time that may take as long as reading the model's embeddings."""
        ...

    async def poll(self) -> None:
        """Returns when each node has said how it is now, so that `gauges` knows; or soon, if one does not answer."""
        ...

    def gauges(self) -> dict[str, dict[str, float]]:
        """Metric name -> node id -> value, for /metrics and /status. May be empty."""
        ...

    def nodes(self) -> Mapping[NodeId, tuple[Role, BlockShape, str]]:
        """Role, block shape and cluster ("" if there is only one) of the nodes that are in, in the order they joined.
        One is here a moment before it has gauges."""
        ...

    def products(self) -> Mapping[NodeId, Sequence[str]]:
        """How the engine of each of these nodes multiplies: "SHAPE: which product for how many rows", a line for each
        shape of weights that was timed."""
        ...

    def remarks(self) -> Mapping[NodeId, str]:
        """What people are to know of some of these nodes: a promise that their engine cannot keep."""
        ...

    def offload(self) -> OffloadView | None:
        """What passes between clusters; None where no link joins any."""
        ...

    def refusals(self) -> dict[str, int]:
        """Jobs turned away so far, by the stage that could not take them. May be empty."""
        ...
