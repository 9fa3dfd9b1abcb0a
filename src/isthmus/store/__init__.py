"""Keeps KV blocks of one node: a DRAM arena over an SSD log.

Knows names, seals and bytes; which block to keep where is decided elsewhere.
"""

from isthmus.store.arena import Arena, ArenaHandle, PeerArena, Shape
from isthmus.store.directory import Pinned
from isthmus.store.files import Files
from isthmus.store.log import Log
from isthmus.store.memory import aligned_buffer, copy_bytes
from isthmus.store.record import RecordFormat
from isthmus.store.stat import Stat, TierStat
from isthmus.store.store import Store

__all__ = [
    "Arena",
    "ArenaHandle",
    "Files",
    "Log",
    "PeerArena",
    "Pinned",
    "RecordFormat",
    "Shape",
    "Stat",
    "Store",
    "TierStat",
    "aligned_buffer",
    "copy_bytes",
]
