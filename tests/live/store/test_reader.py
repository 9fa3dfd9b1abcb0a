"""Which reads are done together and which in parts; that the right bytes come is tested with the store."""

from __future__ import annotations

from isthmus.live.store.reader import Source, _parts, _runs, _units

KIB, MIB = 1 << 10, 1 << 20


def source(
    place: int | None, size: int = 64 * KIB, slot: int | None = None, layers: range = range(4)
) -> Source:
    return Source(slot, place, (b"",) * 4, layers, memoryview(bytes(size)))


def test_neighbours_on_the_ssd_come_together() -> None:
    places = [7, 3, 4, 9, 5]
    sources = [source(place) for place in places] + [source(6, slot=1)]
    (unit,) = _units(sources)
    assert [sources[at].place for at in unit] == [3, 4, 5, 7, 9, 6]
    runs = [[one.place for one in run] for run in _runs([sources[at] for at in unit])]
    assert runs == [[3, 4, 5], [7], [9], [6]]


def test_a_block_of_which_only_some_layers_are_wanted_is_read_alone() -> None:
    runs = list(_runs([source(1), source(2, layers=range(2)), source(3)]))
    assert [len(run) for run in runs] == [1, 1, 1]


def test_units_are_of_bounded_size() -> None:
    units = _units([source(place, size=1536 * KIB) for place in range(5)] + [source(9, size=9 << 20)])
    assert units == [[0, 1], [2, 3], [4], [5]]


def test_a_large_block_is_read_in_parts_that_make_up_the_whole() -> None:
    whole = source(1, size=4 << 20, layers=range(10, 17))
    parts = _parts(whole._replace(into=memoryview(bytes(7 * 3 * MIB))), 4)
    assert [part.layers for part in parts] == [range(10, 11), range(11, 13), range(13, 15), range(15, 17)]
    assert [len(part.into) // (3 * MIB) for part in parts] == [1, 2, 2, 2]
    assert _parts(source(1, size=4 * MIB - KIB), 4) == [source(1, size=4 * MIB - KIB)]
    assert len(_parts(source(None, size=16 * MIB, slot=1), 4)) == 1
    assert len(_parts(source(1, size=16 * MIB, layers=range(1)), 4)) == 1
