"""What a node needs to join a cluster: the token that says where the head is, whom to believe there and the cluster's
secret; and the address at which others reach this machine."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.core.errors import ConfigError, ProtocolError, StartError
from isthmus.core.types import NodeId
from isthmus.live.cluster.private import kept
from isthmus.live.messenger import Identity, Network, Session, split_address
from isthmus.live.messenger.credentials import NAME, SCHEME, bare_context, load_private
from isthmus.live.messenger.running import running_timeout
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import NoPayloads, disowned

PIN_CHARS = 44
"""Of an authority's key (`authority.pin_of`)."""
_PIN = re.compile(rf"[A-Za-z0-9_-]{{{PIN_CHARS}}}")
FORM = f"{SCHEME}://HOST:PORT#TOKEN"
RETRY_S = 0.5
_ELSEWHERE = {4: ("192.0.2.1", 9), 6: ("2001:db8::1", 9)}
"""Addresses of nobody (RFC 5737, 3849), by the version of IP."""


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


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def outward_host(host: str) -> str:
    """`host`, or in place of one that names every address of this machine the one from which it reaches others: a
    guess, where there are several."""
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
    """Where other nodes reach this one: at `host`, else at the address from which it reaches the head at `join`, for
    whose name it waits so long. Raises ConfigError for a `host` that leads nobody here, StartError."""
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
    """Nothing is sent: the kernel says which of this machine's addresses it would send from. Raises OSError."""
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


# Who is who in a cluster beyond loopback: the private authority of its head, and certificates that it signs.
#
# The authority is an ECDSA P-256 key. Whoever is to join knows that key from the join token, so that no certificate of
# somebody else is believed, whoever signed it. Private keys are made where they are used and never travel. A node asks
# for its certificate over a session on which nothing else is heard, and later again over the session that it then has:
#
# node, without a certificate                    head
# believes the key in its join token ── TLS ──>  shows a certificate of that key's, its own
# ── greeting ──   both know the cluster's token
# Enrol ──>     a request (PKCS 10): the node made the key and keeps it
# <── Enrolled      a certificate for `isthmus://CLUSTER/node/NAME`


CERTIFICATE_S = 24 * 3600.0
"""How long a certificate is good; after two thirds of that it is renewed."""
AUTHORITY_DAYS = 3650
SKEW_S = 3600.0
"""So far behind the head's clock the clock of another machine may be."""
MAX_REQUEST = 4096
"""Bytes of a certificate or of a request for one."""
KEY_FILE, TOKEN_FILE = "authority.key", "token"
"""What `tls.folder` keeps, so that a head that is started again has the same join token."""
_CURVE, _HASH = ec.SECP256R1(), hashes.SHA256()
_PEM = serialization.Encoding.PEM
UNREADABLE = (
    *(ValueError, UnsupportedAlgorithm, x509.InvalidVersion),
    *(x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""What `cryptography` raises for certificates and requests that make no sense, or sense to others only."""

Clock = Callable[[], float]
"""Seconds since 1970."""


class Authority:
    """Signs certificates of one cluster, for its head: who is believed to be which node, and who gets a certificate."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, clock: Clock = time.time) -> None:
        self._key, self.clock = key, clock
        self.pin = pin_of(key.public_key())
        self.cluster = hashlib.sha256(self.pin.encode()).hexdigest()[:16]
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"isthmus {self.cluster}")])
        made = (
            self._builder(self._name, key.public_key(), AUTHORITY_DAYS * 24 * 3600.0)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(key, _HASH)
        )
        self.certificate = made.public_bytes(_PEM)

    @staticmethod
    def made(clock: Clock = time.time) -> Authority:
        """A new one, for as long as this process lives."""
        return Authority(ec.generate_private_key(_CURVE), clock)

    @staticmethod
    def kept(folder: Path, clock: Clock = time.time) -> Authority:
        """The one whose key is in `folder`, which is made if need be. Raises ConfigError."""
        try:
            key = serialization.load_pem_private_key(
                kept(folder / KEY_FILE, lambda: _pem_of(ec.generate_private_key(_CURVE))), None
            )
        except ValueError:
            key = None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != _CURVE.name:
            raise ConfigError(
                f"tls.folder: {folder / KEY_FILE} holds no ECDSA P-256 key; remove it, and one is made"
            )
        return Authority(key, clock)

    def identity(self, node: NodeId | None) -> Identity:
        return Identity(self.cluster, node)

    def objection(self, identity: Identity | None, node: NodeId) -> str:
        """Why whoever is at the other end of a session is not `node`; empty when it is."""
        return (
            disowned(identity, node)
            if identity is not None
            else "it has no certificate yet: it must enrol first"
        )

    def enrolled(self, identity: Identity | None, asked: messages.Enrol) -> messages.Enrolled:
        """`identity`: of who asks; None before its first certificate, and no other name after. Raises ProtocolError."""
        if not NAME.fullmatch(asked.node):
            raise ProtocolError("a node's name is 1 to 253 letters, digits, '.', '_' and '-'")
        if wrong := disowned(identity, asked.node):
            raise ProtocolError(wrong)
        try:
            return messages.Enrolled(self.issue(asked.request, self.identity(asked.node)), self.certificate)
        except ValueError as error:
            raise ProtocolError(f"its request for a certificate: {error}") from None

    def issue(self, request: bytes, identity: Identity) -> bytes:
        """A certificate that whoever made `request` is `identity`. In PEM form. Raises ValueError."""
        if len(request) > MAX_REQUEST:
            raise ValueError("it is too long")
        try:
            asked = x509.load_der_x509_csr(request)
            key = asked.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != _CURVE.name:
                raise ValueError("its key is not of the curve P-256")
            if not asked.is_signature_valid:
                raise ValueError("it is not signed with its own key")
        except UNREADABLE as error:
            raise ValueError(str(error)) from None
        return self.sign(key, identity)

    def sign(self, key: ec.EllipticCurvePublicKey, identity: Identity) -> bytes:
        """A certificate that whoever has the private half of `key` is `identity`. In PEM form."""
        # The head never dials and a node does both, so a head's certificate is good for a server alone.
        usages = [ExtendedKeyUsageOID.SERVER_AUTH]
        if not identity.is_head:
            usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))])
        made = (
            self._builder(x509.Name([]), key, CERTIFICATE_S)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(names, critical=True)
            .sign(self._key, _HASH)
        )
        return made.public_bytes(_PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lifetime_s: float
    ) -> x509.CertificateBuilder:
        now = datetime.fromtimestamp(self.clock(), UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=SKEW_S))
            .not_valid_after(now + timedelta(seconds=lifetime_s))
        )


