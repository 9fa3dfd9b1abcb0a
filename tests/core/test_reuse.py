"""Pieces and passages: cut by content alone, found wherever they stand, and never what is not the same."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.reuse import (
    CACHEBLEND,
    EPIC,
    LEAST,
    MIN_PASSAGE,
    MOST,
    SELECTIONS,
    SEMANTIC,
    SIMILAR,
    TAIL,
    WINDOW,
    Passage,
    Selection,
    cut,
    extended,
    pack,
    passages,
    rows_per_layer,
    similarity,
)

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


def test_only_long_passages_of_the_same_text_are_found_and_of_each_donor_apart() -> None:
    one, other = text(1, 500), text(2, 500)
    found = found_in(one + other, [other, one])
    assert [each.donor for each in found] == [1, 0]
    assert sum(each.count for each in found) >= 1_000 - 2 * MOST
    assert found_in(one, [other]) == found_in([], [one]) == found_in(one, []) == ()
    tokens = text(5, MIN_PASSAGE - 1)
    assert found_in(tokens, [tokens]) == ()
    assert found_in([*tokens, 7], [[*tokens, 7]]) == (Passage(0, MIN_PASSAGE, 0, 0),)


def test_pieces_are_as_long_as_was_meant() -> None:
    """One in 16 tokens ends one, the first seven left out: 24 in the mean. Token numbers have no pattern for that."""
    for words in (300, 50_000, 250_000):
        _, stops = cut(text(9, 100_000, words), "")
        assert 100_000 / len(stops) == pytest.approx(LEAST + 15, rel=0.1)


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
    ones, lost = [1] * 64, (Passage(0, 32, 1, 0), Passage(32, 32, 0, 0))
    assert extended(lost, ones, [(32, []), (0, ones)]) == (Passage(0, 64, 1, 0),)


# Signatures.


@given(st.integers(1, 64), st.data())
def test_signatures_are_alike_by_their_equal_bits(size: int, data: st.DataObject) -> None:
    """Symmetric, from 0 to 1; each bit that differs makes it less; those of two lengths, or none, are not alike."""
    one, other = (data.draw(st.binary(min_size=size, max_size=size)) for _ in range(2))
    assert similarity(one, other) == similarity(other, one)
    assert 0 <= similarity(one, other) <= 1 == similarity(one, one)
    assert similarity(one, bytes(byte ^ 0xFF for byte in one)) == similarity(one, one + b"0") == 0.0
    assert similarity(b"", b"") == 0.0
    flipped, before = int.from_bytes(one, "little"), 1.0
    for bit in data.draw(st.permutations(range(8 * size))):
        flipped ^= 1 << bit
        found = similarity(one, flipped.to_bytes(size, "little"))
        assert found < before or found == before == 0.0
        before = found


@pytest.mark.parametrize("cosine", [1.0, 0.9, SIMILAR, 0.5, 0.0])
def test_signs_of_projections_stand_for_the_cosine(cosine: float) -> None:
    random = Random(1)
    sine, one, other = math.sqrt(1 - cosine**2), 0, 0
    num_bits = 8192
    for bit in range(num_bits):
        # A direction matters by its two numbers in the plane of the two vectors.
        first, second = random.gauss(0, 1), random.gauss(0, 1)
        one |= (first > 0) << bit
        other |= (cosine * first + sine * second > 0) << bit
    signed = [each.to_bytes(num_bits // 8, "little") for each in (one, other)]
    assert similarity(*signed) == pytest.approx(cosine, abs=0.04)


# Selections: fewer and fewer tokens from layer to layer, and packings that free blocks, never of the question.


selections = st.sampled_from([*SELECTIONS.values()]) | st.builds(
    Selection,
    st.just("any"),
    full_layers=st.integers(0, 4),
    recompute=st.floats(0, 1.5),
    decay=st.floats(0, 1),
    floor=st.floats(0, 1),
    keep=st.floats(0, 1.2),
    fade=st.floats(0, 5),
)
layers = st.integers(1, 80)
tokens, blocks = st.integers(0, 20_000), st.sampled_from([1, 7, 16, 64, 256])


@given(selections, layers)
def test_shares_never_grow_with_the_layer(selection: Selection, num_layers: int) -> None:
    computed = [selection.computed(layer) for layer in range(num_layers)]
    kept = [selection.kept(layer, num_layers) for layer in range(num_layers)]
    for shares in (computed, kept):
        assert all(0 <= share <= 1 for share in shares)
        assert all(later <= earlier for earlier, later in pairwise(shares))
    assert all(share == 1 for share in computed[: selection.full_layers])


@given(selections, tokens, tokens, layers)
def test_rows_lie_between_the_others_and_all(
    selection: Selection, num_candidates: int, num_others: int, num_layers: int
) -> None:
    rows = rows_per_layer(selection, num_candidates, num_others, num_layers)
    assert len(rows) == num_layers
    assert all(num_others <= count <= num_others + num_candidates for count in rows)
    assert all(later <= earlier for earlier, later in pairwise(rows))
    assert set(rows_per_layer(selection, 0, num_others, num_layers)) == {num_others}
    full = Selection("full", recompute=1.0)
    assert set(rows_per_layer(full, num_candidates, num_others, num_layers)) == {num_others + num_candidates}


@given(selections, tokens, layers, blocks)
def test_a_packing_holds_what_is_kept_and_leaves_the_tail(
    selection: Selection, num_tokens: int, num_layers: int, block_size: int
) -> None:
    """Nothing is packed where all is kept, and never a question alone."""
    packing = pack(selection, num_tokens, num_layers, block_size)
    greedy = Selection("greedy", keep=0.0)
    assert pack(greedy, min(num_tokens, TAIL + block_size - 1), num_layers, block_size) is None
    if packing is None:
        return
    assert selection.drops and selection not in (CACHEBLEND, EPIC)
    assert packing.num_blocks * block_size <= num_tokens - TAIL
    assert len(packing.kept) == num_layers
    assert all(1 <= count <= packing.num_blocks for count in packing.kept)
    assert all(later <= earlier for earlier, later in pairwise(packing.kept))
    for layer, count in enumerate(packing.kept):
        assert count >= min(1.0, selection.kept(layer, num_layers)) * packing.num_blocks
    assert packing.num_packed * num_layers >= sum(packing.kept) > (packing.num_packed - 1) * num_layers
    assert packing.num_packed + packing.num_dropped == packing.num_blocks
    assert packing.num_dropped > 0


@given(st.integers(0, 5_000), st.integers(0, 5_000))
def test_longer_prompts_drop_no_fewer_blocks(one: int, other: int) -> None:
    found = [pack(SEMANTIC, num_tokens, 32, 16) for num_tokens in sorted((one, other))]
    short, long = (each.num_dropped if each else 0 for each in found)
    assert short <= long


def test_the_published_share_of_memory() -> None:
    """42 % less at 5,000 tokens: what `fade` was set by."""
    assert fmean([SEMANTIC.kept(layer, 32) for layer in range(32)]) == pytest.approx(0.58, abs=0.005)
    assert SEMANTIC.kept(0, 1) == 0.8
    packing = pack(SEMANTIC, 5_000, 32, 16)
    assert packing is not None
    assert (packing.num_blocks, packing.num_packed, packing.num_dropped) == (310, 179, 131)


@pytest.mark.parametrize(
    ("selection", "rows"),
    [
        (SEMANTIC, (1_032, 432, 372, 321, 278)),
        (CACHEBLEND, (1_032, 182, 182, 182, 182)),
        (EPIC, (32, 32, 32, 32, 32)),
    ],
    ids=lambda each: each.name if isinstance(each, Selection) else "",
)
def test_rows_of_the_three(selection: Selection, rows: tuple[int, ...]) -> None:
    assert rows_per_layer(selection, 1_000, 32, 5) == rows
