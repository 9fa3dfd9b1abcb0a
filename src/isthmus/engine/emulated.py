"""An engine that computes nothing and still shows every wrong byte: time from the cost model, tell-tale tokens.

The KV bytes of a position are a digest of the KV bytes of the position before it, its token, the model revision
and the tenant's salt: a function of revision, salt and token prefix. The next token is a digest of all KV bytes
up to its position, read anew from memory in every iteration. A stale, foreign or damaged byte therefore changes
the token that reads it and all that follow. Sampling parameters do not matter: each token is certain, so its
log-probability is 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3
import xxhash

from isthmus.blocks import KVLayout
from isthmus.cost import NodeCost
from isthmus.engine.interface import Chunk, OnLayer, Row, Sampled, runs_of
from isthmus.engine.spec import load_json
from isthmus.errors import ModelError, StartError
from isthmus.types import Sampling, TokenLogprobs

LAYERS = 2
TOKEN_BYTES = 16
"""Bytes of one token in one emulated layer: enough that two prefixes never share them, few enough to reread."""


def layout_of(block_size: int, *, layers: int = LAYERS, token_bytes: int = TOKEN_BYTES) -> KVLayout:
    """An emulated KV layout of `token_bytes` (a multiple of 8) for each token and layer."""
    assert token_bytes % 8 == 0, "K and V of one float32 are 8 bytes"
    return KVLayout("float32", block_size, num_layers=layers, num_kv_heads=1, head_dim=token_bytes // 8)


def vocab_of(folder: Path) -> int:
    """How many token ids the tokenizer of a model folder has. Raises ModelError."""
    path = folder / "tokenizer.json"
    tokenizer = load_json(path)
    try:
        vocab = tokenizer["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        ids += [added["id"] for added in tokenizer.get("added_tokens", ())]
        return int(max(ids)) + 1
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{path}: its vocabulary cannot be read") from None


def recipe_of(folder: Path, tokenizer: Path, block_size: int) -> Recipe:
    """The emulation of the model whose config.json is in `folder`, with the tokenizer of another folder or its
    own. Raises ModelError."""
    config, vocab_size = load_json(folder / "config.json"), vocab_of(tokenizer)
    body = json.dumps([config, vocab_size], sort_keys=True).encode()
    return Recipe(f"emulated-{blake3.blake3(body).hexdigest(length=16)}", layout_of(block_size), vocab_size)


def length_of(folder: Path) -> int:
    """Tokens the model of a folder can read, as its config.json says."""
    config = load_json(folder / "config.json")
    nested = config.get("text_config")
    found = (config | nested if isinstance(nested, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else 2048


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

    def land(self, layer: int, first: int, stop: int, data: memoryview) -> None:
        """Nothing is left to do: the bytes were received in place."""


class Recipe:
    """What KV bytes and tokens are made of. `revision`: any name of model and vocabulary."""

    def __init__(self, revision: str, layout: KVLayout, vocab_size: int) -> None:
        self.revision, self.layout, self.vocab_size = revision, layout, vocab_size
        self._keys: dict[str, bytes] = {}

    def kv(self, salt: str, before: bytes, tokens: Iterable[int]) -> list[bytes]:
        """KV bytes of `tokens` in all layers, one entry a token; `before`: those of the token before them."""
        key, size = self._key(salt), self.layout.num_layers * self.layout.token_bytes
        found = []
        for token in tokens:
            body = before + token.to_bytes(4, "little")
            before = blake3.blake3(body, key=key).digest(length=size)
            found.append(before)
        return found

    def token(self, parts: Iterable[memoryview | bytearray]) -> int:
        """The token that follows KV bytes, given layer by layer, position by position."""
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        return digest.intdigest() % self.vocab_size

    def _key(self, salt: str) -> bytes:
        key = self._keys.get(salt)
        if key is None:
            fields = (self.revision.encode(), self.layout.fingerprint(), salt.encode())
            context = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
            key = blake3.blake3(context, derive_key_context="isthmus 2026 emulated kv").digest()
            if len(self._keys) < 1024:  # salts come from clients: keep only so many
                self._keys[salt] = key
        return key


def expected_tokens(
    recipe: Recipe, prompt: Sequence[int], num_tokens: int, *, salt: str = "", stop_tokens: Sequence[int] = ()
) -> list[int]:
    """What any cluster must answer: the same tokens from plain byte strings, without blocks or transfers."""
    width, layers = recipe.layout.token_bytes, range(recipe.layout.num_layers)
    held = [bytearray() for _ in layers]
    before, known, answer = b"", list(prompt), list[int]()
    while len(answer) < num_tokens and not (answer and answer[-1] in stop_tokens):
        for kv in recipe.kv(salt, before, known):
            before = kv
            for layer in layers:
                held[layer] += kv[layer * width : (layer + 1) * width]
        answer.append(recipe.token(held))
        known = answer[-1:]
    return answer


@dataclass
class EmulatedBatch:
    """Chunks as the scheduler gave them; when their run began, and the engine time of its iterations so far."""

    chunks: list[Chunk]
    order: list[int]
    started_ns: int = 0
    elapsed_ps: int = 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Moves a batch of decodes on by one position each, with the tokens just sampled."""
        assert len(self.order) == len(self.chunks), "only decodes advance in place"
        self.chunks = [
            Chunk((token,), chunk.stop, chunk.blocks, True, True, chunk.salt)
            for chunk, token in zip(self.chunks, tokens, strict=True)
        ]


