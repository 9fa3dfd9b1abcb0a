"""A GGUF file as a model folder: its metadata as a `config.json`, and its names of tensors.

Keys and names are those of llama.cpp's converter (gguf-py, `constants.py`). Models that llama.cpp computes
differently from the engine are refused.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.core.errors import ModelError
from isthmus.core.models import Fields
from isthmus.model_files.base import ModelFiles
from isthmus.model_files.header import Header, TensorInfo, read_header

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's names. Mistral's are llama, too."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TEMPLATE = "tokenizer.chat_template"
"""The key of the default one; those of others go on with their names."""
_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: the form of Llama 3.1's smoothing."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_DESCRIBED = re.compile(rf"{re.escape(_FACTORS)}|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that say what the metadata say, too, or that `config_of` reads."""


def tensor_name(name: str) -> str:
    """GGUF's name of a tensor of a Hugging Face model."""
    name, suffix = name.rsplit(".", 1)
    if layer := _LAYER.fullmatch(name):
        return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{suffix}"
    return f"{_NAMES[name]}.{suffix}"


class GgufFile(ModelFiles):
    """Raises ModelError when opened for what is no whole GGUF file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.header: Header = read_header(path)

    def text(self, name: str) -> str | None:
        from isthmus.model_files import vocabulary

        known = {
            "config.json": lambda: json.dumps(config_of(self.path, self.header)),
            "tokenizer.json": lambda: vocabulary.tokenizer_of(self._fields),
            "tokenizer_config.json": lambda: json.dumps(
                vocabulary.special_tokens_of(self._fields) | {"chat_template": self._templates}
            ),
            "generation_config.json": lambda: json.dumps(vocabulary.generation_of(self._fields)),
        }
        return known[name]() if name in known else None

    def where(self, name: str) -> str:
        return str(self.path)

    def missing(self, name: str) -> str:
        return "the file has no tokenizer" if name == "tokenizer.json" else f"the file has no {name}"

    def names(self, folder: str, suffix: str) -> Sequence[str]:
        return ()

    def token_id(self, text: str) -> int | None:
        from isthmus.model_files import vocabulary

        return vocabulary.token_id(self._fields, text)

    @property
    def _templates(self) -> dict[str, Any]:
        """By name, as in a folder."""
        metadata = self.header.metadata
        named = {
            key.removeprefix(f"{_TEMPLATE}."): text for key, text in metadata.items() if f"{_TEMPLATE}." in key
        }
        return named | ({"default": metadata[_TEMPLATE]} if _TEMPLATE in metadata else {})

    @property
    def _fields(self) -> Fields:
        return Fields(str(self.path), self.header.metadata)

    @property
    def weights(self) -> dict[str, TensorInfo]:
        """The tensors that a network computes with, by GGUF's names."""
        tensors = self.header.tensors
        return {name: info for name, info in tensors.items() if not _DESCRIBED.fullmatch(name)}

    @property
    def interleaved(self) -> bool:
        """Whether the rows of queries and keys stand as pairs that are rotated together. llama.cpp's converter puts
        them so for this architecture alone; Hugging Face has the first of all pairs before the second."""
        return bool(self.header.metadata["general.architecture"] == "llama")


def config_of(path: Path, header: Header) -> dict[str, Any]:
    """The fields of a `config.json`. Raises ModelError naming a key or a tensor that is not supported."""
    fields = Fields(str(path), header.metadata)
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        fields.refuse(f"GGUF architecture {architecture!r} is not supported; supported: {known}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        fields.refuse("the weights have no tensor 'token_embd.weight'")
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        **_biases(architecture, header),
        **_shape(fields, architecture, len(header.tensors)),
        **_rope(fields, architecture, header),
    }


def _dtype(header: Header) -> str:
    """Compute type: float32 if all matrices are, else bfloat16."""
    matrices = [info for info in header.tensors.values() if len(info.shape) > 1]
    return "float32" if all(info.kind.name == "F32" for info in matrices) else "bfloat16"


def _biases(architecture: str, header: Header) -> dict[str, Any]:
    """Qwen2 has its biases always, and Hugging Face no field for them."""
    if architecture == "qwen2":
        return {}
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }


def _shape(fields: Fields, architecture: str, num_tensors: int) -> dict[str, Any]:
    def count(key: str, default: int | None = None, least: int = 1) -> int:
        return fields.count(f"{architecture}.{key}", default, least=least)

    if (num_layers := count("block_count")) > num_tensors:
        fields.refuse(f"{num_layers} layers are stated, and {num_tensors} tensors there")
    hidden, heads = count("embedding_length"), count("attention.head_count")
    size = count("attention.key_length", max(1, hidden // heads))
    if count("attention.value_length", size) != size:
        fields.refuse("keys and values of different lengths are not supported")
    fields.only(f"{architecture}.attention.scale", 0.0)
    if count("expert_count", 0, least=0):
        fields.refuse(f"a mixture of experts of architecture {architecture} is not supported")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": size,
        "partial_rotary_factor": count("rope.dimension_count", size) / size,
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": fields.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
    }


def _rope(fields: Fields, architecture: str, header: Header) -> dict[str, Any]:
    at = f"{architecture}.rope"
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        fields.only(f"{at}.scaling.{key}", 1.0)
    fields.only(f"{at}.scale_linear", 1.0)
    rope: dict[str, Any] = {"rope_theta": fields.number(f"{at}.freq_base", 10_000.0)}
    factor = fields.get(f"{at}.scaling.factor")
    kind = fields.get(f"{at}.scaling.type") or ("linear" if factor else "none")
    if kind == "none":
        rope |= _factors(header.tensors.get(_FACTORS))
    elif _FACTORS in header.tensors:
        fields.refuse(f"RoPE type {kind!r} beside the tensor {_FACTORS!r} is not supported")
    else:
        rope |= {"rope_type": kind, "factor": factor, **_yarn(fields, at)}
    return {"rope_parameters": rope}


def _yarn(fields: Fields, at: str) -> dict[str, Any]:
    keys = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    found = {name: fields.get(f"{at}.scaling.{key}") for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _factors(info: TensorInfo | None) -> dict[str, Any]:
    """Read here, since they are a part of the model's description."""
    if info is None:
        return {"rope_type": "default"}
    if info.kind.name != "F32":
        raise ModelError(f"{info.path}: {_FACTORS} is of type {info.kind.name}; supported: F32")
    with info.path.open("rb") as file:
        file.seek(info.start)
        values = struct.unpack(f"<{math.prod(info.shape)}f", file.read(info.num_bytes))
    return {"rope_type": "factors", "factors": list(values)}
