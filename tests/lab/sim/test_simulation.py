from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from isthmus.core.conductor import BlocksEvicted, BlocksStored, FirstToken, Rules
from isthmus.core.types import NS_PER_MS, NS_PER_S, Role
from isthmus.facts import NodeFacts, Rates
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request, Workload

from .cluster import BLOCK_SIZE, CURVE, deployment, digest, nodes, workload
from .reference import timelines

MS = NS_PER_MS


def disaggregated(num_prefill: int = 1, num_decode: int = 1) -> tuple[NodeFacts, ...]:
    return nodes(Role.PREFILL, num_prefill) + nodes(Role.DECODE, num_decode)


# Against the plain way.

COARSE = msgspec.structs.replace(  # whole ms, so that ends of prefills and iterations coincide
    CURVE,
    prefill_token_s=1e-3,
    prefill_pair_s=0.0,
    decode_fixed_s=2e-3,
    decode_sequence_s=1e-3,
    decode_context_s=0.0,
)
PLAIN = st.builds(
    Request,
    arrival_ns=st.integers(0, 40).map(lambda ms: ms * MS),
    num_tokens=st.integers(1, 600),
    output_tokens=st.one_of(st.integers(1, 3), st.integers(1, 400)),
)
TIED = st.builds(
    Request,
    arrival_ns=st.integers(0, 6).map(lambda ms: ms * MS),
    num_tokens=st.integers(1, 4),
    output_tokens=st.integers(1, 12),
)


def assert_as_plain(cluster: Deployment, requests: list[Request]) -> None:
    records = Simulation(cluster, workload(requests), check=True).run().records
    for record, expected in zip(records, timelines(cluster, records), strict=True):
        assert record.first_token_ns == expected.first_token_ns
        assert record.end_ns == expected.end_ns
        assert record.tbt_ns == expected.tbt_ns


@settings(max_examples=60)
@given(st.lists(PLAIN, max_size=25), st.integers(1, 3), st.integers(1, 3))
def test_times_and_gaps_are_those_of_one_event_per_iteration(
    requests: list[Request], num_prefill: int, num_decode: int
) -> None:
    assert_as_plain(deployment(disaggregated(num_prefill, num_decode)), requests)


@settings(max_examples=100)
@given(st.lists(TIED, max_size=20), st.integers(1, 2))
def test_also_where_everything_happens_at_the_same_times(requests: list[Request], num_decode: int) -> None:
    """One prefill node, so that two prompts never end at one instant and the order of joining is plain."""
    specs = nodes(Role.PREFILL, 1, cost=COARSE) + nodes(Role.DECODE, num_decode, cost=COARSE)
    assert_as_plain(deployment(specs), requests)


def test_also_with_a_large_batch() -> None:
    rng = Random(1)
    requests = [
        Request(rng.randrange(2 * NS_PER_S), rng.randint(1, 300), rng.randint(1, 900)) for _ in range(200)
    ]
    assert_as_plain(deployment(disaggregated(4, 1)), requests)


# Whatever is switched on. `check` asserts the invariants after each event, and that nothing is left at the end.


class Feature(msgspec.Struct, frozen=True):
    """A deployment of a few nodes under some strain."""

    policy: str
    admission: str
    order: str
    roles: str  # "disaggregated", "mixed" or "both"
    network: int
    handover: int
    dram_blocks: int
    ssd_blocks: int
    kv_blocks: int
    pipeline: int
    prompt_batch: int

    def deployment(self) -> Deployment:
        links = Rates(self.network, self.handover, 10**8, 3 * 10**7, 10**7)
        cached: dict[str, Any] = {
            "dram_blocks": self.dram_blocks,
            "ssd_blocks": self.ssd_blocks,
            "rates": links,
        }
        specs: tuple[NodeFacts, ...] = ()
        if self.roles != "mixed":
            specs += nodes(Role.PREFILL, 2, pipeline=self.pipeline, kv_blocks=60, **cached)
            specs += nodes(Role.DECODE, 2, kv_blocks=self.kv_blocks, rates=links)
        if self.roles != "disaggregated":
            specs += nodes(Role.MIXED, 2, kv_blocks=self.kv_blocks, **cached)
        rules = Rules(
            policy=self.policy,
            max_requests=1000,
            admission=self.admission,
            ttft_ms=None if self.admission == "none" else 200,
            tbt_ms=None if self.admission == "none" else 12,
            admission_parameters=(("decode_s", 0.5),) if self.admission == "predictive" else (),
        )
        others = {"order": self.order, "prompt_batch": self.prompt_batch}
        return deployment(specs, rules, token_budget=96, max_sequences=12, **others)


