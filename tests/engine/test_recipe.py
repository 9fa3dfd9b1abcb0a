"""What emulated tokens depend on, and what the emulated model is made from."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from isthmus.engine.recipe import Recipe, expected_tokens, layout_of, recipe_of, vocab_of
from isthmus.errors import ModelError

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
