"""Attention that other nodes compute, in virtual time: each iteration lasts as long as its slowest part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.cost import Wait, compile_cost
from isthmus.core.cost.elsewhere import lines
from isthmus.core.scheduler import Run
from isthmus.core.types import NodeId, Role
from isthmus.facts import Rates
from isthmus.lab.sim.node import LOOK_STEPS, Occupancy, Questions, SimNode, build_node
from isthmus.lab.sim.records import COMPLETED, REFUSED, NodeRecord, Result
from isthmus.lab.sim.workloads import Request

from .cluster import BLOCK_SIZE, CURVE, MS, deployment, nodes, run, statuses

COST = compile_cost(CURVE)


class _Asks:
    """Stands for all holders: each iteration asks the same."""

    def __init__(self, wait: Wait, away: int) -> None:
        self.asked, self.steps = Questions(wait, away, {}, 0), 0

    def asks(self, home: SimNode, run: Run) -> Questions:
        return self.asked

    def began(self, home: SimNode, asked: Questions, iteration_ps: int) -> None:
        pass

    def ended(self, home: SimNode, asked: Questions, steps: int) -> None:
        self.steps += steps


def a_home(asks: _Asks, batches: int) -> SimNode:
    node = build_node(deployment(nodes(Role.DECODE, 1, batches=batches)), 0)
    changed: Any = node
    changed.decider, changed.attending = SimpleNamespace(has_holders=True), asks
    return node


PS = st.integers(0, 10**10)


@given(
    st.integers(1, 20),
    st.integers(1, 3000),
    st.integers(0, 3000),
    st.builds(Wait, PS, PS, PS),
    st.integers(1, 200),
    st.sampled_from([1, 2, 3]),
)
def test_iterations_one_by_one(batch: int, here: int, away: int, wait: Wait, steps: int, batches: int) -> None:
    """A folded run takes the sum of its iterations, of which each is as long as the longest of what bounds it."""
    node = a_home(asks := _Asks(wait, away), batches)
    batches = min(batches, batch)
    model, _ = COST.decode_step_ps(-(-batch // batches))
    _, slope = COST.decode_step_ps(batch)
    now = done = 0
    while done < steps:
        end = node.begin(Run((), batch, here + away + done * batch, steps - done, list), now)
        count, _ = node.end(end)
        assert 1 <= count <= LOOK_STEPS
        bounds = lines(batches, model, slope * (here + done * batch), slope * batch, wait)
        spent = sum(max(first + growth * at for first, growth in bounds) for at in range(count))
        assert end == now + spent // 1000
        now, done = end, done + count
    assert asks.steps == steps


def test_what_attention_for_others_takes_is_paid_once() -> None:
    node = build_node(deployment(nodes(Role.DECODE, 1)), 0)
    node.owed_ps = 7_000_000_000
    run = Run((), 1, 100, 100, list)
    alone = build_node(deployment(nodes(Role.DECODE, 1)), 0).begin(run, 0)
    assert node.begin(run, 0) == alone + 7_000_000
    end = node.cut(1)
    assert end is not None
    node.end(end)
    assert node.owed_ps == 7_000_000_000 * 99 // 100


def test_homes_share_a_holder() -> None:
    occupancy = Occupancy()
    assert occupancy.factor(0) == 1
    occupancy.by_home[1] = 0.25
    assert occupancy.factor(0) == pytest.approx(4 / 3) and occupancy.factor(1) == 1
    occupancy.by_home |= {2: 1.0, 3: 1.0}
    assert occupancy.factor(0) == pytest.approx(4), "one of four"


def simulated(roles: dict[Role, int], requests: list[tuple[int, int]], **fields: Any) -> Result:
    """Nodes that decode have 40 blocks, the others 600. Requests of so many tokens come at once."""
    made = [each for role, count in roles.items() for each in nodes(role, count, **fields)]
    small = [msgspec.structs.replace(each, kv_blocks=40 if each.role is Role.DECODE else 600) for each in made]
    come = [Request(arrival_ns=0, num_tokens=tokens, output_tokens=out) for tokens, out in requests]
    return run(deployment(small), come)


def node(result: Result, name: str) -> NodeRecord:
    return next(each for each in result.nodes if each.node == NodeId(name))


SPLIT = {Role.PREFILL: 1, Role.DECODE: 1, Role.ATTENTION: 2}
MANY = [(1500, 60)] * 6


def test_a_batch_that_attention_nodes_hold_decodes_on_a_small_node() -> None:
    """Six requests of 98 blocks on a node of 40: their KV lies with others, whose time is used."""
    found = simulated(SPLIT, MANY)
    assert statuses(found) == {COMPLETED}
    assert 40 * BLOCK_SIZE < 6 * 1500, "more than its memory"
    for name in ("attention-0", "attention-1"):
        busy = node(found, name).busy_ns
        assert 0 < busy < found.end_ns
        assert node(found, name).iterations == 0
    assert found.bytes_moved["queries"] > 0
    assert statuses(simulated({Role.PREFILL: 1, Role.DECODE: 1}, MANY)) == {REFUSED}


def test_bytes_of_queries_do_not_depend_on_the_context() -> None:
    def of_answer(tokens: int) -> int:
        longer, shorter = (simulated(SPLIT, [(tokens, out)]).bytes_moved["queries"] for out in (60, 20))
        return longer - shorter

    assert of_answer(800) == of_answer(1600) == 40 * COST.queries.num_bytes(1) * 2, "of two holders"


@pytest.mark.parametrize("slower", [Rates(network=10**6), Rates(rtt_ns=10**7)])
def test_a_slower_link_makes_slower_tokens(slower: Rates) -> None:
    quick, slow = simulated(SPLIT, MANY[:1]), simulated(SPLIT, MANY[:1], rates=slower)
    assert slow.records[0].tbt_ns > 1.2 * quick.records[0].tbt_ns


def test_two_homes_share_attention_nodes() -> None:
    """Attention nodes are never busier than there is time, and do the same work for two homes as for one."""
    one, two = simulated(SPLIT, MANY), simulated(SPLIT | {Role.DECODE: 2}, MANY)
    for name in ("attention-0", "attention-1"):
        assert node(two, name).busy_ns == pytest.approx(node(one, name).busy_ns, rel=0.02)
    assert two.end_ns < one.end_ns


def test_batches_that_take_turns_are_quicker_where_others_attend() -> None:
    """Attention of a context that is long for this model takes about as long as its layers."""
    slow = {
        "cost": msgspec.structs.replace(
            CURVE, decode_context_s=3e-6, decode_sequence_s=1e-5, decode_fixed_s=1e-3
        )
    }
    one, two = (simulated(SPLIT, MANY, batches=batches, **slow) for batches in (1, 2))
    assert two.end_ns < one.end_ns
    assert two.bytes_moved["queries"] == one.bytes_moved["queries"]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90 * BLOCK_SIZE), st.integers(1, 60)), max_size=30),
    st.integers(1, 2),
    st.integers(1, 3),
)
def test_prompts_of_any_length_together_all_end(
    requests: list[tuple[int, int, int]], batches: int, holders: int
) -> None:
    """Of prompts that are computed together, one may wait for its holders while the next goes on."""
    roles = {Role.PREFILL: 1, Role.DECODE: 1, Role.ATTENTION: holders}
    made = [each for role, count in roles.items() for each in nodes(role, count, batches=batches)]
    small = [
        msgspec.structs.replace(each, kv_blocks=100 if each.role is not Role.ATTENTION else 60) for each in made
    ]
    cluster = deployment(small, prompt_batch=1 << 30, token_budget=96)
    found = run(cluster, [Request(at * MS, tokens, out) for at, tokens, out in sorted(requests)])
    assert statuses(found) <= {COMPLETED, REFUSED}
