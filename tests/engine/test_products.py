from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine import products
from isthmus.engine.products import LEAST_WEIGHTS, ROWS, Products, described, matrices

from .support import randn

SHAPE = (1024, LEAST_WEIGHTS // 1024)


class Clock:
    """Each form takes as long as it says; nothing else takes any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int, int]] = []
        monkeypatch.setattr(products.time, "perf_counter", lambda: self.now)

    def form(self, name: str, fixed_s: float, row_s: float) -> Any:
        def product(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
            self.now += fixed_s + row_s * len(x_TK)
            self.calls.append((name, len(x_TK), weight_NK.data_ptr()))
            return x_TK @ weight_NK.float().T

        return product


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def made(clock: Clock, path: Path, machine: str = "here") -> Products:
    """Of two forms the first wins up to eight rows; what was not timed is multiplied by a third."""
    forms = {"few": clock.form("few", 1e-5, 1e-5), "many": clock.form("many", 9e-5, 1e-6)}
    return Products({torch.float32: forms}, clock.form("untimed", 0, 0), path, machine)


def used(clock: Clock, found: Products, rows: int, weight: Tensor) -> str:
    clock.calls.clear()
    found(torch.zeros(rows, weight.shape[1]), weight, None)
    ((name, _, _),) = clock.calls
    return name


def test_each_number_of_rows_gets_the_form_that_is_the_fastest_there(clock: Clock, tmp_path: Path) -> None:
    found, weight = made(clock, tmp_path / "products.json"), randn(*SHAPE)
    assert used(clock, found, 1, weight) == "untimed"
    found.prepare([weight])
    names = {rows: used(clock, found, rows, weight) for rows in (1, 5, 8, 9, 16, 17, 256, 999)}
    assert names == {1: "few", 5: "few", 8: "few", 9: "many", 16: "many", 17: "many", 256: "many", 999: "many"}


def test_small_weights_and_other_types_are_not_timed(clock: Clock, tmp_path: Path) -> None:
    found, path = made(clock, tmp_path / "products.json"), tmp_path / "products.json"
    small, other = randn(SHAPE[0] - 1, SHAPE[1]), randn(*SHAPE).half()
    found.prepare([small, other])
    assert clock.calls == [] and not path.exists()
    assert used(clock, found, 1, small) == "untimed"


def test_layers_are_timed_one_after_the_other_so_that_no_cache_flatters(clock: Clock, tmp_path: Path) -> None:
    weights = [randn(*SHAPE) for _ in range(4)]
    made(clock, tmp_path / "products.json").prepare(weights)
    order = [at for name, rows, at in clock.calls if rows == ROWS[0]]
    assert {weight.data_ptr() for weight in weights} == set(order)
    assert all(one != other for one, other in pairwise(order))


def test_what_was_timed_once_is_kept_for_this_machine(clock: Clock, tmp_path: Path) -> None:
    path, weight = tmp_path / "a" / "products.json", randn(*SHAPE)
    made(clock, path).prepare([weight])
    clock.calls.clear()
    again = made(clock, path)
    again.prepare([weight])
    assert clock.calls == [] and used(clock, again, 1, weight) == "few"
    assert again.names == {f"{SHAPE[0]}x{SHAPE[1]} float32": ["few"] * 4 + ["many"] * 4}
    elsewhere = made(clock, path, machine="elsewhere")
    elsewhere.prepare([weight])
    assert len(json.loads(path.read_text())) == 2, "the other machine's choices went"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"x": 1}', "{}", '{"MACHINE": {"NAME": ["gone"]}}', '{"MACHINE": {"NAME": ["few"]}}']
)
def test_a_file_that_says_nothing_of_use_is_written_anew(clock: Clock, tmp_path: Path, content: str) -> None:
    path, weight = tmp_path / "products.json", randn(*SHAPE)
    found = made(clock, path)
    name = f"{SHAPE[0]}x{SHAPE[1]} float32"
    path.write_text(content.replace("MACHINE", found._machine).replace("NAME", name))
    found.prepare([weight])
    assert json.loads(path.read_text())[found._machine] == {name: ["few"] * 4 + ["many"] * 4}
    assert list(tmp_path.iterdir()) == [path]


def test_where_nothing_can_be_kept_it_is_timed_with_one_warning(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found, weight = made(clock, tmp_path / "file" / "products.json"), randn(*SHAPE)
    found.prepare([weight])
    assert used(clock, found, 256, weight) == "many"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_choice_is_told_in_words() -> None:
    assert (
        described("9x9 float32", ["a", "a", "b", "b", "b", "b", "c", "c"])
        == "9x9 float32: a to 2, b to 32, c beyond"
    )
    assert described("9x9 float32", ["a"] * 8) == "9x9 float32: a"


def test_the_matrices_of_nested_weights() -> None:
    @dataclass(frozen=True)
    class Inner:
        weight: Tensor
        bias: Tensor | None = None

    @dataclass(frozen=True)
    class Outer:
        layers: tuple[Inner, ...]
        norm: Tensor
        name: str = "x"

    one, other = torch.zeros(2, 3), torch.zeros(4, 5)
    found = list(matrices(Outer((Inner(one), Inner(other, torch.zeros(4))), torch.zeros(3))))
    assert [each is expected for each, expected in zip(found, (one, other), strict=True)] == [True, True]
