"""Lamina's tables: what a roofline reproduces is held to, what it does not is said."""

from __future__ import annotations

from itertools import product

import pytest

from isthmus.lab.papers import lamina
from isthmus.lab.papers.lamina import BATCHES, MODELS, TRACES, batches, least, pool, vllm
from tests.lab.papers.traces import ours, untraced


def test_batches_are_more_than_twice_as_large() -> None:
    assert [vllm(model).kv_token_bytes for model in MODELS] == [1_597_440, 2_621_440, 327_680]
    for model in MODELS:
        for each in TRACES.values():
            small, large = batches(model, each.context)
            assert large > 2 * small


def test_more_throughput_where_memory_binds_and_none_where_compute_does() -> None:
    """70B on Azure-Conv: half as many H100 have to compute a batch of 800."""
    for model, trace in product(MODELS, TRACES):
        if (model, trace) == ("70B", "Azure-Conv"):
            assert lamina.gain(model, trace) < 1
        else:
            assert lamina.gain(model, trace) > 1.1
            assert lamina.gain(model, trace, lamina.measured()) > 1.1
    batch, rate, bound = lamina.at(4)
    assert batch == pytest.approx(800, rel=0.02) and bound
    twice, more, _ = lamina.at(8)
    assert twice > 1.9 * batch and more < 1.05 * rate
    _, long, bound = lamina.at(4, "Kimi-Conv")
    assert not bound and lamina.at(8, "Kimi-Conv")[1] > 1.9 * long


def test_the_range_is_not_called_a_reproduction() -> None:
    """Both ends are printed beside ours, which lie below; whatever assumes a worse vLLM has no published figure."""
    rows = untraced("lamina-throughput")
    ends = [row for row in rows if row["published"] is not None]
    assert {row["row"] for row in ends} == {
        f"{which}, vLLM at 100% of the roofline" for which in ("least", "most")
    }
    assert all(row["ours"] < row["published"] for row in ends)
    assert all("no reproduction" in row["reason"] for row in rows if "90%" in row["row"] or "60%" in row["row"])


def test_400_gbps_suffice() -> None:
    for batch in BATCHES:
        for compute, memory, context in ((1, 1, 8192), (1, 1, 4096), (2, 4, 8192)):
            assert least(batch, context, compute, memory) <= 30
    assert least(300, 8192) == pytest.approx(18, rel=0.1)


def test_a_slower_network_costs_one_batch_and_not_two() -> None:
    for model in MODELS:
        context = TRACES["Azure-Conv"].context
        _, batch = batches(model, context)
        past, through = pool(model), pool(model, link=35.5e9, rtt_s=66.6e-6)
        assert 1.03 < through.step_s(batch, context) / past.step_s(batch, context) < 1.1
        assert through.rate(batch, context) == past.rate(batch, context)


def test_queries_first_save_more_where_there_is_more_kv() -> None:
    found, column = ours("lamina-network"), "TBT saved at most (%)"
    many, few = (found[f"{model}, queries first", column] for model in ("65B", "70B"))
    assert many > 3 * few > 3
