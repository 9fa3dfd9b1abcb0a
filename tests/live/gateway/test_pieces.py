"""Tokens of pieces: those of the whole text."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from isthmus.cli.models import bytes_folder, find_model
from isthmus.live.gateway.pieces import Pieces, are_independent
from isthmus.live.gateway.tokenizer import GatewayTokenizer


@lru_cache
def tokenizer() -> Tokenizer:
    return GatewayTokenizer.load(find_model(None)[0])._tokenizer


def whole(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


PARTS = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|im_",
        "start|>",
        "<",
        "\n",
        "  ",
        " a",
        "e\u0301",
        "12",
        "don't",
        "ü",
    ]
)


@given(st.lists(st.one_of(PARTS, st.text(max_size=6)), max_size=20), st.sampled_from([0, 600, 1 << 20]))
def test_pieces_have_the_tokens_of_the_whole(parts: list[str], most_bytes: int) -> None:
    pieces, text = Pieces(tokenizer(), whole, most_bytes), "".join(parts)
    assert pieces.encode(text) == whole(text) == pieces.encode(text)


def test_what_came_before_is_not_tokenised_again_while_there_is_room() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return whole(text)

    pieces = Pieces(tokenizer(), encode, 2000)
    for turns in range(1, 5):
        pieces.encode("<|im_end|>".join(f"turn {turn}" for turn in range(turns)))
    assert asked == [f"turn {turn}" for turn in range(4)]
    for number in range(50):
        pieces.encode(f"another {number}")
    assert pieces._num_bytes <= 2000
    pieces.encode("turn 0")
    assert asked[-1] == "turn 0"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"normalizer": {"type": "Prepend", "prepend": "_"}}, False),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"},
                                                              "content": "b"}]}}, False),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"}}, False),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, False),
        ({"lstrip": True}, False),
        ({"added_tokens": []}, False),
    ],
)  # fmt: skip
def test_only_tokenizers_whose_parts_are_independent_have_pieces(
    changes: dict[str, Any], expected: bool
) -> None:
    told = json.loads((bytes_folder() / "tokenizer.json").read_text())
    if "lstrip" in changes:
        told["added_tokens"][0]["lstrip"] = True
    else:
        told |= changes
    assert are_independent(Tokenizer.from_str(json.dumps(told))) is expected
