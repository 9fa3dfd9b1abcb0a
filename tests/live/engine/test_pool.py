"""Loops of the kernels on several threads: the same numbers, whoever takes which task and however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.tiles import tiled

from .support import largest_error, randn

SHAPES = [(48, 640), (515, 96), (1024, 128), (2100, 64)]
"""Above and below what is worth a second thread."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def products(kernels: Kernels, seed: int, threads: int, repeats: int) -> float:
    """The largest error of products of all shapes, one after the other."""
    torch.set_num_threads(threads)
    worst = 0.0
    for at in range(repeats):
        size, width = SHAPES[(seed + at) % len(SHAPES)]
        x, weight = randn(1 + at % 9, width, seed=seed), randn(size, width, seed=at)
        worst = max(worst, largest_error(kernels.linear(x, weight, None), x.double() @ weight.double().T))
        narrow = weight.bfloat16()
        found = kernels.linear(x.bfloat16().float(), tiled(narrow), None)
        worst = max(worst, largest_error(found, x.bfloat16().double() @ narrow.double().T))
    return worst


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_number_of_threads(native_kernels: Kernels, count: int) -> None:
    """More than there are cores, and more or fewer than before."""
    assert products(native_kernels, 0, count, 60) < 2e-4


@pytest.mark.usefixtures("threads")
def test_callers_that_meet(native_kernels: Kernels) -> None:
    """One has the helpers, the others go on alone."""
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda seed: products(native_kernels, seed, 3, 80), range(8)))
    assert max(found) < 2e-4


@pytest.mark.usefixtures("threads")
def test_tasks_of_many_loops_never_mix(native_kernels: Kernels) -> None:
    """Loops of a few microseconds, one after the other, so that a helper often comes when the next one has begun."""
    torch.set_num_threads(4)
    weights = [randn(256, 160, seed=at) for at in range(8)]
    x: Tensor = randn(1, 160, seed=9)
    expected = [native_kernels.linear(x, weight, None) for weight in weights]
    for at in range(4000):
        assert torch.equal(native_kernels.linear(x, weights[at % 8], None), expected[at % 8])
