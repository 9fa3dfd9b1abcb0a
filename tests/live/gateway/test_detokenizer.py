"""From tokens to the text that is shown: characters, stop strings, and the choices that put them together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from isthmus.core.errors import ProtocolError
from isthmus.core.types import FinishReason, Job, RequestId, Sampling
from isthmus.live.gateway import GatewayTokenizer
from isthmus.live.gateway.choice import Choice, Delta, joined
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


@given(st.lists(TOKENS, max_size=60))
def test_pieces_make_the_whole(tokens: list[int]) -> None:
    assert "".join(streamed(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens)


@given(st.text(max_size=40))
def test_valid_text_is_never_held_beyond_its_character(text: str) -> None:
    pieces = streamed(BYTE_LEVEL, folder.byte_tokens(text))
    shown = 0
    for char in text:
        if char == "\ufffd":  # looks like an unfinished character, so it waits for the next one
            return
        shown += len(char.encode())
        assert "".join(pieces[:shown]).endswith(char)


def test_a_character_waits_for_its_last_byte() -> None:
    assert streamed(BYTE_LEVEL, folder.byte_tokens("a€b")) == ["a", "", "", "€", "b", ""]


def test_an_unfinished_character_comes_at_the_end() -> None:
    assert streamed(BYTE_LEVEL, [0x61, 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


def test_special_and_unknown_tokens_give_no_text() -> None:
    assert streamed(BYTE_LEVEL, [0x61, folder.EOS, folder.PADDING, 10**6, 0x62]) == ["a", "", "", "", "b", ""]


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
    assert text == spelled_text(spelled[:cut])
    assert text + "".join(streamed(BYTE_LEVEL, spelled[cut:], spelled[:cut])) == before + after


def spelled_text(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="ignore")


@given(st.lists(TOKENS, max_size=30), st.lists(TOKENS, max_size=30))
def test_any_bytes_may_stand_in_a_prompt(prompt: list[int], answer: list[int]) -> None:
    pieces = "".join(streamed(BYTE_LEVEL, answer, prompt))
    assert BYTE_LEVEL.decode(prompt + answer).endswith(pieces)


def test_the_first_space_of_an_answer_stays() -> None:
    assert streamed(SENTENCEPIECE, [1, 2], [BOS, 1]) == [" Hello", " world", ""]
    assert streamed(SENTENCEPIECE, [1, 2], [BOS]) == ["Hello", " world", ""]
    assert streamed(SENTENCEPIECE, [1], [BOS, 2, CALL]) == [" Hello", ""]


def test_a_replacement_character_of_the_prompt_stays_there() -> None:
    prompt = folder.byte_tokens("a\ufffd")
    assert BYTE_LEVEL.prompt_text(prompt, alone=False) == "a\ufffd"
    assert streamed(BYTE_LEVEL, folder.byte_tokens("b"), prompt) == ["b", ""]


def test_sentencepiece_keeps_the_space_between_words() -> None:
    assert streamed(SENTENCEPIECE, [1, 2, 3]) == ["Hello", " world", "lo", ""]


def test_a_special_token_that_is_shown_takes_no_space_away() -> None:
    detokenizer = SENTENCEPIECE.detokenizer([1], shown=["[CALL]"])
    assert [detokenizer.push(token) for token in (CALL, 1, BOS)] == ["[CALL]", " Hello", ""]


@given(st.lists(TOKENS, max_size=30), st.lists(TOKENS, max_size=30))
def test_a_special_token_that_is_shown_stands_between(before: list[int], after: list[int]) -> None:
    detokenizer = BYTE_LEVEL.detokenizer(shown=["<bos>", "[no token]"])
    tokens = [token for token in [*before, None, *after] if token != folder.BOS]
    pieces = [detokenizer.push(folder.BOS if token is None else token) for token in tokens]
    first, second = (BYTE_LEVEL.decode([t for t in part if t != folder.BOS]) for part in (before, after))
    assert "".join(pieces) + detokenizer.flush() == f"{first}<bos>{second}"


def test_no_other_special_token_is_shown() -> None:
    assert BYTE_LEVEL.special_tokens(["<bos>", "he", "x"]) == {folder.BOS: "<bos>"}
    assert BYTE_LEVEL.special_token("<eos>") == folder.EOS
    assert BYTE_LEVEL.special_token("he") is None
    detokenizer = BYTE_LEVEL.detokenizer(shown=["<bos>"])
    assert [detokenizer.push(token) for token in (folder.EOS, folder.BOS, 0x61)] == ["", "<bos>", "a"]


# Two letters only, so that stop strings are met, nearly met, and met inside each other.
TEXT = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def cut_of(text: str, stops: list[str]) -> tuple[str, bool]:
    """The specification, in one line each: the stop complete first wins; of two, the longer."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(TEXT, STOPS, st.lists(st.integers(1, 5), max_size=40))
