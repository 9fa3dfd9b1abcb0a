"""From tokens to the text that is shown: characters, stop strings, and the choices that put them together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from isthmus.core.types import FinishReason, Job, RequestId, Sampling
from isthmus.live.gateway import GatewayTokenizer
from isthmus.live.gateway.choice import Choice, joined
from isthmus.live.gateway.detokenizer import MAX_PENDING, MAX_WINDOW, Detokenizer, StopMatcher
from isthmus.live.gateway.tokenizer import GenerationDefaults

from . import folder
from .fake import FakeBackend, FakeStream, says

BYTE_LEVEL = GatewayTokenizer(folder.tokenizer(), None, GenerationDefaults())
# Bytes that begin or continue characters come more often than chance would have them.
TOKENS = st.one_of(
    st.integers(0, 0xFF),
    st.sampled_from([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBB]),
    st.sampled_from([folder.HE, folder.BOS, folder.EOS, folder.PADDING]),
)


def streamed(tokenizer: GatewayTokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.lists(TOKENS, max_size=60), st.lists(TOKENS, max_size=30))
def test_pieces_make_the_whole(tokens: list[int], prompt: list[int]) -> None:
    assert "".join(streamed(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens)
    assert BYTE_LEVEL.decode(prompt + tokens).endswith("".join(streamed(BYTE_LEVEL, tokens, prompt)))


@given(st.text(max_size=40))
def test_valid_text_is_never_held_beyond_its_character(text: str) -> None:
    pieces = streamed(BYTE_LEVEL, folder.byte_tokens(text))
    shown = 0
    for char in text:
        if char == "\ufffd":  # looks like an unfinished character, so it waits for the next one
            return
        shown += len(char.encode())
        assert "".join(pieces[:shown]).endswith(char)


def test_the_window_stays_small() -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return BYTE_LEVEL.decode(tokens)

    detokenizer = Detokenizer(decode, bytes([1]) * 256)
    for _ in range(200):
        detokenizer.push(0xE2)
    assert longest <= MAX_WINDOW + MAX_PENDING


STRIPPED = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
WORD, FIRST_BYTE = ("▁Hello", "▁world", "lo", "▁"), 5


def sentencepiece(decoder: object = STRIPPED) -> GatewayTokenizer:
    """Like Llama 2's: words with a mark for the space before them, and bytes for the rest."""
    words = ["<unk>", *WORD] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {word: i for i, word in enumerate(words)}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    built.decoder = decoder
    built.add_special_tokens([AddedToken("<s>", special=True), AddedToken("[CALL]", special=True)])
    return GatewayTokenizer(built, None, GenerationDefaults())


SENTENCEPIECE = sentencepiece()
BOS, CALL = 261, 262
GEMMA = sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))
METASPACES = [
    sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]))
    for scheme in ("first", "always", "never")
]
# Neither has bytes, nor does it matter what words look like.
OTHERS = [sentencepiece(decoders.WordPiece(prefix="lo")), sentencepiece(decoders.BPEDecoder(suffix="lo"))]
WORDS = st.integers(1, 4).map(lambda token: [token])
# U+FFFD itself is left out: among byte tokens it cannot be told from an invalid one.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\ufffd")
SPELLED = CHARACTERS.map(lambda char: [FIRST_BYTE + byte for byte in char.encode()])
SPECIAL = st.just([BOS])
PARTS = st.lists(WORDS | SPELLED | SPECIAL, max_size=20).map(
    lambda parts: [token for part in parts for token in part]
)


@given(st.sampled_from([SENTENCEPIECE, GEMMA, *METASPACES]), PARTS, st.data())
def test_an_answer_is_what_it_adds_to_its_prompt(
    tokenizer: GatewayTokenizer, tokens: list[int], data: st.DataObject
) -> None:
    """Wherever the prompt ends: amid a character, that is the answer's."""
    cut = data.draw(st.integers(0, len(tokens)))
    before = tokenizer.prompt_text(tokens[:cut], alone=False)
    assert before + "".join(streamed(tokenizer, tokens[cut:], tokens[:cut])) == tokenizer.decode(tokens)
    assert tokenizer.prompt_text(tokens, alone=True) == tokenizer.decode(tokens)


@given(st.sampled_from([SENTENCEPIECE, GEMMA, *METASPACES]), st.lists(WORDS | SPELLED, max_size=20))
def test_bytes_of_tokens_add_up_to_an_answer(tokenizer: GatewayTokenizer, parts: list[list[int]]) -> None:
    answer = [token for part in parts for token in part]
    text = "".join(streamed(tokenizer, answer, [3]))
    assert b"".join(map(tokenizer.token_bytes, answer)) == text.encode()


@given(st.sampled_from(OTHERS), st.lists(WORDS, max_size=12), st.lists(WORDS, max_size=12))
def test_answers_of_other_decoders(
    tokenizer: GatewayTokenizer, before: list[list[int]], after: list[list[int]]
) -> None:
    prompt, answer = ([token for [token] in part] for part in (before, after))
    whole = tokenizer.decode(prompt + answer)
    assert tokenizer.decode(prompt) + "".join(streamed(tokenizer, answer, prompt)) == whole


