"""Messages and frames of the protocol between vLLM's worker and the adapter."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import ProtocolError
from isthmus.live.servers.wire import (
    MAX_FRAME_BYTES,
    Arena,
    Done,
    Frames,
    Free,
    FromWorker,
    Load,
    Open,
    Over,
    Ready,
    Refused,
    Save,
    Short,
    ToWorker,
    frame,
    read_message,
)
from isthmus.live.store import ArenaHandle, Shape

MEMORY = ArenaHandle("/proc/7/fd/3", b"n" * 2, 5, Shape(2, 96))
SHAPE_IN_HEX = "82" + "aa6e756d5f6c6179657273" + "02" + "ab736c6963655f6279746573" + "60"
IN_HEX = (
    "84" + "a470617468" + "ac2f70726f632f372f66642f33" + "a56e6f6e6365" + "c4026e6e"
    + "a96e756d5f736c6f7473" + "05" + "a57368617065" + SHAPE_IN_HEX
)  # fmt: skip
GOLDEN = {
    Open(2, "f", "m", 32, MEMORY): "96" + "a44f70656e" + "02" + "a166" + "a16d" + "20" + IN_HEX,
    Load(9, "k", (b"a", b"b")): "94" + "a44c6f6164" + "09" + "a16b" + "92" + "c40161" + "c40162",
    Done(9): "93" + "a4446f6e65" + "09" + "c0",
    Done(9, 2): "93" + "a4446f6e65" + "09" + "02",
    Save("k", 1, b"p", (b"a",), (4,), ((b"s", b"t"),)): (
        "97" + "a453617665" + "a16b" + "01" + "c40170" + "91c40161" + "9104" + "9192c40173c40174"
    ),
    Save("k", 0, None, (), (), ()): "97" + "a453617665" + "a16b" + "00" + "c0" + "90" + "90" + "90",
    Over("k"): "92" + "a44f766572" + "a16b",
    Arena(MEMORY): "92" + "a54172656e61" + IN_HEX,
    Refused("r"): "92" + "a752656675736564" + "a172",
    Ready(9, (0,), ((b"s",),)): "94" + "a55265616479" + "09" + "9100" + "9191c40173",
    Short(9): "92" + "a553686f7274" + "09",
    Free((3, 4)): "92" + "a446726565" + "920304",
}
DIRECTION = {
    message: ToWorker if type(message) in (Arena, Refused, Ready, Short, Free) else FromWorker
    for message in GOLDEN
}


@pytest.mark.parametrize("message", GOLDEN, ids=lambda message: type(message).__name__)
def test_bytes_on_the_wire_are_these(message: FromWorker | ToWorker) -> None:
    body = bytes.fromhex(GOLDEN[message])
    assert frame(message) == len(body).to_bytes(4, "little") + body
    assert list(Frames(DIRECTION[message]).feed(frame(message))) == [message]


@given(st.lists(st.integers(1, 40)))
def test_messages_come_out_whole_however_the_bytes_come_in(cuts: list[int]) -> None:
    sent = [message for message in GOLDEN if DIRECTION[message] is FromWorker]
    data, frames, received = b"".join(map(frame, sent)), Frames(FromWorker), []
    for cut in [*cuts, len(data)]:
        received += frames.feed(data[:cut])
        data = data[cut:]
    assert received == sent


def test_the_adapter_reads_what_a_worker_says_and_nothing_else() -> None:
    async def read(data: bytes) -> FromWorker:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_message(reader)

    assert asyncio.run(read(frame(Over("k")))) == Over("k")
    for wrong in (frame(Short(1)), (MAX_FRAME_BYTES + 1).to_bytes(4, "little")):
        with pytest.raises(ProtocolError):
            asyncio.run(read(wrong))
        with pytest.raises(ValueError):
            list(Frames(FromWorker).feed(wrong))
    with pytest.raises(EOFError):
        asyncio.run(read(frame(Over("k"))[:-1]))
