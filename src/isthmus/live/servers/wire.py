"""What the connector in a vLLM worker and the adapter beside it say to each other, over a Unix socket.

Each frame is its length, 4 bytes little-endian, and one message in msgpack. The connector is a distribution of its own
(`connectors/vllm`) and has these messages once more; a test compares the bytes. Blocks themselves lie in shared memory:
what is saved in the worker's, what is loaded in the adapter's.
"""

from __future__ import annotations

import asyncio

import msgspec

from isthmus.core.errors import ProtocolError

PROTOCOL = 2
MAX_FRAME_BYTES = 1 << 26


class Memory(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Shared memory, laid out as `isthmus.live.store.Arena` is: slots of a block each, its layers one after the
    other."""

    path: str
    nonce: bytes
    num_slots: int
    num_layers: int
    slice_bytes: int


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First message of a worker. `form`: what, beside the weights, decides what the bytes of a block mean; `model`: the
    folder that these are from; `memory`: what it saves from."""

    protocol: int
    form: str
    model: str
    block_size: int
    memory: Memory


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It wants these blocks, consecutive ones of one prompt. Answered by `Ready`s, or one `Short`."""

    load: int
    key: str
    names: tuple[bytes, ...]


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All of a load is copied, or given up. `damaged`: which of its blocks had other bytes than its seals say."""

    load: int
    damaged: int | None = None


class Save(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks number `first` and following of an attempt lie in these slots of the worker's memory; `seals[i][layer]`.
    `parent`: the block before them."""

    key: str
    first: int
    parent: bytes | None
    names: tuple[bytes, ...]
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class Over(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An attempt ended in vLLM, and no `Save` of it will follow."""

    key: str


FromWorker = Open | Load | Done | Save | Over


class Arena(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Open`: the adapter's store, to be read."""

    memory: Memory


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Open`: they do not fit, and why."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The next blocks of a load are in these slots, and stay until `Done`."""

    load: int
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class Short(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No more will come of a load."""

    load: int


class Free(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Slots of the worker's memory that may be filled again."""

    slots: tuple[int, ...]


ToWorker = Arena | Refused | Ready | Short | Free

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromWorker).decode


def frame(message: ToWorker) -> bytes:
    data = _encode(message)
    return len(data).to_bytes(4, "little") + data


async def read_message(reader: asyncio.StreamReader) -> FromWorker:
    """Raises EOFError at the end, ProtocolError for what is none."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes from vLLM's connector")
    try:
        return _decode(await reader.readexactly(size))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"vLLM's connector said what cannot be read: {error}") from None
