"""Which tokens end an answer: those of transformers' models and tokenizers, and llama.cpp's for GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from isthmus.core.errors import ModelError
from isthmus.model_files import end_tokens, open_files, read_ends
from tests.live.gateway import folder
from tests.live.gateway.folder import BOS, EOS

IM_END = 260
FILES = {"tokenizer_config": {"eos_token": "<eos>"}, "config": {"vocab_size": 300}}


def ends_of(path: Path, **files: Any) -> tuple[int, ...]:
    return end_tokens(open_files(folder.write(path, **(FILES | files))))


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config": {"eos_token_id": [7, 8]}, "config": {"eos_token_id": 9}}, (7, 8, EOS)),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, (9, EOS)),
        ({"generation_config": {"eos_token_id": []}, "config": {"eos_token_id": [9, 9]}}, (9, EOS)),
        ({"generation_config": {"eos_token_id": None}, "config": {}}, (EOS,)),
        ({"config": {"eos_token_id": 7, "text_config": {"eos_token_id": 8}}}, (7, EOS)),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": 8}}}, (8, EOS)),
        ({"config": {"eos_token_id": EOS}}, (EOS,)),
        ({"config": {}, "tokenizer_config": {}}, ()),
        ({"config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": None}}, (7,)),
        ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<bos>"}}}, (BOS,)),
        ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "<bos>"}}}, (BOS,)),
        ({"special_tokens_map": {"eos_token": "<bos>"}}, (BOS,)),
        ({"tokenizer_config": {"eos_token": "<eos>", "added_tokens_decoder": {}},
          "special_tokens_map": {"eos_token": "<bos>"}}, (EOS,)),
        ({"tokenizer_config": {"eos_token": "he"}}, (folder.HE,)),
    ],
)  # fmt: skip
def test_an_answer_ends_at_all_that_the_files_name(
    tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert ends_of(tmp_path, **files) == ends


@pytest.mark.parametrize("wrong", [True, 7.0, "7", [7, True], [[7]], {"id": 7}, -1, [7, -100]])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_an_end_that_is_no_token_is_refused_in_one_line(tmp_path: Path, name: str, wrong: object) -> None:
    with pytest.raises(
        ModelError, match=rf"{name}\.json: eos_token_id must be an integer of at least 0 or a list"
    ) as e:
        ends_of(tmp_path, **{name: {"eos_token_id": wrong}})
    assert "\n" not in str(e.value)


def test_ends_that_no_answer_can_have_are_ignored_and_told(tmp_path: Path) -> None:
    config = {"eos_token_id": [7, 300, 9999], "vocab_size": 300}
    folder.write(tmp_path, config=config, tokenizer_config={"eos_token": "<|im_end|>"})
    ends, ignored = read_ends(open_files(tmp_path))
    assert ends == (7,)
    assert ignored == (
        f"{tmp_path}/tokenizer_config.json: the end token '<|im_end|>' is ignored: the tokenizer has no such token",
        f"{tmp_path}: the end token 300, 9999 is ignored: the model has 300 tokens",
    )


@pytest.mark.parametrize(
    "model",
    [
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], 0, False),
        models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, "<unk>"),
        models.BPE({"<unk>": 0, "a": 1, "</s>": 2}, []),
    ],
)
def test_an_end_is_found_in_vocabularies_of_every_kind(tmp_path: Path, model: models.Model) -> None:
    folder.write(tmp_path, config={}, tokenizer_config={"eos_token": "</s>"})
    built = Tokenizer(model)
    built.add_special_tokens([AddedToken("<more>", special=True)])
    built.save(str(tmp_path / "tokenizer.json"))
    assert end_tokens(open_files(tmp_path)) == (2,)
    folder.write(tmp_path, config={}, tokenizer_config={"eos_token": "<more>"})
    built.save(str(tmp_path / "tokenizer.json"))
    assert end_tokens(open_files(tmp_path)) == (3,)


def test_files_that_begin_with_a_mark_of_their_encoding_are_read(tmp_path: Path) -> None:
    """As some editors write them."""
    folder.write(tmp_path)
    for path in tmp_path.glob("*.json"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert end_tokens(open_files(tmp_path)) == (EOS,)
