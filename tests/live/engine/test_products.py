from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.live.engine import products
from isthmus.live.engine.products import HEAD_ROWS, LEAST_WEIGHTS, ROWS, Products, described
from isthmus.live.engine.tiles import GROUP, Tiled, Weight, grouped, plain
from tests.served import LIMIT_S

from .support import randn

SHAPE = (1024, LEAST_WEIGHTS // 1024)


class Clock:
    """Each form takes as long as it says; nothing else takes any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int, int]] = []
        monkeypatch.setattr(products.time, "perf_counter", lambda: self.now)

    def form(self, name: str, fixed_s: float, row_s: float) -> Any:
        def product(x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None) -> Tensor:
            self.now += fixed_s + row_s * len(x_TK)
            tensor = weight_NK.tiles if isinstance(weight_NK, Tiled) else weight_NK
            self.calls.append((name, len(x_TK), tensor.data_ptr()))
            return x_TK

        return product


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def made(clock: Clock, path: Path, machine: str = "here") -> Products:
    """Of two forms the first wins up to eight rows; what was not timed is multiplied by a third."""
    forms = {"few": clock.form("few", 1e-5, 1e-5), "many": clock.form("many", 9e-5, 1e-6)}
    quantised = {"whole": clock.form("whole", 3e-5, 1e-6)}
    kinds = {torch.float32: forms, "4 bits": quantised}
    others = {"4 bits": (torch.float32,)}
    return Products(kinds, others, ("many",), clock.form("untimed", 0, 0), path, machine)


def used(clock: Clock, found: Products, rows: int, weight: Weight) -> str:
    clock.calls.clear()
    found(torch.zeros(rows, weight.shape[1]), weight, None)
    ((name, _, _),) = clock.calls
    return name


def test_each_number_of_rows_gets_the_form_that_is_the_fastest_there(clock: Clock, tmp_path: Path) -> None:
    found, weight = made(clock, tmp_path / "products.json"), randn(*SHAPE)
    assert used(clock, found, 1, weight) == "untimed"
    found.prepare([weight], None)
    names = {rows: used(clock, found, rows, weight) for rows in (1, 5, 8, 9, 16, 17, 256, 999)}
    assert names == {1: "few", 5: "few", 8: "few", 9: "many", 16: "many", 17: "many", 256: "many", 999: "many"}


def test_the_head_takes_no_form_that_rounds_sums_and_is_timed_with_as_many_rows_as_are_sampled(
    clock: Clock, tmp_path: Path
) -> None:
    found, head, other = made(clock, tmp_path / "products.json"), randn(*SHAPE), randn(SHAPE[0] + 1, SHAPE[1])
    found.prepare([], head)
    assert max(rows for _, rows, _ in clock.calls) == HEAD_ROWS
    found.prepare([other], None)
    assert [used(clock, found, 256, weight) for weight in (head, other)] == ["few", "many"]


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_quantised_weights_stay_so_where_that_is_faster(clock: Clock, tmp_path: Path, slower: float) -> None:
    """The mean of the ratios decides: in the first case what is quantised loses with one or two rows."""
    path, weight = tmp_path / "products.json", quantised()
    for _ in range(2):  # the second time from what was kept
        found = made(clock, path)
        found._forms["4 bits"]["whole"] = clock.form("whole", slower * 3e-5, slower * 1e-6)
        layers: list[Weight] = [weight]
        assert found.prepare(layers, None) is None
        [held] = layers
        if slower == 1:
            assert held is weight
            assert [used(clock, found, rows, held) for rows in (1, 256)] == ["whole", "whole"]
        else:
            assert torch.equal(held, plain(weight, torch.float32))
            assert [used(clock, found, rows, held) for rows in (1, 256)] == ["few", "many"]
        names = found.names[f"{SHAPE[0]}x{SHAPE[1]} 4 bits"]
        assert names == ["whole"] * 8 if slower == 1 else ["few"] * 4 + ["many"] * 4


def quantised() -> Tiled:
    rows, groups = SHAPE[0], SHAPE[1] // GROUP
    quads = torch.randint(256, (rows, groups, 16), dtype=torch.uint8)
    return grouped(quads, torch.rand(2, rows, groups).half(), 4)


def test_processes_that_start_together_time_once(clock: Clock, tmp_path: Path) -> None:
    path, weight = tmp_path / "products.json", randn(*SHAPE)
    with ThreadPoolExecutor(1) as pool:
        with products._alone(path):
            waiting = pool.submit(made(clock, path).prepare, [weight], None)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
            assert clock.calls == []
            made(clock, tmp_path / "other.json").prepare([weight], None)
            path.write_bytes((tmp_path / "other.json").read_bytes())
            clock.calls.clear()
        waiting.result(LIMIT_S)
    assert clock.calls == []


def test_small_weights_and_other_types_are_not_timed(clock: Clock, tmp_path: Path) -> None:
    found, path = made(clock, tmp_path / "products.json"), tmp_path / "products.json"
    small, other = randn(SHAPE[0] - 1, SHAPE[1]), randn(*SHAPE).half()
    found.prepare([small, other], None)
    assert clock.calls == [] and not path.exists()
    assert used(clock, found, 1, small) == "untimed"


def test_layers_are_timed_one_after_the_other_so_that_no_cache_flatters(clock: Clock, tmp_path: Path) -> None:
    weights = [randn(*SHAPE) for _ in range(4)]
    made(clock, tmp_path / "products.json").prepare(weights, None)
    order = [at for name, rows, at in clock.calls if rows == ROWS[0]]
    assert {weight.data_ptr() for weight in weights} == set(order)
    assert all(one != other for one, other in pairwise(order))


def test_what_was_timed_once_is_kept_for_this_machine(clock: Clock, tmp_path: Path) -> None:
    path, weight = tmp_path / "a" / "products.json", randn(*SHAPE)
    made(clock, path).prepare([weight], None)
    clock.calls.clear()
    again = made(clock, path)
    again.prepare([weight], None)
    assert clock.calls == [] and used(clock, again, 1, weight) == "few"
    assert again.names == {f"{SHAPE[0]}x{SHAPE[1]} float32": ["few"] * 4 + ["many"] * 4}
    elsewhere = made(clock, path, machine="elsewhere")
    elsewhere.prepare([weight], None)
    assert len(json.loads(path.read_text())) == 2, "the other machine's choices went"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"x": 1}', "{}", '{"MACHINE": {"NAME": ["gone"]}}', '{"MACHINE": {"NAME": ["few"]}}']
)
def test_a_file_that_says_nothing_of_use_is_written_anew(clock: Clock, tmp_path: Path, content: str) -> None:
    path, weight = tmp_path / "products.json", randn(*SHAPE)
    found = made(clock, path)
    name = f"{SHAPE[0]}x{SHAPE[1]} float32"
    path.write_text(content.replace("MACHINE", found._machine).replace("NAME", name))
    found.prepare([weight], None)
    assert json.loads(path.read_text())[found._machine] == {name: ["few"] * 4 + ["many"] * 4}
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "products.lock"}


def test_where_nothing_can_be_kept_it_is_timed_with_one_warning(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found, weight = made(clock, tmp_path / "file" / "products.json"), randn(*SHAPE)
    found.prepare([weight], None)
    assert used(clock, found, 256, weight) == "many"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_choice_is_told_in_words() -> None:
    assert (
        described("9x9 float32", ["a", "a", "b", "b", "b", "b", "c", "c"])
        == "9x9 float32: a to 2, b to 32, c beyond"
    )
    assert described("9x9 float32", ["a"] * 8) == "9x9 float32: a"
