"""The other side of the connector's protocol, for tests: a dictionary of blocks behind a Unix socket.

Memory and seals are those of isthmus itself, so that both sides' ideas of them meet here. Knobs make it slow, short,
wrong or dead.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.core.blocks import seal
from isthmus.live.servers.wire import (
    Arena,
    Done,
    Frames,
    Free,
    FromWorker,
    Load,
    Open,
    Over,
    Ready,
    Refused,
    Save,
    Short,
    frame,
    receive_with_memory,
    send_with_memory,
)
from isthmus.live.store.arena import Arena as Store
from isthmus.live.store.arena import PeerArena

CHUNK = 4
"""Blocks of a load that are announced at once."""


@dataclass
class Adapter:
    """`blocks` outlives connections: name -> layer slices. What was asked and told is in `messages`."""

    path: Path
    num_slots: int = 512
    refuse: str = ""
    lag_s: float = 0.0  # before each announcement
    gate: threading.Semaphore | None = None  # lets announcements through, one by one
    short_after: int | None = None  # blocks of each load
    die_at: type[Any] | None = None  # close the connection on such a message
    keep_slots: bool = False  # never say Free
    blocks: dict[bytes, list[bytes]] = field(default_factory=dict)
    damaged: set[bytes] = field(default_factory=set)  # wrong bytes are announced for them
    messages: list[FromWorker] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Adapter:
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self.gate is not None:
            self.gate.release(len(self.messages) + 1)
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.drop()
        self._thread.join()

    def drop(self) -> None:
        """Ends the connection; the worker may come again."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in list(self.messages) if isinstance(message, kind)]

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                self._connection, _ = self._server.accept()
            except OSError:
                return
            try:
                self._talk(self._connection)
            except ConnectionError:
                pass
            except BaseException as error:
                self.errors.append(error)
            finally:
                self._connection.close()

    def _talk(self, connection: socket.socket) -> None:
        frames = Frames(FromWorker)
        self._pinned: dict[int, list[int]] = {}
        data, memories = receive_with_memory(connection, 1 << 16)
        while data:
            for message in frames.feed(data):
                assert not isinstance(message, Refused)
                dies = self.die_at is not None and isinstance(message, self.die_at)
                self.messages.append(message)  # who sees it may change `die_at`
                if dies:
                    return
                if isinstance(message, Open):
                    if self.refuse:
                        self._send(Refused(self.refuse))
                        return
                    self._staging = PeerArena.of(memories[0], message.memory)
                    os.close(memories.pop())
                    assert self._staging is not None
                    self._store = Store(self._staging.shape, self.num_slots)
                    self._free = list(range(self.num_slots))
                    assert self._store.handle is not None
                    with suppress(OSError):
                        send_with_memory(connection, Arena(self._store.handle), self._store.fileno())
                elif isinstance(message, Load):
                    self._pinned[message.load] = []
                    threading.Thread(target=self._load, args=(message,)).start()
                elif isinstance(message, Done):
                    with self._lock:
                        self._free += self._pinned.pop(message.load)
                elif isinstance(message, Save):
                    self._save(message)
                else:
                    assert isinstance(message, Over)
            data = connection.recv(1 << 16)

    def _send(self, message: Any) -> None:
        assert self._connection is not None
        with self._lock, suppress(OSError):
            self._connection.sendall(frame(message))

    def _save(self, save: Save) -> None:
        assert self._staging is not None
        assert (save.first == 0) == (save.parent is None)
        for name, slot, seals in zip(save.names, save.slots, save.seals, strict=True):
            slices = [bytes(self._staging.slice(slot, layer)) for layer in range(len(seals))]
            assert [seal(data) for data in slices] == list(seals)
            self.blocks[name] = slices
            self.damaged.discard(name)
        if not self.keep_slots:
            self._send(Free(save.slots))

    def _load(self, load: Load) -> None:
        names = load.names[: self.short_after]
        for at in range(0, len(names), CHUNK):
            if self.gate is not None:
                self.gate.acquire()
            if self._over.wait(self.lag_s):
                return
            found = [name for name in names[at : at + CHUNK] if name in self.blocks]
            with self._lock:
                if load.load not in self._pinned:
                    return  # the worker has given up
                slots = [self._free.pop() for _ in found]
                self._pinned[load.load] += slots
            self._send(
                Ready(
                    load.load, tuple(slots), tuple(self._fill(*pair) for pair in zip(found, slots, strict=True))
                )
            )
            if len(found) < len(names[at : at + CHUNK]):
                self._send(Short(load.load))
                return
        if self.short_after is not None:
            self._send(Short(load.load))

    def _fill(self, name: bytes, slot: int) -> tuple[bytes, ...]:
        seals = []
        for layer, data in enumerate(self.blocks[name]):
            seals.append(seal(data))
            self._store.slice(slot, layer)[:] = data
        if name in self.damaged:
            self._store.slice(slot, 0)[7] ^= 0x10
        return tuple(seals)
