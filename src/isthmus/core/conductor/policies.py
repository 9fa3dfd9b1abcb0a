"""Placement policies by name: each chooses where a request prefills, from the same estimates.

`random`, `round_robin`, `least_loaded`, `sticky` and `local_aware` are baselines; `mooncake` is Algorithm 1 of
the paper; `isthmus`, in `pricing.py`, is ours. All choose among the nodes that can take the request. What a policy has
further parameters for, each with a default, a configuration may set (`Rules.policy_parameters`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from isthmus.core.conductor.estimates import Estimator, can_copy, isthmus, least_sending
from isthmus.core.conductor.events import Rules
from isthmus.core.conductor.view import Placement

_ttft = attrgetter("ttft_ns")
Policy = Callable[..., Placement]
"""(estimator, rules, and its own parameters)."""

STICKY_BLOCKS = 2


def random(estimator: Estimator, rules: Rules) -> Placement:
    """Any node, by a hash of the number of routes so far (SplitMix64), so that a replay agrees."""
    mask = (1 << 64) - 1
    z = (estimator.view.num_routed + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return estimator.local(z % len(estimator.nodes))


def round_robin(estimator: Estimator, rules: Rules) -> Placement:
    """The nodes in turn."""
    return estimator.local(estimator.view.num_routed % len(estimator.nodes))


def least_loaded(estimator: Estimator, rules: Rules) -> Placement:
    """The shortest queue, by the time it takes. Ties go to the node that joined first."""
    waits = estimator.waits
    return estimator.local(waits.index(min(waits)))


def sticky(estimator: Estimator, rules: Rules) -> Placement:
    """The longest match of `STICKY_BLOCKS` or more, the shortest queue among equals; else the shortest queue."""
    deepest = max([estimator.depths[node.slot] for node in estimator.nodes])
    if deepest < STICKY_BLOCKS:
        return least_loaded(estimator, rules)
    holders = [at for at, node in enumerate(estimator.nodes) if estimator.depths[node.slot] == deepest]
    return estimator.local(min(holders, key=lambda at: estimator.waits[at]))


def local_aware(estimator: Estimator, rules: Rules) -> Placement:
    """The lowest predicted TTFT with what each node has itself (Mooncake, FAST'25, "cache-aware" of Figure 5)."""
    return min(map(estimator.local, range(len(estimator.nodes))), key=_ttft)


def mooncake(estimator: Estimator, rules: Rules, balancing_threshold: float = 1.0) -> Placement:
    """Algorithm 1 (FAST'25, section 6.1): lowest TTFT; fetch from the best holder where it is far ahead.

    "Far ahead" is `best > balancing_threshold * own`, the paper's ratio without its division by zero. Transfer and
    compute overlap, and the transfer is estimated on shared links, as for every policy here.
    """
    longest, holders = estimator.held[-1]
    holder = least_sending(estimator, holders) if longest else None
    options = []
    for at, node in enumerate(estimator.nodes):
        own = estimator.depths[node.slot]
        ahead = longest > balancing_threshold * own and longest > own
        if holder is not None and holder is not node and ahead and can_copy(holder, node):
            options.append(estimator.fetched(at, holder, longest))
        else:
            options.append(estimator.local(at))
    return min(options, key=_ttft)


POLICIES: dict[str, Policy] = {
    "random": random,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "sticky": sticky,
    "local_aware": local_aware,
    "mooncake": mooncake,
    "isthmus": isthmus,
}
FETCHING = ("mooncake", "isthmus")
"""Those that weigh a fetch against computing; the others take what a node has."""
