"""A model's layers as the engine runs them: slices (`isthmus.core.models.graph`) of operators that have their
weights, with an attention between each two. A pass may stop at each of these, for another batch to run meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from isthmus.core.models.graph import INPUT, Graph, Slice, slices_of
from isthmus.live.engine.mixers import AttendingMixer, Pass

Residual = tuple[Tensor, Tensor]
"""(x [T, N], delta [T, N]): their sum is what the next layer takes. The norm that comes first there adds them up."""

Passing = Generator[None, None, Residual]
"""A batch on its way through the layers. Where KV lies elsewhere it stops at each attention, when all who have some
were asked and what is here is summed."""

Compute = Callable[..., Any]
"""Takes the pass and an operator's one or two values, gives its one, or its two as a tuple."""

Computes = Mapping[tuple[int, str], Any]


class _Step(NamedTuple):
    """`two`, `also`: of operators that take or give a second value. `last`: values that nobody takes after it."""

    compute: Compute
    one: str
    two: str | None
    last: tuple[str, ...]
    gives: str
    also: str | None


class _Slice(NamedTuple):
    """`dropped`: what is there at its end beside what is carried."""

    first: Sequence[_Step]
    rest: Sequence[_Step]
    whole: Sequence[_Step]
    mixer: AttendingMixer
    queries: str
    kv: str
    dropped: tuple[str, ...]
    gives: str


class Program:
    """`computes`: of every operator, by layer and kind; of an attention, its mixer instead."""

    def __init__(self, graph: Graph, computes: Computes) -> None:
        *slices, last = slices_of(graph)
        self._slices, there = list[_Slice](), {INPUT}
        for each in slices:
            self._slices.append(_slice(each, computes, there))
            there = {*each.carried, self._slices[-1].gives}
        self._last, self._gives = _steps(last, computes), graph.gives

    @property
    def num_slices(self) -> int:
        return len(self._slices) + 1

    def passing(self, x_TN: Tensor, run: Pass) -> Passing:
        """Writes the new KV of all layers. Changes `x_TN`."""
        values, asks = {INPUT: x_TN}, run.elsewhere is not None
        for first, rest, whole, mixer, queries, kv, dropped, gives in self._slices:
            asked = None
            if asks:
                _compute(first, values, run)
                asked = mixer.ask(values[queries], run)
                _compute(rest, values, run)
            else:
                _compute(whole, values, run)
            run.leave(mixer.index)
            if run.thinning is not None:
                values, run = run.thinning.thin(mixer.index, values, queries, kv, run)
            sums = mixer.attend(values[queries], values[kv], run, asked)
            for name in dropped:
                del values[name]
            if asks:
                yield
            values[gives] = sums[0] if asked is None else mixer.add(sums, asked)
            del sums, asked  # which may be large
        _compute(self._last, values, run)
        x, delta = [values[name] for name in self._gives]
        return x, delta


def through(passing: Passing) -> Residual:
    """To the end, without a stop."""
    while (residual := onward(passing)) is None:
        pass
    return residual


def onward(passing: Passing) -> Residual | None:
    """Up to the next attention; None unless that was all."""
    try:
        next(passing)
    except StopIteration as end:
        found: Residual = end.value
        return found
    return None


def _compute(steps: Sequence[_Step], values: dict[str, Tensor], run: Pass) -> None:
    """A decode step has some hundred of these: what is written out here takes half as long as loops."""
    for compute, one, two, last, gives, also in steps:
        found = compute(run, values[one]) if two is None else compute(run, values[one], values[two])
        for name in last:
            del values[name]
        if also is None:
            values[gives] = found
        else:
            values[gives], values[also] = found


def _slice(piece: Slice, computes: Computes, there: Set[str]) -> _Slice:
    """`there`: values before it."""
    attention = piece.attention
    assert attention is not None, "only the last slice has none"
    steps, (queries, kv), (gives,) = _steps(piece, computes), attention.takes, attention.gives
    given = there | {value for each in (*piece.first, *piece.rest) for value in each.gives}
    left = given - {value for step in steps for value in step.last} - set(piece.carried)
    mixer, split = computes[attention.layer, attention.kind], len(piece.first)
    return _Slice(steps[:split], steps[split:], steps, mixer, queries, kv, tuple(sorted(left)), gives)


def _steps(piece: Slice, computes: Computes) -> list[_Step]:
    """Values go as soon as nobody takes them any more: those of a long prompt are large."""
    kept = {*piece.carried, *(piece.attention.takes if piece.attention else ())}
    found = []
    for operator in (*piece.first, *piece.rest)[::-1]:
        last = tuple(dict.fromkeys([name for name in operator.takes if name not in kept]))
        kept.update(last)
        compute = computes[operator.layer, operator.kind]
        found.append(_Step(compute, *_two(operator.takes), last, *_two(operator.gives)))
    return found[::-1]


def _two(values: tuple[str, ...]) -> tuple[str, str | None]:
    assert 1 <= len(values) <= 2, "an operator takes one or two values, and gives as many"
    return values[0], values[1] if len(values) == 2 else None
