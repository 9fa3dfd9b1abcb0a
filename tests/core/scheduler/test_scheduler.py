"""The driver judges whatever a scheduler answers; beside it stands what the driver does not ask for."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.attempts import BlocksStored, FetchOrder
from isthmus.core.cost import (
    Analytic,
    Curve,
    NodeCost,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.scheduler import (
    Admitted,
    BlockPool,
    Piece,
    Preempted,
    Run,
    SchedulerLimits,
    Sequence,
    Stepped,
    TbtTarget,
    TierCache,
)
from isthmus.core.scheduler.chunks import TimedBudget
from isthmus.core.types import BlockName, NodeId, RequestId

from .driver import (
    TENANTS,
    Fact,
    Node,
    Reserved,
    State,
    Told,
    arrived,
    expected,
    fetched,
    imported,
    recovered,
)

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
NAMES: tuple[BlockName, ...] = tuple(range(40))
PARTS = 2


def limits(num_blocks: int = 64, block_size: int = 4, **others: Any) -> SchedulerLimits:
    return SchedulerLimits(num_blocks=num_blocks, block_size=block_size, **others)


def run_of(actions: list[object]) -> Run:
    assert isinstance(actions[-1], Run), actions
    return actions[-1]


def chunks_of(actions: list[object]) -> list[tuple[RequestId, int, int]]:
    return [(piece.request, piece.start, piece.count) for piece in run_of(actions).chunks]


def admitted_of(actions: list[object]) -> list[tuple[RequestId, int]]:
    return [(each.request, each.cached_tokens) for each in actions if isinstance(each, Admitted)]


# What holds whatever happens.

KINDS = [*["step"] * 12, *["arrive", "depart", "expect", "import", "release", "saved", "fetched"] * 2]
KINDS += ["stop", "cancel", "offer", "lose"]
# The family (its prompts begin alike), how much of a prompt is the family's, and its own; answer, steps, whose turn.
NUMBERS = (range(3), range(1, 41), range(13), range(1, 41))
OPS = st.lists(
    st.tuples(
        st.sampled_from([*sorted(set(KINDS)), "arrive", "depart", "step", "step", "step", "saved", "fetched"]),
        *map(st.sampled_from, NUMBERS),
    ),
    max_size=60,
)
CURVE = Curve(
    kv_token_bytes=1, num_layers=1, prefill_fixed_s=0.5, prefill_token_s=0.01, prefill_pair_s=1e-3,
    decode_fixed_s=0.4, decode_sequence_s=0.05, decode_context_s=1e-3,
)  # fmt: skip
STEP_PS = compile_cost(CURVE).step_ps
LIMITS: dict[str, Any] = {
    "num_blocks": range(1, 25),
    "state_blocks": [0, 0, 1, 3],
    "block_size": [1, 2, 4, 16],
    "token_budget": [1, 2, 7, 32, 512],
    "max_sequences": range(1, 9),
    "max_steps": [1, 3, 16],
    "max_chunks": [1, 3, 16],
    "partial_prefills": [1, 1, 3],
    "prompt_batch": [1, 30, 1 << 30, 1 << 30],
    "order": ["fcfs", "fcfs", "promise"],
}
ABOUT: dict[str, Any] = {
    "tiers": [None, None, (8, 0), (6, 10), (30, 30)],
    "target": [None] * 3
    + [TbtTarget(STEP_PS, ms * 10**9, tile) for ms, tile in ((1, 1), (400, 4), (3000, 16))],
    "tenants": [False, False, True],
}


def limits_with(num_blocks: int, state_blocks: int, max_chunks: int, **others: Any) -> SchedulerLimits:
    """Room for at least one block beside the states of one request. Only a simulator lets chunks repeat: nobody takes
    snapshots within."""
    max_chunks = 1 if state_blocks else max_chunks
    room = num_blocks + 4 * state_blocks
    return SchedulerLimits(room, state_blocks=state_blocks, max_chunks=max_chunks, **others)


def drawn(choices: dict[str, Any]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(values) for name, values in choices.items()}


ANY_LIMITS = st.builds(limits_with, **drawn(LIMITS))


def prompt_of(node: Node, family: int, shared: int, own: int, answer: int) -> tuple[list[int], int]:
    """A prompt and answer cut down to what the node can hold at all."""
    room = node.limits.capacity_tokens
    tokens = [1000 * family + index for index in range(shared)]
    tokens += [10**6 + 1000 * node.num_arrived + index for index in range(own)]
    tokens = tokens[: max(1, room - answer)]
    return tokens, min(answer, room - len(tokens))


def play(node: Node, ops: list[tuple]) -> None:
    for op, family, shared, own, number in ops:
        match op:
            case "arrive" | "depart" | "expect" | "offer":
                tokens, answer = prompt_of(node, family, shared, own, number)
                about = {"tenant": TENANTS[family]} if node.tenants else {}
                if op == "offer":
                    if node.tiers is not None:
                        node.offer(tokens)
                elif op != "expect" and answer >= 1:
                    promise = {"work_ns": shared, "deadline_ns": 60 * (own % 2)}
                    node.arrive(tokens, answer, hands_over=op == "depart", sent=number, **promise, **about)
                elif answer >= 2:  # one that comes for a single token is over before it moves
                    node.expect(tokens, answer, **about)
            case "step" | "stop" if node.run is not None:
                node.step(number, [piece.request for piece in node.run.pieces][-1:] if op == "stop" else [])
            case "import" | "release" | "cancel":
                states = {"import": [State.RECEIVING], "release": [State.DETACHED], "cancel": list(State)}[op]
                some = [guest.request for guest in node.guests.values() if guest.state in states]
                if some:
                    method = {"import": node.import_, "release": node.release, "cancel": node.cancel}[op]
                    method(some[number % len(some)])
            case "saved" if node.saves:
                node.saved(number)
            case "fetched":
                fetching = [guest.request for guest in node.guests.values() if guest.fetch is not None]
                if fetching:
                    node.end_fetch(fetching[number % len(fetching)], shared)
            case "lose" if node.tiers is not None and node.cached:
                node.lose(shared)
    node.drain()


@settings(max_examples=300)
@given(st.builds(partial, st.just(Node), ANY_LIMITS, **drawn(ABOUT)), OPS)
def test_whatever_comes_every_request_reads_its_own_kv_and_ends(made: partial[Node], ops: list[tuple]) -> None:
    """At the end nothing is left and all blocks are back."""
    play(made(), ops)


def test_long_histories_hold_too() -> None:
    """Hypothesis draws short histories and shrinks what fails; these are long, so that memory runs short."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        random = Random(seed)
        some = {name: random.choice(values) for name, values in (LIMITS | ABOUT).items()}
        node = Node(
            limits_with(**{name: some[name] for name in LIMITS}), **{name: some[name] for name in ABOUT}
        )
        play(node, [(random.choice(KINDS), *map(random.choice, NUMBERS)) for _ in range(150)])
        seen["pre-empted"] += node.num_preempted > 0
        seen["was short"] += node.was_short
        runs = [action for action in node.log if isinstance(action, Run) and action.steps > 1]
        seen["ran many steps"] += any(not run.chunks for run in runs)
        seen["ran many chunks"] += sum(bool(run.chunks) for run in runs)
        for action in node.log:
            seen[type(action).__name__] += 1
            seen["cached"] += isinstance(action, Admitted) and action.cached_tokens > 0
        seen.update(node.ended.values())
    assert len(seen) == 21 and min(seen.values()) >= 5, seen  # the histories are not hollow


