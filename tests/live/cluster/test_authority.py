"""Certificates: what they say, who signs them, and when they are renewed."""

from __future__ import annotations

import ssl
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from isthmus.core.errors import ConfigError
from isthmus.core.types import NodeId
from isthmus.live.cluster.authority import (
    CERTIFICATE_S,
    KEY_FILE,
    SKEW_S,
    TOKEN_FILE,
    Authority,
    HeadCredentials,
    NodeCredentials,
    kept_token,
    key_of,
)
from isthmus.live.messenger import Identity

NODE = NodeId("decode-0")


class Now:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


def enrolled(authority: Authority, node: NodeId = NODE, clock: Now | None = None) -> NodeCredentials:
    credentials = NodeCredentials(authority.pin, node, clock or Now())
    take(credentials, authority, node)
    return credentials


def take(credentials: NodeCredentials, authority: Authority, node: NodeId = NODE) -> bytes:
    certificate = authority.issue(credentials.request(), authority.identity(node))
    credentials.take(certificate, authority.certificate)
    return certificate


@pytest.mark.parametrize("node", [None, NODE])
def test_a_certificate_says_who_it_is_and_until_when(node: NodeId | None) -> None:
    now = Now()
    authority, key = Authority.made(now), ec.generate_private_key(ec.SECP256R1())
    made = x509.load_pem_x509_certificate(authority.sign(key.public_key(), authority.identity(node)))
    made.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate))
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    [uri] = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uri == f"isthmus://{authority.cluster}/" + ("head" if node is None else "node/decode-0")
    assert Identity.parse(uri) == authority.identity(node)
    for end, seconds in ((made.not_valid_before_utc, -SKEW_S), (made.not_valid_after_utc, CERTIFICATE_S)):
        assert abs((end - datetime.fromtimestamp(now() + seconds, UTC)).total_seconds()) <= 1
    usages = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert (ExtendedKeyUsageOID.CLIENT_AUTH in usages) is (node is not None)
    basic = made.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not basic.ca


