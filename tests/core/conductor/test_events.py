from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from isthmus.core.attempts import Assembly, Donor, Entry, Holding, MemoryUsed, Spread
from isthmus.core.conductor import (
    Abort,
    Action,
    BlocksEvicted,
    BlocksStored,
    Content,
    Convert,
    Event,
    Fail,
    FetchFinished,
    FetchOrder,
    FirstToken,
    Hold,
    HoldExpired,
    LinksMeasured,
    LinkState,
    NodeJoined,
    NodeLeft,
    Paths,
    PrefillFinished,
    Refuse,
    Remember,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    RoleChanged,
    Route,
    ThresholdSet,
    Unremember,
)
from isthmus.core.conductor.events import Lend, Repay
from isthmus.core.cost import HARDWARE, Analytic, Curve, ModelFacts, engine_coefficients
from isthmus.core.reuse import SEMANTIC, Packing
from isthmus.core.reuse.passages import Passage
from isthmus.core.types import NodeId, RequestId, Reuse, Role, Tier

A, N = RequestId("a"), NodeId("prefill-0")
NAMES = (b"\x00\xff" * 8, bytes(16))
CURVE = Curve(kv_token_bytes=128, num_layers=2, prefill_token_s=1e-5, decode_points=((1, 0.01), (8, 0.02)))
ANALYTIC = Analytic(
    ModelFacts("LlamaForCausalLM", 2, 64, 100, 10_000, 256, 2, 512),
    HARDWARE["h200"],
    engine_coefficients("vllm", HARDWARE["h200"]),
)

EVENTS = [
    NodeJoined(N, Role.MIXED, 4096, 16),
    NodeJoined(N, Role.PREFILL, 4096, 16, CURVE, Paths(10**9, 10**10, 10**8), 500),
    NodeJoined(N, Role.PREFILL, 4096, 16, ANALYTIC),
    NodeJoined(N, Role.MIXED, 4096, 16, reuse_layers=30),
    NodeLeft(N),
    RequestArrived(A, "tenant", 100, 20, NAMES),
    RequestArrived(
        A,
        "tenant",
        100,
        20,
        NAMES,
        content=Content(Reuse.SEMANTIC, bytes(16), (b"\xff" * 8, bytes(8)), (60, 100), b"\xff" * 64),
    ),
    RequestArrived(A, "tenant", 100, 20, (1, 2, 2**40), -3, 500, 50),
    FirstToken(A, 1),
    FetchFinished(A, 1),
    PrefillFinished(A, 2),
    RequestEnded(A),
    RequestEnded(A, 17),
    RequestFailed(A, 1, "a seal did not match"),
    HoldExpired(A, 2),
    RequestCancelled(A),
    BlocksStored(N, NAMES),
    BlocksStored(N, (1, 2), Tier.DISK),
    BlocksEvicted(N, NAMES),
    NodeJoined(N, Role.DECODE, 4096, 16, cluster="home", state_blocks=3, max_sequences=20),
    RoleChanged(N, Role.DECODE),
    LinksMeasured(),
    LinksMeasured(
        (LinkState("there", "home", True, 10**9, 10**8, 10**7, 3, 10**7), LinkState("home", "there", False))
    ),
    RequestFailed(A, 1, "no room", no_room=True),
    Spread(A, 1, (Holding((N, NodeId("decode-1")), 3),)),
    MemoryUsed(N, 7, 2, 9, 1, (Entry(A, 1, 5, 2, True, (Holding((N,), 3),)), Entry(A, 2))),
]
DONORS = (Donor(RequestId("b"), NAMES, 1), Donor(RequestId("c"), NAMES, 0, FetchOrder(N, 1, 2, 10**9)))
ACTIONS = [
    Route(A, 1, N, N, assembly=Assembly(SEMANTIC, DONORS, (Passage(32, 40, 1, 7),), 60, 2, Packing(5, (4, 3)))),
    Remember(A),
    Unremember(A),
    Route(A, 1, N, NodeId("decode-0")),
    Route(A, 2, N, N, FetchOrder(NodeId("prefill-1"), 2, 5, 10**15), 5, 10**9, 10**16),
    Refuse(A, "overloaded", "too many", 1000),
    Refuse(A, "overloaded", "too many", 1000, "decode"),
    Abort(A, 3, (N,)),
    Hold(A, 1, "gone"),
    Fail(A, "gone"),
    Route(A, 1, N, NodeId("decode-0"), handover_start=3, recall=FetchOrder(NodeId("decode-0"), 0, 3)),
    Convert(N, Role.DECODE),
    ThresholdSet(19_400, "solved again"),
    ThresholdSet(None, "the link is down"),
    Route(A, 3, N, N, holdings=(Holding((NodeId("mixed-1"),), 4),), growth=(NodeId("mixed-1"),), taken=2),
    Hold(A, 1, "no memory", 10),
    Lend(A, 1, N, NodeId("mixed-1"), 3),
    Repay(A, 1, N, NodeId("mixed-1"), 2),
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
