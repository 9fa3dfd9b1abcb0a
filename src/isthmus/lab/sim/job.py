"""One request on its way through the simulated cluster."""

from __future__ import annotations

from isthmus.core.attempts import Route, key_of
from isthmus.core.types import RequestId
from isthmus.lab.sim.records import RequestRecord
from isthmus.lab.sim.workloads import Request


class SimJob:
    """A request, and where its attempt under way has got to.

    `name`: what the conductor calls it; `key`: what its nodes call its attempt, the last one that began, by `route`.
    `prefill_slot`, `decode_slot`: its nodes. `age`: which admission of the node where it computes was its own.

    `length`: of what this attempt prefills, the tokens that an earlier one gave included. Its prefill waits until
    `loaded_ns`.

    `num_generated`: tokens before `first_step`, the iterations of the node `decodes_on` before its first there;
    its last token is the `last_step`-th there. `spans`: (node, first step, last step) of each stay that is over;
    `resumed_ns`: when the prefill after a pre-emption, or of another attempt, gave a token.
    """

    __slots__ = (
        "age", "decode_slot", "decodes_on", "first_step", "index", "key", "last_step", "length",
        "loaded_ns", "name", "num_generated", "prefill_slot", "record", "request", "resumed_ns", "route",
        "spans",
    )  # fmt: skip

    route: Route

    def __init__(self, index: int, request: Request) -> None:
        self.index, self.request = index, request
        self.name = self.key = RequestId(str(index))
        self.record = RequestRecord(index, request, arrival_ns=request.arrival_ns)
        self.length = request.num_tokens
        self.age = self.num_generated = self.loaded_ns = 0
        self.prefill_slot = self.decode_slot = -1
        self.decodes_on = self.first_step = self.last_step = -1
        self.spans: list[tuple[int, int, int]] = []
        self.resumed_ns: list[int] = []

    @property
    def num_left(self) -> int:
        """Tokens that are still to come, while it does not decode."""
        return self.request.output_tokens - self.num_generated

    def begin(self, route: Route) -> None:
        """Another attempt, of whose way nothing is done."""
        self.route, self.key = route, key_of(self.name, route.attempt)
        self.record.attempts += 1
        self.length = self.request.num_tokens + self.num_generated
        if self.record.first_token_ns < 0:
            self.record.prefill_start_ns, self.record.stalled_ns = -1, 0
            self.record.moved_tokens = self.record.similar_tokens = 0

    def withdraw(self) -> None:
        """Its attempt is over, whatever it had come to. It decodes nowhere."""
        self.loaded_ns = 0
        if self.record.first_token_ns >= 0 and len(self.spans) == len(self.resumed_ns):
            self.spans.append((0, 0, 0))  # a token came, and the next will be that of another prefill

    def join(self, slot: int, step: int) -> None:
        """It decodes on a node after `step` of its iterations."""
        self.decodes_on, self.first_step, self.last_step = slot, step, step + self.num_left

    def leave(self, step: int) -> None:
        """It decodes no more; the node's `step`-th iteration was its last there."""
        self.num_generated += step - self.first_step
        self.spans.append((self.decodes_on, self.first_step, step))
        self.decodes_on = self.last_step = -1
