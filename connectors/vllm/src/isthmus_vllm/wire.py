"""What the worker process of vLLM and the Isthmus node beside it (the adapter) say to each other, and its frames.

A frame is four bytes of length, little-endian, and one message in msgpack. KV bytes never pass the socket: both sides
share memory, and messages say which slots of it hold what. Only the worker connects, and it speaks first.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

PROTOCOL = 2
MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4


class Memory(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Shared memory of `num_slots` slots of one block each; see `isthmus_vllm.memory`."""

    path: str
    nonce: bytes
    num_slots: int
    num_layers: int
    slice_bytes: int


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker's first message. Equal forms, and weights of equal folders `model`: pages mean the same. `memory` is
    the staging area the adapter reads."""

    protocol: int
    form: str
    model: str
    block_size: int
    memory: Memory


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker wants these blocks, consecutive ones of one request's chain."""

    load: int
    key: str
    names: tuple[bytes, ...]


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker reads nothing of this load any more. Once per `Load`, unless the connection is lost before. `damaged`:
    which of its blocks had other bytes than its seals say, if one had."""

    load: int
    damaged: int | None = None


class Save(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks number `first`… of a request's chain lie in these staging slots, until `Free`. Seals: [block][layer]."""

    key: str
    first: int
    parent: bytes | None
    names: tuple[bytes, ...]
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class Over(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request has ended in vLLM; no `Save` of it follows."""

    key: str


class Arena(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to `Open`: the adapter's store, for reading."""

    memory: Memory


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to `Open`: the worker does nothing from then on."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The next blocks of this load, in order, lie in these slots of the arena, pinned until `Done`."""

    load: int
    slots: tuple[int, ...]
    seals: tuple[tuple[bytes, ...], ...]


class Short(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No more blocks of this load will come."""

    load: int


class Free(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These staging slots may be filled again."""

    slots: tuple[int, ...]


ToAdapter = Open | Load | Done | Save | Over
ToWorker = Arena | Refused | Ready | Short | Free


def framed(message: ToAdapter | ToWorker) -> bytes:
    """The message as it goes over the socket."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Frames:
    """Turns a stream of bytes into messages of one direction."""

    def __init__(self, direction: object) -> None:
        self._decoder: msgspec.msgpack.Decoder = msgspec.msgpack.Decoder(direction)
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[ToAdapter | ToWorker]:
        """The messages that `data` completes. Raises ValueError for what no honest peer sends."""
        self._pending += data
        while len(self._pending) >= _LENGTH_BYTES:
            length = int.from_bytes(self._pending[:_LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = _LENGTH_BYTES + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH_BYTES:end])
            del self._pending[:end]
            yield self._decoder.decode(body)  # msgspec's errors are ValueErrors
