"""Book-keeping of a store: blocks, their slots in the arena and places in the log. Pure: no lock, no I/O.

A block in DRAM is written behind. Its record is then a *shadow*: it makes a later demotion free and a restart warm,
but gives way when a demoted block needs the place. A demoted block owns its record.

    in DRAM, unwritten ──write──> in DRAM, shadow ──demote──> on SSD
            └────demote──> demoted, unwritten ──write──> on SSD ──commit──> in DRAM, shadow
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import chain, islice
from typing import NamedTuple, Protocol

from isthmus.core.types import BlockName, Tier
from isthmus.live.store.record import RecordHeader


class Places(Protocol):
    """Places of records: the log, as the directory sees it."""

    def take(self) -> int | None: ...

    def free(self, place: int) -> None: ...

    def free_bad(self, place: int) -> None: ...


class Pinned(NamedTuple):
    """A block in DRAM that stays in its slot until unpinned. One seal for each layer slice."""

    name: BlockName
    slot: int
    seals: tuple[bytes, ...]


class Block:
    """One stored block. `slot`: in DRAM; `place`: on the SSD; `writing`: place to which it is being written."""

    __slots__ = ("name", "parent", "place", "seals", "slot", "tier", "writing")

    def __init__(self, name: BlockName, parent: BlockName | None, seals: tuple[bytes, ...], tier: Tier) -> None:
        self.name = name
        self.parent = parent
        self.seals = seals
        self.tier = tier
        self.slot: int | None = None
        self.place: int | None = None
        self.writing: int | None = None


class BlockDirectory:
    """All blocks of one store. `places` is None without an SSD tier."""

    def __init__(self, num_slots: int, places: Places | None) -> None:
        self.slots = Slots(num_slots)
        self.blocks: dict[BlockName, Block] = {}
        self.reserved: set[int] = set()
        self.demoting: dict[BlockName, Block] = {}
        """Blocks that are on the SSD by decision and still to be written; oldest first, as in the next two."""
        self.unwritten: dict[BlockName, Block] = {}
        self.shadows: dict[BlockName, Block] = {}
        self.in_writing: list[Block] = []
        self._places = places

    # Slots.

    def reserve(self, count: int) -> list[int]:
        slots = self.slots.take(count)
        self.reserved.update(slots)
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.reserved.remove(slot)
            self.slots.give_up(slot)

    def pin(self, name: BlockName) -> Pinned | None:
        block = self.blocks.get(name)
        if block is None or block.slot is None:
            return None
        self.slots.pin(block.slot)
        return Pinned(name, block.slot, block.seals)

    # Blocks.

    def commit(self, name: BlockName, parent: BlockName | None, slot: int, seals: tuple[bytes, ...]) -> bool:
        """Puts a block into the reserved `slot`. False: it was here already, and the slot is empty again."""
        assert slot in self.reserved, f"slot {slot} was not reserved"
        block = self.blocks.get(name)
        if block is not None and block.slot is not None:
            self.give_back((slot,))
            self._promote(block)
            return False
        self.reserved.remove(slot)
        if block is None:
            block = self.blocks[name] = Block(name, parent, seals, Tier.MEMORY)
        elif block.seals != seals:  # computed again, and other bits came out: its record is of no use
            self._free_place(block)
            block.seals = seals
        block.slot = slot
        self._promote(block)
        return True

    def demote(self, name: BlockName, *, can_write: bool) -> bool:
        """Moves a block to the SSD by decision. False: it could not be kept and is gone."""
        block = self.blocks.get(name)
        if block is None:
            return False
        if block.tier is Tier.DISK:
            return True
        if block.place is not None:
            del self.shadows[name]
            self._empty_slot(block)
        elif block.writing is None:
            if self._places is None or not can_write:
                self.drop(name)
                return False
            del self.unwritten[name]
            self.demoting[name] = block
        block.tier = Tier.DISK
        return True

    def drop(self, name: BlockName) -> bool:
        """Removes a block from all tiers. False: it was in none. A write under way frees its place when it ends."""
        block = self.blocks.pop(name, None)
        if block is None:
            return False
        for queue in (self.demoting, self.unwritten, self.shadows):
            queue.pop(name, None)
        if block.slot is not None:
            self.slots.give_up(block.slot)
        self._free_place(block)
        return True

    def restore(self, name: BlockName, parent: BlockName | None, seals: tuple[bytes, ...], place: int) -> None:
        """Adds a block whose record was found at the start."""
        block = self.blocks[name] = Block(name, parent, seals, Tier.DISK)
        block.place = place

    # Writing behind.

    def start_writing(self, count: int) -> tuple[list[Block], list[BlockName]]:
        """Gives up to `count` blocks their places, demoted ones first; pins their slots until `end_writing`.

        Returns these blocks, and the names of demoted blocks that were dropped because no place was left.
        """
        batch, lost = [], []
        for block in list(islice(self.demoting.values(), count)):
            place = self._take_place()
            if place is None:
                self.drop(block.name)
                lost.append(block.name)
            else:
                batch.append(self._to_write(block, place, self.demoting))
        for block in list(islice(self.unwritten.values(), count - len(batch))):
            assert self._places is not None
            place = self._places.take()
            if place is None:
                break
            batch.append(self._to_write(block, place, self.unwritten))
        self.in_writing = batch
        return batch, lost

    def end_writing(self, *, written: bool) -> list[BlockName]:
        """Books that the whole batch is durable, or none of it. Returns demoted blocks that were dropped for that
        reason."""
        lost = []
        batch, self.in_writing = self.in_writing, []
        for block in batch:
            assert self._places is not None and block.writing is not None and block.slot is not None
            place, block.writing = block.writing, None
            self.slots.unpin(block.slot)
            is_here = self.blocks.get(block.name) is block
            if written and is_here:
                self._keep_record(block, place)
            elif written:
                self._places.free(place)
            else:
                self._places.free_bad(place)
                if is_here and not self._stays_unwritten(block):
                    lost.append(block.name)
        return lost

    def give_up_demoting(self) -> list[BlockName]:
        """Drops all demoted blocks that are not written. Returns their names."""
        lost = list(self.demoting)
        for name in lost:
            self.drop(name)
        return lost

    def check(self, num_places_used: int) -> None:
        """Checks that no slot and no place is lost; walks over everything."""
        held = [block.slot for block in self.blocks.values() if block.slot is not None]
        self.slots.check(chain(held, self.reserved))
        places = [block.place for block in self.blocks.values() if block.place is not None]
        places += [block.writing for block in self.in_writing if block.writing is not None]
        assert len(set(places)) == len(places), "two blocks have the same place"
        assert len(places) == num_places_used, "a place in the log is lost"
        for block in self.blocks.values():
            queues = [block.name in queue for queue in (self.demoting, self.unwritten, self.shadows)]
            in_memory = block.tier is Tier.MEMORY
            waits = block.place is None and block.writing is None
            assert queues == [
                not in_memory and waits,
                in_memory and waits,
                in_memory and block.place is not None,
            ]
            assert block.slot is not None or (block.place is not None and not in_memory), "a block is nowhere"
            assert block.slot is None or in_memory or block.place is None, "a demoted block keeps its slot"

    def _promote(self, block: Block) -> None:
        block.tier = Tier.MEMORY
        self.demoting.pop(block.name, None)
        if block.place is not None:
            self.shadows[block.name] = block
        elif block.writing is None:
            self.unwritten[block.name] = block

    def _keep_record(self, block: Block, place: int) -> None:
        block.place = place
        if block.tier is Tier.DISK:
            self._empty_slot(block)
        else:
            self.shadows[block.name] = block

    def _stays_unwritten(self, block: Block) -> bool:
        """Queues a block in DRAM again after a failed write; drops a demoted one and returns False."""
        if block.tier is Tier.DISK:
            self.drop(block.name)
            return False
        self.unwritten[block.name] = block
        return True

    def _to_write(self, block: Block, place: int, queue: dict[BlockName, Block]) -> Block:
        assert block.slot is not None
        del queue[block.name]
        block.writing = place
        self.slots.pin(block.slot)
        return block

    def _take_place(self) -> int | None:
        """Takes a free place, or that of the oldest shadow."""
        assert self._places is not None
        place = self._places.take()
        if place is None and self.shadows:
            oldest = self.shadows.pop(next(iter(self.shadows)))
            place, oldest.place = oldest.place, None
            self.unwritten[oldest.name] = oldest
        return place

    def _free_place(self, block: Block) -> None:
        if block.place is not None:
            assert self._places is not None
            self._places.free(block.place)
            block.place = None

    def _empty_slot(self, block: Block) -> None:
        assert block.slot is not None
        self.slots.give_up(block.slot)
        block.slot = None


class Slots:
    """Slots of an arena. A slot is in use from `take` until its owner gave it up and nobody has it pinned."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._empty = list(range(num_slots))[::-1]
        self._pins = [0] * num_slots
        self._given_up: set[int] = set()
        self._in_use = [False] * num_slots
        self.num_pinned = 0
        """Number of slots with a pin."""

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_owned(self) -> int:
        """Number of slots with an owner."""
        return self.num_slots - len(self._empty) - len(self._given_up)

    def take(self, count: int) -> list[int]:
        """Takes up to `count` empty slots."""
        taken = [self._empty.pop() for _ in range(min(count, len(self._empty)))]
        for slot in taken:
            self._in_use[slot] = True
        return taken

    def give_up(self, slot: int) -> bool:
        """Ends the ownership. True when the slot is empty now, False when the last unpin will empty it."""
        assert self._in_use[slot] and slot not in self._given_up, f"slot {slot} is not in use"
        if self._pins[slot]:
            self._given_up.add(slot)
            return False
        self._put_back(slot)
        return True

    def pin(self, slot: int) -> None:
        assert self._in_use[slot], f"slot {slot} is empty and cannot be pinned"
        self.num_pinned += not self._pins[slot]
        self._pins[slot] += 1

    def unpin(self, slot: int) -> bool:
        """Undoes one `pin`. True when the slot is empty now."""
        assert self._pins[slot] > 0, f"slot {slot} is not pinned"
        self._pins[slot] -= 1
        if self._pins[slot]:
            return False
        self.num_pinned -= 1
        if slot not in self._given_up:
            return False
        self._given_up.remove(slot)
        self._put_back(slot)
        return True

    def check(self, owned: Iterable[int]) -> None:
        """Checks that every slot is in exactly one state; `owned` are the slots with an owner."""
        mine = list(owned)
        empty = set(self._empty)
        assert len(empty) == len(self._empty), "a slot is empty twice"
        assert len(set(mine)) == len(mine), "a slot has two owners"
        assert not empty & set(mine), "a slot is empty and owned"
        assert not self._given_up & set(mine), "a slot is owned and given up"
        assert len(empty) + len(mine) + len(self._given_up) == self.num_slots, "a slot is lost"
        assert self.num_pinned == sum(map(bool, self._pins)), "pins are miscounted"
        assert all(self._pins[slot] for slot in self._given_up), "a slot without pins was not emptied"

    def _put_back(self, slot: int) -> None:
        self._in_use[slot] = False
        self._empty.append(slot)


Found = tuple[int, RecordHeader]
"""A place in the log and the header found there."""


def whole_chains(found: Iterable[Found]) -> list[Found]:
    """Returns the latest record of each name whose chain of parents is complete: parents first, else in the order of
    writing.

    Others are left out: no prompt can use a block without all blocks before it.
    """
    latest: dict[BlockName, Found] = {}
    for one in sorted(found, key=lambda one: one[1].sequence):
        latest[one[1].name] = one
    following: dict[BlockName | None, list[Found]] = {}
    for one in latest.values():
        following.setdefault(one[1].parent, []).append(one)
    ready = [(header.sequence, place, header) for place, header in following.get(None, ())]
    heapq.heapify(ready)
    chains = []
    while ready:
        _, place, header = heapq.heappop(ready)
        chains.append((place, header))
        for next_place, following_header in following.get(header.name, ()):
            heapq.heappush(ready, (following_header.sequence, next_place, following_header))
    return chains
