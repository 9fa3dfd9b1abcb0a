"""`python -m benchmarks` beside peers: one that stands in for Redis, transformers, and a Python without Mooncake."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.mooncake import process
from isthmus.bench import BenchError, engine
from tests.benchmarks.conftest import Study

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

socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def program(file: Path, command: str) -> Path:
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
    file.chmod(0o755)
    return file


def test_the_store_beside_redis(tmp_path: Path, study: Study) -> None:
    (tmp_path / "redis.py").write_text(FAKE_REDIS)
    redis = program(tmp_path / "redis-server", f"{tmp_path}/redis.py")
    options = ("--sizes", "16KiB", "--total", "64KiB", "--rounds", 1, "--folder", tmp_path)
    rows, _ = study("store", *options, "--redis-server", redis)
    assert [(row["operation"], row["tier"]) for row in rows if row.get("redis", 0) > 0] == [
        ("put", "dram"),
        ("get", "dram"),
    ]


def test_the_engine_beside_transformers(tiny: Path, monkeypatch: pytest.MonkeyPatch, study: Study) -> None:
    cases = [engine.Case("prefill", (40,)), engine.Case("decode", (3, 40), 4)]
    monkeypatch.setattr(engine, "cases", lambda max_length: cases)
    rows, shown = study("engine", "--model", tiny, "--rounds", 1)
    assert [row["case"] for row in rows] == ["prefill", "decode"]
    assert all(min(row["isthmus"], row["transformers"]) > 0 for row in rows) and "/ transformers" in shown


def test_a_python_without_mooncake(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No module named 'mooncake'"):
        process(str(program(tmp_path / "python", "-S")), "transfer", "4096")
