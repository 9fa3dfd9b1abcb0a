"""What the reports of nodes say of a link, all together."""

from __future__ import annotations

from isthmus.cluster.link_stats import LinkStats
from isthmus.cluster.messages import LinkReport
from isthmus.conductor import LinkRule, LinkState
from isthmus.types import NS_PER_S, NodeId

LINKS = (LinkRule("west", "east", 1000, 20), LinkRule("east", "west", 1000, 20))
ONE, TWO, FAR = NodeId("west-1"), NodeId("west-2"), NodeId("east-1")


def test_counters_add_up_and_are_told_once() -> None:
    stats = LinkStats(LINKS)
    stats.take()
    stats.heard(ONE, "west", [LinkReport("east", True, 100, 40, 7, 2, 30)], NS_PER_S)
    stats.heard(TWO, "west", [LinkReport("east", True, 50, 60, 3, 1, 25)], NS_PER_S)
    stats.heard(ONE, "west", [LinkReport("east", True, 300, 90, 0, 2, 28)], NS_PER_S)
    there, back = stats.take()
    assert there == LinkState("west", "east", True, 350, 90, 3, 3, 25), "busy as long as the busiest node"
    assert back == LinkState("east", "west", True)
    assert stats.take()[0] == LinkState("west", "east", True, 0, 0, 3, 0, 25)
    stats.heard(ONE, "west", [LinkReport("east", True, 400, 90, 0, 2, 28)], 3 * NS_PER_S)
    assert stats.views()[0].bytes_per_s == 0, "as it was told"
    stats.take()
    view = stats.views()[0]
    assert (view.sent_bytes, view.bytes_per_s, view.rated_bytes_per_s, view.queued_bytes) == (450, 50, 1000, 3)


def test_a_node_that_comes_back_counts_from_nothing() -> None:
    stats = LinkStats(LINKS)
    stats.heard(ONE, "west", [LinkReport("east", True, 100)], NS_PER_S)
    stats.left(ONE)
    assert stats.take()[0].sent_bytes == 100, "what had crossed did cross"
    stats.heard(ONE, "west", [LinkReport("east", True, 30)], NS_PER_S)
    assert stats.take()[0].sent_bytes == 30
    assert stats.views()[0].sent_bytes == 130


def test_a_link_is_up_while_anything_crosses_it_in_either_direction() -> None:
    stats = LinkStats(LINKS)
    assert all(state.up for state in stats.take()), "nobody says otherwise"
    stats.heard(ONE, "west", [LinkReport("east", False)], NS_PER_S)
    assert not any(state.up for state in stats.take())
    stats.heard(FAR, "east", [LinkReport("west", True)], NS_PER_S)
    assert all(state.up for state in stats.take())


def test_what_crosses_where_no_link_is_configured_is_ignored() -> None:
    stats = LinkStats(LINKS)
    stats.heard(ONE, "west", [LinkReport("north", True, 100)], NS_PER_S)
    assert stats.take()[0].sent_bytes == 0