@given(st.text(max_size=20), st.text(max_size=20), st.data())
def test_a_character_that_begins_in_the_prompt_is_the_answer_s(
    before: str, after: str, data: st.DataObject
) -> None:
    spelled = folder.byte_tokens(before + after)
    cut = data.draw(st.integers(0, len(spelled)))
    text = BYTE_LEVEL.prompt_text(spelled[:cut], alone=False)
    assert text == bytes(spelled[:cut]).decode(errors="ignore")
    assert text + "".join(streamed(BYTE_LEVEL, spelled[cut:], spelled[:cut])) == before + after


def test_the_first_space_of_an_answer_stays() -> None:
    assert streamed(SENTENCEPIECE, [1, 2], [BOS, 1]) == [" Hello", " world", ""]
    assert streamed(SENTENCEPIECE, [1, 2], [BOS]) == ["Hello", " world", ""]
    assert streamed(SENTENCEPIECE, [1], [BOS, 2, CALL]) == [" Hello", ""]
    detokenizer = SENTENCEPIECE.detokenizer([1], shown=["[CALL]"])
    assert [detokenizer.push(token) for token in (CALL, 1, BOS)] == ["[CALL]", " Hello", ""]


def test_a_replacement_character_of_the_prompt_stays_there() -> None:
    prompt = folder.byte_tokens("a\ufffd")
    assert BYTE_LEVEL.prompt_text(prompt, alone=False) == "a\ufffd"
    assert streamed(BYTE_LEVEL, folder.byte_tokens("b"), prompt) == ["b", ""]


@given(st.lists(TOKENS, max_size=30), st.lists(TOKENS, max_size=30))
def test_a_special_token_that_is_shown_stands_between(before: list[int], after: list[int]) -> None:
    detokenizer = BYTE_LEVEL.detokenizer(shown=["<bos>", "[no token]"])
    tokens = [token for token in [*before, None, *after] if token != folder.BOS]
    pieces = [detokenizer.push(folder.BOS if token is None else token) for token in tokens]
    first, second = (BYTE_LEVEL.decode([t for t in part if t != folder.BOS]) for part in (before, after))
    assert "".join(pieces) + detokenizer.flush() == f"{first}<bos>{second}"


def test_no_other_special_token_is_shown() -> None:
    assert BYTE_LEVEL.special_tokens(["<bos>", "he", "x"]) == {folder.BOS: "<bos>"}
    assert BYTE_LEVEL.special_token("<eos>") == folder.EOS and BYTE_LEVEL.special_token("he") is None


# Two letters only, so that stop strings are met, nearly met, and met inside each other.
TEXT = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def cut_of(text: str, stops: list[str]) -> tuple[str, bool]:
    """The specification, in one line each: the stop complete first wins; of two, the longer."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(TEXT, STOPS, st.lists(st.integers(1, 5), max_size=40))
def test_any_chunking_gives_the_same_cut(text: str, stops: list[str], sizes: list[int]) -> None:
    """And only what may begin a stop string is held back."""
    matcher = StopMatcher(stops)
    shown, start = "", 0
    for size in [*sizes, len(text)]:
        shown += matcher.push(text[start : start + size])
        start += size
        held = text[len(shown) : start]
        assert matcher.matched or not held or any(stop.startswith(held) for stop in stops)
    assert matcher.matched or start >= len(text)
    shown += matcher.flush()
    assert (shown, matcher.matched, matcher.push("more" * matcher.matched)) == (*cut_of(text, stops), "")


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "answer", "stop", "shown", "num_tokens"),
    [
        (SENTENCEPIECE, (BOS, 2), [1, 2], " Hello", "", 1),
        (SENTENCEPIECE, (BOS, 2), [1, 2], "o wor", " Hell", 2),
        (BYTE_LEVEL, (1,), folder.byte_tokens("one, two, three"), "two", "one, ", 8),
        (BYTE_LEVEL, (1,), [97, 0xE2, folder.EOS], "\ufffd", "a", 3),  # complete only with the end
        (BYTE_LEVEL, (1,), [*folder.byte_tokens("a\nU"), folder.EOS], "\nUser", "a\nU", 4),  # never complete
    ],
)
@pytest.mark.parametrize("per_batch", [1, 2, 100])
def test_a_stop_string_ends_the_answer_at_its_token(
    backend: FakeBackend,
    tokenizer: GatewayTokenizer,
    prompt: tuple[int, ...],
    answer: list[int],
    stop: str,
    shown: str,
    num_tokens: int,
    per_batch: int,
) -> None:
    job = Job(RequestId("r"), prompt, 100, Sampling())
    choice = Choice(0, job, FakeStream(backend, job, []), tokenizer.detokenizer(prompt), StopMatcher([stop]))
    finish = FinishReason.STOP if answer[-1] == folder.EOS else None
    deltas = []
    for batch in says(answer, finish, per_batch=per_batch):
        assert not isinstance(batch, str | Exception)
        deltas.append(choice.push(batch))
        if choice.finish:
            break
    whole = joined(deltas)
    assert (whole.text, len(whole.tokens), whole.finish) == (shown, num_tokens, FinishReason.STOP)
    assert choice.num_tokens == num_tokens and choice.stopped == (stop != "\nUser")
