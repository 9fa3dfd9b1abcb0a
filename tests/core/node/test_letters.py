"""Whatever letter comes, from whomever: a node goes on, and its books add up."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.attempts import Holding, Share
from isthmus.core.node import events
from isthmus.core.node.letters import (
    ClaimReply,
    FetchRequest,
    Letter,
    ReserveRequest,
    SendBack,
    ShipmentConfirmed,
    Shrink,
)
from isthmus.core.types import Role

from .test_holders import A0, A1, KEY, OLD, decoding, hosting, lent
from .test_holders import begin as begin_at
from .test_holders import node as node_named
from .test_server_node import node_of as server_node
from .test_steps import NAMES, PEER, begin, node_of
from .world import SIZE

COUNTS = st.integers(0, 9)
SHARES = st.builds(Share, *[st.integers(-3, 9)] * 3)


def of_kind(kind: Any) -> st.SearchStrategy[Any]:
    """A letter of this kind, of any numbers that are read from a session."""
    fields = {
        "key": st.sampled_from([KEY, OLD]),
        "old": st.sampled_from([KEY, OLD]),
        "share": SHARES,
        "names": st.integers(0, 5).map(lambda count: NAMES[:count]),
        "params": st.just(b""),
        **dict.fromkeys(("granted", "damaged", "unread", "whole"), st.booleans()),
    }
    return st.builds(kind, **{name: fields.get(name, COUNTS) for name in kind.__struct_fields__})


def brought_to(part: Role) -> Any:
    node = node_of(3)
    node.on(begin(part), 1)
    return node


def claiming() -> Any:
    node = node_named(A1)
    begin_at(node, 6 * SIZE + 1, 1, Holding((A0,), 3), Holding((PEER,), 2))
    return node


NODES = {
    "idle": node_of,
    "prefill": lambda: brought_to(Role.PREFILL),
    "decode": lambda: brought_to(Role.DECODE),
    "home": lent,
    "growing": lambda: decoding()[0],
    "claiming": claiming,
    "holder": lambda: hosting(PEER, A0),
    "server": lambda: server_node(A0, (30, 0)),
}


@pytest.mark.parametrize("of", NODES)
@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            events.LetterReceived,
            st.sampled_from([PEER, A0, A1]),
            st.one_of(list(map(of_kind, get_args(Letter)))),
        ),
        max_size=9,
    )
)
def test_no_letter_ends_a_node_or_its_books(of: str, heard: list[events.LetterReceived]) -> None:
    """Also those for nodes of another kind."""
    node = NODES[of]()
    for now, fact in enumerate(heard, 100):
        node.on(fact, now)
        if of != "server":
            node.check()


@pytest.mark.parametrize(
    "letter",
    [
        FetchRequest(KEY, (), -1), ReserveRequest(KEY, -1), ClaimReply(KEY, -1),
        ShipmentConfirmed(KEY, -1), SendBack(KEY, -1, 1),
        SendBack(KEY, 0, -1), Shrink(KEY, -1),
    ],
    ids=repr,
)  # fmt: skip
def test_what_counts_fewer_than_none_is_not_read(letter: Letter) -> None:
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(letter), type=Letter)
