"""CPU time that moving KV takes of a node: copying, sealing, sending, receiving, encoding; for `isthmus profile`.

Each is measured on real KV of an engine. KV is sent layer by layer while the engine computes: caches then hold the
weights, and the event loop sleeps between layers, so that a layer costs several times as much as in one go. Both ends
of the session over loopback are in this process, each in an event loop of its own. CPU time of their threads counts,
not time spent waiting for a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from isthmus.bench.child import Loop
from isthmus.bench.study import in_turns, medians, timed
from isthmus.core.blocks import seal
from isthmus.core.cost.transfer import INT8, ZSTD, CodecSpeed, Handling
from isthmus.live.engine import codecs
from isthmus.live.engine.interface import KVBytes, OnLayer
from isthmus.live.messenger import Session, TcpNetwork
from isthmus.live.peers.sessions import NoPayloads

MAX_BLOCKS = 16
"""Blocks of a layer that are moved together: a chunk of a prompt."""
ROUNDS, PINGS = 5, 50
TIMEOUT_S = 60.0


class Layer(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a layer, as payload, and the seal of each."""

    layer: int
    seals: tuple[bytes, ...]


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered with the CPU seconds of the other end so far."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    computed_s: float
    damaged: int


Message = Layer | Ping | Pong

Compute = Callable[[int, OnLayer], object]
"""Computes a prompt of a number of blocks into the first blocks."""


