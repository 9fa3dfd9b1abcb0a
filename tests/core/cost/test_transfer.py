from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.cost.transfer import (
    INT8,
    NONE,
    UNKNOWN,
    ZSTD,
    CodecSpeed,
    Handling,
    Transfer,
    after_ns,
    arrival_ns,
    choose_codec,
    codec_speeds,
)
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S

GBPS = 1e9 / 8
SPEEDS = codec_speeds("bfloat16", 16)
ALL = (ZSTD, INT8)
GIB = 1 << 30

transfers = st.builds(
    Transfer,
    num_bytes=st.integers(1, 1 << 40),
    num_layers=st.integers(1, 128),
    link_bytes_per_s=st.floats(1e5, 1e12),
    compute_ns=st.integers(0, 1000 * NS_PER_S),
)
speeds = st.dictionaries(
    st.sampled_from(ALL),
    st.builds(
        CodecSpeed,
        kept=st.floats(0.01, 1.1),
        encode_bytes_per_s=st.floats(1e7, 1e12),
        decode_bytes_per_s=st.floats(1e7, 1e12),
    ),
)
allowed = st.sets(st.sampled_from((NONE, *ALL)))


@given(transfers, allowed, speeds)
def test_the_choice_is_allowed_and_nothing_allowed_arrives_earlier(
    transfer: Transfer, allowed: set[str], speeds: dict[str, CodecSpeed]
) -> None:
    """And nothing is encoded while computing takes longer than the link."""
    choice = choose_codec(transfer, allowed, speeds)
    assert choice == NONE or choice in allowed
    arrival = arrival_ns(transfer, speeds.get(choice))
    assert arrival <= arrival_ns(transfer, None)
    assert all(arrival <= arrival_ns(transfer, speed) for name, speed in speeds.items() if name in allowed)
    wire_ns = int(transfer.num_bytes * NS_PER_S / transfer.link_bytes_per_s)
    computing = replace(transfer, compute_ns=max(wire_ns, transfer.compute_ns))
    assert choose_codec(computing, ALL, speeds) == NONE


@pytest.mark.parametrize(
    ("allowed", "gbps", "codec"),
    [(ALL, 0.5, INT8), (ALL, 10, INT8), (ALL, 100, NONE), ((ZSTD,), 5, ZSTD), ((ZSTD,), 10, NONE)],
)
def test_ready_kv_is_encoded_on_links_slower_than_encoding(
    allowed: tuple[str, ...], gbps: float, codec: str
) -> None:
    transfer = Transfer(GIB, 32, gbps * GBPS)
    assert choose_codec(transfer, allowed, SPEEDS) == codec
    if codec == ZSTD:
        assert arrival_ns(transfer, SPEEDS[ZSTD]) < 0.75 * arrival_ns(transfer, None)


def test_of_codecs_that_are_as_fast_the_lossless_one_is_taken() -> None:
    """Computing, a little faster than the link alone, hides the difference between them."""
    transfer = Transfer(GIB, 1000, 1 * GBPS, compute_ns=8 * NS_PER_S)
    speed = CodecSpeed(kept=0.5, encode_bytes_per_s=1e10, decode_bytes_per_s=1e10)
    assert choose_codec(transfer, ALL, {ZSTD: speed, INT8: replace(speed, kept=0.4)}) == ZSTD


def test_arrival_by_hand() -> None:
    speed = CodecSpeed(kept=0.5, encode_bytes_per_s=2e9, decode_bytes_per_s=4e9)
    transfer = Transfer(num_bytes=4_000_000_000, num_layers=10, link_bytes_per_s=1e9, compute_ns=NS_PER_S)
    assert arrival_ns(transfer, None) == 4 * NS_PER_S
    # 2 s on the link as in encoding; then a tenth of 2 s of encoding and 1 s of decoding.
    assert arrival_ns(transfer, speed) == 2 * NS_PER_S + 3 * NS_PER_S // 10
    assert arrival_ns(replace(transfer, compute_ns=9 * NS_PER_S), None) == 9 * NS_PER_S


ENDS = Handling(
    send_layer_s=2e-3,
    send_byte_s=1e-9,
    receive_layer_s=1e-3,
    receive_byte_s=4e-9,
    message_s=5e-3,
    zstd=SPEEDS[ZSTD],
)
seconds = st.floats(0, 1e-3)
handlings = st.builds(
    Handling,
    send_layer_s=seconds,
    send_byte_s=st.floats(0, 1e-6),
    receive_layer_s=seconds,
    receive_byte_s=st.floats(0, 1e-6),
    message_s=seconds,
)


def test_after_the_link_by_hand() -> None:
    """100 MB in 10 layers: 20 ms and 100 ms to send them, 10 ms and 400 ms to receive them."""
    last, message = 53, 5
    assert after_ns(100_000_000, 10, NS_PER_S, None, ENDS, ENDS) == (last + message) * 1_000_000
    # Over a link that took 150 ms, to receive them takes 260 ms more.
    assert after_ns(100_000_000, 10, 150_000_000, None, ENDS, ENDS) == (260 + last + message) * 1_000_000
    assert after_ns(100_000_000, 10, NS_PER_S, None, UNKNOWN, ENDS) == 41_000_000
    # Of encoded KV half: 20 + 50 ms and 100 ms of encoding; 10 + 200 ms and 50 ms of decoding.
    half = CodecSpeed(kept=0.5, encode_bytes_per_s=1e9, decode_bytes_per_s=2e9)
    assert after_ns(100_000_000, 10, NS_PER_S, half, ENDS, ENDS) == (17 + 26 + 5) * 1_000_000


@given(handlings, handlings, st.integers(0, 1 << 32), st.integers(1, 128), st.integers(0, 1 << 40))
def test_more_kv_is_never_sooner_of_use_and_no_slower_link_waits_longer_for_it(
    source: Handling, target: Handling, num_bytes: int, num_layers: int, took_ns: int
) -> None:
    """What nobody measured takes no time."""
    after = after_ns(num_bytes, num_layers, took_ns, None, source, target)
    assert 0 <= after <= after_ns(2 * num_bytes, num_layers, took_ns, None, source, target)
    later = after_ns(num_bytes, num_layers, took_ns + 1000, None, source, target)
    assert later <= after <= later + 1000
    assert after_ns(num_bytes, num_layers, took_ns, None) == 0


def test_speeds_are_those_measured_or_else_published() -> None:
    measured = CodecSpeed(0.7, 5e8, 6e8)
    assert Handling(zstd=measured).speeds("bfloat16", 16) == {ZSTD: measured, INT8: SPEEDS[INT8]}
    kept = {dtype: codec_speeds(dtype, 16)[INT8].kept for dtype in ("bfloat16", "float16", "float32")}
    assert kept == {"bfloat16": 18 / 32, "float16": 18 / 32, "float32": 18 / 64}, (
        "a byte a number, two a channel"
    )


def test_a_link_is_no_faster_than_the_slower_of_what_its_node_does_with_kv() -> None:
    assert ENDS.narrowed(10**10) == 250_000_000
    assert ENDS.narrowed(1000) == 1000
    assert UNKNOWN.narrowed(10**15) == 10**15


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_seconds_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="send_byte_s must be a number, 0 or more"):
        Handling(send_byte_s=value)
    with pytest.raises(ConfigError, match="kept of a codec must be a number above 0"):
        CodecSpeed(value, 1.0, 1.0)
