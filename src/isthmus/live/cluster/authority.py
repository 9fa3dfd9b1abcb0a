"""Certificates of a cluster beyond loopback: the head's private authority, which signs them, and credentials.

The authority is an ECDSA P-256 key. Nodes know its public key from the join token and believe no other certificates.
Private keys are made where they are used and never travel. A node requests its first certificate over a session that
serves for nothing else, later ones over its session with the head:

    node, without a certificate                    head
    believes the key in its join token ── TLS ──>  shows a certificate of that key's, its own
                                  ── greeting ──   both know the cluster's token
                                     Enrol ──>     a request (PKCS 10): the node made the key and keeps it
                                 <── Enrolled      a certificate for `isthmus://CLUSTER/node/NAME`
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.core.errors import ConfigError, ProtocolError, StartError
from isthmus.core.types import NodeId
from isthmus.live.cluster.private import kept
from isthmus.live.messenger import Identity, Network, Session
from isthmus.live.messenger.credentials import NAME, bare_context, load_private
from isthmus.live.messenger.running import running_timeout
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import NoPayloads, disowned

CERTIFICATE_S = 24 * 3600.0
"""Lifetime of a certificate, which is renewed after two thirds of it."""
AUTHORITY_DAYS = 3650
SKEW_S = 3600.0
"""How far another machine's clock may be behind the head's."""
MAX_REQUEST = 4096
"""Most bytes of a certificate or of a request for one."""
KEY_FILE, TOKEN_FILE = "authority.key", "token"
"""Files in `tls.folder`, with which a restarted head has the same join token."""
_CURVE, _HASH = ec.SECP256R1(), hashes.SHA256()
_PEM = serialization.Encoding.PEM
UNREADABLE = (
    *(ValueError, UnsupportedAlgorithm, x509.InvalidVersion),
    *(x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""Exceptions of `cryptography` for malformed or unsupported certificates and requests."""

Clock = Callable[[], float]
"""Seconds since 1970."""


class Authority:
    """The head's authority: signs certificates that name nodes, and checks identities."""

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
        """Returns a new authority, for the life of this process."""
        return Authority(ec.generate_private_key(_CURVE), clock)

    @staticmethod
    def kept(folder: Path, clock: Clock = time.time) -> Authority:
        """Returns the authority whose key is in `folder`, created if missing. Raises ConfigError."""
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
        """Returns why a peer with this identity is not `node`, "" if it is."""
        return (
            disowned(identity, node)
            if identity is not None
            else "it has no certificate yet: it must enrol first"
        )

    def enrolled(self, identity: Identity | None, asked: messages.Enrol) -> messages.Enrolled:
        """Answers a request of a peer with this identity (None before its first certificate). Raises ProtocolError
        for a name other than its own."""
        if not NAME.fullmatch(asked.node):
            raise ProtocolError("a node's name is 1 to 253 letters, digits, '.', '_' and '-'")
        if wrong := disowned(identity, asked.node):
            raise ProtocolError(wrong)
        try:
            return messages.Enrolled(self.issue(asked.request, self.identity(asked.node)), self.certificate)
        except ValueError as error:
            raise ProtocolError(f"its request for a certificate: {error}") from None

    def issue(self, request: bytes, identity: Identity) -> bytes:
        """Returns a certificate (PEM) of `identity` for the key in `request`. Raises ValueError."""
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
        """Returns a certificate (PEM) of `identity` for a public key."""
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
    """A private key with its certificate, and TLS contexts for them. Raises OSError if they do not match. `guests`:
    accepts clients without a certificate."""

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
    """The head's credentials, renewed with the first connection after they are due."""

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
    """A node's credentials. Before it is enrolled it has no certificate and trusts only a head whose certificate the
    authority of `pin` signed. Raises ValueError for an invalid pin."""

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
        """Whether the next certificate must be requested now. Requested once: a session loses no answer."""
        return self._certified is not None and self._asked is None and self._clock() >= self._certified.renew_at

    @property
    def left_s(self) -> float:
        """Remaining lifetime of the certificate, 0 without one."""
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
        """Checks the certificate of a head, of which OpenSSL has checked only that the peer has its key; returns its
        identity. Raises ConnectionRefusedError."""
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
        """Makes a new key; returns a request (PKCS 10, DER) for its certificate."""
        self._asked = ec.generate_private_key(_CURVE)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus")])
        asked = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(self._asked, _HASH)
        return asked.public_bytes(serialization.Encoding.DER)

    def take(self, certificate: bytes, authority: bytes) -> None:
        """Takes the head's answer to `request`, for all new connections. Raises ValueError for an invalid one."""
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
    """Returns the identity of a peer whose certificate OpenSSL has verified. Raises ConnectionRefusedError."""
    shown = secured.getpeercert() or {}
    names = [str(entry[1]) for entry in shown.get("subjectAltName", ()) if entry[0] == "URI"]
    try:
        if len(names) != 1:
            raise ValueError(f"it has {len(names)} names")
        return Identity.parse(names[0])
    except ValueError as error:
        raise ConnectionRefusedError(f"its certificate does not say who it is: {error}") from None


def pin_of(key: ec.EllipticCurvePublicKey) -> str:
    """Returns an authority's key as in a join token: 44 characters."""
    point = key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    return base64.urlsafe_b64encode(point).decode()


def key_of(pin: str) -> ec.EllipticCurvePublicKey:
    """Returns the key of a pin. Raises ValueError for an invalid one."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, base64.urlsafe_b64decode(pin))
    except ValueError:
        raise ValueError("the token after # is damaged: it names no authority") from None


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def kept_token(folder: Path) -> str:
    """Returns the cluster's token in `folder`, drawn if missing. Raises ConfigError."""
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
