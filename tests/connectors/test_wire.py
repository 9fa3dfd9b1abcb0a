"""Messages and frames of the protocol between vLLM's worker and the adapter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_vllm.wire import (
    MAX_FRAME_BYTES,
    Arena,
    Done,
    Frames,
    Free,
    Load,
    Memory,
    Open,
    Over,
    Ready,
    Refused,
    Save,
    Short,
    ToAdapter,
    ToWorker,
    framed,
)

MEMORY = Memory("/proc/7/fd/3", b"n" * 2, 5, 2, 96)
IN_HEX = "96" + "a64d656d6f7279" + "ac2f70726f632f372f66642f33" + "c4026e6e" + "05" + "02" + "60"
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
    message: ToWorker if type(message) in (Arena, Refused, Ready, Short, Free) else ToAdapter
    for message in GOLDEN
}


@pytest.mark.parametrize("message", GOLDEN, ids=lambda message: type(message).__name__)
def test_bytes_on_the_wire_are_these(message: ToAdapter | ToWorker) -> None:
    body = bytes.fromhex(GOLDEN[message])
    assert framed(message) == len(body).to_bytes(4, "little") + body
    assert list(Frames(DIRECTION[message]).feed(framed(message))) == [message]


@given(st.lists(st.integers(1, 40)))
def test_messages_come_out_whole_however_the_bytes_come_in(cuts: list[int]) -> None:
    sent = [message for message in GOLDEN if DIRECTION[message] is ToAdapter]
    data, frames, received = b"".join(map(framed, sent)), Frames(ToAdapter), []
    for cut in [*cuts, len(data)]:
        received += frames.feed(data[:cut])
        data = data[cut:]
    assert received == sent


def test_the_wrong_direction_is_an_error() -> None:
    with pytest.raises(ValueError):
        list(Frames(ToWorker).feed(framed(Done(1))))


def test_a_frame_has_a_limit() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames(ToWorker).feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
