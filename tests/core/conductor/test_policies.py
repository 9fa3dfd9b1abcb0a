"""Every policy against a plain evaluation of its rule over all options, on random views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest

from isthmus.core.conductor import NodeJoined, Paths, Rules
from isthmus.core.conductor.estimates import Estimator, can_copy
from isthmus.core.conductor.policies import POLICIES, STICKY_BLOCKS
from isthmus.core.conductor.view import NodeView, Placement
from isthmus.core.types import NS_PER_S, NodeId, Role

from .views import BLOCK_SIZE, LINK, MS, SLOW, arrival, estimator, queue_up, random_view, view_of

P, D = Role.PREFILL, Role.DECODE
NAMES = list(range(10))
NOW = 10**12


def place(policy: str, found: Estimator, **parameters: float) -> Placement:
    return POLICIES[policy](found, Rules(policy=policy), **parameters)


def views(count: int, seed: int = 0) -> Iterator[tuple[Random, Estimator]]:
    random = Random(seed)
    for _ in range(count):
        view, request = random_view(random, NOW)
        yield random, estimator(view, request, NOW)


# The rules, written plainly. Times in ns as floats; nothing of the code under test but the view's raw facts.


class Plain:
    """One request's options on a view."""

    def __init__(self, found: Estimator) -> None:
        self.view, self.request, self.nodes = found.view, found.request, found.nodes
        self.waits = {node: max(0, node.free_ns - NOW) for node in self.nodes}
        match = self.view.index.match
        self.finished = {node: match(self.request.names, node.bit)[0][0][0] for node in self.nodes}
        self.depth = {node: match(self.request.names, node.bit)[1][0][0] for node in self.nodes}

    def compute(self, node: NodeView, num_blocks: int) -> float:
        cached = min(num_blocks * node.block_size, self.request.num_tokens - 1)
        return (
            node.cost.prefill_ns(self.request.num_tokens - cached, cached)
            * self.view.clusters[""].calibration.ratio
        )

    def transfer(self, source: NodeView, target: NodeView, stop: int) -> tuple[float, float]:
        """(time, delay to others): section 2, points 2 and 5; and longer for the copies that will come."""
        size = (stop - self.depth[target]) * target.block_bytes
        times, delays = [], {}
        for link in (source.link_out, target.link_in):
            for copy in link.copies:
                delay = min(copy.bytes_left(NOW), size) * NS_PER_S / link.bytes_per_s
                delays[copy] = max(delay, delays.get(copy, 0.0))
            ahead = sum(min(copy.bytes_left(NOW), size) for copy in link.copies)
            times.append((size + ahead) * NS_PER_S / link.bytes_per_s)
        later = source.link_out.stretch(NOW) * target.link_in.stretch(NOW)
        return max(times) * later, sum(delays.values())

    def linked(self, source: NodeView, target: NodeView) -> bool:
        return source is not target and source.paths.network > 0 and target.paths.network > 0

    def work(self, source: NodeView, target: NodeView, stop: int) -> float:
        return max(self.compute(target, stop), self.transfer(source, target, stop)[0] - self.waits[target])

    def holder(self, num_blocks: int) -> NodeView | None:
        """Of those with a link and just so many finished blocks, the first that sends least."""
        holders = [node for node in self.nodes if self.finished[node] == num_blocks and node.paths.network]
        return min(holders, key=lambda node: len(node.link_out.copies), default=None)

    def mooncake_ttfts(self, threshold: float) -> dict[NodeView, float]:
        """Algorithm 1 (FAST'25) with `best > threshold * own`, transfer and compute overlapping."""
        best, ttfts = max(self.finished.values()), {}
        holder = self.holder(best)
        for node in self.nodes:
            own = self.depth[node]
            if holder is not None and best > threshold * own and best > own and self.linked(holder, node):
                ttfts[node] = self.waits[node] + self.work(holder, node, best)
            else:
                ttfts[node] = self.waits[node] + self.compute(node, own)
        return ttfts

    # policy.md, section 2.

    def score(self, node: NodeView, source: NodeView | None, stop: int) -> float:
        backlog = sum(self.waits.values()) / len(self.nodes)
        price = self.view.clusters[""].recent.rate(NOW) / len(self.nodes) * backlog / NS_PER_S
        of_work = price + (node.batch if node.role is Role.MIXED else 0)  # who decodes here waits as well
        room = self.view.clusters[""].recent.loss_per_block_ns(NOW) * (
            len(self.request.names) - self.depth[node]
        )
        work, delay = self.compute(node, stop), 0.0
        if source is not None:
            work, delay = self.work(source, node, stop), self.transfer(source, node, stop)[1]
        return self.waits[node] + work + of_work * work + price * room + delay

    def options(self) -> Iterator[tuple[NodeView, NodeView | None, int]]:
        """No fetch; all of a fetch; and where it would outlast queue and compute, what is around the crossing."""
        for node in self.nodes:
            own = self.depth[node]
            yield node, None, own
            for whole in sorted(set(self.finished.values())):
                source = self.holder(whole)
                if source is None or whole <= own or not self.linked(source, node):
                    continue
                yield node, source, whole
                for stop in range(own + 1, whole + 1):
                    wait = self.waits[node] + self.compute(node, stop)
                    if self.transfer(source, node, stop)[0] > wait:
                        if stop < whole:
                            yield node, source, stop
                        if stop - 1 > own:
                            yield node, source, stop - 1
                        break


