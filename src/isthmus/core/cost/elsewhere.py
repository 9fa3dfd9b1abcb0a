"""What it takes that a part of attention is computed on another node: queries travel, sums come back, KV stays.

In each layer that keeps KV (DistAttention, Infinite-LLM; model-attention disaggregation, Lamina, sections 3 and 4):

    bytes      = rows (2 q + 4 heads)        q: bytes of a token's queries, sums come back as wide; 4: a weight a head
    a part     = layers rtt + bytes / link + attention there
    iteration  = all but attention + max(attention at home, the slowest part)

With n batches that take turns, it is the longest of n times one's layers, n times one's attention elsewhere, and one's
whole way. The parts of several holders run at the same time, and what is at home is attended to meanwhile; their bytes
share the home's link. Nothing of this depends on how much KV lies elsewhere but the attention there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

SENT_BYTES = 4
"""Of a number of queries and sums, as engines exchange them: float32."""
_WEIGHT_BYTES = 4
_PS = 1e12


class Queries(msgspec.Struct, frozen=True):
    """What one token asks of KV elsewhere, summed over the `layers` that ask: numbers of its queries, and heads."""

    elements: int
    heads: int
    layers: int

    def num_bytes(self, rows: float, element_bytes: int = SENT_BYTES) -> float:
        """There and back, for so many tokens."""
        return rows * (2 * self.elements * element_bytes + self.heads * _WEIGHT_BYTES)


class Path(msgspec.Struct, frozen=True):
    """Between home and a holder: of a question and its answer what does not depend on their size, in ps; bytes per
    second that both ends have."""

    rtt_ps: int
    bytes_per_s: float


class Part(msgspec.Struct, frozen=True):
    """Of an iteration, what one holder is asked. `attend_ps`: what the holder takes for it."""

    path: Path
    num_bytes: float
    attend_ps: float


class Wait(NamedTuple):
    """From the first question of an iteration to its last answer, without what happens at home meanwhile, in ps:
    `rtt`, and bytes on the `wire` and attention, which are less for a part of the batch."""

    rtt: int
    wire: int
    attend: int

    @property
    def whole(self) -> int:
        return sum(self)


def slowest(parts: Iterable[Part], layers: int, home_bytes_per_s: float) -> Wait:
    """Of all holders that an iteration asks, the one that is waited for."""
    asked = list(parts)
    total = sum([part.num_bytes for part in asked])
    waits = []
    for part in asked:
        wire = max(part.num_bytes / part.path.bytes_per_s, total / home_bytes_per_s)
        waits.append(Wait(layers * part.path.rtt_ps, round(_PS * wire), round(part.attend_ps)))
    return max(waits, key=sum)


def lines(batches: int, model: int, own: int, growth: int, wait: Wait) -> list[tuple[int, int]]:
    """(picoseconds, more in each next iteration) of all that bounds an iteration of decodes whose batch is cut into so
    many that take turns on one device: the longest counts (`turns.period_ps`, with no second device).

    `model`: all but attention, of one of the batches; `own`: attention at home, of all of them, with its `growth`.
    """
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
    """Bytes per second with which the link adds no more than a share `slack` to an iteration that sends so many.

    Where queries, sums and the new KV cross it: BW_min = (2 + 2/G) e d B L / (slack (MTIME + ATIME)) (Lamina,
    section 3).
    """
    return num_bytes / (slack * (model_s + attention_s))
