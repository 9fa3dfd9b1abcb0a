"""The network against a slow reference: at every change all rates grown together from nothing, in fractions."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.lab.sim.network import Flow, FlowNetwork

GB = 1e9


def fair_rates(capacities: list[float], paths: list[tuple[int, ...]]) -> list[Fraction | float]:
    """Max-min rates by the textbook: raise all alike until a link is full, freeze its flows, go on."""
    rates: list[Fraction | float] = [Fraction(0)] * len(paths)
    growing = []
    for index, path in enumerate(paths):
        if all(math.isinf(capacities[link]) for link in path):
            rates[index] = math.inf
        else:
            growing.append(index)
    room = {link: Fraction(capacity) for link, capacity in enumerate(capacities) if not math.isinf(capacity)}
    while growing:
        crossing = {link: sum(link in paths[index] for index in growing) for link in room}
        step = min(room[link] / number for link, number in crossing.items() if number)
        for link, number in crossing.items():
            room[link] -= step * number
        for index in growing:
            rates[index] += step
        growing = [index for index in growing if all(room.get(link, 1) > 0 for link in paths[index])]
    return rates


# A rounded end comes up to 0.7 ns early; so much passes the fastest limited link in ten times that.
SLACK = 25 * 7


class Reference:
    """Follows a network in lockstep: what is left of each flow, by the rates of the textbook."""

    def __init__(self, capacities: list[float]) -> None:
        self.network = FlowNetwork()
        self.capacities = list(capacities)
        for number, capacity in enumerate(capacities):
            assert self.network.add_link(f"link {number}", capacity) == number
        self.now = 0
        self.paths: dict[Flow, tuple[int, ...]] = {}
        self.left: dict[Flow, Fraction] = {}
        self.moved = [Fraction(0)] * len(capacities)
        self.busy = [0] * len(capacities)

    def rates(self) -> dict[Flow, Fraction | float]:
        return dict(zip(self.paths, fair_rates(self.capacities, list(self.paths.values())), strict=True))

    def move_to(self, now: int) -> None:
        elapsed = now - self.now
        for flow, rate in self.rates().items():
            if math.isinf(rate):
                self.move(flow, self.left[flow])
            else:
                self.move(flow, min(self.left[flow], rate * Fraction(elapsed, 10**9)))
        for link in range(len(self.capacities)):
            if any(link in path for path in self.paths.values()):
                self.busy[link] += elapsed
        self.now = now

    def move(self, flow: Flow, num_bytes: Fraction) -> None:
        self.left[flow] -= num_bytes
        for link in self.paths[flow]:
            self.moved[link] += num_bytes

    def start(self, path: tuple[int, ...], num_bytes: int) -> None:
        flow = self.network.start(path, num_bytes, len(self.paths), self.now)
        self.paths[flow] = path
        self.left[flow] = Fraction(num_bytes)

    def drop(self, flow: Flow) -> None:
        del self.paths[flow], self.left[flow]

    def finish(self) -> None:
        """On to the next end of a flow, if there is one, and everything that ends then."""
        then = self.network.next_finish()
        if then is None:
            assert all(rate == 0 for rate in self.rates().values())
            return
        self.move_to(then)
        before = list(self.paths)
        ended = self.network.finish(then)
        assert ended == [flow for flow in before if flow in ended], "not in order of start"
        for flow in ended:
            assert self.left[flow] <= SLACK
            self.move(flow, self.left[flow])
            self.drop(flow)
        assert ended or not before

    def compare(self) -> None:
        self.move_to(self.now)  # what is unlimited has arrived
        self.network.check()
        for flow, rate in self.rates().items():
            if math.isfinite(rate):
                assert flow.rate == pytest.approx(float(rate), rel=1e-9)
            assert abs(self.network.bytes_left(flow, self.now) - self.left[flow]) <= SLACK
        for link in range(len(self.capacities)):
            assert self.network.busy_ns(link, self.now) == self.busy[link]
            assert self.network.bytes_moved(link, self.now) == pytest.approx(
                float(self.moved[link]), rel=1e-12, abs=9 * SLACK
            )


CAPACITIES = st.sampled_from([1 * GB, 2 * GB, 3 * GB, 7 * GB, 12.5 * GB, 12.5 * GB, 25 * GB, math.inf])
NUM_LINKS = 6
PATHS = st.lists(st.integers(0, NUM_LINKS - 1), min_size=1, max_size=4, unique=True).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("start"), PATHS, st.sampled_from([0, 1, 1000, 10**6, 10**8, 10**9, 3 * 10**9])),
    st.tuples(st.just("start"), PATHS, st.integers(0, 10**10)),
    st.tuples(st.just("finish")),
    st.tuples(st.just("wait"), st.integers(0, 100)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("grow"), st.integers(0, 20), st.integers(1, 10**9)),
    st.tuples(
        st.just("set_rate"), st.integers(0, NUM_LINKS - 1), st.sampled_from([0.0, 1 * GB, 5 * GB, math.inf])
    ),
)


def take(reference: Reference, step: tuple) -> None:
    network, flows = reference.network, list(reference.paths)
    match step:
        case ("start", path, num_bytes):
            reference.start(path, num_bytes)
        case ("finish",):
            reference.finish()
        case ("wait", percent):
            then = network.next_finish()
            width = 10**6 if then is None else then - reference.now
            reference.move_to(reference.now + width * percent // 100)
        case ("cancel", index) if flows:
            flow = flows[index % len(flows)]
            gone = flow.num_bytes - network.bytes_left(flow, reference.now)
            network.cancel(flow, reference.now)
            assert gone == pytest.approx(float(flow.num_bytes - reference.left[flow]), abs=SLACK)
            reference.drop(flow)
        case ("grow", index, num_bytes) if flows:
            flow = flows[index % len(flows)]
            network.grow(flow, num_bytes, reference.now)
            reference.left[flow] += num_bytes
        case ("set_rate", link, rate):
            network.set_rate(link, rate, reference.now)
            reference.capacities[link] = rate


@settings(max_examples=150)
@given(st.lists(CAPACITIES, min_size=NUM_LINKS, max_size=NUM_LINKS), st.lists(STEPS, max_size=30))
def test_every_rate_and_every_byte_is_the_references(capacities: list[float], steps: list[tuple]) -> None:
    reference = Reference(capacities)
    for step in steps:
        take(reference, step)
        reference.compare()
    for link in range(NUM_LINKS):
        take(reference, ("set_rate", link, GB))
    while reference.paths:
        reference.finish()
    reference.compare()
    assert reference.network.next_finish() is None


def one_link(bytes_per_s: float = GB) -> FlowNetwork:
    network = FlowNetwork()
    network.add_link("only", bytes_per_s)
    return network


def tags(flows: list[Flow]) -> list[object]:
    return [flow.tag for flow in flows]


def test_a_flow_alone_takes_its_bytes_over_its_narrowest_link() -> None:
    network = FlowNetwork()
    path = tuple(network.add_link(f"link {rate}", rate * GB) for rate in (25, 10, 50))
    network.start(path, 10**9, "kv", 5)
    assert network.next_finish() == 100_000_005
    assert tags(network.finish(100_000_005)) == ["kv"]
    assert network.next_finish() is None
    assert [network.bytes_moved(link, 200_000_000) for link in path] == [10**9] * 3
    assert [network.busy_ns(link, 200_000_000) for link in path] == [100_000_000] * 3


def test_an_end_and_a_start_at_one_instant_may_come_in_either_order() -> None:
    """The end does not move because the driver looks at another event of that instant first."""

    def times(*, start_first: bool) -> list[int | None]:
        network = one_link(3 * GB)
        network.start((0,), 10**9, "ends", 0)
        network.start((0,), 3 * 10**9, "stays", 0)
        then = network.next_finish()
        assert then is not None
        ended = [] if start_first else network.finish(then)
        network.start((0,), 10**9, "starts", then)
        if start_first:
            assert network.next_finish() == then
            ended = network.finish(then)
        assert tags(ended) == ["ends"]
        return [then, network.next_finish()]

    assert times(start_first=True) == times(start_first=False)


def test_the_version_says_when_to_set_the_timer_again() -> None:
    network = one_link()
    versions = [network.version]
    flow = network.start((0,), 10**9, "kv", 0)
    versions.append(network.version)
    network.next_finish()
    assert network.version == versions[-1], "asking changes nothing"
    network.grow(flow, 1, 0)
    versions.append(network.version)
    network.set_rate(0, 2 * GB, 0)
    versions.append(network.version)
    network.cancel(flow, 0)
    versions.append(network.version)
    assert sorted(set(versions)) == versions


def test_mistakes_of_a_driver_are_asserted() -> None:
    network = FlowNetwork()
    network.add_link("network", GB)
    network.add_link("device", GB, behind=0)
    for path, says in (
        ((), "distinct"),
        ((0, 0), "distinct"),
        ((0, 1, 0), "distinct"),
        ((1,), "passes a link by"),
    ):
        with pytest.raises(AssertionError, match=says):
            network.start(path, 1, None, 0)
    for rate in (-1.0, math.nan):
        with pytest.raises(AssertionError, match="only"):
            one_link(rate)
    flow = network.start((0,), 10**9, "kv", 0)
    network.finish(10**9)
    for change in (lambda: network.cancel(flow, 10**9), lambda: network.grow(flow, 1, 10**9)):
        with pytest.raises(AssertionError, match="'kv' has ended"):
            change()


def test_check_finds_a_rate_that_is_not_fair() -> None:
    network = one_link()
    flow = network.start((0,), 10**9, "kv", 0)
    network.start((0,), 10**9, "other", 0)
    network.check()
    flow.rate *= 0.9
    with pytest.raises(AssertionError):
        network.check()


def test_a_link_behind_another_is_counted_and_holds_back_only_where_it_is_narrower() -> None:
    network = FlowNetwork()
    network.add_link("network", 1 * GB)
    network.add_link("device", 1 * GB, behind=0)
    network.start((0, 1), 10**9, "first", 0)
    network.start((0, 1), 10**9, "second", 0)
    assert tags(network.finish(2 * 10**9)) == ["first", "second"]
    assert network.bytes_moved(1, 2 * 10**9) == 2 * 10**9
    assert network.busy_ns(1, 2 * 10**9) == 2 * 10**9
    network.start((0, 1), 10**9, "kv", 2 * 10**9)
    network.set_rate(0, 4 * GB, 25 * 10**8)
    network.check()
    assert network.next_finish() == 3 * 10**9
    network.set_rate(1, 2 * GB, 25 * 10**8)
    network.check()
    assert network.next_finish() == 275 * 10**7


class Pair:
    """The same flows twice: once with every end told, and once as they ask. Rates and counts must agree."""

    def __init__(self, capacities: list[float]) -> None:
        self.told, self.asked = FlowNetwork(), FlowNetwork()
        for number, capacity in enumerate(capacities):
            for network in (self.told, self.asked):
                network.add_link(f"link {number}", capacity)
        self.now = 0
        self.flows: list[tuple[Flow, Flow, tuple[int, ...]]] = []
        self.over: set[Flow] = set()  # of those that are told

    def start(self, path: tuple[int, ...], num_bytes: int, quiet: bool) -> None:
        tag = len(self.flows)
        told = self.told.start(path, num_bytes, tag, self.now)
        self.flows.append((told, self.asked.start(path, num_bytes, tag, self.now, quiet=quiet), path))

    def grow(self, index: int, num_bytes: int) -> None:
        told, asked, path = self.flows[index]
        if told not in self.over:
            self.told.grow(told, num_bytes, self.now)
        elif asked.quiet:  # it has ended for whoever asks
            told = self.told.start(path, num_bytes, told.tag, self.now)
        else:
            return
        self.asked.grow(asked, num_bytes, self.now)
        self.flows[index] = told, asked, path

    def cancel(self, index: int) -> None:
        told, asked, _ = self.flows.pop(index)
        if told not in self.over:
            self.told.cancel(told, self.now)
            self.asked.cancel(asked, self.now)
        elif asked.quiet:
            self.asked.cancel(asked, self.now)

    def set_rate(self, link: int, bytes_per_s: float) -> None:
        self.told.set_rate(link, bytes_per_s, self.now)
        self.asked.set_rate(link, bytes_per_s, self.now)

    def wait(self, percent: int) -> bool:
        """Part of the way to the next end, or all of it, which leaves no end out. False: nothing will end."""
        ends = [end for end in (self.told.next_finish(), self.asked.next_finish()) if end is not None]
        if not ends:
            return False
        assert self.told.next_finish() == min(ends), "an end that is not one"
        self.now += (min(ends) - self.now) * percent // 100
        quiet = {told for told, asked, _ in self.flows if asked.quiet}
        ended = self.told.finish(self.now)
        assert tags(self.asked.finish(self.now)) == tags([flow for flow in ended if flow not in quiet])
        self.over.update(ended)
        return True

    def compare(self) -> None:
        self.told.check()
        self.asked.check()
        for told, asked, _ in self.flows:
            if told not in self.over:
                assert (asked.rate, asked.finish_ns) == (told.rate, told.finish_ns)
        for link in range(NUM_LINKS):
            for count in (FlowNetwork.bytes_moved, FlowNetwork.busy_ns):
                assert count(self.asked, link, self.now) == count(self.told, link, self.now)


PAIR_STEPS = st.one_of(
    st.tuples(st.just("start"), PATHS, st.integers(0, 10**10), st.booleans()),
    st.tuples(st.just("grow"), st.integers(0, 20), st.integers(1, 10**9)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.sampled_from([30, 100, 100])),
    st.tuples(
        st.just("set_rate"), st.integers(0, NUM_LINKS - 1), st.sampled_from([0.0, 1 * GB, 5 * GB, math.inf])
    ),
)


@settings(max_examples=150)
@given(st.lists(CAPACITIES, min_size=NUM_LINKS, max_size=NUM_LINKS), st.lists(PAIR_STEPS, max_size=30))
def test_a_quiet_flow_moves_as_any_other(capacities: list[float], steps: list[tuple]) -> None:
    pair = Pair(capacities)
    for name, *arguments in steps:
        if name in ("grow", "cancel"):
            if not pair.flows:
                continue
            arguments[0] %= len(pair.flows)
        getattr(pair, name)(*arguments)
        while pair.told.next_finish() == pair.now:  # a quiet flow leaves no end out that is due
            pair.wait(100)
        pair.compare()
    while pair.wait(100):
        pair.compare()


def test_the_end_of_a_quiet_flow_sets_no_timer() -> None:
    network = one_link()
    flow = network.start((0,), 10**9, "kv", 0, quiet=True)
    assert network.next_finish() is None
    network.grow(flow, 10**9, 5 * 10**9)
    assert network.next_finish() == 6 * 10**9
    assert tags(network.finish(6 * 10**9)) == ["kv"]
    assert network.bytes_moved(0, 6 * 10**9) == 2 * 10**9
    assert network.busy_ns(0, 6 * 10**9) == 2 * 10**9
    network.check()


def test_a_link_is_busy_until_its_last_flow_ends_though_a_quiet_one_is_taken_off_later() -> None:
    network = FlowNetwork()
    slow, other, wide = (network.add_link(name, rate) for name, rate in (("a", GB), ("b", GB), ("c", 4 * GB)))
    network.start((slow, wide), 10**9, "quiet", 0, quiet=True)
    network.start((other, wide), 3 * 10**9, "other", 0)
    network.finish(3 * 10**9)
    assert network.busy_ns(wide, 5 * 10**9) == 3 * 10**9
    network.start((other, wide), 10**9, "next", 5 * 10**9)
    network.finish(6 * 10**9)
    assert [network.busy_ns(link, 7 * 10**9) for link in (slow, other, wide)] == [10**9, 4 * 10**9, 4 * 10**9]


def test_a_quiet_flow_that_goes_on_after_its_link_changed_has_the_new_rate() -> None:
    """It had ended when the capacity changed, so nothing was left of it on the link."""
    network = one_link()
    network.set_rate(0, 0.5 * GB, 0)
    flow = network.start((0,), 10**9, "kv", 0, quiet=True)
    network.set_rate(0, GB, 5 * 10**9)
    network.start((0,), 5 * 10**8, "other", 5 * 10**9)
    network.grow(flow, 10**9, 5 * 10**9)
    network.check()
    assert tags(network.finish(6 * 10**9)) == ["other"]
    network.check()
    assert network.next_finish() == 65 * 10**8


@pytest.mark.parametrize("seed", range(20))
def test_flows_kept_in_step_end_when_they_would_by_themselves(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the nanosecond and in the same order, whatever happens to them on their way."""

    def ends(many: int) -> list[tuple[int, list[object]]]:
        monkeypatch.setattr("isthmus.lab.sim.network._MANY", many)
        rng, network, now = random.Random(seed), FlowNetwork(), 0
        told: list[tuple[int, list[object]]] = []
        links = [network.add_link(f"link {number}", rng.choice((GB, 3 * GB, 7 * GB))) for number in range(4)]
        flows: list[Flow] = []
        for number in range(300):
            then, looks_first = network.next_finish(), number % 4 > 0
            now = then if then is not None and not looks_first else now + rng.choice((0, 1, 10**6, 3 * 10**7))
            while then is not None and then < now + looks_first:
                told.append((then, tags(network.finish(then))))
                then = network.next_finish()
            live = [flow for flow in flows if flow.live]
            change = rng.choice(("start", "start", "start", "grow", "cancel", "look", "rate"))
            if change == "start" or not live:
                path = tuple(rng.sample(links, 2)) if number % 3 else (links[0], links[1])
                flows.append(
                    network.start(path, rng.choice((10**6, 10**7, 10**8)), number, now, quiet=not number % 5)
                )
            elif change == "grow":
                network.grow(rng.choice(live), rng.randrange(10**8), now)
            elif change == "cancel":
                network.cancel(rng.choice(live), now)
            elif change == "look":
                told.append((now, [network.bytes_left(flow, now) for flow in live[:2]]))
            elif number % 7 == 0:
                network.set_rate(links[0], rng.choice((0, GB, 2 * GB)), now)
                network.check()
        return told

    together = ends(2)
    assert len(together) > 50
    assert together == ends(1 << 30)


def test_a_quiet_flow_that_was_slowed_goes_on_at_the_instant_of_its_end() -> None:
    network = one_link()
    quiet = network.start((0,), 10**9, "quiet", 0, quiet=True)
    network.start((0,), 10**9, "other", 0)
    network.cancel(network.flows_on(0)[1], 10**9)
    assert network.next_finish() == 1_500_000_000
    network.grow(quiet, 10**9, 1_500_000_000)
    assert network.next_finish() == 2_500_000_000
