"""The certificate of HTTPS, read again when its files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from isthmus.core.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 5.0


class Certificate:
    """PEM files. Connections are opened with `context`, which is another one after new files came. Raises
    ConfigError."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = (certificate, key)
        self._seen = self._times()
        self.context = self._read()
        self._looked_s = 0.0

    def renew(self, now_s: float) -> None:
        """Takes new files, at most every `LOOK_S`. While what is there cannot be read the earlier one is shown."""
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            times = self._times()
            if times == self._seen:
                return
            self._seen = times
            self.context = self._read()
        except ConfigError as error:
            log.warning("the certificate of HTTPS stays the earlier one: %s", error)

    def _times(self) -> list[tuple[int, int]]:
        found = []
        for path in self._files:
            try:
                status = Path(path).stat()
            except OSError as error:
                raise ConfigError(f"https: {path} cannot be read: {error.strerror}") from None
            found.append((status.st_mtime_ns, status.st_ino))
        return found

    def _read(self) -> ssl.SSLContext:
        certificate, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(f"https: certificate {certificate} with key {key}: {_reason(error)}") from None
        return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is another certificate's"
        return "one of them has no certificate, or no key, in PEM form"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")
