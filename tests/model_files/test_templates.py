"""Chat templates and special tokens are those of transformers' tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from isthmus.core.errors import ModelError
from isthmus.live.gateway import GatewayTokenizer
from isthmus.model_files import chat_templates, open_files, special_tokens
from tests.live.gateway import folder

LIST = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
TEXTS: dict[str, dict[str, str]] = {
    "none": {},
    "file": {"chat_template.jinja": "f\n"},
    "files": {"chat_template.jinja": "f", "additional_chat_templates/tool_use.jinja": "t"},
    "others alone": {
        "additional_chat_templates/rag.jinja": "r",
        "additional_chat_templates/it.txt": "no template",
    },
    "twice": {"chat_template.jinja": "f", "additional_chat_templates/default.jinja": "other"},
}


def put(path: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("stated", [None, "s", LIST, LIST[1:], {"default": "d", "rag": "r"}])
def test_templates_are_those_of_transformers(tmp_path: Path, stated: Any, texts: str) -> None:
    folder.write(tmp_path, tokenizer_config={} if stated is None else {"chat_template": stated})
    put(tmp_path, TEXTS[texts])
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    expected = {"default": theirs} if isinstance(theirs, str) else theirs or {}
    assert chat_templates(open_files(tmp_path)) == expected


def test_the_template_of_older_processors_comes_last(tmp_path: Path) -> None:
    folder.write(tmp_path, tokenizer_config={}, chat_template={"chat_template": "p"})
    assert chat_templates(open_files(tmp_path)) == {"default": "p"}
    folder.write(tmp_path, tokenizer_config={"chat_template": "s"})
    assert chat_templates(open_files(tmp_path)) == {"default": "s"}


@pytest.mark.parametrize("wrong", [5, ["x"], [{"name": "default"}], [{"template": "x"}], {"default": 5}])
@pytest.mark.parametrize("name", ["tokenizer_config", "chat_template"])
def test_a_template_that_is_none_is_refused(tmp_path: Path, name: str, wrong: object) -> None:
    folder.write(tmp_path, **({"tokenizer_config": {}} | {name: {"chat_template": wrong}}))
    with pytest.raises(
        ModelError, match=rf"{name}\.json: chat_template must be a string or a list of templates"
    ):
        chat_templates(open_files(tmp_path))


def added(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"__type": "AddedToken", "content": text, **flags}


@pytest.mark.parametrize(
    ("config", "tokens_map"),
    [
        ({"bos_token": "<bos>", "eos_token": added("<eos>"), "unk_token": None, "add_bos_token": True}, None),
        ({"eos_token": "<eos>"}, {"eos_token": "<bos>", "bos_token": "<bos>"}),
        ({"eos_token": "<eos>"}, {"pad_token": {k: v for k, v in added("<bos>").items() if k != "__type"}}),
        ({"eos_token": "<eos>", "added_tokens_decoder": {"258": added("<eos>")}}, {"eos_token": "<bos>"}),
        ({"eos_token": "<eos>"}, {"eos_token": None}),
        ({}, {"sep_token": "<eos>", "cls_token": "<bos>"}),
        ({"image_token": "<bos>", "extra_special_tokens": {"boi": "<eos>"}}, None),
    ],
)
def test_special_tokens_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], tokens_map: dict[str, Any] | None
) -> None:
    more = {} if tokens_map is None else {"special_tokens_map": tokens_map}
    folder.write(tmp_path, tokenizer_config=config, **more)
    assert (
        special_tokens(open_files(tmp_path))
        == PreTrainedTokenizerFast.from_pretrained(tmp_path).special_tokens_map
    )


def entry(text: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    return {
        name: value for name, value in (added(text) | {"special": special} | flags).items() if name != "__type"
    }


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"eos_token": "he"},
        {"eos_token": "<eos>", "pad_token": "abc"},
        {"added_tokens_decoder": {"256": entry("he")}},
        {"added_tokens_decoder": {"256": entry("he", special=False), "258": entry("<eos>", special=False)}},
        {"added_tokens_decoder": {"258": entry("<eos>"), "257": entry("<bos>", special=False)}},
        {"additional_special_tokens": ["he"]},
        {"extra_special_tokens": ["he", "abc"]},
        {"extra_special_tokens": {"call_token": "he"}},
    ],
)
@pytest.mark.parametrize("hidden", [True, False])
def test_tokens_that_files_beside_the_tokenizer_name_are_whole_and_hidden(
    tmp_path: Path, config: dict[str, Any], hidden: bool
) -> None:
    """`hidden`: whether the tokenizer itself calls its added tokens special."""
    folder.write(tmp_path, tokenizer_config=config)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for each in content["added_tokens"]:
        each["special"] = hidden
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours, theirs = GatewayTokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = ours.encode_text("a he<eos>the <bos> b", add_special_tokens=False)
    assert ids == theirs.encode("a he<eos>the <bos> b", add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
