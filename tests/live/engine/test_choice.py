"""How many of something a step takes, beside `test_team.py`: where it begins, and when it tries."""

from __future__ import annotations

import pytest

from isthmus.live.engine.choice import SELDOM, Choice


def trials(choice: Choice, steps: int) -> list[int]:
    """The steps that were tried with another number, none of which was better."""
    found = []
    for step in range(steps):
        number = choice.next()
        if number != choice.number:
            found.append(step)
        choice.took(number, 1.0 + (number != choice.number))
    return found


def test_two_choices_do_not_try_in_the_same_step() -> None:
    one, other = trials(Choice(4, 4), 4000), trials(Choice(2, 1, SELDOM // 2), 4000)
    assert len(one) > 20 and len(other) > 20
    assert not set(one) & set(other)


@pytest.mark.parametrize(("first", "best"), [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_it_finds_the_quickest_from_either_end(first: int, best: int) -> None:
    choice, numbers = Choice(2, first), list[int]()
    for _ in range(10 * SELDOM):
        numbers.append(choice.next())
        choice.took(numbers[-1], 1.0 if numbers[-1] == best else 1.5)
    assert numbers[0] == first and numbers[-SELDOM:].count(best) >= SELDOM - 1
