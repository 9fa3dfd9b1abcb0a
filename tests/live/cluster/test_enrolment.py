"""Who gets into a cluster beyond loopback, and as whom: real sockets and TLS. Strangers are right in all but one
thing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from isthmus.core.conductor import Rules
from isthmus.core.cost import compile_cost
from isthmus.core.errors import StartError
from isthmus.core.types import NodeId, Role
from isthmus.live.cluster.authority import CERTIFICATE_S, Authority, HeadCredentials, NodeCredentials
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.engine.emulated import EmulatedEngine
from isthmus.live.messenger import Credentials, Greetings, Identity, TcpNetwork, TlsFiles, split_address
from isthmus.live.messenger.network import Listener, _Dialler
from isthmus.live.peers import messages
from tests.certificates import make_certificate
from tests.live.cluster.test_authority import Now, enrolled
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
    await server.wait_closed()


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


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
            await server.wait_closed()
            assert not there.heard


async def test_a_session_is_joined_by_its_owner_only() -> None:
    """Its name is no secret among nodes."""
    async with scene() as some:
        one = await some.dial(some.certified(A))
        server = some.head._server
        assert isinstance(server, Listener)
        [name] = server._ports
        for node in (B, A):
            other = _Dialler(
                *split_address(some.join), some.certified(node), one.session.terms, SECRET, within_s=LIMIT_S
            )
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
        await server.wait_closed()
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
    serial = wire._stream._sock.getpeercert()["serialNumber"]
    one.session.close()
    return serial
