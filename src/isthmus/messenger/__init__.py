"""Moves messages and KV bytes between nodes: sessions without I/O, bound to TCP or to memory.

Knows nothing of engines or stores: a payload is memory to send from or to receive into.
"""

from isthmus.messenger.credentials import Credentials, Identity, TlsFiles
from isthmus.messenger.line import Answerer, Asker, LineLost, Question
from isthmus.messenger.memory import MemoryNetwork
from isthmus.messenger.network import Greetings, Network, Server, TcpNetwork, address_of, split_address
from isthmus.messenger.outbox import Priority, Sending
from isthmus.messenger.ports import Handler
from isthmus.messenger.reading import read
from isthmus.messenger.running import RunningClock, RunningTimer
from isthmus.messenger.session import Session
from isthmus.messenger.terms import Stat, Terms

__all__ = [
    "Answerer",
    "Asker",
    "Credentials",
    "Greetings",
    "Handler",
    "Identity",
    "LineLost",
    "MemoryNetwork",
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
