"""The layer-wise benchmark would notice a prefix that is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import layerwise
from benchmarks.layerwise import Result, Round
from benchmarks.models import make_random_model
from isthmus.live.kv.cache import EngineCache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model(folder, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, dtype="float32")
    return folder


def test_a_prefix_that_is_not_loaded_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCache, "_load_pinned", lambda *arguments: None)
    with pytest.raises(AssertionError, match="other logits"):
        layerwise.run(folder, prefix=160, suffix=40, shares=(), rounds=1)


def test_medians_ratio_and_bound() -> None:
    rounds = (Round(1.0, 4.0, 0.5, 4.2), Round(2.0, 4.0, 0.5, 4.4), Round(9.0, 4.0, 0.5, 9.9))
    result = Result("somewhere", 1000, 8, rounds)
    (row,) = layerwise.as_json([result])
    assert (row["load_s"], row["compute_s"], row["serial_s"], row["overlapped_s"]) == (2.0, 4.0, 6.5, 4.4)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["bound"] == pytest.approx(1 + 2 / 4 / 8)
