"""Mooncake's side of the benchmarks, run by its path in an interpreter that has Mooncake and not Isthmus.

Reads commands as lines of JSON, answers with lines `= JSON`. Imports the standard library and mooncake only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from typing import Any

BATCH = 4
"""Pieces in one call: with 16 and more at once Mooncake's TCP transport drops to hundredths of a GB/s."""

LEASE_MS = 1000
"""How long the store's master keeps a block that was read; ten seconds by default."""


class Region:
    """Memory whose address is known and whose pages are all there."""

    def __init__(self, capacity: int) -> None:
        self.bytes = mmap.mmap(-1, capacity)
        self._array = (ctypes.c_char * capacity).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._array)
        ctypes.memset(self.address, 1, capacity)

    def stamp(self, size: int) -> None:
        noise = os.urandom(4096)
        for start in range(0, size, 4096):
            part = noise[: size - start]
            self.bytes[start : start + len(part)] = part

    def digest(self, size: int) -> str:
        return hashlib.blake2b(memoryview(self.bytes)[:size]).hexdigest()


class Transfer(Region):
    """One transfer engine with one registered region."""

    def __init__(self, capacity: int) -> None:
        from mooncake.engine import TransferEngine

        super().__init__(capacity)
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the transfer engine did not start")
        if self._engine.register_memory(self.address, capacity):
            raise RuntimeError("the transfer engine took no memory")
        self.hello = [f"127.0.0.1:{self._engine.get_rpc_port()}", self.address]

    def transfer(self, direction: str, size: int, step: int, count: int, target: str, far: int) -> float:
        near, engine = self.address, self._engine
        move = engine.batch_transfer_sync_write if direction == "push" else engine.batch_transfer_sync_read
        starts = list(range(0, size, step))
        batches = [starts[first : first + BATCH] for first in range(0, len(starts), BATCH)]
        calls = [
            ([near + s for s in batch], [far + s for s in batch], [min(step, size - s) for s in batch])
            for batch in batches
        ]
        started = time.perf_counter()
        for _ in range(count):
            for call in calls:
                if move(target, *call):
                    raise RuntimeError("a transfer failed")
        return time.perf_counter() - started


class Store(Region):
    """A client of the master at `master`. `segment`: bytes it lends to the pool; 0: none."""

    def __init__(self, master: str, segment: int, capacity: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        super().__init__(capacity)
        self._store = MooncakeDistributedStore()
        failed = self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", master)
        if failed or self._store.register_buffer(self.address, capacity):
            raise RuntimeError("the store did not start")
        self._round = 0
        self.hello = "ready"

    def put(self, size: int, count: int) -> float:
        """Puts the region's blocks under new names, one after another."""
        self._round += 1
        started = time.perf_counter()
        for index in range(count):
            if self._store.put_from(f"{self._round}/{index}", self.address + index * size, size):
                raise RuntimeError("a put failed")
        return time.perf_counter() - started

    def get(self, size: int, count: int) -> float:
        """Gets what was put last, into the same places."""
        started = time.perf_counter()
        for index in range(count):
            address = self.address + index * size
            if self._store.get_into(f"{self._round}/{index}", address, size) != size:
                raise RuntimeError("a get failed")
        return time.perf_counter() - started

    def clear(self) -> int:
        time.sleep(1.1 * LEASE_MS / 1000)  # what was read just now cannot be removed yet
        return int(self._store.remove_all())


class Master:
    """The store's master, which lies beside the interpreter that runs this."""

    def __init__(self, folder: str) -> None:
        port, metrics_port = free_port(), free_port()
        command = [
            os.path.join(os.path.dirname(sys.executable), "mooncake_master"),
            "-rpc_address=127.0.0.1",
            f"-rpc_port={port}",
            f"-metrics_port={metrics_port}",
            f"-default_kv_lease_ttl={LEASE_MS}",
            f"-log_dir={folder}",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(port)
        self.hello = f"127.0.0.1:{port}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError("the store's master did not start")


def main(kind: str, *arguments: str) -> None:
    peer: Any = None
    try:
        if kind == "master":
            peer = Master(arguments[0])
        elif kind == "transfer":
            peer = Transfer(int(arguments[0]))
        else:
            peer = Store(arguments[0], int(arguments[1]), int(arguments[2]))
        answer(peer.hello)
        for line in sys.stdin:
            name, *values = json.loads(line)
            answer(getattr(peer, name)(*values))
    except (ImportError, OSError, RuntimeError) as error:
        answer({"error": f"mooncake: {error}"})
    if isinstance(peer, Master):
        peer.close()
    os._exit(0)  # Mooncake's threads do not end by themselves


def answer(value: Any) -> None:
    print("=", json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
