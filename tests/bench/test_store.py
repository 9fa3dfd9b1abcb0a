"""The store's benchmark on blocks of a few kilobytes: rows, verified bytes, and peers that are found out."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from isthmus.bench import BenchError
from isthmus.bench.store import Ours, Plan, Row, as_json, run, table
from isthmus.bench.store_peers import (
    Blocks,
    copy_all,
    drop_cached,
    read_plain,
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
    plan = Plan((16 * KIB, 64 * KIB), 128 * KIB, 1, tmp_path)
    rows = run(plan, lines.append)
    assert [(row.operation, row.tier, row.size) for row in rows] == [
        (operation, tier, size * KIB)
        for size in (16, 64)
        for tier in ("dram", "ssd")
        for operation in ("put", "get")
    ]
    for row in rows:
        sides = {side for side, speed in row.speeds.items() if speed > 0}
        assert sides == {"isthmus", "batched", "memcpy" if row.tier == "dram" else "file"}
    assert len(lines) == 8 and lines[0].startswith("put 16 KiB, dram: isthmus ")
    assert not list(tmp_path.glob("isthmus-bench-*"))  # nothing is left on the disk
    assert json.loads(json.dumps(as_json(rows))) == as_json(rows)


def test_table_leaves_out_what_was_not_measured() -> None:
    console = Console(file=io.StringIO(), width=150, record=True)
    console.print(table([Row("get", "ssd", 1 << 20, {"isthmus": 1.25, "batched": 2.5, "file": 2.0})]))
    assert "1.25" in (text := console.export_text()) and "1 MiB" in text and "None" not in text


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
