"""The connector and the adapter, which cannot import each other, say the same things in the same bytes."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import msgspec
import pytest

from isthmus.live.servers import wire as adapter
from isthmus_vllm import wire as connector

MEMORY = ("/proc/1/fd/3", b"n" * 16, 4, 3, 64)
FIELDS: dict[str, tuple[Any, ...]] = {
    "Open": (1, "form", "m", 32),
    "Load": (7, "r#1", (b"a" * 16, b"b" * 16)),
    "Done": (7, 2),
    "Save": ("r#1", 2, b"p" * 16, (b"a" * 16,), (3,), ((b"s" * 16, b"t" * 16),)),
    "Over": ("r#1",),
    "Arena": (),
    "Refused": ("why",),
    "Ready": (7, (1, 2), ((b"s" * 16,), (b"t" * 16,))),
    "Short": (7,),
    "Free": ((1, 2),),
}


def message(side: Any, name: str) -> Any:
    last = [side.Memory(*MEMORY)] if name in ("Open", "Arena") else []
    return getattr(side, name)(*FIELDS[name], *last)


@pytest.mark.parametrize("name", FIELDS)
def test_a_message_is_the_same_bytes_on_both_sides(name: str) -> None:
    one, other = (msgspec.msgpack.encode(message(side, name)) for side in (adapter, connector))
    assert one == other


def test_every_message_is_compared() -> None:
    assert {each.__name__ for each in (*get_args(adapter.FromWorker), *get_args(adapter.ToWorker))} == set(
        FIELDS
    )
    assert adapter.PROTOCOL == connector.PROTOCOL


def test_what_the_connector_frames_the_adapter_reads() -> None:
    async def read() -> Any:
        reader = asyncio.StreamReader()
        data = msgspec.msgpack.encode(message(connector, "Save"))
        reader.feed_data(len(data).to_bytes(4, "little") + data)
        return await adapter.read_message(reader)

    assert asyncio.run(read()) == message(adapter, "Save")
