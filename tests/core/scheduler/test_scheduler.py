from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.attempts import BlocksEvicted, BlocksStored
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.scheduler import (
    Admitted,
    Preempted,
    Run,
    SchedulerLimits,
    Stepped,
    TbtTarget,
)
from isthmus.core.types import NodeId, RequestId

from .driver import TENANTS, Node, State
from .told import Fact, Reserved, Told, arrived, expected, imported

HERE = NodeId("")
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
NAMES = tuple(bytes([index]) for index in range(8))


def limits(num_blocks: int = 64, block_size: int = 4, **others: int) -> SchedulerLimits:
    return SchedulerLimits(num_blocks=num_blocks, block_size=block_size, **others)


def run_of(actions: list[object]) -> Run:
    assert isinstance(actions[-1], Run), actions
    return actions[-1]


# What holds whatever happens.

KINDS = [*["step"] * 12, *["arrive", "depart", "expect", "import", "release", "saved", "fetched"] * 2]
KINDS += ["stop", "cancel", "offer", "lose"]
OPS = st.lists(
    st.tuples(
        st.sampled_from([*sorted(set(KINDS)), "arrive", "depart", "step", "step", "step", "saved", "fetched"]),
        st.integers(0, 2),  # family: prompts of one family begin alike
        st.integers(1, 40),  # how much of the prompt is the family's
        st.integers(0, 12),  # how much is its own
        st.integers(1, 40),  # answer, steps, whose turn it is
    ),
    max_size=60,
)
CURVE = Curve(
    kv_token_bytes=1, num_layers=1, prefill_fixed_s=0.5, prefill_token_s=0.01, prefill_pair_s=1e-3,
    decode_fixed_s=0.4, decode_sequence_s=0.05, decode_context_s=1e-3,
)  # fmt: skip
TARGETS = [
    TbtTarget(compile_cost(CURVE).step_ps, ms * 10**9, tile) for ms, tile in ((1, 1), (400, 4), (3000, 16))
]
TIERS = [None, None, (8, 0), (6, 10), (30, 30)]


def limits_with(num_blocks: int, state_blocks: int, max_chunks: int, **others: int) -> SchedulerLimits:
    """Room for at least one block beside the states of one request. Only a simulator lets chunks repeat: nobody takes
    snapshots within."""
    max_chunks = 1 if state_blocks else max_chunks
    room = num_blocks + 4 * state_blocks
    return SchedulerLimits(num_blocks=room, state_blocks=state_blocks, max_chunks=max_chunks, **others)


LIMITS = st.builds(
    limits_with,
    num_blocks=st.integers(1, 24),
    state_blocks=st.sampled_from([0, 0, 1, 3]),
    block_size=st.sampled_from([1, 2, 4, 16]),
    token_budget=st.sampled_from([1, 2, 7, 32, 512]),
    max_sequences=st.integers(1, 8),
    max_steps=st.sampled_from([1, 3, 16]),
    max_chunks=st.sampled_from([1, 3, 16]),
    partial_prefills=st.sampled_from([1, 1, 3]),
    prompt_batch=st.sampled_from([1, 30, 1 << 30, 1 << 30]),
    order=st.sampled_from(["fcfs", "fcfs", "promise"]),
)
MADE = st.builds(
    partial,
    st.just(Node),
    LIMITS,
    tiers=st.sampled_from(TIERS),
    target=st.sampled_from([None, None, *TARGETS]),
    tenants=st.sampled_from([False, False, True]),
)


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


@settings(max_examples=300)
@given(MADE, OPS)
def test_whatever_comes_every_request_reads_its_own_kv_and_ends(
    made: Callable[[], Node], ops: list[tuple]
) -> None:
    """The driver judges every action (see there); at the end nothing is left and all blocks are back."""
    node = made()
    play(node, ops)
    node.drain()


