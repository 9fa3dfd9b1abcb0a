"""Joining a cluster: the join token (the head's address, its authority's key and the cluster's secret), and the address
at which others reach this machine. Must not load `cryptography`, which takes a moment: every process imports this."""

from __future__ import annotations

import base64
import binascii
import re
import socket
import time
from ipaddress import ip_address

import msgspec

from isthmus.core.errors import ConfigError, StartError
from isthmus.live.messenger import split_address
from isthmus.live.messenger.credentials import SCHEME

PIN_CHARS = 44
"""Length of an authority's key in a token (`authority.pin_of`)."""
_PIN = re.compile(rf"[A-Za-z0-9_-]{{{PIN_CHARS}}}")
FORM = f"{SCHEME}://HOST:PORT#TOKEN"
RETRY_S = 0.5
_ELSEWHERE = {4: ("192.0.2.1", 9), 6: ("2001:db8::1", 9)}
"""Unassigned addresses (RFC 5737, 3849), by IP version."""


class JoinToken(msgspec.Struct, frozen=True):
    """A join token, as `isthmus serve` prints it."""

    address: str  # the head's, host:port
    pin: str = ""  # key of the authority that signs certificates; "" without TLS
    secret: str = ""  # the cluster's token; "" if it is configured

    def __str__(self) -> str:
        secret = base64.urlsafe_b64encode(self.secret.encode()).decode().rstrip("=")
        return f"{SCHEME}://{self.address}#{self.pin}{secret}"

    @staticmethod
    def parse(text: str) -> JoinToken:
        """Parses a whole token, or HOST:PORT alone. Raises ValueError, which does not quote the secret."""
        if not text.startswith(f"{SCHEME}://"):
            split_address(text)
            return JoinToken(text)
        address, _, token = text.removeprefix(f"{SCHEME}://").partition("#")
        split_address(address)
        pin, secret = token[:PIN_CHARS], token[PIN_CHARS:]
        if not _PIN.fullmatch(pin):
            raise ValueError(
                f"the token after # is not whole: copy all of {FORM}, as `isthmus serve` printed it"
            )
        try:
            said = base64.b64decode(secret + "=" * (-len(secret) % 4), altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise ValueError(
                f"the token after # is damaged: copy all of {FORM}, as `isthmus serve` printed it"
            ) from None
        return JoinToken(address, pin, said)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def outward_host(host: str) -> str:
    """Returns `host`; for an unspecified address (0.0.0.0, ::) the one from which this machine reaches others, a
    guess if it has several."""
    try:
        version = ip_address(host).version if ip_address(host).is_unspecified else 0
    except ValueError:
        return host
    if not version:
        return host
    try:
        return _source_of(*_ELSEWHERE[version])
    except OSError:
        return socket.gethostname()


def reached_at(host: str | None, join: str, limit_s: float) -> str:
    """Returns where other nodes reach this one: `host`, else the address from which it reaches the head at `join`,
    whose name is awaited for `limit_s`. Raises ConfigError for a `host` at which nobody reaches it, StartError."""
    own = _own_host(join, limit_s)
    if host is None:
        return own
    try:
        found = [ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    instead = f"leave it out for {own}, from where the head is reached"
    if any(address.is_unspecified for address in found):
        raise ConfigError(
            f"--host: other nodes reach this one there, and nobody is reached at {host}; {instead}"
        )
    if any(address.is_loopback for address in found) and not is_loopback(own):
        raise ConfigError(f"--host: no other machine reaches this one at {host}, a loopback address; {instead}")
    return host


def _own_host(join: str, limit_s: float) -> str:
    host, port = split_address(join)
    until = time.monotonic() + limit_s
    while True:
        try:
            return _source_of(host, port)
        except OSError as error:
            if time.monotonic() >= until:
                raise StartError(f"cannot reach the head at {join}: {error.strerror or error}") from None
        time.sleep(RETRY_S)


def _source_of(host: str, port: int) -> str:
    """Returns this machine's address for packets to `host`, from the kernel, without sending any. Raises OSError."""
    failed: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                failed = error
                continue
            return str(probe.getsockname()[0])
    raise failed
