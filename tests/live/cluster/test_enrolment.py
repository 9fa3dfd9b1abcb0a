"""Who gets into a cluster beyond loopback, and as whom: certificates, and strangers over real sockets and TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from isthmus.core.conductor import Rules
from isthmus.core.cost import compile_cost
from isthmus.core.errors import ConfigError, StartError
from isthmus.core.types import NodeId, Role
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
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.engine.emulated import EmulatedEngine
from isthmus.live.messenger import Credentials, Greetings, Identity, TcpNetwork, TlsFiles, split_address
from isthmus.live.messenger.network import Listener, _Dialler
from isthmus.live.peers import messages
from tests.certificates import make_certificate
from tests.live.cluster.test_trust import (
    CARD,
    CURVE,
    INTRODUCTION,
    LETTER,
    RECIPE,
    Someone,
    facts,
    hello,
    stage,
)

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


RENEWAL_S = 0.7 * CERTIFICATE_S
SECRET, LIMIT_S = b"secret", 60
A, B = NodeId("a"), NodeId("b")


def over(credentials: Credentials | None, secret: bytes = SECRET) -> TcpNetwork:
    return TcpNetwork(1, credentials, secret=secret, greetings=Greetings(LIMIT_S))


class Scene:
    """A head with an authority of its own, and those who dial it. Its clock may go on until certificates are renewed
    that the clock of OpenSSL, which nobody sets, still finds good."""

    def __init__(self) -> None:
        self.now = Now()
        self.now.now -= RENEWAL_S
        self.authority = Authority.made(self.now)
        network = over(HeadCredentials(self.authority))
        self.head = Head(
            Rules(), CARD, silence_s=LIMIT_S, rejoin_s=LIMIT_S, network=network, enrolment=self.authority
        )
        self.join = ""

    def certified(self, node: NodeId) -> NodeCredentials:
        return enrolled(self.authority, node, self.now)

    def guest(self, node: NodeId) -> NodeCredentials:
        return NodeCredentials(self.authority.pin, node, self.now)

    async def dial(self, credentials: Credentials, *said: Any, address: str = "", types: Any = None) -> Someone:
        one = Someone()
        one.session = await over(credentials).connect(
            address or self.join, types or messages.NodeBound, one, timeout_s=LIMIT_S
        )
        one.say(*said)
        return one

    @asynccontextmanager
    async def node(self, name: NodeId) -> AsyncIterator[tuple[NodeProcess, str]]:
        """One that has enrolled and joined, and where others reach it."""
        credentials = self.guest(name)
        engine = EmulatedEngine(RECIPE, compile_cost(CURVE), 64, max_length=1000)
        options = NodeOptions(facts(name, Role.DECODE), self.join, transfer_s=LIMIT_S)
        process = NodeProcess(engine, options, Runtime(over(credentials), credentials=credentials))
        running = asyncio.create_task(process.run())
        await self.head.wait_for([name])
        try:
            yield process, self.head._members[name].hello.address
        finally:
            self.head._members[name].session.send(messages.Stop())
            await running
            assert process._head is not None
            process._head.close()
            await until(lambda: not self.head.nodes())


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    made.join = await made.head.open("127.0.0.1", 0)
    async with asyncio.timeout(LIMIT_S):
        yield made
    await made.head.close()
    server = made.head._server
    assert isinstance(server, Listener)
    await greeted(server)


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


async def greeted(server: Listener) -> None:
    """No greeting is under way any more."""
    await until(lambda: not server._tasks)


# The head.


async def test_who_has_the_join_token_gets_a_certificate_and_joins_under_its_name() -> None:
    async with scene() as some:
        credentials = some.guest(A)
        await credentials.enrol(over(credentials), some.join, 0, LIMIT_S)
        one = await some.dial(credentials, hello("a", Role.MIXED))
        await until(lambda: one.of(messages.NodeWelcome))
        assert one.session.identity == some.authority.identity(None)
        assert some.head._members[A].session.identity == Identity(some.authority.cluster, A)
        one.session.close()
        await until(lambda: one.reasons)


WRONG: dict[str, tuple[NodeId | None, Any, str]] = {
    "no certificate": (None, hello("a", Role.MIXED), "it must enrol first"),
    "stage without certificate": (None, stage(1), "it must enrol first"),
    "another node's": (B, hello("a", Role.MIXED), "node/b, not that of a"),
    "another group's": (A, stage(1), "node/a, not that of g"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_node_is_who_its_certificate_says(wrong: str) -> None:
    node, said, told = WRONG[wrong]
    async with scene() as some:
        stranger = await some.dial(some.guest(A) if node is None else some.certified(node), said)
        await until(lambda: stranger.reasons)
        assert told in stranger.of(messages.NodeRefused)[0].reason
        assert not some.head.nodes() and not list(some.head._groups.followers())


@pytest.mark.parametrize("said", [messages.Heartbeat({}), messages.Directions(0, b""), "Outputs"], ids=str)
async def test_without_a_certificate_nothing_but_a_request_for_one_is_heard(said: Any) -> None:
    async with scene() as some:
        stranger = await some.dial(some.guest(A), messages.Outputs(()) if said == "Outputs" else said)
        await until(lambda: stranger.reasons)
        assert not stranger.heard and "before Hello" in stranger.reasons[0]


async def test_a_name_that_is_here_is_given_to_nobody_else() -> None:
    async with scene() as some:
        async with some.node(A):
            second = some.guest(A)
            with pytest.raises(StartError, match="a node named a is here already"):
                await second.enrol(over(second), some.join, 0, LIMIT_S)
            assert not second.is_enrolled
        await second.enrol(over(second), some.join, 0, LIMIT_S)
        assert second.is_enrolled


@pytest.mark.parametrize("name", ["", "a/b", "../head", "a" * 254, "a\n"])
async def test_a_name_that_could_be_read_as_another_is_not_certified(name: str) -> None:
    async with scene() as some:
        asking = some.guest(NodeId(name))
        with pytest.raises(ConnectionRefusedError, match="a node's name is"):
            await asking.enrol(over(asking), some.join, 0, LIMIT_S)


async def test_a_session_without_a_certificate_ends_with_the_certificate() -> None:
    async with scene() as some:
        asking = some.guest(A)
        one = await some.dial(asking, messages.Enrol(A, 0, asking.request()))
        await until(lambda: one.reasons)
        assert len(one.of(messages.Enrolled)) == len(one.heard) == 1


async def test_a_node_gets_certificates_of_its_own_name_only() -> None:
    async with scene() as some:
        known = some.certified(A)
        one = await some.dial(known, messages.Enrol(B, 0, some.guest(B).request()))
        await until(lambda: one.reasons)
        assert "node/a, not that of b" in one.reasons[0] and not one.heard


async def test_an_impostor_of_the_head_gets_neither_a_request_nor_a_proof() -> None:
    """Its certificate is good in all but that it is a node's, or another authority's."""
    async with scene() as some:
        there = Someone()
        for credentials in (some.certified(B), HeadCredentials(Authority.made())):
            server, port = await over(credentials).listen("127.0.0.1", 0, messages.HeadBound, lambda: there)
            guest = some.guest(A)
            with pytest.raises(ConnectionRefusedError):
                await guest.enrol(over(guest), f"127.0.0.1:{port}", 0, LIMIT_S)
            if isinstance(credentials, NodeCredentials):
                credentials = some.certified(A)
                options = NodeOptions(facts("a", Role.DECODE), f"127.0.0.1:{port}", transfer_s=LIMIT_S)
                engine = EmulatedEngine(RECIPE, compile_cost(CURVE), 64, max_length=1000)
                node = NodeProcess(engine, options, Runtime(over(credentials), credentials=credentials))
                with pytest.raises(StartError, match="node/b, not that of the head"):
                    await node.run()
            server.close()
            await greeted(server)
            assert not there.heard


async def test_a_session_is_joined_by_its_owner_only() -> None:
    """Its name is no secret among nodes."""
    async with scene() as some:
        one = await some.dial(some.certified(A))
        server = some.head._server
        assert isinstance(server, Listener)
        [name] = server._ports
        for node in (B, A):
            network = TcpNetwork(credentials=some.certified(node), secret=SECRET)
            other = _Dialler(network, *split_address(some.join))
            other._name, other._identity = name, some.authority.identity(None)
            if node == B:
                with pytest.raises(ConnectionRefusedError, match="somebody else's"):
                    await other.dial(1)
            else:
                stream, _ = await other.dial(1)
                stream.close()
        one.session.close()
        await until(lambda: one.reasons)


# All ports.


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(**make_certificate(tmp_path_factory.mktemp("tls"), "theirs"))


STRANGERS = ["no certificate", "another authority", "operator's files", "expired", "plain", "noise", "head's"]


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("port", ["head's", "node's"])
async def test_strangers_are_turned_away_before_anything_is_decoded(
    stranger: str, port: str, foreign: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secret is known to all of them; `guess` does not know it where a head takes guests."""
    async with scene() as some:
        sessions: list[Any] = []
        monkeypatch.setattr("isthmus.live.messenger.network.Session", lambda *given: sessions.append(given))
        serving: Credentials = HeadCredentials(some.authority) if port == "head's" else some.certified(B)
        server, number = await over(serving).listen("127.0.0.1", 0, messages.HeadBound, Someone)
        old = Now()
        old.now -= 2 * CERTIFICATE_S
        shown: dict[str, Credentials | None] = {
            "no certificate": _Bold(some.guest(A)),
            "another authority": _Bold(enrolled(Authority.made(), A)),
            "operator's files": _Bold(foreign),
            "expired": _Bold(enrolled(Authority(some.authority._key, old), A, old)),
            "head's": _Bold(HeadCredentials(some.authority)),
            "plain": None,
        }
        if stranger == "noise":
            with socket.create_connection(("127.0.0.1", number)) as raw:
                raw.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(raw, b"\x16\x03\x01\x02\x00" + bytes(range(256)) * 2)
                with pytest.raises((ConnectionError, EOFError)):
                    while await loop.sock_recv(raw, 4096):
                        pass
                    raise EOFError
        else:
            secret = b"guessed" if (stranger, port) == ("no certificate", "head's") else SECRET
            with pytest.raises(OSError):
                await over(shown[stranger], secret).connect(
                    f"127.0.0.1:{number}", messages.NodeBound, Someone(), timeout_s=LIMIT_S
                )
        server.close()
        await greeted(server)
        assert not sessions


