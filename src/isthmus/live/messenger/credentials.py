"""TLS credentials: the certificate that a process shows, and the certificates that it accepts.

Each connection asks for a context anew, so that certificates may be exchanged while sessions go on.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import tempfile
from pathlib import Path
from typing import Protocol

import msgspec

from isthmus.core.errors import ConfigError

log = logging.getLogger(__name__)

SCHEME = "isthmus"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""Name of a cluster, or of a node in a certificate."""
_URI = re.compile(rf"{SCHEME}://({NAME.pattern})/(?:(head)|node/({NAME.pattern}))")


class Identity(msgspec.Struct, frozen=True):
    """Owner of a certificate, which carries it as a URI: the head of a cluster, or the node `node`."""

    cluster: str
    node: str | None = None

    @property
    def is_head(self) -> bool:
        return self.node is None

    def __str__(self) -> str:
        return f"{SCHEME}://{self.cluster}/{'head' if self.is_head else f'node/{self.node}'}"

    @staticmethod
    def parse(uri: str) -> Identity:
        """Raises ValueError."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise ValueError(f"{uri[:300]!r} names neither a head nor a node")
        return Identity(match[1], match[3])


class Credentials(Protocol):
    def context(self, *, server: bool) -> ssl.SSLContext:
        """Returns the context for the next connection that is accepted (`server`) or dialled. Raises OSError when
        there is none yet."""

    def identity(self, secured: ssl.SSLSocket) -> Identity | None:
        """Returns the peer's identity, after the handshake; None where certificates name nobody, or the peer showed
        none and need not. Raises ConnectionRefusedError for a peer that must not be spoken to."""


class TlsFiles:
    """PEM files that the operator gives. Either side accepts any certificate that the cluster's own `authority`
    signed, whatever its name, so the authority must sign nothing else.

    Changed files are read again for the next connection. Raises ConfigError for a missing or invalid file; after the
    start such a change is logged, and the files read before stay in use.
    """

    def __init__(self, certificate: str, key: str, authority: str) -> None:
        self._certificate, self._key, self._authority = certificate, key, authority
        self._stamp = self._stamped()
        self._contexts = self._read()

    def context(self, *, server: bool) -> ssl.SSLContext:
        stamp = self._stamped()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._contexts = self._read()
            except ConfigError as error:
                log.error("%s; new connections go on with what was read before", error)
            else:
                log.info("TLS files %s, %s, %s: read again", self._certificate, self._key, self._authority)
        return self._contexts[server]

    def identity(self, secured: ssl.SSLSocket) -> Identity | None:
        return None

    def _stamped(self) -> tuple[object, ...]:
        found: list[object] = []
        for path in (self._certificate, self._key, self._authority):
            try:
                state = os.stat(path)
            except OSError:
                found.append(None)
            else:
                found.append((state.st_ino, state.st_mtime_ns, state.st_size))
        return tuple(found)

    def _read(self) -> dict[bool, ssl.SSLContext]:
        for path in (self._certificate, self._key, self._authority):
            if not Path(path).is_file():
                raise ConfigError(f"TLS file {path} does not exist")
        contexts = {}
        for server in (False, True):
            context = contexts[server] = bare_context(server=server)
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_cert_chain(self._certificate, self._key)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"TLS certificate {self._certificate} with key {self._key}: {error}"
                ) from None
            try:
                context.load_verify_locations(self._authority)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"TLS authority {self._authority}: {error}") from None
        return contexts


def bare_context(*, server: bool) -> ssl.SSLContext:
    """Returns a context for TLS 1.3 without a certificate, that accepts every peer. Sessions are never resumed: each
    connection shows its certificate anew."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if server:
        context.num_tickets = 0
    return context


def load_private(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Does `load_cert_chain` from memory, which Python cannot. The key is on no disk where the system has anonymous
    files, else for a moment in a folder that only this user can read."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("key")
        try:
            os.write(file, certificate + key)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key.pem")
        path.write_bytes(certificate + key)
        context.load_cert_chain(path)
