"""What a node gives of its cache, step by step. With everything else: `test_node.py`."""

from __future__ import annotations

import pytest

from isthmus.core.node.events import EndGive, Give, LetterReceived
from isthmus.core.node.letters import FetchDone, FetchRequest
from isthmus.core.types import RequestId, Tenant

from .test_refusals import NAMES, OTHER, PEER, node_of

KEY = RequestId("f")


@pytest.mark.parametrize("start", [-1, 3, 9])
def test_a_want_that_begins_nowhere_in_its_prefix_gets_nothing(start: int) -> None:
    node = node_of(3)
    assert node.on(LetterReceived(PEER, FetchRequest(KEY, NAMES, start)), 1) == [
        Give(KEY, PEER, NAMES, start, start, 0)
    ]
    assert node.tiers is not None and not node.tiers.num_pinned


def test_only_who_wanted_it_has_enough_of_it() -> None:
    """Another node that says so has its own, of the same attempt."""
    node = node_of(3)
    assert node.tiers is not None
    for peer in (PEER, OTHER):
        node.on(LetterReceived(peer, FetchRequest(KEY, NAMES, 0)), 1)
    for _ in range(2):
        assert node.on(LetterReceived(OTHER, FetchDone(KEY)), 2) == [EndGive(KEY, OTHER)]
        assert node.tiers.num_pinned == 3, "the other one reads it still"
    node.on(LetterReceived(PEER, FetchDone(KEY)), 3)
    node.check_idle()


@pytest.mark.parametrize("names", [NAMES[1:3], NAMES[1::-1], NAMES[:1] * 2, NAMES[:3:2]], ids=str)
@pytest.mark.parametrize("tenants", [1, 2])
def test_names_that_are_no_chain_are_void(names: tuple[int, ...], tenants: int) -> None:
    node = node_of(3)
    assert node.tiers is not None
    if tenants > 1:
        node.tiers.put((100, 101), Tenant("other"))
    node.on(LetterReceived(PEER, FetchRequest(KEY, NAMES, 0)), 1)
    assert node.on(LetterReceived(OTHER, FetchRequest(KEY, names, 0)), 2) == []
    for peer in (OTHER, PEER):
        node.on(LetterReceived(peer, FetchDone(KEY)), 3)
    node.check_idle()