def test_isthmus_takes_the_cheapest_of_all_options() -> None:
    kinds: Counter[str] = Counter()
    for _, found in views(1500):
        plain, chosen = Plain(found), place("isthmus", found)
        stop = chosen.cached
        got = plain.score(chosen.prefill, chosen.source, stop)
        options = {option: plain.score(*option) for option in plain.options()}
        assert (chosen.prefill, chosen.source, stop) in options
        assert got == pytest.approx(min(options.values()), rel=1e-9, abs=2)
        whole = chosen.source is not None and stop == plain.finished[chosen.source]
        kinds["local" if chosen.source is None else "fetch" if whole else "part"] += 1
    assert min(kinds.values()) >= 15, kinds


def test_mooncake_is_algorithm_1() -> None:
    kinds: Counter[str] = Counter()
    for random, found in views(1500, seed=1):
        threshold = random.choice([0.0, 1.0, 1.5, 4.0])
        plain = Plain(found)
        chosen = place("mooncake", found, balancing_threshold=threshold)
        ttfts = plain.mooncake_ttfts(threshold)
        assert chosen.ttft_ns == pytest.approx(min(ttfts.values()), abs=2)
        assert ttfts[chosen.prefill] == pytest.approx(min(ttfts.values()), abs=2)
        best, own = max(plain.finished.values()), plain.depth[chosen.prefill]
        if chosen.source is not None:
            assert best > max(1.0, threshold) * own and chosen.cached == best == plain.finished[chosen.source]
        else:
            assert chosen.cached == own
        kinds["local" if chosen.source is None else "fetch" if own else "fetch of all"] += 1
    assert min(kinds.values()) >= 30, kinds


def test_policies_that_never_fetch_take_their_best_node() -> None:
    """The shortest queue, of the longest match if sticky; the lowest TTFT if aware of what each node has."""
    for _, found in views(500, seed=2):
        plain = Plain(found)
        deepest = max(plain.depth.values())
        of = [node for node in plain.nodes if deepest < STICKY_BLOCKS or plain.depth[node] == deepest]
        ttfts = {node: plain.waits[node] + plain.compute(node, plain.depth[node]) for node in plain.nodes}
        chosen = {name: place(name, found) for name in ("least_loaded", "sticky", "local_aware")}
        assert not any(placement.source for placement in chosen.values())
        assert plain.waits[chosen["least_loaded"].prefill] == min(plain.waits.values())
        assert chosen["sticky"].prefill in of
        assert plain.waits[chosen["sticky"].prefill] == min(plain.waits[node] for node in of)
        assert chosen["local_aware"].ttft_ns == pytest.approx(min(ttfts.values()), abs=2)


