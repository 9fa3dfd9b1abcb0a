"""One request on its way through the simulated cluster."""

from __future__ import annotations

from isthmus.conductor import Route
from isthmus.scheduler import TierCache
from isthmus.sim.network import Flow
from isthmus.sim.records import RequestRecord
from isthmus.sim.workloads import Request
from isthmus.types import BlockName, RequestId


class Job:
    """`name`: what the conductor calls it; `key`: what its nodes call its attempt, so that what they say of an earlier
    one is not mistaken for it. `attempt`: that of its `route`, -1 once it was withdrawn. `prefill_slot`, `target`: its
    nodes. `age`: which admission of the node where it computes was its own.

    `length`, `names`: what this attempt prefills, the tokens that an earlier one gave included. `started`: its prefill
    has begun; `reserved`: its decode node has room for it; `prefilled`: its prefill is done. `flows`: all under way for
    it, of which `handover` goes to its decode node, which waits for `landing` transfers; its prefill waits for
    `pending` others, and until `loaded_ns`. `kept`, `fetch_kept`: bytes that cross the links for a byte of KV handed
    over and fetched. `stop`: up to which block its leading ones are fetched. `pinned`: by purpose, the caches that
    something is still to come from, and what.

    `num_generated`: tokens before `first_step`, the iterations of the node `decodes_on` before its first there;
    its last token is the `last_step`-th there. `spans`: (node, first step, last step) of each stay that is over;
    `resumed_ns`: when the prefill after a pre-emption, or of another attempt, gave a token.
    """

    __slots__ = (
        "age", "attempt", "decodes_on", "fetch_kept", "first_step", "flows", "handover", "index", "kept", "key",
        "landing", "last_step", "length", "loaded_ns", "name", "names", "num_generated", "pending", "pinned",
        "prefill_slot", "prefilled", "record", "request", "reserved", "resumed_ns", "route", "spans", "started",
        "stop", "target",
    )  # fmt: skip

    route: Route

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.name = self.key = RequestId(str(index))
        self.record = RequestRecord(index, request, arrival_ns=request.arrival_ns)
        self.length, self.names = request.num_tokens, request.blocks
        self.age = self.attempt = self.pending = self.num_generated = self.stop = self.loaded_ns = (
            self.landing
        ) = 0
        self.prefill_slot = self.target = -1
        self.decodes_on = self.first_step = self.last_step = -1
        self.spans: list[tuple[int, int, int]] = []
        self.resumed_ns: list[int] = []
        self.flows: list[Flow] = []
        self.handover: Flow | None = None
        self.reserved = self.started = self.prefilled = False
        self.pinned: dict[str, tuple[TierCache, tuple[BlockName, ...]]] = {}
        self.kept = self.fetch_kept = 1.0

    @property
    def num_left(self) -> int:
        """Tokens that are still to come, while it does not decode."""
        return self.request.output_tokens - self.num_generated

    def begin(self, route: Route, block_size: int) -> None:
        """Another attempt, of whose way nothing is done."""
        self.route, self.attempt = route, route.attempt
        self.record.attempts += 1
        self.landing = 1
        if route.attempt == 1:
            return
        request = self.request
        self.key = RequestId(f"{self.name} again {route.attempt}")
        self.length = request.num_tokens + self.num_generated
        # The block that the prompt leaves unfinished is another one with the tokens that follow it.
        self.names = (
            request.blocks[: request.num_tokens // block_size] if self.num_generated else request.blocks
        )
        self.reserved = self.started = self.prefilled = False
        if self.record.first_token_ns < 0:
            self.record.prefill_start_ns, self.record.stalled_ns = -1, 0

    def withdraw(self) -> None:
        """Its attempt is over, whatever it had come to. It decodes nowhere."""
        self.attempt = -1
        self.pending = self.loaded_ns = 0
        self.handover = None
        if self.record.first_token_ns >= 0 and len(self.spans) == len(self.resumed_ns):
            self.spans.append((0, 0, 0))  # a token came, and the next will be that of another prefill

    def waits_for(self, tiers: TierCache | None) -> bool:
        """Whether something is still to come for it from that cache."""
        return any(source is tiers for source, _ in self.pinned.values())

    def join(self, slot: int, step: int) -> None:
        """It decodes on a node after `step` of its iterations."""
        self.decodes_on, self.first_step, self.last_step = slot, step, step + self.num_left

    def leave(self, step: int) -> None:
        """It decodes no more; the node's `step`-th iteration was its last there."""
        self.num_generated += step - self.first_step
        self.spans.append((self.decodes_on, self.first_step, step))
        self.decodes_on = self.last_step = -1
