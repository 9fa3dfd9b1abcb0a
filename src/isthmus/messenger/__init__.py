"""Moves messages and KV bytes between processes: frames without I/O, and their binding to TCP.

Knows nothing of engines or stores: a payload is memory to send from or to receive into.
"""

from isthmus.messenger.connection import Connection, Handler, connect, listen
from isthmus.messenger.frames import FrameReader, frame

__all__ = ["Connection", "FrameReader", "Handler", "connect", "frame", "listen"]
