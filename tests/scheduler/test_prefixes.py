"""What is computed once and used again, without a scheduler: in the pool, and in tiers beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.attempts import BlocksEvicted, BlocksStored, FetchOrder
from isthmus.scheduler import BlockPool, Drop, Limits, Save, Sequence, TierCache
from isthmus.scheduler.memory import Memory
from isthmus.scheduler.prefixes import PoolPrefixes, TierPrefixes
from isthmus.scheduler.sequence import Prefix
from isthmus.types import NodeId, RequestId

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
