"""The tokenizer of a GGUF file: the tokens of the published tokenizers that its names stand for, and transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
    get_merges,
)

from isthmus.core.errors import ModelError
from isthmus.live.engine.recipe import read_spec
from isthmus.live.gateway import GatewayTokenizer
from isthmus.model_files import open_files
from isthmus.model_files.header import read_header
from tests.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    TEMPLATE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    vocabulary_keys,
    write_gguf,
)
from tests.models import make_model

TEXTS = [
    "The capital of France is Paris.",
    "  two  spaces, three   and\ttabs \t mixed\n\n\nlines \r\n end  ",
    "I'm sure you've SEEN IT'S 'LL don't",
    "1234567 3.14 1,000,000 ²³ Ⅷ ٣٤٥ x1y22z333",
    "naïve café – “quotes” … €5 ½",
    "日本語のテキスト 한국어 العربية हिन्दी עברית ไทย",
    "😀👍🏽 👩‍👩‍👧 \u200b zero\u00a0width",
    "def f(x):\n    return x**2  # [a-z]+ $^|~`<=>\n",
    "e\u0301 decomposed A\u030a 가 unreachable",
    "ᾳ ǆ ﬁ İ ß \ufeff \x00\x7f",
    "a",
    " ",
    "",
]
CORPUS = [text * 3 for text in TEXTS] + ["the then there 12 123 2024 2025 don't isn't   the end.\n"] * 5
SPECIALS = ["<|end|>", "<|start|>", "<|ask|>"]
THINK, WHOLE = "<think>", "Ġunreachable"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "llama", num_hidden_layers=1, vocab_size=640)
    return folder


# ---- byte-level BPE


class Trained:
    """Merges that a split of texts leads to, with the special tokens first. At the end a word that no merges
    lead to, a token that is shown, and one that only fills up."""

    def __init__(self, split: pre_tokenizers.PreTokenizer | None) -> None:
        tokenizer = Tokenizer(models.BPE())
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of] if split else [bytes_of])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIALS)
        tokenizer.train_from_iterator(CORPUS, trainer)
        vocabulary = tokenizer.get_vocab()
        self.tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), WHOLE, THINK, "[PAD1]"]
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        self.merges = [" ".join(pair) for pair in merges]
        self.kinds = [CONTROL] * len(SPECIALS) + [NORMAL] * (len(vocabulary) - len(SPECIALS))
        self.kinds += [NORMAL, USER_DEFINED, UNUSED]

    def file(self, path: Path, folder: Path, pre: str | None, **keys: Any) -> Path:
        ids = {"bos_token_id": 1, "eos_token_id": 0, "chat_template": TEMPLATE}
        metadata = vocabulary_keys("gpt2", self.tokens, self.kinds, merges=self.merges, pre=pre, **(ids | keys))
        return write_gguf(path, folder, metadata=metadata)

    def published(self, split: list[pre_tokenizers.PreTokenizer], **options: Any) -> Tokenizer:
        """As authors write a `tokenizer.json`."""
        vocabulary = {token: at for at, token in enumerate(self.tokens[:-1])}
        merges = [tuple(merge.split(" ")) for merge in self.merges]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
        tokenizer.add_tokens([AddedToken(THINK, normalized=False)])
        return tokenizer


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PUBLISHED: dict[str, tuple[list[pre_tokenizers.PreTokenizer], dict[str, Any]]] = {
    "gpt-2": ([_GPT2], {}),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), _GPT2], {}),
    "llama-bpe": ([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _BYTES], {"ignore_merges": True}),
    "qwen2": ([pre_tokenizers.Split(Regex(_QWEN2), "isolated"), _BYTES], {}),
    "starcoder": ([pre_tokenizers.Digits(individual_digits=True), _GPT2], {}),
    "command-r": ([pre_tokenizers.Digits(individual_digits=True), _GPT2], {}),
    "deepseek-coder": (
        [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")),
            pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            _BYTES,
        ],
        {},
    ),
}


def mixed(texts: Sequence[str]) -> list[str]:
    return [*texts, f"{SPECIALS[1]}user\n{texts[0]}{SPECIALS[0]} {THINK}x{THINK}", "<|star", "[PAD1]"]


@pytest.mark.parametrize("pre", PUBLISHED)
@pytest.mark.parametrize("trained_with", ["its own", "none"])
def test_tokens_are_those_of_the_published_tokenizers(
    folder: Path, tmp_path: Path, pre: str, trained_with: str
) -> None:
    """Also with merges across all that a split separates, which show each wrong split."""
    split, options = PUBLISHED[pre]
    trained = Trained(split[0] if trained_with == "its own" and len(split) > 1 else None)
    ours = GatewayTokenizer.load(trained.file(tmp_path / "model.gguf", folder, pre, add_bos_token=False))
    published = trained.published(split, **options)
    if pre in ("qwen2", "command-r"):
        published.normalizer = normalizers.NFC()
    for text in mixed(TEXTS):
        expected = published.encode(text).ids
        assert ours.encode_text(text) == expected, text
        assert ours.decode(expected) == published.decode(expected)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_tokens_are_those_of_transformers(folder: Path, tmp_path: Path, pre: str) -> None:
    """Which knows no other names of splits, and neither NFC nor words that are not put together."""
    split, _ = PUBLISHED[pre]
    path = Trained(split[0] if len(split) > 1 else None).file(
        tmp_path / "model.gguf", folder, pre, add_bos_token=False
    )
    ours, theirs = GatewayTokenizer.load(path), transformers_tokenizer(path)
    for text in mixed([text for text in TEXTS if text.isascii()]):
        assert ours.encode_text(text) == theirs.encode(text, add_special_tokens=False).ids, text


def transformers_tokenizer(path: Path) -> Tokenizer:
    architecture, tokenizer, _ = get_gguf_tokenizer(str(path))
    return convert_gguf_tokenizer(architecture, tokenizer)[0]


@pytest.mark.parametrize("pre", ["default", None])
def test_the_default_split(folder: Path, tmp_path: Path, pre: str | None) -> None:
    """llama.cpp's, where a file names none: each pattern cuts what those before it left."""
    patterns = [
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ]
    trained = Trained(None)
    ours = GatewayTokenizer.load(trained.file(tmp_path / "model.gguf", folder, pre))
    plain = trained.published([_BYTES])
    for text in TEXTS:
        pieces = [text]
        for pattern in patterns:
            pieces = [part for piece in pieces for part in cut(pattern, piece)]
        expected = [token for piece in pieces for token in plain.encode(piece).ids]
        assert ours.encode_text(text) == expected, text


