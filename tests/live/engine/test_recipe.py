"""What emulated tokens depend on, and what the emulated model is made from."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import facts_of
from isthmus.core.errors import ModelError
from isthmus.live.engine.recipe import Recipe, expected_tokens, layout_of, recipe_of, state_tokens_of, vocab_of

SIZE = 4
RECIPE = Recipe("model", layout_of(SIZE), 1 << 20)
PROMPT = [random.Random(1).randrange(1000) for _ in range(19)]


@pytest.mark.parametrize(
    "other",
    [
        Recipe("another model", layout_of(SIZE), 1 << 20),
        Recipe("model", layout_of(2 * SIZE), 1 << 20),
        Recipe("model", layout_of(SIZE, layers=3), 1 << 20),
    ],
    ids=["revision", "block size", "layers"],
)
def test_model_and_layout_change_every_token(other: Recipe) -> None:
    ours, theirs = (expected_tokens(recipe, PROMPT, 20) for recipe in (RECIPE, other))
    assert not set(ours) & set(theirs)


def test_an_answer_ends_at_a_stop_token() -> None:
    whole = expected_tokens(RECIPE, PROMPT, 10)
    assert expected_tokens(RECIPE, PROMPT, 10, stop_tokens=(whole[4],)) == whole[:5]


def write_folder(folder: Path, vocab: object = None, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    tokenizer = {
        "model": {"vocab": vocab if vocab is not None else {"a": 0, "b": 3}},
        "added_tokens": [{"id": 9}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_the_vocabulary_counts_added_tokens_and_gaps(tmp_path: Path) -> None:
    assert vocab_of(write_folder(tmp_path / "a")) == 10
    assert vocab_of(write_folder(tmp_path / "b", [["x", -1.0]] * 20)) == 20
    with pytest.raises(ModelError, match="vocabulary"):
        vocab_of(write_folder(tmp_path / "c", {"a": "b"}))


def test_model_and_vocabulary_are_in_the_revision(tmp_path: Path) -> None:
    one, two = write_folder(tmp_path / "one"), write_folder(tmp_path / "two", hidden_size=8)
    three = write_folder(tmp_path / "three", {"a": 100})
    revisions = {recipe_of(folder, folder, SIZE).revision for folder in (one, two, three)}
    assert len(revisions) == 3
    assert recipe_of(one, one, SIZE).revision == recipe_of(one, one, 2 * SIZE).revision


HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def test_a_hybrid_model_keeps_states_of_as_many_blocks_as_the_real_one(tmp_path: Path) -> None:
    """Three recurrent layers to one that keeps 2 KiB of KV a token in 16 bits."""
    folder = write_folder(tmp_path / "hybrid", **HYBRID)
    facts = facts_of(HYBRID)
    assert facts.state_bytes > 3 * 32 * 128 * 128 * 4
    tokens = -(-facts.state_bytes // 2048)
    for size in (16, 64):
        layout = recipe_of(folder, folder, size).layout
        assert layout.state_blocks == -(-tokens // size)
        assert layout.state_bytes == layout.num_layers * 16 * tokens


def test_other_models_keep_none(tmp_path: Path) -> None:
    assert recipe_of(write_folder(tmp_path / "plain"), tmp_path / "plain", SIZE).layout == layout_of(SIZE)
    assert state_tokens_of({"architectures": ["UnheardOfForCausalLM"]}) == 0


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(0, 30), st.integers(1, 12))
def test_a_state_does_not_depend_on_chunks_but_on_every_token(
    tokens: list[int], cut: int, state_tokens: int
) -> None:
    recipe = Recipe("model", layout_of(SIZE, state_tokens=state_tokens), 1 << 20)
    whole, parts, other = (bytearray(recipe.layer_state_bytes) for _ in range(3))
    below = recipe.embed("", tokens)
    found = recipe.recur(whole, 0, below)
    assert [*recipe.recur(parts, 0, below[:cut]), *recipe.recur(parts, len(below[:cut]), below[cut:])] == found
    assert parts == whole
    changed = recipe.embed("", [tokens[0] + 1, *tokens[1:]])
    assert not set(recipe.recur(other, 0, changed)) & set(found)
    assert other != whole
