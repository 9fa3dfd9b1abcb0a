"""What the emulated engine holds: KV bytes in blocks, and the live states of requests.

A layer's state is a ring of digests (`recipe.Recipe.recur`). A step works on copies, which become the live states when
all of it is done: a step that was broken off can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from isthmus.core.blocks import KVLayout
from isthmus.live.engine.interface import Chunk
from isthmus.live.engine.recipe import Recipe


class EmulatedMemory:
    """KV bytes on the host: one array a layer, `[num_blocks * block_size, token_bytes]`."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        size = num_blocks * layout.slice_bytes
        self.layers = [memoryview(bytearray(size)) for _ in range(layout.num_layers)]

    def export(self, layer: int, first: int, stop: int) -> memoryview:
        width = self.layout.token_bytes
        return self.layers[layer][first * width : stop * width]

    landing = export

    def export_heads(self, layer: int, first: int, stop: int, part: int, parts: int) -> memoryview:
        width = self.layout.token_bytes // self.layout.vectors // parts
        vectors = np.frombuffer(self.export(layer, first, stop), np.uint8).reshape(-1, parts, width)
        return memoryview(vectors[:, part].tobytes())

    def split(self, parts: int) -> EmulatedMemory:
        layout = msgspec.structs.replace(self.layout, num_kv_heads=self.layout.num_kv_heads // parts)
        other = EmulatedMemory(layout, 0)
        other.num_blocks, other.layers = self.num_blocks * parts, self.layers
        return other

    def land(self, layer: int, first: int, stop: int, data: memoryview) -> None:
        """Nothing is left to do: the bytes were received in place."""

    def fill(self, layer: int, blocks: Sequence[int], arena: memoryview, offsets: Sequence[int]) -> None:
        size, memory = self.layout.slice_bytes, self.layers[layer]
        for block, at in self._places(blocks, arena, offsets):
            memory[block : block + size] = arena[at : at + size]

    def save(self, layer: int, blocks: Sequence[int], arena: memoryview, offsets: Sequence[int]) -> None:
        size, memory = self.layout.slice_bytes, self.layers[layer]
        for block, at in self._places(blocks, arena, offsets):
            arena[at : at + size] = memory[block : block + size]

    def _places(
        self, blocks: Sequence[int], arena: memoryview, offsets: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Where each block begins in a layer's memory and in the arena."""
        size = self.layout.slice_bytes
        assert all(0 <= block < self.num_blocks for block in blocks), "blocks lie outside the KV memory"
        assert all(0 <= at <= arena.nbytes - size for at in offsets), "offsets lie outside the arena"
        assert len(blocks) == len(offsets), "each block has its place in the arena"
        return [(block * size, at) for block, at in zip(blocks, offsets, strict=True)]


def join_heads(parts: Sequence[memoryview], width: int) -> bytes:
    """What holders of parts of the heads answered, `width` bytes of each vector, as the bytes of all heads."""
    found = [np.frombuffer(each, np.uint8).reshape(-1, width) for each in parts]
    return np.stack(found, axis=1).tobytes()


LayerStates = list[bytearray]
"""The states of one request, one entry a layer."""


class EmulatedStates:
    """Live states by slot, of the layers whose KV `memory` has; none of them is set before a chunk sets it."""

    def __init__(self, recipe: Recipe, memory: EmulatedMemory, max_sequences: int) -> None:
        self._recipe, self._memory, self.max_sequences = recipe, memory, max_sequences
        self._live: dict[int, LayerStates] = {}

    def begin(self, chunks: Sequence[Chunk]) -> Passage:
        """The passage of a batch's chunks through the layers. The blocks they restore from are in place."""
        if not self._recipe.layout.state_bytes:
            return Passage(self._recipe, chunks, [[] for _ in chunks])
        slots = [chunk.slot for chunk in chunks]
        assert len(set(slots)) == len(slots), "each request of a batch has a live state of its own"
        assert all(0 <= slot < self.max_sequences for slot in slots), "slots lie among those the engine has"
        return Passage(self._recipe, chunks, [self._before(chunk) for chunk in chunks])

    def finish(self, passage: Passage) -> None:
        """All layers are done: states and snapshots are where others find them."""
        for chunk, states in zip(passage.chunks, passage.states, strict=True):
            if states:
                self._live[chunk.slot] = states
        for blocks, states in passage.snapshots():
            self._write(blocks, states)

    def _before(self, chunk: Chunk) -> LayerStates:
        """What a chunk goes on from."""
        if chunk.start == 0:
            return self._zeros()
        if chunk.restore:
            return self._read(chunk.restore)
        live = self._live.get(chunk.slot)
        return [bytearray(state) for state in live] if live is not None else self._zeros()

    def _zeros(self) -> LayerStates:
        return [bytearray(self._recipe.layer_state_bytes) for _ in self._memory.layers]

    def _read(self, blocks: Sequence[int]) -> LayerStates:
        memory, size = self._memory.layers, self._recipe.layer_state_bytes
        data = b"".join([memory[layer][first:stop] for layer, first, stop in self._slices(blocks)])
        return [bytearray(data[at * size : (at + 1) * size]) for at in range(len(memory))]

    def _write(self, blocks: Sequence[int], states: LayerStates) -> None:
        data = b"".join(states)
        data += bytes(len(blocks) * self._memory.layout.block_bytes - len(data))
        at = 0
        for layer, first, stop in self._slices(blocks):
            self._memory.layers[layer][first:stop] = data[at : at + stop - first]
            at += stop - first

    def _slices(self, blocks: Sequence[int]) -> list[tuple[int, int, int]]:
        """Layer and byte range of every slice of some blocks, in the order in which a snapshot fills them."""
        assert len(blocks) == self._recipe.layout.state_blocks, "a snapshot has its number of blocks"
        size, layers = self._memory.layout.slice_bytes, range(len(self._memory.layers))
        return [(layer, block * size, (block + 1) * size) for block in blocks for layer in layers]


class Passage:
    """A batch on its way through the layers: the states of its chunks so far, and those that are to be kept."""

    def __init__(self, recipe: Recipe, chunks: Sequence[Chunk], states: list[LayerStates]) -> None:
        self._recipe, self.chunks, self.states = recipe, chunks, states
        self._kept: list[list[LayerStates]] = [[[] for _ in chunk.snapshots] for chunk in chunks]

    def recur(self, index: int, layer: int, below: Sequence[bytes]) -> Sequence[bytes]:
        """Takes a chunk's tokens into its state of a layer; gives what goes on to the layer's KV."""
        if not self.states[index]:
            return below
        chunk, state, found, at = self.chunks[index], self.states[index][layer], list[bytes](), 0
        for (position, _), kept in zip(chunk.snapshots, self._kept[index], strict=True):
            assert chunk.start + at < position <= chunk.stop, "snapshots lie inside their chunk, in order"
            found += self._recipe.recur(state, chunk.start + at, below[at : position - chunk.start])
            kept.append(bytearray(state))
            at = position - chunk.start
        found += self._recipe.recur(state, chunk.start + at, below[at:])
        return found

    def state(self, index: int, layer: int) -> bytes | bytearray:
        """A chunk's state of a layer after its last token so far."""
        return self.states[index][layer] if self.states[index] else b""

    def snapshots(self) -> list[tuple[tuple[int, ...], LayerStates]]:
        """The blocks and the states of all snapshots."""
        return [
            (blocks, states)
            for chunk, kept in zip(self.chunks, self._kept, strict=True)
            for (_, blocks), states in zip(chunk.snapshots, kept, strict=True)
            if states
        ]
