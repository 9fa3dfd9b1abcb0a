"""Moves messages and KV bytes between nodes: frames without I/O, bound to TCP or to memory.

Knows nothing of engines or stores: a payload is memory to send from or to receive into.
"""

from isthmus.messenger.connection import Connection, Handler, Network, Server, TcpNetwork
from isthmus.messenger.frames import FrameReader, frame
from isthmus.messenger.memory import MemoryNetwork

__all__ = [
    "Connection",
    "FrameReader",
    "Handler",
    "MemoryNetwork",
    "Network",
    "Server",
    "TcpNetwork",
    "frame",
]
