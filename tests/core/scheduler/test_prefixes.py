"""What is computed once and used again: in the pool, and in tiers beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import BlocksEvicted, BlocksStored, FetchOrder
from isthmus.core.scheduler import (
    Admitted,
    Adopt,
    BlockPool,
    Demote,
    Drop,
    Limits,
    Run,
    Save,
    Scheduler,
    Sequence,
    Stepped,
    TierCache,
)
from isthmus.core.scheduler.memory import Memory
from isthmus.core.scheduler.prefixes import PoolPrefixes, TierPrefixes
from isthmus.core.scheduler.sequence import Prefix
from isthmus.core.types import BlockName, NodeId, RequestId, Tier

from .told import Fact, Told, arrived, lost, missing, offered, recovered

SIZE, HERE = 4, NodeId("n")
NAMES = tuple(range(40))


def prompt(length: int, names: tuple = NAMES, request: str = "a") -> Sequence:
    return Sequence(RequestId(request), length, length + 9, names[: length // SIZE])


def engine(state_blocks: int = 0) -> Memory:
    return Memory(Limits(100, SIZE, state_blocks=state_blocks), BlockPool(100))


@given(st.integers(1, 60), st.lists(st.integers(1, 59), max_size=3), st.integers(1, 80))
def test_the_pool_names_full_blocks_chunk_by_chunk_and_finds_all_but_the_last_token(
    length: int, cuts: list[int], other: int
) -> None:
    memory = engine()
    prefixes, first = PoolPrefixes(memory, SIZE), prompt(length)
    assert memory.admit(first, Prefix(), 0)
    named: tuple = ()
    for cut in [*sorted({cut for cut in cuts if cut < length}), length]:
        first.computed = cut
        named += prefixes.computed(first, cut == length, [])
        assert named == NAMES[: cut // SIZE]
    again = prompt(other, request="b")
    found = prefixes.find(again, [first])
    assert found is not None
    assert found.num_tokens == SIZE * min(length // SIZE, (other - 1) // SIZE)
    assert found.blocks == first.blocks[: found.num_tokens // SIZE]
    assert memory.admit(again, found, 0) and again.named == len(found.blocks)
    memory.check([first, again])


def test_a_computed_prompt_is_saved_once_and_what_it_displaces_is_dropped_first() -> None:
    memory, tiers = engine(), TierCache(4)
    prefixes = TierPrefixes(tiers, memory, SIZE, HERE)
    prefixes.keep(tuple(range(100, 103)), [], RequestId("fetched"))
    first = prompt(12)
    assert memory.admit(first, Prefix(), 0)
    actions: list = []
    first.computed = 8
    assert prefixes.computed(first, False, actions) == () and not actions
    first.computed = 12
    prefixes.computed(first, True, actions)
    drop, evicted, save, stored = actions
    assert drop == Drop((102, 101)) and evicted == BlocksEvicted(HERE, (102, 101))
    assert save == Save(RequestId("a"), NAMES[:3], None, first.blocks)
    assert stored == BlocksStored(HERE, NAMES[:3])
    prefixes.keep(first.names, actions := [], first.request, first.blocks)
    assert actions == [], "it is saved already"


def test_what_a_prompt_was_sent_here_for_stays_until_it_has_it() -> None:
    memory, tiers = engine(), TierCache(4)
    prefixes = TierPrefixes(tiers, memory, SIZE, HERE)
    prefixes.keep(NAMES[:4], [], RequestId("fetched"))
    sequence = prompt(20)
    sequence.num_cached = 3
    prefixes.arrive(sequence)
    assert (sequence.num_pinned, tiers.num_pinned) == (3, 3)
    prefixes.keep(tuple(range(100, 104)), [], RequestId("fetched"))
    assert tiers.match(NAMES) == (3, 0) and prefixes.is_here(sequence)
    assert prefixes.find(sequence, []) == Prefix(12, 3, loads=True)
    prefixes.unpin(sequence)
    assert tiers.num_pinned == 0


@pytest.mark.parametrize(("start", "found"), [(0, 4), (2, 4), (3, 2)])
def test_a_fetch_under_way_counts_if_what_it_follows_is_here(start: int, found: int) -> None:
    prefixes = TierPrefixes(TierCache(20), engine(), SIZE, HERE)
    prefixes.keep(NAMES[:2], [], RequestId("fetched"))
    sequence = prompt(20)
    sequence.fetch = FetchOrder(NodeId("peer"), start, 4)
    assert prefixes.find(sequence, []) == Prefix(found * SIZE, found, loads=True)


@pytest.mark.parametrize("tokens", [16, 17])
def test_a_state_at_the_end_of_a_prompt_would_leave_nothing_to_compute(tokens: int) -> None:
    """KV alone is of use up to the token before; so a fetch of the whole prompt counts only without a state."""
    for state_blocks, expected in ((0, min(16, tokens - 1)), (2, 16 if tokens > 16 else 0)):
        prefixes = TierPrefixes(TierCache(20), engine(state_blocks), SIZE, HERE)
        sequence = prompt(tokens)
        sequence.fetch = FetchOrder(NodeId("peer"), 0, 4)
        found = prefixes.find(sequence, [])
        assert found is not None and (found.num_tokens, found.loads) == (expected, expected > 0)


def test_who_waits_for_another_waits_only_for_its_own_blocks() -> None:
    prefixes = TierPrefixes(TierCache(20), engine(), SIZE, HERE)
    sequence, other = prompt(20, request="b"), prompt(20, tuple(range(100, 140)))
    sequence.num_cached = 2
    assert prefixes.find(sequence, [other]) == Prefix()
    assert prefixes.find(sequence, [other, prompt(20)]) is None


TEN = NAMES[:10]
SELF = NodeId("")
A, B = RequestId("a"), RequestId("b")


def scheduler(dram: int = 20, ssd: int = 20, token_budget: int = 16) -> Scheduler:
    limits = Limits(num_blocks=64, block_size=4, token_budget=token_budget, max_sequences=8)
    return Told(limits, TierCache(dram, ssd), BlockPool(64))


def arrives(request: RequestId, num_tokens: int, num_cached: int = 0) -> Fact:
    return arrived(
        request, num_tokens, num_tokens + 5, TEN[: num_tokens // 4], hands_over=True, num_cached=num_cached
    )


def on_disk(names: tuple[BlockName, ...]) -> list[object]:
    return [BlocksStored(SELF, names, Tier.DISK)]


def only_run(actions: list[object]) -> Run:
    (run,) = [action for action in actions if isinstance(action, Run)]
    return run


def test_what_cannot_be_loaded_is_computed() -> None:
    node = scheduler(token_budget=40)
    node.on(offered(TEN))
    actions = node.on(arrives(A, 41, num_cached=10))
    assert Admitted(A, 40, tuple(range(11))) in actions
    assert only_run(actions).chunks[0].start == 40
    assert node.on(missing(A, 3)) == []
    run = only_run(node.on(Stepped(0)))
    assert (run.chunks[0].start, run.chunks[0].count) == (12, 29)
    node.check()


def test_a_request_that_is_gone_misses_nothing() -> None:
    assert scheduler().on(missing(A, 3)) == []


def test_what_is_new_of_a_fetch_is_adopted_and_what_dram_has_no_room_for_goes_to_the_ssd() -> None:
    node, fetch = scheduler(dram=4, ssd=2), RequestId("fetched")
    assert node.on(offered(TEN[:2])) == [Adopt(fetch, TEN[:2]), BlocksStored(SELF, TEN[:2])]
    assert node.on(offered(TEN[:7])) == [
        Adopt(fetch, TEN[2:6]),
        BlocksStored(SELF, TEN[2:4]),
        Demote(TEN[4:6]),
        *on_disk(TEN[4:6]),
    ]
    assert node.on(offered(TEN[:6])) == []


def test_lost_blocks_take_along_what_follows_them() -> None:
    node = scheduler()
    node.on(offered(TEN))
    assert node.on(lost(TEN[4:5])) == [Drop(TEN[4:]), BlocksEvicted(SELF, TEN[4:])]
    assert node.on(lost(TEN[4:5])) == []


def test_what_the_disk_still_has_is_found_again() -> None:
    node = scheduler(ssd=8)
    other = (*TEN[:2], 100, 101)
    assert node.on(recovered((TEN[:6], other))) == [*on_disk(TEN[:6]), *on_disk(other[2:])]
    actions = node.on(arrives(A, 40, num_cached=6))
    (admitted,) = [action for action in actions if isinstance(action, Admitted)]
    assert (admitted.cached_tokens, admitted.disk_blocks) == (24, 6)
    node.tiers.check()  # type: ignore[union-attr]


def test_of_more_than_the_disk_may_hold_now_the_tail_is_left_out() -> None:
    node = scheduler(ssd=4)
    assert node.on(recovered((TEN,))) == [*on_disk(TEN[:4]), Drop(TEN[4:])]
    node.tiers.check()  # type: ignore[union-attr]


def test_two_prompts_with_one_prefix_are_not_both_computed() -> None:
    """The second would fit into what the first leaves of the budget; one iteration later its prefix is there."""
    node = scheduler(token_budget=44)
    run = only_run(node.on(arrives(A, 41)))
    assert [piece.request for piece in run.chunks] == [A]
    assert node.on(arrives(B, 41, num_cached=10)) == []
    actions = node.on(Stepped(1))
    (admitted,) = [action for action in actions if isinstance(action, Admitted)]
    assert (admitted.request, admitted.cached_tokens) == (B, 40)
    node.check()


def test_a_prompt_sent_here_for_nothing_in_particular_waits_for_nobody() -> None:
    node = scheduler(token_budget=100)
    node.on(arrives(RequestId("busy"), 8))
    node.on(arrives(A, 41))
    node.on(arrives(B, 41))
    run = only_run(node.on(Stepped(1)))
    assert [piece.request for piece in run.chunks] == [A, B]


def test_what_a_prompt_was_sent_here_for_stays_while_it_waits() -> None:
    """From its arrival on, not from when it is admitted."""
    node = scheduler(dram=4, ssd=0)
    node.on(offered(TEN[:3]))
    node.on(arrived(RequestId("busy"), 16, 21))
    node.on(arrives(A, 41, num_cached=3))
    node.on(offered((100, 101, 102, 103)))
    assert node.tiers is not None and node.tiers.match(TEN) == (3, 0)
