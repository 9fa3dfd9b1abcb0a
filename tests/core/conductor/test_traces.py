"""What leaves no trace: what is refused as it comes, and what is said of attempts and nodes that are no more."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import FunctionType, MethodType
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.core.conductor import Action, Event, NodeJoined, Refuse, RequestArrived, RequestEnded
from isthmus.core.types import Role

from .cluster import MS, Cluster
from .test_conductor import RULES, play

REMEMBERED = ("_memo", "_stretch", "_stretch_at")
"""What is only there so that it need not be worked out again."""


def everything(root: Any) -> dict[str, object]:
    """Every value that can be reached from an object, by its path; of two ways to one object, the first."""
    seen: set[int] = set()

    def walk(path: str, value: Any) -> Iterator[tuple[str, object]]:
        if isinstance(value, (type, FunctionType, MethodType)) or value is None:
            return
        if isinstance(value, (str, bytes, int, float, frozenset, range)):
            yield path, value
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Random):
            yield path, value.getstate()
        elif isinstance(value, dict):
            yield path, tuple(map(repr, value))
            for key, inner in value.items():
                yield from walk(f"{path}[{key!r}]", inner)
        elif hasattr(value, "__iter__") and not hasattr(value, "__struct_fields__"):
            inner_values = list(value)
            yield path, len(inner_values)
            for at, inner in enumerate(inner_values):
                yield from walk(f"{path}[{at}]", inner)
        else:
            names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            for name in {*names, *getattr(value, "__dict__", ())}.difference(REMEMBERED):
                yield from walk(f"{path}.{name}", getattr(value, name, None))

    return dict(walk("", root))


class Watched(Cluster):
    """Compares all that its conductor knows before and after each event that is to leave no trace."""

    num_refused = num_void = 0

    def on(self, event: Event) -> list[Action]:
        before = everything(self.conductor)
        known = self.conductor.view.requests.get(getattr(event, "request", None))
        lives = known is not None and getattr(event, "attempt", known.attempt) == known.attempt
        node = getattr(event, "node", None)
        strange = (
            node is not None and node not in self.conductor.view.nodes and not isinstance(event, NodeJoined)
        )
        actions = super().on(event)
        refused = isinstance(event, RequestArrived) and [type(action) for action in actions] == [Refuse]
        void = not isinstance(event, RequestArrived) and hasattr(event, "request") and not lives
        if refused or strange or (void and not isinstance(event, RequestEnded)):
            assert everything(self.conductor) == before, f"{event} left a trace"
            self.num_refused += refused
            self.num_void += void or strange
        return actions


@pytest.mark.parametrize(
    "number", range(len(RULES)), ids=[f"{rules.policy}-{rules.admission}" for rules in RULES]
)
def test_what_is_refused_or_void_leaves_no_trace(number: int) -> None:
    some = Watched(replace(RULES[number], max_requests=6), step_ns=MS)
    for node in ("p1", "p2", "d1", "m1"):
        some.join(node, {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[node[0]])
    play(some, Random(number), 150)
    assert some.num_refused >= 3 and some.num_void >= 3, "the history is hollow"
