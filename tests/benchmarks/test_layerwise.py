"""The layer-wise benchmark goes through DRAM, SSD and a paced source, and would notice a prefix that is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.benchmarks import layerwise
from isthmus.benchmarks.layerwise import Result, Round
from isthmus.benchmarks.models import make_random_model
from isthmus.cluster.cache import NodeCache
from isthmus.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, dtype="float32")
    return folder


def test_each_source_is_measured_alone_and_together(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    results = layerwise.run(
        folder, prefix=160, suffix=40, shares=(0.5, 2.0), disk=tmp_path, rounds=2, report=lines.append
    )
    assert [result.source for result in results] == [
        "DRAM", "SSD", "paced, load 0.5 of compute", "paced, load 2 of compute"
    ]  # fmt: skip
    assert lines[1:] == ["round 1 of 2", "round 2 of 2"]
    token_bytes = 3 * 2 * 2 * 16 * 4
    for result in results:
        assert result.load_bytes == 160 * token_bytes
        assert len(result.rounds) == 2
        assert all(min(each.load_s, each.compute_s, each.store_s) > 0 for each in result.rounds)
    rows = layerwise.as_json(results)
    assert [row["source"] for row in rows] == [result.source for result in results]
    assert set(rows[0]) == {
        "source", "load_bytes", "load_s", "compute_s", "store_s", "serial_s", "overlapped_s", "ratio", "bound",
        "rounds",
    }  # fmt: skip
    assert layerwise.table(results).row_count == 4


def test_a_prefix_that_is_not_loaded_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeCache, "_load_pinned", lambda *arguments: None)
    with pytest.raises(AssertionError, match="other logits"):
        layerwise.run(folder, prefix=160, suffix=40, shares=(), rounds=1)


@pytest.mark.parametrize(("prefix", "suffix"), [(0, 16), (24, 16), (32, 8), (8192, 16)])
def test_lengths_that_do_not_fit_are_refused(folder: Path, prefix: int, suffix: int) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        layerwise.run(folder, prefix=prefix, suffix=suffix)


def test_medians_ratio_and_bound() -> None:
    rounds = (Round(1.0, 4.0, 0.5, 4.2), Round(2.0, 4.0, 0.5, 4.4), Round(9.0, 4.0, 0.5, 9.9))
    result = Result("somewhere", 1000, 8, rounds)
    (row,) = layerwise.as_json([result])
    assert (row["load_s"], row["compute_s"], row["serial_s"], row["overlapped_s"]) == (2.0, 4.0, 6.5, 4.4)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["bound"] == pytest.approx(1 + 2 / 4 / 8)
