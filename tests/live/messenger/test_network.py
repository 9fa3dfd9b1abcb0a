"""Over real sockets on the loopback address. Each wait is for an event, never for a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvloop

from isthmus.core.errors import ProtocolError
from isthmus.live.messenger import (
    Greetings,
    Network,
    Priority,
    Session,
    TcpNetwork,
    Terms,
    address_of,
    greeting,
    network,
    split_address,
    tcp,
)
from isthmus.live.messenger.frames import PREFIX_BYTES, FrameKind, Prefix, parse_prefix, prefix_of
from isthmus.live.messenger.greeting import (
    NONCE_BYTES,
    Answer,
    Challenge,
    Dialling,
    Hello,
    Welcome,
    hello,
    refusal,
)
from isthmus.live.messenger.inbox import Close
from isthmus.live.messenger.network import Listener, Server
from isthmus.live.messenger.ports import STANDARD
from isthmus.live.messenger.streams import Stream, TlsStream
from isthmus.live.messenger.tcp import drain
from tests.memory_network import MemoryNetwork

LIMIT_S = 90.0
"""Only so that a bug ends the test: nothing here is decided by it."""


PLAIN = TcpNetwork()


class Note(msgspec.Struct, frozen=True, tag=True):
    text: str


class Parcel(msgspec.Struct, frozen=True, tag=True):
    """Its payload is taken in pieces of these sizes."""

    pieces: tuple[int, ...]


class Stranger(msgspec.Struct, frozen=True, tag=True):
    text: str = ""


Message = Note | Parcel


class Owner:
    """Keeps what comes over one session."""

    def __init__(self, react: Callable[[Session, Message], None] | None = None) -> None:
        self.messages: list[Message] = []
        self.payloads: list[list[bytearray]] = []
        self.placed: list[Message] = []
        self.voids: list[Message] = []
        self.reasons: list[str] = []
        self.session: Session | None = None
        self._react = react
        self._changed = asyncio.Event()

    def on_message(self, session: Session, message: Message) -> None:
        assert not self.reasons, "a message came after the end"
        self.session = session
        self.messages.append(message)
        self._changed.set()
        if self._react is not None:
            self._react(session, message)

    def place(self, session: Session, message: Message, size: int) -> Sequence[memoryview]:
        if not isinstance(message, Parcel):
            raise ProtocolError(f"a {type(message).__name__} carries no payload")
        self.session = session
        self.placed.append(message)
        self.payloads.append([bytearray(piece) for piece in message.pieces])
        return [memoryview(piece) for piece in self.payloads[-1]]

    def on_void(self, session: Session, message: Message) -> None:
        self.voids.append(message)
        self._changed.set()

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)
        self._changed.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def session(here: Owner, there: Owner, network: Network = PLAIN) -> AsyncIterator[Session]:
    """A session whose listening side is `there`; it is closed, on both sides, at the end."""
    server, port = await network.listen("127.0.0.1", 0, Message, lambda: there)
    joined = await network.connect(f"127.0.0.1:{port}", Message, here, timeout_s=LIMIT_S)
    try:
        yield joined
    finally:
        joined.close()
        await here.until(lambda: here.reasons)
        await there.until(lambda: there.reasons)
        await closed(server)


async def closed(server: Server) -> None:
    server.close()
    if isinstance(server, Listener) and server._tasks:
        await asyncio.wait(server._tasks)


@pytest.fixture(params=["tcp", "memory"])
def net(request: pytest.FixtureRequest) -> Network:
    return PLAIN if request.param == "tcp" else MemoryNetwork()


_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"], autouse=True)
def _each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds on the loop that nodes use, and on the standard one."""
    monkeypatch.setitem(globals(), "_factory", request.param)


def on_loop(work: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=_factory) as runner:
        runner.run(work)


