"""KV events of a vLLM server (0.32, `distributed/kv_events.py`), translated to block names.

A block's name follows from its tokens and its parent's name, whatever hashes the server uses. The server does not merge
equal blocks: each copy has its own events. A missing batch is requested again; if the server no longer has it, all
earlier events are void.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from isthmus.core.blocks import BlockNamer
from isthmus.core.node import events
from isthmus.core.types import BlockName

log = logging.getLogger(__name__)

Hash = int | bytes
NamerOf = Callable[[str], BlockNamer | None]
"""Returns the namer for a `cache_salt` ("": none); None for one that this node did not send."""

REPLAY_S = 2.0
_SEQUENCE_BYTES = 8
_REPLAY_END = (1 << 64) - 1


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch).decode
_event = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared).decode


class Translator:
    """Translates events to facts for a node. Blocks with an unknown parent, or whose KV depends on more than tokens
    and a salt, get no name and are ignored."""

    def __init__(self, namer_of: NamerOf, block_size: int) -> None:
        self._namer_of, self._block_size = namer_of, block_size
        self._known: dict[tuple[int, Hash], tuple[int, bytes, BlockNamer]] = {}
        """Number of copies, name, and namer of following blocks, by group and hash."""

    def batch(self, data: bytes) -> list[events.EngineBlocks]:
        """Translates one batch, in msgpack. Raises msgspec.DecodeError."""
        facts: list[events.EngineBlocks] = []
        for raw in _batch(data).events:
            try:
                event = _event(raw)
            except msgspec.ValidationError:
                continue  # a kind of a later version
            if isinstance(event, BlockStored):
                facts += self._stored(event)
            elif isinstance(event, BlockRemoved):
                facts += self._removed(event)
            else:
                facts += self.clear()
        return facts

    def clear(self) -> list[events.EngineBlocks]:
        self._known.clear()
        return [events.EngineBlocks(cleared=True)]

    def _stored(self, event: BlockStored) -> list[events.EngineBlocks]:
        if event.block_size != self._block_size or event.medium not in (None, "GPU") or event.lora_name:
            return []
        group = event.group_idx or 0
        found = self._names(event, group)
        held: list[BlockName] = []
        for (name, namer), hashed in zip(found, event.block_hashes, strict=False):
            copies, first, names_next = self._known.get((group, hashed), (0, name, namer))
            self._known[group, hashed] = copies + 1, first, names_next
            held.append(name)
        return [events.EngineBlocks(tuple(held))] if held else []

    def _names(self, event: BlockStored, group: int) -> list[tuple[bytes, BlockNamer]]:
        keys = event.extra_keys or []
        first = keys[0] if keys else None
        if any(each for each in keys[1:]) or (first and (len(first) > 1 or not isinstance(first[0], str))):
            return []  # images, adapters, embeddings
        parent: bytes | None = None
        if event.parent_block_hash is not None:
            before = self._known.get((group, event.parent_block_hash))
            if before is None or first:
                return []
            _, parent, namer = before
        else:
            known = self._namer_of(str(first[0]) if first else "")
            if known is None:
                return []
            namer = known
        names = namer.names(event.token_ids, parent=parent)
        return [(name, namer) for name in names if isinstance(name, bytes)]

    def _removed(self, event: BlockRemoved) -> list[events.EngineBlocks]:
        if event.medium not in (None, "GPU"):
            return []
        group, gone = event.group_idx or 0, []
        for hashed in event.block_hashes:
            known = self._known.pop((group, hashed), None)
            if known is not None:
                gone.append(known[1])
                if known[0] > 1:
                    self._known[group, hashed] = known[0] - 1, known[1], known[2]
        return [events.EngineBlocks(removed=tuple(gone))] if gone else []


class EventListener:
    """Follows a server's events. `heard` takes all batches, in order; `void` is called when batches are lost, and all
    earlier ones must be forgotten. `replay`: the endpoint where missing batches are requested, if any."""

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        heard: Callable[[bytes], None],
        void: Callable[[], None],
        topic: str = "",
    ) -> None:
        self._replay, self._heard, self._void = replay, heard, void
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._next = 0
        self._live = -1
        """Number of the last published batch. Numbers of one server only grow."""
        self._first = b""
        """Batch number 0, with its time: another one is of a new server."""

    async def run(self) -> None:
        """Listens until cancelled, after requesting all earlier batches."""
        try:
            await self._recover(None)
            while True:
                _, sequence, payload = await self._socket.recv_multipart()
                await self._take(int.from_bytes(sequence, "big"), payload)
        finally:
            self._socket.close(linger=0)
            self._context.destroy(linger=0)

    async def _take(self, number: int, payload: bytes) -> None:
        if number <= self._live or (number == 0 < self._next and payload != self._first):
            log.warning("vLLM's KV events begin anew: what it had is forgotten")
            self._void()
            self._next = 0
        self._live = number
        if number > self._next:
            await self._recover(number)
        if number >= self._next:  # else it was replayed
            self._tell(number, payload)

    def _tell(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        if not number:
            self._first = payload
        try:
            self._heard(payload)
        except msgspec.DecodeError as error:
            log.warning("vLLM's KV events cannot be read: %s", error)

    async def _recover(self, stop: int | None) -> None:
        """Requests missing batches before number `stop`, or all of the server's batches."""
        missing = await self._replayed(self._replay, self._next) if self._replay is not None else ()
        for number, payload in missing:
            if number == self._next and (stop is None or number < stop):
                self._tell(number, payload)
        if stop is not None and self._next < stop:
            log.warning("%d batches of vLLM's KV events are lost: what it had is forgotten", stop - self._next)
            self._void()
            self._next = stop

    async def _replayed(self, endpoint: str, first: int) -> Sequence[tuple[int, bytes]]:
        """Returns the batches from number `first` on that the server still has, within `REPLAY_S`."""
        socket, found = self._context.socket(zmq.DEALER), []
        socket.connect(endpoint)
        try:
            await socket.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")])
            async with asyncio.timeout(REPLAY_S):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 2:
                        continue
                    sequence, payload = frames[-2], frames[-1]
                    number = int.from_bytes(sequence, "big")
                    if number == _REPLAY_END:
                        break
                    found.append((number, payload))
        except TimeoutError:
            pass
        finally:
            socket.close(linger=0)
        return found