def cut(pattern: str, text: str) -> list[str]:
    """Matches and what lies between them."""
    ends = sorted({0, len(text), *(at for match in regex.finditer(pattern, text) for at in match.span())})
    return [text[start:stop] for start, stop in pairwise(ends)]


# ---- SentencePiece


class Scored:
    """A vocabulary as SentencePiece writes it: specials, bytes, pieces by falling score, characters last."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"]))
        vocabulary = tokenizer.get_vocab()
        pieces = sorted((token for token in vocabulary if len(token) > 1), key=vocabulary.__getitem__)
        pieces.remove("<unk>")
        characters = sorted(token for token in vocabulary if len(token) == 1)
        self.tokens = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *pieces,
            *characters,
        ]
        self.kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(characters))]
        self.scores = [0.0] * 259 + [-float(at) for at in range(len(pieces))] + [-1e4] * len(characters)
        self.tokens += [THINK]
        self.kinds += [USER_DEFINED]
        self.scores += [-1e3]

    def file(self, path: Path, folder: Path, **keys: Any) -> Path:
        ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "scores": self.scores}
        return write_gguf(
            path, folder, metadata=vocabulary_keys("llama", self.tokens, self.kinds, **(ids | keys))
        )


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_that_of_transformers(folder: Path, tmp_path: Path, prefix: bool) -> None:
    path = Scored().file(tmp_path / "model.gguf", folder, add_space_prefix=prefix)
    ours, theirs = GatewayTokenizer.load(path), transformers_tokenizer(path)
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    for text in TEXTS:
        if text.startswith(" ") and prefix:
            continue  # its Metaspace takes the text's own space for the one to put before it
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode_text(text) == [1, *expected], text
        assert ours.decode(expected) == text


def test_sentencepiece_puts_a_space_after_each_special_token(folder: Path, tmp_path: Path) -> None:
    """As llama.cpp and the published tokenizer of Llama 2."""
    scored = Scored()
    ours = GatewayTokenizer.load(scored.file(tmp_path / "model.gguf", folder))
    space, the, think = (scored.tokens.index(token) for token in ("▁", "▁the", THINK))
    assert ours.encode_text("the</s>the  <think>the") == [1, the, 2, the, space, space, think, the]
    assert ours.encode_text(" the") == [1, space, the]


def test_merges_of_scores_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    scored = Scored()
    text = open_files(scored.file(tmp_path / "model.gguf", folder)).required("tokenizer.json")
    theirs = get_merges({"tokens": scored.tokens, "scores": scored.scores})
    assert [tuple(pair) for pair in json.loads(text)["model"]["merges"]] == theirs


def test_bytes_stand_for_characters_that_are_no_tokens(folder: Path, tmp_path: Path) -> None:
    ours = GatewayTokenizer.load(Scored().file(tmp_path / "model.gguf", folder))
    ids = ours.encode_text("𓀀")
    assert [ours.token_bytes(token) for token in ids[-4:]] == [bytes([byte]) for byte in "𓀀".encode()]


# ---- special tokens, template, generation


def test_special_tokens_template_and_what_ends_an_answer(folder: Path, tmp_path: Path) -> None:
    trained = Trained(None)
    path = trained.file(
        tmp_path / "a.gguf", folder, "gpt-2", eot_token_id=2, add_bos_token=True, add_eos_token=True
    )
    ours = GatewayTokenizer.load(path)
    assert ours.encode_text("a") == [1, trained.tokens.index("a"), 0]
    chat = ours.encode_chat([{"role": "user", "content": "a"}])
    assert ours.decode(chat) == "[user]a[answer]" and chat.count(0) == 1 and chat[0] != 1
    assert ours.generation.eos == (0, 2)
    assert (ours.generation.temperature, ours.generation.top_k) == (1.0, 0)


def with_tokens(
    path: Path, folder: Path, texts: dict[str, int], **keys: Any
) -> tuple[GatewayTokenizer, list[int]]:
    """Of a file with more tokens of some kinds, and their ids."""
    trained = Trained(None)
    first = len(trained.tokens)
    trained.tokens += texts
    trained.kinds += texts.values()
    ids = {"eos_token_id": None, "bos_token_id": 1} | keys
    return GatewayTokenizer.load(trained.file(path, folder, "gpt-2", **ids)), list(
        range(first, first + len(texts))
    )


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["<|im_end|>", "<|im_start|>", "<|endoftext|>"], [0, 2]),
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|start_header_id|>"], [0, 1, 2]),
        (["<end_of_turn>", "<eos>", "<EOT>", "</s>"], [0, 1, 2, 3]),
        (["<|return|>", "<|start|>"], [0]),
        (["<|tool_response>", "</s>", "<turn|>"], [0, 2]),
        (["<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], [1, 2, 3]),
        (["<｜end▁of▁sentence｜>", "<|IM_END|>", "im_end"], [0]),
    ],
)
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_an_end_is_known_by_its_text(
    folder: Path, tmp_path: Path, texts: list[str], ends: list[int], kind: int
) -> None:
    """As llama.cpp knows it, whatever kind of token the file calls it: it is whole in prompts and never shown."""
    ours, ids = with_tokens(tmp_path / "a.gguf", folder, dict.fromkeys(texts, kind))
    found = {ids[at] for at in ends}
    assert set(ours.generation.eos) - {0} == found  # the vocabulary's own <|end|> is one, too
    for text, token in zip(texts, ids, strict=True):
        if token in found:
            assert ours.encode_text(f"a{text}a")[-2:-1] == [token] and ours.decode([token]) == ""


@pytest.mark.parametrize(
    ("others", "ends"),
    [(["<|return|>"], True), (["<|return|>", "<|call|>"], False), (["<|flush|>", "<|calls|>"], False)],
)
def test_the_end_of_a_message_is_no_end_where_there_are_ends_of_turns(
    folder: Path, tmp_path: Path, others: list[str], ends: bool
) -> None:
    ours, ids = with_tokens(tmp_path / "a.gguf", folder, dict.fromkeys(others, CONTROL))
    assert set(ours.generation.eos) == {*ids, 0} - (set() if ends else {0})


def test_keys_name_ends_of_any_text(folder: Path, tmp_path: Path) -> None:
    texts = {f"<{name}>": CONTROL for name in "abcdef"}
    first = len(Trained(None).tokens)
    keys = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    ours, ids = with_tokens(
        tmp_path / "a.gguf", folder, texts, **{f"{key}_token_id": first + at for at, key in enumerate(keys)}
    )
    assert set(ours.generation.eos) == {*ids, 0}


def test_a_template_of_its_own_for_tools(folder: Path, tmp_path: Path) -> None:
    trained = Trained(None)
    metadata = vocabulary_keys(
        "gpt2", trained.tokens, trained.kinds, merges=trained.merges, chat_template="plain"
    )
    more = {"tokenizer.chat_templates": ["tool_use", "rag"], "tokenizer.chat_template.rag": "r"}
    more["tokenizer.chat_template.tool_use"] = "{{ tools | length }} tools"
    path = write_gguf(tmp_path / "a.gguf", folder, metadata=metadata | more)
    ours = GatewayTokenizer.load(path)
    message = {"role": "user", "content": "x"}
    assert ours.render([message]) == "plain" and ours.render([message], tools=[{}, {}]) == "2 tools"


@pytest.mark.parametrize(
    ("pre", "begins"),
    [("tekken", True), ("dbrx", False), ("llama-bpe", True), ("qwen2", False), ("smollm", False)],
)
def test_whether_texts_begin_with_bos_where_the_file_does_not_say(
    folder: Path, tmp_path: Path, pre: str, begins: bool
) -> None:
    ours = GatewayTokenizer.load(Trained(None).file(tmp_path / "a.gguf", folder, pre))
    assert (ours.encode_text("a")[0] == 1) == begins


def test_the_author_s_sampling(folder: Path, tmp_path: Path) -> None:
    keys = {"temp": 0.5, "top_p": 0.75, "top_k": 20, "penalty_repeat": 1.25}
    sampling = {f"general.sampling.{key}": value for key, value in keys.items()}
    trained = Trained(None)
    metadata = vocabulary_keys("gpt2", trained.tokens, trained.kinds, merges=trained.merges, eos_token_id=0)
    ours = GatewayTokenizer.load(write_gguf(tmp_path / "a.gguf", folder, metadata=metadata | sampling))
    found = ours.generation
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (0.5, 0.75, 20, 1.25)


def test_tokens_that_only_fill_up_are_none(folder: Path, tmp_path: Path) -> None:
    trained = Trained(None)
    ours = GatewayTokenizer.load(trained.file(tmp_path / "a.gguf", folder, "gpt-2"))
    assert ours.token_bytes(trained.tokens.index("[PAD1]")) == b""
    assert ours.token_bytes(trained.tokens.index(THINK)) == THINK.encode()


# ---- refusals


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model": "t5"}, "GGUF tokenizer 't5' is not supported; supported: gpt2, llama"),
        ({"model": None}, "the file has no tokenizer"),
        ({"pre": "gemma4"}, "the split 'gemma4' of the GGUF tokenizer is not one of those of docs/configuration.md"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["a nothing"]}, "its tokenizer cannot be read"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"token_type": [1]}, "tokens have 1 types"),
        ({"eos_token_id": 9_999}, "'tokenizer.ggml.eos_token_id' is 9999"),
        ({"chat_template": "{% if %}"}, "the chat template cannot be read"),
    ],
)  # fmt: skip
def test_refusals(folder: Path, tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    trained = Trained(None)
    named = {
        f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}": keys[key] for key in keys
    }
    metadata = vocabulary_keys("gpt2", trained.tokens, trained.kinds, merges=trained.merges, pre="gpt-2")
    path = write_gguf(tmp_path / "a.gguf", folder, metadata=metadata | named)
    with pytest.raises(ModelError) as caught:
        GatewayTokenizer.load(path)
    assert says in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_damaged_header_is_read_or_refused(folder: Path, tmp_path: Path) -> None:
    """Whatever bytes it has: nothing else is raised, and nothing is made as large as a number in it says."""
    path = Trained(None).file(tmp_path / "a.gguf", folder, "smollm")
    whole, damaged = path.read_bytes(), tmp_path / "damaged.gguf"
    start = min(info.start for info in read_header(path).tensors.values())
    draw, refusals = Random(1), list[str]()
    for _ in range(120):
        content = bytearray(whole)
        at = draw.choice([draw.randrange(700), draw.randrange(start), start - 1 - draw.randrange(800)])
        content[at] = draw.choice([0, 255, draw.randrange(256)])
        damaged.unlink(missing_ok=True)
        damaged.write_bytes(content)
        try:
            read_spec(damaged)
            GatewayTokenizer.load(damaged)
        except ModelError as error:
            refusals.append(str(error))
    assert 30 < len(refusals) < 120
    assert all("\n" not in line and str(damaged) in line for line in refusals)


def test_a_file_has_no_other_texts(folder: Path, tmp_path: Path) -> None:
    files = open_files(write_gguf(tmp_path / "a.gguf", folder))
    assert files.text("chat_template.jinja") is None and files.text("model.safetensors.index.json") is None
    assert files.object("config.json")["architectures"] == ["LlamaForCausalLM"]
