"""Writes blocks behind, on a thread of its own: in batches, with one sync for each.

A failing disk turns writing off for one second, then for twice as long each time, up to a minute. Meanwhile new
blocks stay in DRAM, and blocks on the SSD can still be read.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

import msgspec

from isthmus.core.types import BlockName
from isthmus.live.store.arena import Arena
from isthmus.live.store.directory import Block, BlockDirectory
from isthmus.live.store.log import Entry, Log
from isthmus.live.store.record import RecordHeader

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 128


class TierStat(msgspec.Struct, frozen=True):
    """State of one tier. Counters count from the start of the process."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    """Payload bytes, without headers, of DRAM slots or SSD records in use."""
    num_blocks: int = 0
    """On the SSD, blocks that are in DRAM, too, are counted as well."""
    hits: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0
    """Blocks that left this tier by `demote` (DRAM) or by `drop` (either)."""


class StoreStat(msgspec.Struct, frozen=True):
    """State of a store at one moment."""

    memory: TierStat
    disk: TierStat
    misses: int
    num_pinned: int
    num_reserved: int
    """Slots that are being filled."""
    file_bytes: int
    """Bytes of the segment files."""
    queued_blocks: int
    """Blocks in DRAM that are not yet on the SSD, though there may be no room for them."""
    lost_blocks: int
    """Demoted blocks that could not be written, and blocks found damaged or unreadable."""
    seal_mismatches: int
    io_errors: int
    degraded: bool
    """Whether the SSD takes nothing at the moment, though it may still be read, or could not be opened."""

    def gauges(self) -> dict[str, float]:
        """Returns the values by metric name."""
        found: dict[str, float] = {
            "cache_pinned_blocks": self.num_pinned,
            "cache_write_queue_blocks": self.queued_blocks,
            "cache_degraded": float(self.degraded),
            "cache_io_errors_total": self.io_errors,
            "cache_lost_blocks_total": self.lost_blocks,
            "cache_seal_mismatches_total": self.seal_mismatches,
            "cache_misses_total": self.misses,
        }
        for name, tier in (("memory", self.memory), ("disk", self.disk)):
            found |= {
                f"cache_{name}_bytes": tier.used_bytes,
                f"cache_{name}_capacity_bytes": tier.capacity_bytes,
                f"cache_{name}_blocks": tier.num_blocks,
                f"cache_{name}_hits_total": tier.hits,
                f"cache_{name}_bytes_in_total": tier.bytes_in,
                f"cache_{name}_bytes_out_total": tier.bytes_out,
                f"cache_{name}_evictions_total": tier.evictions,
            }
        return found


class Traffic(msgspec.Struct):
    hits: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0


class Counters(msgspec.Struct):
    """Counters of a store, under its lock."""

    memory: Traffic = msgspec.field(default_factory=Traffic)
    disk: Traffic = msgspec.field(default_factory=Traffic)
    misses: int = 0
    lost_blocks: int = 0
    seal_mismatches: int = 0
    io_errors: int = 0


class Retry:
    """Time of the next attempt after failures in a row: 1, 2, 4 ... 60 seconds after the last one."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self._at_s: float | None = None

    @property
    def failing(self) -> bool:
        return self._at_s is not None

    @property
    def at_s(self) -> float:
        """Time of the next attempt in seconds; infinity when nothing failed."""
        return math.inf if self._at_s is None else self._at_s

    def failed(self, now_s: float) -> None:
        self._wait_s = min(2 * self._wait_s, LONGEST_RETRY_S) or FIRST_RETRY_S
        self._at_s = now_s + self._wait_s

    def resume(self) -> None:
        """Ends the pause after a successful probe; if the next write fails, the pause goes on growing."""
        self._at_s = None

    def worked(self) -> None:
        self._wait_s, self._at_s = 0.0, None


