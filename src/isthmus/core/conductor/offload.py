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

FAR_LESS = 2.0


def offloads(num_tokens: int, home: int, there: int, threshold: int | None, *, abundant: bool) -> bool:
    """Whether another cluster prefills `num_tokens`, of which so many are cached at home and there. `threshold`: in
    tokens, None: nothing is offloaded."""
    cached = max(home, there) if abundant else home
    return threshold is not None and num_tokens - cached > threshold


def guarded(offload: bool, home_ns: float, there_ns: float) -> bool:
    """What the guard makes of the threshold's answer, by what both cost. Ties go where that says."""
    return home_ns >= there_ns if offload else FAR_LESS * there_ns < home_ns
