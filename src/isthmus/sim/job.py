"""One request on its way through the simulated cluster."""

from __future__ import annotations

from isthmus.sim.network import Flow
from isthmus.sim.records import RequestRecord
from isthmus.sim.workloads import Request
from isthmus.types import NodeId, RequestId


class Job:
    """`pending`: copies and loads its prefill still waits for. `num_generated`: tokens so far.

    `first_step`, `last_step`: iterations of `decodes_on` before its first and up to its last token there; -1 while
    it does not decode. `spans`: (node, first step, last step) of earlier stays, which a pre-emption ended;
    `resumed_ns`: when each further prefill gave a token.
    """

    __slots__ = (
        "attempt", "decodes_on", "fetch", "first_step", "flows", "handover", "index", "landing", "last_step", "name",
        "num_generated", "pending", "prefill_slot", "record", "request", "reserved", "resumed_ns", "source", "spans",
        "started", "stop", "target",
    )  # fmt: skip

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.name = RequestId(str(index))
        self.record = RequestRecord(index, request, arrival_ns=request.arrival_ns)
        self.attempt = self.pending = self.num_generated = 0
        self.prefill_slot = -1
        self.decodes_on = self.first_step = self.last_step = -1
        self.spans: list[tuple[int, int, int]] = []
        self.flows: list[Flow] = []
        self.handover: Flow | None = None
        self.reserved = self.started = self.landing = False
        self.source: NodeId | None = None
        self.stop = 0
        self.target = -1
        self.resumed_ns: list[int] = []
