"""Prompts that are assembled: memory for their donors, one piece in one iteration, what is left of what is packed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.attempts import Assembly, BlocksStored, Donor
from isthmus.core.reuse import CACHEBLEND, SEMANTIC, Packing, Selection, pack
from isthmus.core.scheduler import LoadBlocks, Run, SaveBlocks, SchedulerLimits, Sequence, Stepped, TierCache
from isthmus.core.types import RequestId

from .driver import Told, arrived

SIZE, LAYERS = 4, 3
A, B, C, D = (RequestId(name) for name in "abcd")
NOTHING = Selection("nothing", full_layers=0)
"""Only the prompt's end is computed, so it weighs little."""


def limits(num_blocks: int, **about: int) -> SchedulerLimits:
    return SchedulerLimits(num_blocks, SIZE, **{"token_budget": 64, "max_steps": 1, **about})


def assembly(
    num_scratch: int, num_reused: int = 0, selection: Selection = CACHEBLEND, packing: Packing | None = None
) -> Assembly:
    donor = Donor(RequestId("x"), tuple(range(900, 900 + num_scratch + 1)), 1)
    return Assembly(selection, (donor,), (), num_reused, LAYERS, packing)


def run_of(actions: list[Any]) -> Run:
    [run] = [action for action in actions if isinstance(action, Run)]
    return run


def pieces(run: Run) -> list[tuple[RequestId, int, int]]:
    return [(piece.request, piece.start, piece.count) for piece in run.chunks]


# Packing.


