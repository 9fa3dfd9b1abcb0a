"""How prompts are cut: chunks that keep the time between tokens, and prompts that share iterations."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.cost import (
    Analytic,
    Curve,
    NodeCost,
    compile_cost,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.scheduler import CountingPool, Limits, Piece, Run, Sequence, Stepped, TbtTarget
from isthmus.core.scheduler.batch import Batch
from isthmus.core.scheduler.chunks import Chunks, TimedBudget
from isthmus.core.scheduler.memory import Memory
from isthmus.core.scheduler.prefixes import PoolPrefixes
from isthmus.core.scheduler.queues import Admission
from isthmus.core.types import RequestId

from .driver import Node
from .test_scheduler import LIMITS, OPS, limits, play, run_of
from .told import Fact, Told, arrived

SIZE = 4


class Prompts:
    """Prompts that are computed as they are cut, and are over with their last chunk."""

    def __init__(self, *lengths: int, num_blocks: int = 10_000, **others: int) -> None:
        limits = Limits(num_blocks, SIZE, **others)
        self.limits, self.memory = limits, Memory(limits, CountingPool(num_blocks))
        self.batch = Batch(limits)
        self.admission = Admission(limits, self.memory, PoolPrefixes(self.memory, SIZE), self.batch)
        self.chunks = Chunks(limits, None, self.batch, self.admission)
        self.all: dict[RequestId, Sequence] = {}
        for length in lengths:
            self.arrive(length)

    def arrive(self, length: int) -> None:
        sequence = Sequence(RequestId(str(len(self.all))), length, length + 1)
        sequence.arrival = len(self.all)
        self.all[sequence.request] = sequence
        self.admission.waiting.append(sequence)

    def iterate(self) -> list[tuple[str, int]]:
        """Who got how many tokens."""
        pieces = self.chunks.cut([], 0)
        for piece in pieces:
            self._compute(piece)
        self.admission.check()
        self.batch.check(self.batch.prompts)
        return [(piece.request, piece.count) for piece in pieces]

    def _compute(self, piece: Piece) -> None:
        sequence = self.all[piece.request]
        assert (piece.start, piece.samples) == (
            sequence.computed,
            piece.start + piece.count == sequence.length,
        )
        sequence.computed += piece.count
        if piece.samples:
            self.batch.remove(sequence)
            self.memory.release(sequence)


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=12)


@settings(max_examples=150)
@given(LENGTHS, st.integers(1, 100), st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 30, 1 << 30]))
def test_no_token_of_the_budget_is_left_while_somebody_could_use_it(
    lengths: list[int], budget: int, partial: int, places: int, batch: int
) -> None:
    prompts = Prompts(
        *lengths, token_budget=budget, partial_prefills=partial, max_sequences=places, prompt_batch=batch
    )
    computed = 0
    while computed < sum(lengths):
        counts = [count for _, count in prompts.iterate()]
        assert 1 <= sum(counts) <= budget
        is_full = sum(counts) == budget or sum(counts) >= batch
        assert is_full or not prompts.admission.waiting or len(counts) == places
        assert is_full or not prompts.batch.prompts, "a prompt was cut, and there was room for more of it"
        assert len(prompts.batch.prompts) <= partial, "more prompts are computed in parts than may be"
        computed += sum(counts)
    assert prompts.memory.pool.available == 10_000


def test_a_prompt_alone_repeats_its_chunk_but_the_last() -> None:
    prompts = Prompts(1000, token_budget=100, max_chunks=4)
    pieces = prompts.chunks.cut([], 0)
    assert prompts.chunks.steps(pieces) == 4
    prompts.all[RequestId("0")].computed = 700
    assert prompts.chunks.steps(prompts.chunks.cut([], 0)) == 2, "the last chunk is a run of its own"


def test_a_chunk_that_follows_a_cached_prefix_does_not_repeat() -> None:
    prompts = Prompts(1000, token_budget=100, max_chunks=4)
    (piece,) = prompts.chunks.cut([], 0)
    sequence = prompts.all[piece.request]
    sequence.computed = sequence.cached = 200
    assert prompts.chunks.steps(prompts.chunks.cut([], 0)) == 1


A, B, C = RequestId("a"), RequestId("b"), RequestId("c")

CURVE = Curve(
    kv_token_bytes=1, num_layers=1, prefill_fixed_s=0.5, prefill_token_s=0.01, prefill_pair_s=1e-3,
    decode_fixed_s=0.4, decode_sequence_s=0.05, decode_context_s=1e-3,
)  # fmt: skip
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


class TimedNode(Node):
    """Judges every run by the target as well."""

    def __init__(self, limits: Limits, target: TbtTarget) -> None:
        super().__init__(limits)
        self.scheduler, self.target = Told(limits, target=target), target

    def _on_run(self, run: Run, decoding: set[RequestId]) -> None:
        self.run, target, num_decodes = run, self.target, run.num_decodes
        requests = [piece.request for piece in run.pieces]
        assert requests and len(set(requests)) == len(requests)
        assert set(requests[: len(decoding)]) == decoding, "decodes come first, and none of them waits"
        assert run.context == sum(piece.start + 1 for piece in run.pieces[:num_decodes])
        for piece in run.pieces:
            alone = len(run.pieces) == 1 and self.limits.partial_prefills == 1
            self._check_piece(piece, run.steps, alone=alone)
        taken, budget = sum(piece.count for piece in run.chunks), max(1, self.limits.token_budget - num_decodes)
        assert taken <= budget
        unfinished = [request for request in self.computing if request not in requests]
        assert run.chunks or not unfinished, "prompts starve"
        if not num_decodes:
            assert not unfinished or taken == budget, "nobody's token is delayed, and budget is left over"
        elif taken > target.minimum(num_decodes):
            sizes = [(piece.count, piece.start) for piece in run.chunks]
            assert target.step_ps(sizes, num_decodes, run.context) <= target.limit_ps


@settings(max_examples=80)
@given(LIMITS, OPS, st.integers(1, 3), st.sampled_from([1, 400, 900, 3000]), st.sampled_from([1, 4, 16]))
def test_whatever_comes_the_target_is_kept_and_every_request_ends(
    limits: Limits, ops: list[tuple], partial: int, target_ms: int, tile: int
) -> None:
    limits = msgspec.structs.replace(limits, partial_prefills=partial)
    node = TimedNode(limits, TbtTarget(COSTS["curve"].step_ps, target_ms * 10**9, tile))
    play(node, [("arrive", *op[1:]) if op[0] == "expect" else op for op in ops])
    node.drain()


@settings(max_examples=30)
@given(LIMITS, OPS)
def test_a_target_that_everything_meets_changes_nothing(limits: Limits, ops: list[tuple]) -> None:
    """Then chunks end where the budget does; with tiles of one row, that is."""
    logs = []
    for target in (None, TbtTarget(COSTS["curve"].step_ps, 1 << 80, 1)):
        node = Node(limits)
        node.scheduler = Told(limits, target=target)
        play(node, ops)
        node.drain()
        logs.append(node.encoded_log())
    assert logs[0] == logs[1]


def test_with_nobody_decoding_there_is_no_target() -> None:
    scheduler = Told(limits(512, 16, token_budget=4096), target=TbtTarget(COSTS["analytic"].step_ps, 1))
    assert run_of(scheduler.on(arrived(A, 5000, 5001))).chunks[0].count == 4096


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


def partial_limits(partial: int, budget: int, **others: int) -> Limits:
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


def test_one_place_is_arrival_order() -> None:
    scheduler = Told(partial_limits(1, 100))
    scheduler.on(arrived(A, 1000, 1001))
    scheduler.on(arrived(B, 10, 11))
    assert [piece.request for piece in run_of(scheduler.on(Stepped(1))).chunks] == [A]


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
