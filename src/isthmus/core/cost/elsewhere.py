"""The cost of attention on other nodes: queries travel, sums come back, KV stays.

In each layer that keeps KV (DistAttention, Infinite-LLM; model-attention disaggregation, Lamina, sections 3 and 4):

    bytes      = rows (2 q + 4 heads)        q: bytes of a token's queries, sums come back as wide; 4: a weight a head
    a part     = layers rtt + bytes / link + attention there
    iteration  = all but attention + max(attention at home, the slowest part)

With n batches that take turns, an iteration is the longest of n times the layers of one, n times the attention
elsewhere of one, and the whole way of one. Holders and home attend at the same time; all bytes share the home's link.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

SENT_BYTES = 4
"""Of one element of queries and sums, as engines exchange them: float32."""
_WEIGHT_BYTES = 4
_PS = 1e12


class Queries(msgspec.Struct, frozen=True):
    """Queries of one token to KV elsewhere: `elements` and `heads`, summed over the `layers` that keep KV."""

    elements: int
    heads: int
    layers: int

    def num_bytes(self, rows: float, element_bytes: int = SENT_BYTES) -> float:
        """Bytes there and back for `rows` tokens."""
        return rows * (2 * self.elements * element_bytes + self.heads * _WEIGHT_BYTES)


class Path(msgspec.Struct, frozen=True):
    """The link between home and a holder: round trip in ps, and rate."""

    rtt_ps: int
    bytes_per_s: float


class Part(msgspec.Struct, frozen=True):
    """The part of an iteration at one holder. `attend_ps`: the holder's time for it."""

    path: Path
    num_bytes: float
    attend_ps: float


class Wait(NamedTuple):
    """Times in ps from the first query of an iteration to the last sum: round trips, bytes on the `wire`, attention.
    The last two shrink with the batch."""

    rtt: int
    wire: int
    attend: int

    @property
    def whole(self) -> int:
        return sum(self)


def slowest(parts: Iterable[Part], layers: int, home_bytes_per_s: float) -> Wait:
    """The longest wait of an iteration for any of its holders."""
    asked = list(parts)
    total = sum([part.num_bytes for part in asked])
    waits = []
    for part in asked:
        wire = max(part.num_bytes / part.path.bytes_per_s, total / home_bytes_per_s)
        waits.append(Wait(layers * part.path.rtt_ps, round(_PS * wire), round(part.attend_ps)))
    return max(waits, key=sum)


def lines(batches: int, model: int, own: int, growth: int, wait: Wait) -> list[tuple[int, int]]:
    """Lower bounds (ps, growth in each next iteration) of a decode iteration whose batch is cut into `batches` that
    take turns on one device; the longest counts (`pooled.period_ps`). `model`: time of one batch without attention;
    `own`: attention at home of all batches, with its `growth`."""
    if batches == 1:
        return [(model + own, growth), (model + wait.whole, 0)]
    layers, more = model + -(-own // batches), -(-growth // batches)
    wire, attend = -(-wait.wire // batches), -(-wait.attend // batches)
    return [
        (batches * layers, batches * more),
        (batches * attend, 0),
        (layers + wait.rtt + wire + attend, more),
    ]


def least_bandwidth(num_bytes: float, model_s: float, attention_s: float, slack: float) -> float:
    """Bytes per second with which a link adds at most a share `slack` to an iteration that sends `num_bytes`. For
    queries, sums and new KV: BW_min = (2 + 2/G) e d B L / (slack (MTIME + ATIME)) (Lamina, section 3)."""
    return num_bytes / (slack * (model_s + attention_s))
