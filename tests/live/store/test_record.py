from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.live.store.arena import Shape
from isthmus.live.store.record import GROUP, RecordFormat, RecordHeader
from tests.live.store.support import LARGE, ODD, SMALL

NAMES = st.one_of(st.binary(max_size=32), st.integers(-(1 << 127), (1 << 127) - 1))
SEALS = st.lists(st.binary(min_size=16, max_size=16), min_size=3, max_size=3).map(tuple)
FORMAT = RecordFormat(SMALL, b"model")


@given(
    name=NAMES,
    parent=st.none() | NAMES,
    seals=SEALS,
    sequence=st.integers(0, 1 << 60),
    place=st.integers(0, 1 << 40),
)
def test_what_is_written_is_read(
    name: bytes | int, parent: bytes | int | None, seals: tuple[bytes, ...], sequence: int, place: int
) -> None:
    header = RecordHeader(name, parent, seals, sequence)
    data = FORMAT.encode(header, place)
    assert len(data) == FORMAT.header_bytes
    assert FORMAT.decode(memoryview(data), place) == header


def example(place: int = 3) -> bytes:
    return FORMAT.encode(RecordHeader(b"name", b"parent", (b"s" * 16,) * 3, 7), place)


@given(st.binary(max_size=400))
def test_noise_is_no_header(noise: bytes) -> None:
    assert FORMAT.decode(memoryview(noise), 0) is None
    assert FORMAT.decode(memoryview(b"isthmusB" + noise), 0) is None


def test_a_record_in_another_place_or_of_another_model_is_none() -> None:
    assert FORMAT.decode(memoryview(example()), 4) is None
    assert RecordFormat(SMALL, b"other").decode(memoryview(example()), 3) is None
    assert RecordFormat(Shape(3, 99), b"model").decode(memoryview(example()), 3) is None


@pytest.mark.parametrize("shape", [SMALL, LARGE, ODD])
def test_records_lie_side_by_side_and_fill_a_file(shape: Shape) -> None:
    record, count = RecordFormat(shape, b""), 2 * GROUP + 3
    parts = [(record.head_offset(at), record.header_bytes) for at in range(3 * GROUP)]
    parts += [(record.payload_offset(at), record.payload_bytes) for at in range(count)]
    end = 0
    for offset, size in sorted(parts):
        assert offset == end
        end += size
    assert end == record.file_bytes(count)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_as_many_records_as_a_file_has_room_for(shape: Shape) -> None:
    record = RecordFormat(shape, b"")
    assert record.num_records(0) == record.file_bytes(0) == 0
    for count in range(1, 3 * GROUP):
        size = record.file_bytes(count)
        assert record.num_records(size) == record.num_records(size + record.payload_bytes // 2) == count
        assert record.num_records(size - 1) == count - 1
