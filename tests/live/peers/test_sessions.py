"""Sessions that a node opens, and over which network; what a session without payloads answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.config import load_config
from isthmus.core.errors import ConfigError, ProtocolError
from isthmus.core.node.letters import HandoverGranted
from isthmus.core.types import NodeId, RequestId
from isthmus.live.messenger import Identity, Session, TcpNetwork, TlsFiles
from isthmus.live.peers.messages import PeerHello, PeerMessage, Probe
from isthmus.live.peers.sessions import NoPayloads, Peers, network_of
from tests.certificates import make_certificate
from tests.live.kv.world import LAYOUT
from tests.memory_network import MemoryNetwork

HERE, THERE = NodeId("here"), NodeId("there")
HELLO = PeerHello(6, HERE, "revision", LAYOUT)
KEYS = [RequestId(f"r#{number}") for number in range(6)]


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
    """Counts who connects, which takes a turn of the loop, and longer to an address that is `held`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_dials = 0
        self.held: set[str] = set()
        self.go_on = asyncio.Event()

    async def connect(self, address: str, *arguments: Any, **more: Any) -> Session:
        self.num_dials += 1
        await asyncio.sleep(0)
        if address in self.held:
            await self.go_on.wait()
        return await super().connect(address, *arguments, **more)


class End(Ear):
    """One node and its sessions: what it heard from whom, and who was gone."""

    def __init__(self, network: MemoryNetwork, name: NodeId) -> None:
        super().__init__()
        self.said: list[tuple[NodeId, Any]] = []
        self.hello = PeerHello(6, name, "revision", LAYOUT)
        self.addresses = {node: f"{node}:1" for node in (HERE, THERE)}
        self.peers = Peers(network, self.hello, lambda: self, self.addresses.__getitem__, self._gone)
        self.network = network

    async def listen(self) -> None:
        await self.network.listen(self.hello.node, 1, PeerMessage, lambda: self)

    def _gone(self, node: NodeId, reason: str) -> None:
        self.said.append((node, "gone"))
        self.reasons.append(reason)

    def on_message(self, session: Session, message: Any) -> None:
        if isinstance(message, PeerHello):
            self.peers.entered(session, message)
        elif (node := self.peers.node_of(session)) is not None:
            self.said.append((node, message))

    def on_close(self, session: Session, reason: str) -> None:
        self.peers.ended(session, reason)

    def say(self, node: NodeId, *keys: RequestId) -> None:
        for key in keys:
            self.peers.say(node, HandoverGranted(key))

    async def hears(self, *said: Any) -> None:
        async with asyncio.timeout(30):
            while len(self.said) < len(said):
                await asyncio.sleep(0)
        assert [what.key if isinstance(what, HandoverGranted) else what for _, what in self.said] == [*said]


async def ends() -> tuple[End, End, Counted]:
    """Two nodes, neither of which has a session with the other yet."""
    network = Counted()
    here, there = End(network, HERE), End(network, THERE)
    await here.listen()
    await there.listen()
    return here, there, network


async def test_there_is_one_session_with_each_node_and_it_begins_with_who_this_is() -> None:
    network, far = Counted(), Ear()
    peers = Peers(network, HELLO, Ear, {THERE: "there:1", NodeId("far"): "there:2"}.__getitem__, print)
    await network.listen("there", 1, PeerMessage, lambda: far)
    await network.listen("there", 2, PeerMessage, Ear)
    assert peers.open_to(THERE) is None
    one, same, other = await asyncio.gather(*[peers.get(node) for node in (THERE, THERE, NodeId("far"))])
    assert one is same and other is not one and network.num_dials == 2
    assert await peers.get(THERE) is one is peers.open_to(THERE)
    assert peers.node_of(one) == THERE
    one.send(Probe())
    while len(far.heard) < 2:
        await asyncio.sleep(0)
    assert far.heard == [HELLO, Probe()]


