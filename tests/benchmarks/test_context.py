"""The longest request of a cluster of small nodes: what it says, takes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import context
from benchmarks.context import Plan, Row
from benchmarks.models import make_random_model
from isthmus.bench import BenchError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context") / "model"
    make_random_model(folder, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, dtype="float32")
    return folder


def test_two_nodes_take_more_than_one(model: Path) -> None:
    plan, said = Plan(model, tokens=128, nodes=(2,), answer=8), list[str]()
    [row] = context.run(plan, said.append)
    assert (row.longest, row.equal, row.answer) == (
        128 + 96,
        8,
        8,
    )  # of the first a quarter is for what is on its way
    assert row.asked > 0 and "maximum context length is 224 tokens" in row.refusal
    assert said == ["2 nodes: 224 tokens, 8 of 8 tokens as by transformers"]


def test_rows_are_set_against_the_first() -> None:
    rows = [Row(1, 512, "no", 0.1, 0, 16, 16), Row(4, 1920, "no", 0.7, 400, 16, 15)]
    console = Console(width=200, record=True)
    console.print(context.table(Plan(Path("tiny")), rows))
    text = console.export_text()
    assert "3.75" in text and "15 of 16" in text


def test_what_cannot_be_asked(model: Path) -> None:
    with pytest.raises(BenchError, match="memory for 64 tokens"):
        context.run(Plan(model, tokens=48))
    with pytest.raises(BenchError, match="there is text for 3 tokens, not for 4"):
        context._Cluster(Plan(model), Path(), 1, [1, 2, 3])._prompt(4)
