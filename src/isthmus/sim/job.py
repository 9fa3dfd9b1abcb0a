"""One request on its way through the simulated cluster."""

from __future__ import annotations

from isthmus.sim.network import Flow
from isthmus.sim.records import RequestRecord
from isthmus.sim.workloads import Request
from isthmus.types import RequestId


class Job:
    """`attempt`: that of its route, -1 once it was withdrawn. `prefill_slot`, `target`: its nodes. `age`: which
    admission of the node where it computes was its own.

    `started`: its prefill has begun; `reserved`: its decode node has room for it. `flows`: all under way for it, of
    which `handover` goes to its decode node; its prefill waits for `pending` others, and until `loaded_ns`.
    `kept`, `fetch_kept`: bytes that cross the links for a byte of KV handed over and fetched. `source_slot`: node that
    its blocks up to `stop` are fetched from, and pinned on, or -1.

    `num_generated`: tokens before `first_step`, the iterations of the node `decodes_on` before its first there;
    its last token is the `last_step`-th there. `spans`: (node, first step, last step) of each stay that is over;
    `resumed_ns`: when the prefill after a pre-emption gave a token.
    """

    __slots__ = (
        "age", "attempt", "decodes_on", "fetch_kept", "first_step", "flows", "handover", "index", "kept", "last_step",
        "loaded_ns", "name",
        "num_generated", "pending", "prefill_slot", "record", "request", "reserved", "resumed_ns",
        "source_slot", "spans", "started", "stop", "target",
    )  # fmt: skip

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.name = RequestId(str(index))
        self.record = RequestRecord(index, request, arrival_ns=request.arrival_ns)
        self.age = self.attempt = self.pending = self.num_generated = self.stop = self.loaded_ns = 0
        self.prefill_slot = self.target = -1
        self.decodes_on = self.first_step = self.last_step = -1
        self.spans: list[tuple[int, int, int]] = []
        self.resumed_ns: list[int] = []
        self.flows: list[Flow] = []
        self.handover: Flow | None = None
        self.reserved = self.started = False
        self.source_slot = -1
        self.kept = self.fetch_kept = 1.0

    @property
    def num_left(self) -> int:
        """Tokens that are still to come, while it does not decode."""
        return self.request.output_tokens - self.num_generated

    def join(self, slot: int, step: int) -> None:
        """It decodes on a node after `step` of its iterations."""
        self.decodes_on, self.first_step, self.last_step = slot, step, step + self.num_left

    def leave(self, step: int) -> None:
        """It decodes no more; the node's `step`-th iteration was its last there."""
        self.num_generated += step - self.first_step
        self.spans.append((self.decodes_on, self.first_step, step))
        self.decodes_on = self.last_step = -1