@pytest.mark.parametrize(
    "uri",
    [
        "isthmus://ours", "isthmus://ours/node/", "isthmus://ours/node/a/b", "isthmus://ours/header",
        "isthmus://ours/node/a?b", "isthmus:///head", "http://ours/head", "isthmus://ours/node/a\n",
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_refused(uri: str) -> None:
    with pytest.raises(ValueError):
        Identity.parse(uri)


def test_an_authority_that_is_kept_is_the_same_the_next_time(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    first, again, other = Authority.kept(folder), Authority.kept(folder), Authority.kept(tmp_path / "other")
    assert first.pin == again.pin and first.cluster == again.cluster and first.pin != other.pin
    assert len(first.pin) == 44
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / KEY_FILE).stat().st_mode) == 0o600
    token = kept_token(folder)
    assert kept_token(folder) == token != kept_token(tmp_path / "other") and len(token) == 32
    assert {path.name for path in folder.iterdir()} == {KEY_FILE, TOKEN_FILE}
    assert stat.S_IMODE((folder / TOKEN_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("wrong", ["readable", "garbage", "folder"])
def test_a_kept_key_that_cannot_be_used_is_named(wrong: str, tmp_path: Path) -> None:
    Authority.kept(tmp_path)
    path = tmp_path / KEY_FILE
    if wrong == "readable":
        path.chmod(0o640)
    elif wrong == "garbage":
        path.write_text("no key")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(ConfigError, match=f"tls.folder: {path}"):
        Authority.kept(tmp_path)


@pytest.mark.parametrize("kept", [b"", b" \n", b"\xff"])
def test_a_kept_token_that_is_none_is_named(kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / TOKEN_FILE
    path.touch(0o600)
    path.write_bytes(kept)
    with pytest.raises(ConfigError, match=f"{path} is no token"):
        kept_token(tmp_path)


def test_the_heads_certificate_is_another_after_two_thirds_of_its_time() -> None:
    now = Now()
    head = HeadCredentials(Authority.made(now))
    first = head.context(server=True)
    now.now += CERTIFICATE_S * 0.66
    assert head.context(server=True) is first
    now.now += CERTIFICATE_S * 0.01
    second = head.context(server=True)
    assert second is not first and head.context(server=True) is second


def test_a_node_asks_for_its_next_certificate_in_time() -> None:
    now = Now()
    authority = Authority.made(now)
    node = NodeCredentials(authority.pin, NODE, now)
    assert not node.is_due and not node.is_enrolled
    with pytest.raises(ConnectionError):
        node.context(server=True)
    take(node, authority)
    first = node.context(server=True)
    assert node.is_enrolled and not node.is_due and abs(node.left_s - CERTIFICATE_S) <= 1
    now.now += CERTIFICATE_S * 0.66
    assert not node.is_due
    now.now += CERTIFICATE_S * 0.01
    assert node.is_due
    request = node.request()
    now.now += CERTIFICATE_S / 4
    assert not node.is_due and node.context(server=True) is first, "it waits for the answer, however long"
    left_s = node.left_s
    node.take(authority.issue(request, authority.identity(NODE)), authority.certificate)
    assert not node.is_due and node.context(server=True) is not first and node.left_s > left_s
    now.now += 2 * CERTIFICATE_S
    assert node.left_s == 0


def test_a_node_takes_what_it_asked_for_only() -> None:
    authority, other = Authority.made(), Authority.made()
    node = NodeCredentials(authority.pin, NODE)
    with pytest.raises(ValueError, match="nobody asked"):
        node.take(b"", b"")
    request = node.request()
    right = authority.issue(request, authority.identity(NODE))
    elses = authority.sign(key_of(other.pin), authority.identity(NODE))
    for certificate, of, told in (
        (other.issue(request, other.identity(NODE)), other.certificate, "another authority"),
        (elses, authority.certificate, "no certificate of the key"),
        (right, b"x" * 5000, "not that long"),
        (right, b"garbage", "."),
        (b"garbage", authority.certificate, "no certificate of the key"),
    ):
        with pytest.raises(ValueError, match=told):
            node.take(certificate, of)
        assert not node.is_enrolled
    node.take(right, authority.certificate)
    assert node.is_enrolled


def test_what_is_no_request_is_refused_before_it_is_read() -> None:
    authority = Authority.made()
    request = NodeCredentials(authority.pin, NODE).request()
    damaged = request[:-1] + bytes([request[-1] ^ 1])
    for wrong, told in ((b"", "."), (b"x" * 4097, "too long"), (damaged, "not signed"), (request[:-1], ".")):
        with pytest.raises(ValueError, match=told):
            authority.issue(wrong, authority.identity(NODE))


EC_KEY, P_256, VERSION = "06072a8648ce3d0201", "06082a8648ce3d030107", "020100"


@pytest.mark.parametrize(
    ("part", "wrong"),
    [(EC_KEY, "06072a8648ce3d027f"), (P_256, "06082a8648ce3d03017f"), (VERSION, "020109")],
    ids=["key", "curve", "version"],
)
def test_a_request_in_terms_that_nobody_knows_is_refused_like_any_other(part: str, wrong: str) -> None:
    authority = Authority.made()
    request = NodeCredentials(authority.pin, NODE).request()
    asked = request.replace(bytes.fromhex(part), bytes.fromhex(wrong), 1)
    assert asked != request
    with pytest.raises(ValueError, match=r"\w"):
        authority.issue(asked, authority.identity(NODE))


def der(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def test_before_it_is_enrolled_a_node_believes_the_head_of_its_join_token_only() -> None:
    now = Now()
    authority, other = Authority.made(now), Authority.made(now)
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    node = NodeCredentials(authority.pin, NODE, now)
    head = der(authority.sign(key, authority.identity(None)))
    assert node._head_of(head) == authority.identity(None)
    for shown, told in (
        (der(other.sign(key, other.identity(None))), "of another authority"),
        (der(authority.sign(key, authority.identity(NODE))), "that of node decode-0"),
        (der(authority.certificate), "not a head's"),
        (head[:-1], "."),
        (b"", "."),
        (b"x" * 5000, "too long"),
        (head.replace(bytes.fromhex("2a8648ce3d040302"), bytes.fromhex("2a8648ce3d04037f")), "not a head's"),
    ):
        with pytest.raises(ConnectionRefusedError, match=told):
            node._head_of(shown)
    now.now += CERTIFICATE_S + 1
    with pytest.raises(ConnectionRefusedError, match="expired"):
        node._head_of(head)