@given(st.integers(1, 400), st.integers(1, 8), st.integers(0, 20), st.sampled_from([SEMANTIC, CACHEBLEND]))
def test_what_was_packed_keeps_what_is_packed_and_what_follows(
    num_tokens: int, num_layers: int, num_donated: int, selection: Selection
) -> None:
    """Nothing is lost or had twice; the count of all blocks, the dropped among them, is the prompt's as before."""
    sequence = Sequence(A, num_tokens, num_tokens + 1)
    sequence.assembly = assembly(
        num_donated, selection=selection, packing=pack(selection, num_tokens, num_layers, SIZE)
    )
    packing, whole = sequence.assembly.packing, -(-num_tokens // SIZE)
    assert sequence.num_scratch == max(num_donated, packing.num_packed if packing else 0)
    sequence.blocks = blocks = tuple(range(whole))
    sequence.scratch = scratch = tuple(range(whole, whole + sequence.num_scratch))
    gone = sequence.assembled()
    assert sorted(gone + sequence.blocks) == [*range(whole + len(scratch))]
    assert sequence.num_absent + len(sequence.blocks) == whole and not sequence.scratch
    if packing is None:
        assert sequence.blocks == blocks and gone == scratch and not sequence.is_bound
        return
    assert sequence.blocks == scratch[: packing.num_packed] + blocks[packing.num_blocks :]
    assert len(sequence.blocks) == packing.num_packed + whole - packing.num_blocks < whole
    assert sequence.num_absent == packing.num_dropped and sequence.is_bound
    sequence.check()


# Memory.


@settings(max_examples=150)
@given(st.integers(0, 1 << 32), st.integers(12, 30), st.sampled_from([1, 1, 3]))
def test_memory_is_never_promised_twice_and_everybody_comes_through(
    seed: int, num_blocks: int, partial_prefills: int
) -> None:
    """Whoever hands_over is free as soon as its prompt is computed; the others decode."""
    drawn = random.Random(seed)
    scheduler = Told(limits(num_blocks, token_budget=16, partial_prefills=partial_prefills, max_sequences=4))
    lengths: dict[RequestId, int] = {}
    waiting = [RequestId(f"r{number}") for number in range(12)]
    run: Run | None = None
    for _ in range(4000):
        if waiting and (run is None or drawn.random() < 0.3):
            request = waiting.pop()
            num_tokens = drawn.randint(1, num_blocks * 2)
            lengths[request] = min(num_blocks * SIZE, num_tokens + drawn.randint(1, 20))
            about: dict[str, Any] = {"hands_over": drawn.random() < 0.3}
            whole = -(-num_tokens // SIZE)
            if drawn.random() < 0.6:
                packing = pack(SEMANTIC, num_tokens, LAYERS, SIZE)
                most = num_blocks - whole
                about["assembly"] = assembly(
                    drawn.randint(0, most), drawn.randint(0, num_tokens), SEMANTIC, packing
                )
                if packing is not None and packing.num_packed > most:
                    del about["assembly"]
            actions = scheduler.on(arrived(request, num_tokens, lengths[request], **about))
        elif run is not None:
            ended = []
            for piece in run.pieces:
                length = piece.start + piece.count + 1
                if piece.samples and (
                    length >= lengths[piece.request] or scheduler.of(piece.request).hands_over
                ):
                    ended.append(piece.request)
            run = None
            actions = scheduler.on(Stepped(1, tuple(ended)))
        else:
            break
        scheduler.check()
        scheduler.dropped.clear()  # pre-empted after it was packed
        run = next((action for action in actions if isinstance(action, Run)), run)
    assert not waiting and scheduler.run is None and not scheduler.num_waiting + scheduler.num_running
    assert scheduler.pool.available == num_blocks


def test_who_has_no_room_for_donors_yet_waits() -> None:
    scheduler = Told(limits(16, token_budget=16))
    scheduler.on(arrived(A, 30, 32, hands_over=True))
    scheduler.on(arrived(B, 8, 9, assembly=assembly(8), hands_over=True))
    assert scheduler.num_wanted == 2 + 8, "what it needs for donors is said"
    actions = scheduler.on(Stepped(1))
    assert pieces(run_of(actions)) == [(A, 16, 14)], "eight blocks are enough for B, and not for its donor"
    [load] = [action for action in scheduler.on(Stepped(1, (A,))) if isinstance(action, LoadBlocks)]
    assert (load.key, load.names, len(load.blocks), load.num_tokens) == (B, tuple(range(901, 909)), 8, 0)
    [piece] = scheduler.run.chunks if scheduler.run is not None else ()
    assert piece.scratch == load.blocks and not set(piece.scratch) & set(piece.blocks)
    scheduler.on(Stepped(1, (B,)))
    assert scheduler.pool.available == 16


@pytest.mark.parametrize(("num_blocks", "passes"), [(14, True), (13, False)])
def test_who_waits_for_donors_is_passed_by_where_that_leaves_it_enough(num_blocks: int, passes: bool) -> None:
    """Its decode node has memory for it already: were it overtaken without regard, both would wait for ever."""
    scheduler = Told(limits(num_blocks))
    assert scheduler.on(arrived(A, 8, 9, hands_over=True, assembly=assembly(6), awaits=True)) == []
    actions = scheduler.on(arrived(B, 24, 25, hands_over=True))
    assert bool(actions) == passes
    a = scheduler.of(A)
    a.awaits = False
    if passes:
        assert pieces(run_of(actions)) == [(B, 0, 24)]
        actions = scheduler.on(Stepped(1))
    else:
        scheduler.plan(actions)
    assert pieces(run_of(actions))[0] == (A, 0, 8), "there is memory for it while the other still leaves"


@pytest.mark.parametrize(("donated", "overtakes"), [(1, True), (3, False)])
def test_who_overtakes_leaves_room_for_donors_too(donated: int, overtakes: bool) -> None:
    scheduler = Told(limits(12, token_budget=4, partial_prefills=4))
    scheduler.on(arrived(A, 16, 17))
    scheduler.on(arrived(B, 16, 17, assembly=assembly(donated)))
    scheduler.on(arrived(C, 2, 3))
    requests = [piece.request for piece in run_of(scheduler.on(Stepped(1))).chunks]
    assert (C in requests) == overtakes


def test_of_a_prefix_that_is_not_all_there_only_what_is_keeps_its_name() -> None:
    """The rest is computed with what is assembled, if it is computed at all."""
    tiers = TierCache(30)
    tiers.put((1, 2))
    tiers.put(tuple(range(900, 904)))
    scheduler = Told(limits(30), tiers)
    actions = scheduler.on(arrived(A, 40, 41, (1, 2, 3, 4), num_cached=4, assembly=assembly(3), is_exact=False))
    assert pieces(run_of(actions)) == [(A, 8, 32)]
    answer = (1, 2, 3, 4, *range(50, 56))
    actions = scheduler.on(Stepped(1, (A,), (answer,)))
    assert not [action for action in actions if isinstance(action, SaveBlocks | BlocksStored)]
    assert not tiers.num_pinned and tiers.match(answer)[0] == 2


# The budget.


@pytest.mark.parametrize(
    ("about", "prompts", "chunks"),
    [
        # In one piece however long, beside decodes, and alone where it takes all of the budget.
        ({"token_budget": 16}, [(B, 100, 5), (C, 8, 0)], [[(B, 0, 100)], [(C, 0, 8)]]),
        # It takes of the budget what it computes: of 100 tokens 68 have a donor's KV, so 32 weigh 32.
        ({"token_budget": 46}, [(C, 13, 0), (B, 100, -5)], [[(C, 0, 13), (B, 0, 100)]]),
        ({"token_budget": 45}, [(C, 13, 0), (B, 100, -5)], [[(C, 0, 13)], [(B, 0, 100)]]),
        # Not cut, it has no use for what shorter ones would leave it of an iteration.
        ({"token_budget": 32, "partial_prefills": 3}, [(B, 100, 5), (C, 4, 0), (D, 4, 0)], [[(B, 0, 100)]]),
        # It overtakes nobody.
        (
            {"token_budget": 32, "partial_prefills": 3},
            [(C, 500, 0), (B, 100, 5)],
            [[(C, 0, 31)], [(C, 31, 31)]],
        ),
    ],
)
def test_what_is_assembled_is_computed_in_one_piece_beside_decodes(
    about: dict[str, int], prompts: list[tuple[RequestId, int, int]], chunks: list[list[tuple]]
) -> None:
    scheduler = Told(limits(400, **about))
    scheduler.on(arrived(A, 1, 40))
    for request, num_tokens, num_scratch in prompts:
        made = assembly(num_scratch) if num_scratch > 0 else assembly(5, 100, NOTHING) if num_scratch else None
        scheduler.on(arrived(request, num_tokens, num_tokens + 1, assembly=made))
    for expected in chunks:
        run = run_of(scheduler.on(Stepped(1)))
        assert pieces(run) == expected
