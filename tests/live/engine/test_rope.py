from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from isthmus.live.engine.recipe import read_spec
from isthmus.live.engine.rope import cos_sin_table
from tests.models import LINEAR, LLAMA3, YARN

NUM_POSITIONS = 4096
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
YARN_FULL = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "default-theta": DEFAULT | {"rope_theta": 1_000_000.0},
    "linear": LINEAR,
    "linear-odd-factor": LINEAR | {"factor": 2.7},
    "llama3": LLAMA3,
    "llama3-as-published": LLAMA3 | {"original_max_position_embeddings": 8192},
    "yarn": YARN,
    "yarn-no-stretch": YARN | {"factor": 1.0},
    "yarn-untruncated-betas": YARN_FULL,
    "yarn-attention-factor": YARN | {"attention_factor": 1.25},
    "yarn-mscale": YARN | {"mscale": 1.3, "mscale_all_dim": 0.7},
    "yarn-odd-factor": YARN | {"factor": 2.7, "rope_theta": 1_000_000.0},
}


@pytest.mark.parametrize("head_dim", [16, 20, 64, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_is_that_of_transformers(tmp_path: Path, variant: str, head_dim: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=NUM_POSITIONS,
        rope_parameters=dict(VARIANTS[variant]),
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(tmp_path)
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(NUM_POSITIONS)[None])
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    table = cos_sin_table(read_spec(tmp_path).rope, NUM_POSITIONS)
    assert table.shape == (NUM_POSITIONS, head_dim) and table.dtype == torch.float32
    assert float((table - expected).abs().max()) <= 1e-6
