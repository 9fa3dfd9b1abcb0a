from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.cost import compile_cost
from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.lab import Lab, Trace, Variant
from isthmus.lab.papers.mooncake.cluster import curve, mooncake
from tests.lab.papers.traces import write_traces


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    write_traces(tmp_path, "poisson:rate=2,num=40,input=12000,output=20,turns=4,think_s=20")
    return Lab(tmp_path)


def test_a_run_is_made_once_and_only_for_a_trace_that_is_there(lab: Lab, tmp_path: Path) -> None:
    told: list[str] = []
    lab.report = told.append
    variant = Variant(Trace.CONVERSATION)
    first = lab.run(variant, mooncake(), "a run")
    assert lab.run(Variant(Trace.CONVERSATION), mooncake(), "the same") is first
    assert told == ["a run, conversation trace"]
    assert lab.run(variant, mooncake(policy="random"), "another") is not first
    assert lab.has(Trace.ARXIV) and not Lab(None).has(Trace.ARXIV)
    (tmp_path / "mooncake_trace.jsonl").unlink()
    assert not lab.has(Trace.ARXIV)
    assert lab.absence(Trace.ARXIV) == f"no mooncake_trace.jsonl in {tmp_path}"
    assert "--traces" in Lab(None).absence(Trace.ARXIV)


def test_variants_change_speed_outputs_and_names_alone(lab: Lab) -> None:
    plain = lab.workload(Variant(Trace.SYNTHETIC)).requests
    fast = lab.workload(Variant(Trace.SYNTHETIC, speed=2.0)).requests
    short = lab.workload(Variant(Trace.SYNTHETIC, one_token=True)).requests
    alone = lab.workload(Variant(Trace.SYNTHETIC, shared=False)).requests
    assert [each.arrival_ns for each in fast] == [round(each.arrival_ns / 2) for each in plain]
    assert {each.output_tokens for each in short} == {1} and {each.blocks for each in alone} == {()}
    assert [each.blocks for each in short] == [each.blocks for each in plain]
    assert [each.num_tokens for each in alone] == [each.num_tokens for each in plain]


def test_prefill_time_counts_every_chunk_of_what_is_not_cached(lab: Lab) -> None:
    variant = Variant(Trace.TOOLAGENT, shared=False)
    outcome = lab.run(variant, mooncake(), "no names")
    cost = compile_cost(curve())
    assert outcome.summary.hit_rate_tokens == 0 and len(outcome.prefill_s) == 40
    lengths = [each.num_tokens for each in lab.workload(variant).requests]
    for length, time_s in zip(lengths, outcome.prefill_s, strict=True):
        chunks = [(min(8192, length - start), start) for start in range(0, length, 8192)]
        assert time_s == pytest.approx(sum(cost.prefill_ns(*chunk) for chunk in chunks) / NS_PER_S)


def test_fetches_are_timed_on_the_link(lab: Lab) -> None:
    outcome = lab.run(Variant(Trace.SYNTHETIC), mooncake(), "global")
    fetched = outcome.summary.bytes_moved["fetch"]
    assert fetched and outcome.fetch_s
    assert sum(outcome.fetch_s) >= fetched / 100e9  # 800 Gbps


def test_requests_within_limits(lab: Lab) -> None:
    outcome = lab.run(Variant(Trace.SYNTHETIC), mooncake(), "global")
    assert outcome.within(1e9, 1e9) == 1.0 and outcome.within(0.0, 1e9) == 0.0
    middle = sorted(outcome.ttft_s)[19]
    assert outcome.within(middle, 1e9) == pytest.approx(0.5, abs=0.1)
    assert outcome.within(30.0, 0.1) == outcome.summary.goodput_share
