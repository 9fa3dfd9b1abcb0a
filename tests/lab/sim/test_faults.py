from __future__ import annotations

import pytest

from isthmus.core.conductor import (
    Action,
    Conductor,
    Event,
    NodeJoined,
    NodeLeft,
    NodeStays,
    Route,
    Rules,
)
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S, Role
from isthmus.facts import NodeFacts
from isthmus.lab.sim.faults import DiskFault, Drain, Faults, LinkFault, NodeFault, SessionFault, read
from isthmus.lab.sim.records import COMPLETED, REFUSED, RequestStatus
from isthmus.lab.sim.workloads import Request

from .cluster import MS, deployment, disaggregated, nodes, run, shared_prompts, statuses

ENDS = frozenset(("dense", "local"))


def test_faults_are_read_as_they_are_written() -> None:
    assert read(LinkFault, "dense:local:60:120:0.2") == LinkFault("dense", "local", 60.0, 120.0, 0.2)
    assert read(NodeFault, "dense-prefill-0:1.5:inf") == NodeFault("dense-prefill-0", 1.5, float("inf"))
    assert read(Drain, "dense:1:2") == Drain("dense", 1.0, 2.0)
    assert read(DiskFault, "dense:1:2") == DiskFault("dense", 1.0, 2.0)
    assert read(SessionFault, "a:b:1:2:0.5") == SessionFault("a", "b", 1.0, 2.0, 0.5)
    assert read(SessionFault, "a:b:1:2:inf") == SessionFault("a", "b", 1.0, 2.0)


@pytest.mark.parametrize(
    ("kind", "texts", "says"),
    [
        (
            LinkFault,
            "dense:local:60:120 a:b:x:2:0 a:b:5:2:0 a:b:1:2:1.5 a:b:-1:2:0 a:b:inf:inf:0 a:b:1:nan:0",
            r"--link-fault .*write ONE:OTHER:START:STOP:FACTOR",
        ),
        (NodeFault, "n n:1 n:2:1 n:a:b", r"--node-fault .*write NAME:START:STOP"),
        (DiskFault, "n n:1 n:2:1 n:a:b", r"--disk-fault .*write NAME:START:STOP"),
        (
            SessionFault,
            "a:b:1:2 a:b:2:1:1 a:b:1:2:-1 a:b:1:2:x",
            r"--session-fault .*write ONE:OTHER:START:STOP:DELAY",
        ),
    ],
)
def test_a_fault_that_cannot_be_meant_is_refused(kind: type[NodeFault], texts: str, says: str) -> None:
    for text in texts.split():
        with pytest.raises(ConfigError, match=says):
            read(kind, text)


