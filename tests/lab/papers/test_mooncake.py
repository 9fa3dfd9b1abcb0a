"""Each table on small traces: every cell gets a figure, and what must hold between cells holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from isthmus.config import load_config
from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import Lab, loads_of
from isthmus.lab.papers.mooncake import cluster, hit_rate, tables
from isthmus.lab.papers.registry import TABLES
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result
from isthmus.lab.sim.workloads import Request
from tests.lab.papers.traces import untraced, write_traces

EXAMPLE = Path(__file__).parents[3] / "examples" / "mooncake-fast25.yaml"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("traces")
    write_traces(
        folder, "poisson:rate=6,num=120,input=lognormal(p50=6000,p99=40000),output=40,turns=3,think_s=9"
    )
    return Lab(folder)


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_gets_a_figure(lab: Lab, name: str) -> None:
    rows = list(TABLES[name].rows(lab)) if TABLES[name].traces else untraced(name)
    assert rows
    for row in rows:
        if row["ours"] is None:
            assert row["reason"] == "nothing to compute it from" or name == "semsharekv-quality"
        else:
            assert math.isfinite(row["ours"])
            assert ("reason" in row) == (row["published"] is None)


def _ours(lab: Lab, name: str) -> dict[tuple[str, str], Any]:
    return {(row["row"], row["column"]): row["ours"] for row in TABLES[name].rows(lab)}


def test_policies_that_see_more_wait_less(lab: Lab) -> None:
    mean = _ours(lab, "mooncake-scheduling")
    times = [mean[f"conversation, {name}", "mean (s)"] for name in ("random", "load balancing")]
    aware = [mean[f"conversation, {name} cache aware", "mean (s)"] for name in ("local", "global")]
    assert times[0] > times[1] > aware[0] >= aware[1]


def test_disaggregation_keeps_decodes_from_stalling(lab: Lab) -> None:
    share = _ours(lab, "mooncake-capacity")
    column = "TBT <= 100 ms (%)"
    assert share["synthetic, Mooncake", column] > share["synthetic, vLLM", column]
    assert share["synthetic, vLLM", column] <= share["synthetic, vLLM", "TBT <= 300 ms (%)"]


def test_a_larger_pool_hits_no_less_and_the_optimum_most(lab: Lab) -> None:
    for row in hit_rate.BY_POLICY.measure(lab):
        assert row.ours is not None and 0.0 <= row.ours <= 1.0
    ours = _ours(lab, "mooncake-hit-rate-blog")
    for size in ("1,011 blocks", "no limit"):
        assert ours["tool & agent, optimum", size] >= ours["tool & agent, LRU", size]


def test_the_example_is_the_cluster_of_the_tables() -> None:
    assert deployment_of(load_config(EXAMPLE, {}), cluster.BLOCK_SIZE) == cluster.mooncake()


def test_vllm_nodes_have_no_cache_but_their_own_memory() -> None:
    nodes = cluster.vllm(cluster.CHUNKS).nodes
    assert len(nodes) == 16 and {node.role.value for node in nodes} == {"mixed"}
    assert {node.dram_blocks for node in nodes} == {0} and nodes[0].cost == cluster.curve()


def test_loads_in_opposite_phase() -> None:
    """Minutes of prefill at one node and of decode take turns for half an hour."""
    minute = 60 * NS_PER_S
    records = []
    for index in range(15):
        begin = 2 * index * minute
        record = RequestRecord(
            index, Request(begin, 100, 10), RequestStatus.COMPLETED, prefill=0, arrival_ns=begin
        )
        record.prefill_start_ns = begin
        record.first_token_ns = record.joined_ns = begin + minute
        record.end_ns = begin + 2 * minute
        records.append(record)
    result = Result("", "", "", "", records, [], [], 0, 30 * minute, {})
    deviation, change, per_hour, together = tables.swings(loads_of(result))
    assert deviation == pytest.approx(100, rel=0.1) and per_hour == pytest.approx(30, rel=0.1)
    assert change == pytest.approx(2 * 100 * 5 / 60, rel=0.1)  # from none to twice the mean each minute
    assert together == pytest.approx(-1)
