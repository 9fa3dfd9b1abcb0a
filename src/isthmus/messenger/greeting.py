"""How a connection begins, without I/O: who opens it says HELLO, the listener answers WELCOME or CLOSE.

A HELLO's frame has the same shape in every version, so each side can tell the other what it speaks.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from isthmus.errors import ProtocolError
from isthmus.messenger.acks import Close
from isthmus.messenger.frames import Kind, Prefix, prefix_of
from isthmus.messenger.terms import Terms

OLDEST, NEWEST = 2, 2
"""Protocol versions spoken here."""
SESSION_BYTES = 16


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """`session` is chosen at random by who opens it, and is all that is needed to join it; `lane` numbers its
    connections; `first`: the session begins with this one; `is_line`: it is not the session's own (`line.py`)."""

    oldest: int
    newest: int
    session: bytes
    lane: int
    first: bool
    terms: Terms
    is_line: bool = False


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    version: int
    terms: Terms


_encode = msgspec.msgpack.Encoder().encode
Body = TypeVar("Body", Hello, Welcome, Close)


def hello(session: bytes, lane: int, terms: Terms, *, first: bool) -> bytes:
    return _frame(Kind.HELLO, Hello(OLDEST, NEWEST, session, lane, first, terms))


def line(session: bytes, terms: Terms) -> bytes:
    return _frame(Kind.HELLO, Hello(OLDEST, NEWEST, session, 0, False, terms, is_line=True))


def welcome(terms: Terms) -> bytes:
    return _frame(Kind.WELCOME, Welcome(NEWEST, terms))


def refusal(reason: str) -> bytes:
    return _frame(Kind.CLOSE, Close((), reason))


def read_hello(prefix: Prefix, header: bytes) -> Hello:
    """Raises ProtocolError with what is wrong: not a HELLO, or no common version."""
    if prefix.kind != Kind.HELLO or prefix.length:
        raise ProtocolError("a connection must begin with HELLO")
    said = _read(header, Hello)
    if len(said.session) != SESSION_BYTES:
        raise ProtocolError("a session's name has 16 bytes")
    if not said.oldest <= NEWEST or not said.newest >= OLDEST:
        theirs = f"{said.oldest} to {said.newest}"
        raise ProtocolError(f"protocol versions {OLDEST} to {NEWEST} are spoken here, not {theirs}")
    return said


def read_welcome(prefix: Prefix, header: bytes) -> Welcome | Close:
    """The listener's answer. Raises ProtocolError when it is none."""
    if prefix.kind == Kind.CLOSE and not prefix.length:
        return _read(header, Close)
    if prefix.kind != Kind.WELCOME or prefix.length:
        raise ProtocolError("HELLO must be answered by WELCOME or CLOSE")
    said = _read(header, Welcome)
    if not OLDEST <= said.version <= NEWEST:
        raise ProtocolError(f"the listener chose protocol version {said.version}, which was not offered")
    return said


def _frame(kind: Kind, body: Hello | Welcome | Close) -> bytes:
    header = _encode(body)
    return prefix_of(kind, header) + header


def _read(header: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.msgpack.decode(header, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a {kind.__name__} could not be read: {error}") from None
