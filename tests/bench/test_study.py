"""The skeleton of studies: turns, medians, fits, other processes, and one form of what was found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from isthmus.bench import BenchError
from isthmus.bench.child import Child, Foreign
from isthmus.bench.profile import least_squares
from isthmus.bench.study import in_turns, medians, over, said, spread, table
from isthmus.bench.transfer_peers import _serve_sockets, digest, linked
from isthmus.core.errors import StartError


def test_sides_take_turns_and_the_warm_up_does_not_count() -> None:
    heard: list[str] = []

    def measure(side: str) -> float:
        heard.append(side)
        return len(heard)

    sides = {side: partial(measure, side) for side in "ab"}
    found = in_turns(sides, 3)
    assert heard == list("ab" * 4)
    assert found == {"a": [3, 5, 7], "b": [4, 6, 8]} and medians(found) == {"a": 5, "b": 6}
    assert in_turns(sides, 1, warm_up=False) == {"a": [9], "b": [10]}
    assert in_turns(sides, 9, budget_s=-1)["a"] == [13], "one round is measured at least"


def test_rows_become_a_table() -> None:
    rows = [{"side": "x", "a": 12345.6, "b": 1.0, "n": None}, {"side": "y", "a": 0.01234, "b": 2.0, "n": 7000}]
    columns = {"": "side", "first": "a", "n": "n"} | over("a", ["b"])
    shown = table("title", columns, rows)
    assert shown.rows == [["x", 12345.6, None, 12345.6], ["y", 0.01234, 7000, 0.00617]]
    assert [(column.name, column.left) for column in shown.columns] == [
        ("", True), ("first", False), ("n", False), ("/ b", False),
    ]  # fmt: skip
    assert said(rows[1], "s") == "side y, a 0.01234, b 2, n 7,000 s"
    assert str(spread([3.0, 1.0, 2.0])) == "2 (1 to 3)" and str(spread([5.0])) == "5"
    assert math.isclose(spread([4.0, 2.0]).median, 3)


def test_questions_are_answered_in_another_process(capfd: pytest.CaptureFixture[str]) -> None:
    child = Child(_serve_sockets, 4096, 1)
    with linked(child.hello):
        assert child.ask(100) == child.ask(100) != child.ask(200)
    child.close()
    with pytest.raises(StartError, match="ended without an answer"):
        Child(digest, 1)
    assert "TypeError" in capfd.readouterr().err


def test_a_script_in_another_python(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "print('a library says something')\n"
        "print('= \"hello\"', flush=True)\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    print('=', json.dumps({'error': 'no'} if asked == ['bad'] else asked), flush=True)\n"
    )
    peer = Foreign("python3", script)
    assert peer.hello == "hello" and peer.ask(1, "two") == [1, "two"]
    with pytest.raises(BenchError, match=r"^no$"):
        peer.ask("bad")
    peer.close()
    with pytest.raises(StartError, match="/no/python: cannot be run: No such file"):
        Foreign("/no/python", script)


def test_least_squares_solves_a_curved_problem() -> None:
    """Rosenbrock's valley in positive values."""

    def residuals(values: Sequence[float]) -> list[float]:
        x, y = values
        return [10 * (y - x * x), 1 - x]

    assert least_squares(residuals, (3.0, 0.2), ((1e-3, 10), (1e-3, 10)), max_iterations=300) == pytest.approx(
        [1.0, 1.0], rel=1e-4
    )


def test_least_squares_respects_bounds_and_useless_values() -> None:
    found = least_squares(lambda v: [math.log(v[0] / 5)], (1.0, 2.0), ((0.1, 3.0), (1.0, 4.0)))
    assert found == pytest.approx([3.0, 2.0])
