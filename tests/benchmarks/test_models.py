"""A random model folder follows its seed and loads with Hugging Face tools."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import gguf_reference, make_random_model, unpack_model
from tests.gguf_files import CONTROL, NORMAL, TEMPLATE, UNUSED, vocabulary_keys, write_gguf
from tests.models import VOCAB_SIZE, make_model

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


def test_a_gguf_file_is_unpacked(tmp_path: Path) -> None:
    """The folder has the file's weights, rounded, its tokens and its chat template."""
    (tmp_path / "made").mkdir()
    make_model(tmp_path / "made", "llama")
    letters = sorted(ByteLevel.alphabet())
    num_unused = VOCAB_SIZE - len(letters) - 2
    tokens = [*letters, "hi", "<|end|>", *(f"[{number}]" for number in range(num_unused))]
    kinds = [NORMAL] * (len(letters) + 1) + [CONTROL] + [UNUSED] * num_unused
    keys = vocabulary_keys(
        *("gpt2", tokens, kinds), merges=["h i"], eos_token_id=len(letters) + 1, chat_template=TEMPLATE
    )
    file = write_gguf(tmp_path / "made.gguf", tmp_path / "made", "Q4_1", metadata=keys)
    unpack_model(file, tmp_path / "unpacked")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "unpacked", dtype="auto")
    expected = gguf_reference(file).to(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(weight, found.state_dict()[name]) for name, weight in expected.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "unpacked")
    talk = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "[user]Hi<|end|>[answer]"
    assert tokenizer.decode(tokenizer("two words").input_ids, skip_special_tokens=True) == "two words"
