"""Mooncake's transfer engine and store, as peers of ours: each is a process of an interpreter that has Mooncake."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from isthmus.bench import BenchError
from isthmus.bench.child import Foreign
from isthmus.bench.transfer_peers import Direction
from isthmus.core.errors import ConfigError


def find_mooncake(python: str | None) -> str:
    """The interpreter to run Mooncake in: the one given, or this one if it has Mooncake."""
    if python is None and find_spec("mooncake") is None:
        raise ConfigError("--mooncake-python: this Python has no Mooncake; name one that has")
    return python or sys.executable


def process(python: str, kind: str, *arguments: str) -> Foreign:
    quiet = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
    return Foreign(python, Path(__file__).with_name("mooncake_process.py"), kind, *arguments, settings=quiet)


class MooncakeEngine:
    """`mooncake-transfer-engine` over TCP, handshakes between the two processes, no metadata server.

    It is asked in its fastest ways, of which the quicker counts: the whole region as one request, which it cuts
    itself, and the pieces in batches of four.
    """

    def __init__(self, python: str, capacity: int) -> None:
        self._target = process(python, "transfer", str(capacity))
        self._initiator = process(python, "transfer", str(capacity))

    def seconds(self, direction: Direction, size: int, piece: int, count: int) -> float:
        """Seconds of one of `count` transfers after another."""
        return min(self._move(direction, size, step, count) / count for step in {size, piece})

    def verify(self, direction: Direction, size: int, piece: int) -> None:
        """Raises BenchError if other bytes arrive than were sent."""
        self._initiator.ask("stamp", size)
        self._move(direction, size, piece, 1)
        if self._initiator.ask("digest", size) != self._target.ask("digest", size):
            raise BenchError(f"mooncake: a {direction} of {size} bytes arrived damaged")

    def _move(self, direction: Direction, size: int, step: int, count: int) -> float:
        return float(self._initiator.ask("transfer", direction, size, step, count, *self._target.hello))

    def close(self) -> None:
        self._initiator.close()
        self._target.close()


class MooncakeStore:
    """The Mooncake store: its master, a client with its zero-copy calls, and the pool's memory.

    The memory lies in the client's own process, or (`remote`) in another one.
    """

    def __init__(self, python: str, size: int, count: int, *, remote: bool) -> None:
        self._size, self._count = size, count
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-mooncake-"))

            def start(kind: str, *arguments: str) -> Foreign:
                return stack.enter_context(contextlib.closing(process(python, kind, *arguments)))

            master = start("master", folder).hello
            total, segment = size * count, str(2 * size * count + (64 << 20))
            if remote:
                start("store", master, segment, "4096")
            lent = "0" if remote else segment
            self._client = start("store", master, lent, str(total))
            self._stack = stack.pop_all()
        self._client.ask("stamp", total)
        self._digest = self._client.ask("digest", total)

    def put(self) -> float:
        return float(self._client.ask("put", self._size, self._count))

    def get(self) -> float:
        return float(self._client.ask("get", self._size, self._count))

    def verify(self) -> None:
        """Gets what was put into memory that held something else meanwhile."""
        total = self._size * self._count
        self._client.ask("stamp", total)
        other = self._client.ask("digest", total)
        self.get()
        if self._client.ask("digest", total) != self._digest or other == self._digest:
            raise BenchError(f"mooncake store: blocks of {self._size} bytes came back damaged")

    def clear(self) -> None:
        self._client.ask("clear")

    def close(self) -> None:
        self._stack.close()
