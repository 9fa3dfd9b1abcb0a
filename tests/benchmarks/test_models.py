"""A random model folder follows its seed and loads with Hugging Face tools."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.models import EOS_ID, make_random_model

TINY = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


def test_one_seed_gives_one_model(tmp_path: Path) -> None:
    kinds = {"a": ("float32", 3), "b": ("float32", 3), "c": ("bfloat16", 3), "d": ("float32", 4)}
    for name, (dtype, seed) in kinds.items():
        make_random_model(tmp_path / name, **TINY, dtype=dtype, seed=seed)
    a, b, c, d = (load_file(tmp_path / name / "model.safetensors") for name in "abcd")
    head = "lm_head.weight"
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert torch.equal(a[head].to(torch.bfloat16), c[head])
    assert not torch.equal(a[head], d[head])


def test_tokenizer_is_byte_level(tmp_path: Path) -> None:
    make_random_model(tmp_path, **TINY, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Zürich → 東京\n\t\x00!"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 512
    assert tokenizer.decode([300]) == "<300>"
    assert tokenizer.eos_token_id == EOS_ID
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == EOS_ID
