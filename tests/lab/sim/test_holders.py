"""Requests whose KV lies on several nodes, in virtual time: all end, and memory comes back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.types import Role
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.faults import Faults, NodeFault
from isthmus.lab.sim.records import COMPLETED, REFUSED, Result
from isthmus.lab.sim.workloads import Request

from .cluster import BLOCK_SIZE, CURVE, MS, deployment, faults, nodes, run, statuses

NODE_BLOCKS = 64


def cluster_of(roles: dict[Role, int], **fields: object) -> Deployment:
    made = [each for role, count in roles.items() for each in nodes(role, count)]
    small = [msgspec.structs.replace(facts, kv_blocks=NODE_BLOCKS, token_budget=256) for facts in made]
    return deployment(tuple(small), **fields)


def served(cluster: Deployment, *requests: tuple[int, int, int]) -> Result:
    return run(cluster, [Request(at * MS, tokens, out) for at, tokens, out in requests])


@pytest.mark.parametrize("roles", [{Role.MIXED: 4}, {Role.PREFILL: 2, Role.DECODE: 2}])
def test_nodes_together_hold_what_none_does(roles: dict[Role, int]) -> None:
    most = int((3.5 if Role.MIXED in roles else 2.6) * NODE_BLOCKS * BLOCK_SIZE)
    found = served(cluster_of(roles), (0, most - 40, 40), (0, 100, 20), (5, most - 10, 5))
    assert statuses(found) == {COMPLETED}
    assert found.bytes_moved["shipment"] > 0
    [refused] = served(cluster_of(roles), (0, 4 * NODE_BLOCKS * BLOCK_SIZE, 1)).records
    assert refused.status is REFUSED


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200 * BLOCK_SIZE), st.integers(1, 60)), max_size=20),
    st.sampled_from([{Role.MIXED: 4}, {Role.PREFILL: 2, Role.DECODE: 2}, {Role.MIXED: 2}]),
)
def test_long_and_short_together_all_end(requests: list[tuple[int, int, int]], roles: dict[Role, int]) -> None:
    assert statuses(served(cluster_of(roles), *sorted(requests))) <= {COMPLETED, REFUSED}


BLOCK_BYTES = BLOCK_SIZE * CURVE.kv_token_bytes


def attended(homes: int, attending: int, kv_heads: int, **fields: object) -> Deployment:
    """Homes with little memory, beside nodes of role attention."""
    small = nodes(Role.MIXED, homes, kv_blocks=24, token_budget=128, kv_heads=kv_heads)
    large = nodes(Role.ATTENTION, attending, kv_blocks=600, kv_heads=kv_heads)
    return deployment((*small, *large), token_budget=128, **fields)


def full_bytes(*requests: tuple[int, int, int]) -> int:
    """Of all full blocks, the last token's having no KV and the last block staying at home."""
    return sum((tokens + out - 2) // BLOCK_SIZE for _, tokens, out in requests) * BLOCK_BYTES


ANSWERS = ((0, 900, 400), (0, 30, 700), (1, 500, 300), (2, 15, 500), (2, 1, 90))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_what_is_full_goes_to_nodes_of_role_attention(kv_heads: int) -> None:
    """Every block goes once, of prompts and of answers, and a home with 24 blocks answers with 2,300 tokens at once."""
    found = served(attended(1, 2, kv_heads), *ANSWERS)
    assert statuses(found) == {COMPLETED}
    assert not sum(node.preemptions for node in found.nodes)
    missing = full_bytes(*ANSWERS) - found.bytes_moved["shipment"]
    assert 0 <= missing <= 2 * len(ANSWERS) * BLOCK_BYTES  # what filled last was still to go when it ended


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("at_s", [0.02, 1.0, 2.5])
def test_a_home_is_replaced_and_no_kv_moves(kv_heads: int, at_s: float) -> None:
    faults = Faults(nodes=(NodeFault("mixed-0", at_s, 1000.0),))
    alone, found = (served(attended(2, 3, kv_heads, **more), *ANSWERS) for more in ({}, {"faults": faults}))
    assert statuses(found) == {COMPLETED}
    assert max(record.attempts for record in found.records) == 2
    shipped, before = found.bytes_moved["shipment"], alone.bytes_moved["shipment"]
    on_its_way = 5 * 8 * BLOCK_BYTES  # of prompts, a window at a time
    assert shipped <= max(before, full_bytes(*ANSWERS)) + on_its_way * (at_s < 1)


def test_what_holders_have_is_not_handed_over_whatever_was_generated_before() -> None:
    """Of each attempt only the block that is not full goes from the node that prefills to the one that decodes."""
    facts = [*nodes(Role.PREFILL, 1), *nodes(Role.DECODE, 2), *nodes(Role.ATTENTION, 1, kv_blocks=600)]
    faults = Faults(nodes=(NodeFault("decode-0", 0.7, 1000.0),))
    found = served(deployment(tuple(facts), faults=faults), (0, 900, 400))
    assert [record.attempts for record in found.records] == [2]
    assert 0 < found.bytes_moved["handover"] <= 2 * BLOCK_BYTES


def test_kv_of_a_holder_that_is_gone_is_computed_anew() -> None:
    faults = Faults(nodes=(NodeFault("attention-1", 1.0, 1.5),))
    found = served(attended(2, 2, 2, faults=faults), *ANSWERS)
    assert statuses(found) == {COMPLETED}
    assert found.bytes_moved["shipment"] > full_bytes(*ANSWERS) * 1.2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=20),
    st.sampled_from([1, 2, 3]),
    faults(["mixed-0", "mixed-1", "attention-0", "attention-2"], lasting=[0.1, 0.5]),
)
def test_whatever_fails_all_end(requests: list[tuple[int, int, int]], kv_heads: int, faults: Faults) -> None:
    cluster = attended(2, 3, kv_heads, faults=faults, rejoin_ns=60 * 1000 * MS)
    assert statuses(served(cluster, *sorted(requests))) <= {COMPLETED, REFUSED}
