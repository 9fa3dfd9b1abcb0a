"""Splits of text by the names that GGUF files have for them: nothing is lost, and the time is that of the length."""

from __future__ import annotations

import time
from functools import lru_cache
from itertools import pairwise

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from isthmus.model_files.vocabulary import SPLITS, Split
from tests.scratch import ROOT

DISTINCT = {split.patterns: (name, split) for name, split in SPLITS.items()}
TEXT = st.text(
    st.one_of(
        st.sampled_from(" \n\r\tabcdtlmvreSDXYZ0123456789'.,!?$+<=>^~|`_-/()[]{}"),
        st.sampled_from("é\u0301ßАжاकि的一龥あアー가힣ㄱㄅ。！，—“”…\u3000½²Ⅷ٣😀\u200d\xa0\u2028"),
    ),
    max_size=40,
)
WORDS = st.lists(
    st.sampled_from(
        ["IMGIMGABZ", "<sentinel:12>", "getUserName", "DON'T", "it's", "한국어 말", "    ", "中文abc", "12345"]
    ),
    max_size=3,
).map("".join)


@lru_cache
def pretokenizer(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


def pieces_of(split: Split, text: str) -> list[str]:
    return [piece for piece, _ in pretokenizer(split.patterns).pre_tokenize_str(text)]


def cut(pattern: str, text: str) -> list[str]:
    """Matches and what lies between them, by another engine: `$` is the end of a line to the library's."""
    found = regex.finditer(pattern, text, regex.V1 | regex.MULTILINE)
    ends = sorted({0, len(text), *(at for match in found for at in match.span())})
    return [text[start:stop] for start, stop in pairwise(ends)]


@pytest.mark.parametrize("name", [name for name, _ in DISTINCT.values()])
@given(text=st.tuples(WORDS, TEXT, WORDS).map("".join))
def test_a_split_is_that_of_another_engine_and_loses_nothing(name: str, text: str) -> None:
    pieces = pieces_of(SPLITS[name], text)
    assert "".join(pieces) == text
    expected = [text] if text else []
    for pattern in SPLITS[name].patterns:
        expected = [part for piece in expected for part in cut(pattern, piece)]
    assert pieces == expected


def test_the_documentation_lists_them() -> None:
    assert ", ".join(f"`{name}`" for name in sorted(SPLITS)) in (ROOT / "docs/configuration.md").read_text()


@pytest.mark.parametrize("pattern", sorted(set(GGUF_PRE_TOKENIZER_SPLITS.values())))
@given(text=st.tuples(WORDS, TEXT).map("".join))
def test_a_split_is_that_of_transformers(pattern: str, text: str) -> None:
    theirs = [piece for piece, _ in pretokenizer((pattern,)).pre_tokenize_str(text)]
    names = [name for name, each in GGUF_PRE_TOKENIZER_SPLITS.items() if each == pattern]
    for split in {SPLITS[name].patterns: SPLITS[name] for name in names}.values():
        assert pieces_of(split, text) == theirs


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("deepseek-v3", "12345 中文abc,x", ["123", "45", " ", "中文", "abc", ",x"]),
        ("deepseek-llm", "Ab 12\n  x  ", ["Ab", " ", "1", "2", "\n", " ", " x", "  "]),
        ("deepseek-coder", "f(x) 12", ["f", "(", "x", ")", " ", "1", "2"]),
        ("falcon", "`x` 12345", ["`", "x", "`", " ", "123", "45"]),
        ("starcoder", "x12 y", ["x", "1", "2", " y"]),
        ("bloom", "a, bc", ["a", ",", " bc"]),
        ("kimi-k2", "getUserName是x", ["get", "User", "Name", "是", "x"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
        ("seed-coder", "a;\n\nb", ["a", ";", "\n\n", "b"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        ("exaone-moe", "한국어 말 a", ["한국어 말 a"]),
        ("ufakzeka", "Ali'nin", ["Ali", "'nin"]),
        ("qwen35", "कि", ["कि"]),
        ("chameleon", "IMGIMGABZ  x", ["IMGIMGABZ", "  ", "x"]),
    ],
)
def test_what_splits_are_known_for(name: str, text: str, pieces: list[str]) -> None:
    assert pieces_of(SPLITS[name], text) == pieces


@pytest.mark.parametrize("name", [name for name, _ in DISTINCT.values()])
def test_no_text_takes_long_to_split(name: str) -> None:
    """A text of twenty times the length takes about twenty times as long, and not four hundred times. The best of a few
    counts: something else may come between."""
    for unit in (" ", "a", "A", "aA", "1", "'", "!", "\u0301", "的", "\n", "\r ", " \n", "é"):
        short, long = (f"x{unit * count}的" for count in (1_000, 20_000))
        base = min(seconds(name, short) for _ in range(3))
        assert any(seconds(name, long) < 100 * base + 0.1 for _ in range(4)), unit


def seconds(name: str, text: str) -> float:
    """Of a processor's time."""
    started = time.process_time()
    pieces_of(SPLITS[name], text)
    return time.process_time() - started