class Certified:
    """A private key with its certificate, and the contexts that show it. Raises OSError for what is no such pair.

    `guests`: who dials may show no certificate, for it has none yet.
    """

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, certificate: bytes, authority: bytes, *, guests: bool = False
    ) -> None:
        self._contexts = {}
        for server in (False, True):
            context = self._contexts[server] = bare_context(server=server)
            context.verify_mode = ssl.CERT_OPTIONAL if guests and server else ssl.CERT_REQUIRED
            load_private(context, certificate, _pem_of(key))
            context.load_verify_locations(cadata=authority.decode("ascii"))
        made = x509.load_pem_x509_certificate(certificate)
        begin, self.end = made.not_valid_before_utc.timestamp() + SKEW_S, made.not_valid_after_utc.timestamp()
        self.renew_at = begin + (self.end - begin) * 2 / 3

    def context(self, *, server: bool) -> ssl.SSLContext:
        return self._contexts[server]


class HeadCredentials:
    """The head's, renewed for the first connection after two thirds of their time."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self._certified = self._renewed()

    def context(self, *, server: bool) -> ssl.SSLContext:
        if self.authority.clock() >= self._certified.renew_at:
            self._certified = self._renewed()
        return self._certified.context(server=server)

    def identity(self, secured: ssl.SSLSocket) -> Identity | None:
        return None if secured.getpeercert(binary_form=True) is None else identity_of(secured)

    def _renewed(self) -> Certified:
        key = ec.generate_private_key(_CURVE)
        certificate = self.authority.sign(key.public_key(), self.authority.identity(None))
        return Certified(key, certificate, self.authority.certificate, guests=True)


class NodeCredentials:
    """A node's. Until it is enrolled it has no certificate, and speaks to a head alone whose certificate the authority
    of `pin` signed. Raises ValueError for a pin that `pin_of` did not make."""

    def __init__(self, pin: str, node: NodeId, clock: Clock = time.time) -> None:
        self._authority, self._node, self._clock = key_of(pin), node, clock
        self._asked: ec.EllipticCurvePrivateKey | None = None
        self._certified: Certified | None = None
        self._guest = bare_context(server=False)

    @property
    def is_enrolled(self) -> bool:
        return self._certified is not None

    @property
    def is_due(self) -> bool:
        """Whether the next certificate is to be asked for now: once, since a session loses no answer."""
        return self._certified is not None and self._asked is None and self._clock() >= self._certified.renew_at

    @property
    def left_s(self) -> float:
        """For how long its certificate is still good; 0 where it has none."""
        return max(0.0, self._certified.end - self._clock()) if self._certified is not None else 0.0

    def context(self, *, server: bool) -> ssl.SSLContext:
        if self._certified is not None:
            return self._certified.context(server=server)
        if server:
            raise ConnectionError(f"{self._node} has no certificate yet")
        return self._guest

    def identity(self, secured: ssl.SSLSocket) -> Identity | None:
        if self._certified is not None:
            return identity_of(secured)
        return self._head_of(secured.getpeercert(binary_form=True) or b"")

    def _head_of(self, shown: bytes) -> Identity:
        """Of a certificate of which OpenSSL has checked only that the peer has its key. Raises
        ConnectionRefusedError."""
        try:
            if len(shown) > MAX_REQUEST:
                raise ValueError("it is too long")
            certificate = x509.load_der_x509_certificate(shown)
            signed, algorithm = certificate.tbs_certificate_bytes, certificate.signature_hash_algorithm
            if algorithm is None:
                raise ValueError("it is not signed with ECDSA")
            self._authority.verify(certificate.signature, signed, ec.ECDSA(algorithm))
            now = datetime.fromtimestamp(self._clock(), UTC)
            if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
                raise ValueError(f"it has expired, or the clock of this machine, {now:%F %T} UTC, is wrong")
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            identity = Identity.parse(names.get_values_for_type(x509.UniformResourceIdentifier)[0])
            if identity.node is not None:
                raise ValueError(f"it is that of node {identity.node}")
        except InvalidSignature:
            raise ConnectionRefusedError(
                "its certificate is of another authority than the join token's"
            ) from None
        except (*UNREADABLE, IndexError, x509.ExtensionNotFound) as error:
            raise ConnectionRefusedError(f"its certificate is not a head's: {error}") from None
        return identity

    def request(self) -> bytes:
        """Asks for a certificate of a new key: a request (PKCS 10) in DER form."""
        self._asked = ec.generate_private_key(_CURVE)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus")])
        asked = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(self._asked, _HASH)
        return asked.public_bytes(serialization.Encoding.DER)

    def take(self, certificate: bytes, authority: bytes) -> None:
        """What the head answers to `request`: for all connections from now on. Raises ValueError for anything else."""
        if self._asked is None:
            raise ValueError("nobody asked for a certificate")
        if max(len(certificate), len(authority)) > MAX_REQUEST:
            raise ValueError("a certificate is not that long")
        if x509.load_pem_x509_certificate(authority).public_key() != self._authority:
            raise ValueError("it is of another authority than the join token's")
        try:
            self._certified = Certified(self._asked, certificate, authority)
        except OSError as error:
            raise ValueError(f"it is no certificate of the key that was asked for: {error}") from None
        self._asked = None

    async def enrol(self, network: Network, join: str, stage: int, timeout_s: float) -> None:
        """Gets a first certificate of the head at `join`. Raises OSError or TimeoutError when that is not reached,
        StartError when it says no."""
        asking = _Asking()
        async with running_timeout(timeout_s):
            session = await network.connect(
                join, messages.NodeBound, asking, timeout_s=timeout_s, connections=1
            )
            try:
                session.send(messages.Enrol(self._node, stage, self.request()))
                answer = await asking.answer
            finally:
                session.close()
        try:
            self.take(answer.certificate, answer.authority)
        except ValueError as error:
            raise StartError(f"what the head at {join} answered cannot be used: {error}") from None


class _Asking(NoPayloads):
    """A session over which a certificate is awaited."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[messages.Enrolled] = asyncio.get_running_loop().create_future()

    def on_message(self, session: Session, message: Any) -> None:
        if self.answer.done():
            return
        if isinstance(message, messages.Enrolled):
            self.answer.set_result(message)
        elif isinstance(message, messages.NodeRefused):
            self.answer.set_exception(StartError(f"the head turned this node away: {message.reason}"))
        else:
            raise ProtocolError(f"a {type(message).__name__} came in the place of a certificate")

    def on_close(self, session: Session, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionRefusedError(f"the head gave no certificate: {reason}"))


