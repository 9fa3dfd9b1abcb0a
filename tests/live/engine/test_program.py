"""The engine runs the slices that the converter made: in their order, and with what they carry alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus.core.models.graph import ATTEND, Graph, Operator
from isthmus.live.engine.mixers import Pass
from isthmus.live.engine.program import Program, through


class Watched:
    """Operators of a small graph that give new tensors, and who of these is alive when one of them runs."""

    index = 0

    def __init__(self) -> None:
        self.given: dict[str, weakref.ref[Tensor]] = {}
        self.alive: dict[str, set[str]] = {}

    def operator(self, kind: str, *gives: str) -> Callable[..., Any]:
        def compute(run: Pass, *values: Tensor) -> Any:
            del values
            return self.found(kind, *gives)

        return compute

    def found(self, kind: str, *gives: str) -> Any:
        gc.collect()
        self.alive[kind] = {name for name, each in self.given.items() if each() is not None}
        values = [torch.zeros(1) for _ in gives]
        self.given |= {name: weakref.ref(each) for name, each in zip(gives, values, strict=True)}
        return values[0] if len(values) == 1 else tuple(values)

    def attend(self, q: Tensor, kv: Tensor, run: Pass, asked: None) -> tuple[Tensor, None]:
        return self.found(ATTEND, "sums"), None


class Unfollowed:
    """A pass of which nobody wants to hear."""

    elsewhere = thinning = None

    def leave(self, layer: int) -> None: ...


def test_values_go_when_nobody_takes_them_any_more() -> None:
    operators = (
        Operator("norm", 0, ("x",), ("kept", "normed")),
        Operator("project", 0, ("normed",), ("q", "kv")),
        Operator(ATTEND, 0, ("q", "kv"), ("sums",)),
        Operator("output", 0, ("sums",), ("mixed",)),
        Operator("mlp", 0, ("kept", "mixed"), ("after", "delta")),
    )
    names = ("x", *(name for each in operators for name in each.gives))
    graph, watched = Graph(operators, tuple([(name, 1) for name in names]), ("after", "delta")), Watched()
    computes: dict[tuple[int, str], Any] = {
        (0, each.kind): watched.operator(each.kind, *each.gives) for each in operators
    }
    computes[0, ATTEND] = watched
    through(Program(graph, computes).passing(torch.zeros(1), Unfollowed()))  # type: ignore[arg-type]
    assert watched.alive["project"] <= {"kept", "normed"}
    assert watched.alive[ATTEND] == {"kept", "q", "kv"}
    assert watched.alive["output"] <= {"kept", "sums"}
    assert watched.alive["mlp"] <= {"kept", "mixed"}
