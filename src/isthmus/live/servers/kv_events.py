"""KV events of a vLLM server (0.32, `distributed/kv_events.py`), translated to block names.

A block's name follows from its tokens and its parent's name, whatever hashes the server uses. The server does not merge
equal blocks: each copy has its own events. A missing batch is requested again; if the server no longer has it, all
earlier events are void.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from isthmus.core.blocks import BlockNamer, names_by
from isthmus.core.node import events
from isthmus.core.types import BlockName

log = logging.getLogger(__name__)

Hash = int | bytes
NamerOf = Callable[[str, str], BlockNamer | None]
"""Returns the namer for a `cache_salt` and a LoRA adapter ("": none); None if nobody here names such blocks."""

REPLAY_S, LONGEST_REPLAY_S = 2.0, 60.0
"""How long a replay may be silent, and take."""
HEARTBEAT_MS = 5000
MAX_BATCH_BYTES = 8 << 20
"""Of one step of a server; who sends more is cut off."""
MAX_WAITING = 10_000
"""Batches that wait to be read; later ones are lost, and requested again."""
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


class SavedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """What a `Translator` knows. `blocks`: group, hash, number of copies, name, and index among the `keys` of names."""

    keys: tuple[bytes, ...]
    blocks: tuple[tuple[int, Hash, int, bytes, int], ...]


class Translator:
    """Translates events to facts for a node. Blocks with an unknown parent, or whose KV depends on more than tokens,
    a salt and an adapter, get no name and are ignored; so are those above `most_blocks` at once (0: any number)."""

    def __init__(self, namer_of: NamerOf, block_size: int, most_blocks: int = 0) -> None:
        self._namer_of, self._block_size, self._most_blocks = namer_of, block_size, most_blocks
        self._known: dict[tuple[int, Hash], tuple[int, bytes, bytes]] = {}
        """Number of copies, name, and key of the names of following blocks, by group and hash."""

    def batch(self, data: bytes) -> list[events.EngineBlocks]:
        """Translates one batch, in msgpack. Raises msgspec.DecodeError, or RecursionError for one that is nested too
        deeply."""
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

    def held(self) -> tuple[BlockName, ...]:
        """Returns the names of all blocks, each as often as there are copies of it."""
        return tuple([name for copies, name, _ in self._known.values() for _ in range(copies)])

    def entries(self) -> list[tuple[tuple[int, Hash], tuple[int, bytes, bytes]]]:
        """Returns all that is known; `saved` of it is for `restore`."""
        return list(self._known.items())

    def restore(self, saved: SavedBlocks) -> None:
        """Takes up what another translator with equal names knew. Raises IndexError for keys that are not there."""
        for group, hashed, copies, name, key in saved.blocks:
            self._known[group, hashed] = copies, name, saved.keys[key]

    def _stored(self, event: BlockStored) -> list[events.EngineBlocks]:
        if event.block_size != self._block_size or event.medium not in (None, "GPU"):
            return []
        if self._most_blocks and len(self._known) + len(event.block_hashes) > self._most_blocks:
            return []
        group = event.group_idx or 0
        found = self._names(event, group)
        held: list[BlockName] = []
        for (name, key), hashed in zip(found, event.block_hashes, strict=False):
            copies, first, key_next = self._known.get((group, hashed), (0, name, key))
            self._known[group, hashed] = copies + 1, first, key_next
            held.append(name)
        return [events.EngineBlocks(tuple(held))] if held else []

    def _names(self, event: BlockStored, group: int) -> list[tuple[bytes, bytes]]:
        adapter = event.lora_name or ""
        keys = [_without(adapter, each) for each in event.extra_keys or []]
        first = keys[0] if keys else None
        if any(each for each in keys[1:]) or (first and (len(first) > 1 or not isinstance(first[0], str))):
            return []  # images, embeddings
        parent: bytes | None = None
        if event.parent_block_hash is not None:
            before = self._known.get((group, event.parent_block_hash))
            if before is None or first:
                return []
            _, parent, key = before
        else:
            known = self._namer_of(str(first[0]) if first else "", adapter)
            if known is None:
                return []
            key = known.key
        try:
            names = names_by(key, self._block_size, event.token_ids, parent=parent)
        except OverflowError:  # no tokens
            return []
        return [(name, key) for name in names if isinstance(name, bytes)]

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


def _without(adapter: str, keys: list[Any] | None) -> list[Any]:
    """The keys of a block without its adapter's name, which comes first."""
    return keys[1:] if adapter and keys and keys[0] == adapter else keys or []


