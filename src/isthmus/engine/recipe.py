"""What the emulated model is made of: its layout, its KV bytes and its tokens. Knows no memory and no time.

The KV bytes of a position in a layer are a digest of those of the position before it and of what the layer takes:
the KV bytes of the layer below, or in the first layer a digest of the token, the model revision and the tenant's
salt. They are a function of revision, salt and token prefix. The next token is a digest of all KV bytes up to its
position in all layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import blake3
import xxhash

from isthmus.blocks import KVLayout
from isthmus.engine.spec import load_json
from isthmus.errors import ModelError

LAYERS = 2
TOKEN_BYTES = 16
"""Bytes of one token in one emulated layer: enough that two prefixes never share them, few enough to reread."""


def layout_of(block_size: int, *, layers: int = LAYERS) -> KVLayout:
    """An emulated KV layout: `TOKEN_BYTES` for each token and layer, K and V of one float32 being 8."""
    return KVLayout("float32", block_size, num_layers=layers, num_kv_heads=1, head_dim=TOKEN_BYTES // 8)


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


def recipe_of(folder: Path, tokenizer: Path, block_size: int, *, layers: int = LAYERS) -> Recipe:
    """The emulation of the model whose config.json is in `folder`, with the tokenizer of another folder or its
    own. A pipeline needs as many `layers` as stages. Raises ModelError."""
    config, vocab_size = load_json(folder / "config.json"), vocab_of(tokenizer)
    body = json.dumps([config, vocab_size], sort_keys=True).encode()
    revision = f"emulated-{blake3.blake3(body).hexdigest(length=16)}"
    return Recipe(revision, layout_of(block_size, layers=layers), vocab_size)


def length_of(folder: Path) -> int:
    """Tokens the model of a folder can read, as its config.json says."""
    config = load_json(folder / "config.json")
    nested = config.get("text_config")
    found = (config | nested if isinstance(nested, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else 2048


class Recipe:
    """What KV bytes and tokens are made of. `revision`: any name of model and vocabulary."""

    def __init__(self, revision: str, layout: KVLayout, vocab_size: int) -> None:
        self.revision, self.layout, self.vocab_size = revision, layout, vocab_size
        self._keys: dict[str, bytes] = {}

    def embed(self, salt: str, tokens: Iterable[int]) -> list[bytes]:
        """What the first layer takes, one entry a token."""
        key = self._key(salt)
        return [
            blake3.blake3(token.to_bytes(4, "little"), key=key).digest(length=TOKEN_BYTES) for token in tokens
        ]

    def kv(self, before: bytes, below: Iterable[bytes]) -> list[bytes]:
        """KV bytes of tokens in one layer, which are also what the next layer takes. `before`: those of the token
        before them in this layer, empty for the first; `below`: what the layer takes."""
        found = []
        for each in below:
            before = xxhash.xxh3_128_digest(before + each)
            found.append(before)
        return found

    def digest(self, lower: int, parts: Iterable[memoryview | bytearray]) -> int:
        """Of all KV bytes of a layer, position by position, and of all layers below it, whose digest is `lower` (0
        for the first layer)."""
        digest = xxhash.xxh3_64(seed=lower)
        for part in parts:
            digest.update(part)
        return digest.intdigest()

    def token(self, digest: int) -> int:
        """The token that follows KV bytes, by the digest of the last layer."""
        return digest % self.vocab_size

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
    held = [bytearray() for _ in range(recipe.layout.num_layers)]
    known, answer = list(prompt), list[int]()
    while len(answer) < num_tokens and not (answer and answer[-1] in stop_tokens):
        below, digest = recipe.embed(salt, known), 0
        for layer in held:
            below = recipe.kv(bytes(layer[-TOKEN_BYTES:]), below)
            layer += b"".join(below)
            digest = recipe.digest(digest, [layer])
        answer.append(recipe.token(digest))
        known = answer[-1:]
    return answer
