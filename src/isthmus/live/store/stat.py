"""What a store tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


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
