"""Over real sockets on the loopback address. Each wait is for an event, never for a time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from isthmus.errors import ProtocolError
from isthmus.messenger import Priority, Sending, Session, TcpNetwork, Terms, Tls

LIMIT_S = 30.0
"""Only so that a bug ends the test: nothing here is decided by it."""


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
        self.reasons: list[str] = []
        self.session: Session | None = None
        self._react = react
        self._changed = asyncio.Event()

    def on_message(self, session: Session, message: Message) -> None:
        assert not self.reasons, "a message came after the end"
        self.connection = connection
        self.messages.append(message)
        self._changed.set()
        if self._react is not None:
            self._react(connection, message)

    def place(self, session: Session, message: Message, size: int) -> Sequence[memoryview]:
        if not isinstance(message, Parcel):
            raise ProtocolError(f"a {type(message).__name__} carries no payload")
        self.payloads.append([bytearray(piece) for piece in message.pieces])
        return [memoryview(piece) for piece in self.payloads[-1]]

    def on_close(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)
        self._changed.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def session(here: Owner, there: Owner, types: object = Message) -> AsyncIterator[Session]:
    """A session whose listening side is `there`; it is closed, on both sides, at the end."""
    server, port = await TcpNetwork().listen("127.0.0.1", 0, Message, lambda: there)
    connection = await TcpNetwork().connect(f"127.0.0.1:{port}", types, here, timeout_s=LIMIT_S)
    try:
        yield connection
    finally:
        connection.close()
        await here.until(lambda: here.reasons)
        await there.until(lambda: there.reasons)
        server.close()
        await server.wait_closed()


def running(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        faults: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        await work()
        assert faults == []

    asyncio.run(main())


def test_messages_come_in_order_both_ways() -> None:
    async def work() -> None:
        here, there = Owner(), Owner(lambda connection, message: connection.send(message))
        async with session(here, there) as connection:
            sent = [Note(f"number {number}") for number in range(500)]
            for message in sent:
                connection.send(message)
            await here.until(lambda: len(here.messages) == 500)
            assert here.messages == there.messages == sent
            assert connection.bytes_in == connection.bytes_out

    running(work)


def test_64_mib_arrive_intact_both_ways_at_once() -> None:
    async def work() -> None:
        size = 64 << 20
        data = (hashlib.sha256(b"seed").digest() * (size // 32 // 2)) + bytes(size // 2)
        thirds = (size // 3, size - size // 3)
        here, there = Owner(), Owner()
        async with session(here, there) as connection:
            connection.send(Note("hello"))
            await there.until(lambda: there.messages)
            assert there.connection is not None
            view = memoryview(data)
            connection.send(Parcel(thirds), view[:1000], view[1000:])
            there.connection.send(Parcel((size,)), view)
            connection.send(Note("after"))
            await there.until(lambda: len(there.messages) == 3)
            await here.until(lambda: here.messages)
            assert b"".join(there.payloads[0]) == data
            assert [len(piece) for piece in there.payloads[0]] == list(thirds)
            assert here.payloads[0][0] == data
            assert there.messages[2] == Note("after")

    running(work)


def test_an_empty_payload_is_no_payload() -> None:
    async def work() -> None:
        here, there = Owner(), Owner()
        async with session(here, there) as connection:
            connection.send(Note("a"), memoryview(b""))
            connection.send(Parcel((2, 0, 1)), memoryview(b"12"), memoryview(b""), memoryview(b"3"))
            await there.until(lambda: len(there.messages) == 2)
            assert b"".join(there.payloads[0]) == b"123"

    running(work)


def test_closing_here_is_told_once_on_both_sides() -> None:
    async def work() -> None:
        here, there = Owner(), Owner()
        async with session(here, there) as connection:
            connection.send(Note("last words"))
            connection.close("enough")
            connection.close("again")
            assert connection.closed
            await here.until(lambda: here.reasons)
            await there.until(lambda: there.reasons)
        assert here.reasons == ["enough"]
        assert there.reasons == ["closed by the peer"]
        assert there.messages == [Note("last words")]

    running(work)


def test_closing_there_is_told_once_on_both_sides() -> None:
    async def work() -> None:
        here, there = Owner(), Owner(lambda connection, _: connection.close("not today"))
        async with session(here, there) as connection:
            connection.send(Note("hello"))
            await here.until(lambda: here.reasons)
            assert connection.closed
        assert here.reasons == ["closed by the peer"]
        assert there.reasons == ["not today"]

    running(work)


def test_a_lost_connection_is_told_with_its_reason() -> None:
    async def work() -> None:
        here, there = Owner(), Owner()
        async with session(here, there) as connection:
            connection.send(Note("hello"))
            await there.until(lambda: there.messages)
            assert there.connection is not None and there.connection._transport is not None
            there.connection._transport.abort()
            await here.until(lambda: here.reasons)
        assert len(here.reasons) == len(there.reasons) == 1
        assert here.reasons[0] and there.reasons[0]

    running(work)


@pytest.mark.parametrize("stranger", [Stranger("hello"), {"no": "type"}, 17])
def test_a_message_of_an_unknown_type_ends_the_session(stranger: object) -> None:
    async def work() -> None:
        here, there = Owner(), Owner()
        async with session(here, there) as connection:
            connection.send(Note("before"))
            connection.send(stranger)
            connection.send(Note("after"))
            await there.until(lambda: there.reasons)
        assert there.messages == [Note("before")]
        assert len(there.reasons) == 1 and "could not be read" in there.reasons[0]

    running(work)


def test_a_payload_where_none_belongs_ends_the_session() -> None:
    async def work() -> None:
        here, there = Owner(), Owner()
        async with session(here, there) as connection:
            connection.send(Note("smuggler"), memoryview(b"goods"))
            await there.until(lambda: there.reasons)
        assert there.messages == []
        assert there.reasons == ["a Note carries no payload"]

    running(work)


def test_a_peer_that_speaks_something_else_is_cut_off() -> None:
    async def work() -> None:
        there = Owner()
        server, port = await TcpNetwork().listen("127.0.0.1", 0, Message, lambda: there)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()
        await there.until(lambda: there.reasons)
        assert there.reasons == ["the peer does not speak this protocol version"]
        server.close()
        await server.wait_closed()

    running(work)


def test_sending_after_the_end_is_harmless() -> None:
    async def work() -> None:
        here, there = Owner(), Owner()
        async with session(here, there) as connection:
            connection.close()
            connection.send(Note("too late"))
            await there.until(lambda: there.reasons)
            await here.until(lambda: here.reasons)
            connection.send(Parcel((1,)), memoryview(b"x"))
        assert there.messages == []
        assert connection.bytes_out == 0

    running(work)


def test_sending_before_the_beginning_is_harmless() -> None:
    connection = Session(Message, None)  # type: ignore[arg-type]
    connection.send(Note("too early"))
    assert connection.closed and connection.bytes_out == 0


def test_each_session_gets_its_own_handler() -> None:
    async def work() -> None:
        owners: list[Owner] = []

        def owner() -> Owner:
            owners.append(Owner(lambda connection, message: connection.send(message)))
            return owners[-1]

        server, port = await TcpNetwork().listen("127.0.0.1", 0, Message, owner)
        mine = [Owner(), Owner()]
        for number, one in enumerate(mine):
            connection = await TcpNetwork().connect(f"127.0.0.1:{port}", Message, one, timeout_s=LIMIT_S)
            connection.send(Note(str(number)))
            await one.until(lambda one=one: one.messages)
            assert connection.peer == f"127.0.0.1:{port}"
            connection.close()
            await one.until(lambda one=one: one.reasons)
        assert [owner.messages for owner in owners] == [[Note("0")], [Note("1")]]
        for one in owners:
            await one.until(lambda one=one: one.reasons)
        server.close()
        await server.wait_closed()

    running(work)


def test_nobody_listening_is_an_oserror() -> None:
    async def work() -> None:
        server, port = await TcpNetwork().listen("127.0.0.1", 0, Message, Owner)
        server.close()
        await server.wait_closed()
        with pytest.raises(OSError):
            await TcpNetwork().connect(f"127.0.0.1:{port}", Message, Owner(), timeout_s=LIMIT_S)

    running(work)


def test_a_taken_port_is_an_oserror() -> None:
    async def work() -> None:
        server, port = await TcpNetwork().listen("127.0.0.1", 0, Message, Owner)
        with pytest.raises(OSError):
            await TcpNetwork().listen("127.0.0.1", port, Message, Owner)
        server.close()
        await server.wait_closed()

    running(work)
