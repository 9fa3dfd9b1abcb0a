"""The load of nodes that lend: arrivals that are the same for all, what counts as in time, and a small live turn."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from benchmarks import lending
from benchmarks.lending import Answer, Plan, Turn, arrivals, ratios, table, total, within
from isthmus.bench import BenchError

PLAN = Plan(policies=("none", "other"), loads=("mixed",), rounds=2, ttft_s=1.0, tbt_s=0.1)


def test_arrivals_are_the_same_for_all() -> None:
    plan = Plan(seconds=200, long_share=0.1)
    found = arrivals(plan, "mixed", 0)
    assert found == arrivals(replace(plan, policies=("none",)), "mixed", 0) != arrivals(plan, "mixed", 1)
    assert 0.8 < len(found) / (plan.rate * plan.seconds) < 1.2
    assert 0.07 < sum(each.is_long for each in found) / len(found) < 0.13
    assert max(each.prompt + each.output for each in found) <= 0.9 * plan.tokens, "a node alone takes them all"
    assert all(0 < each.at_s < plan.seconds for each in found)
    assert {(each.prompt, each.output) for each in arrivals(plan, "equal", 0)} == {(128, 64)}


def test_late_slow_and_failed_do_not_count() -> None:
    answers = [
        Answer(False, 1.0, 0.1),
        Answer(True, 1.1, 0.1),
        Answer(False, 1.0, 0.2),
        Answer(True, error="no"),
    ]
    assert within(PLAN, answers) == 1


def test_policies_are_set_against_the_first_round_by_round() -> None:
    good, late = Answer(False, 0.5, 0.05), Answer(True, 5.0, 0.05)
    turns = [
        Turn("mixed", "none", [good, late], 2.0, 20, 0, 1),
        Turn("mixed", "other", [good, good], 2.0, 20, 9, 0),
        Turn("mixed", "none", [good, good], 2.0, 20, 0, 0),
        Turn("mixed", "other", [good, good], 2.0, 20, 9, 0),
    ]
    assert ratios(PLAN, turns, "mixed", "other") == [2.0, 1.0]
    console = Console(width=220, record=True)
    console.print(table(PLAN, turns))
    text = console.export_text()
    assert "1.50" in text and "0 of 1" in text


def test_totals_are_those_of_all_nodes() -> None:
    metrics = 'isthmus_a_total{node="x"} 2.0\nisthmus_a_total{node="y"} 3\nisthmus_ab_total{node="x"} 9\n'
    assert total(metrics, "a_total") == 5


def test_a_load_that_is_not_there() -> None:
    with pytest.raises(BenchError, match="no load other: known are mixed, equal"):
        lending.run(Plan(loads=("other",)))


def test_a_turn_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live cluster, for a second."""
    monkeypatch.setattr(lending, "CURVE", lending.CURVE | {"decode_fixed_s": 0.001})
    plan = Plan(("none",), ("equal",), nodes=2, rate=8, seconds=1, rounds=1, ttft_s=inf, tbt_s=inf)
    said: list[str] = []
    [turn] = lending.run(plan, said.append)
    count = len(arrivals(plan, "equal", 0))
    assert [each.error for each in turn.answers] == [""] * count and turn.tokens == 64 * count
    assert said == [f"equal, none: {count} of {count} within their limits"]


def test_the_configuration_names_the_policy(tmp_path: Path) -> None:
    assert "policy: isthmus" in lending._config(Plan(), tmp_path, "isthmus").read_text()
    assert "policy" not in lending._config(Plan(), tmp_path, "none").read_text()
