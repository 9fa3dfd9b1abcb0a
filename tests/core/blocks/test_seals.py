from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.blocks import SEAL_BYTES, seal

DATA = st.binary(min_size=1, max_size=4096)


def test_seals_never_change() -> None:
    """Seals are on disks and on the wire between versions."""
    assert seal(bytes(range(256))).hex() == "f1f8a93f50849ac39408a4433b952d71"


@given(DATA)
def test_a_seal_depends_on_the_bytes_alone(data: bytes) -> None:
    padded = memoryview(b"x" + data)
    assert seal(padded[1:]) == seal(data) == seal(memoryview(bytearray(data)))
    assert len(seal(data)) == SEAL_BYTES


@given(DATA, st.data())
def test_any_flipped_bit_is_found(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert seal(bytes(flipped)) != seal(data)
