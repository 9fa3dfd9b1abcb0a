"""A placement policy of one's own: of the nodes that are nearly as quick, the one that has least to compute.

The quickest placement alone spreads equal prompts over all nodes, and each computes them. To wait a little for a node
that has the prefix cached leaves node time to others.
"""

from isthmus.core.conductor.estimates import Estimator, can_copy, least_sending
from isthmus.core.conductor.events import Rules
from isthmus.core.conductor.view import Placement

SLACK = 1.25
"""So many times the best predicted TTFT still counts as nearly as quick."""


def thrifty(estimator: Estimator, rules: Rules) -> Placement:
    """Weighs what each node has itself, and a fetch from the node with the longest prefix."""
    options = [estimator.local(at) for at in range(len(estimator.nodes))]
    longest, holders = estimator.held[-1]
    if longest:
        holder = least_sending(estimator, holders)
        options += [
            estimator.fetched(at, holder, longest)
            for at, node in enumerate(estimator.nodes)
            if estimator.depths[node.slot] < longest and can_copy(holder, node)
        ]
    best = min(option.ttft_ns for option in options)
    quick = [option for option in options if option.ttft_ns <= SLACK * best]
    return min(quick, key=lambda option: (option.work_ns, option.ttft_ns))