def identity_of(secured: ssl.SSLSocket) -> Identity:
    """Of a peer whose certificate OpenSSL has found good. Raises ConnectionRefusedError."""
    shown = secured.getpeercert() or {}
    names = [str(entry[1]) for entry in shown.get("subjectAltName", ()) if entry[0] == "URI"]
    try:
        if len(names) != 1:
            raise ValueError(f"it has {len(names)} names")
        return Identity.parse(names[0])
    except ValueError as error:
        raise ConnectionRefusedError(f"its certificate does not say who it is: {error}") from None


def pin_of(key: ec.EllipticCurvePublicKey) -> str:
    """An authority's key as it stands in a join token: 44 characters."""
    point = key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    return base64.urlsafe_b64encode(point).decode()


def key_of(pin: str) -> ec.EllipticCurvePublicKey:
    """Raises ValueError for what `pin_of` did not make."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, base64.urlsafe_b64decode(pin))
    except ValueError:
        raise ValueError("the token after # is damaged: it names no authority") from None


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def kept_token(folder: Path) -> str:
    """The cluster's token that is in `folder`, which is drawn if need be. Raises ConfigError."""
    data = kept(folder / TOKEN_FILE, lambda: secrets.token_hex(16).encode())
    token = data.decode("ascii", "replace").strip()
    if not token or "\ufffd" in token:  # an empty one is known to everybody
        raise ConfigError(f"tls.folder: {folder / TOKEN_FILE} is no token; remove it, and one is drawn")
    return token


def _usage(*, signs: bool) -> x509.KeyUsage:
    encryption = dict.fromkeys(("key_encipherment", "data_encipherment", "key_agreement"), False)
    others = dict.fromkeys(("content_commitment", "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **encryption, **others
    )
