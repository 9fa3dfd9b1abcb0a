from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.scheduler import SchedulerLimits, Sequence
from isthmus.core.scheduler.turns import Turns
from isthmus.core.types import RequestId, Tenant

SIZE = 4
WEIGHTS = {"acme": 1.0, "globex": 1.0, "third": 3.0}


def sequence(tenant: str, number: int, length: int = 8) -> Sequence:
    made = Sequence(RequestId(f"{tenant}-{number}"), length, length + 1)
    made.tenant = Tenant(tenant, WEIGHTS[tenant])
    return made


class Queue:
    def __init__(self, **limits: int) -> None:
        self.turns = Turns(msgspec.structs.replace(SchedulerLimits(100, SIZE), **limits))
        self.waiting: list[Sequence] = []
        self._count = 0

    def arrive(self, tenant: str, length: int = 8) -> Sequence:
        self._count += 1
        made = sequence(tenant, self._count, length)
        self.turns.arrive(made.tenant)
        self.waiting.append(made)
        return made

    def next(self) -> Sequence:
        taken = self.waiting.pop(self.turns.indexes(self.waiting)[0])
        self.turns.take(taken, taken.length)
        return taken

    def order(self, count: int) -> list[str]:
        return [self.next().tenant.name for _ in range(count)]


@given(
    st.lists(
        st.one_of(st.none(), st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(1, 200))), max_size=120
    )
)
def test_tenants_that_wait_all_the_time_get_equal_work_for_their_weight(
    told: list[tuple[str, int] | None],
) -> None:
    """None: the next has its turn. Any two tenants that both waited all through a stretch of time get, in it, work that
    differs by a prompt of each at most: the bound of start-time fair queueing."""
    queue, history = Queue(), list[tuple[frozenset[str], str, float]]()
    for what in [*told, *[None] * len(told)]:
        if what is not None:
            queue.arrive(*what)
        elif queue.waiting:
            present = frozenset(each.tenant.name for each in queue.waiting)
            assert queue.turns.is_shared or len(present) == 1
            taken = queue.next() if queue.turns.is_shared else queue.waiting.pop(0)
            history.append((present, taken.tenant.name, taken.length / taken.tenant.weight))
    for one, other in (("acme", "globex"), ("acme", "third")):
        most = sum(200 / WEIGHTS[name] for name in (one, other))
        ahead = low = high = 0.0
        for present, name, work in history:
            if not present >= {one, other}:
                ahead = low = high = 0.0
                continue
            ahead += work if name == one else -work if name == other else 0.0
            low, high = min(low, ahead), max(high, ahead)
            assert high - low <= most + 1e-6


def test_of_one_tenant_the_first_comes_first() -> None:
    queue = Queue()
    own = [queue.arrive("acme", length) for length in (50, 3, 9)]
    queue.arrive("globex", 1)
    assert [each for each in (queue.next() for _ in range(4)) if each.tenant.name == "acme"] == own


def test_who_comes_back_begins_where_the_others_are() -> None:
    queue = Queue()
    for _ in range(30):
        queue.arrive("acme")
    queue.arrive("globex")
    assert "globex" in queue.order(2)
    queue.order(20)
    for _ in range(5):
        queue.arrive("globex")
    assert queue.order(6).count("acme") >= 2


def test_generated_tokens_count_too() -> None:
    queue = Queue()
    first = queue.arrive("acme")
    for tenant in ("globex", "acme", "globex", "globex", "globex"):
        queue.arrive(tenant)
    assert queue.order(2) == ["acme", "globex"]
    queue.turns.serve(first, 16)
    assert queue.order(3) == ["globex"] * 2 + ["acme"]


def test_who_was_pre_empted_goes_first() -> None:
    queue = Queue()
    victim = queue.arrive("acme", 1000)
    queue.arrive("globex")
    assert queue.next() is victim
    victim.age = 1
    queue.waiting.insert(0, victim)
    assert queue.next() is victim


def may_pass(queue: Queue, index: int, *, holds: bool = True) -> bool:
    return queue.turns.may_pass(queue.waiting, index, lambda each: each.length // SIZE, holds=holds)


def test_those_that_pass_others_leave_enough_for_each_that_they_passed() -> None:
    """Of 100 blocks 12 may be kept free for those that run."""
    queue = Queue()
    for blocks in (40, 30, 49):
        queue.arrive("acme", blocks * SIZE)
    passing = queue.arrive("globex", 39 * SIZE)
    assert may_pass(queue, 3) is (39 + 49 <= 88)
    queue.turns.passed(passing, 39)
    assert queue.turns.has_ahead
    assert not may_pass(queue, 2, holds=True)
    assert may_pass(queue, 2, holds=False), "it waits for nobody, and fits beside the other"
    queue.arrive("third", 50 * SIZE)
    assert not may_pass(queue, 4, holds=False), "it would wait for one that may wait for those it passed"
    queue.turns.gone(passing)
    assert may_pass(queue, 4, holds=False) and not queue.turns.has_ahead
    assert not may_pass(queue, 4)


def test_the_last_place_is_for_who_came_first() -> None:
    queue = Queue(max_sequences=2)
    for tenant in ("acme", "globex", "third"):
        queue.arrive(tenant)
    assert may_pass(queue, 1)
    queue.turns.passed(queue.waiting.pop(1), 2)
    assert not may_pass(queue, 1)
    assert may_pass(queue, 1, holds=False)
