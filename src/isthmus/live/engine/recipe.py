"""ModelSpec of a model's files, for models that the engine computes as the reference does.

Anything the engine would compute differently is refused here by name. Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

import blake3
import msgspec
import xxhash

from isthmus.core.blocks import KVLayout
from isthmus.core.cost import facts_of
from isthmus.core.errors import ModelError
from isthmus.core.models import Attention, Fields, ModelSpec, read_model, read_quantisation
from isthmus.core.models.fields import ROPE_TYPES
from isthmus.model_files import open_files

_ONLY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3NextForCausalLM": {},
    "DeepseekV3ForCausalLM": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "KimiLinearForCausalLM": {
        "mla_use_nope": True,
        "mla_use_output_gate": False,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "routed_expert_hidden_size": None,
    },
}
"""The one supported value of fields that may be absent, by architecture."""
ARCHITECTURES = tuple(_ONLY)
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
"""What weights of each dtype are computed in by default."""


def read_spec(model: Path) -> ModelSpec:
    """Of a model folder or a GGUF file. Raises ModelError naming what is not supported."""
    files = open_files(model)
    config, where = files.required_object("config.json"), files.where("config.json")
    fields, spec = Fields(where, config), read_model(config, where, ARCHITECTURES)
    for name, value in {"hidden_act": "silu", **_ONLY[spec.architecture]}.items():
        fields.only(name, value)
    read_quantisation(fields)
    if spec.dtype not in _DTYPES:
        fields.refuse(f"dtype {spec.dtype} is not supported; supported: {', '.join(_DTYPES)}")
    _check_rope(fields, spec)
    return msgspec.structs.replace(spec, dtype=_DTYPES[spec.dtype])


def _check_rope(fields: Fields, spec: ModelSpec) -> None:
    if spec.rope is None:
        return
    if spec.rope.kind not in ROPE_TYPES:
        fields.refuse(f"RoPE type {spec.rope.kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if isinstance(spec.kv_mixer, Attention) and not spec.recurrent and spec.rope.dim != spec.head_dim:
        fields.refuse("partial_rotary_factor below 1 is not supported")


def kv_layout(spec: ModelSpec, dtype: str, block_size: int) -> KVLayout:
    """Of its KV, and of the states of its recurrent layers: all of them one after the other, in float32."""
    recurrent = spec.recurrent
    return KVLayout(
        dtype=dtype,
        block_size=block_size,
        num_layers=spec.num_layers - len(recurrent),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vectors=2 if isinstance(spec.kv_mixer, Attention) else 1,
        state_bytes=4 * sum(delta.state_numbers for delta in recurrent),
    )


# What the emulated model is made of: its layout, its KV bytes and its tokens. Knows no memory and no time.
#
# The KV bytes of a position in a layer are a digest of those of the position before it and of what the layer takes:
# the KV bytes of the layer below, or in the first layer a digest of the token, the model revision and the tenant's
# salt. They are a function of revision, salt and token prefix. The next token is a digest of all KV bytes up to its
# position in all layers.
#
# In a hybrid model what a layer takes goes through a recurrent state first, which each token changes, and what comes
# out goes to the KV bytes. The next token is then a digest of the states after its position, too.


LAYERS = 2
TOKEN_BYTES = 16
"""Bytes of one token in one emulated layer: enough that two prefixes never share them, few enough to reread."""


def layout_of(block_size: int, *, layers: int = LAYERS, state_tokens: int = 0) -> KVLayout:
    """An emulated KV layout: `TOKEN_BYTES` for each token and layer, K and V of one float32 in each of two heads.
    Recurrent states, if any, are as long as the KV of `state_tokens` tokens."""
    return KVLayout(
        "float32",
        block_size,
        num_layers=layers,
        num_kv_heads=2,
        head_dim=TOKEN_BYTES // 16,
        state_bytes=layers * TOKEN_BYTES * state_tokens,
    )


def state_tokens_of(config: Mapping[str, Any]) -> int:
    """Of how many tokens the KV is as long as the recurrent states of a sequence, in the model of a parsed config.json
    with 16-bit KV: a snapshot of the emulated one then fills as many blocks. 0 for models without such states, and for
    those that have no cost model and so are not known to have any."""
    try:
        facts = facts_of(config)
    except ModelError:
        return 0
    return -(-facts.state_bytes // max(1, 2 * facts.kv_elements))


def vocab_of(model: Path) -> int:
    """How many token ids the tokenizer of a model has. Raises ModelError."""
    files = open_files(model)
    tokenizer = files.required_object("tokenizer.json")
    try:
        vocab = tokenizer["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        ids += [added["id"] for added in tokenizer.get("added_tokens", ())]
        return int(max(ids)) + 1
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{files.where('tokenizer.json')}: its vocabulary cannot be read") from None


def recipe_of(
    model: Path, tokenizer: Path, block_size: int, *, layers: int = LAYERS, state_tokens: int | None = None
) -> Recipe:
    """The emulation of a model by its config.json, with the tokenizer of another or its own.

    A pipeline needs as many `layers` as stages. `state_tokens`: as in `layout_of`, None as the model has. Raises
    ModelError.
    """
    config, vocab_size = open_files(model).required_object("config.json"), vocab_of(tokenizer)
    body = json.dumps([config, vocab_size], sort_keys=True).encode()
    revision = f"emulated-{blake3.blake3(body).hexdigest(length=16)}"
    states = state_tokens_of(config) if state_tokens is None else state_tokens
    layout = layout_of(block_size, layers=layers, state_tokens=states)
    return Recipe(revision, layout, vocab_size)


def length_of(model: Path) -> int:
    """Tokens the model can read, as its config.json says."""
    files = open_files(model)
    config = files.required_object("config.json")
    return Fields(files.where("config.json"), config).of_text("").max_length(2048)


@lru_cache(1 << 14)
def _embedded(key: bytes, token: int) -> bytes:
    """Most tokens of a prompt have come before."""
    return blake3.blake3(token.to_bytes(4, "little"), key=key).digest(length=TOKEN_BYTES)


class Recipe:
    """What KV bytes and tokens are made of. `revision`: any name of model and vocabulary."""

    def __init__(self, revision: str, layout: KVLayout, vocab_size: int) -> None:
        self.revision, self.layout, self.vocab_size = revision, layout, vocab_size
        self.layer_state_bytes = layout.state_bytes // layout.num_layers
        """Of the recurrent state of one layer."""
        self._keys: dict[str, bytes] = {}

    def embed(self, salt: str, tokens: Iterable[int]) -> list[bytes]:
        """What the first layer takes, one entry a token."""
        return list(map(_embedded, repeat(self._key(salt)), tokens))

    def recur(self, state: bytearray, position: int, below: Iterable[bytes]) -> Sequence[bytes]:
        """Takes the tokens from `position` on into a layer's state, which changes, and gives what comes out of it, one
        entry a token. `below`: what the layer takes.

        The state is a ring of digests. A token replaces the oldest by one of that, of the newest and of itself, so
        that every part of the state shows, and the state depends on nothing but the tokens.
        """
        found = list[bytes]()
        at = position * TOKEN_BYTES % self.layer_state_bytes
        newest = bytes(state[at - TOKEN_BYTES : at] if at else state[-TOKEN_BYTES:])
        for each in below:
            end = at + TOKEN_BYTES
            newest = xxhash.xxh3_128_digest(state[at:end] + newest + each)
            state[at:end] = newest
            found.append(newest)
            at = end if end < self.layer_state_bytes else 0
        return found

    def kv(self, before: bytes, below: Iterable[bytes]) -> list[bytes]:
        """KV bytes of tokens in one layer, which are also what the next layer takes. `before`: those of the token
        before them in this layer, empty for the first; `below`: what the layer takes, or what its state makes of
        that."""
        found = []
        for each in below:
            before = xxhash.xxh3_128_digest(before + each)
            found.append(before)
        return found

    def digest(self, lower: int, parts: Iterable[memoryview | bytearray | bytes]) -> int:
        """Of all KV bytes of a layer, position by position, and of all layers below it, whose digest is `lower` (0
        for the first layer)."""
        digest = xxhash.xxh3_64(seed=lower)
        for part in parts:
            digest.update(part)
        return digest.intdigest()

    def token(self, digest: int) -> int:
        """The token that follows KV bytes, by the digest of the last layer."""
        return digest % self.vocab_size

    def score(self, kv: bytes, token: int) -> float:
        """What stands for a token's log-probability, in (-1, 0]. `kv`: of the position before it, in the last layer."""
        return -xxhash.xxh3_64_intdigest(kv + token.to_bytes(4, "little")) / 2**64

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
    states = [bytearray(recipe.layer_state_bytes) for _ in held]
    known, position, answer = list(prompt), 0, list[int]()
    while len(answer) < num_tokens and not (answer and answer[-1] in stop_tokens):
        below, digest = recipe.embed(salt, known), 0
        for layer, state in zip(held, states, strict=True):
            passed = recipe.recur(state, position, below) if state else below
            below = recipe.kv(bytes(layer[-TOKEN_BYTES:]), passed)
            layer += b"".join(below)
            digest = recipe.digest(digest, [layer, state])
        position += len(known)
        answer.append(recipe.token(digest))
        known = answer[-1:]
    return answer
