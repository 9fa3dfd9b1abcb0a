"""Decode where all KV, and so all attention, is with a pool of other nodes (model-attention disaggregation, Lamina).

Every token of a batch sends its queries, its new key and value, and gets sums back; a batch may be cut into some that
take turns (`turns`). Times are of all layers: a period of each layer, summed.
"""

from __future__ import annotations

from typing import NamedTuple

from isthmus.core.cost.elsewhere import SENT_BYTES
from isthmus.core.cost.node_cost import NodeCost
from isthmus.core.cost.turns import period_ps

_PS = 1e12
ONE_OR_TWO = (1, 2)
"""Batches that take turns on one copy of the layers."""


class Pooled(NamedTuple):
    """One copy of the model's layers and its pool.

    `holders`: equal nodes, each with the cost `holder`, among which each sequence's KV is spread evenly (a part of one,
    where several copies share them). `bytes_per_s`: between the two sides, all links together; `rtt_s`: of a question
    and its answer; `element_bytes`: of what is sent.
    """

    model: NodeCost
    holder: NodeCost
    holders: float
    bytes_per_s: float
    rtt_s: float
    element_bytes: int = SENT_BYTES

    def model_s(self, batch: int) -> float:
        """All but attention."""
        return self.model.decode_step_ps(batch)[0] / _PS

    def attention_s(self, batch: int, context: float) -> float:
        return self.holder.attend_ps(1, batch * context) / self.holders / _PS

    def sent_bytes(self, batch: int) -> float:
        """In an iteration, both ways."""
        return self.model.queries.num_bytes(batch, self.element_bytes) + batch * self.model.kv_token_bytes

    def network_s(self, batch: int) -> float:
        return self.model.queries.layers * self.rtt_s + self.sent_bytes(batch) / self.bytes_per_s

    def step_s(self, batch: int, context: float, turns: int = 1) -> float:
        """Until each of `batch` sequences of so many tokens has its next one; in `turns` batches that take turns."""
        turns = min(turns, batch)
        part = -(-batch // turns)
        times = (self.model_s(part), self.attention_s(part, context), self.network_s(part))
        return period_ps(turns, *[round(_PS * time) for time in times]) / _PS

    def rate(self, batch: int, context: float) -> tuple[float, int]:
        """Tokens a second, and in how many batches that take turns: one or two, whichever are quicker."""
        return max(
            [(batch / self.step_s(batch, context, turns), turns) for turns in ONE_OR_TWO if turns <= batch]
        )


def is_compute_bound(cost: NodeCost, batch: int) -> bool:
    """Whether twice the batch takes over half as long again, so that memory for a larger one brings little. Reading
    weights alone takes as long for any batch."""
    return cost.decode_step_ps(2 * batch)[0] >= 1.5 * cost.decode_step_ps(batch)[0]
