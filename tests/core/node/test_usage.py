"""What a node says of its memory, and when."""

from __future__ import annotations

from isthmus.core.attempts import MemoryUsed
from isthmus.core.node import Node
from isthmus.core.node.events import DropAttempt, StartAttempt, Wake, Woken
from isthmus.core.scheduler import BlockPool, Scheduler
from isthmus.core.types import DECODE, NodeId, RequestId, Role

from .world import limits_of, route_of

HERE, PERIOD_NS = NodeId("decode-0"), 100


def begin(name: str) -> StartAttempt:
    return StartAttempt(RequestId(f"{name}#1"), DECODE, route_of(name, NodeId("prefill-0"), HERE), 22, 30)


def test_what_changed_within_a_period_is_told_at_its_end_though_nothing_happens_then() -> None:
    limits = limits_of(40, 0)
    scheduler = Scheduler(limits, None, BlockPool(40), node=HERE)
    node = Node(dict.fromkeys(Role, limits), scheduler, report_ns=PERIOD_NS)

    def told(*happened: object, now: int) -> list[object]:
        actions = [each for event in happened for each in node.on(event, now)]  # type: ignore[arg-type]
        return [each for each in actions if isinstance(each, MemoryUsed | Wake)]

    [used] = told(begin("a"), now=1)
    assert isinstance(used, MemoryUsed)
    [used] = told(DropAttempt(RequestId("a#1")), now=1 + PERIOD_NS)
    assert isinstance(used, MemoryUsed) and used.num_available == 40
    due_ns = 1 + 2 * PERIOD_NS
    assert told(begin("b"), now=due_ns - 50) == [Wake(due_ns)]
    assert told(begin("c"), now=due_ns - 40) == []
    [used] = told(Woken(), now=due_ns)
    assert isinstance(used, MemoryUsed) and {each.request for each in used.entries} == {"b", "c"}
    assert told(Woken(), now=due_ns + PERIOD_NS) == []