def test_any_chunking_gives_the_same_cut(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown, start = "", 0
    for size in [*sizes, len(text)]:
        shown += matcher.push(text[start : start + size])
        start += size
    shown += matcher.flush()
    assert (shown, matcher.matched) == cut_of(text, stops)


@given(TEXT, STOPS)
def test_only_what_may_begin_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if not matcher.matched:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_across_pieces() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push(piece) for piece in ("Hi.\n", "\nUs", "er", ":x")] == ["Hi.", "", "", ""]
    assert matcher.matched
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_a_false_beginning_is_shown_after_all() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("a E", "N", "d", "E")] == ["a ", "", "ENd", ""]
    assert matcher.flush() == "E"


def test_without_stops_nothing_is_held() -> None:
    assert StopMatcher([]).push("text") == "text"


@pytest.fixture
def run(tokenizer: GatewayTokenizer, backend: FakeBackend):  # type: ignore[no-untyped-def]
    """Pushes tokens through a choice with the given stop strings."""

    def run(
        tokens: Sequence[int], *stops: str, finish: FinishReason | None = FinishReason.STOP, per_batch: int = 1
    ) -> tuple[Choice, list[Delta]]:
        job = Job(RequestId("r"), (1,), 100, Sampling())
        stream = FakeStream(backend, job, [])
        choice = Choice(0, job, stream, tokenizer.detokenizer(), StopMatcher(stops))
        deltas = []
        for batch in says(tokens, finish, per_batch=per_batch, cached_tokens=3):
            assert not isinstance(batch, str | Exception)
            deltas.append(choice.push(batch))
            if choice.finish:
                break
        return choice, deltas

    return run


def test_the_token_that_ends_an_answer_counts_but_gives_no_text(run) -> None:  # type: ignore[no-untyped-def]
    choice, deltas = run([*folder.byte_tokens("ab"), ord("!")])
    assert joined(deltas) == Delta("ab", [97, 98, 33], [], FinishReason.STOP)
    assert (choice.num_tokens, choice.cached_tokens, choice.stopped) == (3, 3, False)


def test_at_the_length_limit_the_last_token_is_text(run) -> None:  # type: ignore[no-untyped-def]
    _, deltas = run(folder.byte_tokens("ab"), finish=FinishReason.LENGTH)
    assert joined(deltas) == Delta("ab", [97, 98], [], FinishReason.LENGTH)


@pytest.mark.parametrize("per_batch", [1, 2, 3, 100])
def test_a_stop_string_ends_the_answer_at_its_token(run, per_batch: int) -> None:  # type: ignore[no-untyped-def]
    choice, deltas = run(folder.byte_tokens("one, two, three"), "two", finish=None, per_batch=per_batch)
    assert joined(deltas) == Delta("one, ", folder.byte_tokens("one, two"), [], FinishReason.STOP)
    assert choice.num_tokens == 8
    assert choice.stopped


def test_held_text_comes_with_the_end(run) -> None:  # type: ignore[no-untyped-def]
    _, deltas = run([*folder.byte_tokens("a\nU"), 0xE2, folder.EOS], "\nUser")
    assert [delta.text for delta in deltas] == ["a", "", "", "", "\nU\ufffd"]


def test_a_stop_string_may_be_complete_only_with_the_flush(run) -> None:  # type: ignore[no-untyped-def]
    choice, deltas = run([97, 0xE2], "\ufffd", finish=FinishReason.LENGTH)
    assert joined(deltas).text == "a"
    assert choice.finish is FinishReason.STOP


@pytest.mark.parametrize("stop", [" Hello", "o wor"])
def test_a_stop_string_may_begin_with_the_space_before_an_answer(backend: FakeBackend, stop: str) -> None:
    job = Job(RequestId("r"), (BOS, 2), 100, Sampling())
    detokenizer = SENTENCEPIECE.detokenizer(job.tokens)
    choice = Choice(0, job, FakeStream(backend, job, []), detokenizer, StopMatcher([stop]))
    [batch] = says([1, 2], None, per_batch=2)
    assert not isinstance(batch, str | Exception)
    assert choice.push(batch).text == " Hell"[: 5 * (stop != " Hello")]
    assert choice.stopped


def test_missing_logprobs_are_the_cluster_s_fault(tokenizer: GatewayTokenizer, backend: FakeBackend) -> None:
    job = Job(RequestId("r-0"), (1,), 100, Sampling(logprobs=1))
    choice = Choice(0, job, FakeStream(backend, job, []), tokenizer.detokenizer(), StopMatcher([]))
    [batch] = says([97])
    assert not isinstance(batch, str | Exception)
    with pytest.raises(ProtocolError, match="r-0: a token came without"):
        choice.push(batch)
