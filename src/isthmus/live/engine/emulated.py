"""An engine that computes nothing and still shows every wrong byte: time from the cost model, tell-tale tokens.

All KV bytes up to a token's position, of every layer, are read anew from memory in every iteration, and are digested
into the token (`recipe`), and so is the live state of its request, in models that have recurrent layers. A stale,
foreign or damaged byte therefore changes the token that reads it and all that follow. Sampling parameters do not
matter, but for what a token must not be: each is certain, so its log-probability is 0. A token of a prompt is scored
with a digest of itself and of the KV bytes before it, put between -1 and 0. Digests are of all bytes in their order, so
another engine that has some of them answers with the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import NoReturn

import msgspec

from isthmus.core.cost import NodeCost
from isthmus.core.errors import ProtocolError, StartError
from isthmus.core.types import Reused, Sampling, TokenLogprobs
from isthmus.live.engine.constraints import Constraints
from isthmus.live.engine.emulated_memory import EmulatedMemory, EmulatedStates, join_heads
from isthmus.live.engine.interface import (
    Asked,
    Asking,
    BeforeLayer,
    Chunk,
    Elsewhere,
    Hidden,
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
    """Chunks as the scheduler gave them; when their run began, and the engine time of its iterations so far."""

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
    """Owns emulated KV memory and live states. A step here takes no time: drivers of virtual time wait `step_ps`
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
        """How long the next iteration of a batch takes (ps): a stage takes its layers' share, and the shares of all
        stages sum to the time of the whole."""
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

    def attend(self, layer: int, asked: Sequence[Asked], q: memoryview, parts: int = 1) -> memoryview:
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
        """What the first layer here takes: from the tokens in the first stage, in others from the one before."""
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
"""Between layers: of each chunk what the next layer takes; of each chunk that samples the digest so far."""
_DIGEST_BYTES = 8


def _ask(elsewhere: Elsewhere | None, layer: int, index: int, chunk: Chunk) -> bytes:
    """The KV bytes of a chunk that other engines have, in their order."""
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
    """The same at the speed of the emulated hardware: layer by layer, each step sleeps as long as it takes.

    Iterations end at the start of their run plus the exact sum of their steps, so lateness does not add up; what
    `before_layer` waits for puts them off.
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
            """When the time of the layers before this one is over."""
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
    """The tell-tale token is certain; no other token has a finite log-probability."""
    if sampling.logprobs is None:
        return None
    return TokenLogprobs(0.0, ((token, 0.0),) if sampling.logprobs else ())
