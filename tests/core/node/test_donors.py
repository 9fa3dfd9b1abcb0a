"""What becomes of a prompt whose donors come, do not come, or go: it is assembled, computed as ever, or tried again."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.attempts import (
    Assembly,
    Convert,
    Donor,
    HoldingsChanged,
    Lend,
    MemoryEntry,
    MemoryUsed,
    Repay,
    RequestFailed,
)
from isthmus.core.node import Node
from isthmus.core.node.events import (
    BlocksFetched,
    Broken,
    Cut,
    DropAttempt,
    EndFetch,
    Fetch,
    Progress,
    StartAttempt,
    Woken,
)
from isthmus.core.reuse import CACHEBLEND, SEMANTIC, pack
from isthmus.core.scheduler import BlockPool, Run, Scheduler, Stepped, TierCache
from isthmus.core.types import NodeId, RequestId, Role

from .world import SIZE, fetch_of, limits_of, route_of

HERE, PEER, FAR = NodeId("here"), NodeId("peer"), NodeId("far")
KEY, FIRST, SECOND = RequestId("r#1"), RequestId("r#1~0"), RequestId("r#1~1")
NUM_TOKENS = 60
NAMES = tuple(range(NUM_TOKENS // SIZE))
DONOR = tuple(range(100, 108))
OTHER = tuple(range(200, 206))
PACKING = pack(SEMANTIC, NUM_TOKENS, 3, SIZE)
assert PACKING is not None
TRANSFER_NS = 1000


def node_of(*chains: tuple[int, ...], tiers: bool = True, num_blocks: int = 60, **about: Any) -> Node:
    """With these in its cache."""
    made, cache = limits_of(num_blocks, about.pop("state_blocks", 0)), TierCache(80)
    for chain in chains:
        cache.put(chain)
    scheduler = Scheduler(made, cache if tiers else None, BlockPool(num_blocks), node=HERE)
    return Node(dict.fromkeys(Role, made), scheduler, transfer_ns=TRANSFER_NS, **about)


def begin(part: Role, *donors: Donor, packed: bool = True, request: str = "r", **fields: Any) -> StartAttempt:
    ends = {Role.PREFILL: (HERE, PEER), Role.DECODE: (PEER, HERE), Role.MIXED: (HERE, HERE)}
    about = fields.pop("num_tokens", NUM_TOKENS)
    made = Assembly(SEMANTIC if packed else CACHEBLEND, donors, (), 20, 3, PACKING if packed else None)
    route = route_of(request, *ends[part], assembly=made, **fields)
    return StartAttempt(RequestId(f"{request}#1"), part, route, about, about + 30, NAMES[: about // SIZE])


def donor(names: tuple[int, ...] = DONOR, start: int | None = None, first: int = 2) -> Donor:
    """From `start` on it lies elsewhere."""
    fetch = None if start is None else fetch_of(FAR, start, len(names))
    return Donor(RequestId("x"), names, first, fetch)


def of_kind(actions: list[Any], *kinds: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kinds)]


def is_assembled(actions: list[Any]) -> bool:
    """Whether the run computes it from its donors; else from the first token on, or it does not begin."""
    [run] = of_kind(actions, Run)
    [piece] = run.chunks
    assert piece.count == (NUM_TOKENS - piece.start if piece.assembly is not None else 16)
    return piece.assembly is not None


def refused(actions: list[Any]) -> bool:
    reasons = [action.reason for action in of_kind(actions, RequestFailed)]
    assert reasons in ([], ["here: it cannot be assembled of its donors' KV"])
    return bool(reasons)


PARTS = [(Role.MIXED, True), (Role.MIXED, False), (Role.PREFILL, False), (Role.PREFILL, True)]


def falls_back(actions: list[Any], part: Role, packed: bool) -> None:
    """It is computed as ever, unless its decode node has room for the packed prompt only."""
    if part is Role.PREFILL and packed:
        assert refused(actions) and not of_kind(actions, Run)
    else:
        assert not refused(actions) and not is_assembled(actions)


@pytest.mark.parametrize(("part", "packed"), PARTS)
@pytest.mark.parametrize(
    "about", [{"tiers": False}, {"stages": 2}, {"state_blocks": 2}, {"num_blocks": 20}], ids=str
)
def test_where_it_can_never_be_assembled_nothing_is_fetched_for_it(
    part: Role, packed: bool, about: dict[str, Any]
) -> None:
    """No cache, a pipeline group, recurrent states, memory that its donors would never fit into."""
    node = node_of(DONOR, **about)
    actions = node.on(begin(part, donor(), donor(OTHER, 0, 0), packed=packed), 1)
    assert not of_kind(actions, Fetch)
    falls_back(actions, part, packed)
    node.on(DropAttempt(KEY), 2)
    if node.scheduler.run is not None:
        node.on(Stepped(1), 3)
    node.check_idle()


def test_others_pass_by_while_its_donors_come() -> None:
    node = node_of()
    node.on(begin(Role.PREFILL, donor(start=0)), 1)
    other = StartAttempt(RequestId("s#1"), Role.PREFILL, route_of("s", HERE, PEER), 9, 12, ())
    [run] = of_kind(node.on(other, 2), Run)
    assert [piece.request for piece in run.chunks] == ["s#1"]
    node.on(BlocksFetched(FIRST, 8), 3)
    assert is_assembled(node.on(Stepped(1), 4))


def test_a_fetch_that_stands_still_is_ended_and_costs_no_more() -> None:
    node = node_of()
    node.on(begin(Role.MIXED, donor(start=0)), 1)
    node.on(Progress(FIRST, fetched=True), 10)
    assert node.on(Woken(), 10 + TRANSFER_NS) == []
    assert node.on(Woken(), 11 + TRANSFER_NS) == [EndFetch(FIRST)]
    falls_back(node.on(BlocksFetched(FIRST, 0), 12 + TRANSFER_NS), Role.MIXED, True)


@pytest.mark.parametrize(("part", "packed"), PARTS)
def test_whose_first_token_is_the_last_lets_go_of_its_donors(part: Role, packed: bool) -> None:
    node = node_of(DONOR)
    node.on(begin(part, donor(), packed=packed), 1)
    node.on(Stepped(1, (KEY,), ((*NAMES, 70),)), 2)
    assert node.tiers is not None and not node.tiers.holds(NAMES[0]), "what it left has no name"
    node.check_idle()


def test_who_distrusts_its_cache_does_not_send_whole_what_is_expected_packed() -> None:
    node = node_of(DONOR)
    node.on(begin(Role.MIXED, donor()), 1)
    node.on(Broken(KEY, "x", distrust=True), 2)
    node.on(Stepped(1), 3)
    again = begin(Role.PREFILL, donor())
    assert refused(node.on(StartAttempt(RequestId("r#2"), *_of(again)), 4))
    mixed = begin(Role.MIXED, donor())
    assert not is_assembled(node.on(StartAttempt(RequestId("r#3"), *_of(mixed)), 5))


def _of(event: StartAttempt) -> tuple[Any, ...]:
    return event.part, event.route, event.num_tokens, event.stop_length, event.names


def packed_decode(num_blocks: int = 60) -> tuple[Node, list[Any]]:
    node = node_of(DONOR, num_blocks=num_blocks, report_ns=1)
    node.on(begin(Role.MIXED, donor()), 1)
    return node, node.on(Stepped(1), 2)


def test_what_is_packed_is_never_lent_and_nobody_hears_of_what_was_dropped() -> None:
    node, actions = packed_decode()
    assert PACKING is not None
    [used] = of_kind(actions, MemoryUsed)
    assert used.entries == (MemoryEntry(RequestId("r"), 1, 16 - PACKING.num_dropped),)
    assert used.num_available == 60 - 16 + PACKING.num_dropped
    for order in (Lend(RequestId("r"), 1, HERE, FAR, 2), Repay(RequestId("r"), 1, HERE, FAR, 1)):
        assert of_kind(node.on(order, 3), HoldingsChanged) == [HoldingsChanged(RequestId("r"), 1, ())]


def test_a_new_role_is_taken_when_it_is_over() -> None:
    node = node_of(DONOR)
    node.on(begin(Role.MIXED, donor()), 1)
    node.on(Convert(HERE, Role.DECODE), 2)
    assert not of_kind(node.on(DropAttempt(KEY), 3), Cut), "there is one iteration, and nothing to cut"
    assert [type(action).__name__ for action in node.on(Stepped(1), 4)] == ["ReleaseResources", "RoleChanged"]
    node.check_idle()
