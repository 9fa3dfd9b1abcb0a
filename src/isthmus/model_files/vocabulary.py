"""The tokenizer of a GGUF file, made of its vocabulary; and how text is split before byte pairs are merged, by the
names that such files have for it (`tokenizer.ggml.pre`).

Which name stands for which split is a fact of llama.cpp's `llama-vocab.cpp`. Where a published tokenizer splits
otherwise than llama.cpp can express, the tokenizer's pattern is here. Left out: what is not put together of bytes
(gemma4), what has code of its own there (afmoe), empty matches (superbpe), tokenizers of embeddings, and tiny_aya,
whose pattern takes hours for a long number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from isthmus.core.errors import ModelError
from isthmus.core.models import Fields


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


# The tokenizer of a GGUF file, as the tokenizers library writes it, and what the file says of special tokens.
#
# Which tokens end an answer is known by their texts, too, as in llama.cpp's `llama-vocab.cpp`: few files have the keys.


_AT = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens."""

FIM = "fim_pad", "fim_rep", "fim_sep"
"""Keys of tokens between files: whoever completes one of them has come to its end."""
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
"""Texts of tokens that llama.cpp ends an answer at, whatever else the file says of them."""
NO_ENDS = [
    ("<|end|>", ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})),
    ("</s>", ({"<|tool_response>"},)),
]
"""End texts that count only where not all texts of a set are tokens."""


def tokenizer_of(fields: Fields) -> str | None:
    """The text of a `tokenizer.json`, None where there is no tokenizer. Raises ModelError for one that is not
    supported."""
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    model = fields.get(f"{_AT}.model") or "none"
    if model == "none":
        return None
    if model not in makers:
        fields.refuse(f"GGUF tokenizer {model!r} is not supported; supported: {', '.join(makers)}")
    try:
        tokenizer = makers[model](fields)
        _add(fields, tokenizer)
        return str(tokenizer.to_str())
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        fields.refuse(f"its tokenizer cannot be read: {' '.join(str(error).split())}")


def special_tokens_of(fields: Fields) -> dict[str, Any]:
    """As in a `tokenizer_config.json`."""
    tokens = _tokens(fields)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _id(fields, key) for name, key in names.items()}
    return {name: tokens[token] for name, token in ids.items() if token is not None}


def token_id(fields: Fields, text: str) -> int | None:
    tokens = _tokens(fields)
    return tokens.index(text) if text in tokens else None


def generation_of(fields: Fields) -> dict[str, Any]:
    """As in a `generation_config.json`: what ends an answer, and how the model's author samples."""
    ends = [_id(fields, key) for key in ("eos", "eot", "eom", *FIM)] + _known_ends(_tokens(fields))
    names = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "repetition_penalty": "penalty_repeat"}
    sampling = {name: fields.get(f"general.sampling.{key}") for name, key in names.items()}
    return {
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)),
        "do_sample": any(value is not None for value in sampling.values()),
        **sampling,
    }


def _byte_level(fields: Fields) -> Tokenizer:
    name = fields.get(f"{_AT}.pre") or "default"
    if name not in SPLITS:
        fields.refuse(f"the split {name!r} of the GGUF tokenizer is not one of those of docs/configuration.md")
    split = SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _list(fields, "merges")]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(fields), merges=merges, ignore_merges=split.whole_words))
    if split.normaliser is not None:
        tokenizer.normalizer = split.normaliser
    pieces = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pieces, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    _begin(fields, tokenizer, otherwise=split.starts)
    return tokenizer


def _sentencepiece(fields: Fields) -> Tokenizer:
    """SentencePiece's BPE, with a space before the text and after each special token, as llama.cpp and the Hugging
    Face tokenizer of Llama 2 put it."""
    tokens, unknown = _tokens(fields), _id(fields, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(fields),
            merges=_merges_of_scores(fields),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = fields.flag(f"{_AT}.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefixed else spaces)
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*pieces, decoders.Strip(" ", 1, 0)] if prefixed else pieces)
    _begin(fields, tokenizer, otherwise=True)
    return tokenizer


def _merges_of_scores(fields: Fields) -> list[tuple[str, str]]:
    """Two tokens that make a third are merged in the order of the scores of what they make, the best first; of several
    pairs that make the same, that with the longest first half."""
    scores, kinds = _list(fields, "scores"), _kinds(fields)
    scored = [each for each in zip(scores, _tokens(fields), kinds, strict=True) if each[2] == NORMAL]
    known = {token for _, token, _ in scored}
    return [
        (token[:at], token[at:])
        for _, token, _ in sorted(scored, key=lambda each: -each[0])
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in known and token[at:] in known
    ]


def _add(fields: Fields, tokenizer: Tokenizer) -> None:
    """Tokens that are found in the text before it is split: control tokens, which are not shown, and others."""
    kinds = list(zip(_tokens(fields), _kinds(fields), strict=True))
    hidden = [token for token, kind in kinds if kind in (UNKNOWN, CONTROL)]
    shown = [token for token, kind in kinds if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in hidden])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in shown])


def _begin(fields: Fields, tokenizer: Tokenizer, *, otherwise: bool) -> None:
    """Which special tokens stand around a plain text; `otherwise`: whether BOS does where the file does not say."""
    wanted = {
        "bos": fields.flag(f"{_AT}.add_bos_token", otherwise),
        "eos": fields.flag(f"{_AT}.add_eos_token", False),
    }
    ids = {name: _id(fields, name) if around else None for name, around in wanted.items()}
    tokens = _tokens(fields)
    before, after = ([] if token is None else [tokens[token]] for token in ids.values())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(tokens[token], token) for token in ids.values() if token is not None],
    )


def _known_ends(tokens: Sequence[str]) -> list[int]:
    """Ids of the tokens that end an answer by their texts."""
    known = {token: at for at, token in enumerate(tokens) if token in END_TEXTS}
    for text, others in NO_ENDS:
        if any(each <= known.keys() for each in others):
            known.pop(text, None)
    return list(known.values())


def _vocabulary(fields: Fields) -> dict[str, int]:
    """Without what only fills the embedding up."""
    kinds = _kinds(fields)
    return {token: at for at, token in enumerate(_tokens(fields)) if kinds[at] != UNUSED}


def _tokens(fields: Fields) -> Sequence[str]:
    return _list(fields, "tokens")


def _kinds(fields: Fields) -> Sequence[int]:
    """An end is a control token, whatever the file says: it is found whole in prompts, and never shown."""
    tokens, stated = _tokens(fields), fields.get(f"{_AT}.token_type")
    kinds = [NORMAL] * len(tokens) if stated is None else list(stated)
    if len(kinds) != len(tokens):
        fields.refuse(f"{len(tokens)} tokens have {len(kinds)} types")
    for token in _known_ends(tokens):
        kinds[token] = CONTROL
    return kinds


def _list(fields: Fields, key: str) -> list[Any]:
    value = fields.get(f"{_AT}.{key}")
    if not isinstance(value, list):
        fields.refuse(f"the key '{_AT}.{key}' is missing, or no list")
    return value


def _id(fields: Fields, name: str) -> int | None:
    """Id of a special token, if the file has it."""
    key = f"{_AT}.{name}_token_id"
    if fields.get(key) is None:
        return None
    token = fields.count(key, least=0)
    if token >= len(_tokens(fields)):
        fields.refuse(f"{key!r} is {token}, and there are {len(_tokens(fields))} tokens")
    return token