def test_what_nodes_say_is_late_both_ways_and_the_longest_delay_holds() -> None:
    faults = Faults(sessions=(SessionFault("a", "far", 1, 5, 0.25), SessionFault("b", "a", 2, 3)))
    one, other, third = ("a", ""), ("b", "far"), ("c", "")
    found = [faults.delay_ns(one, other, time * NS_PER_S) for time in (0, 1, 2, 3, 5)]
    assert found == [0, NS_PER_S // 4, None, NS_PER_S // 4, 0]
    assert faults.delay_ns(other, one, NS_PER_S) == NS_PER_S // 4
    assert faults.delay_ns(one, third, 2 * NS_PER_S) == 0
    assert faults.times() == [time * NS_PER_S for time in (1, 2, 3, 5)]


def test_a_fault_holds_from_its_start_to_its_stop_and_for_all_of_a_cluster() -> None:
    """Of faults of one link that overlap the smallest factor holds."""
    faults = Faults(
        (LinkFault("dense", "local", 1, 5, 0.5), LinkFault("local", "dense", 2, 3, 0.1)),
        nodes=(NodeFault("dense", 1, float("inf")),),
        disks=(DiskFault("dense", 1, float("inf")),),
    )
    found = [faults.factor(ENDS, int(time * NS_PER_S)) for time in (0, 1, 2, 3, 5)]
    assert found == [1.0, 0.5, 0.1, 0.5, 1.0]
    assert faults.factor(frozenset(("dense", "other")), 2 * NS_PER_S) == 1.0
    assert faults.times() == [1 * NS_PER_S, 2 * NS_PER_S, 3 * NS_PER_S, 5 * NS_PER_S]
    for names, time, fails in (
        ("dense", NS_PER_S, True),
        ("dense", NS_PER_S - 1, False),
        ("", NS_PER_S, False),
    ):
        assert faults.is_dead(("p", names), time) is fails
        assert faults.has_disk(("p", names), time) is not fails


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (Faults((LinkFault("a", "b", 0, 1),)), "a:b: no such link; there are: dense:local"),
        (
            Faults(nodes=(NodeFault("x", 0, 1),)),
            "x: .* there are: local, local-decode-0",
        ),
        (Faults(disks=(DiskFault("x", 0, 1),)), "--disk-fault x: no node or cluster has that name"),
        (
            Faults(sessions=(SessionFault("local", "y", 0, 1),)),
            "--session-fault y: no node or cluster has that name",
        ),
    ],
)
def test_a_fault_of_nothing_there_is_refused(faults: Faults, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        faults.check([("dense", "local")], ["local", "local-decode-0"])


@pytest.mark.parametrize(
    ("wait_ms", "status"),
    [(0, REFUSED), (300, REFUSED), (500, COMPLETED)],
)
def test_a_new_request_waits_for_a_node_as_it_does_live(wait_ms: int, status: RequestStatus) -> None:
    faults = Faults(nodes=(NodeFault("decode-0", 0.1, 0.5),))
    cluster = deployment(disaggregated(), Rules(wait_ms=wait_ms), faults=faults)
    [record] = run(cluster, [Request(110 * MS, 100, 10)]).records
    assert record.status is status
    if status is COMPLETED:
        assert record.first_token_ns > 500 * MS
    elif wait_ms:
        assert record.end_ns == (110 + wait_ms) * MS


@pytest.mark.parametrize("some", [disaggregated(3, 2), nodes(Role.MIXED, 3)], ids=["3P2D", "3M"])
def test_nodes_that_drain_one_after_another_cost_no_request(some: tuple[NodeFacts, ...]) -> None:
    """As for a new release: each node leaves once, by itself, and nothing is computed twice."""
    drains = [Drain(each.node, 3 * at + 0.1, 3 * at + 2.9) for at, each in enumerate(some)]
    rules, log = Rules(policy="isthmus"), list[tuple[int, Event, list[Action]]]()
    load = shared_prompts(1, 200, 3000 * len(some))
    result = run(
        deployment(some, rules, faults=Faults(drains=tuple(drains))), load, log=lambda *entry: log.append(entry)
    )
    assert statuses(result) == {COMPLETED}
    routes = [action for _, _, actions in log for action in actions if isinstance(action, Route)]
    assert len(routes) == 200, "one was routed again"
    left = [event.node for _, event, _ in log if isinstance(event, NodeLeft)]
    assert left == [each.node for each in some]
    joined = [event.node for _, event, _ in log if isinstance(event, NodeJoined)]
    assert joined == [each.node for each in some] * 2
    again = Conductor(rules)
    assert all(again.on(event, at) == actions for at, event, actions in log), "it replays"


def test_a_node_that_drains_until_its_time_is_up_stays() -> None:
    log = list[Event]()
    faults = Faults(drains=(Drain("mixed-0", 0.05, 0.2),))
    requests = [Request(10 * MS, 100, 100), Request(300 * MS, 100, 2)]
    cluster = deployment(nodes(Role.MIXED, 1), Rules(), faults=faults)
    assert statuses(run(cluster, requests, log=lambda _, event, __: log.append(event))) == {COMPLETED}
    assert [type(event) for event in log if not isinstance(event, NodeJoined)].count(NodeStays) == 1
    assert not any(isinstance(event, NodeLeft) for event in log)
