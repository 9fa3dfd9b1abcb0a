"""What is asked of both sides, and what of the answers is compared."""

from __future__ import annotations

from benchmarks.vllm_nodes import Answer, Plan, Round, Side, prompts_of, table

SIDES = (Side("a", "http://a", "m"), Side("b", "http://b", "m"))


def test_prompts_are_new_in_each_turn_and_as_long() -> None:
    plan = Plan(SIDES, prompts=50, longest=300)
    first, second = prompts_of(plan, 0), prompts_of(plan, 1)
    assert first == prompts_of(plan, 0) and first != second
    assert [len(prompt) for prompt in first] == [len(prompt) for prompt in second]
    assert all(5 <= len(prompt) <= 300 and min(prompt) >= 3 and max(prompt) < 250 for prompt in first)
    assert len({tuple(prompt[:5]) for prompt in first}) < 50, "some begin alike"


def test_what_is_added_is_of_the_same_prompt() -> None:
    slow = (Answer((1, 2), 0.2, 0.02), Answer((3, 4), 0.9, 0.03))
    quick = (Answer((1, 2), 0.1, 0.01), Answer((3, 5), 0.8, 0.02))
    rounds = [Round((slow, quick))]
    assert rounds[0].differing() == 1
    shown = table(Plan(SIDES, prompts=2), rounds)
    assert [list(column.cells) for column in shown.columns][3:] == [["+100.0", "+0.0"], ["+10.00", "+0.00"]]
    assert "1 answers differ" in str(shown.title)
