"""The store's benchmark on blocks of a few kilobytes: rows, verified bytes, and peers that are found out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.bench import BenchError
from isthmus.bench.store import (
    Blocks,
    Ours,
)
from isthmus.bench.transfer_peers import touched

KIB = 1024


@pytest.fixture
def blocks() -> Blocks:
    source, target = touched(64 * KIB), touched(64 * KIB)
    source[:] = bytes(range(256)) * 256
    return Blocks(source, target, 16 * KIB)


@pytest.fixture(params=["dram", "ssd"])
def ours(request: pytest.FixtureRequest, blocks: Blocks, tmp_path: Path) -> Iterator[Ours]:
    with contextlib.closing(Ours(blocks, tmp_path if request.param == "ssd" else None)) as found:
        yield found


def test_what_our_store_gives_back_is_compared(ours: Ours, blocks: Blocks) -> None:
    ours.put()
    blocks.blank()
    with pytest.raises(BenchError, match="block 0 of 16384 bytes came back damaged"):
        ours.verify()
    assert ours.get() > 0
    ours.verify()
    ours.clear()
    with pytest.raises(BenchError, match="a get found nothing"):
        ours.get()
    with pytest.raises(BenchError, match="4 of 4 blocks: get failed"):
        ours.get_batched()