FEATURES = st.builds(
    Feature,
    policy=st.sampled_from(
        ["random", "least_loaded", "sticky", "local_aware", "mooncake", "isthmus", "isthmus"]
    ),
    admission=st.sampled_from(["none", "none", "baseline", "early", "predictive", "survival"]),
    order=st.sampled_from(["fcfs", "promise"]),
    roles=st.sampled_from(["disaggregated", "disaggregated", "mixed", "both"]),
    network=st.sampled_from([10**6, 10**7, 1 << 50]),
    handover=st.sampled_from([0, 10**7]),
    dram_blocks=st.sampled_from([0, 4, 20, 200]),
    ssd_blocks=st.sampled_from([0, 40]),
    kv_blocks=st.sampled_from([25, 40, 300]),
    pipeline=st.sampled_from([1, 3]),
    prompt_batch=st.sampled_from([1, 1 << 30]),
)


def shared_prompts(seed: int, count: int, span_ms: int) -> Workload:
    """Prompts of a few families, each beginning alike; some answers of one token; some priorities and own limits."""
    rng = Random(seed)
    requests = []
    for number in range(count):
        family, shared, own = rng.randrange(3), rng.randrange(12), rng.randrange(1, 6)
        blocks = [family * 1000 + depth for depth in range(shared)]
        blocks += [10**6 + number * 100 + depth for depth in range(own)]
        length = len(blocks) * BLOCK_SIZE - rng.randrange(BLOCK_SIZE)
        arrival = rng.randrange(max(1, span_ms)) * MS
        output = rng.choice([1, 1, 2, 5, 30, 100])
        limit = rng.choice([None, None, 500])
        requests.append(
            Request(arrival, length, output, tuple(blocks), "", rng.choice([0, 0, 0, 1]), limit, limit)
        )
    return workload(requests)


def assert_each_ends_once(result: Result) -> None:
    for record in result.records:
        assert record.status is not RequestStatus.UNFINISHED and record.end_ns >= record.arrival_ns
        if record.status is RequestStatus.COMPLETED:
            times = (record.arrival_ns, record.prefill_start_ns, record.first_token_ns, record.end_ns)
            assert list(times) == sorted(times)
            assert record.stalled_ns <= record.first_token_ns - record.prefill_start_ns
            assert (record.tbt_ns > 0) == (record.request.output_tokens > 1)
            assert 0 <= record.cached_tokens < record.request.num_tokens
        assert (record.status is RequestStatus.REFUSED) == bool(record.stage)


@settings(max_examples=150, phases=(Phase.explicit, Phase.generate))
@given(FEATURES, st.integers(0, 1000), st.sampled_from([0, 200, 3000]))
def test_every_request_ends_once_and_everything_comes_back(feature: Feature, seed: int, span_ms: int) -> None:
    result = Simulation(feature.deployment(), shared_prompts(seed, 40, span_ms), check=True).run()
    assert_each_ends_once(result)
    assert not any(record.status is RequestStatus.FAILED for record in result.records)


def test_the_features_above_do_happen() -> None:
    """Else the test before would say little."""
    seen = dict.fromkeys(
        ("fetched", "disk", "pre-empted", "refused early", "refused late", "stalled", "evicted"), 0
    )
    base = Feature("isthmus", "none", "promise", "disaggregated", 10**7, 0, 20, 40, 25, 1, 1)
    for feature in (
        base,
        msgspec.structs.replace(base, admission="predictive", kv_blocks=300),
        msgspec.structs.replace(base, roles="both", ssd_blocks=0, network=10**8),
        msgspec.structs.replace(base, policy="random", ssd_blocks=0, network=10**6),
    ):
        result = Simulation(feature.deployment(), shared_prompts(3, 80, 200), check=True).run()
        seen["fetched"] += sum(record.fetched_tokens for record in result.records)
        seen["disk"] += result.bytes_moved["disk_read"]
        seen["pre-empted"] += sum(node.preemptions for node in result.nodes)
        seen["refused early"] += sum(record.stage == "prefill" for record in result.records)
        seen["refused late"] += sum(record.stage == "decode" for record in result.records)
        seen["stalled"] += sum(node.stalled_ns for node in result.nodes)
        seen["evicted"] += sum(node.blocks_evicted for node in result.nodes)
    assert all(seen.values()), seen


# The same input gives the same bytes.


def mixed_bag() -> tuple[Deployment, Workload]:
    feature = Feature("isthmus", "survival", "promise", "both", 10**7, 0, 20, 40, 40, 1, 1)
    return feature.deployment(), shared_prompts(5, 120, 1000)


