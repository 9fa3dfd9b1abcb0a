"""Seals: a 128-bit digest of a block's bytes in one layer, checked when they come from another node or the SSD.

XXH3 finds torn, flipped, truncated and misplaced bytes at memory speed. It does not stop somebody who forges
bytes on purpose; that is the transport's task (authenticated sessions).
"""

from __future__ import annotations

import xxhash

SEAL_BYTES = 16


def seal(data: memoryview | bytes) -> bytes:
    """Digest of one layer slice (contiguous bytes)."""
    return xxhash.xxh3_128_digest(data)
