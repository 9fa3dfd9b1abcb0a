"""What makes a run of the tests the same every time, and the tool that tries whether it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.pace import PACE, paced
from tests.scratch import ROOT
from tests.steady import Run, table

DRAWS = """
import os

from hypothesis import given, settings
from hypothesis import strategies as st

@settings(max_examples=300)
@given(st.integers(), st.text())
def test_draws(number, text):
    with open(os.environ["SAID"], "a") as file:
        print(number, ascii(text), file=file)
"""


def test_examples_do_not_depend_on_what_was_loaded_before(tmp_path: Path) -> None:
    drawn = []
    for name, others in (
        ("alone", []),
        ("after", ["-p", "isthmus.config", "-p", "isthmus.lab.sim.simulation"]),
    ):
        test, said = tmp_path / "test_draws.py", tmp_path / f"{name}.txt"
        test.write_text(DRAWS)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *others, str(test)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"SAID": str(said)})
        drawn.append(said.read_text())
    assert drawn[0] == drawn[1]


def shuffled(seed: int | None, items: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    config: Any = SimpleNamespace(getoption=lambda name: seed)
    found: list[Any] = [SimpleNamespace(location=item) for item in items]
    pytest_collection_modifyitems(config, found)
    return [each.location for each in found]


def test_another_order_keeps_modules_together() -> None:
    items = [(module, number) for module in "abcdefgh" for number in range(9)]
    assert shuffled(None, items) == items
    orders = [shuffled(seed, items) for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]
    for order in orders:
        assert sorted(order) == items and order != items
        modules = [module for module, _ in order]
        assert modules == [module for module in dict.fromkeys(modules) for _ in range(9)]


def test_the_pace_is_that_of_emulated_engines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {"kv_token_bytes": 8, "decode_fixed_s": 0.5}
    emulated, real = {"kind": "emulated", "cost": cost}, {"cost": cost}
    monkeypatch.delenv(PACE, raising=False)
    assert paced(emulated) == emulated
    monkeypatch.setenv(PACE, "4")
    assert paced(emulated) == emulated | {"cost": cost | {"decode_fixed_s": 2.0}}
    assert paced(real) == real and paced({"kind": "emulated", "cost": "file.yaml"})["cost"] == "file.yaml"


def test_threads_are_late_where_that_is_asked_for() -> None:
    found = []
    for path in (f"{ROOT}/tests/late", ""):
        command = [sys.executable, "-c", "import threading; print(threading.Thread.run.__name__)"]
        env = os.environ | {"PYTHONPATH": path, "ISTHMUS_TESTS_LATE": "1"}
        found.append(
            subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()
        )
    assert found == ["run_late", "run"]


def test_the_table_says_which_test_failed_under_what() -> None:
    runs = [
        Run("quiet", 1, 0, 1.0, (), "9 passed"),
        Run("nice", 1, 1, 1.0, ("a.py::b", "a.py::c"), "2 failed"),
        Run("hash", 2, 1, 1.0, ("a.py::b",), "1 failed"),
        Run("hash", 3, 1, 1.0, (), "killed"),
    ]
    assert table(runs).splitlines() == [
        "1 of 4 runs green", "a.py::b: nice 1, hash 2", "a.py::c: nice 1", "(no summary): hash 3"
    ]  # fmt: skip
