"""The page about the node shows the table of the code, and says something of every fact and action."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from isthmus.core.node import server_node
from isthmus.core.node.events import Action, Event
from isthmus.core.node.letters import Letter
from isthmus.core.scheduler import sequence
from isthmus.core.scheduler.sequence import SequenceState

STEPS = ("ADMITTED", "COMPUTED", "DEPARTS", "RESERVED", "WHOLE", "JOINED", "PREEMPTED", "ENDED")
WAY: dict[str, dict[Any, Any]] = {step.lower(): getattr(sequence, step) for step in STEPS}
OF_SERVERS = ("AWAITS", "FETCHES", "SUBMITS", "ANSWERS", "PASSES")
SERVERS_WAY: dict[str, dict[Any, Any]] = {step.lower(): getattr(server_node, step) for step in OF_SERVERS}
PAGE = (Path(__file__).parents[3] / "docs" / "node.md").read_text(encoding="utf8")


def picture(way: dict[str, dict[Any, Any]], *starts: str) -> str:
    """The tables as lines of Mermaid's state diagram."""
    lines = ["stateDiagram-v2", *[f"    [*] --> {start}" for start in starts]]
    for step, ways in way.items():
        lines += [
            f"    {state.name} --> {then.name if then else '[*]'}: {step}" for state, then in ways.items()
        ]
    return "\n".join(lines)


def test_the_page_has_the_picture_of_the_table() -> None:
    assert re.findall(r"```mermaid\n(.*?)\n```", PAGE, re.DOTALL) == [
        picture(WAY, "QUEUED", "EXPECTED"),
        picture(SERVERS_WAY, "GATHERING"),
    ]


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    left = {state for ways in WAY.values() for state in ways}
    reached = {then for ways in WAY.values() for then in ways.values()}
    assert left == set(SequenceState) == {SequenceState.QUEUED, SequenceState.EXPECTED} | (reached - {None})
    served = {then for ways in SERVERS_WAY.values() for then in ways.values()}
    assert set(server_node.ServerAttemptState) == {server_node.GATHERING} | served


@pytest.mark.parametrize(
    "name", [each.__name__ for each in (*get_args(Event), *get_args(Action), *get_args(Letter))]
)
def test_the_page_names_every_fact_action_and_letter(name: str) -> None:
    assert f"`{name}`" in PAGE
