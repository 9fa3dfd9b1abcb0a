"""Mooncake's tables on small traces: what must hold between cells holds; and simulations that tables share."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.config import load_config
from isthmus.core.cost import compile_cost
from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import Lab, Trace, Variant, loads_of
from isthmus.lab.papers.mooncake import cluster, tables
from isthmus.lab.papers.mooncake.cluster import curve, mooncake
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result
from isthmus.lab.sim.workloads import Request
from tests.lab.papers.traces import ours, write_traces

EXAMPLE = Path(__file__).parents[3] / "examples" / "mooncake-fast25.yaml"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("traces")
    write_traces(
        folder, "poisson:rate=6,num=120,input=lognormal(p50=6000,p99=40000),output=40,turns=3,think_s=9"
    )
    return Lab(folder)


def test_policies_that_see_more_wait_less(lab: Lab) -> None:
    mean = ours("mooncake-scheduling", lab)
    names = ("random", "load balancing", "local cache aware", "global cache aware")
    times = [mean[f"conversation, {name}", "mean (s)"] for name in names]
    assert times[0] > times[1] > times[2] >= times[3]


def test_disaggregation_keeps_decodes_from_stalling(lab: Lab) -> None:
    share = ours("mooncake-capacity", lab)
    column = "TBT <= 100 ms (%)"
    assert share["synthetic, Mooncake", column] > share["synthetic, vLLM", column]
    assert share["synthetic, vLLM", column] <= share["synthetic, vLLM", "TBT <= 300 ms (%)"]


def test_a_larger_pool_hits_no_less_and_the_optimum_most(lab: Lab) -> None:
    assert all(0.0 <= rate <= 1.0 for rate in ours("mooncake-evictions", lab).values())
    found = ours("mooncake-hit-rate-blog", lab)
    for size in ("1,011 blocks", "no limit"):
        assert found["tool & agent, optimum", size] >= found["tool & agent, LRU", size]


def test_the_example_is_the_cluster_of_the_tables() -> None:
    assert deployment_of(load_config(EXAMPLE, {}), cluster.BLOCK_SIZE) == cluster.mooncake()
    nodes = cluster.vllm(cluster.CHUNKS).nodes
    assert [(node.role.value, node.dram_blocks, node.cost) for node in nodes] == [("mixed", 0, curve())] * 16


def test_loads_in_opposite_phase() -> None:
    """Minutes of prefill at one node and of decode take turns for half an hour."""
    minute = 60 * NS_PER_S
    records = []
    for index in range(15):
        begin = 2 * index * minute
        request = Request(begin, 100, 10)
        record = RequestRecord(index, request, RequestStatus.COMPLETED, prefill=0, arrival_ns=begin)
        record.prefill_start_ns = begin
        record.first_token_ns = record.joined_ns = begin + minute
        record.end_ns = begin + 2 * minute
        records.append(record)
    result = Result("", "", "", "", records, [], [], 0, 30 * minute, {})
    deviation, change, per_hour, together = tables.swings(loads_of(result))
    assert deviation == pytest.approx(100, rel=0.1) and per_hour == pytest.approx(30, rel=0.1)
    assert change == pytest.approx(2 * 100 * 5 / 60, rel=0.1)  # from none to twice the mean each minute
    assert together == pytest.approx(-1)


def test_a_run_is_made_once_and_only_for_a_trace_that_is_there(tmp_path: Path) -> None:
    write_traces(tmp_path, "even:rate=2,num=9,input=9,output=2,turns=2,think_s=1")
    lab, told = Lab(tmp_path), list[str]()
    lab.report = told.append
    first = lab.run(Variant(Trace.CONVERSATION), mooncake(), "a run")
    assert lab.run(Variant(Trace.CONVERSATION), mooncake(), "the same") is first
    assert told == ["a run, conversation trace"]
    assert lab.run(Variant(Trace.CONVERSATION), mooncake(policy="random"), "another") is not first
    assert lab.has(Trace.ARXIV)
    (tmp_path / "mooncake_trace.jsonl").unlink()
    assert lab.absence(Trace.ARXIV) == f"no mooncake_trace.jsonl in {tmp_path}"
    assert not lab.has(Trace.ARXIV) and "--traces" in Lab(None).absence(Trace.ARXIV)


def test_variants_change_speed_outputs_and_names_alone(lab: Lab) -> None:
    plain = lab.workload(Variant(Trace.SYNTHETIC)).requests
    fast = lab.workload(Variant(Trace.SYNTHETIC, speed=2.0)).requests
    short = lab.workload(Variant(Trace.SYNTHETIC, one_token=True)).requests
    alone = lab.workload(Variant(Trace.SYNTHETIC, shared=False)).requests
    assert [each.arrival_ns for each in fast] == [round(each.arrival_ns / 2) for each in plain]
    assert {each.output_tokens for each in short} == {1} and {each.blocks for each in alone} == {()}
    assert [each.blocks for each in short] == [each.blocks for each in plain]
    assert [each.num_tokens for each in alone] == [each.num_tokens for each in plain]


def test_times_of_prefills_and_fetches_and_requests_within_limits(lab: Lab) -> None:
    """A prefill's time counts every chunk of what is not cached; a fetch is timed on the link, of 800 Gbps."""
    variant = Variant(Trace.TOOLAGENT, shared=False)
    plain, cost = lab.run(variant, mooncake(), "no names"), compile_cost(curve())
    lengths = [each.num_tokens for each in lab.workload(variant).requests]
    assert plain.summary.hit_rate_tokens == 0
    for length, time_s in zip(lengths, plain.prefill_s, strict=True):
        chunks = [(min(8192, length - start), start) for start in range(0, length, 8192)]
        assert time_s == pytest.approx(sum(cost.prefill_ns(*chunk) for chunk in chunks) / NS_PER_S)
    outcome = lab.run(Variant(Trace.SYNTHETIC), mooncake(), "global")
    fetched = outcome.summary.bytes_moved["fetch"]
    assert fetched and sum(outcome.fetch_s) >= fetched / 100e9
    assert outcome.within(1e9, 1e9) == 1.0 and outcome.within(0.0, 1e9) == 0.0
    assert outcome.within(sorted(outcome.ttft_s)[59], 1e9) == pytest.approx(0.5, abs=0.1)
    assert outcome.within(30.0, 0.1) == outcome.summary.goodput_share