class _Bold:
    """Shows the certificate of `own` and takes whatever the other side shows."""

    def __init__(self, own: Credentials) -> None:
        self._own = own

    def context(self, *, server: bool) -> Any:
        import ssl

        context = self._own.context(server=server)
        context.verify_mode = ssl.CERT_NONE
        return context

    def identity(self, secured: Any) -> Identity | None:
        return None


# Nodes.


@pytest.mark.parametrize("node", [NodeId("p"), A])
async def test_a_node_hears_those_that_are_whom_they_say_to_be(node: NodeId) -> None:
    async with scene() as some, some.node(B) as (process, address):
        heard = list[Any]()
        process.mover._told = heard.append
        one = await some.dial(
            some.certified(node), INTRODUCTION, LETTER, address=address, types=messages.PeerMessage
        )
        await until(lambda: one.reasons or heard)
        assert bool(heard) is (node == INTRODUCTION.node) is not bool(one.reasons)
        one.session.close()
        await until(lambda: one.reasons)


async def test_a_certificate_is_renewed_while_its_sessions_go_on() -> None:
    async with scene() as some, some.node(A) as (process, address):
        session, credentials = process._head, process._credentials
        assert session is not None and credentials is not None
        before = serial_of(await some.dial(some.certified(B), address=address, types=messages.PeerMessage))
        first = credentials.context(server=True)
        some.now.now += RENEWAL_S
        await until(lambda: credentials.context(server=True) is not first)
        again = await some.dial(some.certified(B), address=address, types=messages.PeerMessage)
        assert process.gauges()["tls_certificate_seconds"] > CERTIFICATE_S - 60
        assert process._head is session and not session.closed and some.head.nodes()
        assert before != serial_of(again)


def serial_of(one: Someone) -> Any:
    """Of the certificate that the other side showed; the session is ended."""
    [wire] = one.session._port._wires.values()  # type: ignore[attr-defined]
    serial = wire.stream._sock.getpeercert()["serialNumber"]
    one.session.close()
    return serial
