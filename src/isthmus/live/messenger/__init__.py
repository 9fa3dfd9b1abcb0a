"""Moves messages and KV bytes between nodes: sessions without I/O, bound to TCP.

Knows nothing of engines or stores: a payload is memory to send from or to receive into.
"""

from isthmus.live.messenger.credentials import Credentials, Identity, TlsFiles
from isthmus.live.messenger.frames import read
from isthmus.live.messenger.line import Answerer, Asker, LineLost, Question
from isthmus.live.messenger.network import Greetings, Network, Server, TcpNetwork, address_of, split_address
from isthmus.live.messenger.outbox import Priority, Sending
from isthmus.live.messenger.ports import Handler, Stat, Terms
from isthmus.live.messenger.running import RunningClock, RunningTimer
from isthmus.live.messenger.session import Session

__all__ = [
    "Answerer",
    "Asker",
    "Credentials",
    "Greetings",
    "Handler",
    "Identity",
    "LineLost",
    "Network",
    "Priority",
    "Question",
    "RunningClock",
    "RunningTimer",
    "Sending",
    "Server",
    "Session",
    "Stat",
    "TcpNetwork",
    "Terms",
    "TlsFiles",
    "address_of",
    "read",
    "split_address",
]
