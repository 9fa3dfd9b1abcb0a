from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.blocks import KVLayout
from isthmus.core.errors import ProtocolError
from isthmus.live.engine.codecs import (
    CODECS,
    EXACT,
    INT8,
    NONE,
    ZSTD,
    Data,
    decode,
    encode,
    encoded_blocks,
    encoded_bytes,
)

LAYOUT = KVLayout(dtype="bfloat16", block_size=16, num_layers=1, num_kv_heads=2, head_dim=8)
DTYPES = ("float32", "bfloat16", "float16")
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place, relative."""

layouts = st.builds(
    replace,
    st.just(LAYOUT),
    dtype=st.sampled_from(DTYPES),
    block_size=st.integers(1, 20),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 6, 16]),
)
token_counts = st.integers(1, 60)
seeds = st.integers(0, 1 << 32)


def random_bytes(count: int, seed: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).bytes(count))


def stored(layout: KVLayout, values: np.ndarray) -> memoryview:
    """Numbers as bytes of the layout's dtype; bfloat16 by cutting off."""
    wide = values.astype(np.float32)
    if layout.dtype == "bfloat16":
        return memoryview((wide.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return memoryview(wide.astype(layout.dtype).tobytes())


def numbers(layout: KVLayout, data: Data) -> np.ndarray:
    """Bytes of KV as float64 `[tokens, channels]`."""
    if layout.dtype == "bfloat16":
        wide = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = np.frombuffer(data, layout.dtype)
    return wide.astype(np.float64).reshape(-1, 2 * layout.num_kv_heads * layout.head_dim)


def normal(layout: KVLayout, num_tokens: int, seed: int = 0) -> memoryview:
    """Channels of very different sizes and offsets, as trained models have them."""
    rng = np.random.default_rng(seed)
    channels = 2 * layout.num_kv_heads * layout.head_dim
    sizes, offsets = 10.0 ** rng.uniform(-3, 2, channels), rng.choice([0.0, 1.0, -30.0], channels)
    return stored(layout, (rng.standard_normal((num_tokens, channels)) + offsets) * sizes)


def cut(data: memoryview, layout: KVLayout, seed: int) -> list[memoryview]:
    """The same bytes in parts that end at block borders."""
    rng, parts = np.random.default_rng(seed), []
    while data:
        size = int(rng.integers(1, 4)) * layout.slice_bytes
        parts.append(data[:size])
        data = data[size:]
    return parts


def decoded(codec: str, layout: KVLayout, data: Data, num_tokens: int, seed: int | None = None) -> bytes:
    target = bytearray(num_tokens * layout.token_bytes)
    view = memoryview(target)
    decode(codec, layout, data, [view] if seed is None else cut(view, layout, seed), num_tokens)
    return bytes(target)


def scales(layout: KVLayout, x: np.ndarray) -> np.ndarray:
    """The most that the module's text lets each number's scale be."""
    found = np.empty_like(x)
    for start in range(0, len(x), layout.block_size):
        block = x[start : start + layout.block_size]
        low, high = block.min(axis=0), block.max(axis=0)
        scale = 17 / 16 * np.maximum(np.maximum((high - low) / 247, np.abs(low) / 1016), 2.0**-126)
        found[start : start + layout.block_size] = np.maximum(scale, scale.max() * 2.0**-15)
    return found


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=60)
@given(layout=layouts, num_tokens=token_counts, seed=seeds)
def test_any_bytes_take_what_was_said_and_lossless_codecs_restore_them(
    codec: str, layout: KVLayout, num_tokens: int, seed: int
) -> None:
    """Whatever the parts; ZSTD never takes more."""
    raw = random_bytes(num_tokens * layout.token_bytes, seed)
    data = encode(codec, layout, cut(raw, layout, seed), num_tokens)
    limit = encoded_bytes(codec, layout, num_tokens)
    assert len(data) <= limit if codec == ZSTD else len(data) == limit
    if codec in EXACT:
        assert decoded(codec, layout, data, num_tokens, seed + 1) == raw


@settings(max_examples=100)
@given(layout=layouts, num_tokens=token_counts, seed=seeds)
def test_int8_is_within_half_a_scale_of_every_number(layout: KVLayout, num_tokens: int, seed: int) -> None:
    raw = normal(layout, num_tokens, seed)
    x = numbers(layout, raw)
    data = encode(INT8, layout, cut(raw, layout, seed), num_tokens)
    found = numbers(layout, decoded(INT8, layout, data, num_tokens, seed + 1))
    rounding = np.abs(found) * EPSILON[layout.dtype] + np.abs(x) * 2.0**-22  # of the result, and inside
    tiny = {"float16": 2.0**-25}.get(layout.dtype, 0.0)
    assert (np.abs(found - x) <= scales(layout, x) / 2 + rounding + tiny).all()


@settings(max_examples=25)
@given(layout=layouts, num_tokens=token_counts, seed=seeds)
def test_int8_of_a_block_does_not_depend_on_its_neighbours(
    layout: KVLayout, num_tokens: int, seed: int
) -> None:
    raw = normal(layout, num_tokens, seed)
    data = encode(INT8, layout, [raw], num_tokens)
    starts = range(0, num_tokens, layout.block_size)
    width = layout.token_bytes
    alone = [
        encode(INT8, layout, [raw[start * width : stop * width]], stop - start)
        for start, stop in ((start, min(start + layout.block_size, num_tokens)) for start in starts)
    ]
    assert list(map(bytes, encoded_blocks(INT8, layout, data, num_tokens))) == list(map(bytes, alone))
    assert b"".join(map(bytes, encoded_blocks(NONE, layout, raw, num_tokens))) == raw


def through_int8(layout: KVLayout, data: Data, num_tokens: int) -> np.ndarray:
    return numbers(
        layout, decoded(INT8, layout, encode(INT8, layout, [memoryview(data)], num_tokens), num_tokens)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_keeps_zeros_and_the_largest_numbers(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype, num_kv_heads=1, head_dim=2)
    largest = {"float32": 3.4e38, "bfloat16": 3.3e38, "float16": 65504.0}[dtype]
    x = np.stack([np.linspace(-3, 5, 16), np.zeros(16), np.full(16, largest), np.full(16, largest)], axis=1)
    x[4, 0] = 0
    x[::2, 2:] *= 0.5
    found = through_int8(layout, stored(layout, x), 16)
    assert (found[:, 1] == 0).all() and np.isfinite(found).all()
    assert (np.abs(found - x)[:, 2:] <= 0.01 * x[:, 2:]).all()
    alone = through_int8(replace(layout, head_dim=1), stored(layout, x[:, :2]), 16)
    assert alone[4, 0] == 0 and (np.diff(alone[:, 0][np.argsort(x[:, 0], kind="stable")]) >= 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_channel_that_is_not_finite_is_nan_and_hurts_no_other(dtype: str, value: float) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    x = numbers(layout, normal(layout, 32)).copy()
    x[3, 5] = value
    found = through_int8(layout, stored(layout, x), 32)
    assert np.isnan(found[:16, 5]).all()
    found[:16, 5] = x[:16, 5] = 0
    assert (np.abs(found - x) <= scales(layout, x) / 2 + np.abs(x) * 2.0**-8).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_does_not_grow_from_node_to_node(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    x = found = numbers(layout, normal(layout, 160))
    errors = []
    for _ in range(10):
        found = through_int8(layout, stored(layout, found), 160)
        errors.append(np.abs((found - x) / scales(layout, x)).mean())
    assert errors[-1] < 1.15 * errors[0]


@pytest.mark.parametrize(("dtype", "zstd", "int8"), [("bfloat16", 0.70, 18 / 32), ("float32", 0.85, 18 / 64)])
def test_what_numbers_of_one_size_shrink_to(dtype: str, zstd: float, int8: float) -> None:
    layout = replace(LAYOUT, dtype=dtype, num_kv_heads=8, head_dim=64)
    raw = stored(layout, np.random.default_rng(0).standard_normal((256, 1024)))
    assert len(encode(ZSTD, layout, [raw], 256)) < zstd * len(raw)
    assert len(encode(INT8, layout, [raw], 256)) == pytest.approx(int8 * len(raw), rel=1e-3)


def test_threads_encode_and_decode_at_once() -> None:
    raws = [normal(LAYOUT, 500, seed) for seed in range(24)]

    def through(raw: memoryview) -> bytes:
        return decoded(ZSTD, LAYOUT, encode(ZSTD, LAYOUT, [raw], 500), 500)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(through, raws)) == raws


# --- What no encoder writes


def refused(codec: str, data: Data, num_tokens: int = 40) -> bool:
    """Whether it is refused; anything but a ProtocolError fails the test."""
    try:
        decoded(codec, LAYOUT, data, num_tokens)
    except ProtocolError:
        return True
    return False


@pytest.mark.parametrize("codec", CODECS)
def test_cut_or_lengthened_bytes_are_refused_and_flipped_bits_never_crash(codec: str) -> None:
    data = bytes(encode(codec, LAYOUT, [normal(LAYOUT, 40)], 40))
    assert not refused(codec, data)
    assert all(refused(codec, wrong) for wrong in (data[:-1], data + b"\0", data[: len(data) // 2], b""))
    rng, num_refused = np.random.default_rng(0), 0
    for _ in range(1000):
        flipped = bytearray(data)
        flipped[rng.integers(len(data))] ^= 1 << rng.integers(8)
        num_refused += refused(codec, flipped)
    assert 0 < num_refused < 1000 or codec == NONE


def test_a_frame_that_claims_to_be_huge_allocates_nothing() -> None:
    count = 40 * LAYOUT.token_bytes // 2
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    endless = b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little") + bytes(64)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(count))
    for frame in (bomb, endless, unsized):
        assert refused(ZSTD, bytes(count) + frame)


def test_scales_no_encoder_writes_are_refused() -> None:
    data = bytearray(encode(INT8, LAYOUT, [normal(LAYOUT, 40)], 40))
    for rank in (0, 15, 0xFF0, 0xFFFF):
        data[:2] = rank.to_bytes(2, "little")
        assert refused(INT8, data)


def test_an_unknown_codec_is_named_with_those_there_are() -> None:
    raw = normal(LAYOUT, 16)
    with pytest.raises(ProtocolError, match="'int4'; known: none, zstd, int8"):
        encode("int4", LAYOUT, [raw], 16)
    with pytest.raises(ProtocolError, match="'int4'; known: none, zstd, int8"):
        decoded("int4", LAYOUT, raw, 16)
