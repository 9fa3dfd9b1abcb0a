from __future__ import annotations

import pytest

from isthmus.live.store.directory import Slots


def test_a_slot_is_empty_when_it_is_given_up_and_not_pinned() -> None:
    slots = Slots(2)
    (slot,) = slots.take(1)
    slots.pin(slot)
    slots.pin(slot)
    assert slots.num_pinned == 1 and slots.num_owned == 1
    assert not slots.give_up(slot) and slots.num_owned == 0
    assert not slots.unpin(slot) and slots.num_empty == 1
    assert slots.unpin(slot) and slots.num_empty == 2 and slots.num_pinned == 0
    slots.check([])


def test_misuse_is_a_bug_of_ours() -> None:
    slots = Slots(1)
    for misuse in (slots.pin, slots.unpin, slots.give_up):
        with pytest.raises(AssertionError, match="slot 0"):
            misuse(0)
    (slot,) = slots.take(2)
    with pytest.raises(AssertionError, match="lost"):
        slots.check([])
    slots.give_up(slot)
    with pytest.raises(AssertionError, match="not in use"):
        slots.give_up(slot)
