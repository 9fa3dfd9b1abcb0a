"""Lamina's tables: what a roofline reproduces is held to, what it does not is said."""

from __future__ import annotations

import pytest

from isthmus.lab.papers import lamina
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.lamina import BATCHES, MODELS, TRACES, batches, least, pool, vllm
from isthmus.lab.papers.table import PaperCell

CELLS: dict[str, dict[tuple[str, str], PaperCell]] = {
    table.name: {(cell.row, cell.column): cell for cell in table.measure(Lab(None))} for table in lamina.TABLES
}
MEMORY_BOUND = [
    (model, trace) for model in MODELS for trace in TRACES if (model, trace) != ("70B", "Azure-Conv")
]


def cell(table: str, row: str, column: str) -> PaperCell:
    return CELLS[table][row, column]


def test_prices_and_sizes() -> None:
    for found in CELLS["lamina-setup"].values():
        assert found.ours == pytest.approx(found.published, rel=0.03)
    assert [vllm(model).kv_token_bytes for model in MODELS] == [1_597_440, 2_621_440, 327_680]


def test_the_mean_batch_ratio() -> None:
    found = cell("lamina-batch", "mean", "times")
    assert found.ours == pytest.approx(2.39, rel=0.1)
    for model in MODELS:
        assert all(
            large > 2 * small for small, large in (batches(model, each.context) for each in TRACES.values())
        )


@pytest.mark.parametrize(("model", "trace"), MEMORY_BOUND)
def test_more_throughput_where_memory_binds(model: str, trace: str) -> None:
    assert lamina.gain(model, trace) > 1.1
    assert lamina.gain(model, trace, lamina.measured()) > 1.1


def test_none_where_compute_binds() -> None:
    """70B on Azure-Conv: half as many H100 have to compute a batch of 800."""
    assert lamina.gain("70B", "Azure-Conv") < 1
    batch, rate, bound = lamina.at(4)
    assert batch == pytest.approx(800, rel=0.02) and bound
    twice, more, _ = lamina.at(8)
    assert twice > 1.9 * batch and more < 1.05 * rate
    _, long, bound = lamina.at(4, "Kimi-Conv")
    assert not bound and lamina.at(8, "Kimi-Conv")[1] > 1.9 * long


def test_the_range_is_not_called_a_reproduction() -> None:
    """Both ends are printed beside ours, which lie below; whatever assumes a worse vLLM has no published figure."""
    table = CELLS["lamina-throughput"]
    ends = {row: found for (row, _), found in table.items() if found.published is not None}
    assert set(ends) == {f"{which}, vLLM at 100% of the roofline" for which in ("least", "most")}
    assert all(
        found.ours is not None and found.published and found.ours < found.published for found in ends.values()
    )
    assert all(
        "no reproduction" in found.reason for (row, _), found in table.items() if "90%" in row or "60%" in row
    )


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
    many, few = (
        cell("lamina-network", f"{model}, queries first", "TBT saved at most (%)") for model in ("65B", "70B")
    )
    assert many.ours is not None and few.ours is not None
    assert many.ours > 3 * few.ours > 3
