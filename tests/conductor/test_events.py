from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from isthmus.conductor import (
    Abort,
    Action,
    BlocksEvicted,
    BlocksStored,
    Event,
    Fail,
    Hold,
    HoldExpired,
    NodeJoined,
    NodeLeft,
    PrefillFinished,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    Route,
)
from isthmus.types import BlockName, NodeId, RequestId, Role

A, N = RequestId("a"), NodeId("prefill-0")
NAMES = (b"\x00\xff" * 8, bytes(16))

EVENTS = [
    NodeJoined(N, Role.MIXED, 4096, 16),
    NodeLeft(N),
    RequestArrived(A, "tenant", 100, 20, NAMES),
    PrefillFinished(A, 2),
    RequestEnded(A),
    RequestFailed(A, 1, "a seal did not match"),
    HoldExpired(A, 2),
    RequestCancelled(A),
    BlocksStored(N, NAMES),
    BlocksEvicted(N, NAMES),
]
ACTIONS = [
    Route(A, 1, N, NodeId("decode-0")),
    Refuse(A, "overloaded", "too many", 1000),
    Abort(A, 3, (N,)),
    Hold(A, 1, "gone"),
    Fail(A, "gone"),
]


def test_every_event_and_action_is_tried_here() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert {type(action) for action in ACTIONS} == set(get_args(Action))


@pytest.mark.parametrize("value", EVENTS + ACTIONS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
def test_it_comes_back_as_it_was_sent(value: object, codec: object) -> None:
    union = Event if type(value) in get_args(Event) else Action
    assert codec.decode(codec.encode(value), type=union) == value  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", EVENTS + ACTIONS, ids=lambda value: type(value).__name__)
def test_it_cannot_be_written_to(value: object) -> None:
    with pytest.raises(AttributeError):
        setattr(value, value.__struct_fields__[0], None)  # type: ignore[attr-defined]