def saved(entries: Iterable[tuple[tuple[int, Hash], tuple[int, bytes, bytes]]]) -> SavedBlocks:
    """Returns the entries of a translator as they are saved."""
    keys: dict[bytes, int] = {}
    blocks = [(*place, copies, name, keys.setdefault(key, len(keys))) for place, (copies, name, key) in entries]
    return SavedBlocks(tuple(keys), tuple(blocks))


class EventListener:
    """Follows a server's events. `heard` takes all batches, in order; `void` is called when batches are lost, and all
    earlier ones must be forgotten; `recovered` after each replay. `replay`: the endpoint where missing batches are
    requested, if any; `start`: number of the first batch to hear, of those before which nothing is missing. `is_whole`:
    every batch since the server's start was heard. `next_number`: of the batch that comes next."""

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        heard: Callable[[bytes], None],
        void: Callable[[], None],
        topic: str = "",
        recovered: Callable[[], None] = lambda: None,
        start: int = 0,
    ) -> None:
        self._replay, self._heard, self._void, self._recovered = replay, heard, void, recovered
        self.is_whole = start > 0
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._new_socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._next = start
        self._live = start - 1
        """Number of the last published batch. Numbers of one server only grow."""
        self._first = b""
        """Batch number 0, with its time: another one is of a new server."""

    @property
    def next_number(self) -> int:
        return self._next

    def _new_socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)  # a connection that is dead is made anew
        return socket

    async def run(self) -> None:
        """Listens until cancelled, after requesting all earlier batches."""
        try:
            await self._recover(None)
            while True:
                frames = await self._socket.recv_multipart()
                if len(frames) == 3:
                    await self._take(int.from_bytes(frames[1][:_SEQUENCE_BYTES], "big"), frames[2])
                await asyncio.sleep(0)  # a flood of them leaves the loop to others
        finally:
            self._socket.close(linger=0)
            self._context.destroy(linger=0)

    async def _take(self, number: int, payload: bytes) -> None:
        if number <= self._live or (number == 0 < self._next and payload != self._first):
            log.warning("vLLM's KV events begin anew: what it had is forgotten")
            self.is_whole = False
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
            self._first, self.is_whole = payload, True
        try:
            self._heard(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("vLLM's KV events cannot be read: %s", error)

    async def _recover(self, stop: int | None) -> None:
        """Requests missing batches before number `stop`, or all of the server's batches."""
        has_ended = False
        if self._replay is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_REPLAY_S):
                    await self._replayed(self._replay, stop)
                    has_ended = True
        if stop is None and self.is_whole and not has_ended:
            self._lose(0)  # there may be more
        if stop is not None and self._next < stop:
            self._lose(stop)
        self._recovered()

    def _lose(self, next_number: int) -> None:
        """Goes on with a batch of that number, after a gap."""
        log.warning(
            "%d batches of vLLM's KV events are lost: what it had is forgotten", next_number - self._next
        )
        self.is_whole = False
        self._void()
        self._next = next_number

    async def _replayed(self, endpoint: str, stop: int | None) -> None:
        """Takes the batches from the next number on that the server still has, until one comes not for `REPLAY_S`."""
        socket = self._new_socket(zmq.DEALER)
        socket.connect(endpoint)
        try:
            await socket.send_multipart([b"", self._next.to_bytes(_SEQUENCE_BYTES, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                if len(frames) < 2:
                    continue
                number = int.from_bytes(frames[-2][:_SEQUENCE_BYTES], "big")
                if number == _REPLAY_END:
                    self.is_whole |= self._next == 0  # it has not said anything yet
                    return
                if stop is None and number > self._next:
                    self._lose(number)  # it keeps no more
                if number == self._next and (stop is None or number < stop):
                    self._tell(number, frames[-1])
                await asyncio.sleep(0)
        finally:
            socket.close(linger=0)
