"""Which slots of the arena are empty, reserved, held or only still pinned. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Slots:
    """A slot is in use from `take` until it was given up and nobody has it pinned."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._empty = list(range(num_slots))[::-1]
        self._pins = [0] * num_slots
        self._given_up: set[int] = set()
        self._in_use = [False] * num_slots
        self.num_pinned = 0
        """Slots with a pin."""

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_owned(self) -> int:
        """Slots that somebody has and has not given up."""
        return self.num_slots - len(self._empty) - len(self._given_up)

    def take(self, count: int) -> list[int]:
        """Up to `count` empty slots, which are in use from now on."""
        taken = [self._empty.pop() for _ in range(min(count, len(self._empty)))]
        for slot in taken:
            self._in_use[slot] = True
        return taken

    def give_up(self, slot: int) -> bool:
        """The owner needs it no more; True when it is empty now, False when the last unpin will empty it."""
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
        """Undoes one `pin`; True when the slot is empty now."""
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
        """Every slot is in exactly one state; `owned` are those that somebody has and has not given up."""
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