@settings(max_examples=30)
@given(ANY_LIMITS, OPS)
def test_a_target_that_everything_meets_changes_nothing(limits: SchedulerLimits, ops: list[tuple]) -> None:
    """Then chunks end where the budget does; with tiles of one row, that is."""
    logs = []
    for target in (None, TbtTarget(STEP_PS, 1 << 80, 1)):
        node = Node(limits, target=target)
        play(node, ops)
        logs.append(node.encoded_log())
    assert logs[0] == logs[1]


# What is computed once and used again.


def test_a_prefix_is_named_chunk_by_chunk_and_shared_while_its_first_owner_runs() -> None:
    scheduler = Told(limits(token_budget=6))
    first = scheduler.on(arrived(A, 13, 40, NAMES[:3]))[0]
    scheduler.on(arrived(B, 12, 20, (*NAMES[:2], NAMES[5])))
    found = [scheduler.on(Stepped(1)) for _ in range(20)]
    stored = [action.names for actions in found for action in actions if isinstance(action, BlocksStored)]
    assert stored == [(NAMES[0],), NAMES[1:3], (NAMES[5],)], "an answer's blocks get no name"
    [second] = [action for actions in found for action in actions if isinstance(action, Admitted)]
    assert isinstance(first, Admitted) and second.cached_tokens == 8
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] not in first.blocks


