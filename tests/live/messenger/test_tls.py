"""Certificates. Whoever is to be feared checks nothing: only what the other side checks holds it up."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
from pathlib import Path

import pytest

from isthmus.core.errors import ConfigError
from isthmus.live.messenger import Greetings, Identity, Session, TcpNetwork, TlsFiles
from tests.certificates import make_certificate

from .test_network import LIMIT_S, Message, Note, Owner, Parcel, closed, pattern, running, session

Files = dict[str, str]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """`ours` is right; of the others each is wrong in one way. `ours` of `same name` was signed by another key."""
    made = {}
    for name, subject, days in (
        ("ours", "ours", 30),
        ("another authority", "theirs", 30),
        ("same name", "ours", 30),
        ("expired", "ours", -1),
    ):
        made[name] = make_certificate(tmp_path_factory.mktemp("tls"), subject, days)
    # It is the right authority that signed what is expired, and everybody else trusts in ours.
    made["trusts the expired"] = made["ours"] | {"authority": made["expired"]["authority"]}
    return made


class Careless:
    """Takes whatever the other side shows."""

    def __init__(self, shown: Files | None, newest: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED) -> None:
        self._shown, self._newest = shown, newest

    def context(self, *, server: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = self._newest
        if self._shown is not None:
            context.load_cert_chain(self._shown["certificate"], self._shown["key"])
        return context

    def identity(self, secured: ssl.SSLSocket) -> Identity | None:
        return None


def network(files: Files, connections: int = 1) -> TcpNetwork:
    return TcpNetwork(connections, TlsFiles(**files))


WRONG = ["another authority", "same name", "expired"]


def trusting(tls: dict[str, Files], wrong: str) -> Files:
    """The files of the side that is careful: it would take this certificate but for the one thing."""
    return tls["trusts the expired" if wrong == "expired" else "ours"]


async def nothing_is_said(serving: TcpNetwork, dialling: TcpNetwork, error: type[OSError] = OSError) -> None:
    """The dialler fails, and the server hears no Hello."""
    there = Owner()
    server, port = await serving.listen("127.0.0.1", 0, Message, lambda: there)
    with pytest.raises(error):
        await dialling.connect(f"127.0.0.1:{port}", Message, Owner(), timeout_s=LIMIT_S)
    await closed(server)
    assert there.session is None and not server._ports


@pytest.mark.parametrize("wrong", [None, *WRONG])
@running
async def test_a_server_takes_nobody_with_a_wrong_certificate(wrong: str | None, tls: dict[str, Files]) -> None:
    shown = tls[wrong] if wrong else None
    await nothing_is_said(network(trusting(tls, wrong or "none")), TcpNetwork(credentials=Careless(shown)))


@pytest.mark.parametrize("wrong", WRONG)
@running
async def test_nobody_speaks_to_a_server_with_a_wrong_certificate(wrong: str, tls: dict[str, Files]) -> None:
    serving, dialling = TcpNetwork(credentials=Careless(tls[wrong])), network(trusting(tls, wrong))
    await nothing_is_said(serving, dialling, ssl.SSLCertVerificationError)


@pytest.mark.parametrize("side", ["dialling", "serving"])
@running
async def test_the_careless_are_taken_with_the_right_certificate(side: str, tls: dict[str, Files]) -> None:
    """So only the certificate turns the others away."""
    here, there = Owner(), Owner()
    networks = {side: network(tls["ours"]) for side in ("dialling", "serving")}
    networks[side] = TcpNetwork(credentials=Careless(tls["ours"]))
    server, port = await networks["serving"].listen("127.0.0.1", 0, Message, lambda: there)
    joined = await networks["dialling"].connect(f"127.0.0.1:{port}", Message, here, timeout_s=LIMIT_S)
    joined.send(Note("hello"))
    await there.until(lambda: there.messages)
    joined.close()
    await here.until(lambda: here.reasons)
    await there.until(lambda: there.reasons)
    await closed(server)


@pytest.mark.parametrize("old", ["dialling", "serving"])
@running
async def test_what_is_older_than_tls_1_3_is_refused_by_either_side(old: str, tls: dict[str, Files]) -> None:
    networks = {side: network(tls["ours"]) for side in ("dialling", "serving")}
    networks[old] = TcpNetwork(credentials=Careless(tls["ours"], ssl.TLSVersion.TLSv1_2))
    await nothing_is_said(**networks)


@pytest.mark.parametrize("plain", ["dialling", "serving"])
@running
async def test_there_is_no_way_round_tls(plain: str, tls: dict[str, Files]) -> None:
    networks = {side: network(tls["ours"]) for side in ("dialling", "serving")}
    await nothing_is_said(**(networks | {plain: TcpNetwork()}))


@pytest.mark.parametrize("secured", [True, False])
@running
async def test_who_says_nothing_is_not_waited_for(secured: bool, tls: dict[str, Files]) -> None:
    serving = TcpNetwork(credentials=TlsFiles(**tls["ours"]) if secured else None, greetings=Greetings(0.05))
    server, port = await serving.listen("127.0.0.1", 0, Message, Owner)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(LIMIT_S):
        assert await reader.read() == b""
    writer.close()
    await closed(server)


@running
async def test_the_same_over_tls(tls: dict[str, Files]) -> None:
    here, there = Owner(), Owner(lambda session, message: session.send(Note(str(type(message).__name__))))
    async with session(here, there, network=network(tls["ours"], 2)) as joined:
        payloads = [pattern(number, 3 << 20) for number in range(4)]
        for payload in payloads:
            view = memoryview(payload)
            joined.send(Parcel((1 << 20, 2 << 20)), view[:10], view[10:5000], view[5000:])
        joined.send(Note("small"))
        await there.until(lambda: len(there.messages) == 5)
        await here.until(lambda: len(here.messages) == 5)
        assert sorted(b"".join(pieces) for pieces in there.payloads) == sorted(payloads)


def test_tls_files_that_are_wrong_are_named(tls: dict[str, Files], tmp_path: Path) -> None:
    ours = tls["ours"]
    nothing, garbage = str(tmp_path / "nothing.pem"), tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    for wrong, named in (
        ({"certificate": nothing}, nothing),
        ({"certificate": str(garbage)}, str(garbage)),
        ({"key": tls["another authority"]["key"]}, ours["certificate"]),
        ({"authority": str(garbage)}, str(garbage)),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            TlsFiles(**(ours | wrong))


@running
async def test_files_that_change_are_read_again_while_sessions_go_on(
    tls: dict[str, Files], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate without its key is reported and does no harm."""
    files = {part: str(tmp_path / part) for part in tls["ours"]}

    def copy(name: str, *parts: str) -> None:
        for part in parts:
            shutil.copy(tls[name][part], tmp_path / "draft")
            (tmp_path / "draft").rename(files[part])

    copy("ours", *files)
    owners: list[Owner] = []

    def entering() -> Owner:
        owners.append(Owner())
        return owners[-1]

    server, port = await network(files).listen("127.0.0.1", 0, Message, entering)

    async def connect(name: str) -> Session:
        return await network(tls[name]).connect(f"127.0.0.1:{port}", Message, Owner(), timeout_s=LIMIT_S)

    first = await connect("ours")
    copy("another authority", "certificate")
    half = await connect("ours")
    assert "new connections go on with what was read before" in caplog.text
    copy("another authority", "key", "authority")
    with pytest.raises(OSError):
        await connect("ours")
    other = await connect("another authority")
    for each, there in zip((first, half, other), owners, strict=True):
        each.send(Note("still here"))
        await there.until(lambda there=there: there.messages)
        each.close()
        await there.until(lambda there=there: there.reasons)
    await closed(server)
