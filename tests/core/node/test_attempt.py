"""What an attempt takes over from its route."""

from __future__ import annotations

from isthmus.core.attempts import FetchOrder, Route
from isthmus.core.node.attempts import Attempt
from isthmus.core.node.events import StartAttempt
from isthmus.core.node.letters import extent_of
from isthmus.core.types import MIXED, NodeId, RequestId


def test_it_counts_on_no_block_that_has_no_name() -> None:
    """The tokens of an earlier attempt fill the prompt's last block up, which so loses its name."""
    here, there = NodeId("here"), NodeId("there")
    route = Route(RequestId("r"), 2, here, here, FetchOrder(there, 1, 3, 1000), 3)
    begin = StartAttempt(RequestId("r#2"), MIXED, route, 45, 60, (1, 2))
    attempt = Attempt.of(begin, extent_of(route, 45, 16, 0), hands_over=False)
    assert attempt.fetch is not None
    assert (attempt.num_cached, attempt.fetch.start, attempt.fetch.stop) == (2, 1, 2)
