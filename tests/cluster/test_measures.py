"""What the reports of nodes say of a link, all together."""

from __future__ import annotations

from isthmus.cluster.measures import Measures
from isthmus.cluster.messages import Crossing
from isthmus.conductor import LinkRule, LinkState
from isthmus.types import NS_PER_S, NodeId

LINKS = (LinkRule("west", "east", 1000, 20), LinkRule("east", "west", 1000, 20))
ONE, TWO, FAR = NodeId("west-1"), NodeId("west-2"), NodeId("east-1")


def test_counters_add_up_and_are_told_once() -> None:
    measures = Measures(LINKS)
    measures.take(0)
    measures.heard(ONE, "west", [Crossing("east", True, 100, 40, 7, 2, 30)])
    measures.heard(TWO, "west", [Crossing("east", True, 50, 60, 3, 1, 25)])
    measures.heard(ONE, "west", [Crossing("east", True, 300, 90, 0, 2, 28)])
    there, back = measures.take(NS_PER_S)
    assert there == LinkState("west", "east", True, 350, 90, 3, 3, 25), "busy as long as the busiest node"
    assert back == LinkState("east", "west", True)
    assert measures.take(2 * NS_PER_S)[0] == LinkState("west", "east", True, 0, 0, 3, 0, 25)
    view = measures.views()[0]
    assert (view.sent_bytes, view.bytes_per_s, view.rated_bytes_per_s, view.queued_bytes) == (350, 0, 1000, 3)


def test_a_node_that_comes_back_counts_from_nothing() -> None:
    measures = Measures(LINKS)
    measures.heard(ONE, "west", [Crossing("east", True, 100)])
    measures.left(ONE)
    assert measures.take(NS_PER_S)[0].sent_bytes == 100, "what had crossed did cross"
    measures.heard(ONE, "west", [Crossing("east", True, 30)])
    assert measures.take(2 * NS_PER_S)[0].sent_bytes == 30
    assert measures.views()[0].sent_bytes == 130


def test_a_link_is_up_while_anything_crosses_it_in_either_direction() -> None:
    measures = Measures(LINKS)
    assert all(state.up for state in measures.take(0)), "nobody says otherwise"
    measures.heard(ONE, "west", [Crossing("east", False)])
    assert not any(state.up for state in measures.take(1))
    measures.heard(FAR, "east", [Crossing("west", True)])
    assert all(state.up for state in measures.take(2))


def test_what_crosses_where_no_link_is_configured_is_ignored() -> None:
    measures = Measures(LINKS)
    measures.heard(ONE, "west", [Crossing("north", True, 100)])
    assert measures.take(1)[0].sent_bytes == 0
