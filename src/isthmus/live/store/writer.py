"""What a store tells about itself."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from isthmus.core.types import BlockName
from isthmus.live.store.arena import Arena
from isthmus.live.store.directory import Block, BlockDirectory
from isthmus.live.store.log import Entry, Log
from isthmus.live.store.record import RecordHeader


class TierStat(msgspec.Struct, frozen=True):
    """One tier. Counters count from the start of the process."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    """DRAM: slots in use; SSD: records in use. Payload bytes, without headers."""
    num_blocks: int = 0
    """SSD: copies of blocks that are in DRAM too are counted here as well."""
    hits: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0
    """Blocks that left this tier by `demote` (DRAM) or by `drop` (either)."""


class StoreStat(msgspec.Struct, frozen=True):
    """A store at one moment."""

    memory: TierStat
    disk: TierStat
    misses: int
    num_pinned: int
    """Slots pinned now."""
    num_reserved: int
    """Slots that are being filled."""
    file_bytes: int
    """Bytes of the segment files."""
    queued_blocks: int
    """In DRAM and not yet on the SSD, though there may be no room for them."""
    lost_blocks: int
    """Demoted blocks that could not be written, and blocks found damaged or unreadable."""
    seal_mismatches: int
    io_errors: int
    degraded: bool
    """The SSD takes nothing at the moment; what it has can still be read. Or it could not be opened."""

    def gauges(self) -> dict[str, float]:
        """By metric name."""
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


@dataclass(slots=True)
class Counters:
    """Only ever added to, under the store's lock."""

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    memory_bytes_in: int = 0
    memory_bytes_out: int = 0
    disk_bytes_in: int = 0
    disk_bytes_out: int = 0
    memory_evictions: int = 0
    disk_evictions: int = 0
    lost_blocks: int = 0
    seal_mismatches: int = 0
    io_errors: int = 0


# Writes blocks behind: in batches, one sync for each, on a thread of its own.
#
# An error of the disk turns writing off for a while: one second, then twice as long each time up to a minute, then it
# is tried again. Meanwhile the store keeps to DRAM, and what the SSD has can still be read.


logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 128


class Retry:
    """When to try again after failures in a row: 1, 2, 4 ... 60 seconds after the last one."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self._at_s: float | None = None

    @property
    def failing(self) -> bool:
        return self._at_s is not None

    @property
    def at_s(self) -> float:
        """Infinity when nothing failed."""
        return math.inf if self._at_s is None else self._at_s

    def failed(self, now_s: float) -> None:
        self._wait_s = min(2 * self._wait_s, LONGEST_RETRY_S) or FIRST_RETRY_S
        self._at_s = now_s + self._wait_s

    def resume(self) -> None:
        """Trying worked; if the real thing fails again, the wait goes on growing."""
        self._at_s = None

    def worked(self) -> None:
        self._wait_s, self._at_s = 0.0, None


class Writer:
    """The thread that empties `directory.demoting` and `directory.unwritten` into the log.

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
        """Of the latest record; each has a higher one."""
        self._stopped = False
        self._busy = False
        self._batch = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // arena.shape.block_bytes))
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """In a thread of its own; without it, somebody else takes the turns."""
        self._thread = threading.Thread(target=self._run, name="isthmus-store-writer", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Without the thread: takes turns until nothing is left that could be done."""
        while not self.idle() or self._is_due():
            self.turn()

    @property
    def can_write(self) -> bool:
        return not self._write_retry.failing

    @property
    def degraded(self) -> bool:
        """The disk refused the last write, sync or new file."""
        return self._write_retry.failing or self._grow_retry.failing

    def idle(self) -> bool:
        """Nothing is being written, and nothing could be. Under the lock."""
        return self._stopped or not (self._busy or self._has_work())

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the batch it is writing; False: the disk still has not taken that."""
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
        """Tries again what is due, and writes a batch of what there is."""
        if self._is_due():
            self._probe()
        if self._wants_file():
            self._grow()
        self._write_batch()

    def _is_due(self) -> bool:
        """It is time to try whether the disk takes something again."""
        return self._write_retry.at_s <= self._log.files.now()

    def _await_turn(self) -> bool:
        """Waits until there is something to write or to try again; False: stopped."""
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
        """Writes into a free place, and back to work when that goes well. After a failed write there is one."""
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
                self._counters.disk_bytes_in += len(entries) * self._arena.shape.block_bytes
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
        """Writes and syncs. After an error nothing of the batch counts: what was written may not have stayed."""
        self._log.write(entries)
        self._log.sync([entry.place for entry in entries])

    def _failed(self, retry: Retry, error: OSError) -> None:
        """Under the lock."""
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
