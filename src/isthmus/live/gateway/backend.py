"""The interface between the gateway and a cluster; the head implements it, tests bring a fake."""

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
    """The size of a KV block, in tokens and bytes."""

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...


class GatewayLink(Protocol):
    """One direction of a link between clusters. `sent_bytes` counts since the gateway started; `bytes_per_s` and
    `queued_bytes` are recent; `rtt_ns` is 0 while unknown."""

    source: str
    target: str
    up: bool
    rated_bytes_per_s: int
    sent_bytes: int
    bytes_per_s: int

    @property
    def queued_bytes(self) -> int: ...

    @property
    def rtt_ns(self) -> int: ...


class OffloadView(Protocol):
    """Prefill offload between clusters. `threshold`: prompts with more uncached tokens are prefilled in another
    cluster (None: none are); `reason`: of its latest change; `requests`: sent to another cluster; `conversions`:
    nodes that changed their role."""

    threshold: int | None
    reason: str
    changes: int
    requests: int
    conversions: int

    @property
    def links(self) -> Sequence[GatewayLink]: ...


class Backend(Protocol):
    @property
    def card(self) -> ModelCard:
        """The served model; constant while the gateway runs."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether a prefill and decode pair, or one mixed node, is ready."""
        ...

    def submit(self, job: Job) -> TokenStream:
        """Starts a job. Raises RequestError, OverloadedError or UnavailableError."""
        ...

    async def ready_to_reuse(self) -> None:
        """Waits until prompts can be compared by meaning; awaited before jobs whose `reuse` is not exact. The first
        call may take as long as reading the model's embeddings. Raises UnavailableError."""
        ...

    async def poll(self) -> None:
        """Asks each node for fresh gauges; returns soon even if one does not answer."""
        ...

    def gauges(self) -> dict[str, dict[str, float]]:
        """Metric name -> node id -> value, for /metrics and /status. May be empty."""
        ...

    def nodes(self) -> Mapping[NodeId, tuple[Role, BlockShape, str]]:
        """Role, block shape and cluster ("" if there is only one) of the joined nodes, in the order they joined. A node
        appears a moment before its gauges."""
        ...

    def products(self) -> Mapping[NodeId, Sequence[str]]:
        """The matrix-product kernels that each node's engine chose: "SHAPE: which product for how many rows", one
        line for each shape of weights that was timed."""
        ...

    def remarks(self) -> Mapping[NodeId, str]:
        """Warnings for operators about some nodes: a promise that their engine cannot keep."""
        ...

    def offload(self) -> OffloadView | None:
        """State of the links between clusters; None where there are none."""
        ...

    def refusals(self) -> dict[str, int]:
        """Jobs refused so far, by the stage that was full. May be empty."""
        ...
