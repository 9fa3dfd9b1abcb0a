"""Random histories against a plain model: what is where, and that no slot and no place is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus.core.types import BlockName, Tier
from isthmus.live.store.directory import BlockDirectory, Pinned, whole_chains
from isthmus.live.store.record import RecordHeader

NAMES = st.integers(0, 9)
SEALS = st.sampled_from([(b"a",), (b"b",)])


class Places:
    """A log of `count` places, as the directory sees it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.left = list(range(count))
        self.bad: list[int] = []

    @property
    def num_used(self) -> int:
        return self.count - len(self.left) - len(self.bad)

    def take(self) -> int | None:
        return self.left.pop(0) if self.left else self.bad.pop(0) if self.bad else None

    def free(self, place: int) -> None:
        assert place not in self.left + self.bad
        self.left.append(place)

    def free_bad(self, place: int) -> None:
        assert place not in self.left + self.bad
        self.bad.append(place)


class Machine(RuleBasedStateMachine):
    """`model`: the tier of every block. Slots hold the name and seals that were committed to them."""

    @initialize(num_slots=st.integers(1, 6), num_places=st.one_of(st.none(), st.integers(1, 6)))
    def start(self, num_slots: int, num_places: int | None) -> None:
        self.places = None if num_places is None else Places(num_places)
        self.directory = BlockDirectory(num_slots, self.places)
        self.model: dict[int, Tier] = {}
        self.reserved: list[int] = []
        self.pinned: list[Pinned] = []
        self.in_slot: dict[int, tuple[int, tuple[bytes, ...]]] = {}
        self.writing = False

    @rule(count=st.integers(0, 4))
    def reserve(self, count: int) -> None:
        slots = self.directory.reserve(count)
        assert len(slots) <= count
        assert not set(slots) & {one.slot for one in self.pinned}, "a pinned slot was given away"
        self.reserved += slots

    @precondition(lambda self: self.reserved)
    @rule()
    def give_back(self) -> None:
        self.directory.give_back([self.reserved.pop()])

    @precondition(lambda self: self.reserved)
    @rule(name=NAMES, seals=SEALS)
    def commit(self, name: int, seals: tuple[bytes, ...]) -> None:
        slot = self.reserved.pop()
        if self.directory.commit(name, None, slot, seals):
            self.in_slot[slot] = name, seals
        self.model[name] = Tier.MEMORY

    @rule(name=NAMES)
    def pin(self, name: int) -> None:
        pinned = self.directory.pin(name)
        assert pinned is not None or self.model.get(name) is not Tier.MEMORY
        if pinned is not None:
            self.pinned.append(pinned)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.directory.slots.unpin(self.pinned.pop().slot)

    @rule(name=NAMES, can_write=st.booleans())
    def demote(self, name: int, can_write: bool) -> None:
        if self.directory.demote(name, can_write=can_write):
            self.model[name] = Tier.DISK
        else:
            assert name not in self.model or self.places is None or not can_write
            self.model.pop(name, None)

    @rule(name=NAMES)
    def drop(self, name: int) -> None:
        assert self.directory.drop(name) == (self.model.pop(name, None) is not None)

    @precondition(lambda self: self.places and not self.writing)
    @rule(count=st.integers(1, 4))
    def start_writing(self, count: int) -> None:
        demoted = [name for name, tier in self.model.items() if tier is Tier.DISK]
        _, lost = self.directory.start_writing(count)
        assert set(lost) <= set(demoted), "a block in DRAM is not lost by writing"
        for name in lost:
            del self.model[name]
        self.writing = True

    @precondition(lambda self: self.writing)
    @rule(written=st.booleans())
    def end_writing(self, written: bool) -> None:
        for name in self.directory.end_writing(written=written):
            assert not written and self.model.pop(name) is Tier.DISK
        self.writing = False

    @rule()
    def give_up_demoting(self) -> None:
        for name in self.directory.give_up_demoting():
            assert self.model.pop(name) is Tier.DISK

    @invariant()
    def agrees(self) -> None:
        directory = self.directory
        assert {name: block.tier for name, block in directory.blocks.items()} == self.model
        directory.check(0 if self.places is None else self.places.num_used)
        for block in directory.blocks.values():
            if block.slot is not None:
                assert self.in_slot[block.slot] == (block.name, block.seals)
        for one in self.pinned:
            assert self.in_slot[one.slot] == (one.name, one.seals), "a pinned slot was filled again"


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestDirectory = Machine.TestCase


def filled(num_slots: int, places: Places, *names: int) -> BlockDirectory:
    directory = BlockDirectory(num_slots, places)
    for name in names:
        directory.commit(name, None, directory.reserve(1)[0], (b"",))
    return directory


def write(directory: BlockDirectory, count: int = 9) -> list[int]:
    """One successful batch; the names written, in order."""
    batch, _ = directory.start_writing(count)
    directory.end_writing(written=True)
    return [block.name for block in batch]


def test_other_bytes_of_a_block_make_its_record_useless() -> None:
    places = Places(1)
    directory = filled(1, places, 1)
    write(directory)
    directory.demote(1, can_write=True)
    directory.commit(1, None, directory.reserve(1)[0], (b"other",))
    assert (
        places.num_used == 0 and list(directory.unwritten) == [1] and directory.blocks[1].seals == (b"other",)
    )


Record = tuple[int, BlockName, BlockName | None]
"""Sequence, name, parent; its place is its number in the list."""


@pytest.mark.parametrize(
    ("records", "kept"),
    [
        (
            [(1, b"a2", b"a1"), (5, b"a1", None), (2, b"b1", None), (3, b"b2", b"b1"), (9, b"a3", b"a2")],
            [2, 3, 1, 0, 4],
        ),
        ([(1, 1, None), (2, 3, 2), (3, 4, 3), (4, 5, 6), (5, 6, 5)], [0]),
        ([(8, 1, None), (3, 1, None), (4, 2, 7), (5, 2, 1)], [0, 3]),
    ],
    ids=["parents first, then as written", "without a head", "the latest of a name"],
)
def test_whole_chains_are_found_again(records: list[Record], kept: list[int]) -> None:
    found = [(place, RecordHeader(name, parent, (), at)) for place, (at, name, parent) in enumerate(records)]
    assert whole_chains(found[::-1]) == [found[place] for place in kept]
