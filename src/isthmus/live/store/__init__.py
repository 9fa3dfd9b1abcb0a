"""Keeps KV blocks of one node: a DRAM arena over an SSD log.

Knows names, seals and bytes; which block to keep where is decided elsewhere.
"""

from isthmus.live.store.arena import Arena, ArenaHandle, PeerArena, Shape, aligned_buffer, copy_bytes
from isthmus.live.store.directory import Pinned
from isthmus.live.store.files import Files
from isthmus.live.store.log import Log
from isthmus.live.store.record import RecordFormat
from isthmus.live.store.store import Store
from isthmus.live.store.writer import StoreStat, TierStat

__all__ = [
    "Arena",
    "ArenaHandle",
    "Files",
    "Log",
    "PeerArena",
    "Pinned",
    "RecordFormat",
    "Shape",
    "Store",
    "StoreStat",
    "TierStat",
    "aligned_buffer",
    "copy_bytes",
]
