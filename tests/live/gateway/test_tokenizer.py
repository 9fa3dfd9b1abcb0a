"""Tokenizers of model folders: text to tokens and back, and what a model's files say about generation."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from isthmus.cli.models import bytes_folder, find_model
from isthmus.core.errors import ModelError, RequestError
from isthmus.live.gateway import GatewayTokenizer
from isthmus.live.gateway.tokenizer import BYTE_OF_CHAR, GenerationDefaults, load_generation
from isthmus.model_files import open_files

from . import folder
from .test_detokenizer import BOS, BYTE_LEVEL, SENTENCEPIECE, sentencepiece


def test_the_byte_alphabet_is_the_library_s() -> None:
    assert set(BYTE_OF_CHAR) == set(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("\x00 \x7f\n", "é€😀", "\xad\xa0"):
        [(spelled, _)] = split.pre_tokenize_str(text)
        assert bytes(BYTE_OF_CHAR[char] for char in spelled) == text.encode()


def test_special_tokens(tokenizer: GatewayTokenizer) -> None:
    assert tokenizer.encode_text("the") == [folder.BOS, ord("t"), folder.HE]
    chat = tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert chat == [folder.BOS, *folder.byte_tokens("<user>x\n<assistant>")]
    assert tokenizer.decode([folder.BOS, folder.HE, ord("y"), folder.EOS]) == "hey"
    shown = [tokenizer.token_bytes(token) for token in (folder.HE, 0xE2, folder.EOS, folder.PADDING)]
    assert shown == [b"he", b"\xe2", b"<eos>", b""]


def test_token_bytes_of_sentencepiece() -> None:
    built = sentencepiece()._tokenizer
    built.add_tokens(["▁▁▁"])
    added = built.token_to_id("▁▁▁")
    tokenizer = GatewayTokenizer(built, None, GenerationDefaults())
    assert tokenizer.decode([3, added]) == "lo   "
    assert [tokenizer.token_bytes(token) for token in (added, 1, 5 + 0xE2)] == [b"   ", b" Hello", b"\xe2"]


@given(st.lists(st.sampled_from("ab é東😀\ufffd"), max_size=20).map("".join))
def test_offsets_count_characters_of_the_text(text: str) -> None:
    tokens = [folder.BOS, *folder.byte_tokens(text), folder.EOS]
    starts = [at for at, char in enumerate(text) for _ in char.encode()]
    assert _loaded(bytes_folder()).offsets(folder.byte_tokens(text), text) == tuple(starts)
    assert BYTE_LEVEL.offsets(tokens, text) == (0, *starts, len(text))


def test_offsets_of_tokens_that_the_text_spells_otherwise() -> None:
    spelled = [BOS, 1, 5 + 0xC3, 5 + 0xA9, 2]
    assert SENTENCEPIECE.offsets(spelled, "Helloé world") == (0, 0, 5, 5, 6)
    assert SENTENCEPIECE.offsets(spelled, " Helloé world") == (0, 0, 6, 6, 7)
    assert SENTENCEPIECE.offsets(spelled, "<s>Helloé world") == (0, 3, 8, 8, 9)
    assert SENTENCEPIECE.offsets([1, 2], "other") == (0, 5)  # a normalizer of its own: never behind the end
    assert BYTE_LEVEL.offsets([0xFF, 0x61, 10**6, 0x62, 0xE2], "\ufffdab") == (0, 1, 2, 2, 3)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: no such file"),
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer"),
        *(
            ("tokenizer_config.json", content, "tokenizer_config.json")
            for content in ("[1]", "{", json.dumps({"chat_template": 5}))
        ),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    (folder.write(tmp_path) / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=says) as caught:
        GatewayTokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_without_template(tmp_path: Path) -> None:
    tokenizer = GatewayTokenizer.load(folder.write(tmp_path, tokenizer_config={}))
    with pytest.raises(RequestError, match="no chat template: use /v1/completions"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    built = folder.tokenizer()
    built.enable_truncation(2)
    built.enable_padding(length=64)
    folder.write(tmp_path)
    built.save(str(tmp_path / "tokenizer.json"))
    assert len(GatewayTokenizer.load(tmp_path).encode_text("abcdef")) == 7


@given(text=st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_are_foreseen(text: str) -> None:
    for model in (find_model(None)[0], bytes_folder()):
        tokenizer = _loaded(model)
        assert len(tokenizer.encode_text(text, add_special_tokens=False)) >= tokenizer.least_tokens(len(text))
    assert _loaded(bytes_folder()).least_tokens(1000) > 0


_loaded = lru_cache(GatewayTokenizer.load)


def load(folder: Path, **generation: object) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_generation(open_files(folder))


@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 1.1}])
@pytest.mark.parametrize("do_sample", [True, False, None])
def test_sampling_defaults(tmp_path: Path, do_sample: bool | None, penalty: dict[str, float]) -> None:
    """The model's own if it samples, OpenAI's if not; the penalty holds for greedy models too."""
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    expected = GenerationDefaults(**(own if do_sample else {}), **penalty)
    assert load(tmp_path, do_sample=do_sample, **own, **penalty) == expected


def test_an_end_that_is_ignored_is_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    assert load(tmp_path, eos_token_id=[7, 9]).eos == (7,)
    assert caplog.messages == [f"{tmp_path}: the end token 9 is ignored: the model has 9 tokens"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", "hot"), ("top_p", True), ("top_k", -1)),
        *(("eos_token_id", "x"), ("eos_token_id", [True]), ("repetition_penalty", 0)),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name}"):
        load(tmp_path, do_sample=True, **{name: value})
