"""Recurrent states on one node: which prefixes they make usable, and where snapshots are taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.attempts import BlocksStored, FetchOrder
from isthmus.core.blocks import state_names
from isthmus.core.scheduler import (
    Admitted,
    BlockPool,
    Run,
    Scheduler,
    SchedulerLimits,
    Sequence,
    Stepped,
    TierCache,
)
from isthmus.core.scheduler.sequence import CachedPrefix
from isthmus.core.scheduler.states import States
from isthmus.core.types import BlockName, NodeId, RequestId, Tier

from .told import (
    Fact,
    Reserved,
    Told,
    arrived,
    expected,
    fetched,
    forgotten,
    imported,
    offered,
    recovered,
)

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
NAMES: tuple[BlockName, ...] = tuple(range(40))
PARTS = 2


def chain(depth: int) -> tuple[BlockName, ...]:
    return NAMES[:depth] + state_names(NAMES[depth - 1], PARTS)


def node(tiers: TierCache | None = None, **others: int) -> Scheduler:
    limits = SchedulerLimits(num_blocks=64, block_size=4, max_sequences=4, state_blocks=PARTS, **others)
    return Told(limits, tiers, BlockPool(64))


def arrives(request: RequestId, num_tokens: int, names: tuple[BlockName, ...] = NAMES, **others: int) -> Fact:
    return arrived(request, num_tokens, num_tokens + 5, names[: num_tokens // 4], **others)  # type: ignore[arg-type]


def of(kind: type, actions: list) -> object:
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


@given(st.integers(1, 40), st.sets(st.integers(1, 40)), st.integers(0, 40))
def test_a_prefix_can_be_used_as_far_as_its_deepest_snapshot(count: int, depths: set[int], found: int) -> None:
    states = States(PARTS, 4, BlockPool(8))
    held = {state_names(NAMES[depth - 1], PARTS)[-1] for depth in depths}
    usable = states.usable(NAMES[:count], min(found, count), held.__contains__)
    assert usable == max((depth for depth in depths if depth <= min(found, count)), default=0)


@pytest.mark.parametrize(
    ("length", "computed", "found", "positions"),
    [
        (41, 0, 0, [(40, 10)]),
        (40, 0, 0, [(36, 9)]),  # one token is always computed: the same prompt can use this one
        (3, 0, 0, []),
        (41, 40, 10, []),
        (41, 0, 6, [(24, 6), (40, 10)]),  # another prompt parted from this one after 6 blocks
        (41, 24, 6, [(40, 10)]),
        (41, 0, 10, [(40, 10)]),
    ],
)
def test_where_snapshots_are_taken(
    length: int, computed: int, found: int, positions: list[tuple[int, int]]
) -> None:
    states = States(PARTS, 4, BlockPool(8))
    sequence, prefix = Sequence(A, length, 99, NAMES[: length // 4]), CachedPrefix(computed, found)
    assert states.positions(sequence, prefix) == positions
    sequence.hands_over = True
    assert states.positions(sequence, prefix) == [*positions, (length, 0)]


def test_kv_without_a_state_is_computed_again_and_leaves_one_at_the_branch() -> None:
    scheduler = node()
    scheduler.on(arrives(A, 41))
    other = (*NAMES[:6], *range(100, 110))
    scheduler.on(arrives(B, 41, other))
    run = of(Run, scheduler.on(Stepped(1)))
    (piece,) = run.chunks
    assert (piece.start, [position for position, _ in piece.snapshots]) == (0, [24, 40])
    scheduler.on(arrives(C, 41, (*NAMES[:6], *range(200, 210))))
    admitted = of(Admitted, scheduler.on(Stepped(1)))
    assert (admitted.request, admitted.cached_tokens) == (C, 24)
    scheduler.check()


def test_who_leaves_takes_its_state_along_in_blocks_that_are_free_afterwards() -> None:
    scheduler = node()
    run = of(Run, scheduler.on(arrives(A, 42, hands_over=True)))
    assert [position for position, _ in run.chunks[0].snapshots] == [40, 42]
    scheduler.on(Stepped(1))
    assert scheduler.num_transfer == 1 + PARTS  # the unfinished block and the state
    scheduler.on(forgotten(A))
    assert (scheduler.num_transfer, scheduler.pool.cached) == (0, 10 + PARTS)
    scheduler.check()


def test_who_comes_goes_on_from_the_state_it_was_sent_with() -> None:
    scheduler = node()
    reserved = of(Reserved, scheduler.on(expected(A, 9, 20)))
    assert (len(reserved.blocks), len(reserved.state)) == (3, PARTS)
    assert scheduler.num_transfer == 3 + PARTS
    run = of(Run, scheduler.on(imported(A)))
    assert (run.pieces[0].start, run.pieces[0].restore) == (9, reserved.state)
    assert scheduler.num_transfer == PARTS
    available = scheduler.pool.available
    run = of(Run, scheduler.on(Stepped(1)))
    assert run.pieces[0].restore == ()
    assert (scheduler.num_transfer, scheduler.pool.available) == (0, available + PARTS)
    scheduler.check()


def test_what_is_on_disk_of_a_state_is_counted() -> None:
    tiers = TierCache(6, 20)
    scheduler = node(tiers)
    scheduler.on(offered(chain(10)))
    admitted = of(Admitted, scheduler.on(arrives(A, 41)))
    assert (admitted.cached_tokens, admitted.disk_blocks) == (40, 10 + PARTS - 6)


@pytest.mark.parametrize(("stop", "cached"), [(10, 40), (9, 0)])
def test_a_fetch_counts_with_its_state_or_not_at_all(stop: int, cached: int) -> None:
    """Admitted while it arrives, a prompt counts on all of it; afterwards on what came."""
    scheduler = node(TierCache(40))
    fetch = {"num_cached": 10, "fetch": FetchOrder(NodeId("peer"), 0, 10)}
    scheduler.on(arrives(B, 4))
    scheduler.on(arrives(A, 41, **fetch))
    actions = scheduler.on(fetched(A, stop))
    stored = of(BlocksStored, actions)
    assert stored.names == (chain(10) if stop == 10 else NAMES[:9])
    admitted = of(Admitted, scheduler.on(Stepped(1)))
    assert admitted.cached_tokens == cached


def test_recovered_states_are_usable() -> None:
    tiers = TierCache(40, 40)
    scheduler = node(tiers)
    assert of(BlocksStored, scheduler.on(recovered((chain(10),)))).tier is Tier.DISK
    assert of(Admitted, scheduler.on(arrives(A, 41))).cached_tokens == 40


def test_a_node_of_another_role_may_have_more_live_states() -> None:
    scheduler = node()
    scheduler.change(replace(scheduler.limits, max_sequences=6, token_budget=1000))
    for request in "abcdef":
        scheduler.on(arrives(RequestId(request), 9))
    run = of(Run, scheduler.on(Stepped(1)))
    assert {piece.slot for piece in run.pieces} == set(range(6)), "the lowest first, for the engine has as many"
    scheduler.check()
