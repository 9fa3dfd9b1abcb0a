"""`python -m benchmarks` beside peers: transformers, and a Python without Mooncake."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.mooncake import process
from isthmus.bench import BenchError, engine
from tests.benchmarks.conftest import Study, program


def test_the_engine_beside_transformers(tiny: Path, monkeypatch: pytest.MonkeyPatch, study: Study) -> None:
    cases = [engine.Case("prefill", (40,)), engine.Case("decode", (3, 40), 4)]
    monkeypatch.setattr(engine, "cases", lambda max_length: cases)
    rows, shown = study("engine", "--model", tiny, "--rounds", 1)
    assert [row["case"] for row in rows] == ["prefill", "decode"]
    assert all(min(row["isthmus"], row["transformers"]) > 0 for row in rows) and "/ transformers" in shown


def test_a_python_without_mooncake(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No module named 'mooncake'"):
        process(program(tmp_path / "python", "-S"), "transfer", "4096")