class Writer:
    """Writes the blocks in `directory.demoting` and `directory.unwritten` to the log.

    `changed` guards `directory` and `counters`, and is notified when there may be something to write.
    """

    def __init__(
        self,
        directory: BlockDirectory,
        arena: Arena,
        log: Log,
        counters: Counters,
        changed: threading.Condition,
        lose: Callable[[Sequence[BlockName]], None],
    ) -> None:
        self._directory = directory
        self._arena = arena
        self._log = log
        self._counters = counters
        self._changed = changed
        self._lose = lose
        self._write_retry = Retry()
        self._grow_retry = Retry()
        self.sequence = 0
        """Sequence number of the latest record."""
        self._stopped = False
        self._busy = False
        self._batch = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // arena.shape.block_bytes))
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; without it, `catch_up` writes."""
        self._thread = threading.Thread(target=self._run, name="isthmus-store-writer", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Writes all that can be written, without the thread."""
        while not self.idle() or self._is_due():
            self.turn()

    @property
    def can_write(self) -> bool:
        return not self._write_retry.failing

    @property
    def degraded(self) -> bool:
        """Whether the disk refused the last write, sync or new file."""
        return self._write_retry.failing or self._grow_retry.failing

    def idle(self) -> bool:
        """Whether nothing is being written and nothing could be. Under the lock."""
        return self._stopped or not (self._busy or self._has_work())

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its batch. False: the disk still has not taken that."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._await_turn():
            self.turn()

    def turn(self) -> None:
        """Retries what is due, and writes one batch."""
        if self._is_due():
            self._probe()
        if self._wants_file():
            self._grow()
        self._write_batch()

    def _is_due(self) -> bool:
        """Whether it is time to probe the disk."""
        return self._write_retry.at_s <= self._log.files.now()

    def _await_turn(self) -> bool:
        """Waits until there is something to write or to retry. False: stopped."""
        with self._changed:
            while not self._stopped and not self._has_work():
                wait_s = min(self._write_retry.at_s, self._grow_retry.at_s) - self._log.files.now()
                if wait_s <= 0:
                    break
                self._log.files.wait(self._changed, None if wait_s == math.inf else wait_s)
            return not self._stopped

    def _has_work(self) -> bool:
        if self._write_retry.failing:
            return False
        return bool(self._directory.demoting or (self._directory.unwritten and self._has_room()))

    def _has_room(self) -> bool:
        return self._log.num_free > 0 or (self._log.can_grow and not self._grow_retry.failing)

    def _probe(self) -> None:
        """Writes into a free place, of which there is one after a failed write; if it works, writing goes on."""
        error = _error_of(self._log.probe)
        with self._changed:
            if error is not None:
                self._failed(self._write_retry, error)
            else:
                self._write_retry.resume()
                logger.info("SSD tier in %s works again", self._log.folder)

    def _wants_file(self) -> bool:
        with self._changed:
            if self._grow_retry.failing:
                return self._grow_retry.at_s <= self._log.files.now()
            wanted = min(self._batch, len(self._directory.demoting) + len(self._directory.unwritten))
            return self._log.can_grow and self._log.num_free < wanted

    def _grow(self) -> None:
        error = _error_of(self._log.grow)
        with self._changed:
            if error is not None:
                self._failed(self._grow_retry, error)
            else:
                self._grow_retry.worked()

    def _write_batch(self) -> None:
        with self._changed:
            if not self._has_work():
                return
            self._busy = True
            batch, lost = self._directory.start_writing(self._batch)
            entries = [self._entry(block) for block in batch]
        error = _error_of(lambda: self._write(entries))
        with self._changed:
            lost += self._directory.end_writing(written=error is None)
            if error is None:
                self._write_retry.worked()
                self._counters.disk.bytes_in += len(entries) * self._arena.shape.block_bytes
            else:
                self._failed(self._write_retry, error)
                lost += self._directory.give_up_demoting()
            self._counters.lost_blocks += len(lost)
        self._lose(lost)
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _entry(self, block: Block) -> Entry:
        assert block.writing is not None and block.slot is not None
        self.sequence += 1
        header = RecordHeader(block.name, block.parent, block.seals, self.sequence)
        return Entry(block.writing, header, self._arena.slot(block.slot))

    def _write(self, entries: Sequence[Entry]) -> None:
        """Writes and syncs. After an error none of the batch counts, since written bytes may be lost."""
        self._log.write(entries)
        self._log.sync([entry.place for entry in entries])

    def _failed(self, retry: Retry, error: OSError) -> None:
        """Books a failure. Under the lock."""
        logger.warning("SSD tier in %s: %s; new blocks stay in DRAM for now", self._log.folder, error)
        retry.failed(self._log.files.now())
        self._counters.io_errors += 1
        self._changed.notify_all()


def _error_of(call: Callable[[], None]) -> OSError | None:
    try:
        call()
    except OSError as error:
        return error
    return None
