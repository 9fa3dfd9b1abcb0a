"""What the adapter, a vLLM server and its worker say to each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import RequestId, Sampling
from isthmus.live.servers import wire
from isthmus.live.servers.client import MAX_ALLOWED, MAX_BIASES, MAX_STOPS, objection
from isthmus.live.servers.pages import Pages
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
from isthmus.live.store import Arena as StoreArena
from isthmus.live.store import ArenaHandle, Shape, Store

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


NAMES = (b"a" * 16, b"b" * 16)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", form="f")
SHAPE = Shape(LAYOUT.num_layers, LAYOUT.slice_bytes)


class SlowCache:
    """Adopts when it is told to."""

    def __init__(self) -> None:
        self.layout, self.store = LAYOUT, Store(StoreArena(SHAPE, 4))
        self.adopts: list[Callable[[], None]] = []

    def adopt(
        self,
        names: Sequence[bytes],
        take: Callable[[Sequence[bytes]], int],
        done: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.adopts.append(lambda: done(names[take(names) :]))

    def kept(self) -> Future[object]:
        found: Future[object] = Future()
        found.set_result(None)
        return found


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(90):
        while not holds():
            await asyncio.sleep(0.005)


def test_a_connection_that_ends_in_a_save_takes_no_slot_back_that_becomes_a_block(tmp_path: Path) -> None:
    async def run() -> None:
        cache, pages, told = SlowCache(), Pages(tmp_path / "pages"), list[Any]()

        def tell(fact: Any) -> None:
            told.append(fact)
            if isinstance(fact, events.SlotsFilled):
                pages.adopt(events.AdoptBlocks(fact.key, fact.names))

        await pages.listen()
        pages.serve(cache, tell, lambda names: None)  # type: ignore[arg-type]
        pages.begin(RequestId("r"), NAMES)
        staging = StoreArena(SHAPE, 2)
        staging.memory[:] = bytes([at % 251 for at in range(len(staging.memory))])
        assert staging.handle is not None
        seals = tuple([tuple([seal(staging.slice(slot, layer)) for layer in (0, 1)]) for slot in (0, 1)])
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(str(tmp_path / "pages"))
        hello = wire.Open(wire.PROTOCOL, "f", "m", 4, staging.handle)
        wire.send_with_memory(stream, hello, staging.fileno())
        _, writer = await asyncio.open_unix_connection(sock=stream)
        writer.write(wire.frame(wire.Save("r", 0, None, NAMES, (0, 1), seals)))
        await until(lambda: cache.adopts)
        writer.close()
        await until(lambda: any(task.cancelling() for task in asyncio.all_tasks()))  # the save is broken off
        assert len(cache.store.reserve(4)) == 2, "two are still on their way"
        cache.adopts[0]()
        await until(lambda: events.SavesDone(RequestId("r")) in told)
        assert all(cache.store.contains(name) for name in NAMES)
        cache.store.check()
        await pages.close()
        staging.close()
        cache.store.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("most", "more", "said"),
    [
        (
            {"allowed_tokens": tuple(range(MAX_ALLOWED))},
            {"allowed_tokens": tuple(range(MAX_ALLOWED + 1))},
            "vLLM nodes take 1024 allowed_token_ids at most",
        ),
        (
            {"logit_bias": tuple([(token, 1.0) for token in range(MAX_BIASES)])},
            {"logit_bias": tuple([(token, 1.0) for token in range(MAX_BIASES + 1)])},
            "vLLM nodes take a logit_bias of 1024 tokens at most",
        ),
        (
            {"stop_tokens": tuple(range(MAX_STOPS)), "min_tokens": 1},
            {"stop_tokens": tuple(range(MAX_STOPS + 1)), "min_tokens": 1},
            "vLLM nodes take 128 stop tokens at most beside min_tokens",
        ),
        (
            {"grammar": 'start: "a"'},
            {"grammar": 'start: "a"', "min_tokens": 1},
            "vLLM nodes take no min_tokens beside a grammar (response_format, forced tools)",
        ),
        (
            {"grammar": 'start: "a"'},
            {"grammar": 'start: "a"', "allowed_tokens": (1,)},
            "vLLM nodes take no allowed_token_ids beside a grammar (response_format, forced tools)",
        ),
    ],
)
def test_what_would_end_a_server_is_refused(most: dict[str, Any], more: dict[str, Any], said: str) -> None:
    """vLLM's API takes it, and its engine dies of it, or answers what is not allowed."""
    assert objection(Sampling(**most)) == ""
    assert objection(Sampling(**more)) == said
