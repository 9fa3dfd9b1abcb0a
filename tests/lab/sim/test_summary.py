from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.types import NS_PER_S, NodeId, Role
from isthmus.lab.sim.records import LinkRecord, NodeRecord, RequestStatus
from isthmus.lab.sim.spread import Percentiles, nearest_rank
from isthmus.lab.sim.summary import summarize, to_json, within_limits
from tests.lab.sim.report.results import MS, record, replayed, result

NEVER: dict[str, Any] = {"prefill_start": -1, "first_token": -1, "landed": -1, "joined": -1}


def test_the_times_of_one_request() -> None:
    summary = summarize(result([record(tbt_ns=600.0 * MS)]))
    assert summary.queue_s == Percentiles(1, 1, 1, 1)
    assert summary.ttft_s == Percentiles(3, 3, 3, 3)
    assert summary.transfer_s == Percentiles(1, 1, 1, 1)
    assert summary.tpot_s == Percentiles(0.5, 0.5, 0.5, 0.5)  # 5 s for the 10 tokens after the first
    assert summary.tbt_s == Percentiles(0.6, 0.6, 0.6, 0.6)
    assert summary.e2e_s == Percentiles(8, 8, 8, 8)
    assert (summary.requests, summary.completed, summary.goodput_share) == (1, 1, 1.0)
    assert (summary.goodput_per_s, summary.output_tokens_per_s, summary.makespan_s) == (0.1, 1.1, 10.0)
    one_token = summarize(result([record(output_tokens=1)]))
    assert (one_token.tbt_s, one_token.tpot_s, one_token.completed) == (None, None, 1)
    nothing = summarize(result([], nodes=[], end_ns=0))
    assert nothing.ttft_s is None and nothing.tbt_s is None and nothing.e2e_s is None
    assert (nothing.goodput_share, nothing.goodput_per_s, nothing.hit_rate_tokens) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "inside"),
    [
        ({}, True),
        ({"ttft_limit_ns": 3 * NS_PER_S}, True),
        ({"ttft_limit_ns": 3 * NS_PER_S - 1}, False),
        ({"tbt_limit_ns": 100 * MS, "tbt_ns": 100.0 * MS}, True),
        ({"tbt_limit_ns": 100 * MS, "tbt_ns": 100.5 * MS}, False),
        ({"ttft_limit_ns": NS_PER_S, "tbt_ns": 1.0, "tbt_limit_ns": MS}, False),
        ({"status": RequestStatus.UNFINISHED}, False),
        ({"status": RequestStatus.FAILED}, False),
    ],
)
def test_goodput_needs_an_end_and_both_limits(fields: dict[str, Any], inside: bool) -> None:
    one = record(**fields)
    assert within_limits(one) is inside
    assert summarize(result([one, record(1)])).goodput_share == (1.0 if inside else 0.5)


def test_refusals_are_counted_by_stage_and_shares_are_of_all_requests() -> None:
    refused = [
        record(1, status=RequestStatus.REFUSED, stage="prefill", times_s=NEVER, prefill_ns=0),
        record(2, status=RequestStatus.REFUSED, stage="decode", times_s={"joined": -1}),
        record(3, status=RequestStatus.REFUSED, stage="gate", times_s=NEVER, prefill_ns=0),
    ]
    summary = summarize(result([record(), *refused]))
    assert summary.rejected == {"prefill": 1, "decode": 1, "gate": 1}
    assert (summary.completed, summary.goodput_share) == (1, 0.25)
    assert summarize(result([record()])).rejected == {"prefill": 0, "decode": 0}


def test_waste_is_prefill_work_by_what_became_of_it() -> None:
    records = [
        record(0, prefill_ns=4 * NS_PER_S),
        record(1, prefill_ns=3 * NS_PER_S, ttft_limit_ns=1),
        record(
            2, prefill_ns=2 * NS_PER_S, status=RequestStatus.REFUSED, stage="decode", times_s={"joined": -1}
        ),
        record(3, prefill_ns=NS_PER_S, status=RequestStatus.FAILED),
    ]
    waste = summarize(result(records)).waste
    assert (waste.missed.node_s, waste.missed.share) == (3.0, 0.3)
    assert (waste.refused.node_s, waste.refused.share) == (2.0, 0.2)
    assert (waste.failed.node_s, waste.failed.share) == (1.0, 0.1)


