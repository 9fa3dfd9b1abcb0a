"""Sessions that a node opens, and over which network; what a session without payloads answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from isthmus.cluster.messages import PeerHello, PeerMessage, Probe
from isthmus.cluster.sessions import NoPayloads, Peers, network_of
from isthmus.config import load_config
from isthmus.errors import ConfigError, ProtocolError
from isthmus.messenger import Identity, MemoryNetwork, Session, TcpNetwork, TlsFiles
from isthmus.types import NodeId
from tests.certificates import make_certificate
from tests.cluster.fault_peers import LAYOUT

THERE = NodeId("there")
HELLO = PeerHello(6, NodeId("here"), "revision", LAYOUT)


class Ear(NoPayloads):
    """Hears what is said."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.reasons: list[str] = []

    def on_message(self, session: Session, message: Any) -> None:
        self.heard.append(message)

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)


class Counted(MemoryNetwork):
    """Counts who connects, which takes a turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    async def connect(self, address: str, *arguments: Any, **more: Any) -> Session:
        self.addresses.append(address)
        await asyncio.sleep(0)
        return await super().connect(address, *arguments, **more)


def test_there_is_one_session_with_each_address_and_it_begins_with_who_this_is() -> None:
    async def work() -> None:
        network, far = Counted(), Ear()
        peers = Peers(network, HELLO, Ear, lambda _: THERE)
        await network.listen("there", 1, PeerMessage, lambda: far)
        await network.listen("there", 2, PeerMessage, Ear)
        assert peers.open_to("there:1") is None
        one, same, other = await asyncio.gather(*[peers.get(f"there:{port}") for port in (1, 1, 2)])
        assert one is same and other is not one
        assert network.addresses == ["there:1", "there:2"]
        assert await peers.get("there:1") is one is peers.open_to("there:1")
        one.send(Probe())
        while len(far.heard) < 2:
            await asyncio.sleep(0)
        assert far.heard == [HELLO, Probe()]

    asyncio.run(work())


def test_a_session_that_ended_or_could_not_be_opened_is_opened_again() -> None:
    async def work() -> None:
        network = Counted()
        peers = Peers(network, HELLO, Ear, lambda _: THERE)
        for _ in range(2):
            with pytest.raises(OSError):
                await peers.get("there:1")
        await network.listen("there", 1, PeerMessage, Ear)
        one = await peers.get("there:1")
        one.close()
        assert peers.open_to("there:1") is None
        assert await peers.get("there:1") is not one
        assert len(network.addresses) == 4

    asyncio.run(work())


def test_who_gives_up_waiting_for_a_session_leaves_it_to_the_others() -> None:
    async def work() -> None:
        network = Counted()
        peers = Peers(network, HELLO, Ear, lambda _: THERE)
        await network.listen("there", 1, PeerMessage, Ear)
        waiting = [asyncio.ensure_future(peers.get("there:1")) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        assert not (await waiting[1]).closed and network.addresses == ["there:1"]

    asyncio.run(work())


@pytest.mark.parametrize(
    "identity", [Identity("ours", "there"), Identity("ours", "other"), Identity("ours")], ids=str
)
def test_a_session_is_with_whom_it_is_meant_to_be_with(identity: Identity) -> None:
    class Named(MemoryNetwork):
        async def connect(self, *arguments: Any, **more: Any) -> Session:
            session = await super().connect(*arguments, **more)
            session.identity = identity
            return session

    async def work() -> None:
        network, far = Named(), Ear()
        await network.listen("there", 1, PeerMessage, lambda: far)
        peers = Peers(network, HELLO, Ear, lambda _: THERE)
        if identity.node == THERE:
            assert not (await peers.get("there:1")).closed
            return
        with pytest.raises(ConnectionRefusedError, match=str(identity)):
            await peers.get("there:1")
        while not far.reasons:
            await asyncio.sleep(0)
        assert not far.heard and peers.open_to("there:1") is None

    asyncio.run(work())


def test_nobody_sends_payloads_where_none_belong() -> None:
    async def work() -> None:
        network, far, here = MemoryNetwork(), Ear(), Ear()
        await network.listen("there", 1, PeerMessage, lambda: far)
        session = await network.connect("there:1", PeerMessage, here, timeout_s=1)
        session.send(Probe(), memoryview(b"smuggled"))
        while not far.reasons:
            await asyncio.sleep(0)
        assert "a Probe from" in far.reasons[0] and "carried 8 bytes" in far.reasons[0]
        with pytest.raises(ProtocolError):
            far.place(session, Probe(), 8)

    asyncio.run(work())


# Networks.


def test_tls_is_configured_whole_or_not_at_all(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "ours")
    given = {f"tls.{part}": path for part, path in files.items()}
    network = network_of(load_config(None, given), "secret")
    assert isinstance(network._credentials, TlsFiles)
    plain = network_of(load_config(None, {}), "secret")
    assert plain._credentials is None
    for part in given:
        with pytest.raises(ConfigError, match="all three or none"):
            load_config(None, {name: path for name, path in given.items() if name != part})
    for beside in ({"tls.folder": "here"}, {"tls.mode": "none"}):
        with pytest.raises(ConfigError, match="tls: "):
            load_config(None, given | beside)


def test_a_network_is_as_configured() -> None:
    config = load_config(None, {"network.connections": 3, "network.resume_s": 1.5})
    network = network_of(config, "secret")
    assert isinstance(network, TcpNetwork)
    assert (network._connections, network._terms.resume_s) == (3, 1.5)