@pytest.mark.parametrize("num_cached", [0, 10])
def test_a_prompt_that_was_sent_here_for_what_another_computes_waits_for_it(num_cached: int) -> None:
    """It would fit into what the first leaves of the budget; one iteration later its prefix is there."""
    scheduler = Told(limits(token_budget=100), TierCache(20, 20))
    for request, num_tokens, count in (("busy", 8, 0), (A, 41, 0), (B, 41, num_cached)):
        names = NAMES[: num_tokens // 4]
        scheduler.on(arrived(RequestId(request), num_tokens, 50, names, hands_over=True, num_cached=count))
    both = scheduler.on(Stepped(1))
    assert admitted_of(both) == ([(A, 8)] if num_cached else [(A, 8), (B, 8)])
    if num_cached:
        assert admitted_of(scheduler.on(Stepped(1))) == [(B, 40)]


def with_states(tiers: TierCache | None = None) -> Told:
    return Told(limits(max_sequences=4, state_blocks=PARTS), tiers, BlockPool(64))


def arrives(request: RequestId, num_tokens: int, names: tuple[BlockName, ...] = NAMES, **others: Any) -> Fact:
    return arrived(request, num_tokens, num_tokens + 5, names[: num_tokens // 4], **others)


@pytest.mark.parametrize(
    ("length", "hands_over", "positions"),
    [(41, False, [40]), (40, False, [36]), (3, False, []), (42, True, [40, 42])],
)
def test_a_snapshot_is_taken_where_the_same_prompt_can_use_it_and_at_its_end_if_it_leaves(
    length: int, hands_over: bool, positions: list[int]
) -> None:
    [piece] = run_of(with_states().on(arrives(A, length, hands_over=hands_over))).chunks
    assert [position for position, _ in piece.snapshots] == positions


def test_kv_without_a_state_is_computed_again_and_leaves_one_at_the_branch() -> None:
    scheduler = with_states()
    scheduler.on(arrives(A, 41))
    scheduler.on(arrives(B, 41, (*NAMES[:6], *range(100, 110))))
    [piece] = run_of(scheduler.on(Stepped(1))).chunks
    assert (piece.start, [position for position, _ in piece.snapshots]) == (0, [24, 40])
    scheduler.on(arrives(C, 41, (*NAMES[:6], *range(200, 210))))
    assert admitted_of(scheduler.on(Stepped(1))) == [(C, 24)]


@pytest.mark.parametrize(("stop", "cached"), [(10, 40), (9, 0)])
def test_a_fetch_counts_with_its_state_or_not_at_all(stop: int, cached: int) -> None:
    scheduler = with_states(TierCache(40))
    scheduler.on(arrives(B, 4))
    scheduler.on(arrives(A, 41, num_cached=10, fetch=FetchOrder(NodeId("peer"), 0, 10)))
    scheduler.on(fetched(A, stop))
    assert admitted_of(scheduler.on(Stepped(1))) == [(A, cached)]


def test_recovered_states_are_usable_and_said_to_be_on_disk() -> None:
    scheduler = with_states(TierCache(40, 40))
    scheduler.on(recovered((scheduler._states.chain(NAMES, 10),)))
    [admitted] = [each for each in scheduler.on(arrives(A, 41)) if isinstance(each, Admitted)]
    assert (admitted.cached_tokens, admitted.disk_blocks) == (40, 10 + PARTS)


def test_a_node_of_another_role_may_have_more_live_states() -> None:
    scheduler = with_states()
    scheduler.change(replace(scheduler.limits, max_sequences=6, token_budget=1000))
    for request in "abcdef":
        scheduler.on(arrives(RequestId(request), 9))
    run = run_of(scheduler.on(Stepped(1)))
    assert {piece.slot for piece in run.pieces} == set(range(6)), "the lowest first, for the engine has as many"
    scheduler.check()


# Requests that come from another node, and memory for others.


def test_who_is_expected_gets_blocks_though_a_run_is_out() -> None:
    """Another node waits for them; but not before one that waits here."""
    scheduler = Told(limits(num_blocks=8))
    scheduler.on(arrived(A, 4, 20))
    (reserved,) = scheduler.on(expected(B, 4, 20))
    assert isinstance(reserved, Reserved) and reserved.request == B
    scheduler.on(arrived(RequestId("waiting"), 30, 32))
    assert scheduler.on(expected(RequestId("late"), 4, 20)) == []


def test_a_pre_empted_request_is_not_starved_by_newer_expected_ones() -> None:
    """What pre-emption and endings free goes to the request that waits, before room is made for new KV."""
    scheduler = Told(SchedulerLimits(num_blocks=16, block_size=4, token_budget=64, max_steps=1))
    stop, known = 30, {}
    ended: set[RequestId] = set()
    early: set[RequestId] = set()  # pre-empted in the first half
    reserved: list[RequestId] = []
    run: Run | None = None
    for step in range(300):
        request = RequestId(f"r{step}")
        known[request] = 5
        actions = list(scheduler.on(expected(request, 5, stop)))
        for landed in reserved:
            known[landed] += 1
            actions += scheduler.on(imported(landed))
        reserved.clear()
        if run is not None:
            for piece in run.pieces:
                known[piece.request] += piece.samples
            over = tuple(piece.request for piece in run.pieces if known[piece.request] >= stop)
            ended.update(over)
            run = None
            actions += scheduler.on(Stepped(1, over))
        for action in actions:
            if isinstance(action, Reserved):
                reserved.append(action.request)
            elif isinstance(action, Preempted) and step < 150:
                early.add(action.request)
            elif isinstance(action, Run):
                run = action
    assert early, "the test must put the pool under pressure"
    assert early <= ended


@given(num_blocks=st.integers(1, 30), running=st.integers(0, 3), spare=st.integers(0, 6))
def test_what_is_set_aside_leaves_what_is_kept_for_those_that_run(
    num_blocks: int, running: int, spare: int
) -> None:
    scheduler = Told(limits(24 + running, 16))
    for number in range(running):
        scheduler.on(arrived(RequestId(f"r{number}"), 2, 16))
        scheduler.on(Stepped(1))
    blocks = scheduler.set_aside(num_blocks, [], spare)
    assert len(blocks) == (num_blocks if num_blocks + max(spare, running) <= 24 else 0)
    assert scheduler.num_aside == len(blocks)
    scheduler.check()
    scheduler.put_back(blocks)
    assert (scheduler.pool.available, scheduler.num_aside) == (24, 0)


# How prompts are cut.

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
H100 = hardware_named("h100")
COSTS: dict[str, NodeCost] = {
    "curve": compile_cost(CURVE),
    "analytic": compile_cost(Analytic(facts_of(LLAMA), H100, engine_coefficients("vllm", H100))),
}


@given(st.integers(0, 1000), st.sampled_from([1, 2, 16, 128]))
def test_the_minimum_ends_a_tile_and_is_half_a_tile_at_least(num_decodes: int, tile: int) -> None:
    found = TbtTarget(STEP_PS, 1, tile).minimum(num_decodes)
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
            budget.take(Piece(A, start, count, (), False))
        if count < left:
            rows = num_decodes + budget.taken
            assert count < tile or rows % tile == 0, "a cut chunk that is long enough ends with a tile"
            return


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400)), min_size=1, max_size=20),
    st.integers(2, 5),
    st.sampled_from([8, 50, 256]),
)
def test_no_prompt_waits_for_more_than_twice_the_tokens_of_arrival_order(
    arrivals: list[tuple[int, int]], partial: int, budget: int
) -> None:
    """And a budget is used up, with so many prompts in parts at most."""
    scheduler = Told(
        limits(1 << 13, 16, token_budget=budget, max_steps=1, partial_prefills=partial, max_sequences=1000)
    )
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