def running(work: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """A test on the loop of `_each_loop`, in which no callback may fail."""

    @functools.wraps(work)
    def test(*args: object, **kwargs: object) -> None:
        async def main() -> None:
            faults: list[dict] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
            await work(*args, **kwargs)
            assert faults == []

        on_loop(main())

    return test


@running
async def test_messages_come_in_order_both_ways(net: Network) -> None:
    here, there = Owner(), Owner(lambda session, message: session.send(message))
    async with session(here, there, net) as joined:
        sent = [Note(f"number {number}") for number in range(500)]
        for message in sent:
            joined.send(message)
        assert not there.messages, "never inside send"
        await here.until(lambda: len(here.messages) == 500)
        assert here.messages == there.messages == sent
        assert joined.bytes_in == joined.bytes_out


@running
async def test_64_mib_arrive_intact_both_ways_at_once(net: Network) -> None:
    size = 64 << 20
    data = (hashlib.sha256(b"seed").digest() * (size // 32 // 2)) + bytes(size // 2)
    thirds = (size // 3, size - size // 3)
    here, there = Owner(), Owner()
    async with session(here, there, net) as joined:
        joined.send(Note("hello"))
        await there.until(lambda: there.messages)
        assert there.session is not None
        view = memoryview(data)
        joined.send(Parcel(thirds), view[:1000], view[1000:])
        there.session.send(Parcel((size,)), view)
        joined.send(Note("after"), priority=Priority.NORMAL)
        await there.until(lambda: len(there.messages) == 3)
        await here.until(lambda: here.messages)
        assert b"".join(there.payloads[0]) == data
        assert [len(piece) for piece in there.payloads[0]] == list(thirds)
        assert here.payloads[0][0] == data
        assert there.messages[2] == Note("after")


@pytest.mark.parametrize("by", ["here", "there"])
@pytest.mark.parametrize("how", ["close", "abort"])
@running
async def test_an_end_is_told_once_on_both_sides(how: str, by: str, net: Network) -> None:
    here, there = Owner(), Owner()
    async with session(here, there, net) as joined:
        joined.send(Note("hello"))
        await there.until(lambda: there.messages)
        assert there.session is not None
        ending, ends, hears = (joined, here, there) if by == "here" else (there.session, there, here)
        ending.send(Note("last words"))
        for reason in ("enough", "again"):
            getattr(ending, how)(reason)
        assert ending.closed
        await here.until(lambda: here.reasons)
    assert ends.reasons == ["enough"] and len(hears.reasons) == 1
    if how == "close":
        assert hears.reasons == ["closed by the peer: enough"]
        assert hears.messages[-1] == Note("last words")


DEEP = msgspec.Raw(b"\x82\xa4type\xa4Note\xa1x" + b"\x91" * 3000 + b"\x01")


@pytest.mark.parametrize(
    ("wrong", "payload", "complaint"),
    [
        *[(each, b"", "could not be read") for each in (Stranger("hello"), {"no": "type"}, 17, DEEP)],
        (Note("smuggler"), b"goods", "a Note carries no payload"),
    ],
)
@running
async def test_what_does_not_belong_ends_the_session(
    wrong: object, payload: bytes, complaint: str, net: Network
) -> None:
    here, there = Owner(), Owner()
    async with session(here, there, net) as joined:
        joined.send(Note("before"))
        joined.send(wrong, memoryview(payload))
        joined.send(Note("after"), priority=Priority.NORMAL)
        await there.until(lambda: there.reasons)
    assert there.messages == [Note("before")]
    assert len(there.reasons) == 1 and complaint in there.reasons[0]


def frame_of(kind: FrameKind, body: object) -> bytes:
    header = msgspec.msgpack.encode(body)
    return prefix_of(kind, header) + header


NONCE = b"n" * NONCE_BYTES


def hello_of(
    session: bytes = bytes(16), *, first: bool = True, terms: Terms = STANDARD, **others: object
) -> Hello:
    return msgspec.structs.replace(hello(session, 0, terms, NONCE, first=first), **others)


def begun(said: Hello) -> bytes:
    return Dialling(said, b"").begin()


NESTED = b"\x91" * 3000 + b"\x01"
"""An array in an array, and so on, deeper than Python goes."""
MORE = msgspec.msgpack.encode((*msgspec.to_builtins(hello_of(), builtin_types=[bytes]), None))[:-1] + NESTED

GREETINGS = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "does not speak this protocol"),
    "another version": (begun(hello_of(oldest=7, newest=9)), "not 7 to 9"),
    "the version before": (frame_of(FrameKind.HELLO, (2, 2, bytes(16), 0, True, Terms(), False)), "not 2 to 2"),
    "no greeting": (frame_of(FrameKind.CLOSE, Close((), "")), "must begin with HELLO"),
    "an endless one": (prefix_of(FrameKind.HELLO, b"x" * 5000), "not that long"),
    "a damaged one": (begun(hello_of())[:-1] + b"?", "damaged"),
    "a nested one": (prefix_of(FrameKind.HELLO, MORE) + MORE, "could not be read"),
    "a short name": (begun(hello_of(bytes(15))), "has 16 bytes"),
    "a short nonce": (begun(hello_of(nonce=b"x")), "a nonce has 32 bytes"),
    "no window": (begun(hello_of(terms=Terms(window=0))), "could not be read"),
    "no answer": (
        begun(hello_of()) + frame_of(FrameKind.WELCOME, Welcome(3, Terms())),
        "must be answered by ANSWER",
    ),
    "no proof": (begun(hello_of()) + frame_of(FrameKind.ANSWER, Answer(b"")), "its cluster token is wrong"),
}


async def read_frame(reader: asyncio.StreamReader) -> tuple[Prefix, bytes]:
    prefix = parse_prefix(memoryview(await reader.readexactly(PREFIX_BYTES)))
    return prefix, await reader.readexactly(prefix.header)


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: Hello, secret: bytes = b""
) -> tuple[list[bytes], bytes]:
    """Says what a dialler says; returns that, and the last answer."""
    dialling = Dialling(said, secret)
    sent = [dialling.begin()]
    writer.write(sent[0])
    sent.append(dialling.answer(*await read_frame(reader)))
    writer.write(sent[1])
    return sent, (await read_frame(reader))[1]


@running
async def test_a_session_has_each_of_its_connections_once_and_not_too_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(network, "MAX_CONNECTIONS", 3)
    there, name = Owner(), b"n" * 16
    server, port = await PLAIN.listen("127.0.0.1", 0, Message, lambda: there)
    answers, writers = [], []
    for lane in (0, 0, 1, 1, 2, 3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        said = hello_of(name, first=not answers, lane=lane)
        _, answer = await asyncio.wait_for(greet(reader, writer, said), LIMIT_S)
        answers.append(b"too many" in answer)
    assert answers == [False, True, False, True, False, True]
    (tcp,) = server._ports.values()
    assert tcp.session is not None and sorted(lane.number for lane in tcp.session.lanes) == [0, 1, 2]
    for writer in writers:
        writer.close()
    await there.until(lambda: there.reasons)
    await closed(server)


@pytest.mark.parametrize("said", GREETINGS.values(), ids=GREETINGS.keys())
@running
async def test_who_begins_wrongly_is_turned_away_with_one_line(
    said: tuple[bytes, str], caplog: pytest.LogCaptureFixture
) -> None:
    there = Owner()
    server, port = await PLAIN.listen("127.0.0.1", 0, Message, lambda: there)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said[0])
    answer = await asyncio.wait_for(reader.read(), LIMIT_S)
    writer.close()
    assert said[1].encode() in answer
    assert len(caplog.records) == 1 and said[1] in caplog.text
    here = Owner()
    joined = await PLAIN.connect(f"127.0.0.1:{port}", Message, here, timeout_s=LIMIT_S)
    joined.send(Note("hello"))
    await there.until(lambda: there.messages)
    joined.close()
    await there.until(lambda: there.reasons)
    assert len(there.reasons) == 1
    await closed(server)


CHALLENGE = frame_of(FrameKind.CHALLENGE, Challenge(NONCE))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "does not speak this protocol"),
        (refusal("protocol versions 7 to 9 are spoken here, not 2 to 2"), "7 to 9 are spoken here"),
        (frame_of(FrameKind.WELCOME, Welcome(3, Terms())), "must say CHALLENGE or CLOSE"),
        (CHALLENGE + frame_of(FrameKind.WELCOME, Welcome(9, Terms())), "version 9, which was not offered"),
        (CHALLENGE + frame_of(FrameKind.WELCOME, Welcome(3, Terms())), "does not know this cluster's token"),
        (CHALLENGE + CHALLENGE, "must say WELCOME or CLOSE"),
        (b"", "ended before it began"),
    ],
)
@running
async def test_who_answers_wrongly_is_no_peer(answer: bytes, complaint: str) -> None:
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):  # the dialler hung up with something unread
            await reader.read()
        writer.close()
        served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OSError, match=complaint):
        await PLAIN.connect(f"127.0.0.1:{port}", Message, Owner(), timeout_s=LIMIT_S)
    await asyncio.wait_for(served.wait(), LIMIT_S)
    await closed(server)


