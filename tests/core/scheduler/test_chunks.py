"""How prompts are cut: chunks that keep the time between tokens, and prompts that share iterations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.cost import (
    Analytic,
    NodeCost,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.scheduler import Piece, Run, SchedulerLimits, Stepped, TbtTarget
from isthmus.core.scheduler.chunks import TimedBudget
from isthmus.core.types import RequestId

from .test_scheduler import CURVE, limits, run_of
from .told import Fact, Told, arrived

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
H100 = hardware_named("h100")
COSTS: dict[str, NodeCost] = {
    "curve": compile_cost(CURVE),
    "analytic": compile_cost(Analytic(facts_of(LLAMA), H100, engine_coefficients("vllm", H100))),
}


def piece(start: int, count: int) -> Piece:
    return Piece(A, start, count, (), False)


# One iteration.


@given(st.integers(0, 1000), st.sampled_from([1, 2, 16, 128]))
def test_the_minimum_ends_a_tile_and_is_half_a_tile_at_least(num_decodes: int, tile: int) -> None:
    found = TbtTarget(COSTS["curve"].step_ps, 1, tile).minimum(num_decodes)
    assert (num_decodes + found) % tile == 0
    assert max(1, tile // 2) <= found < tile + max(1, tile // 2)


@given(
    st.sampled_from(sorted(COSTS)),
    st.integers(1, 4000),  # target in ms
    st.integers(1, 4096),
    st.integers(1, 64),
    st.integers(0, 5000),
    st.sampled_from([1, 16, 128]),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=4),
)
def test_more_than_the_minimum_meets_the_target_and_one_more_tile_would_not(
    name: str, target_ms: int, limit: int, num_decodes: int, context: int, tile: int, prompts: list
) -> None:
    cost, limit_ps = COSTS[name], target_ms * 10**9
    budget = TimedBudget(TbtTarget(cost.step_ps, limit_ps, tile), limit, num_decodes, context)

    def predicted(more: tuple[int, int]) -> int:
        sizes = [(chunk.count, chunk.start) for chunk in budget.chunks]
        return cost.step_ps([*sizes, more], num_decodes, context)

    for start, left in prompts:
        count = budget.fit(start, left)
        assert 0 <= count <= left and budget.taken + count <= limit
        assert count > 0 or budget.taken > 0, "the first prompt always gets something"
        if budget.taken + count > budget.minimum:
            assert not count or predicted((count, start)) <= limit_ps
        more = count + tile
        if more <= left and budget.taken + more <= limit:
            assert predicted((more, start)) > limit_ps
        if count:
            budget.take(piece(start, count))
        if count < left:
            rows = num_decodes + budget.taken
            assert count < tile or rows % tile == 0, "a cut chunk that is long enough ends with a tile"
            return


def test_a_chunk_is_shorter_with_more_decodes_and_far_into_a_prompt() -> None:
    target = TbtTarget(COSTS["analytic"].step_ps, 30 * 10**9)

    def fits(num_decodes: int, context: int, start: int) -> int:
        return TimedBudget(target, 8192, num_decodes, context).fit(start, 100_000)

    assert fits(1, 1000, 0) > fits(40, 40_000, 0) > fits(40, 200_000, 0) >= target.minimum(40)
    assert fits(1, 1000, 0) > fits(1, 1000, 30_000)
    assert fits(1, 1000, 0) % 128 == 127  # with the decode's row it is whole tiles


# The scheduler with a target.


def test_decodes_that_alone_exceed_the_target_leave_prompts_the_minimum() -> None:
    target = TbtTarget(COSTS["analytic"].step_ps, 1)
    scheduler = Told(limits(512, 16, token_budget=4096), target=target)
    scheduler.on(arrived(A, 16, 100))
    scheduler.on(Stepped(1))
    scheduler.on(arrived(B, 5000, 5001))
    run = run_of(scheduler.on(Stepped(1)))
    assert run.num_decodes == 1
    assert [piece.count for piece in run.chunks] == [target.minimum(1)] == [127]


# Several prompts at once.


def partial_limits(partial: int, budget: int, **others: int) -> SchedulerLimits:
    return limits(1 << 13, 16, token_budget=budget, max_steps=1, partial_prefills=partial, **others)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    scheduler = Told(partial_limits(4, 100))
    run = run_of(scheduler.on(arrived(A, 1000, 1001)))
    scheduler.on(arrived(B, 40, 41))
    scheduler.on(arrived(C, 30, 31))
    assert [(piece.request, piece.count) for piece in run.chunks] == [(A, 100)]
    run = run_of(scheduler.on(Stepped(1)))
    assert [(piece.request, piece.count, piece.samples) for piece in run.chunks] == [
        (C, 30, True),
        (B, 20, False),
        (A, 50, False),
    ]


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400)), min_size=1, max_size=20),
    st.integers(2, 5),
    st.sampled_from([8, 50, 256]),
)
def test_no_prompt_waits_for_more_than_twice_the_tokens_of_arrival_order(
    arrivals: list[tuple[int, int]], partial: int, budget: int
) -> None:
    scheduler = Told(partial_limits(partial, budget, max_sequences=1000))
    left: dict[RequestId, int] = {}
    until: dict[RequestId, int] = {}
    out: list[tuple[Run, int]] = []  # the run, and how many tokens were left when it was formed
    computed = step = 0

    def tell(event: Fact) -> None:
        runs = [action for action in scheduler.on(event) if isinstance(action, Run)]
        out.extend((run, sum(left.values())) for run in runs)

    arrivals = sorted(arrivals)
    while len(until) < len(arrivals) or out:
        for number in range(len(until), len(arrivals)):
            when, length = arrivals[number]
            if when > step:
                break
            request = RequestId(str(number))
            left[request] = length
            until[request] = computed + 2 * sum(left.values()) + budget  # one iteration is under way
            tell(arrived(request, length, length + 1))
        step += 1
        if not out:
            continue
        run, known = out.pop()
        for chunk in run.chunks:
            assert chunk.start == arrivals[int(chunk.request)][1] - left[chunk.request]
            left[chunk.request] -= chunk.count
        taken = sum(chunk.count for chunk in run.chunks)
        assert taken == min(budget, known), "budget is left over"
        begun = [request for request, rest in left.items() if 0 < rest < arrivals[int(request)][1]]
        assert len(begun) <= partial, "too many prompts are computed in parts"
        computed += taken
        ended = tuple(chunk.request for chunk in run.chunks if chunk.samples)
        for request in ended:
            assert left.pop(request) == 0
            assert computed <= until[request]
        tell(Stepped(1, ended))
    assert not left


def test_who_overtakes_leaves_memory_for_those_it_overtakes() -> None:
    scheduler = Told(limits(10, 4, token_budget=4, partial_prefills=4, max_steps=1))
    scheduler.on(arrived(A, 16, 17))
    scheduler.on(arrived(B, 24, 25))
    scheduler.on(arrived(C, 4, 5))
    for _ in range(2):
        run = run_of(scheduler.on(Stepped(1)))
        assert [piece.request for piece in run.chunks] == [A], "C would take what B waits for"


def test_who_is_longer_overtakes_nobody() -> None:
    scheduler = Told(partial_limits(4, 100))
    scheduler.on(arrived(A, 1000, 1001))
    scheduler.on(arrived(B, 1000, 1001))
    scheduler.on(arrived(C, 2000, 2001))
    assert [(piece.request, piece.count) for piece in run_of(scheduler.on(Stepped(1))).chunks] == [(A, 100)]
    assert scheduler.num_waiting == 2, "nor does it take a place"


@pytest.mark.parametrize(("places", "overtakes"), [(2, False), (3, True)])
def test_who_overtakes_leaves_a_place_for_those_it_overtakes(places: int, overtakes: bool) -> None:
    scheduler = Told(partial_limits(2, 100, max_sequences=places))
    for name, num_tokens in (("a", 5000), ("b", 4000), ("c", 3000), ("d", 10)):
        scheduler.on(arrived(RequestId(name), num_tokens, num_tokens + 1))
    requests = [piece.request for piece in run_of(scheduler.on(Stepped(1))).chunks]
    assert sorted(requests) == (["a", "b", "d"] if overtakes else ["a", "b"])


@pytest.mark.parametrize("partial", [1, 4])
def test_without_a_bound_every_prompt_is_computed_whole_beside_the_decodes(partial: int) -> None:
    """Chunks without end: iteration-level batching as Orca's."""
    scheduler = Told(limits(1 << 16, 16, token_budget=1 << 30, max_steps=1, partial_prefills=partial))
    scheduler.on(arrived(A, 50, 90))
    scheduler.on(arrived(B, 9000, 9001))
    scheduler.on(arrived(C, 70, 71))
    run = run_of(scheduler.on(Stepped(1)))
    assert run.num_decodes == 1
    assert [(piece.request, piece.start, piece.count, piece.samples) for piece in run.chunks] == [
        (B, 0, 9000, True),
        (C, 0, 70, True),
    ]