@pytest.mark.parametrize(
    ("lengths", "others", "chunks"),
    [
        # Without a bound every prompt is computed whole (iteration-level batching, as Orca's).
        ((9000, 70), {"token_budget": 1 << 30}, [("0", 0, 9000), ("1", 0, 70)]),
        # A shorter one gets up to half; who is longer overtakes nobody.
        ((1000, 40, 30), {}, [("2", 0, 30), ("1", 0, 20), ("0", 0, 50)]),
        ((1000, 2000), {}, [("0", 0, 100)]),
        # Who overtakes leaves memory and a place for those that it overtakes.
        ((16, 24, 4), {"num_blocks": 10, "block_size": 4, "token_budget": 4}, [("0", 0, 4)]),
        (
            (5000, 4000, 3000, 10),
            {"max_sequences": 3, "partial_prefills": 2},
            [("3", 0, 10), ("1", 0, 40), ("0", 0, 50)],
        ),
        ((5000, 4000, 3000, 10), {"max_sequences": 2, "partial_prefills": 2}, [("1", 0, 50), ("0", 0, 50)]),
    ],
    ids=str,
)
def test_which_prompts_share_an_iteration(
    lengths: tuple[int, ...], others: dict[str, int], chunks: list[tuple[str, int, int]]
) -> None:
    about = {
        "num_blocks": 1 << 16,
        "block_size": 16,
        "token_budget": 100,
        "partial_prefills": 4,
        "max_steps": 1,
    }
    scheduler, actions = Told(limits(**(about | others))), list[Any]()
    for number, length in enumerate(lengths):
        scheduler.arrive(Sequence(RequestId(str(number)), length, length + 1))
    scheduler.plan(actions)
    assert chunks_of(actions) == chunks