@asynccontextmanager
async def listening(network: TcpNetwork) -> AsyncIterator[tuple[Listener, int, list[Owner]]]:
    """With the owner of each session that was opened."""
    owners: list[Owner] = []

    def owner() -> Owner:
        owners.append(Owner())
        return owners[-1]

    server, port = await network.listen("127.0.0.1", 0, Message, owner)
    try:
        yield server, port, owners
    finally:
        await closed(server)


CLUSTER = TcpNetwork(secret=b"the cluster's")


@pytest.mark.parametrize("said", [{"lane": 1}, {"is_line": True}], ids=["lane", "line"])
@running
async def test_what_would_join_a_session_that_is_not_there_is_turned_away(said: dict[str, Any]) -> None:
    async with listening(CLUSTER) as (server, port, owners):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        _, answer = await greet(reader, writer, hello_of(first=False, **said), b"the cluster's")
        assert b"this session is not known here" in answer
        writer.close()
        assert not owners and not server._ports


@pytest.mark.parametrize("secret", [b"", b"guessed", b"the cluster's "])
@running
async def test_without_the_secret_nothing_begins(secret: bytes) -> None:
    async with listening(CLUSTER) as (server, port, owners):
        with pytest.raises(ConnectionRefusedError, match="its cluster token is wrong"):
            await TcpNetwork(secret=secret).connect(f"127.0.0.1:{port}", Message, Owner(), timeout_s=LIMIT_S)
        assert not owners and not server._ports


