"""The protocol between the connector in a vLLM worker and the adapter beside it, over a Unix socket.

A frame is its length, 4 bytes little-endian, and one message in msgpack. The worker connects and sends first. Blocks
are in shared memory: saved ones in the worker's, loaded ones in the adapter's. Its descriptor comes with the first
byte of each side's first message (SCM_RIGHTS), so the two may run in containers of their own that share the socket's
folder alone. vLLM's process imports this module, so it must load no torch and no web framework.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import msgspec

from isthmus.core.errors import ProtocolError
from isthmus.live.store.arena import ArenaHandle

PROTOCOL = 4
MAX_FRAME_BYTES = 1 << 26
_LENGTH_BYTES = 4


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First message of a worker. `form`: names all that decides, besides the weights, what a block's bytes mean;
    `model`: the folder of the weights; `memory`: the staging area for saves."""

    protocol: int
    form: str
    model: str
    block_size: int
    memory: ArenaHandle


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Requests consecutive blocks of one prompt. Answered by `Ready`s, and `Short` if blocks are missing."""

    load: int
    key: str
    names: tuple[bytes, ...]


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends a load: the worker reads none of its slots any more. Sent once for each `Load`. `damaged`: number of a block
    whose bytes do not match its seals."""

    load: int
    damaged: int | None = None


class Save(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Offers blocks from number `first` on of an attempt, in slots of the worker's memory until `Free`.
    `seals[i][layer]`; `parent`: name of the block before them."""

    key: str
    first: int
    parent: bytes | None
    names: tuple[bytes, ...]
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class Over(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An attempt ended in vLLM: no `Save` of it follows."""

    key: str


FromWorker = Open | Load | Done | Save | Over


class Arena(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Accepts `Open`: the adapter's store, for reading."""

    memory: ArenaHandle


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Refuses `Open`: why worker and adapter do not fit."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The next blocks of a load, in slots that stay until `Done`."""

    load: int
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class Short(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends a load early: the adapter has no more of its blocks."""

    load: int


class Free(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Frees slots of the worker's memory."""

    slots: tuple[int, ...]


ToWorker = Arena | Refused | Ready | Short | Free

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromWorker).decode


def frame(message: FromWorker | ToWorker) -> bytes:
    data = _encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Frames:
    """Decodes the messages of one direction from a stream of bytes."""

    def __init__(self, direction: object) -> None:
        self._decoder: msgspec.msgpack.Decoder = msgspec.msgpack.Decoder(direction)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[FromWorker | ToWorker]:
        """Yields the messages that `data` completes. Raises ValueError for invalid frames."""
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


def send_with_memory(stream: socket.socket, message: Open | Arena, memory: int) -> None:
    """Sends the first message of one side, and the descriptor of its memory. Raises OSError."""
    data = frame(message)
    if socket.send_fds(stream, [data], [memory]) != len(data):
        raise OSError("a socket that takes no whole message")


def receive_with_memory(stream: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Returns up to `size` bytes, and the descriptors that came with them, to be closed by the caller. Raises
    OSError."""
    data, memories, _, _ = socket.recv_fds(stream, size, 1, socket.MSG_CMSG_CLOEXEC)
    return data, memories


async def read_begin(stream: socket.socket) -> tuple[bytes, list[int]]:
    """As `receive_with_memory`, of the first bytes of a worker, for `read_message`."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(stream, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(stream)
    return receive_with_memory(stream, _LENGTH_BYTES)


async def read_message(reader: asyncio.StreamReader, begin: bytes = b"") -> FromWorker:
    """Returns a worker's next message, of which `begin` was read. Raises EOFError at the end, ProtocolError for an
    invalid one."""
    size = int.from_bytes(begin + await reader.readexactly(_LENGTH_BYTES - len(begin)), "little")
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes from vLLM's connector")
    try:
        return _decode(await reader.readexactly(size))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"vLLM's connector said what cannot be read: {error}") from None
