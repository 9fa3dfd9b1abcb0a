"""What a node on another machine needs to know to join: where the head is, whom to believe there, and the cluster's
secret."""

from __future__ import annotations

import base64
import binascii
import re

import msgspec

from isthmus.messenger import split_address
from isthmus.messenger.credentials import SCHEME

PIN_CHARS = 44
"""Of an authority's key (`authority.pin_of`)."""
_PIN = re.compile(rf"[A-Za-z0-9_-]{{{PIN_CHARS}}}")
FORM = f"{SCHEME}://HOST:PORT#TOKEN"


class JoinToken(msgspec.Struct, frozen=True):
    """`address`: the head's, `host:port`; `pin`: the key of the authority that signed its certificate, "" without TLS;
    `secret`: the cluster's token, "" where it is told otherwise."""

    address: str
    pin: str = ""
    secret: str = ""

    def __str__(self) -> str:
        secret = base64.urlsafe_b64encode(self.secret.encode()).decode().rstrip("=")
        return f"{SCHEME}://{self.address}#{self.pin}{secret}"

    @staticmethod
    def parse(text: str) -> JoinToken:
        """Of the whole line or of HOST:PORT alone. Raises ValueError, which does not quote the secret."""
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
