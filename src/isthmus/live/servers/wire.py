"""What the connector in a vLLM worker and the adapter beside it say to each other, over a Unix socket.

Each frame is its length, 4 bytes little-endian, and one message in msgpack. The worker connects and speaks first.
Blocks themselves lie in shared memory: what is saved in the worker's, what is loaded in the adapter's. The connector
(`connectors/vllm`) imports this module in vLLM's process: it loads no torch and no web framework.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from isthmus.core.errors import ProtocolError
from isthmus.live.store.arena import ArenaHandle

PROTOCOL = 3
MAX_FRAME_BYTES = 1 << 26
_LENGTH_BYTES = 4


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First message of a worker. `form`: what, beside the weights, decides what the bytes of a block mean; `model`: the
    folder that these are from; `memory`: the staging area that it saves from."""

    protocol: int
    form: str
    model: str
    block_size: int
    memory: ArenaHandle


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It wants these blocks, consecutive ones of one prompt. Answered by `Ready`s, or one `Short`."""

    load: int
    key: str
    names: tuple[bytes, ...]


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All of a load is copied, or given up: the worker reads nothing of it any more. Once a `Load`, unless the
    connection is lost before. `damaged`: which of its blocks had other bytes than its seals say."""

    load: int
    damaged: int | None = None


class Save(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks number `first` and following of an attempt lie in these slots of the worker's memory, until `Free`;
    `seals[i][layer]`. `parent`: the block before them."""

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

    memory: ArenaHandle


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Open`: they do not fit, and why. The worker does nothing from then on."""

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


def frame(message: FromWorker | ToWorker) -> bytes:
    data = _encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Frames:
    """The messages of one direction in a stream of bytes, for a thread."""

    def __init__(self, direction: object) -> None:
        self._decoder: msgspec.msgpack.Decoder = msgspec.msgpack.Decoder(direction)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[FromWorker | ToWorker]:
        """The messages that `data` completes. Raises ValueError for what no honest peer sends."""
        self._pending += data
        while len(self._pending) >= _LENGTH_BYTES:
            size = int.from_bytes(self._pending[:_LENGTH_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            end = _LENGTH_BYTES + size
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH_BYTES:end])
            del self._pending[:end]
            yield self._decoder.decode(body)  # msgspec's errors are ValueErrors


async def read_message(reader: asyncio.StreamReader) -> FromWorker:
    """A worker's next message. Raises EOFError at the end, ProtocolError for what is none."""
    size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes from vLLM's connector")
    try:
        return _decode(await reader.readexactly(size))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"vLLM's connector said what cannot be read: {error}") from None
