"""The store's benchmark on blocks of a few kilobytes: rows, verified bytes, and peers that are found out."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from isthmus.benchmarks.serve import BenchError
from isthmus.benchmarks.store import Ours, Plan, Row, as_json, run, table
from isthmus.benchmarks.store_peers import (
    Blocks,
    Redis,
    copy_all,
    drop_cached,
    find_redis,
    read_plain,
    write_plain,
)
from isthmus.benchmarks.transfer_peers import touched
from isthmus.errors import ConfigError, StartError

KIB = 1024

# A server that speaks as much of the protocol as the benchmark does.
FAKE_REDIS = """
import socketserver, sys

kept = {}

class Handler(socketserver.StreamRequestHandler):
    def part(self):
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:-2]

    def handle(self):
        while line := self.rfile.readline():
            name, *arguments = [self.part() for _ in range(int(line[1:]))]
            if name == b"SET":
                kept[arguments[0]] = arguments[1]
                self.wfile.write(b"+OK\\r\\n")
            elif name == b"GET":
                found = kept.get(arguments[0])
                answer = b"$-1\\r\\n" if found is None else b"$%d\\r\\n%s\\r\\n" % (len(found), found)
                self.wfile.write(answer)
            else:
                kept.clear()
                self.wfile.write(b"+OK\\r\\n")

socketserver.TCPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def blocks() -> Blocks:
    source, target = touched(64 * KIB), touched(64 * KIB)
    source[:] = bytes(range(256)) * 256
    return Blocks(source, target, 16 * KIB)


@pytest.fixture
def fake_redis(tmp_path: Path) -> str:
    script, binary = tmp_path / "redis.py", tmp_path / "redis-server"
    script.write_text(FAKE_REDIS)
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    binary.chmod(0o755)
    return str(binary)


@pytest.fixture(params=["dram", "ssd"])
def ours(request: pytest.FixtureRequest, blocks: Blocks, tmp_path: Path) -> Iterator[Ours]:
    with contextlib.closing(Ours(blocks, tmp_path if request.param == "ssd" else None)) as found:
        yield found


def test_every_row(tmp_path: Path, fake_redis: str) -> None:
    lines: list[str] = []
    plan = Plan((16 * KIB, 64 * KIB), 128 * KIB, 1, tmp_path, None, fake_redis)
    rows = run(plan, lines.append)
    assert [(row.operation, row.tier, row.size) for row in rows] == [
        (operation, tier, size * KIB)
        for size in (16, 64)
        for tier in ("dram", "ssd")
        for operation in ("put", "get")
    ]
    for row in rows:
        sides = {side for side, value in as_json([row])[0].items() if isinstance(value, float) and value > 0}
        others = {"memcpy", "redis"} if row.tier == "dram" else {"file"}
        assert sides == {"isthmus", "batched", *others}
    assert len(lines) == 8 and lines[0].startswith("put 16 KiB, dram: isthmus ")
    assert not list(tmp_path.glob("isthmus-bench-*"))  # nothing is left on the disk
    assert json.loads(json.dumps(as_json(rows))) == as_json(rows)


def test_table_leaves_out_what_was_not_measured() -> None:
    console = Console(file=io.StringIO(), width=150, record=True)
    console.print(table([Row("get", "ssd", 1 << 20, 1.25, 2.5, file=2.0)]))
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


def test_redis_keeps_and_forgets(fake_redis: str, blocks: Blocks) -> None:
    with contextlib.closing(Redis(fake_redis, blocks)) as redis:
        redis.put()
        blocks.blank()
        redis.get()
        redis.verify()
        redis.clear()
        with pytest.raises(BenchError, match="redis: a get failed"):
            redis.get()


def test_a_redis_that_cannot_be_run(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match="/no/redis: cannot be run"):
        Redis("/no/redis", blocks)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert find_redis(None) is None and find_redis("/no/redis") == "/no/redis"


@pytest.mark.parametrize("plan", [Plan((100,)), Plan(total=KIB), Plan(folder=Path("/no/folder"))])
def test_plans_that_cannot_be_measured(plan: Plan) -> None:
    with pytest.raises(ConfigError):
        run(plan)
