"""ModelSpec from a Hugging Face `config.json`: what the engine needs to build the network, and nothing else.

Anything the engine would compute differently from the reference is refused here by name. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path

from isthmus.engine.families import FAMILIES
from isthmus.engine.fields import ROPE_TYPES, Fields, load_json
from isthmus.engine.shapes import ModelSpec, RopeSpec
from isthmus.errors import ModelError

__all__ = ["ARCHITECTURES", "ROPE_TYPES", "ModelSpec", "RopeSpec", "load_json", "read_spec"]

ARCHITECTURES = tuple(FAMILIES)


def read_spec(folder: Path) -> ModelSpec:
    """ModelSpec of a model folder. Raises ModelError naming what is not supported."""
    path = folder / "config.json"
    config = load_json(path)
    names = config.get("architectures") or [str(config.get("model_type"))]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: 'architectures' must be a list of names, not {names!r}")
    name = next((name for name in names if name in FAMILIES), None)
    if name is None:
        supported = ", ".join(FAMILIES)
        raise ModelError(f"{path}: architecture {', '.join(names)} is not supported; supported: {supported}")
    fields = Fields(path, config)
    fields.only("hidden_act", "silu")
    if quantised := fields.object("quantization_config"):
        method = quantised.get("quant_method", "unknown")
        fields.refuse(f"{method} quantised weights are not supported; use float32 or bfloat16 ones")
    return FAMILIES[name](fields)
