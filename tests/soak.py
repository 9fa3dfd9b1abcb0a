"""Matrices of which a part runs every time, and all of it in `make soak`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def matrix(names: str, *axes: Iterable[Any], strength: int = 1) -> pytest.MarkDecorator:
    """Every row of the axes' product. Run every time are as many as bring each value of each axis; with a `strength`
    of 2, each pair of values."""
    values = [list(axis) for axis in axes]
    kept = set(_covering(values, strength))
    rows = [
        pytest.param(*row, marks=() if at in kept else pytest.mark.soak)
        for at, row in zip(product(*map(range, map(len, values))), product(*values), strict=True)
    ]
    return pytest.mark.parametrize(names.replace(" ", "").split(","), rows)


def _covering(axes: Sequence[Sequence[Any]], strength: int) -> list[tuple[int, ...]]:
    """Rows by their indices: one by one the row that brings most that is new; of those, one whose values are rare so
    far, and the first of these."""
    rows = list(product(*(range(len(axis)) for axis in axes)))
    groups = list(combinations(range(len(axes)), strength))

    def brings(row: tuple[int, ...]) -> set[tuple[Any, ...]]:
        return {(group, *(row[axis] for axis in group)) for group in groups}

    missing = set().union(*map(brings, rows))
    kept, uses = list[tuple[int, ...]](), Counter[tuple[int, int]]()
    while missing:
        best = max(rows, key=lambda row: (len(brings(row) & missing), -sum(uses[at] for at in enumerate(row))))
        kept.append(best)
        uses.update(enumerate(best))
        missing -= brings(best)
    return kept