def measure_handling(memory: KVBytes, compute: Compute, *, most: int, shares_core: bool) -> Handling:
    """`memory`: the engine's; its first blocks, twice as many as a prompt has, are overwritten. `most`: blocks of the
    longest prompt that `compute` takes. `shares_core`: the engine's threads take all there are."""
    count = min(MAX_BLOCKS, memory.num_blocks // 2, most)
    with contextlib.closing(_Session(memory, count)) as session:
        few, many = (session.hand_over(compute, blocks) for blocks in (1, count))
        message_s = session.message_s()
    load_s, save_s = _copied(memory, count)
    num_layers, block_bytes = memory.layout.num_layers, memory.layout.block_bytes
    (send_layer_s, send_byte_s), (receive_layer_s, receive_byte_s) = (
        _line(num_layers, block_bytes, less_s, count * block_bytes, more_s)
        for less_s, more_s in zip(few, many, strict=True)
    )
    return Handling(
        load_byte_s=load_s / (count * block_bytes),
        save_byte_s=save_s / (count * block_bytes),
        send_layer_s=send_layer_s,
        send_byte_s=send_byte_s,
        receive_layer_s=receive_layer_s,
        receive_byte_s=receive_byte_s,
        message_s=message_s,
        shares_core=shares_core,
        zstd=_coded(ZSTD, memory, count),
        int8=_coded(INT8, memory, count),
    )


def _line(num_layers: int, less: int, less_s: float, more: int, more_s: float) -> tuple[float, float]:
    """Seconds a layer, and a byte, from two sizes; none is negative, whatever the noise."""
    byte_s = max(0.0, more_s - less_s) / (more - less) if more > less else 0.0
    return max(0.0, less_s - byte_s * less) / num_layers, byte_s


def _copied(memory: KVBytes, count: int) -> tuple[float, float]:
    """Seconds to copy the blocks from an arena, and to copy them to it and seal them."""
    layout, width = memory.layout, memory.layout.slice_bytes
    arena, blocks = memoryview(bytearray(count * layout.block_bytes)), range(count)
    places = [[(layer * count + at) * width for at in blocks] for layer in range(layout.num_layers)]

    def save() -> None:
        for layer, offsets in enumerate(places):
            memory.save(layer, blocks, arena, offsets)
            for at in offsets:
                seal(arena[at : at + width])

    def load() -> None:
        for layer, offsets in enumerate(places):
            memory.fill(layer, range(count, 2 * count), arena, offsets)

    found = medians(in_turns({"save": partial(timed, save), "load": partial(timed, load)}, ROUNDS))
    return found["load"], found["save"]


def _coded(codec: str, memory: KVBytes, count: int) -> CodecSpeed:
    layout, tokens = memory.layout, count * memory.layout.block_size
    sources = [memory.export(layer, 0, tokens) for layer in range(layout.num_layers)]
    target = memoryview(bytearray(len(sources[0])))
    data: list[codecs.Data] = []

    def encode() -> None:
        data[:] = [codecs.encode(codec, layout, [source], tokens) for source in sources]

    def decode() -> None:
        for each in data:
            codecs.decode(codec, layout, each, [target], tokens)

    sides = {"encode": partial(_computed, encode), "decode": partial(_computed, decode)}
    size, found = sum(map(len, sources)), medians(in_turns(sides, ROUNDS))
    return CodecSpeed(sum(map(len, data)) / size, size / found["encode"], size / found["decode"])


def _computed(work: Callable[[], object]) -> float:
    """Seconds of this thread on a core."""
    return max(1e-9, timed(work, time.thread_time))


class _Session:
    """From the first blocks of a memory to those after the first `count`."""

    def __init__(self, memory: KVBytes, count: int) -> None:
        self._memory, self._size = memory, memory.layout.block_size
        self._near, self._far = Loop(TIMEOUT_S), Loop(TIMEOUT_S)
        first = count * self._size
        self._end = _End(memory, 0)
        self._server, port = self._far.run(
            TcpNetwork().listen("127.0.0.1", 0, Message, lambda: _End(memory, first))
        )
        connect = TcpNetwork().connect(f"127.0.0.1:{port}", Message, self._end, timeout_s=TIMEOUT_S)
        self._session = self._near.run(connect)

    def close(self) -> None:
        self._near.run(self._over())
        self._far.soon(self._server.close)
        self._near.close()
        self._far.close()

    async def _over(self) -> None:
        self._session.abort("all is measured")
        await asyncio.wait_for(self._end.closed.wait(), TIMEOUT_S)

    def hand_over(self, compute: Compute, num_blocks: int) -> tuple[float, float]:
        """CPU seconds of both ends for a prompt of `num_blocks`; medians."""

        def on_layer(layer: int) -> None:
            self._near.soon(self._send, layer, num_blocks)

        def once() -> tuple[float, float]:
            before = self._near.run(self._ping())
            compute(num_blocks, on_layer)
            sent_s, received_s = self._near.run(self._ping())
            return sent_s - before[0], received_s - before[1]

        sent, received = zip(*in_turns({"": once}, ROUNDS)[""], strict=True)
        return statistics.median(sent), statistics.median(received)

    def message_s(self) -> float:
        """Seconds that a message takes; the median of answered ones, halved."""

        async def trip() -> float:
            started_s = time.perf_counter()
            await self._ping()
            return time.perf_counter() - started_s

        return statistics.median([self._near.run(trip()) for _ in range(PINGS)]) / 2

    def _send(self, layer: int, num_blocks: int) -> None:
        stop = num_blocks * self._size
        seals = _seals(self._memory, layer, 0, stop)
        self._session.send(Layer(layer, seals), self._memory.export(layer, 0, stop))

    async def _ping(self) -> tuple[float, float]:
        """Seconds that both ends have computed, when all that was sent has come."""
        self._session.send(Ping())
        pong = await asyncio.wait_for(self._end.pongs.get(), TIMEOUT_S)
        assert pong is not None, "the session over loopback ended"
        assert not pong.damaged, "KV came damaged over loopback"
        return time.thread_time(), pong.computed_s


class _End(NoPayloads):
    """One side: takes layers into the slots from `first` on, checks them, and reports the CPU time of its thread."""

    def __init__(self, memory: KVBytes, first: int) -> None:
        self._memory, self._first = memory, first
        self._landing: dict[int, memoryview] = {}
        self._damaged = 0
        self.pongs: asyncio.Queue[Pong | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    def _slots(self, message: Layer) -> tuple[int, int]:
        return self._first, self._first + len(message.seals) * self._memory.layout.block_size

    def place(self, session: Session, message: Layer, size: int) -> Sequence[memoryview]:
        self._landing[message.layer] = self._memory.landing(message.layer, *self._slots(message))
        return [self._landing[message.layer]]

    def on_message(self, session: Session, message: Message) -> None:
        match message:
            case Layer(layer, seals):
                slots = self._slots(message)
                self._memory.land(layer, *slots, self._landing.pop(layer))
                self._damaged += _seals(self._memory, layer, *slots) != seals
            case Ping():
                session.send(Pong(time.thread_time(), self._damaged))
            case Pong():
                self.pongs.put_nowait(message)

    def on_close(self, session: Session, reason: str) -> None:
        self.pongs.put_nowait(None)
        self.closed.set()


def _seals(memory: KVBytes, layer: int, first: int, stop: int) -> tuple[bytes, ...]:
    size = memory.layout.block_size
    return tuple([seal(memory.export(layer, at, at + size)) for at in range(first, stop, size)])