async def test_whoever_opened_a_session_both_use_it() -> None:
    here, there, network = await ends()
    here.say(THERE, *KEYS[:2])
    await there.hears(*KEYS[:2])
    there.say(HERE, KEYS[2])
    await here.hears(KEYS[2])
    assert network.num_dials == 1 and await there.peers.get(HERE) is there.peers.open_to(HERE)
    own = await there.peers.dialled(HERE)
    assert own is not there.peers.open_to(HERE), "over which alone it may open lines"
    assert await there.peers.dialled(HERE) is own
    there.say(HERE, KEYS[3])
    await here.hears(*KEYS[2:4])
    assert there.peers.open_to(HERE) is not own and here.peers.open_to(THERE) is await here.peers.dialled(THERE)


@pytest.mark.parametrize("held", [(), ("here:1",), ("there:1",), ("here:1", "there:1")], ids=str)
async def test_letters_keep_their_order_whoever_is_being_dialled(held: tuple[str, ...]) -> None:
    here, there, network = await ends()
    network.held |= {*held}
    here.say(THERE, *KEYS[:2])
    there.say(HERE, *KEYS[:2])
    for number in range(2, 6):
        await asyncio.sleep(0)
        here.say(THERE, KEYS[number])
        there.say(HERE, KEYS[number])
        if number == 4:
            network.go_on.set()
    await here.hears(*KEYS)
    await there.hears(*KEYS)
    assert network.num_dials == 2


async def test_whoever_waits_for_a_session_gets_the_one_over_which_letters_go() -> None:
    """Over another one it could overtake them."""
    here, there, network = await ends()
    network.held.add("there:1")
    waits = asyncio.ensure_future(here.peers.get(THERE))
    await asyncio.sleep(0)
    there.say(HERE, KEYS[0])
    await here.hears(KEYS[0])
    network.go_on.set()
    assert await waits is here.peers.open_to(THERE) is not await here.peers.dialled(THERE)


@pytest.mark.parametrize("entered", [False, True])
async def test_a_node_that_is_dialled_in_vain_is_gone_unless_it_came_itself(entered: bool) -> None:
    here, there, network = await ends()
    network.held.add("nowhere:1")
    address, here.addresses[THERE] = here.addresses[THERE], "nowhere:1"
    here.say(THERE, *KEYS[:2])
    dialled = asyncio.ensure_future(here.peers.get(THERE))
    await asyncio.sleep(0)
    if entered:
        await there.peers.get(HERE)
        await there.hears(*KEYS[:2])
    network.go_on.set()
    if entered:
        assert await dialled is here.peers.open_to(THERE)
    else:
        with pytest.raises(ConnectionError):
            await dialled
    here.addresses[THERE] = address
    here.say(THERE, KEYS[2])
    await there.hears(*(KEYS[:3] if entered else KEYS[2:3]))
    assert here.said == ([] if entered else [(THERE, "gone")])


@pytest.mark.parametrize("how", [Session.close, lambda session: session.abort("cut")], ids=["closed", "cut"])
async def test_what_is_said_after_a_session_ended_is_said_over_another(how: Callable[[Session], None]) -> None:
    here, there, network = await ends()
    here.say(THERE, KEYS[0])
    await there.hears(KEYS[0])
    session = here.peers.open_to(THERE)
    assert session is not None
    how(session)
    here.say(THERE, KEYS[1])
    assert here.said == [(THERE, "gone")], "before it is said"
    await there.hears(KEYS[0], "gone", KEYS[1])
    while not session.ended:
        await asyncio.sleep(0)
    assert here.said == [(THERE, "gone")] and network.num_dials == 2


async def test_all_sessions_with_a_node_end_together() -> None:
    here, there, _ = await ends()
    here.say(THERE, KEYS[0])
    await there.hears(KEYS[0])
    lines = await there.peers.dialled(HERE)
    while here.peers.node_of(lines) is None and len(here.peers._names) < 2:
        await asyncio.sleep(0)
    other = here.peers.open_to(THERE)
    assert there.peers.open_to(HERE) is not lines and other is not None
    lines.abort("cut")
    while here.peers.open_to(THERE) is not None or there.peers.open_to(HERE) is not None:
        await asyncio.sleep(0)
    assert here.said == [(THERE, "gone")] and there.said[1:] == [(HERE, "gone")]
    assert not here.peers._names and not there.peers._names
    assert other.closed


