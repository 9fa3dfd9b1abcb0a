"""The benchmark of batches that take turns: a step is never quicker than who it asks."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from benchmarks import turns
from benchmarks.models import make_random_model
from isthmus.live.engine.interface import Asking


def test_steps_wait_for_a_holder_that_takes_its_time(tmp_path: Path) -> None:
    make_random_model(tmp_path, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, dtype="float32")
    plan = turns.Plan(rows=4, context=32, attention_ms=(0.0, 2.0), batches=(1, 2), rounds=1)
    rows = turns.run(tmp_path, plan)
    cases = [(row.attention_ms, row.asks, row.batches) for row in rows]
    assert cases == list(product((0.0, 2.0), ("a process", "nobody"), (1, 2)))
    for row in rows[4:]:
        assert row.step_ms > 3 * 4 * 2.0 and row.predicted_ms > 3 * 4 * 2.0
    assert len(turns.as_json(rows)) == turns.table(rows).row_count == 8


def test_a_holder_attends_to_one_question_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    slept: list[float] = []

    class Inner:
        def ask(self, layer: int, asking: Asking, q: memoryview) -> None: ...

        def answer(self, layer: int, asking: Asking) -> memoryview:
            return memoryview(b"")

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(turns.time, "sleep", slept.append)
    late = turns.Late(Inner(), 0.5, 0.25)
    askings = [Asking("h", ((at, 1, 9, 9, 0),) * count) for at, count in ((0, 2), (1, 1))]
    for asking in askings:
        late.ask(0, asking, memoryview(b""))
    for asking in askings:
        late.answer(0, asking)
    assert slept == pytest.approx([2 * 0.5 + 0.25, 3 * 0.5 + 0.25])
    now_s = 20.0
    late.ask(0, askings[1], memoryview(b""))
    now_s = 21.0
    late.answer(0, askings[1])
    assert len(slept) == 2
