"""Model facts from a Hugging Face `config.json`: what the engine needs to build the network, and nothing else.

Anything the engine would compute differently from the reference is refused here by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from isthmus.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_DEFAULT_WINDOW = 4096  # what the Hugging Face classes assume when the field is absent
ROPE_TYPES = tuple(_ROPE_FIELDS)


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary embedding: `kind` is one of ROPE_TYPES; `options` are the variant's own numbers."""

    theta: float = 10_000.0
    kind: str = "default"
    options: dict[str, Any] = {}


class ModelSpec(msgspec.Struct, frozen=True):
    """One dense decoder-only transformer. `windows[i]` is layer i's sliding window in tokens, 0 for none."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; ModelError when it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: not found; a model folder needs this file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def read_spec(folder: Path) -> ModelSpec:
    """ModelSpec of a model folder. Raises ModelError naming what is not supported."""
    path = folder / "config.json"
    config = load_json(path)
    names = config.get("architectures") or [str(config.get("model_type"))]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: 'architectures' must be a list of names, not {names!r}")
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is None:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path}: architecture {', '.join(names)} is not supported; supported: {supported}")
    _check_kinds(path, config)
    _refuse_unsupported(path, config)
    return _build(path, config, family)


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_COUNTS = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
_NUMBERS = ("rms_norm_eps", "rope_theta")
_OBJECTS = ("rope_parameters", "rope_scaling", "quantization_config")


def _check_kinds(path: Path, config: dict[str, Any]) -> None:
    """Raises ModelError naming a field that is missing or of the wrong kind. A null field counts as absent."""

    def check(names: tuple[str, ...], kinds: tuple[type, ...], expected: str) -> None:
        for name in names:
            value = config.get(name)
            right = isinstance(value, kinds) and not isinstance(value, bool)
            if value is not None and not (right and (dict in kinds or value > 0)):
                raise ModelError(f"{path}: {name!r} must be {expected}, not {value!r}")

    for name in _REQUIRED:
        if config.get(name) is None:
            raise ModelError(f"{path}: the field {name!r} is missing")
    check(_COUNTS, (int,), "a whole number above 0")
    check(_NUMBERS, (int, float), "a number above 0")
    check(_OBJECTS, (dict,), "an object")


def _refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{path}: hidden_act {activation!r} is not supported; supported: 'silu'")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{path}: {method} quantised weights are not supported; use float32 or bfloat16 ones")
    if config.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError(f"{path}: partial_rotary_factor below 1 is not supported")


def _build(path: Path, config: dict[str, Any], family: str) -> ModelSpec:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"{path}: {heads} heads over {kv_heads} KV heads of size {head_dim} do not fit")
    attention_bias = bool(config.get("attention_bias", False))
    max_length = config.get("max_position_embeddings") or 2048
    return ModelSpec(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=max_length,
        norm_eps=config.get("rms_norm_eps") or 1e-6,
        rope=_rope(path, config, max_length),
        windows=_windows(config, family),
        qkv_bias=True if family == "qwen2" else attention_bias and family in ("llama", "qwen3"),
        output_bias=attention_bias and family in ("llama", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype(path, config),
    )


def _dtype(path: Path, config: dict[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype == "float16":
        return "bfloat16"
    if dtype not in ("float32", "bfloat16"):
        raise ModelError(f"{path}: dtype {dtype} is not supported; supported: float32, bfloat16, float16")
    return dtype


def _rope(path: Path, config: dict[str, Any], max_length: int) -> RopeSpec:
    """Reads both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    options = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in options.values()):
        raise ModelError(f"{path}: rope_parameters by layer type are not supported")
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    theta = options.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    if kind not in ROPE_TYPES:
        raise ModelError(f"{path}: RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if options.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor below 1 is not supported")
    if not options.get("original_max_position_embeddings"):
        options["original_max_position_embeddings"] = (
            config.get("original_max_position_embeddings") or max_length
        )
    for name in _ROPE_FIELDS[kind]:
        if not isinstance(options.get(name), int | float):
            raise ModelError(f"{path}: RoPE type {kind!r} needs a number in the field {name!r}")
    return RopeSpec(theta=float(theta), kind=kind, options=options)


def _windows(config: dict[str, Any], family: str) -> tuple[int, ...]:
    num_layers: int = config["num_hidden_layers"]
    window: int = config.get("sliding_window", _DEFAULT_WINDOW) or 0
    if family == "llama" or (family.startswith("qwen") and not config.get("use_sliding_window", False)):
        window = 0
    if not window or family == "mistral":
        return (window,) * num_layers
    if types := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    first = config.get("max_window_layers", 28)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))
