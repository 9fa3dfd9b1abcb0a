"""ModelSpec of a model's files, for models that the engine computes as the reference does.

Anything the engine would compute differently is refused here by name. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from isthmus.core.blocks import KVLayout
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
