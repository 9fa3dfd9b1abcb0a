from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.blocks import BlockNamer, KVLayout

LAYOUT = KVLayout(dtype="bfloat16", block_size=16, num_layers=3, num_kv_heads=2, head_dim=8)


def test_sizes_are_products_of_the_axes() -> None:
    assert LAYOUT.token_bytes == 2 * 2 * 8 * 2  # K and V, heads, head_dim, bytes of a bfloat16
    assert LAYOUT.slice_bytes == 16 * 64
    assert LAYOUT.block_bytes == 3 * 1024


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_number_takes_the_bytes_of_its_dtype(dtype: str, width: int) -> None:
    assert KVLayout(dtype, 1, 1, 1, 1).token_bytes == 2 * width


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(num_tokens: int, block_size: int) -> None:
    count = replace(LAYOUT, block_size=block_size).blocks_for(num_tokens)
    assert count * block_size >= num_tokens
    assert count == 0 or (count - 1) * block_size < num_tokens


def test_layouts_that_differ_in_one_field_have_different_fingerprints() -> None:
    changes = {
        "dtype": "float16",
        "block_size": 32,
        "num_layers": 4,
        "num_kv_heads": 1,
        "head_dim": 16,
        "codec": "int8",
        "vectors": 1,
        "state_bytes": 4096,
        "form": "vllm0.32.0/nixl",
    }
    assert set(changes) == set(KVLayout.__struct_fields__)
    layouts = [LAYOUT, *(replace(LAYOUT, **{field: value}) for field, value in changes.items())]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)


def test_the_fingerprint_keeps_neighbouring_numbers_apart() -> None:
    one = KVLayout("float32", 1, 11, 1, 1)
    other = KVLayout("float32", 11, 1, 1, 1)
    assert one.fingerprint() != other.fingerprint()


def test_exact_blocks_keep_the_fingerprint_they_had_before_there_were_codecs() -> None:
    assert LAYOUT.fingerprint() == b"bfloat16/16/3/2/8"


def test_quantised_blocks_have_the_size_of_exact_ones_and_other_names() -> None:
    quantised = replace(LAYOUT, codec="int8")
    assert quantised.block_bytes == LAYOUT.block_bytes
    tokens = list(range(48))
    exact_names = BlockNamer(revision="r", layout=LAYOUT).names(tokens)
    assert not set(exact_names) & set(BlockNamer(revision="r", layout=quantised).names(tokens))


def test_a_recurrent_state_fills_whole_blocks() -> None:
    block = LAYOUT.block_bytes
    for state, blocks in ((0, 0), (1, 1), (block, 1), (block + 1, 2)):
        assert replace(LAYOUT, state_bytes=state).state_blocks == blocks
