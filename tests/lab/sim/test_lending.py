"""Nodes lend each other memory, in virtual time: what it brings, that it brings nothing where nothing is to be had, and
that debts are what nodes hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import mean

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.core.attempts import key_of
from isthmus.core.conductor import Action, Event, Lend, Repay, Rules
from isthmus.core.conductor.view import WAITING
from isthmus.core.types import NodeId, Role
from isthmus.facts import make_known
from isthmus.lab.papers.infinite_llm.lending import GREEDY, LEDGER
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.faults import Faults, NodeFault
from isthmus.lab.sim.records import COMPLETED, Result
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request

from .cluster import MS, deployment, nodes, statuses, workload

POLICIES = [LEDGER, GREEDY, "isthmus"]
NODE_BLOCKS = 400


def cluster_of(
    policy: str, roles: dict[Role, int], num_blocks: int = NODE_BLOCKS, **fields: object
) -> Deployment:
    made = [each for role, count in roles.items() for each in nodes(role, count)]
    small = [msgspec.structs.replace(facts, kv_blocks=num_blocks, token_budget=512) for facts in made]
    rules = Rules(policy="round_robin", lending=policy, max_requests=1 << 30)
    make_known(rules)
    report_ns = 0 if policy == "none" else 100 * MS
    return deployment(tuple(small), rules, report_ns=report_ns, **fields)


def run(
    cluster: Deployment, requests: Sequence[Request], *, check: bool = False
) -> tuple[Result, Counter[type]]:
    """Also how often each action of the conductor came."""
    acted: Counter[type] = Counter()

    def log(now: int, event: Event, actions: list[Action]) -> None:
        acted.update(map(type, actions))

    kind = Debts if check else Simulation
    return kind(cluster, workload(requests), log=log, check=check).run(), acted


def short(every_ms: float, count: int = 600) -> list[Request]:
    return [Request(int((200 + at * every_ms) * MS), num_tokens=96, output_tokens=64) for at in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("every_ms", [20, 8, 4])
def test_where_all_requests_are_alike_nothing_moves_and_nothing_changes(policy: str, every_ms: int) -> None:
    """In the last case they come faster than they are answered, and all nodes are full."""
    before, _ = run(cluster_of("none", {Role.MIXED: 4}), short(every_ms))
    after, acted = run(cluster_of(policy, {Role.MIXED: 4}), short(every_ms))
    assert acted[Lend] == acted[Repay] == 0
    assert before.records == after.records


@cache
def latency(policy: str, length: int, every_ms: int) -> float:
    """Of short requests, beside a long one on one of the nodes."""
    found, _ = run(
        cluster_of(policy, {Role.MIXED: 4}), [Request(0, length, output_tokens=1500), *short(every_ms)]
    )
    return mean([record.end_ns - record.arrival_ns for record in found.records[1:]])


def gain(policy: str, length: int, every_ms: int) -> float:
    return latency("none", length, every_ms) / latency(policy, length, every_ms)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gain_grows_with_the_spread_of_lengths_and_with_the_load(policy: str) -> None:
    by_length = [gain(policy, length, 10) for length in (100, 1000, 3000)]
    assert 1.0 == by_length[0] < by_length[1] < by_length[2] and by_length[2] > 1.3
    by_load = [gain(policy, 3000, every_ms) for every_ms in (40, 20, 10)]
    assert 1.0 == by_load[0] < by_load[1] < by_load[2]


class Debts(Simulation):
    """After each event, what each node holds for others is what the conductor believes that they borrowed of it, but
    for attempts that are over, of requests on hold as well; and who borrowed lends nothing. The conductor gives up what
    an attempt has as soon as it ends it, and holders when they hear of that."""

    def _check_all(self) -> None:
        super()._check_all()
        view, named = self._desk.conductor.view, self._nodes.by_name
        owing = {request.decode for request in view.requests.values() if request.held}
        live = {
            key_of(name, request.attempt): request
            for name, request in view.requests.items()
            if request.state is not WAITING
        }
        for name, node in view.nodes.items():
            guests = named[name].decider._holder._guests
            held = {key: sum([each.room for each in live[key].lent if node in each.holders]) for key in live}
            assert {key: len(guest.blocks) for key, guest in guests.items() if key in live} == {
                key: count for key, count in held.items() if count
            }
            assert not (node.lent_blocks and node in owing), "who borrowed lends"


CROWD = [
    *((0, 57, 187), (0, 800, 300), (0, 1100, 349), (40, 300, 377), (40, 800, 450), (50, 1480, 400)),
    *((56, 1029, 138), (59, 653, 400), (60, 700, 200), (70, 435, 300), (80, 632, 129)),
]
"""One of them loses its memory while a holder has blocks of it, and goes on hold."""


@example(CROWD, "isthmus", {Role.MIXED: 3})
@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(1, 1500), st.integers(1, 500)), min_size=10, max_size=50
    ),
    st.sampled_from(POLICIES),
    st.sampled_from([{Role.MIXED: 3}, {Role.PREFILL: 1, Role.DECODE: 3}]),
)
def test_debts_are_what_nodes_hold_for_each_other(
    requests: list[tuple[int, int, int]], policy: str, roles: dict[Role, int]
) -> None:
    made = [Request(at * MS, tokens, out) for at, tokens, out in sorted(requests)]
    found, _ = run(cluster_of(policy, roles, num_blocks=130), made, check=True)
    assert statuses(found) == {COMPLETED}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_holder_that_is_gone_costs_an_attempt_and_no_request(policy: str) -> None:
    faults = Faults(nodes=(NodeFault(NodeId("mixed-1"), 4.0, 5.0),))
    cluster = cluster_of(policy, {Role.MIXED: 3}, num_blocks=200, faults=faults)
    found, acted = run(cluster, [Request(0, 2400, output_tokens=500), *short(12)])
    assert statuses(found) == {COMPLETED} and acted[Lend] > 0
