"""Emulated engine: tokens are digests of all KV bytes, so that any wrong byte shows; time is the cost model's.

Every iteration reads all KV bytes up to a token's position from memory, in every layer, and digests them into the
token (`recipe`), with the live state of its request in models with recurrent layers. A stale, foreign or damaged byte
changes the token that reads it and all that follow. Of the sampling parameters only constraints matter;
log-probabilities are 0. The score of a prompt's token is a digest of it and of the KV bytes before it, in (-1, 0].
Holders answer queries with their KV bytes, because digests need all bytes in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from isthmus.core.blocks import KVLayout
from isthmus.core.cost import NodeCost
from isthmus.core.errors import ProtocolError, StartError
from isthmus.core.types import Reused, Sampling, TokenLogprobs
from isthmus.live.engine.constraints import Constraints
from isthmus.live.engine.interface import (
    Asking,
    BeforeLayer,
    Chunk,
    Elsewhere,
    Hidden,
    HolderQueries,
    OnLayer,
    OnScores,
    Row,
    Sampled,
    runs_of,
    stage_layout,
)
from isthmus.live.engine.recipe import (
    LAYERS,
    TOKEN_BYTES,
    Recipe,
    expected_tokens,
    layout_of,
    length_of,
    recipe_of,
    vocab_of,
)
from isthmus.model_files.grammar_limits import GRAMMAR_LIMITS, GrammarLimits

__all__ = [
    "LAYERS",
    "EmulatedBatch",
    "EmulatedEngine",
    "EmulatedMemory",
    "PacedEngine",
    "Recipe",
    "expected_tokens",
    "layout_of",
    "length_of",
    "recipe_of",
    "vocab_of",
]


@dataclass
class EmulatedBatch:
    """Chunks of a run, with its start and the engine time of its iterations so far (for `PacedEngine`)."""

    chunks: list[Chunk]
    order: list[int]
    started_ns: int = 0
    elapsed_ps: int = 0
    reused: dict[int, Reused] = field(default_factory=dict)

    @property
    def restores(self) -> bool:
        """Whether a live state comes from blocks."""
        return any(chunk.restore for chunk in self.chunks)

    def advance(self, tokens: Sequence[int]) -> None:
        """Moves a batch of decodes on by one position each, with the tokens just sampled."""
        assert len(self.order) == len(self.chunks), "only decodes advance in place"
        self.chunks = [
            Chunk(
                (token,),
                chunk.stop,
                chunk.blocks,
                True,
                True,
                chunk.salt,
                chunk.slot,
                holdings=chunk.holdings,
                packing=chunk.packing,
            )
            for chunk, token in zip(self.chunks, tokens, strict=True)
        ]


class EmulatedEngine:
    """Owns emulated KV memory and live states. A step takes no time; drivers of virtual time wait `step_ps`
    themselves."""

    def __init__(
        self,
        recipe: Recipe,
        cost: NodeCost,
        num_blocks: int,
        *,
        max_length: int,
        max_sequences: int = 64,
        layers: tuple[int, int] | None = None,
        tokenizer: Path | None = None,
        grammars: GrammarLimits = GRAMMAR_LIMITS,
    ) -> None:
        """`tokenizer`: the folder that has it; without one no grammar can be followed."""
        least = recipe.layout.least_blocks
        if num_blocks < least:
            raise StartError(
                f"engine.kv_memory holds fewer than {least} blocks of {recipe.layout.block_size} tokens of the "
                "emulated model; give it more"
            )
        self.recipe, self.layout, self.max_length = recipe, recipe.layout, max_length
        self.layers = layers or (0, recipe.layout.num_layers)
        layout = stage_layout(recipe.layout, self.layers)
        layout = msgspec.structs.replace(layout, state_bytes=recipe.layer_state_bytes * layout.num_layers)
        self.memory = EmulatedMemory(layout, num_blocks)
        self.states = EmulatedStates(recipe, self.memory, max_sequences)
        self.constraints = Constraints(tokenizer, recipe.vocab_size, grammars)
        self._cost = cost

    @property
    def revision(self) -> str:
        return self.recipe.revision

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    @property
    def vocab_size(self) -> int:
        return self.recipe.vocab_size

    @property
    def products(self) -> tuple[str, ...]:
        return ()

    def directions(self) -> NoReturn:
        raise AssertionError("the emulated engine has no KV that could be moved")

    def build(self, chunks: Sequence[Chunk]) -> EmulatedBatch:
        order = [index for index, chunk in enumerate(chunks) if chunk.samples]
        return EmulatedBatch(list(chunks), order)

    def step_ps(self, batch: EmulatedBatch) -> int:
        """Time of the batch's next iteration, ps: the share of this stage's layers; the shares of all stages sum to
        the whole."""
        prefills, num_decodes, context = [], 0, 0
        for chunk in batch.chunks:
            if chunk.decodes:
                num_decodes += 1
                context += chunk.stop
            else:
                prefills.append((len(chunk.tokens), chunk.start))
        whole_ps, num_layers = self._cost.step_ps(prefills, num_decodes, context), self.layout.num_layers
        first, stop = (whole_ps * layer // num_layers for layer in self.layers)
        return stop - first

    def step(
        self,
        batch: EmulatedBatch,
        rows: Sequence[Row],
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        hidden: Hidden | None = None,
        on_scores: OnScores | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Sampled:
        assert self.layers[1] == self.layout.num_layers, "the last stage samples"
        taken = self._unpack(batch, hidden)
        computed, digests = self._compute(batch, taken, on_layer, before_layer, elsewhere)
        if on_scores is not None:
            for index, (chunk, kv) in enumerate(zip(batch.chunks, computed, strict=True)):
                if chunk.targets:
                    on_scores(index, chunk.start + 1, self._scores(chunk, kv))
        tokens = [self.recipe.token(digest) for digest in digests]
        for at, tokens_V in self.constraints.allowed(rows) or ():
            allowed = tokens_V.nonzero()[0]
            tokens[at] = int(allowed[digests[at] % len(allowed)])
        return tokens, [_certain(token, row.sampling) for token, row in zip(tokens, rows, strict=True)]

    def _scores(self, chunk: Chunk, kv: Sequence[bytes]) -> list[TokenLogprobs]:
        """`kv`: of the chunk's tokens in the last layer. Each target is the likeliest, and no other is known."""
        values = [self.recipe.score(*each) for each in zip(kv, chunk.targets, strict=False)]
        known = zip(chunk.targets, values, strict=True)
        return [TokenLogprobs(value, ((token, value),)[: chunk.num_top], 1) for token, value in known]

    def relay(
        self,
        batch: EmulatedBatch,
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        hidden: Hidden | None = None,
    ) -> Hidden:
        assert self.layers[1] < self.layout.num_layers, "the last stage samples"
        return _pack(*self._compute(batch, self._unpack(batch, hidden), on_layer, before_layer))

    def _compute(
        self,
        batch: EmulatedBatch,
        taken: _States,
        on_layer: OnLayer | None,
        before_layer: BeforeLayer | None,
        elsewhere: Elsewhere | None = None,
    ) -> _States:
        """Layer by layer: writes the batch's KV, then reads all of each chunk that samples. Live states and snapshots
        are as they were until the end."""
        below, digests = taken
        size, chunks = self.layout.block_size, batch.chunks
        away = [chunk.num_absent(size) for chunk in chunks]
        placed = list(zip(chunks, away, strict=True))
        written = [list(runs_of(chunk.blocks, size, chunk.start - a, chunk.stop - a)) for chunk, a in placed]
        read = [list(runs_of(chunks[at].blocks, size, 0, chunks[at].stop - away[at])) for at in batch.order]
        layers = range(self.memory.layout.num_layers)
        if batch.restores and before_layer is not None:  # a state has a part in the blocks of every layer
            for layer in layers:
                before_layer(layer)
            before_layer = None
        passage = self.states.begin(chunks)
        for layer in layers:
            if before_layer is not None:
                before_layer(layer)
            passed = [passage.recur(index, layer, each) for index, each in enumerate(below)]
            others = [_ask(elsewhere, layer, index, chunk) for index, chunk in enumerate(chunks)]
            below = [self._write(layer, *each) for each in zip(chunks, others, written, passed, strict=True)]
            states = [passage.state(index, layer) for index in batch.order]
            theirs = [others[index] for index in batch.order]
            digests = [self._digest(layer, *each) for each in zip(theirs, read, digests, states, strict=True)]
            if on_layer is not None:
                on_layer(layer)
        self.states.finish(passage)
        return below, digests

    def attend(self, layer: int, asked: Sequence[HolderQueries], q: memoryview, parts: int = 1) -> memoryview:
        """The bytes of what is asked for, one after the other."""
        size, found, memory = self.layout.block_size, bytearray(), self.memory
        memory = memory.split(parts) if parts > 1 else memory
        for each in asked:
            for run in runs_of(each.blocks, size, 0, each.num_tokens):
                found += memory.export(layer, *run)
        return memoryview(found)

    def _write(self, layer: int, chunk: Chunk, other: bytes, runs: Runs, below: Sequence[bytes]) -> list[bytes]:
        """`other`: the KV bytes that lie elsewhere, before those here."""
        here = chunk.start - len(other) // TOKEN_BYTES
        before = self._kv_at(layer, chunk, here - 1) if here else other[-TOKEN_BYTES:]
        kv = self.recipe.kv(before, below)
        new, at = b"".join(kv), 0
        for first, stop in runs:
            end = at + (stop - first) * TOKEN_BYTES
            self.memory.export(layer, first, stop)[:] = new[at:end]
            at = end
        return kv

    def _kv_at(self, layer: int, chunk: Chunk, position: int) -> bytes:
        size = self.layout.block_size
        slot = chunk.blocks[position // size] * size + position % size
        return bytes(self.memory.export(layer, slot, slot + 1))

    def _digest(self, layer: int, other: bytes, runs: Runs, lower: int, state: bytes | bytearray) -> int:
        parts = chain([other], (self.memory.export(layer, *run) for run in runs), [state])
        return self.recipe.digest(lower, parts)

    def _unpack(self, batch: EmulatedBatch, hidden: Hidden | None) -> _States:
        """Inputs of this stage's first layer: embedded tokens, or the hidden states of the stage before."""
        assert (hidden is None) == (self.layers[0] == 0), "the first stage takes no hidden states, others do"
        if hidden is None:
            embedded = [self.recipe.embed(chunk.salt, chunk.tokens) for chunk in batch.chunks]
            return embedded, [0] * len(batch.order)
        lengths = [len(chunk.tokens) for chunk in batch.chunks]
        end = sum(lengths) * TOKEN_BYTES
        size = end + len(batch.order) * _DIGEST_BYTES
        if (hidden.shape, hidden.dtype, hidden.data.nbytes) != ((size,), "uint8", size):
            raise ProtocolError(
                f"hidden states of {hidden.data.nbytes} bytes ({hidden.dtype} {hidden.shape}) came for a batch "
                f"that needs {size}"
            )
        states = iter(_cut(hidden.data[:end], TOKEN_BYTES))
        digests = [int.from_bytes(each, "little") for each in _cut(hidden.data[end:], _DIGEST_BYTES)]
        return [list(islice(states, length)) for length in lengths], digests


Runs = Sequence[tuple[int, int]]
"""Half-open ranges of slots."""
_States = tuple[list[list[bytes]], list[int]]
"""Between layers: inputs of the next layer for each chunk, and the digest so far of each chunk that samples."""
_DIGEST_BYTES = 8


def _ask(elsewhere: Elsewhere | None, layer: int, index: int, chunk: Chunk) -> bytes:
    """KV bytes of a chunk that lie with its holders, in order."""
    found, position = b"", 0
    for held in chunk.holdings:
        assert elsewhere is not None, "KV lies elsewhere, and nobody to ask was named"
        entry, parts = (index, len(chunk.tokens), held.num_tokens, chunk.start, position), len(held.holders)
        askings = [Asking(holder, (entry,), part, parts) for part, holder in enumerate(held.holders)]
        for asking in askings:
            elsewhere.ask(layer, asking, memoryview(bytes(len(chunk.tokens))))
        found += join_heads([elsewhere.answer(layer, asking) for asking in askings], TOKEN_BYTES // 2 // parts)
        position += held.num_tokens
    return found


def _pack(states: list[list[bytes]], digests: list[int]) -> Hidden:
    numbers = [digest.to_bytes(_DIGEST_BYTES, "little") for digest in digests]
    data = b"".join(chain(*states, numbers))
    return Hidden((len(data),), "uint8", memoryview(data))


def _cut(data: memoryview, size: int) -> Iterator[bytes]:
    return (bytes(data[at : at + size]) for at in range(0, len(data), size))


class PacedEngine(EmulatedEngine):
    """Emulated engine that sleeps, layer by layer, as long as the cost model says.

    An iteration ends at the start of its run plus the exact sum of steps, so late wake-ups do not add up; waits
    in `before_layer` postpone it.
    """

    def build(self, chunks: Sequence[Chunk]) -> EmulatedBatch:
        batch = super().build(chunks)
        batch.started_ns = time.monotonic_ns()
        return batch

    def _compute(
        self,
        batch: EmulatedBatch,
        taken: _States,
        on_layer: OnLayer | None,
        before_layer: BeforeLayer | None,
        elsewhere: Elsewhere | None = None,
    ) -> _States:
        step_ps, num_layers = self.step_ps(batch), self.memory.layout.num_layers

        def reached_ns(layer: int) -> int:
            """End of the time of the layers before this one."""
            return batch.started_ns + (batch.elapsed_ps + step_ps * layer // num_layers) // 1000

        def before(layer: int) -> None:
            if before_layer is not None:
                from_ns = max(reached_ns(0 if batch.restores else layer), time.monotonic_ns())
                before_layer(layer)
                batch.started_ns += max(0, time.monotonic_ns() - from_ns)

        def after(layer: int) -> None:
            _sleep_until(reached_ns(layer + 1))
            if on_layer is not None:
                on_layer(layer)

        try:
            states = super()._compute(batch, taken, after, before, elsewhere)
        except BaseException:
            batch.started_ns = time.monotonic_ns() - batch.elapsed_ps // 1000  # its repetition begins now
            raise
        batch.elapsed_ps += step_ps
        return states


def _sleep_until(when_ns: int) -> None:
    left_ns = when_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)


def _certain(token: int, sampling: Sampling) -> TokenLogprobs | None:
    if sampling.logprobs is None:
        return None
    return TokenLogprobs(0.0, ((token, 0.0),) if sampling.logprobs else ())


# Memory and live states. A layer's state is a ring of digests (`recipe.Recipe.recur`). A step works on copies, which
# become the live states after the last layer, so that a step that was broken off can be repeated.


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
    """Joins the answers of holders with a part of the heads each, `width` bytes of every vector."""
    found = [np.frombuffer(each, np.uint8).reshape(-1, width) for each in parts]
    return np.stack(found, axis=1).tobytes()


LayerStates = list[bytearray]
"""The states of one request, one entry a layer."""


class EmulatedStates:
    """Live states by slot, of the layers whose KV `memory` has."""

    def __init__(self, recipe: Recipe, memory: EmulatedMemory, max_sequences: int) -> None:
        self._recipe, self._memory, self.max_sequences = recipe, memory, max_sequences
        self._live: dict[int, LayerStates] = {}

    def begin(self, chunks: Sequence[Chunk]) -> LayerPassage:
        """Starts a batch's way through the layers. Blocks to restore from are in place."""
        if not self._recipe.layout.state_bytes:
            return LayerPassage(self._recipe, chunks, [[] for _ in chunks])
        slots = [chunk.slot for chunk in chunks]
        assert len(set(slots)) == len(slots), "each request of a batch has a live state of its own"
        assert all(0 <= slot < self.max_sequences for slot in slots), "slots lie among those the engine has"
        return LayerPassage(self._recipe, chunks, [self._before(chunk) for chunk in chunks])

    def finish(self, passage: LayerPassage) -> None:
        """Publishes states and snapshots after the last layer."""
        for chunk, states in zip(passage.chunks, passage.states, strict=True):
            if states:
                self._live[chunk.slot] = states
        for blocks, states in passage.snapshots.items():
            self._write(blocks, states)

    def _before(self, chunk: Chunk) -> LayerStates:
        """State before a chunk's first token."""
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


class LayerPassage:
    """States of a batch's chunks on the way through the layers, and copies for snapshots, by their blocks."""

    def __init__(self, recipe: Recipe, chunks: Sequence[Chunk], states: list[LayerStates]) -> None:
        self._recipe, self.chunks, self.states = recipe, chunks, states
        self.snapshots: dict[tuple[int, ...], LayerStates] = {}

    def recur(self, index: int, layer: int, below: Sequence[bytes]) -> Sequence[bytes]:
        """Advances a chunk's state of a layer by its tokens; returns the inputs of the layer's KV."""
        if not self.states[index]:
            return below
        chunk, state, found, at = self.chunks[index], self.states[index][layer], list[bytes](), 0
        for position, blocks in chunk.snapshots:
            assert chunk.start + at < position <= chunk.stop, "snapshots lie inside their chunk, in order"
            found += self._recipe.recur(state, chunk.start + at, below[at : position - chunk.start])
            self.snapshots.setdefault(blocks, []).append(bytearray(state))
            at = position - chunk.start
        found += self._recipe.recur(state, chunk.start + at, below[at:])
        return found

    def state(self, index: int, layer: int) -> bytes | bytearray:
        """A chunk's state of a layer after its last token so far."""
        return self.states[index][layer] if self.states[index] else b""