async def test_a_node_that_left_is_spoken_to_over_another_session() -> None:
    here, there, network = await ends()
    here.say(THERE, KEYS[0])
    await there.hears(KEYS[0])
    here.peers.left(NodeId("nobody"))
    here.peers.left(THERE)
    assert (here.said, here.reasons) == ([(THERE, "gone")], ["it left the cluster"])
    here.say(THERE, KEYS[1])
    await there.hears(KEYS[0], "gone", KEYS[1])
    assert network.num_dials == 2


async def test_a_node_at_no_address_is_gone() -> None:
    gone: list[NodeId] = []
    peers = Peers(TcpNetwork(), HELLO, Ear, lambda node: "nonsense", lambda node, reason: gone.append(node))
    peers.say(THERE, HandoverGranted(KEYS[0]))
    with pytest.raises(ConnectionError, match="'nonsense' is not HOST:PORT"):
        await peers.get(THERE)
    assert gone == [THERE]


async def test_over_sessions_of_later_stages_nothing_is_said() -> None:
    here, there, network = await ends()
    stage = await MemoryNetwork.connect(network, "here:1", PeerMessage, there, timeout_s=9)
    stage.send(replace(there.hello, stage=1))
    while not here.peers._names:
        await asyncio.sleep(0)
    here.say(THERE, KEYS[0])
    await there.hears(KEYS[0])
    assert network.num_dials == 1
    stage.close()
    await here.hears("gone")


async def test_who_gives_up_waiting_for_a_session_leaves_it_to_the_others() -> None:
    here, _, network = await ends()
    waiting = [asyncio.ensure_future(here.peers.get(THERE)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert not (await waiting[1]).closed and network.num_dials == 1


@pytest.mark.parametrize(
    "identity", [Identity("ours", "there"), Identity("ours", "other"), Identity("ours")], ids=str
)
async def test_a_session_is_with_whom_it_is_meant_to_be_with(identity: Identity) -> None:
    class Named(MemoryNetwork):
        async def connect(self, *arguments: Any, **more: Any) -> Session:
            session = await super().connect(*arguments, **more)
            session.identity = identity
            return session

    network, far = Named(), Ear()
    await network.listen("there", 1, PeerMessage, lambda: far)
    peers = Peers(network, HELLO, Ear, lambda _: "there:1", print)
    if identity.node == THERE:
        assert not (await peers.get(THERE)).closed
        return
    with pytest.raises(ConnectionError, match=str(identity)):
        await peers.get(THERE)
    while not far.reasons:
        await asyncio.sleep(0)
    assert not far.heard and peers.open_to(THERE) is None


async def test_nobody_sends_payloads_where_none_belong() -> None:
    network, far, here = MemoryNetwork(), Ear(), Ear()
    await network.listen("there", 1, PeerMessage, lambda: far)
    session = await network.connect("there:1", PeerMessage, here, timeout_s=1)
    session.send(Probe(), memoryview(b"smuggled"))
    while not far.reasons:
        await asyncio.sleep(0)
    assert "a Probe from" in far.reasons[0] and "carried 8 bytes" in far.reasons[0]
    with pytest.raises(ProtocolError):
        far.place(session, Probe(), 8)


# Networks.


def test_tls_is_configured_whole_or_not_at_all(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "ours")
    given = {f"tls.{part}": path for part, path in files.items()}
    network = network_of(load_config(None, given), "secret")
    assert isinstance(network.credentials, TlsFiles)
    plain = network_of(load_config(None, {}), "secret")
    assert plain.credentials is None
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
    assert (network.connections, network.terms.resume_s) == (3, 1.5)
