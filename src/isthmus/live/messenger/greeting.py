"""Greeting of a connection, without I/O. Each side proves that it knows the cluster's secret; neither sends it.

    dialler                                        listener
    HELLO: session, terms, nonce   ──────────────>
                                   <──────────────  CHALLENGE: another nonce
    ANSWER: proof                  ──────────────>
                                   <──────────────  WELCOME: terms, proof        or CLOSE, at any time

A proof is a keyed digest of the side that gives it, both nonces and everything said so far, so a greeting that
somebody recorded proves nothing on any other connection, and a proof of one side is none of the other. The dialler
proves first: a stranger who dials gets nothing that a guessed secret could be tried on.

A HELLO's frame has the same shape in every version, so each side can tell the other what it speaks.
"""

from __future__ import annotations

import hmac
from typing import TypeVar

import msgspec

from isthmus.core.errors import ProtocolError
from isthmus.live.messenger.frames import FrameKind, Prefix, prefix_of, read
from isthmus.live.messenger.inbox import Close
from isthmus.live.messenger.ports import Terms

OLDEST, NEWEST = 3, 3
"""Protocol versions spoken here."""
SESSION_BYTES = 16
NONCE_BYTES = 32
LABEL = b"isthmus greeting 3"
"""Domain of the proofs: no other use of the secret gives the same digest."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """`session`: its random name, all that members of the cluster need to join it. `lane`: number of this connection.
    `first`: the session begins with this connection. `is_line`: the connection is a line (`line.py`). `nonce`:
    random, for this connection alone."""

    oldest: int
    newest: int
    session: bytes
    lane: int
    first: bool
    terms: Terms
    is_line: bool = False
    nonce: bytes = b""


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    nonce: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    version: int
    terms: Terms
    proof: bytes = b""


class TurnedAway(ProtocolError):
    """Raised when the listener said CLOSE, with its reason."""


_encode = msgspec.msgpack.Encoder().encode
Body = TypeVar("Body", Hello, Challenge, Answer, Welcome, Close)


def hello(session: bytes, lane: int, terms: Terms, nonce: bytes, *, first: bool) -> Hello:
    return Hello(OLDEST, NEWEST, session, lane, first, terms, nonce=nonce)


def line(session: bytes, terms: Terms, nonce: bytes) -> Hello:
    return Hello(OLDEST, NEWEST, session, 0, False, terms, is_line=True, nonce=nonce)


def refusal(reason: str) -> bytes:
    return _frame(FrameKind.CLOSE, Close((), reason))


class Dialling:
    """Dialler's side of one greeting: send `begin`, answer CHALLENGE with `answer`, check WELCOME with `end`."""

    def __init__(self, said: Hello, secret: bytes) -> None:
        self._said, self._secret = _encode(said), secret
        self._nonce = b""

    def begin(self) -> bytes:
        return prefix_of(FrameKind.HELLO, self._said) + self._said

    def answer(self, prefix: Prefix, header: bytes) -> bytes:
        """Raises TurnedAway, or ProtocolError when it is no challenge."""
        self._nonce = _nonce(_answer_of(prefix, header, FrameKind.CHALLENGE, Challenge).nonce)
        return _frame(FrameKind.ANSWER, Answer(_proof(self._secret, "dialler", self._said, self._nonce)))

    def end(self, prefix: Prefix, header: bytes) -> Terms:
        """Returns the listener's terms. Raises TurnedAway, or ProtocolError when the listener does not know the
        secret."""
        said = _answer_of(prefix, header, FrameKind.WELCOME, Welcome)
        if not OLDEST <= said.version <= NEWEST:
            raise ProtocolError(f"the listener chose protocol version {said.version}, which was not offered")
        shown = _proof(self._secret, "listener", self._said, self._nonce, said.version, said.terms)
        if not hmac.compare_digest(said.proof, shown):
            raise ProtocolError("the listener does not know this cluster's token")
        return said.terms


class Listening:
    """Listener's side of one greeting: send `challenge` after HELLO, and `welcome` when `check` found ANSWER
    right."""

    def __init__(self, prefix: Prefix, header: bytes, nonce: bytes, secret: bytes) -> None:
        """Raises ProtocolError when the frame is no HELLO, or there is no common version."""
        if prefix.kind != FrameKind.HELLO or prefix.length:
            raise ProtocolError("a connection must begin with HELLO")
        said = _read(header, Hello)
        if not said.oldest <= NEWEST or not said.newest >= OLDEST:
            theirs = f"{said.oldest} to {said.newest}"
            raise ProtocolError(f"protocol versions {OLDEST} to {NEWEST} are spoken here, not {theirs}")
        if len(said.session) != SESSION_BYTES:
            raise ProtocolError("a session's name has 16 bytes")
        _nonce(said.nonce)
        self.hello = said
        self._said, self._secret, self._own = header, secret, nonce

    def challenge(self) -> bytes:
        return _frame(FrameKind.CHALLENGE, Challenge(self._own))

    def check(self, prefix: Prefix, header: bytes) -> None:
        """Raises ProtocolError when the dialler does not know the secret."""
        if prefix.kind != FrameKind.ANSWER or prefix.length:
            raise ProtocolError("CHALLENGE must be answered by ANSWER")
        given = _read(header, Answer).proof
        if not hmac.compare_digest(given, _proof(self._secret, "dialler", self._said, self._own)):
            raise ProtocolError("its cluster token is wrong")

    def welcome(self, terms: Terms) -> bytes:
        proof = _proof(self._secret, "listener", self._said, self._own, NEWEST, terms)
        return _frame(FrameKind.WELCOME, Welcome(NEWEST, terms, proof))


def _proof(secret: bytes, side: str, said: bytes, nonce: bytes, *more: object) -> bytes:
    return hmac.digest(secret, _encode((LABEL, side, said, nonce, *more)), "sha256")


def _nonce(given: bytes) -> bytes:
    if len(given) != NONCE_BYTES:
        raise ProtocolError(f"a nonce has {NONCE_BYTES} bytes")
    return given


def _answer_of(prefix: Prefix, header: bytes, kind: FrameKind, body: type[Body]) -> Body:
    """Decodes a frame of the listener. Raises TurnedAway for CLOSE, ProtocolError for any other than `kind`."""
    if prefix.kind == FrameKind.CLOSE and not prefix.length:
        raise TurnedAway(_read(header, Close).reason)
    if prefix.kind != kind or prefix.length:
        raise ProtocolError(f"the listener must say {kind.name} or CLOSE")
    return _read(header, body)


def _frame(kind: FrameKind, body: Challenge | Answer | Welcome | Close) -> bytes:
    header = _encode(body)
    return prefix_of(kind, header) + header


def _read(header: bytes, kind: type[Body]) -> Body:
    return read(msgspec.msgpack.Decoder(kind).decode, header, f"a {kind.__name__}")