def test_every_policy_says_what_its_placement_takes() -> None:
    """Work, TTFT and blocks of a placement are those of the plain formula, whoever chose it."""
    for number, (_, found) in enumerate(views(700, seed=5)):
        plain, chosen = Plain(found), place(list(POLICIES)[number % len(POLICIES)], found)
        node = chosen.prefill
        work = computes = plain.compute(node, chosen.cached)
        if chosen.source is not None:
            work = plain.work(chosen.source, node, chosen.cached)
            assert chosen.fetch is not None and chosen.fetch.source == chosen.source.node
            assert (chosen.fetch.start, chosen.fetch.stop) == (plain.depth[node], chosen.cached)
        assert chosen.own == plain.depth[node]
        assert chosen.work_ns == pytest.approx(work, abs=2)
        assert chosen.ttft_ns == pytest.approx(plain.waits[node] + work, abs=2)
        ratio = found.view.clusters[
            ""
        ].calibration.ratio  # of measured times, which say what computing takes alone
        assert chosen.compute_ns == pytest.approx(computes / ratio if work == computes else 0, abs=2)


def test_loading_hides_behind_computing_and_a_disk_is_read_while_the_request_waits() -> None:
    for memory, disk, wait, work in (
        (0, 0, 0, 10), (10_000_000, 0, 0, 10), (500_000, 0, 0, 20),
        (0, 100_000, 0, 30), (0, 100_000, 15, 15), (0, 100_000, 90, 10),
    ):  # fmt: skip
        view = view_of(P, D, paths=Paths(memory=memory, disk=disk))  # 10 ms a block on disk
        bit = view.prefills[0].bit
        view.index.store(bit, NAMES)
        view.index.demote(bit, NAMES[7:] if disk else [])
        queue_up(view, wait)
        local = estimator(view, arrival(50, NAMES)).local(0)
        assert (local.work_ns, local.compute_ns) == (work * MS, 10 * MS if work == 10 else 0)


def test_nodes_copy_over_links_they_both_have_in_blocks_of_one_size() -> None:
    view = view_of(P, P)
    for name, paths, block_size in (("unlinked", Paths(), BLOCK_SIZE), ("other layout", LINK, 8)):
        view.join(NodeJoined(NodeId(name), P, 1000, block_size, SLOW, paths))
    first, second, unlinked, other = view.nodes.values()
    assert can_copy(first, second) and can_copy(second, first)
    assert not can_copy(first, unlinked) and not can_copy(unlinked, first) and not can_copy(first, other)


def test_a_node_that_joins_in_place_of_another_has_none_of_its_blocks() -> None:
    view = view_of(P, P, D)
    first = view.prefills[0]
    view.index.store(first.bit, NAMES)
    view.leave(first)
    view.join(NodeJoined(NodeId("new"), P, 1000, BLOCK_SIZE, SLOW, LINK))
    assert estimator(view, arrival(50, NAMES)).deepest == 0
    assert view.nodes[NodeId("new")].slot == first.slot


def test_isthmus_spreads_ties_over_the_nodes() -> None:
    view = view_of(P, P, P, P, D)
    taken = []
    for view.num_routed in range(8):
        taken.append(place("isthmus", estimator(view, arrival(50))).prefill.slot)
    assert taken == [0, 1, 2, 3] * 2


def test_random_and_round_robin_are_even_and_can_be_repeated() -> None:
    """And random follows no pattern."""
    view = view_of(P, P, D)
    taken: dict[str, list[int]] = {}
    for policy in ("random", "round_robin", "random"):
        found = []
        for view.num_routed in range(4000):
            found.append(place(policy, estimator(view, arrival(5))).prefill.slot)
        assert taken.setdefault(policy, found) == found
        assert all(1900 <= count <= 2100 for count in Counter(found).values())
    assert all(880 <= count <= 1120 for count in Counter(pairwise(taken["random"])).values())
    assert taken["round_robin"] == [0, 1] * 2000


def test_a_node_that_only_decodes_lends_what_its_answers_left() -> None:
    """The next turn of a chat: its prefix ends with blocks that were generated on the decode node."""
    names = tuple(range(40))
    for policy in ("mooncake", "isthmus"):
        view = view_of(P, P, D)
        prefill, decode = view.prefills[1], view.decodes[0]
        view.index.store(prefill.bit, names[:10])
        view.index.store(decode.bit, names)
        placement = POLICIES[policy](estimator(view, arrival(164, names)), Rules(policy=policy))
        assert placement.source is decode and placement.cached > 10, policy
    for policy in ("sticky", "local_aware", "least_loaded"):
        placement = POLICIES[policy](estimator(view, arrival(164, names)), Rules(policy=policy))
        assert placement.fetch is None and placement.prefill in view.prefills
