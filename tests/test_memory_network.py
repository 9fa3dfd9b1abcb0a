"""What tests may count on of sessions in memory alone: deliveries held back, and the faults that they cause.

The rest is judged as over sockets (`tests/live/messenger/test_network.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from isthmus.live.messenger import Session
from tests.live.messenger.test_network import Message, Note, Owner, Parcel, running
from tests.memory_network import MemoryNetwork


async def session(network: MemoryNetwork, here: Owner, there: Owner) -> Session:
    _, port = await network.listen("somewhere", 0, Message, lambda: there)
    return await network.connect(f"somewhere:{port}", Message, here, timeout_s=1)


@running
async def test_each_address_may_have_its_own_delivery() -> None:
    """Held back for one, so that what came later over the other arrives first."""
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


# Faults.


@pytest.mark.parametrize("fault", ["lose", "stall", "delay"])
@running
async def test_a_lane_with_a_fault_costs_nothing_but_time(fault: str) -> None:
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


@pytest.mark.parametrize("at", [3, 50, 1000])
@running
async def test_a_flipped_byte_is_found_or_lies_in_the_payload(at: int) -> None:
    network = MemoryNetwork()
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
