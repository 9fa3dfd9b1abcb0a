from __future__ import annotations

from random import Random

from isthmus.core.types import BlockName
from isthmus.live.store.directory import whole_chains
from isthmus.live.store.record import RecordHeader


def record(place: int, name: BlockName, parent: BlockName | None, sequence: int) -> tuple[int, RecordHeader]:
    return place, RecordHeader(name, parent, (), sequence)


def test_parents_come_first_and_the_rest_in_order_of_writing() -> None:
    found = [
        record(0, b"a2", b"a1", 1),
        record(1, b"a1", None, 5),
        record(2, b"b1", None, 2),
        record(3, b"b2", b"b1", 3),
        record(4, b"a3", b"a2", 9),
    ]
    Random(1).shuffle(found)
    assert [header.name for _, header in whole_chains(found)] == [b"b1", b"b2", b"a1", b"a2", b"a3"]


def test_blocks_without_a_head_stay_out() -> None:
    found = [
        record(0, 1, None, 1),
        record(1, 3, 2, 2),
        record(2, 4, 3, 3),
        record(3, 5, 6, 4),
        record(4, 6, 5, 5),
    ]
    assert whole_chains(found) == [found[0]]


def test_the_latest_record_of_a_name_counts() -> None:
    found = [record(0, 1, None, 8), record(1, 1, None, 3), record(2, 2, 7, 4), record(3, 2, 1, 5)]
    assert whole_chains(found) == [found[0], found[3]]