@running
async def test_a_listener_without_the_secret_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:

    class Anybody(greeting.Listening):
        def check(self, prefix: Prefix, header: bytes) -> None:
            """Whoever it is."""

    monkeypatch.setattr(greeting, "Listening", Anybody)
    async with listening(TcpNetwork(secret=b"guessed")) as (_, port, owners):
        with pytest.raises(ConnectionError, match="the listener does not know this cluster's token"):
            await CLUSTER.connect(f"127.0.0.1:{port}", Message, Owner(), timeout_s=LIMIT_S)
        for one in owners:
            await one.until(lambda one=one: one.reasons)


@pytest.mark.parametrize("kind", ["session", "lane", "line"])
@running
async def test_a_greeting_that_was_recorded_opens_nothing(kind: str) -> None:
    async with listening(CLUSTER) as (server, port, owners):
        first = await asyncio.open_connection("127.0.0.1", port)
        sent, answer = await greet(*first, hello_of(), b"the cluster's")
        assert msgspec.msgpack.decode(answer, type=Welcome).version
        (tcp,) = server._ports.values()
        assert tcp.session is not None
        tcp.session.answer_lines(lambda line: line.hang_up())
        said = {
            "session": hello_of(),
            "lane": hello_of(first=False, lane=1),
            "line": hello_of(is_line=True),
        }
        if kind != "session":
            more = await asyncio.open_connection("127.0.0.1", port)
            sent, answer = await greet(
                *more, msgspec.structs.replace(said[kind], first=False), b"the cluster's"
            )
            more[1].close()
        assert b"wrong" not in answer
        for still_open in (True, False):
            if not still_open:
                tcp.session.abort("over")
                await owners[0].until(lambda: owners[0].reasons)
            for again in (sent, [Dialling(said[kind], b"guessed").begin(), sent[1]]):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"".join(again))
                assert b"its cluster token is wrong" in await asyncio.wait_for(reader.read(), LIMIT_S)
                writer.close()
        first[1].close()
        assert len(owners) == 1 and not owners[0].messages and not server._ports


def kept(server: Listener) -> int:
    """Bytes that lie in the sessions that were opened here, for what is not delivered."""
    sessions = [tcp.session for tcp in server._ports.values() if tcp.session is not None]
    held = [each._inbox._kept_bytes for each in sessions]
    return sum(held) + sum(lane.reader.grown_bytes for each in sessions for lane in each.lanes)


MANY = {
    "a thousand small ones that wait for the first one": [(number, 1000) for number in range(1, 1001)],
    "nothing": [],
}


