from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.blocks import BlockNamer, KVLayout, state_name, state_names

LAYOUT = KVLayout(dtype="bfloat16", block_size=4, num_layers=2, num_kv_heads=2, head_dim=8)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def namer(*, revision: str = "model@1", layout: KVLayout = LAYOUT, salt: str = "") -> BlockNamer:
    return BlockNamer(revision=revision, layout=layout, salt=salt)


def test_names_never_change() -> None:
    """Names are on disks and in other processes: a change here is a new name scheme, and must say so."""
    names = namer(salt="tenant").names([0, 1, 2, 3, 70_000, 5, 6, 2**32 - 1, 9])
    assert [name.hex() for name in names] == [
        "e40e869e719600369420107b9a22c66e",
        "11753108a6f8fc2ca68de011a99c0c72",
    ]


@given(TOKENS)
def test_only_full_blocks_have_names(tokens: list[int]) -> None:
    names = namer().names(tokens)
    assert len(names) == len(tokens) // 4
    assert all(len(name) == 16 for name in names)
    assert len(set(names)) == len(names)


@given(TOKENS, TOKENS, TOKENS)
def test_two_sequences_share_exactly_the_names_of_their_common_prefix(
    prefix: list[int], tail: list[int], other_tail: list[int]
) -> None:
    one, other = prefix + tail, prefix + other_tail
    ours, theirs = namer().names(one), namer().names(other)
    for index, (name, its) in enumerate(zip(ours, theirs, strict=False)):
        end = 4 * (index + 1)
        assert (name == its) == (one[:end] == other[:end])
    # A name stands for one place in one sequence: it never comes back elsewhere.
    assert not {n for i, n in enumerate(ours) if n in theirs and theirs.index(n) != i}


@given(TOKENS, st.data())
def test_continuing_from_a_parent_equals_naming_the_whole(tokens: list[int], data: st.DataObject) -> None:
    whole = namer().names(tokens)
    known = data.draw(st.integers(0, len(whole)))
    parent = whole[known - 1] if known else None
    assert namer().names(tokens, parent=parent, start=4 * known) == whole[known:]


OTHERS = {
    "revision": namer(revision="model@2"),
    "salt": namer(salt="another tenant"),
    "layout": namer(layout=replace(LAYOUT, num_layers=3)),
    "dtype": namer(layout=replace(LAYOUT, dtype="float16")),
    "a salt that looks like a revision": namer(revision="", salt="model@1"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_model_layout_or_salt_shares_no_name(what: str) -> None:
    tokens = list(range(12))
    assert not set(namer().names(tokens)) & set(OTHERS[what].names(tokens))


def test_revision_and_salt_cannot_be_shifted_into_each_other() -> None:
    tokens = list(range(4))
    assert namer(revision="ab", salt="c").names(tokens) != namer(revision="a", salt="bc").names(tokens)


def test_a_token_outside_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        namer().names([0, 1, 2, 2**32])


def test_a_recurrent_states_blocks_have_names_of_their_own() -> None:
    """For names of a model and for a trace's numbers alike; the last one stands for all."""
    for first, other in ((b"0" * 16, b"1" * 16), (0, 1)):
        names = [*state_names(first, 3), *state_names(other, 3)]
        assert len({*names, first, other}) == 8
        assert state_name(first, 2, 3) == names[2]
        assert state_names(first, 3) == state_names(first, 3)
