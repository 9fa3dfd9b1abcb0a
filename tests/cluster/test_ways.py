"""At which addresses nodes reach each other, within a cluster and over links."""

from __future__ import annotations

import pytest

from isthmus.cluster.launcher import LinkProcess
from isthmus.cluster.messages import Neighbours
from isthmus.cluster.shaper import LinkPorts, Point
from isthmus.cluster.ways import Ways
from isthmus.conductor import LinkRule
from isthmus.errors import UnavailableError
from isthmus.types import NodeId

A, B, C, FAR = map(NodeId, "abcf")
LINKS = (LinkRule("west", "east", 1), LinkRule("east", "west", 1))


class FakeLink(LinkProcess):
    """Without a process. `said`: to it."""

    def __init__(self, towards_west: tuple[int, ...], towards_east: tuple[int, ...]) -> None:
        super().__init__(("west", "east"), None, LinkPorts((towards_west, towards_east)))  # type: ignore[arg-type]
        self.said: list[Point] = []

    def point(self, point: Point) -> None:
        self.said.append(point)


def test_one_cluster() -> None:
    ways = Ways()
    ways.open(A, "", "h:1")
    ways.open(B, "", "h:2")
    assert ways.view("", "") == Neighbours("", {A: "h:1", B: "h:2"}) and not ways.crosses(A, B)


def test_a_link_as_it_is() -> None:
    ways = Ways(["east", "west", "north"], LINKS)
    ways.open(A, "east", "h:1")
    ways.open(FAR, "west", "h:9")
    assert ways.crosses(A, FAR) and ways.view("east", "west") == Neighbours("east", {A: "h:1"})
    assert ways.view("east", "east") == Neighbours("east", {A: "h:1"})
    assert ways.linked("east") == ["west"] and ways.linked("north") == []
    assert ways.view("west", "east") == Neighbours("west", {FAR: "h:9"})
    ways.close(FAR)
    assert ways.view("west", "east") == Neighbours("west", {})


def test_an_emulated_link_is_entered_at_a_port_for_each_node() -> None:
    ways, link = Ways(["east", "west"], LINKS), FakeLink((11,), (21, 22))
    ways.emulate(link)
    ways.open(A, "east", "h:1")
    ways.open(B, "east", "h:2")
    ways.open(FAR, "west", "h:9")
    assert link.said == [Point(21, "h:1"), Point(22, "h:2"), Point(11, "h:9")]
    assert ways.view("east", "east").addresses == {A: "h:1", B: "h:2"}
    assert ways.view("east", "west").addresses == {A: "127.0.0.1:21", B: "127.0.0.1:22"}
    assert ways.view("west", "east").addresses == {FAR: "127.0.0.1:11"}
    with pytest.raises(UnavailableError, match="the link between east and west has no port left"):
        ways.open(C, "east", "h:3")
    ways.close(A)
    ways.open(C, "east", "h:3")
    assert link.said[3:] == [Point(21, ""), Point(21, "h:3")]
    assert ways.view("east", "west").addresses == {B: "127.0.0.1:22", C: "127.0.0.1:21"}
