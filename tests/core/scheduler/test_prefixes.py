"""What is computed once and used again, in tiers beside the memory: what the driver does not judge."""

from __future__ import annotations

from isthmus.core.attempts import BlocksStored
from isthmus.core.scheduler import (
    Admitted,
    AdoptBlocks,
    BlockPool,
    Demote,
    DropBlocks,
    Run,
    SchedulerLimits,
    Stepped,
    TierCache,
)
from isthmus.core.types import BlockName, NodeId, RequestId, Tier

from .told import Fact, Told, arrived, missing, offered, recovered

TEN = tuple(range(10))
SELF = NodeId("")
A, B = RequestId("a"), RequestId("b")


def scheduler(dram: int = 20, ssd: int = 20, token_budget: int = 16) -> Told:
    limits = SchedulerLimits(num_blocks=64, block_size=4, token_budget=token_budget, max_sequences=8)
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


def test_a_request_that_is_gone_misses_nothing() -> None:
    assert scheduler().on(missing(A, 3)) == []


def test_what_is_new_of_a_fetch_is_adopted_and_what_dram_has_no_room_for_goes_to_the_ssd() -> None:
    node, fetch = scheduler(dram=4, ssd=2), RequestId("fetched")
    assert node.on(offered(TEN[:2])) == [AdoptBlocks(fetch, TEN[:2]), BlocksStored(SELF, TEN[:2])]
    assert node.on(offered(TEN[:7])) == [
        AdoptBlocks(fetch, TEN[2:6]),
        BlocksStored(SELF, TEN[2:4]),
        Demote(TEN[4:6]),
        *on_disk(TEN[4:6]),
    ]
    assert node.on(offered(TEN[:6])) == []


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
    assert node.on(recovered((TEN,))) == [*on_disk(TEN[:4]), DropBlocks(TEN[4:])]
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
