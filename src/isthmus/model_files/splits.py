"""How text is split before byte pairs are merged, by the names that GGUF files have for it (`tokenizer.ggml.pre`).

Which name stands for which split is a fact of llama.cpp's `llama-vocab.cpp`. Where a published tokenizer splits
otherwise than llama.cpp can express, the tokenizer's pattern is here. Left out: what is not put together of bytes
(gemma4), what has code of its own there (afmoe), empty matches (superbpe), tokenizers of embeddings, and tiny_aya,
whose pattern takes hours for a long number.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import normalizers


class Split(NamedTuple):
    """`patterns`: one after the other, each splits what those before it left. `normaliser`: of the text before.
    `whole_words`: a word that is a token is not put together from smaller ones. `starts`: texts begin with the BOS
    token where the file does not say."""

    patterns: tuple[str, ...]
    normaliser: normalizers.Normalizer | None = None
    whole_words: bool = False
    starts: bool = False


_NFC = normalizers.NFC()
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_REST}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_MARKS}|{_REST}"


def _cases(upper: str, lower: str, ending: str, prefix: str = r"[^\r\n\p{L}\p{N}]?") -> str:
    """Words that end where a small letter is followed by a capital one."""
    return rf"{prefix}{upper}*{lower}+{ending}|{prefix}{upper}+{lower}*{ending}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_HAN = r"&&[^\p{Han}]]"
_TEKKEN = rf"{_cases(_UPPER, _LOWER, '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_GPT4O = rf"{_cases(_UPPER, _LOWER, f'{_SHORT}?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_YOUTU = rf"{_cases(_UPPER, _LOWER, f'{_SHORT}?')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_KIMI = _cases(_UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, f"{_SHORT}?")
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARK_WORD = rf"{_ASCII_MARK}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_EAST = "[一-龥ࠀ-一가-퟿]+"
_END = r"(?<!\s)\s+$"
"""Looks back, which changes nothing but the time that it takes for spaces before a word."""

_NAMED = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum jais trillion granite-docling exaone4": (
        Split((_GPT2,))
    ),
    "mpt olmo modern-bert": Split((_GPT2,), _NFC),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": Split((r"\p{N}", _GPT2)),
    "command-r": Split((r"\p{N}", _GPT2), _NFC),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": (
        Split((_LLAMA3,), whole_words=True, starts=True)
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Split((_LLAMA3,)),
    "minicpm5": Split((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), whole_words=True),
    "jais-2": Split(
        (
            rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|"
            + "".join(
                rf"\s{{{count}}}(?!\S)|" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
            )
            + r"\s",
        )
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": Split((_QWEN2,), _NFC),
    "stablelm2 hunyuan solar-open grok-2": Split((_QWEN2,)),
    "qwen35": Split(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}",
        ),
        _NFC,
    ),
    "ufakzeka": Split((rf"{_WORD}|\p{{N}}|{_MARKS}|{_REST}",)),
    "laguna": Split((r"[^\n]+|\n+", _QWEN2)),
    "seed-coder": Split((rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}",)),
    "bailingmoe bailingmoe2 llada-moe": Split(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "exaone-moe": Split(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": Split((_TEKKEN,), whole_words=True, starts=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Split((_GPT4O,)),
    "youtu": Split(
        ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", _YOUTU), whole_words=True
    ),
    "kimi-k2": Split((rf"\p{{Han}}+|{_KIMI}|\p{{N}}{{1,3}}|{_MARKS}|{_REST}",)),
    "bloom poro-chat gpt3-finnish": Split((_BLOOM,)),
    "viking": Split((_BLOOM, r"\p{N}")),
    "deepseek-llm": Split(
        ("[\r\n]", rf"\s?[{_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", _END, _EAST, r"\p{N}")
    ),
    "deepseek-coder": Split(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split(
        (r"\p{N}{1,3}", _CJK, rf"{_MARK_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}")
    ),
    "spark2_5": Split(
        (r"\p{N}{1,3}", _CJK, rf"{_MARK_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
    ),
    "chameleon": Split(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        starts=True,
    ),
}
SPLITS = {name: split for names, split in _NAMED.items() for name in names.split()}