def test_long_histories_hold_too() -> None:
    """Hypothesis draws short histories and shrinks what fails; these are long, so that memory runs short."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        node = random_node(Random(seed))
        play(node, random_ops(Random(seed), 150))
        node.drain()
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


@settings(max_examples=60)
@given(st.integers(4, 16), st.integers(2, 6), st.integers(1, 30))
def test_too_little_memory_slows_requests_and_loses_none(num_blocks: int, count: int, answer: int) -> None:
    node = Node(limits(num_blocks, block_size=2, max_sequences=8))
    answer = min(answer, 2 * num_blocks - 1)
    for number in range(count):
        node.arrive([number], answer)
    node.drain()
    assert set(node.ended.values()) == {"finished"}


@settings(max_examples=40)
@given(MADE, OPS)
def test_the_same_events_give_the_same_log_byte_for_byte(made: Callable[[], Node], ops: list[tuple]) -> None:
    logs = []
    for _ in range(2):
        node = made()
        play(node, ops)
        node.drain()
        logs.append(node.encoded_log())
    assert logs[0] == logs[1]


@settings(max_examples=30)
@given(LIMITS, OPS)
def test_a_target_that_everything_meets_changes_nothing(limits: SchedulerLimits, ops: list[tuple]) -> None:
    """Then chunks end where the budget does; with tiles of one row, that is."""
    logs = []
    for target in (None, TbtTarget(TARGETS[0].step_ps, 1 << 80, 1)):
        node = Node(limits, target=target)
        play(node, ops)
        node.drain()
        logs.append(node.encoded_log())
    assert logs[0] == logs[1]


def random_node(random: Random) -> Node:
    limits = limits_with(
        num_blocks=random.randint(2, 24),
        state_blocks=random.choice([0, 0, 1, 3]),
        block_size=random.choice([1, 2, 4, 16]),
        token_budget=random.choice([1, 2, 7, 32, 512]),
        max_sequences=random.randint(1, 8),
        max_steps=random.choice([1, 3, 16]),
        max_chunks=random.choice([1, 3, 16]),
        partial_prefills=random.choice([1, 1, 3]),
    )
    return Node(limits, random.choice(TIERS), random.choice([None, None, *TARGETS]), random.random() < 0.2)


def random_ops(random: Random, count: int) -> list[tuple]:
    def op() -> tuple:
        return (
            random.choice(KINDS),
            random.randrange(3),
            random.randint(1, 40),
            random.randint(0, 12),
            random.randint(1, 40),
        )

    return [op() for _ in range(count)]


# Batches.


# The cache.


def test_a_prefix_is_shared_while_its_first_owner_still_runs() -> None:
    scheduler = Told(limits())
    first = scheduler.on(arrived(A, 9, 20, NAMES[:2]))[0]
    scheduler.on(Stepped(1))
    scheduler.on(arrived(B, 12, 20, (*NAMES[:2], NAMES[5])))
    second = scheduler.on(Stepped(1))[0]
    assert isinstance(first, Admitted) and isinstance(second, Admitted)
    assert second.cached_tokens == 8
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks


def test_blocks_are_stored_chunk_by_chunk_and_the_answer_never() -> None:
    scheduler = Told(limits(token_budget=6))
    scheduler.on(arrived(A, 13, 40, NAMES[:3]))
    stored = []
    for _ in range(20):
        actions = scheduler.on(Stepped(1))
        stored.append([action.names for action in actions if isinstance(action, BlocksStored)])
    assert stored == [[(NAMES[0],)], [NAMES[1:3]], *[[]] * 18]


def test_needed_room_evicts_cached_blocks_and_says_so() -> None:
    scheduler = Told(limits(num_blocks=3))
    scheduler.on(arrived(A, 8, 9, NAMES[:2]))
    scheduler.on(Stepped(1, (A,)))
    actions = scheduler.on(arrived(B, 8, 9, (NAMES[6], NAMES[7])))
    assert BlocksEvicted(HERE, (NAMES[1],)) in actions
    assert scheduler.pool.match(NAMES) == scheduler.pool.match(NAMES[:1]) != ()


# Memory pressure.


# Requests that come from, or leave for, another node.


def test_an_expected_request_is_reserved_imported_and_decodes() -> None:
    scheduler = Told(limits())
    (reserved,) = scheduler.on(expected(A, 8, 20))
    assert reserved == Reserved(A, (0, 1, 2))  # two blocks of prompt, and room for the first new token
    run = run_of(scheduler.on(imported(A)))
    (piece,) = run.pieces
    assert (piece.request, piece.start, piece.count, piece.samples) == (A, 8, 1, True)
    assert piece.blocks[:3] == reserved.blocks
    assert run.steps == 11  # the answer's first token came with the import; 11 of 12 are left
    assert scheduler.on(Stepped(11, (A,))) == []
    assert scheduler.pool.available == 64


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
    for step in range(1000):
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
            elif isinstance(action, Preempted) and step < 500:
                early.add(action.request)
            elif isinstance(action, Run):
                run = action
        scheduler.check()
    assert early, "the test must put the pool under pressure"
    assert early <= ended


def leaves(name: str, num_tokens: int, work_ns: int) -> Fact:
    return arrived(RequestId(name), num_tokens, num_tokens + 9, hands_over=True, work_ns=work_ns)


def test_who_leaves_overtakes_only_while_enough_is_left_for_those_it_overtakes() -> None:
    """It keeps its blocks until its decode node takes it, which may be after one that it overtook."""
    scheduler = Told(limits(10, 4, prompt_batch=1, order="promise"))
    admitted: list[str] = []

    def tell(event: Fact) -> None:
        admitted.extend(action.request for action in scheduler.on(event) if isinstance(action, Admitted))

    for name, num_tokens, work_ns in (("a", 4, 9), ("long", 20, 9), ("b", 8, 1), ("c", 8, 2), ("d", 4, 3)):
        tell(leaves(name, num_tokens, work_ns))
    for _ in range(3):
        tell(Stepped(1))
    # After "a" and "b" hold 3 of 10 blocks, "c" would leave 5, as many as "long" needs; then "d" would leave 4.
    assert admitted == ["a", "b", "c", "long"]


def test_in_promise_order_nobody_waits_for_what_the_pool_may_have() -> None:
    """Without tiers nothing was sent anywhere because of what lies there, whatever its route says."""
    scheduler = Told(limits(prompt_batch=1, order="promise"))
    scheduler.on(leaves("busy", 4, 9))
    scheduler.on(leaves("long", 20, 9))
    short = arrived(B, 12, 20, NAMES[:3], num_cached=2, work_ns=1)
    scheduler.on(short)
    (admitted,) = [action for action in scheduler.on(Stepped(1)) if isinstance(action, Admitted)]
    assert admitted.request == B


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
