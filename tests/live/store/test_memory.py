from __future__ import annotations

import pytest

from isthmus.live.store.arena import PAGE_BYTES, address, aligned_buffer, copy_bytes, round_up


def test_copies_are_of_equal_length() -> None:
    into = memoryview(bytearray(5))
    copy_bytes(into[1:4], b"abc")
    assert bytes(into) == b"\0abc\0"
    with pytest.raises(ValueError):
        copy_bytes(into, b"abc")


def test_aligned_buffers_start_at_a_page() -> None:
    for size in (0, 1, PAGE_BYTES, 3 * PAGE_BYTES + 7):
        buffer = aligned_buffer(size)
        assert len(buffer) == size and bytes(buffer) == bytes(size)
        assert not size or address(buffer) % PAGE_BYTES == 0
    assert address(buffer[5:]) == address(buffer) + 5


def test_rounding() -> None:
    assert [round_up(size, 64) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]
