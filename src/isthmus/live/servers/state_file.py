"""The state file of a router: what is believed of each server's cache, for the router's next start.

It has names of blocks, which tell prompts to nobody who does not guess them whole, and so is its owner's alone. It is
written anew now and then, and replaced whole: a router that is killed leaves the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import zstandard

from isthmus.core.blocks import NAME_BYTES
from isthmus.core.errors import ConfigError
from isthmus.core.scheduler import Chain
from isthmus.live.servers.hearing import SavedHearing
from isthmus.live.servers.naming import Naming
from isthmus.live.servers.told import Description

log = logging.getLogger(__name__)

SAVE_S, SHARE = 2.0, 20
"""How often it is written, and the least share of time between two times that writing takes not: 1 in so many."""
MAX_BYTES = 1 << 30
_MAGIC = b"isthmus route state 1\n"


class Kept(msgspec.Struct, frozen=True):
    """Of one server. It is void for a server that has started since (`started_s`, 0 where a server does not say), for
    other names, or blocks of another size. `chains`: joined names, least recently used first; `heard`: of its KV
    events, if all were."""

    server: str
    started_s: float
    models: tuple[str, ...]
    knows_tokens: bool
    block_tokens: int
    capacity_blocks: int
    chains: tuple[bytes, ...]
    heard: SavedHearing | None = None

    def is_of(self, told: Description, naming: Naming) -> bool:
        """Whether a server that describes itself so still has these blocks, under these names."""
        of = (told.started_s, told.names, naming.knows_tokens, naming.block_tokens)
        return of == (self.started_s, self.models, self.knows_tokens, self.block_tokens)

    def names(self) -> Iterator[Chain]:
        for chain in self.chains:
            yield tuple([chain[at : at + NAME_BYTES] for at in range(0, len(chain), NAME_BYTES)])


Snapshot = Callable[[], Kept]
"""Makes, in any thread, what is kept of a server, as it was at one moment."""


def joined(chains: Iterable[Chain]) -> tuple[bytes, ...]:
    """Returns chains as they are kept; those of names alone."""
    return tuple([b"".join(name for name in chain if isinstance(name, bytes)) for chain in chains])


class StateFile:
    """`path`: of the file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, Kept] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Reads the file, and tries to write it. One that is damaged is as none. Raises ConfigError for a file that is
        something else, or cannot be read or written."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._read()
            self._write()
        except OSError as error:
            raise ConfigError(f"--state {self._path}: {error.strerror or error}") from None

    def _read(self) -> None:
        with self._path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ConfigError(f"--state {self._path}: no state file of `isthmus route`; name another file")
            try:
                packed = zstandard.ZstdDecompressor().decompress(file.read(MAX_BYTES))
                found = msgspec.msgpack.decode(packed, type=list[Kept])
            except (zstandard.ZstdError, msgspec.DecodeError) as error:
                log.warning("%s is damaged, so nothing is known of caches: %s", self._path, error)
            else:
                self._kept = {kept.server: kept for kept in found}

    def take(self, server: str) -> Kept | None:
        """Returns what was believed of a server, once."""
        return self._kept.pop(server, None)

    async def keep(
        self,
        snapshots: Callable[[], Sequence[Snapshot]],
        count: Callable[[], int],
        wanted: Callable[[], Collection[str]],
    ) -> None:
        """Writes what is believed of the servers that are `wanted` until cancelled, and then once more; not while the
        `count` of requests stands."""
        written, wait_s = 0, SAVE_S
        try:
            while True:
                await asyncio.sleep(wait_s)
                began, now = time.monotonic(), count()
                if now != written:
                    await asyncio.shield(asyncio.to_thread(self._save, snapshots(), set(wanted())))
                    written = now
                wait_s = max(SAVE_S, SHARE * (time.monotonic() - began))
        finally:
            if count() != written:
                self._save(snapshots(), set(wanted()))

    def _save(self, snapshots: Sequence[Snapshot], wanted: Collection[str]) -> None:
        """Runs in any thread, in one at a time."""
        with self._lock:
            kept = [*self._kept.values(), *[snapshot() for snapshot in snapshots]]
            self._kept = {each.server: each for each in kept if each.server in wanted}
            try:
                self._write()
            except OSError as error:
                log.warning("%s cannot be written: %s", self._path, error.strerror or error)

    def _write(self) -> None:
        """Replaces the file, whole or not at all. Raises OSError."""
        packed = msgspec.msgpack.encode(list(self._kept.values()))
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC)
                file.write(zstandard.ZstdCompressor(level=1, write_checksum=True).compress(packed))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
