from __future__ import annotations

from itertools import permutations
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from isthmus.scheduler.queues import promise_order


class Waiting(msgspec.Struct, frozen=True):
    work_ns: int
    deadline_ns: int = 0
    is_ready: bool = True


def chosen(queue: list[Waiting], now: int = 0) -> int:
    return promise_order(queue, now, lambda request: request.is_ready)  # type: ignore[attr-defined]


def test_the_shortest_goes_first_when_nobody_was_promised_anything() -> None:
    assert chosen([Waiting(5), Waiting(3), Waiting(9), Waiting(2), Waiting(2)]) == 3


def test_the_first_of_equals_goes_first() -> None:
    assert chosen([Waiting(5), Waiting(5), Waiting(5)]) == 0


def test_nobody_goes_before_one_whose_promise_it_would_break() -> None:
    assert chosen([Waiting(5, 7), Waiting(3)]) == 0  # 2 to spare
    assert chosen([Waiting(5, 8), Waiting(3)]) == 1
    assert chosen([Waiting(5, 8), Waiting(3)], now=1) == 0
    assert chosen([Waiting(9), Waiting(5, 15), Waiting(3)]) == 1  # it has 1 to spare, behind the first
    assert chosen([Waiting(9), Waiting(5, 17), Waiting(3)]) == 2


def test_a_promise_that_is_broken_already_binds_nobody() -> None:
    assert chosen([Waiting(5, 4), Waiting(3)]) == 1


def test_who_comes_behind_is_not_delayed() -> None:
    assert chosen([Waiting(9), Waiting(3), Waiting(5, 17)]) == 1


def test_who_is_not_ready_waits_unless_it_is_the_head() -> None:
    assert chosen([Waiting(5), Waiting(3, is_ready=False), Waiting(4)]) == 2
    assert chosen([Waiting(5, is_ready=False), Waiting(7)]) == 0


def plainly(queue: list[Waiting], now: int) -> int:
    """docs: policy 4, written over all pairs. Slack: deadline less the end in order of arrival."""
    best = 0
    for index, request in enumerate(queue):
        ends = [now + sum(other.work_ns for other in queue[: at + 1]) for at in range(index)]
        slacks = [other.deadline_ns - end for other, end in zip(queue, ends, strict=False) if other.deadline_ns]
        fits = all(request.work_ns <= slack for slack in slacks if slack >= 0)
        if fits and request.is_ready and request.work_ns < queue[best].work_ns:
            best = index
    return best


requests = st.builds(
    Waiting,
    st.integers(1, 50),
    st.one_of(st.just(0), st.integers(1, 300)),
    st.sampled_from([True, True, False]),
)


@given(st.lists(requests, min_size=1, max_size=8), st.integers(0, 100))
def test_it_is_the_plain_rule(queue: list[Waiting], now: int) -> None:
    assert chosen(queue, now) == plainly(queue, now)


def run(queue: list[Waiting]) -> list[tuple[Waiting, int]]:
    """Who ends when, in the order of service, when nothing else comes."""
    left, now, ended = list(queue), 0, []
    while left:
        request = left.pop(chosen(left, now))
        now += request.work_ns
        ended.append((request, now))
    return ended


def admitted(random: Random) -> list[Waiting]:
    """Each is promised what first come first served would give it, or more."""
    queue, end = [], 0
    for _ in range(random.randint(1, 9)):
        work = random.randint(1, 50)
        end += work
        queue.append(Waiting(work, end + random.choice([0, 0, 20, 100, 400])))
    return queue


def test_whoever_was_admitted_in_order_of_arrival_keeps_its_promise() -> None:
    random, mean, plain_mean = Random(1), 0.0, 0.0
    for _ in range(500):
        queue = admitted(random)
        ended = run(queue)
        assert all(end <= request.deadline_ns for request, end in ended)
        mean += sum(end for _, end in ended) / len(queue)
        plain_mean += sum(sum(r.work_ns for r in queue[: at + 1]) for at in range(len(queue))) / len(queue)
    assert mean < 0.95 * plain_mean  # what it is for


def test_with_time_for_everybody_it_is_the_best_order() -> None:
    queue = [Waiting(work, 10**6) for work in (30, 10, 40, 20)]
    order = [request.work_ns for request, _ in run(queue)]
    means = {sum(sum(way[: at + 1]) for at in range(4)): way for way in permutations([30, 10, 40, 20])}
    assert tuple(order) == means[min(means)]
