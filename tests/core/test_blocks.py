from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.blocks import SEAL_BYTES, BlockNamer, KVLayout, seal, state_name, state_names

LAYOUT = KVLayout(dtype="bfloat16", block_size=4, num_layers=2, num_kv_heads=2, head_dim=8)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_sizes_are_products_of_the_axes(dtype: str, width: int) -> None:
    layout = KVLayout(dtype, block_size=16, num_layers=3, num_kv_heads=2, head_dim=8)
    assert layout.token_bytes == 2 * 2 * 8 * width  # K and V, heads, head_dim
    assert layout.slice_bytes == 16 * layout.token_bytes and layout.block_bytes == 3 * layout.slice_bytes
    block = layout.block_bytes
    for state, blocks in ((0, 0), (1, 1), (block, 1), (block + 1, 2)):
        assert replace(layout, state_bytes=state).state_blocks == blocks


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(num_tokens: int, block_size: int) -> None:
    count = replace(LAYOUT, block_size=block_size).blocks_for(num_tokens)
    assert count * block_size >= num_tokens
    assert count == 0 or (count - 1) * block_size < num_tokens


CHANGES = {
    "dtype": "float16", "block_size": 32, "num_layers": 4, "num_kv_heads": 1, "head_dim": 16, "codec": "int8",
    "vectors": 1, "state_bytes": 4096, "form": "vllm0.32.0/nixl",
}  # fmt: skip


def test_layouts_that_differ_have_different_fingerprints() -> None:
    assert set(CHANGES) == set(KVLayout.__struct_fields__)
    layouts = [LAYOUT, *(replace(LAYOUT, **{field: value}) for field, value in CHANGES.items())]
    layouts += [KVLayout("float32", 1, 11, 1, 1), KVLayout("float32", 11, 1, 1, 1)]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)
    assert LAYOUT.fingerprint() == b"bfloat16/4/2/2/8", "as before there were codecs"


def names_of(
    tokens: list[int], revision: str = "model@1", salt: str = "", layout: KVLayout = LAYOUT, **of: object
) -> list[bytes]:
    return BlockNamer(revision=revision, layout=layout, salt=salt).names(tokens, **of)  # type: ignore[arg-type]


def test_names_and_seals_never_change() -> None:
    """They are on disks and in other processes: a change here is a new scheme, and must say so."""
    names = names_of([0, 1, 2, 3, 70_000, 5, 6, 2**32 - 1, 9], salt="tenant")
    assert [name.hex() for name in names] == [
        "e40e869e719600369420107b9a22c66e",
        "11753108a6f8fc2ca68de011a99c0c72",
    ]
    assert seal(bytes(range(256))).hex() == "f1f8a93f50849ac39408a4433b952d71"


@given(TOKENS, TOKENS, TOKENS)
def test_two_sequences_share_exactly_the_names_of_their_common_prefix(
    prefix: list[int], tail: list[int], other_tail: list[int]
) -> None:
    one, other = prefix + tail, prefix + other_tail
    ours, theirs = names_of(one), names_of(other)
    assert len(set(ours)) == len(one) // 4 and all(len(name) == 16 for name in ours)
    for index, (name, its) in enumerate(zip(ours, theirs, strict=False)):
        end = 4 * (index + 1)
        assert (name == its) == (one[:end] == other[:end])
    # A name stands for one place in one sequence: it never comes back elsewhere.
    assert not {n for i, n in enumerate(ours) if n in theirs and theirs.index(n) != i}


@given(TOKENS, st.data())
def test_continuing_from_a_parent_equals_naming_the_whole(tokens: list[int], data: st.DataObject) -> None:
    whole = names_of(tokens)
    known = data.draw(st.integers(0, len(whole)))
    parent = whole[known - 1] if known else None
    assert names_of(tokens, parent=parent, start=4 * known) == whole[known:]


def test_another_model_layout_or_salt_shares_no_name() -> None:
    """Nor can parts of a revision be shifted into a salt."""
    others = [{"revision": "model@2"}, {"salt": "another"}, {"revision": "", "salt": "model@1"}]
    others += [{"revision": "model", "salt": "@1"}, {}]
    layouts = [replace(LAYOUT, codec="int8"), replace(LAYOUT, num_layers=3), replace(LAYOUT, dtype="float16")]
    tokens = list(range(12))
    names = [name for other in others for name in names_of(tokens, **other)]
    names += [name for layout in layouts for name in names_of(tokens, layout=layout)]
    assert len(set(names)) == 3 * (len(others) + len(layouts))


def test_a_token_outside_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        names_of([0, 1, 2, 2**32])


def test_a_recurrent_states_blocks_have_names_of_their_own() -> None:
    """For names of a model and for a trace's numbers alike; the last one stands for all."""
    for first, other in ((b"0" * 16, b"1" * 16), (0, 1)):
        names = [*state_names(first, 3), *state_names(other, 3)]
        assert len({*names, first, other}) == 8
        assert state_name(first, 2, 3) == names[2]


@given(st.binary(min_size=1, max_size=4096), st.data())
def test_a_seal_depends_on_each_bit_and_on_nothing_else(data: bytes, draw: st.DataObject) -> None:
    padded = memoryview(b"x" + data)
    assert seal(padded[1:]) == seal(data) == seal(memoryview(bytearray(data)))
    assert len(seal(data)) == SEAL_BYTES
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert seal(bytes(flipped)) != seal(data)
