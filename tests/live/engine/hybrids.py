"""Tiny random models of the families with latent attention, recurrent layers or experts, for tests and examples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from isthmus.cli.models import bytes_folder

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FULL, LINEAR = "full_attention", "linear_attention"
_COMMON = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        {
            "num_hidden_layers": 5,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 48,
            "num_experts": 8,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        _LATENT
        | {
            "num_hidden_layers": 3,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": _YARN,
        },
    ),
    "kimi_linear": (
        transformers.KimiLinearConfig,
        transformers.KimiLinearForCausalLM,
        _LATENT
        | {
            "num_hidden_layers": 5,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
            "num_local_experts": 8,
            "linear_head_dim": 16,
            "linear_num_heads": 3,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def save_tiny(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a model folder: weights, config, and the tokenizer of bytes. `overrides` are fields of the
    transformers config.

    Biases and norm weights are random too, so that leaving one out shows. There is no end token in any file: a greedy
    answer runs to its limit.
    """
    config_class, model_class, fields = _FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**(_COMMON | fields | overrides)))
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                _randomise(name, tensor, centre=0.0 if family == "qwen3_next" else 1.0)
    model.save_pretrained(folder)
    if family == "kimi_linear":
        _describe_as_published(folder / "config.json")
    generation = {"bos_token_id": 256, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bytes_folder() / name, folder / name)
    return folder


def _describe_as_published(path: Path) -> None:
    """The published files number the layers of each kind from 1, in an object that transformers reads, never writes."""
    config = json.loads(path.read_text(encoding="utf-8"))
    types = config["layer_types"]
    config["linear_attn_config"] = {
        "full_attn_layers": [at for at, kind in enumerate(types, start=1) if kind == FULL],
        "kda_layers": [at for at, kind in enumerate(types, start=1) if kind == LINEAR],
        "head_dim": config["linear_head_dim"],
        "num_heads": config["linear_num_heads"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _randomise(name: str, tensor: torch.Tensor, *, centre: float) -> None:
    """`centre`: of norm weights in this family's files. The norm behind a recurrence has 1 in all of them."""
    if name.endswith("bias"):
        tensor.normal_(0.0, 0.3)
    elif "norm" in name:
        middle = 1.0 if name.endswith(("linear_attn.norm.weight", "o_norm.weight")) else centre
        tensor.uniform_(middle - 0.5, middle + 0.5)
    elif name.endswith("A_log"):
        tensor.uniform_(-3.0, 1.0)  # some heads forget at once, some keep for hundreds of tokens
    elif "conv1d" in name:
        tensor.normal_(0.0, 0.5)
