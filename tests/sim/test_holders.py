"""Requests whose KV lies on several nodes, in virtual time: all end, and memory comes back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.sim.deployment import Deployment
from isthmus.sim.records import COMPLETED, REFUSED, Result
from isthmus.sim.simulation import Simulation
from isthmus.sim.workloads import Request
from isthmus.types import NS_PER_MS, Role

from .cluster import BLOCK_SIZE, deployment, nodes, workload

NODE_BLOCKS = 64


def cluster_of(roles: dict[Role, int], **fields: object) -> Deployment:
    made = [each for role, count in roles.items() for each in nodes(role, count)]
    small = [msgspec.structs.replace(facts, kv_blocks=NODE_BLOCKS, token_budget=256) for facts in made]
    return deployment(tuple(small), **fields)


def run(cluster: Deployment, *requests: tuple[int, int, int]) -> Result:
    made = [
        Request(arrival_ns=at * NS_PER_MS, num_tokens=tokens, output_tokens=out) for at, tokens, out in requests
    ]
    return Simulation(cluster, workload(made), check=True).run()


@pytest.mark.parametrize("roles", [{Role.MIXED: 4}, {Role.PREFILL: 2, Role.DECODE: 2}])
def test_nodes_together_hold_what_none_does(roles: dict[Role, int]) -> None:
    most = int((3.5 if Role.MIXED in roles else 2.6) * NODE_BLOCKS * BLOCK_SIZE)
    found = run(cluster_of(roles), (0, most - 40, 40), (0, 100, 20), (5, most - 10, 5))
    assert [record.status for record in found.records] == [COMPLETED] * 3
    assert found.bytes_moved["shipment"] > 0
    [refused] = run(cluster_of(roles), (0, 4 * NODE_BLOCKS * BLOCK_SIZE, 1)).records
    assert refused.status is REFUSED


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200 * BLOCK_SIZE), st.integers(1, 60)), max_size=20),
    st.sampled_from([{Role.MIXED: 4}, {Role.PREFILL: 2, Role.DECODE: 2}, {Role.MIXED: 2}]),
)
def test_long_and_short_together_all_end(requests: list[tuple[int, int, int]], roles: dict[Role, int]) -> None:
    found = run(cluster_of(roles), *sorted(requests))
    assert all(record.status in (COMPLETED, REFUSED) for record in found.records)
