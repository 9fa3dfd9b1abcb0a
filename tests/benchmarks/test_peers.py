"""`python -m benchmarks` beside peers: one that stands in for Redis, transformers, and a Python without Mooncake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import app
from benchmarks.models import make_random_model
from benchmarks.peers.foreign import Foreign
from isthmus.bench import BenchError, engine
from isthmus.cli.main import main
from isthmus.core.errors import StartError

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


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        main(app)
    return int(exit.value.code or 0)


def program(file: Path, command: str) -> Path:
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
    file.chmod(0o755)
    return file


def test_the_store_beside_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis.py").write_text(FAKE_REDIS)
    redis, file = program(tmp_path / "redis-server", f"{tmp_path}/redis.py"), tmp_path / "rows.json"
    options = ("--sizes", "16KiB", "--total", "64KiB", "--rounds", 1, "--folder", tmp_path, "--json", file)
    assert run(monkeypatch, "store", *options, "--redis-server", redis) == 0
    rows = json.loads(file.read_text())
    assert [(row["operation"], row["tier"]) for row in rows if row.get("redis", 0) > 0] == [
        ("put", "dram"),
        ("get", "dram"),
    ]


def test_the_engine_beside_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_model(
        tmp_path / "model", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, dtype="float32"
    )
    cases = [engine.Case("prefill", (40,)), engine.Case("decode", (3, 40), 4)]
    monkeypatch.setattr(engine, "cases", lambda max_length: cases)
    file = tmp_path / "rows.json"
    assert run(monkeypatch, "engine", "--model", tmp_path / "model", "--rounds", 1, "--json", file) == 0
    rows = json.loads(file.read_text())
    assert [row["case"] for row in rows] == ["prefill", "decode"]
    assert all(min(row["isthmus"], row["transformers"]) > 0 for row in rows)


def test_a_python_that_is_none_and_one_without_mooncake(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="/no/python: cannot be run: No such file"):
        Foreign("/no/python", "mooncake_process.py", "transfer", "4096")
    with pytest.raises(BenchError, match="No module named 'mooncake'"):
        Foreign(str(program(tmp_path / "python", "-S")), "mooncake_process.py", "transfer", "4096")
