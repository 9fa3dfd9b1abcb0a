"""Small GGUF files from random model folders, written with the gguf library as llama.cpp's converter writes them.

Names of tensors are the library's own, and the order of the rows of queries and keys is llama.cpp's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import load_file

Array = NDArray[Any]
Tensors = dict[str, tuple[Array, GGMLQuantizationType]]

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}[answer]"
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write_gguf(
    path: Path,
    folder: Path,
    kind: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    change: Callable[[Tensors], object] = lambda tensors: None,
    **options: Any,
) -> Path:
    """`kind`: of the matrices. `metadata`: more keys, or others; None leaves one out. `change`: of the tensors, by
    their names in the file. `options`: of the library's writer; split models get names of their own."""
    config = json.loads((folder / "config.json").read_text())
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    tensors = _tensors(folder, config, architecture, GGMLQuantizationType[kind])
    change(tensors)
    writer = GGUFWriter(path, architecture, **options)
    for key, value in (_keys(config, architecture) | dict(metadata or {})).items():
        _add(writer, key, value)
    for name, (data, each) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary_keys(
    model: str, tokens: list[str], kinds: list[int], *, merges: list[str] | None = None, **others: Any
) -> dict[str, Any]:
    """The keys of a tokenizer; `others`: without what they all begin with, and `chat_template`."""
    keys = {"model": model, "tokens": tokens, "token_type": kinds, "merges": merges} | others
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if key != "chat_template"}
    return named | {"tokenizer.chat_template": others.get("chat_template")}


def _keys(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    size = config.get("head_dim") or config["hidden_size"] // heads
    if architecture == "llama":
        keys["rope.dimension_count"] = size
    if size * heads != config["hidden_size"]:
        keys |= {"attention.key_length": size, "attention.value_length": size}
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _tensors(folder: Path, config: Mapping[str, Any], architecture: str, kind: GGMLQuantizationType) -> Tensors:
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config["num_hidden_layers"])
    found: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own, data = names.get_name(name, (".weight", ".bias")), tensor.float().numpy()
        assert own is not None
        if architecture == "llama" and (".attn_q." in own or ".attn_k." in own):
            heads = config["num_attention_heads" if ".attn_q." in own else "num_key_value_heads"]
            data = _paired(data, heads)
        stored = kind if data.ndim > 1 else GGMLQuantizationType.F32
        found[own] = packed(data, stored), stored
    return found


def _paired(data: Array, heads: int) -> Array:
    """Row i of the first half of a head beside row i of its second half, as llama.cpp rotates them."""
    halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape)


def packed(data: Array, kind: GGMLQuantizationType) -> Array:
    """Numbers in a type; for those that the library cannot make, random ones of like size."""
    name = kind.name
    if name not in _DRAWN:
        return np.ascontiguousarray(quantize(data, kind))
    size, scales = _DRAWN[name]
    rows, width = data.shape
    drawn = np.random.default_rng(rows * width).integers(0, 256, (rows * width // 256, size), np.uint8)
    for at, scale in scales.items():
        drawn[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return drawn.reshape(rows, -1)


_DRAWN = {
    "Q4_K": (144, {0: 5e-4, 2: 4e-3}),
    "Q5_K": (176, {0: 2.5e-4, 2: 4e-3}),
    "Q6_K": (210, {208: 1e-4}),
}
"""Bytes of a block of 256, and where its float16 scales stand."""
