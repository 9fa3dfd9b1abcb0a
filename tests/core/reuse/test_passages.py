"""Pieces and passages: cut by content alone, found wherever they stand, and never what is not the same."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.reuse import LEAST, MIN_PASSAGE, MOST, WINDOW, Passage, cut, extended, passages

texts = st.lists(st.integers(0, 200_000), max_size=400) | st.builds(
    # Few words in many places, and one word alone: where pieces repeat, and where no content says where to cut.
    lambda seed, size, words: [Random(seed).randrange(words) for _ in range(size)],
    st.integers(0, 1000),
    st.integers(0, 1500),
    st.sampled_from([1, 2, 50, 100_000]),
)


def text(seed: int, size: int, words: int = 100_000) -> list[int]:
    random = Random(seed)
    return [random.randrange(words) for _ in range(size)]


Known = dict[bytes, tuple[int, int]]


def known_of(donors: list[list[int]], salt: str = "") -> Known:
    """The first to have a piece is the one that is known."""
    found = Known()
    for number, tokens in enumerate(donors):
        digests, stops = cut(tokens, salt)
        for digest, at in zip(digests, (0, *stops), strict=False):
            found.setdefault(digest, (number, at))
    return found


def found_in(tokens: list[int], donors: list[list[int]], *, start: int = 0) -> tuple[Passage, ...]:
    return passages(*cut(tokens, ""), known_of(donors), start=start)


@given(texts)
def test_pieces_cover_the_prompt(tokens: list[int]) -> None:
    digests, stops = cut(tokens, "a")
    assert len(digests) == len(stops)
    assert (stops[-1] if stops else 0) == len(tokens)
    sizes = [stop - start for start, stop in pairwise((0, *stops))]
    assert all(LEAST <= size <= MOST for size in sizes[:-1])
    assert all(1 <= size <= MOST for size in sizes[-1:])


@given(texts, texts)
def test_a_digest_is_of_the_tokens_of_its_piece(one: list[int], other: list[int]) -> None:
    pieces = dict[bytes, list[int]]()
    for tokens in (one, other, one[1:] + other):
        digests, stops = cut(tokens, "a")
        for digest, (start, stop) in zip(digests, pairwise((0, *stops)), strict=True):
            assert pieces.setdefault(digest, tokens[start:stop]) == tokens[start:stop]
    assert len({tuple(piece) for piece in pieces.values()}) == len(pieces)


@given(texts)
def test_those_of_two_tenants_never_match(tokens: list[int]) -> None:
    one, other = cut(tokens, "a"), cut(tokens, "b")
    assert not {*one[0]} & {*other[0]}
    assert one[1] == other[1]
    assert cut(tokens, "a") == one


@given(texts, texts)
def test_what_is_behind_a_cut_depends_on_nothing_before_it(before: list[int], tokens: list[int]) -> None:
    """Once two prompts are cut at the same place of the same text, behind a few tokens of it, they go on alike."""
    alone = [stop for stop in cut(tokens, "a")[1] if stop >= WINDOW]
    moved = [stop - len(before) for stop in cut(before + tokens, "a")[1] if stop - len(before) >= WINDOW]
    common = {*alone} & {*moved}
    if common:
        first = min(common)
        assert alone[bisect_left(alone, first) :] == moved[bisect_left(moved, first) :]


@given(texts, texts, st.integers(0, 400))
def test_passages_are_the_same_tokens_in_both(one: list[int], other: list[int], start: int) -> None:
    donors = [one, other]
    prompt = other[: len(other) // 2] + one[len(one) // 3 :] + other
    last = start
    for passage in found_in(prompt, donors, start=start):
        donor = donors[passage.donor]
        assert passage.count >= MIN_PASSAGE
        assert passage.at >= last, "in order, none over another"
        last = passage.at + passage.count
        assert last <= len(prompt)
        assert 0 <= passage.start <= passage.start + passage.count <= len(donor)
        assert prompt[passage.at : last] == donor[passage.start : passage.start + passage.count]


@pytest.mark.parametrize("words", [50, 1_000, 100_000])
def test_a_passage_between_other_texts_is_found_but_for_its_ends(words: int) -> None:
    """At each end a piece and what it takes until both are cut alike: 24 tokens a piece in the mean."""
    size, losses = 600, list[int]()
    for seed in range(200):
        passage, *around = (text(10 * seed + at, size, words) for at in range(5))
        front, behind = around[0][: 7 + seed], around[1]
        (found,) = found_in(front + passage + behind, [around[2][:40] + passage + around[3]])
        assert found.at - len(front) == found.start - 40, "the same place of the passage"
        assert len(front) <= found.at <= found.at + found.count <= len(front) + size
        losses.append(size - found.count)
    assert max(losses) <= 2 * MOST
    assert sum(losses) / len(losses) <= 64


def test_an_equal_prompt_is_one_passage() -> None:
    tokens = text(1, 2_000)
    assert found_in(tokens, [tokens]) == (Passage(0, 2_000, 0, 0),)
    (rest,) = found_in(tokens, [tokens], start=100)
    assert 100 <= rest.at == rest.start < 100 + MOST
    assert rest.at + rest.count == 2_000


def test_passages_of_several_donors_stay_apart() -> None:
    one, other = text(1, 500), text(2, 500)
    found = found_in(one + other, [other, one])
    assert [each.donor for each in found] == [1, 0]
    assert sum(each.count for each in found) >= 1_000 - 2 * MOST


def test_other_text_has_no_passages() -> None:
    assert found_in(text(1, 2_000), [text(2, 2_000)]) == ()
    assert found_in([], [text(1, 100)]) == ()
    assert found_in(text(1, 100), []) == ()


def test_short_passages_are_left_out() -> None:
    tokens = text(5, MIN_PASSAGE - 1)
    assert found_in(tokens, [tokens]) == ()
    assert found_in([*tokens, 7], [[*tokens, 7]]) == (Passage(0, MIN_PASSAGE, 0, 0),)


def test_pieces_are_as_long_as_was_meant() -> None:
    """One in 16 tokens ends one, the first seven left out: 24 in the mean. Token numbers have no pattern for that."""
    for words in (300, 50_000, 250_000):
        _, stops = cut(text(9, 100_000, words), "")
        assert 100_000 / len(stops) == pytest.approx(LEAST + 15, rel=0.1)


def test_what_is_not_there_stops_no_passage_before_it() -> None:
    found = (Passage(0, 32, 1, 0), Passage(32, 32, 0, 0))
    ones = [1] * 64
    assert extended(found, ones, [(32, []), (0, ones)]) == (Passage(0, 64, 1, 0),)


@given(texts, st.lists(texts, min_size=1, max_size=3), st.data())
def test_extended_passages_are_the_same_text_and_cannot_be_longer(
    prompt: list[int], donors: list[list[int]], data: st.DataObject
) -> None:
    """Of donors only a part is there; of the prompt what follows its cached tokens."""
    donors = [*donors, prompt[len(prompt) // 2 :] + prompt[: len(prompt) // 2]]
    start = data.draw(st.integers(0, len(prompt)))
    firsts = [data.draw(st.integers(0, len(donor))) for donor in donors]
    found = found_in(prompt, donors, start=start)
    there = [(first, donor[first:]) for first, donor in zip(firsts, donors, strict=True)]
    grown = extended(found, prompt[start:], there, start=start)
    last = start
    for number, each in enumerate(grown):
        donor = donors[each.donor]
        assert each.at >= last and each.count > 0, "in order, none over another"
        last = each.at + each.count
        assert each.start >= firsts[each.donor] and each.start + each.count <= len(donor), "what is not there"
        assert prompt[each.at : last] == donor[each.start : each.start + each.count]
        after = grown[number + 1].at if number + 1 < len(grown) else len(prompt)
        ends = last == after or each.start + each.count == len(donor)
        assert ends or prompt[last] != donor[each.start + each.count], "the text goes on"
    assert last <= len(prompt)
    for each in found:
        have = sum([min(each.at + each.count, one.at + one.count) - max(each.at, one.at) for one in grown
                    if one.at < each.at + each.count and each.at < one.at + one.count])  # fmt: skip
        low = max(each.start, firsts[each.donor])
        assert have >= each.start + each.count - low, "something was lost"


def test_a_passage_between_other_texts_is_found_with_its_ends() -> None:
    """And not more of it than there is at the donor."""
    passage = text(1, 600)
    front, behind = text(2, 50), text(3, 70)
    donor = text(4, 40) + passage + text(5, 30)
    prompt = front + passage + behind
    found = found_in(prompt, [donor])
    assert extended(found, prompt, [(0, donor)]) == (Passage(50, 600, 0, 40),)
    assert extended(found, prompt, [(60, donor[60:500])]) == (Passage(70, 440, 0, 60),)
    assert extended(found, prompt[80:], [(0, donor)], start=80) == (Passage(80, 570, 0, 70),)
