"""One Ray cluster for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.machines import EAST, WEST, Machines, machines


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    """Two machines beside one that takes nothing."""
    with machines() as found:
        found.add(EAST, "east")
        found.add(WEST, "west", gpus=3)
        yield found