@pytest.mark.parametrize("said", MANY.values(), ids=MANY)
@running
async def test_sessions_that_do_not_say_what_they_are_for_cost_little_and_end(
    said: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 at once, from somebody who knows the secret; the last byte of their headers never comes."""

    def impatient(*arguments: Any, first_s: float) -> Session:
        return Session(*arguments, first_s=first_s if said else 0.01)

    monkeypatch.setattr(network, "Session", impatient)
    seen = [0]
    async with listening(TcpNetwork(greetings=Greetings(LIMIT_S, most=64))) as (server, port, owners):

        async def stranger(number: int) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await greet(reader, writer, hello_of(number.to_bytes(16, "little")))
            with contextlib.suppress(ConnectionError):
                for seq, size in said:
                    header = bytes(size)
                    writer.write(prefix_of(FrameKind.DATA, header, seq=seq) + header[: None if seq else -1])
                    await writer.drain()
                    seen.append(kept(server))
            last = b""
            with contextlib.suppress(ConnectionError):
                last = await reader.read()
            writer.close()
            return last

        last = await asyncio.wait_for(asyncio.gather(*map(stranger, range(40))), LIMIT_S)
        for one in owners:
            await one.until(lambda one=one: one.reasons)
        assert not server._ports and kept(server) == 0
    assert len(owners) == 40 and not any(one.messages or one.placed for one in owners)
    assert max(seen) <= 40 * (66 << 10)
    if not said:
        assert all(b"limits.greeting_s" in each for each in last)


@running
async def test_later_connections_take_the_place_of_those_that_say_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """300 of them use up no descriptors and fill no log."""
    network = TcpNetwork(greetings=Greetings(LIMIT_S, most=8))
    async with listening(network) as (server, port, owners):
        silent = []
        for _ in range(300):
            silent.append(await asyncio.open_connection("127.0.0.1", port))
            await until(lambda: len(server._tasks) <= 8)
        here = Owner()
        joined = await network.connect(f"127.0.0.1:{port}", Message, here, timeout_s=LIMIT_S)
        joined.send(Note("hello"))
        await until(lambda: owners and owners[0].messages)
        for reader, _ in silent[:290]:
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        joined.close()
        await here.until(lambda: here.reasons)
        for _, writer in silent:
            writer.close()
        assert len(owners) == 1
    assert "made room for later ones" in caplog.text and len(caplog.records) < 20


@pytest.mark.parametrize("begun", [False, True])
def test_a_socket_that_still_drains_is_closed_with_its_loop(begun: bool) -> None:

    async def work() -> None:
        ours.setblocking(False)
        drain(Stream(ours))
        if begun:
            await asyncio.sleep(0)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send(bytes(1 << 20))
        on_loop(work())
        assert ours.fileno() == -1


@pytest.mark.parametrize("secured", [False, True])
def test_a_socket_drains_until_its_peer_ends(secured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "DRAIN_S", 60)

    async def work() -> None:
        ours.setblocking(False)
        stream = Stream(ours)
        if secured:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            stream = TlsStream(context.wrap_socket(ours, do_handshake_on_connect=False))
        task = drain(stream)
        for _ in range(2):
            await asyncio.sleep(0.01)
            assert not task.done()
            theirs.send(bytes(100))
        theirs.close()
        await task
        assert stream.fileno() == -1

    ours, theirs = socket.socketpair()
    with ours, theirs:
        on_loop(work())


@running
async def test_a_connection_accepted_just_before_the_end_is_closed() -> None:
    server, port = await PLAIN.listen("127.0.0.1", 0, Message, Owner)
    with socket.create_connection(("127.0.0.1", port)) as client:
        server._accept(server._sockets[0])
        await closed(server)
        client.settimeout(LIMIT_S)
        assert client.recv(1) == b""


@running
async def test_a_taken_port_and_nobody_listening_are_oserrors(net: Network) -> None:
    server, port = await net.listen("127.0.0.1", 0, Message, Owner)
    with pytest.raises(OSError):
        await net.listen("127.0.0.1", port, Message, Owner)
    await closed(server)
    with pytest.raises(OSError):
        await net.connect(f"127.0.0.1:{port}", Message, Owner(), timeout_s=LIMIT_S)


@running
async def test_a_fault_of_the_owner_ends_the_session_and_is_not_hidden(net: Network) -> None:
    faults: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    def fail(session: Session, message: Message) -> None:
        raise ZeroDivisionError("a bug")

    here, there = Owner(), Owner(fail)
    async with session(here, there, net) as joined:
        joined.send(Note("hello"))
        await here.until(lambda: here.reasons)
    assert there.reasons == ["a fault on this side: ZeroDivisionError: a bug"]
    assert [type(fault["exception"]) for fault in faults] == [ZeroDivisionError]


@running
async def test_room_is_told_when_little_waits_and_when_all_is_over() -> None:
    here, there = Owner(), Owner()
    async with proxied(here, there, PLAIN) as (joined, proxy):
        await joined.room()
        proxy.stall()
        joined.send(Parcel((64 << 20,)), memoryview(bytes(64 << 20)))
        waiting = asyncio.ensure_future(joined.room())
        await until(lambda: joined.stat().queued_bytes < 64 << 20)
        assert not waiting.done()
        proxy.flow()
        await asyncio.wait_for(waiting, LIMIT_S)
        assert joined.stat().queued_bytes < 1 << 20
        proxy.stall()
        joined.send(Parcel((64 << 20,)), memoryview(bytes(64 << 20)))
        waiting = asyncio.ensure_future(joined.room())
        await asyncio.sleep(0)
        joined.abort("enough")
        await asyncio.wait_for(waiting, LIMIT_S)


# Several connections, lost and made again.


class Proxy:
    """Passes bytes on, in both directions, until told to cut or to hold what passes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: list[list[asyncio.StreamWriter]] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self, which: int) -> None:
        for writer in self._writers[which]:
            writer.transport.abort()

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    async def close(self) -> None:
        self._server.close()
        for pair in list(self._writers):
            for writer in pair:
                writer.transport.abort()
        self.flow()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        pair = [writer, far_writer]
        self._writers.append(pair)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        finally:
            self._writers.remove(pair)
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        except (OSError, RuntimeError):  # uvloop's word for a connection that was cut here
            pass
        finally:
            writer.close()


