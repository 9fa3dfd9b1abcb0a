"""Whatever letter comes, from whomever: a node goes on, and its books add up."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.attempts import Holding, Share
from isthmus.node import events
from isthmus.node.letters import Found, Granted, Letter, Passed, Reserved, Shipped
from isthmus.types import Role

from .test_adapter import node_of as server_node
from .test_away import A0, A1, KEY, OLD, decoding, lent
from .test_away import begin as begin_at
from .test_away import node as node_named
from .test_guests import hosting
from .test_refusals import NAMES, PEER, begin, node_of
from .world import SIZE

NUMBERS = st.integers(-3, 9)
SHARES = st.builds(Share, NUMBERS, NUMBERS, NUMBERS)


def of_kind(kind: Any) -> st.SearchStrategy[Any]:
    """A letter of this kind, of any numbers."""
    fields = {
        "key": st.sampled_from([KEY, OLD]),
        "old": st.sampled_from([KEY, OLD]),
        "share": SHARES,
        "names": st.integers(0, 5).map(lambda count: NAMES[:count]),
        "params": st.just(b""),
    }
    for name in kind.__struct_fields__:
        fields.setdefault(name, NUMBERS if "num" in name or name in NUMBERED else st.booleans())
    return st.builds(kind, **{name: fields[name] for name in kind.__struct_fields__})


NUMBERED = ("start", "stop", "first", "cached_tokens")
UNKNOWN = [("idle", Passed), *(("server", kind) for kind in (Granted, Reserved, Found, Shipped))]
"""End the node."""
NODES = {
    "idle": node_of,
    "prefill": lambda: brought_to(Role.PREFILL),
    "decode": lambda: brought_to(Role.DECODE),
    "home": lent,
    "growing": lambda: decoding()[0],
    "claiming": lambda: claiming(),
    "holder": lambda: hosting(PEER, A0),
    "server": lambda: server_node(A0, (30, 0)),
}


def brought_to(part: Role) -> Any:
    node = node_of(3)
    node.on(begin(part), 1)
    return node


def claiming() -> Any:
    node = node_named(A1)
    begin_at(node, 6 * SIZE + 1, 1, Holding((A0,), 3), Holding((PEER,), 2))
    return node


@pytest.mark.parametrize("of", NODES)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_letter_ends_a_node_or_its_books(of: str, data: st.DataObject) -> None:
    node = NODES[of]()
    unknown = [kind for there, kind in UNKNOWN if (there == "server") == (of == "server")]
    letters = st.one_of([of_kind(kind) for kind in get_args(Letter) if kind not in unknown])
    for now in range(5):
        letter = data.draw(letters)
        if isinstance(letter, Found) and letter.num_blocks < 0:
            continue
        node.on(events.Heard(data.draw(st.sampled_from([PEER, A0, A1])), letter), 100 + now)
        getattr(node, "check", lambda: None)()


@pytest.mark.xfail(raises=KeyError, strict=True, reason="a letter that a node has no handler for ends it")
@pytest.mark.parametrize(("of", "kind"), UNKNOWN)
@given(data=st.data())
def test_nor_one_that_such_a_node_never_hears(of: str, kind: type, data: st.DataObject) -> None:
    assert NODES[of]().on(events.Heard(PEER, data.draw(of_kind(kind))), 100) == []


@pytest.mark.xfail(raises=AssertionError, strict=True, reason="so many tokens are taken for computed")
def test_a_holder_that_says_it_has_less_than_nothing_has_nothing() -> None:
    node = node_named(A1)
    begin_at(node, 6 * SIZE + 1, 1, Holding((A0,), 3))
    node.on(events.Heard(A0, Found(KEY, -3)), 11)
    node.on(events.Heard(A0, Reserved(KEY, True)), 12)
    node.check()
