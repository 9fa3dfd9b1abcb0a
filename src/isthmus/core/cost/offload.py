"""Prefill in another cluster: how much of it a deployment bears (Prefill-as-a-Service, arXiv 2604.15039, section 3).

Requests with more than `threshold` uncached tokens are prefilled in a remote cluster and their KV crosses a link; the
others are prefilled at home, where all are decoded. Numbered equations are the paper's. Rates are requests per second.

The two classes of requests, offloaded and not, enter the equations by the time and bytes of one request: of the class's
mean length in the paper (`representative`), or the mean over the class, which is what queues see (`expected`). KV per
prefill second, equation (1), need not fall with the length: for most models it rises first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import attrgetter

import msgspec

from isthmus.core.cost.lengths import Lengths
from isthmus.core.cost.node_cost import NodeCost

_PS_PER_MS = 1_000_000_000
REMOTE_COMPUTE, LINK, LOCAL_COMPUTE, DECODE = "remote compute", "link", "local compute", "decode"
"""The stages that can limit a rate."""


def kv_throughput(kv_bytes: float, prefill_s: float) -> float:
    """Equation (1): KV bytes per second that one instance's prefill produces."""
    return kv_bytes / prefill_s


def egress_of(num_gpus: float, gpus_per_instance: float, kv_bytes: float, prefill_s: float) -> float:
    """Equation (2): bytes per second sent by a prefill cluster at full load; `kv_bytes`, `prefill_s`: means over the
    offloaded requests."""
    return num_gpus / gpus_per_instance * kv_throughput(kv_bytes, prefill_s)


def remote_rate(num_instances: float, prefill_s: float, kv_bytes: float, egress: float) -> float:
    """Equation (3): the slower of computing and sending, which overlap layer by layer."""
    return min(_ratio(num_instances, prefill_s), _ratio(egress, kv_bytes))


def local_rate(num_instances: float, prefill_s: float) -> float:
    """Equation (4): prefill at home, whose network does not bind."""
    return _ratio(num_instances, prefill_s)


def decode_rate(num_instances: float, batch: float, step_s: float, output_tokens: float) -> float:
    """Equation (5): `batch` sequences get a token each in every step of `step_s`."""
    return _ratio(num_instances * batch, step_s * output_tokens)


def largest_batch(cost: NodeCost, context: float, most: int, tbt_ms: int | None) -> int:
    """`BS_max` of equation (5): the most sequences of `context` tokens, up to `most`, whose decode step takes at most
    `tbt_ms` (None: no limit). 0 if one alone takes longer."""
    if tbt_ms is None:
        return most
    limit_ps = tbt_ms * _PS_PER_MS

    def too_long(batch: int) -> bool:
        fixed, slope = cost.decode_step_ps(batch)
        return fixed + slope * batch * context > limit_ps

    return bisect_left(range(1, most + 1), True, key=too_long)


def highest_rate(remote: float, local: float, decode: float, share: float) -> float:
    """Equation (6): `share` of the requests passes the remote stage, the rest the local one, all are decoded."""
    return min(_ratio(remote, share), _ratio(local, 1 - share), decode)


def prefill_imbalance(remote: float, local: float, share: float) -> float:
    """Equation (7), 0 at the best threshold: the excess of the remote stage's rate, as a share of the lesser rate.
    Infinite where one stage has nothing to do."""
    one, other = _ratio(remote, share), _ratio(local, 1 - share)
    return _ratio(one - other, min(one, other))


def decode_imbalance(remote: float, local: float, decode: float) -> float:
    """Equation (8), 0 at the best split: the excess of the decode rate, as a share of the lesser. Seldom 0, since
    instances are whole; the objective is (6)."""
    return _ratio(decode - remote - local, min(decode, remote + local))


def _ratio(amount: float, per: float) -> float:
    """`amount / per`; infinite if nothing is needed, even of no resource."""
    if per > 0:
        return amount / per
    return math.copysign(math.inf, amount)


class RequestWork(msgspec.Struct, frozen=True):
    """Work of a request by its length: seconds on a remote or local instance, and bytes on the link."""

    remote_s: Callable[[float], float]
    local_s: Callable[[float], float]
    kv_bytes: Callable[[float], float]


class Classes(msgspec.Struct, frozen=True):
    """A workload cut by a threshold: the `share` of requests offloaded, seconds and bytes of one of these, and
    `local_s` of one of the others. 0 for an empty class."""

    threshold: float
    share: float
    remote_s: float
    local_s: float
    kv_bytes: float


Split = Callable[[Lengths, RequestWork, Sequence[float]], list[Classes]]
"""`representative` or `expected`: the classes of each of ascending thresholds."""


def representative(lengths: Lengths, work: RequestWork, thresholds: Sequence[float]) -> list[Classes]:
    """As in the paper: by the mean length of each class."""
    found = []
    for threshold in thresholds:
        share = lengths.share(threshold)
        above = lengths.mean_above(threshold) if share > 0 else 0.0
        found.append(
            Classes(
                threshold=threshold,
                share=share,
                remote_s=work.remote_s(above) if share > 0 else 0.0,
                local_s=work.local_s(lengths.mean_below(threshold)) if share < 1 else 0.0,
                kv_bytes=work.kv_bytes(above) if share > 0 else 0.0,
            )
        )
    return found