def test_hit_rates_are_over_requests_whose_prefill_began() -> None:
    hit = record(
        num_tokens=1000, blocks=(1, 2), cached_tokens=600, fetched_tokens=200, disk_tokens=100, cached_blocks=1
    )
    missed = record(1, num_tokens=3000, blocks=(1, 2, 3, 4, 5, 6))
    refused = record(
        2, status=RequestStatus.REFUSED, stage="prefill", times_s=NEVER, prefill_ns=0, num_tokens=9000
    )
    summary = summarize(result([hit, missed, refused]))
    assert summary.hit_rate_tokens == 0.15
    assert summary.hit_rate_blocks == 0.125
    hits = summary.hits_by_source
    assert (hits.memory, hits.fetched, hits.disk) == (0.075, 0.05, 0.025)


def test_pools_and_links() -> None:
    nodes = [
        NodeRecord(NodeId("p0"), Role.PREFILL, busy_ns=10 * NS_PER_S, stalled_ns=NS_PER_S, preemptions=2),
        NodeRecord(NodeId("p1"), Role.PREFILL, busy_ns=5 * NS_PER_S, blocks_evicted=7),
        NodeRecord(NodeId("d0"), Role.DECODE, busy_ns=NS_PER_S, tokens_decoded=9),
    ]
    links = [
        LinkRecord("a", "network", 100.0, bytes_moved=500),
        LinkRecord("b", "network", 100.0, bytes_moved=1000),
        LinkRecord("s", "spine", float("inf"), bytes_moved=1500),
    ]
    summary = summarize(result([], nodes=nodes, links=links, bytes_moved={"handover": 1500}))
    assert list(summary.utilisation) == ["decode", "prefill"]
    prefill = summary.utilisation["prefill"]
    assert (prefill.nodes, prefill.busy_share, prefill.stalled_share) == (2, 0.75, 0.05)
    assert (prefill.preemptions, prefill.blocks_evicted) == (2, 7)
    assert summary.utilisation["decode"].tokens_decoded == 9
    network, spine = summary.links["network"], summary.links["spine"]
    assert (network.utilisation_mean, network.utilisation_max, network.bytes_moved) == (0.75, 1.0, 1500)
    assert (spine.utilisation_mean, spine.bytes_moved) == (0.0, 1500)
    assert summary.bytes_moved == {"handover": 1500}


def test_groups_only_where_requests_differ() -> None:
    same = summarize(result([record(), record(1)]))
    assert same.by_priority == {} and same.by_tenant == {}
    mixed = summarize(
        result([record(tenant="b"), record(1, tenant="a", priority=10, ttft_limit_ns=1), record(2, priority=2)])
    )
    assert list(mixed.by_priority) == ["10", "2", "0"]
    assert list(mixed.by_tenant) == ["", "a", "b"]
    assert (mixed.by_priority["10"].goodput_share, mixed.by_priority["2"].goodput_share) == (0.0, 1.0)


@given(st.lists(st.integers(0, 10**12), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[int], percent: int) -> None:
    values.sort()
    found = nearest_rank(values, percent)
    assert sum(value <= found for value in values) * 100 >= percent * len(values)
    assert sum(value < found for value in values) * 100 < percent * len(values)


def test_figures_do_not_depend_on_the_order_of_the_records() -> None:
    whole = replayed(400)
    expected = to_json(summarize(whole))
    random.Random(1).shuffle(whole.records)
    assert to_json(summarize(whole)) == expected


def test_every_request_ends_once_and_every_number_is_finite() -> None:
    summary = summarize(replayed(1500, seed=3, prefill_nodes=4))
    ends = summary.completed + sum(summary.rejected.values()) + summary.failed + summary.unfinished
    assert ends == summary.requests == 1500
    assert min(summary.rejected.values()) > 0 and summary.failed > 0
    for groups in (summary.by_priority, summary.by_tenant):
        assert sum(group.requests for group in groups.values()) == 1500
    assert all(math.isfinite(number) for number in _numbers(json.loads(to_json(summary))))


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in _numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [value] if isinstance(value, int | float) else []


def test_the_json_has_the_promised_keys() -> None:
    summary = summarize(replayed(300))
    values = json.loads(to_json(summary, wall=False))
    assert "wall_s" not in values and "wall_s" in json.loads(to_json(summary))
    assert {
        "requests",
        "completed",
        "goodput_share",
        "hit_rate_tokens",
        "hit_rate_blocks",
        "bytes_moved",
    } < set(values)
    assert list(values["ttft_s"]) == list(values["tbt_s"]) == ["mean", "p50", "p90", "p99"]