def test_two_runs_leave_the_same_behind() -> None:
    assert digest(Simulation(*mixed_bag()).run()) == digest(Simulation(*mixed_bag()).run())


def test_nothing_depends_on_the_hash_seed() -> None:
    program = (
        "from tests.lab.sim.test_simulation import Simulation, digest, mixed_bag\n"
        "print(digest(Simulation(*mixed_bag()).run()))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {digest(Simulation(*mixed_bag()).run()) + "\n"}


def test_checking_and_logging_change_nothing() -> None:
    heard = []
    checked = Simulation(*mixed_bag(), check=True, log=lambda now, event, actions: heard.append(now)).run()
    assert digest(checked) == digest(Simulation(*mixed_bag()).run())
    assert heard == sorted(heard) and len(heard) > 120


# Particular ways.


def only(result: Result) -> RequestRecord:
    (record,) = result.records
    return record


def test_one_request_alone() -> None:
    """Prefill 100 tokens; KV moves in no time; 4 iterations with contexts of 101 to 104 tokens."""
    record = only(Simulation(deployment(disaggregated()), workload([Request(5, 100, 5)]), check=True).run())
    prefill = 100 * 100_000 + 100 * 100 * 10
    assert record.first_token_ns == record.landed_ns == record.joined_ns == 5 + prefill
    assert record.end_ns == 5 + prefill + 4 * (10_000_000 + 100_000) + (101 + 102 + 103 + 104) * 1000
    assert record.tbt_ns == 10_100_000 + 104_000


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_an_answer_of_one_token_ends_with_its_prefill(role: Role) -> None:
    specs = nodes(Role.MIXED, 1) if role is Role.MIXED else disaggregated()
    requests = [Request(0, 100, 1), Request(0, 100, 1), Request(0, 100, 3)]
    result = Simulation(deployment(specs), workload(requests), check=True).run()
    for record in result.records[:2]:
        assert (record.status, record.tbt_ns) == (RequestStatus.COMPLETED, 0.0)
        assert record.end_ns == record.first_token_ns
    assert result.bytes_moved["handover"] == (0 if role is Role.MIXED else 100 * 1000)


def test_the_last_layer_lands_after_the_prefill_and_the_others_before() -> None:
    slow = Rates(network=10**7)
    specs = nodes(Role.PREFILL, 1, rates=slow) + nodes(Role.DECODE, 1, rates=slow)
    record = only(Simulation(deployment(specs), workload([Request(0, 160, 2)]), check=True).run())
    assert record.first_token_ns == 16_256_000  # 120,000 bytes of three layers take 12 ms of it
    assert record.landed_ns == record.first_token_ns + 4 * MS


def test_what_is_not_sent_when_the_prefill_ends_goes_on_with_the_last_layer() -> None:
    slow = Rates(network=10**6)
    specs = nodes(Role.PREFILL, 1, rates=slow) + nodes(Role.DECODE, 1, rates=slow)
    record = only(Simulation(deployment(specs), workload([Request(0, 160, 2)]), check=True).run())
    assert record.landed_ns == 160 * MS  # from the start of the prefill on


def test_a_burst_is_served_in_order_and_all_of_it() -> None:
    requests = [Request(7, 50 + number, 20) for number in range(300)]
    records = Simulation(deployment(disaggregated(3, 2)), workload(requests), check=True).run().records
    assert all(record.status is RequestStatus.COMPLETED for record in records)
    for slot in range(3):
        times = [record.first_token_ns for record in records if record.prefill == slot]
        assert times == sorted(set(times))


def test_a_request_too_long_for_any_node_is_refused() -> None:
    specs = nodes(Role.PREFILL, 1, kv_blocks=4) + nodes(Role.DECODE, 1)
    result = Simulation(deployment(specs), workload([Request(0, 65, 2), Request(0, 60, 2)]), check=True).run()
    assert [record.status for record in result.records] == [RequestStatus.REFUSED, RequestStatus.COMPLETED]
    assert result.records[0].stage == "too_long"


def test_nothing_to_simulate() -> None:
    result = Simulation(deployment(disaggregated()), Workload("empty", BLOCK_SIZE, []), check=True).run()
    assert (result.records, result.num_events, result.end_ns) == ([], 0, 0)


def test_a_pre_empted_request_has_all_its_tokens_and_a_gap_for_the_pause() -> None:
    """Two answers that do not fit together: the younger is pre-empted, and computed anew when the first is over."""
    specs = nodes(Role.MIXED, 1, kv_blocks=24)
    requests = [Request(0, 100, 150), Request(1, 100, 150)]
    result = Simulation(deployment(specs), workload(requests), check=True).run()
    first, second = result.records
    assert result.nodes[0].preemptions == 1
    assert first.tbt_ns < 20 * MS < second.tbt_ns
    assert second.end_ns > first.end_ns


def test_tokens_are_told_when_they_are_there_and_before_what_the_run_left() -> None:
    """Also of prompts in several runs, where the next run begins before the tokens of the one before go out."""
    heard: list[tuple[int, Any]] = []
    result = Simulation(*mixed_bag(), log=lambda now, event, actions: heard.append((now, event))).run()
    first = [(now, int(event.request)) for now, event in heard if isinstance(event, FirstToken)]
    again = {record.index for record in result.records if record.attempts > 1}
    told = {index: now for now, index in first}
    assert len(told) == len(first) > 50 and not again
    assert all(result.records[index].first_token_ns == now for index, now in told.items())
    for (now, event), (then, follows) in pairwise(heard):
        stores = isinstance(event, BlocksStored | BlocksEvicted)
        assert not (
            stores and now == then and isinstance(follows, FirstToken) and told_by(event, follows, result)
        )


def told_by(event: Any, follows: Any, result: Result) -> bool:
    """Whether both come from one node."""
    slots = {str(node.node): slot for slot, node in enumerate(result.nodes)}
    return bool(slots[event.node] == result.records[int(follows.request)].prefill)


# Where the workload names answers they are kept where they were decoded.


def conversation(**fields: Any) -> list[Request]:
    """A prompt of ten blocks and an answer that fills four, then both as a prompt with two blocks more."""
    names = tuple(range(10))
    answer = (*range(10, 14),)
    return [
        Request(0, 160, 64, names, answer=answer if fields.get("named", True) else ()),
        Request(10 * NS_PER_S, 256, 2, (*names, *answer, 98, 99)),
    ]


def test_answers_with_names_are_kept_and_fetched_from_where_they_were_decoded() -> None:
    cached = {"dram_blocks": 100, "rates": Rates(network=10**9, memory=10**9)}
    specs = nodes(Role.PREFILL, 1, **cached) + nodes(Role.DECODE, 1, **cached)
    rules = Rules(policy="isthmus", max_requests=1 << 30)
    kept = Simulation(deployment(specs, rules), workload(conversation()), check=True).run().records[1]
    plain = (
        Simulation(deployment(specs, rules), workload(conversation(named=False)), check=True).run().records[1]
    )
    assert (plain.cached_tokens, plain.fetched_tokens) == (160, 0)
    assert (kept.cached_tokens, kept.fetched_tokens) == (224, 64)
    assert kept.first_token_ns < plain.first_token_ns


def test_a_mixed_node_keeps_answers_too() -> None:
    specs = nodes(Role.MIXED, 1, dram_blocks=100, rates=Rates(network=10**9, memory=10**9))
    again = Simulation(deployment(specs), workload(conversation()), check=True).run().records[1]
    assert again.cached_tokens == 224


# How far ahead a node plans is a matter of speed alone.

EVEN = msgspec.structs.replace(CURVE, prefill_pair_s=0.0)  # whole ns: nothing is rounded where a run ends


@settings(max_examples=40)
@given(st.integers(0, 1000), st.sampled_from(["mixed", "disaggregated"]))
def test_one_iteration_at_a_time_gives_the_same(seed: int, roles: str) -> None:
    if roles == "mixed":
        specs = nodes(Role.MIXED, 2, cost=EVEN)
    else:
        specs = nodes(Role.PREFILL, 2, cost=EVEN, dram_blocks=50) + nodes(Role.DECODE, 2, cost=EVEN)
    load = shared_prompts(seed, 30, 300)
    far = Simulation(deployment(specs, max_steps=1 << 30, max_chunks=1 << 30), load).run()
    near = Simulation(deployment(specs, max_steps=1, max_chunks=1), load, check=True).run()
    assert near.num_events > far.num_events
    for one, other in zip(near.records, far.records, strict=True):
        assert (one.first_token_ns, one.end_ns, one.tbt_ns) == (
            other.first_token_ns,
            other.end_ns,
            other.tbt_ns,
        )


def test_ten_times_the_requests_are_about_ten_times_the_events() -> None:
    def events(count: int) -> int:
        return (
            Simulation(deployment(disaggregated(4, 4)), shared_prompts(1, count, 20 * count)).run().num_events
        )

    assert 9 * events(100) < events(1000) < 11 * events(100)