class EmulatedEngine:
    """Owns emulated KV memory. A step here takes no time: drivers of virtual time wait `step_ps` themselves."""

    def __init__(self, recipe: Recipe, cost: NodeCost, num_blocks: int, *, max_length: int) -> None:
        if num_blocks < 2:
            raise StartError(
                f"engine.kv_memory holds fewer than 2 blocks of {recipe.layout.block_size} tokens of the "
                "emulated model; give it more"
            )
        self.recipe, self.layout, self.max_length = recipe, recipe.layout, max_length
        self.memory = EmulatedMemory(recipe.layout, num_blocks)
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

    def build(self, chunks: Sequence[Chunk]) -> EmulatedBatch:
        order = [index for index, chunk in enumerate(chunks) if chunk.samples]
        return EmulatedBatch(list(chunks), order)

    def step_ps(self, batch: EmulatedBatch) -> int:
        """How long the next iteration of a batch takes (ps)."""
        prefills, num_decodes, context = [], 0, 0
        for chunk in batch.chunks:
            if chunk.decodes:
                num_decodes += 1
                context += chunk.stop
            else:
                prefills.append((len(chunk.tokens), chunk.start))
        return self._cost.step_ps(prefills, num_decodes, context)

    def step(self, batch: EmulatedBatch, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sampled:
        sampled = self.compute(batch, rows)
        if on_layer is not None:
            for layer in range(self.layout.num_layers):
                on_layer(layer)
        return sampled

    def compute(self, batch: EmulatedBatch, rows: Sequence[Row]) -> Sampled:
        """Writes the batch's KV, then reads all of each chunk that samples."""
        for chunk in batch.chunks:
            self._write(chunk)
        tokens = [self._next(batch.chunks[index]) for index in batch.order]
        return tokens, [_certain(token, row.sampling) for token, row in zip(tokens, rows, strict=True)]

    def _write(self, chunk: Chunk) -> None:
        size, width = self.layout.block_size, self.layout.token_bytes
        before = self._kv_at(chunk, chunk.start - 1) if chunk.start else b""
        kv = self.recipe.kv(chunk.salt, before, chunk.tokens)
        for layer in range(self.layout.num_layers):
            new = b"".join(each[layer * width : (layer + 1) * width] for each in kv)
            at = 0
            for first, stop in runs_of(chunk.blocks, size, chunk.start, chunk.stop):
                end = at + (stop - first) * width
                self.memory.export(layer, first, stop)[:] = new[at:end]
                at = end

    def _kv_at(self, chunk: Chunk, position: int) -> bytes:
        size = self.layout.block_size
        slot = chunk.blocks[position // size] * size + position % size
        layers = range(self.layout.num_layers)
        return b"".join(self.memory.export(layer, slot, slot + 1) for layer in layers)

    def _next(self, chunk: Chunk) -> int:
        runs = list(runs_of(chunk.blocks, self.layout.block_size, 0, chunk.stop))
        layers = range(self.layout.num_layers)
        return self.recipe.token(self.memory.export(layer, *run) for layer in layers for run in runs)


class PacedEngine(EmulatedEngine):
    """The same at the speed of the emulated hardware: layer by layer, each step sleeps as long as it takes.

    Iterations end at the start of their run plus the exact sum of their steps, so lateness does not add up.
    """

    def build(self, chunks: Sequence[Chunk]) -> EmulatedBatch:
        batch = super().build(chunks)
        batch.started_ns = time.monotonic_ns()
        return batch

    def step(self, batch: EmulatedBatch, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sampled:
        step_ps, layers = self.step_ps(batch), self.layout.num_layers
        sampled = self.compute(batch, rows)
        for layer in range(layers):
            _sleep_until(batch.started_ns + (batch.elapsed_ps + step_ps * (layer + 1) // layers) // 1000)
            if on_layer is not None:
                on_layer(layer)
        batch.elapsed_ps += step_ps
        return sampled


def _sleep_until(when_ns: int) -> None:
    left_ns = when_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)


def _certain(token: int, sampling: Sampling) -> TokenLogprobs | None:
    """The tell-tale token is certain; no other token has a finite log-probability."""
    if sampling.logprobs is None:
        return None
    return TokenLogprobs(0.0, ((token, 0.0),) if sampling.logprobs else ())
