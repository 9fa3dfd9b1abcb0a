"""The random model folders load with Hugging Face tools and do not repeat one token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from isthmus.benchmarks.models import BENCH_MODELS, EOS_ID, make_random_model

PROMPT = "The isthmus joins two shores."


def greedy(folder: Path, num_tokens: int) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    output = model.generate(**ids, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens)
    return [int(token) for token in output[0, ids["input_ids"].shape[1] :]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(BENCH_MODELS))
def test_greedy_output_varies(tmp_path: Path, name: str, dtype: str) -> None:
    make_random_model(tmp_path, **BENCH_MODELS[name], dtype=dtype)
    tokens = greedy(tmp_path, 32)
    assert len(tokens) == 32
    assert len(set(tokens)) >= 8


def test_shapes_and_dtype_follow_the_preset(tmp_path: Path) -> None:
    make_random_model(tmp_path, **BENCH_MODELS["llama-256x8"], dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.head_dim == 64
    assert model.config.num_key_value_heads == 2
    assert model.config.max_position_embeddings == 8192
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert sum(weight.numel() for weight in model.parameters()) == sum(
        tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values()
    )


def test_one_seed_gives_one_model(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    kinds = {"a": ("float32", 3), "b": ("float32", 3), "c": ("bfloat16", 3), "d": ("float32", 4)}
    for name, (dtype, seed) in kinds.items():
        make_random_model(tmp_path / name, **shape, dtype=dtype, seed=seed)
    a, b, c, d = (load_file(tmp_path / name / "model.safetensors") for name in "abcd")
    head = "lm_head.weight"
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert torch.equal(a[head].to(torch.bfloat16), c[head])
    assert not torch.equal(a[head], d[head])


def test_tokenizer_is_byte_level(tmp_path: Path) -> None:
    make_random_model(tmp_path, **BENCH_MODELS["llama-256x8"], dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Zürich → 東京\n\t\x00!"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 512
    assert tokenizer.decode([300]) == "<300>"
    assert tokenizer.eos_token_id == EOS_ID
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == EOS_ID


def test_chat_template_ends_turns_with_eos(tmp_path: Path) -> None:
    make_random_model(tmp_path, **BENCH_MODELS["llama-256x8"], dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>hi<|eos|><|assistant|>"
    assert tokenizer.encode(text, add_special_tokens=False) == [256, 260, *b"hi", 257, 261]


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"num_heads": 3}, {"num_kv_heads": 3}, {"vocab_size": 100}], ids=str
)
def test_impossible_models_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {**BENCH_MODELS["llama-256x8"], "dtype": "float32", **wrong}
    with pytest.raises(ValueError, match="must"):
        make_random_model(tmp_path, **arguments)  # type: ignore[arg-type]