@asynccontextmanager
async def proxied(here: Owner, there: Owner, network: TcpNetwork) -> AsyncIterator[tuple[Session, Proxy]]:
    server, port = await network.listen("127.0.0.1", 0, Message, lambda: there)
    proxy = Proxy(port)
    through = await proxy.open()
    joined = await network.connect(f"127.0.0.1:{through}", Message, here, timeout_s=LIMIT_S)
    try:
        yield joined, proxy
    finally:
        joined.abort("the test is over")
        await here.until(lambda: here.reasons)
        await proxy.close()
        await closed(server)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.001)


def pattern(number: int, size: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() * (size // 32)


@pytest.mark.parametrize(("connections", "resume_s"), [(4, 0.0), (1, LIMIT_S), (3, LIMIT_S)])
@running
async def test_connections_that_are_cut_cost_nothing_but_time(connections: int, resume_s: float) -> None:
    """With one connection the session resumes."""
    here, there = Owner(), Owner()
    network = TcpNetwork(connections, terms=Terms(resume_s=resume_s))
    async with proxied(here, there, network) as (joined, proxy):
        await until(lambda: joined.stat().lanes == connections)
        size, num = 1 << 20, 30
        payloads = [pattern(number, size) for number in range(num)]
        done: list[bool] = []
        for number in range(num):
            joined.send(Parcel((size,)), memoryview(payloads[number]), done=done.append)
            if number % 10 == 5:
                await until(lambda number=number: len(there.messages) >= number - 4)
                proxy.cut(0)
        await there.until(lambda: len(there.messages) == num)
        await until(lambda: len(done) == num)
        assert done == [True] * num
        assert sorted(bytes(payload[0]) for payload in there.payloads) == sorted(payloads)
        assert not here.reasons and not there.reasons and not there.voids
        await until(lambda: joined.stat().lanes == connections)
        assert joined.stat().lanes_lost >= 1


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.1", "10.0.0.1:7"), ("a.b", "a.b:7"), ("fd00::1", "[fd00::1]:7")]
)
def test_an_address_is_a_host_and_a_port(host: str, address: str) -> None:
    assert address_of(host, 7) == address and split_address(address) == (host, 7)


@pytest.mark.parametrize("wrong", ["", "host", "host:", ":7", "host:x", "host:-1", "host:65536", "7"])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(wrong)
