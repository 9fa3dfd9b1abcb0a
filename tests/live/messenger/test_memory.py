"""The in-memory binding behaves as the one over sockets, only in the same order every time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from isthmus.live.messenger import Priority, Session, Terms
from tests.memory_network import MemoryNetwork

from .test_network import LIMIT_S, Message, Note, Owner, Parcel, Stranger


def running(work: Callable[[MemoryNetwork], Awaitable[None]]) -> None:
    async def main() -> None:
        faults: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        await work(MemoryNetwork())
        assert faults == []

    asyncio.run(main())


async def session(network: MemoryNetwork, here: Owner, there: Owner) -> Session:
    _, port = await network.listen("somewhere", 0, Message, lambda: there)
    return await network.connect(f"somewhere:{port}", Message, here, timeout_s=1)


def test_messages_come_in_order_both_ways_and_never_inside_send() -> None:
    async def work(network: MemoryNetwork) -> None:
        here, there = Owner(), Owner(lambda connection, message: connection.send(message))
        connection = await session(network, here, there)
        sent = [Note(f"number {number}") for number in range(50)]
        for message in sent:
            connection.send(message)
        assert there.messages == []
        await here.until(lambda: len(here.messages) == 50)
        assert here.messages == there.messages == sent
        assert connection.bytes_in == connection.bytes_out

    running(work)


def test_payloads_land_in_their_place_whatever_the_pieces() -> None:
    async def work(network: MemoryNetwork) -> None:
        here, there = Owner(), Owner()
        connection = await session(network, here, there)
        data = bytes(range(256)) * 1000
        view = memoryview(data)
        connection.send(Parcel((100_000, len(data) - 100_000)), view[:7], view[7:])
        connection.send(Note("after"), priority=Priority.NORMAL)
        connection.send(Parcel((2, 0, 1)), memoryview(b"12"), memoryview(b""), memoryview(b"3"))
        await there.until(lambda: len(there.messages) == 3)
        assert b"".join(there.payloads[0]) == data
        assert b"".join(there.payloads[1]) == b"123"

    running(work)


@pytest.mark.parametrize("ender", ["here", "there"])
def test_an_end_is_told_once_on_both_sides_after_what_was_sent(ender: str) -> None:
    async def work(network: MemoryNetwork) -> None:
        here = Owner()
        there = Owner(lambda connection, _: connection.close("not today") if ender == "there" else None)
        connection = await session(network, here, there)
        connection.send(Note("last words"))
        if ender == "here":
            connection.close("enough")
            connection.close("again")
            assert connection.closed
        await here.until(lambda: here.reasons)
        await there.until(lambda: there.reasons)
        connection.send(Note("too late"))
        await asyncio.sleep(0)
        assert there.messages == [Note("last words")]
        reasons = {
            "here": (["enough"], ["closed by the peer: enough"]),
            "there": (["closed by the peer: not today"], ["not today"]),
        }
        assert (here.reasons, there.reasons) == reasons[ender]

    running(work)


def test_what_does_not_belong_ends_the_session() -> None:
    async def work(network: MemoryNetwork) -> None:
        for wrong, payload in ((Stranger("hello"), b""), (Note("smuggler"), b"goods")):
            here, there = Owner(), Owner()
            connection = await session(network, here, there)
            connection.send(Note("before"))
            connection.send(wrong, memoryview(payload))
            connection.send(Note("after"))
            await there.until(lambda there=there: there.reasons)
            assert there.messages == [Note("before")]

    running(work)


def test_addresses_are_taken_once_and_given_back() -> None:
    async def work(network: MemoryNetwork) -> None:
        server, port = await network.listen("a", 0, Message, Owner)
        with pytest.raises(OSError, match="taken"):
            await network.listen("a", port, Message, Owner)
        await network.listen("b", port, Message, Owner)
        server.close()
        with pytest.raises(OSError, match="nobody listens"):
            await network.connect(f"a:{port}", Message, Owner(), timeout_s=1)

    running(work)


def test_peers_have_addresses_of_their_own() -> None:
    async def work(network: MemoryNetwork) -> None:
        there = Owner(lambda connection, message: connection.send(message))
        _, port = await network.listen("a", 0, Message, lambda: there)
        owners = [Owner(), Owner()]
        seen = set()
        for one in owners:
            connection = await network.connect(f"a:{port}", Message, one, timeout_s=1)
            assert connection.peer == f"a:{port}"
            connection.send(Note("hello"))
            await one.until(lambda one=one: one.messages)
            assert there.session is not None
            seen.add(there.session.peer)
        assert len(seen) == 2

    running(work)


def test_each_address_may_have_its_own_delivery() -> None:
    """Held back for one, so that what came later over the other arrives first."""

    async def work(_: MemoryNetwork) -> None:
        loop, held = asyncio.get_running_loop(), list[tuple[Callable[..., object], tuple[object, ...]]]()

        def hold(function: Callable[..., object], *arguments: object) -> None:
            held.append((function, arguments))

        network = MemoryNetwork(lambda address: hold if address == "a:1" else loop.call_soon)
        owners = [Owner(), Owner()]
        for host, there in zip("ab", owners, strict=True):
            await network.listen(host, 1, Message, lambda there=there: there)
            connection = await network.connect(f"{host}:1", Message, Owner(), timeout_s=1)
            connection.send(Note(host))
        await owners[1].until(lambda: owners[1].messages)
        assert owners[0].messages == []
        for function, arguments in held:
            function(*arguments)
        assert owners[0].messages == [Note("a")]

    running(work)


# Faults.


@pytest.mark.parametrize("fault", ["lose", "stall", "delay"])
def test_a_lane_with_a_fault_costs_nothing_but_time(fault: str) -> None:
    async def work(_: MemoryNetwork) -> None:
        network = MemoryNetwork(connections=3)
        here, there = Owner(), Owner()
        joined = await session(network, here, there)
        link = network.links[1]
        if fault == "stall":
            link.is_stalled = True
        if fault == "delay":
            link.delay_s = 0.01
        size = 3 << 20
        data = bytes(range(256)) * (size // 256)
        heard: list[bool] = []
        for _ in range(5):
            joined.send(Parcel((size,)), memoryview(data), done=heard.append)
        if fault == "lose":
            link.lose()
        if fault == "stall":
            await asyncio.sleep(0.01)
            assert len(there.messages) < 5
            link.resume()
        await there.until(lambda: len(there.messages) == 5)
        assert all(bytes(payload[0]) == data for payload in there.payloads)
        assert not there.voids
        if fault == "lose":
            assert joined.stat().lanes_lost == 1 and joined.stat().lanes == 3
        while len(heard) < 5:
            await asyncio.sleep(0.001)
        assert heard == [True] * 5
        joined.close()
        await there.until(lambda: there.reasons)

    running(work)


@pytest.mark.parametrize("at", [3, 50, 1000])
def test_a_flipped_byte_is_found_or_lies_in_the_payload(at: int) -> None:
    async def work(network: MemoryNetwork) -> None:
        here, there = Owner(), Owner()
        joined = await session(network, here, there)
        network.links[0].flip_at = at
        joined.send(Parcel((5000,)), memoryview(bytes(5000)))
        await there.until(lambda: there.messages or there.reasons)
        if at == 1000:
            assert sum(there.payloads[0][0]) == 1 and not there.reasons
        else:
            await here.until(lambda: here.reasons)
            assert "damaged" in there.reasons[0] or "does not speak" in there.reasons[0]
            assert here.reasons == [f"closed by the peer: {there.reasons[0]}"]
            assert there.messages == []

    running(work)


def test_a_session_resumes_when_its_only_link_is_lost() -> None:
    async def work(_: MemoryNetwork) -> None:
        network = MemoryNetwork(terms=Terms(resume_s=LIMIT_S))
        here, there = Owner(), Owner()
        joined = await session(network, here, there)
        joined.send(Parcel((5 << 20,)), memoryview(bytes(5 << 20)))
        network.links[0].lose()
        joined.send(Note("after"))
        await there.until(lambda: len(there.messages) == 2)
        assert not here.reasons and not there.reasons

    running(work)


def test_an_abort_is_seen_by_the_other_side() -> None:
    async def work(_: MemoryNetwork) -> None:
        here, there = Owner(), Owner()
        network = MemoryNetwork(connections=3)
        connection = await session(network, here, there)
        connection.send(Note("hello"))
        await there.until(lambda: there.messages)
        connection.abort("enough")
        await there.until(lambda: there.reasons)
        await here.until(lambda: here.reasons)
        assert here.reasons == ["enough"] and len(there.reasons) == 1

    running(work)


def test_a_fault_of_the_owner_ends_the_session_and_is_not_hidden() -> None:
    async def main() -> None:
        faults: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

        def fail(session: Session, message: Message) -> None:
            raise ZeroDivisionError("a bug")

        here, there = Owner(), Owner(fail)
        connection = await session(MemoryNetwork(), here, there)
        connection.send(Note("hello"))
        await here.until(lambda: here.reasons)
        assert there.reasons == ["a fault on this side: ZeroDivisionError: a bug"]
        assert [type(fault["exception"]) for fault in faults] == [ZeroDivisionError]

    asyncio.run(main())
