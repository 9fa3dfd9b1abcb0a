from __future__ import annotations

import pytest

from isthmus.core.conductor import NodeJoined, Rules
from isthmus.core.conductor.capacity import ENOUGH, WINDOW, Capacity
from isthmus.core.conductor.view import Placement, View
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.types import NodeId, Role

from .case_study import GBPS, H20, H200, both_ways

P, D = Role.PREFILL, Role.DECODE


def deployment(
    prompts: list[int], num_far: int = 4, gbps: float = 100, cost: Curve = H20, **rule: object
) -> tuple[View, Capacity]:
    """Three prefill and five decode nodes at home, and prompts of these lengths, nothing cached."""
    rules = Rules(links=both_ways(gbps), **rule)  # type: ignore[arg-type]
    view = View(rules.links)
    joins = [("near", P, 3, cost), ("near", D, 5, cost), ("far", P, num_far, H200)]
    for cluster, role, count, curve in joins:
        for number in range(count):
            name = NodeId(f"{cluster}-{role}-{number}")
            view.join(NodeJoined(name, role, 10**6, 64, curve, cluster=cluster, max_sequences=20))
    capacity = Capacity(view, rules)
    for length in prompts:
        placement = Placement(view.prefills[0], 0, 0, 1, 1)
        placement.uncached = length
        capacity.add(length, placement)
    view.outputs.add(1024)
    return view, capacity


def test_who_prefills_for_whom() -> None:
    view, capacity = deployment([])
    assert [cluster.name for cluster in capacity.homes] == ["near"]
    assert (len(capacity.remote_nodes), len(capacity.local_nodes)) == (4, 3)
    assert capacity.egress == 100 * GBPS
    view.links["far", "near"].trusted = False
    assert not capacity.remote_nodes and capacity.egress == 0


def test_the_best_threshold_is_where_both_stages_bear_the_same() -> None:
    """Lengths 1,000, 2,000, ... 60,000: equations (3), (4) and (7), written out."""
    lengths = [1000 * number for number in range(1, 61)]
    _, capacity = deployment(lengths)
    tokens = capacity.threshold(3).tokens
    assert tokens is not None

    def rate(threshold: int) -> float:
        far = sum(compile_cost(H200).prefill_ns(n, 0) for n in lengths if n > threshold) / 1e9
        near = sum(compile_cost(H20).prefill_ns(n, 0) for n in lengths if n <= threshold) / 1e9
        return len(lengths) * min(4 / far if far else 1e9, 3 / near if near else 1e9)

    best = max(range(0, 60_000, 1000), key=rate)
    assert tokens == best
    assert capacity.threshold(3).rate == pytest.approx(rate(best), rel=1e-6)


def test_what_a_split_bears() -> None:
    """Decode: 20 places and a token in 25 ms, 1,024 tokens each: 0.78125 requests a second."""
    view, capacity = deployment([20_000] * 100, threshold=0)
    near = view.clusters["near"]
    far_s = 0.72 + (1.84 - 0.72) * (20_000 - 8192) / (32_768 - 8192)
    assert capacity.rate(near, 3) == pytest.approx(min(4 / far_s, 5 * 0.78125), rel=1e-3)
    assert capacity.rate(near, 7) == pytest.approx(0.78125, rel=1e-3)
    view, capacity = deployment([20_000] * 100, num_far=0)
    local_s = H20.prefill_fixed_s + 20_000 * (H20.prefill_token_s + H20.prefill_pair_s * 20_000)
    assert capacity.rate(view.clusters["near"], 3) == pytest.approx(3 / local_s, rel=1e-3)


def test_the_largest_batch_is_what_all_limits_allow() -> None:
    grows = Curve(
        kv_token_bytes=1, num_layers=1, prefill_token_s=1e-4, decode_fixed_s=0.01, decode_sequence_s=0.001
    )
    for rule, batch in (({}, 20), ({"tbt_ms": 25}, 15), ({"tbt_ms": 1}, 1), ({"tbt_ms": 1000}, 20)):
        view, capacity = deployment([1000] * 10, cost=grows, **rule)
        assert capacity.largest_batch(view.decodes[0]) == batch
    view, capacity = deployment([99_488] * 10)  # and 512 tokens of answer: ten fit
    assert capacity.largest_batch(view.decodes[0]) == 10


def test_the_latest_prompts_count() -> None:
    _, capacity = deployment([100] * (ENOUGH - 1))
    assert not capacity.knows_lengths
    _, capacity = deployment([50_000] * 500 + [1000] * WINDOW)
    assert capacity.knows_lengths
    tokens = capacity.threshold(3).tokens
    assert tokens is None or tokens <= 1000


def test_in_one_cluster_what_is_computed_counts() -> None:
    view = View()
    for name, role in (("p", P), ("d", D)):
        view.join(NodeJoined(NodeId(name), role, 10**6, 64, H20))
    capacity = Capacity(view, Rules())
    for cached, uncached in ((0, 1000), (10, 360), (100, 1)):
        capacity.add(1000, Placement(view.prefills[0], cached, cached, 1, 1))
        assert capacity._latest[-1] == (uncached, 1000 - uncached)
