"""Redis, or Valkey, as a store of blocks for `python -m benchmarks store`."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from pathlib import Path

from benchmarks.served import reserved_port, started
from isthmus.bench import BenchError
from isthmus.bench.store_peers import Blocks
from isthmus.bench.study import timed
from isthmus.bench.transfer_peers import linked

START_S = 10.0


def find_redis(binary: str | None) -> str | None:
    """The server's binary: the one given, or Redis or Valkey on the path, or None."""
    return binary or shutil.which("redis-server") or shutil.which("valkey-server")


class Redis:
    """A server of our own without persistence; the protocol over one blocking socket, straight into the target."""

    def __init__(self, binary: str, blocks: Blocks) -> None:
        self._blocks = blocks
        with contextlib.ExitStack() as stack:
            port = stack.enter_context(reserved_port())
            log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-redis-"))) / "log"
            options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]

            def connected() -> socket.socket | None:
                with contextlib.suppress(OSError):
                    return linked(port)
                return None

            server = started("the Redis server", [binary, *options], log, connected, start_s=START_S)
            self._link, _ = stack.enter_context(server)
            self._stack = stack.pop_all()
        self._line = memoryview(bytearray(64))

    def put(self) -> float:
        return timed(self._put_all)

    def get(self) -> float:
        return timed(self._get_all)

    def verify(self) -> None:
        self._blocks.verify("redis")

    def clear(self) -> None:
        self._link.sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
        self._read_line()

    def close(self) -> None:
        self._stack.close()
        self._link.close()

    def _put_all(self) -> None:
        for index, source in enumerate(self._blocks.sources):
            key = b"%08d" % index
            self._link.sendall(b"*3\r\n$3\r\nSET\r\n$8\r\n%s\r\n$%d\r\n" % (key, len(source)))
            self._link.sendall(source)
            self._link.sendall(b"\r\n")
            if self._read_line() != b"+OK":
                raise BenchError("redis: a put failed")

    def _get_all(self) -> None:
        for index, target in enumerate(self._blocks.targets):
            self._link.sendall(b"*2\r\n$3\r\nGET\r\n$8\r\n%08d\r\n" % index)
            if self._read_line() != b"$%d" % len(target):
                raise BenchError("redis: a get failed")
            self._fill(target)
            self._fill(self._line[:2])

    def _read_line(self) -> bytes:
        """One byte at a time: what follows belongs in its place."""
        for end in range(len(self._line)):
            self._fill(self._line[end : end + 1])
            if self._line[end] == 10:
                return bytes(self._line[: end - 1])
        raise BenchError("redis: an answer without an end")

    def _fill(self, part: memoryview) -> None:
        while len(part):
            count = self._link.recv_into(part)
            if not count:
                raise BenchError("redis: the server went away")
            part = part[count:]
