"""Which cluster prefills a request (Prefill-as-a-Service, arXiv 2604.15039).

A prompt is judged by its *uncached* tokens: more than the threshold are prefilled in another cluster, that many or
fewer at home. What counts as cached depends on what is scarce:

    scarce bandwidth    each cluster is judged by its own cache, and no cached prefix crosses
    abundant bandwidth  the longest prefix counts wherever it lies, and is copied to the cluster that computes

Beside the threshold, which balances capacity in the long run, stands a guard for the moment (`Rules.control`). It
compares what the prompt would cost in each cluster,

    cost = TTFT + price * node time

with the TTFT predicted from queues, caches and the link, until the KV is where it decodes, and the price of the
`isthmus` policy: by how much others wait longer for a second of node time in that cluster. A prompt above the threshold
stays at home all the same where that costs less. One that is not is offloaded all the same where that costs less than
half (`FAR_LESS`): a queue at home that is that long, after a burst or a fault, is worth more than the room kept for
long prompts elsewhere. When both clusters are idle the price is nothing, and short prompts differ by less than that.

With a threshold of 0 the guard decides alone (`Rules.priced`): the cluster whose node time is short costs more, which
is what a threshold stands for.
"""

from __future__ import annotations

import msgspec

FAR_LESS = 2.0


class Decision(msgspec.Struct, frozen=True):
    """Whether to prefill in the other cluster, and whether to bring the longer prefix over first."""

    offload: bool
    copy: bool = False


def scarce(num_tokens: int, cached_home: int, cached_there: int, threshold: int | None) -> Decision:
    """Of `num_tokens`, so many are cached at home and there. `threshold` None: nothing is offloaded."""
    uncached = num_tokens - cached_home
    return Decision(_exceeds(uncached, threshold))


def abundant(num_tokens: int, cached_home: int, cached_there: int, threshold: int | None) -> Decision:
    """As `scarce`. On ties nothing is copied."""
    longest = max(cached_home, cached_there)
    offload = _exceeds(num_tokens - longest, threshold)
    own = cached_there if offload else cached_home
    return Decision(offload, copy=own < longest)


def _exceeds(uncached: int, threshold: int | None) -> bool:
    return threshold is not None and uncached > threshold


class Prediction(msgspec.Struct, frozen=True):
    """What a prefill in one cluster would take: `ttft_ns` until its KV is where it decodes, `work_ns` of node time;
    `price` of that time, see above."""

    ttft_ns: float
    work_ns: float
    price: float

    @property
    def cost_ns(self) -> float:
        return self.ttft_ns + self.price * self.work_ns


def guarded(offload: bool, home: Prediction, there: Prediction) -> bool:
    """What the guard makes of the threshold's answer. Ties go where that says."""
    if offload:
        return home.cost_ns >= there.cost_ns
    return FAR_LESS * there.cost_ns < home.cost_ns