def expected(lengths: Lengths, work: RequestWork, thresholds: Sequence[float]) -> list[Classes]:
    """By the exact distribution: the mean work over the requests of each class."""
    *remote_s, all_remote_s = lengths.sums(work.remote_s, (*thresholds, math.inf))
    *kv_bytes, all_kv_bytes = lengths.sums(work.kv_bytes, (*thresholds, math.inf))
    local_s = lengths.sums(work.local_s, thresholds)
    found = []
    for at, threshold in enumerate(thresholds):
        share = lengths.share(threshold)
        found.append(
            Classes(
                threshold=threshold,
                share=share,
                remote_s=(all_remote_s - remote_s[at]) / share if share > 0 else 0.0,
                local_s=local_s[at] / (1 - share) if share < 1 else 0.0,
                kv_bytes=(all_kv_bytes - kv_bytes[at]) / share if share > 0 else 0.0,
            )
        )
    return found


class PrefillFleet(msgspec.Struct, frozen=True):
    """`num_remote`: prefill instances there; `num_local`: instances at home, to be split into prefill and decode.

    `egress`: of the link, bytes per second; `decode_rate`: requests per second of one decode instance, by (5).
    """

    num_remote: int
    num_local: int
    egress: float
    decode_rate: float


class Solution(msgspec.Struct, frozen=True):
    """The rates of a threshold and a split. `remote`, `local`, `decode`: equations (3) to (5); `rate`: (6); `binds`:
    the stage that limits it; `egress`: bytes per second on the link at that rate."""

    classes: Classes
    num_prefill: int
    num_decode: int
    remote: float
    local: float
    decode: float
    rate: float
    binds: str
    egress: float


def bear(classes: Classes, fleet: PrefillFleet, num_prefill: int) -> Solution:
    """Equations (3) to (6), with `num_prefill` of the instances at home for prefill and the others for decode."""
    share, num_decode = classes.share, fleet.num_local - num_prefill
    remote = local = 0.0
    if share > 0:
        remote = remote_rate(fleet.num_remote, classes.remote_s, classes.kv_bytes, fleet.egress)
    if share < 1:
        local = local_rate(num_prefill, classes.local_s)
    decode = num_decode * fleet.decode_rate
    rate = highest_rate(remote, local, decode, share)
    return Solution(
        classes=classes,
        num_prefill=num_prefill,
        num_decode=num_decode,
        remote=remote,
        local=local,
        decode=decode,
        rate=rate,
        binds=_binds(classes, fleet, num_prefill, decode),
        egress=rate * share * classes.kv_bytes,
    )


def _binds(classes: Classes, fleet: PrefillFleet, num_prefill: int, decode: float) -> str:
    """The first of the terms of (6), (3) taken apart, that is the least."""
    share = classes.share
    terms = {
        REMOTE_COMPUTE: _ratio(fleet.num_remote, share * classes.remote_s),
        LINK: _ratio(fleet.egress, share * classes.kv_bytes),
        LOCAL_COMPUTE: _ratio(num_prefill, (1 - share) * classes.local_s),
        DECODE: decode,
    }
    return min(terms, key=lambda name: terms[name])


def solve(many: Iterable[Classes], fleet: PrefillFleet) -> list[Solution]:
    """The best split of each threshold, in their order; of equal ones that with the fewest prefill instances."""
    splits = range(fleet.num_local + 1)
    rate = attrgetter("rate")
    return [max((bear(classes, fleet, split) for split in splits), key=rate) for classes in many]


def best(solutions: Iterable[Solution]) -> Solution:
    """The highest rate; of equals the highest threshold, which sends the least over the link."""
    return max(solutions, key=lambda each: (each.rate, each.classes.threshold))


class Threshold(msgspec.Struct, frozen=True):
    """Longer prompts than `tokens` are offloaded, with None no prompt. `rate`: of both prefill stages together,
    equation (6) without decode; `share`: of the requests offloaded; `binds`: the stage that limits the rate."""

    tokens: int | None
    rate: float
    share: float
    binds: str


def best_threshold(
    lengths: Sequence[int],
    remote_s: Callable[[int], float],
    num_remote: float,
    local_s: Callable[[int], float],
    num_local: float,
    kv_bytes: Callable[[int], float],
    egress: float,
) -> Threshold:
    """The threshold with the highest rate for a sample of `lengths`, which must not be empty.

    Exact: tries every cut of the sample, in O(n log n). A stage without instances or rate serves only requests that
    need nothing of it. Of equal thresholds between two lengths the lowest, since too high a threshold costs more than
    too low a one; of equal cuts the one that offloads the least.
    """
    assert lengths
    counts = sorted(Counter(lengths).items())
    local_sums = [0.0, *accumulate(count * local_s(length) for length, count in counts)]
    staying = len(lengths)
    remote_sum = kv_sum = 0.0

    def cut(tokens: int | None, kept: int) -> Threshold:
        """`kept` of the distinct lengths stay. The rate of a stage is its capacity over its part of the mean
        request."""
        terms = {
            REMOTE_COMPUTE: _ratio(num_remote, remote_sum),
            LINK: _ratio(egress, kv_sum),
            LOCAL_COMPUTE: _ratio(num_local, local_sums[kept]),
        }
        binds = min(terms, key=lambda name: terms[name])
        return Threshold(tokens, len(lengths) * terms[binds], 1 - staying / len(lengths), binds)

    found = cut(None, len(counts))
    for kept in reversed(range(len(counts))):
        length, count = counts[kept]
        staying -= count
        remote_sum += count * remote_s(length)
        kv_sum += count * kv_bytes(length)
        found = max(found, cut(counts[kept - 1][0] if kept else 0, kept), key=lambda each: each.rate)
    return found
