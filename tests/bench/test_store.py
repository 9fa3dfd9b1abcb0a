"""The store's benchmark on blocks of a few kilobytes: rows, verified bytes, and peers that are found out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.bench import BenchError
from isthmus.bench.store import (
    Blocks,
    Ours,
    Plan,
    copy_all,
    drop_cached,
    read_plain,
    run,
    write_plain,
)
from isthmus.bench.transfer_peers import touched
from isthmus.core.errors import ConfigError

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


def test_every_row(tmp_path: Path) -> None:
    lines: list[str] = []

    @contextlib.contextmanager
    def others(blocks: Blocks) -> Iterator[dict[str, Ours]]:
        with contextlib.closing(Ours(blocks)) as other:
            yield {"other": other}

    found = run(Plan((16 * KIB, 64 * KIB), 128 * KIB, 1, tmp_path), lines.append, others)
    rows = json.loads(json.dumps(found.json))
    assert [(row["operation"], row["tier"], row["size"]) for row in rows] == [
        (operation, tier, size * KIB)
        for size in (16, 64)
        for tier in ("dram", "ssd")
        for operation in ("put", "get")
    ]
    for row in rows:
        sides = {side for side, speed in list(row.items())[3:] if speed > 0}
        assert sides == {"isthmus", "batched", *(("memcpy", "other") if row["tier"] == "dram" else ("file",))}
    assert len(lines) == 8 and lines[0].startswith("operation put, tier dram, size 16 KiB, isthmus ")
    assert not list(tmp_path.glob("isthmus-bench-*"))  # nothing is left on the disk
    first, _, third, *_ = found.tables[0].rows
    assert first[2] == "16 KiB" and first[-1] is None is not third[-1]


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


def test_puts_beyond_the_room_are_noticed(ours: Ours) -> None:
    ours.put_batched()
    with pytest.raises(BenchError, match="a put found no empty slot"):
        ours.put()


def test_plain_files(blocks: Blocks, tmp_path: Path) -> None:
    file = tmp_path / "plain"
    assert write_plain(file, blocks.sources) > 0
    drop_cached([file])
    assert read_plain([file], blocks.targets, 64 * KIB) > 0
    blocks.verify("file")
    with pytest.raises(BenchError, match="1 bytes shorter"):
        read_plain([file], blocks.targets, 64 * KIB + 1)
    assert copy_all(blocks.sources, blocks.targets) > 0


@pytest.mark.parametrize("plan", [Plan((100,)), Plan(total=KIB), Plan(folder=Path("/no/folder"))])
def test_plans_that_cannot_be_measured(plan: Plan) -> None:
    with pytest.raises(ConfigError):
        run(plan)
