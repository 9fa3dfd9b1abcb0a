"""The page about the node shows the table of the code, and says something of every fact and action."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from isthmus.node.events import Action, Event
from isthmus.scheduler import sequence
from isthmus.scheduler.sequence import State

STEPS = ("ADMITTED", "COMPUTED", "DEPARTS", "RESERVED", "WHOLE", "JOINED", "PREEMPTED", "ENDED")
WAY: dict[str, dict[State, State | None]] = {step.lower(): getattr(sequence, step) for step in STEPS}
PAGE = (Path(__file__).parents[2] / "docs" / "node.md").read_text(encoding="utf8")


def picture() -> str:
    """The tables as lines of Mermaid's state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> QUEUED", "    [*] --> EXPECTED"]
    for step, ways in WAY.items():
        lines += [
            f"    {state.name} --> {then.name if then else '[*]'}: {step}" for state, then in ways.items()
        ]
    return "\n".join(lines)


def test_the_page_has_the_picture_of_the_table() -> None:
    assert re.findall(r"```mermaid\n(.*?)\n```", PAGE, re.DOTALL) == [picture()]


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    left = {state for ways in WAY.values() for state in ways}
    reached = {then for ways in WAY.values() for then in ways.values()}
    assert left == set(State) == {State.QUEUED, State.EXPECTED} | (reached - {None})


@pytest.mark.parametrize("name", [each.__name__ for each in (*get_args(Event), *get_args(Action))])
def test_the_page_names_every_fact_and_action(name: str) -> None:
    assert f"`{name}`" in PAGE
