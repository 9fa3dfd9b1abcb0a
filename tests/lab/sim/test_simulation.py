from __future__ import annotations

import gc
import subprocess
import sys
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from isthmus.core.conductor import BlocksEvicted, BlocksStored, FirstToken, LinkRule, Rules
from isthmus.core.types import NS_PER_S, Role
from isthmus.facts import NodeFacts, Rates
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.faults import Faults, LinkFault, NodeFault
from isthmus.lab.sim.records import COMPLETED, FAILED, REFUSED, UNFINISHED, RequestRecord, Result
from isthmus.lab.sim.summary import summarize, to_json
from isthmus.lab.sim.workloads import Request, Workload, generate

from .cluster import (
    CURVE,
    HYBRID,
    MS,
    deployment,
    digest,
    disaggregated,
    facts,
    faults,
    nodes,
    run,
    shared_prompts,
    statuses,
)
from .reference import timelines

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
    records = run(cluster, requests).records
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
    """Up to three clusters of a few nodes, under some strain."""

    roles: tuple[str, ...] = ("ppdd",)  # of each cluster: p, d or m for each node
    policy: str = "isthmus"
    admission: str = "none"
    order: str = "promise"
    network: int = 10**7
    handover: int = 0
    dram_blocks: int = 20
    ssd_blocks: int = 40
    kv_blocks: int = 40
    pipeline: int = 1
    prompt_batch: int = 1
    hybrid: bool = False
    threshold: int | None = None
    cache_mode: str = "auto"
    control: bool = False
    convert: bool = False
    rtt_ms: int = 0

    def deployment(self, faults: Faults | None = None) -> Deployment:
        names = [f"c{number}" for number in range(len(self.roles))]
        links = [
            LinkRule(one, other, min(self.network, 10**7), self.rtt_ms * MS)
            for one in names
            for other in names
            if one != other
        ]
        rules = Rules(
            policy=self.policy,
            max_requests=1000,
            admission=self.admission,
            ttft_ms=None if self.admission == "none" else 200,
            tbt_ms=None if self.admission == "none" else 12,
            admission_parameters=(("decode_s", 0.5),) if self.admission == "predictive" else (),
            links=tuple(links),
            threshold=self.threshold,
            cache_mode=self.cache_mode,
            control=self.control,
            convert=self.convert,
            cool_down_s=0.5,
            period_ns=NS_PER_S // 10,
        )
        limits: dict[str, Any] = {"token_budget": 96, "max_sequences": 12, "prompt_batch": self.prompt_batch}
        waits = {"link_ns": NS_PER_S // 5, "rejoin_ns": NS_PER_S, "faults": faults or Faults()}
        return deployment(self._nodes(names), rules, order=self.order, **limits, **waits)

    def _nodes(self, names: list[str]) -> list[NodeFacts]:
        links = Rates(self.network, self.handover, 10**8, 3 * 10**7, 10**7)
        kept = {"dram_blocks": self.dram_blocks, "ssd_blocks": self.ssd_blocks}
        return [
            facts(
                f"{cluster}-{number}",
                {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[letter],
                HYBRID if self.hybrid else CURVE,
                kv_blocks=max(60, self.kv_blocks) if letter == "p" else self.kv_blocks,
                rates=links,
                cluster=cluster if len(names) > 1 else "",
                pipeline=self.pipeline if letter == "p" and not self.convert else 1,
                **(kept if len(names) > 1 or letter != "d" else {}),
            )
            for cluster, letters in zip(names, self.roles, strict=True)
            for number, letter in enumerate(letters)
        ]


COMMON = {"prompt_batch": st.sampled_from([1, 1 << 30]), "order": st.sampled_from(["fcfs", "promise"])}
ALONE = st.builds(
    Feature,
    roles=st.sampled_from([("ppdd",), ("mm",), ("ppddmm",)]),
    policy=st.sampled_from(
        ["random", "least_loaded", "sticky", "local_aware", "mooncake", "isthmus", "isthmus"]
    ),
    admission=st.sampled_from(["none", "none", "baseline", "early", "predictive", "survival"]),
    network=st.sampled_from([10**6, 10**7, 1 << 50]),
    handover=st.sampled_from([0, 10**7]),
    dram_blocks=st.sampled_from([0, 4, 20, 200]),
    ssd_blocks=st.sampled_from([0, 40]),
    kv_blocks=st.sampled_from([25, 40, 300]),
    pipeline=st.sampled_from([1, 3]),
    **COMMON,
)
SEVERAL = st.builds(
    Feature,
    roles=st.sampled_from(
        [("pp", "pddd"), ("p", "dd"), ("p", "pd", "pd"), ("p", "mm"), ("m", "mm"), ("pmd", "ppd"), ("ppdd",)]
    ),
    policy=st.sampled_from(["isthmus", "isthmus", "least_loaded", "mooncake"]),
    network=st.sampled_from([10**6, 10**7]),
    dram_blocks=st.sampled_from([0, 30, 300]),
    ssd_blocks=st.just(0),
    kv_blocks=st.sampled_from([50, 300]),
    hybrid=st.booleans(),
    threshold=st.sampled_from([None, 0, 60, 150]),
    cache_mode=st.sampled_from(["scarce", "abundant", "auto"]),
    control=st.booleans(),
    convert=st.booleans(),
    rtt_ms=st.sampled_from([0, 0, 20]),
    **COMMON,
)
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)


def assert_each_ends_once(result: Result) -> None:
    for record in result.records:
        assert record.status is not UNFINISHED and record.end_ns >= record.arrival_ns
        if record.status is COMPLETED:
            times = (record.arrival_ns, record.prefill_start_ns, record.first_token_ns, record.end_ns)
            assert list(times) == sorted(times)
            assert record.stalled_ns <= record.first_token_ns - record.prefill_start_ns
            assert (record.tbt_ns > 0) == (record.request.output_tokens > 1)
            assert 0 <= record.cached_tokens < record.request.num_tokens
        assert (record.status is REFUSED) == bool(record.stage)


@settings(max_examples=150, phases=WITHOUT_SHRINKING)
@given(st.one_of(ALONE, SEVERAL), st.integers(0, 1000), st.sampled_from([0, 200, 3000]))
def test_every_request_ends_once_and_everything_comes_back(feature: Feature, seed: int, span_ms: int) -> None:
    result = run(feature.deployment(), shared_prompts(seed, 40, span_ms))
    assert_each_ends_once(result)
    assert FAILED not in statuses(result)
    if feature.admission == "none":
        assert all(record.stage in ("", "too_long") for record in result.records)
    if feature.dram_blocks:  # else what is to be recalled may be evicted from an engine's memory meanwhile
        assert all(record.attempts <= 1 for record in result.records)


@settings(max_examples=50, phases=WITHOUT_SHRINKING)
@given(
    SEVERAL,
    faults(["c0", "c1", "c0-0", "c1-0", "c1-1"], links=[("c0", "c1")]),
    st.integers(0, 1000),
    st.sampled_from([200, 3000]),
)
def test_whatever_fails_every_request_ends_once(
    feature: Feature, faults: Faults, seed: int, span_ms: int
) -> None:
    assert_each_ends_once(run(feature.deployment(faults), shared_prompts(seed, 30, span_ms)))


def test_the_features_above_do_happen() -> None:
    """Else the tests before would say little."""
    seen: dict[str, Any] = {}

    def saw(**counts: Any) -> None:
        for name, count in counts.items():
            seen[name] = seen.get(name, 0) + count

    change = msgspec.structs.replace
    base, far = Feature(kv_blocks=25), Feature(("pp", "pddd"), threshold=60, cache_mode="scarce", rtt_ms=20)
    far = change(far, hybrid=True, dram_blocks=300, ssd_blocks=0, kv_blocks=300)
    gone = Faults(nodes=(NodeFault("c1", 0.1, float("inf")),))
    cut = Faults((LinkFault("c0", "c1", 0.05, 2.0, 0.0),), (NodeFault("c1-1", 0.3, 1.0),))
    for feature, some_faults, seed, span_ms in (
        (base, None, 3, 200),
        (change(base, admission="predictive", kv_blocks=300), None, 3, 200),
        (change(base, roles=("ppddmm",), ssd_blocks=0, network=10**8), None, 3, 200),
        (change(base, policy="random", ssd_blocks=0, network=10**6), None, 3, 200),
        (far, None, 2, 3000),
        (change(far, cache_mode="abundant", threshold=0), None, 2, 3000),
        (change(far, threshold=None, control=True), cut, 2, 1000),
        (change(far, roles=("p", "pd"), hybrid=False), gone, 2, 300),
    ):
        result = run(feature.deployment(some_faults), shared_prompts(seed, 80, span_ms))
        crossed = [each for each in result.records if result.nodes[each.prefill].cluster == "c0"]
        saw(
            fetched=sum(each.fetched_tokens for each in result.records),
            disk=result.bytes_moved["disk_read"],
            pre_empted=sum(node.preemptions for node in result.nodes),
            refused_early=sum(each.stage == "prefill" for each in result.records),
            refused_late=sum(each.stage == "decode" for each in result.records),
            stalled=sum(node.stalled_ns for node in result.nodes),
            evicted=sum(node.blocks_evicted for node in result.nodes),
            offloaded=len(crossed),
            recalled=result.bytes_moved["recall"],
            fetched_across=sum(each.fetched_tokens for each in crossed),
            retried=sum(each.attempts > 1 for each in result.records),
            failed=sum(each.status is FAILED for each in result.records),
            threshold_changed=len({change.threshold for change in result.thresholds}) > 1,
            snapshots_used=sum(each.cached_tokens for each in result.records if feature.hybrid),
        )
    assert all(seen.values()), seen


def test_nodes_change_roles_under_load_and_every_request_completes() -> None:
    """Four nodes decode and one prefills, which is pressed all the time: twice 5.2 s of work every 12 s."""
    slow = msgspec.structs.replace(CURVE, prefill_token_s=1e-2)
    specs = disaggregated(1, 4, cost=slow, kv_blocks=2000, dram_blocks=300, cluster="c0")
    rules = Rules(max_requests=1000, convert=True, cool_down_s=5.0)
    result = run(
        deployment(specs, rules), [Request(number // 2 * 12 * NS_PER_S, 520, 20) for number in range(120)]
    )
    assert {change.role for change in result.conversions} == {Role.PREFILL}
    assert statuses(result) == {COMPLETED}
    turned = {change.node for change in result.conversions}
    assert turned & {result.nodes[record.prefill].node for record in result.records}
    assert sum(node.tokens_decoded for node in result.nodes) == 120 * 19


# The same input gives the same bytes.


def mixed_bag() -> tuple[Deployment, Workload]:
    feature = Feature(("ppddmm",), admission="survival")
    return feature.deployment(), shared_prompts(5, 120, 1000)


def left_behind() -> str:
    """Of a simulation, of its summary, and of a generated workload."""
    result = run(*mixed_bag(), check=False)
    made = generate(
        "gamma:cv=3,rate=2,num=50,input=exponential(mean=999),output=7,turns=3,think_s=5,prefixes=9,prefix_tokens=700"
    )
    return f"{digest(result)} {to_json(summarize(result), wall=False)!r} {made.requests}\n"


def test_nothing_depends_on_the_hash_seed() -> None:
    program = "from tests.lab.sim.test_simulation import *; sys.stdout.write(left_behind())"
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
    assert found == {left_behind()}


def test_checking_and_logging_change_nothing_and_cycles_are_not_searched() -> None:
    heard: list[tuple[int, bool]] = []
    checked = run(*mixed_bag(), log=lambda now, event, actions: heard.append((now, gc.isenabled())))
    assert digest(checked) == digest(run(*mixed_bag(), check=False))
    assert heard == sorted(heard) and len(heard) > 120
    assert not any(collects for _, collects in heard) and gc.isenabled()


# Particular ways.


def only(result: Result) -> RequestRecord:
    (record,) = result.records
    return record


def test_one_request_alone() -> None:
    """Prefill 100 tokens; KV moves in no time; 4 iterations with contexts of 101 to 104 tokens."""
    record = only(run(deployment(disaggregated()), [Request(5, 100, 5)]))
    prefill = 100 * 100_000 + 100 * 100 * 10
    assert record.first_token_ns == record.landed_ns == record.joined_ns == 5 + prefill
    assert record.end_ns == 5 + prefill + 4 * (10_000_000 + 100_000) + (101 + 102 + 103 + 104) * 1000
    assert record.tbt_ns == 10_100_000 + 104_000


@pytest.mark.parametrize(("specs", "moved"), [(nodes(Role.MIXED, 1), 0), (disaggregated(), 100 * 1000)])
def test_an_answer_of_one_token_ends_with_its_prefill(specs: tuple[NodeFacts, ...], moved: int) -> None:
    result = run(deployment(specs), [Request(0, 100, 1), Request(0, 100, 1), Request(0, 100, 3)])
    for record in result.records[:2]:
        assert (record.status, record.tbt_ns) == (COMPLETED, 0.0)
        assert record.end_ns == record.first_token_ns
    assert result.bytes_moved["handover"] == moved


@pytest.mark.parametrize(("network", "landed_ns"), [(10**7, 16_256_000 + 4 * MS), (10**6, 160 * MS)])
def test_a_hand_over_streams_beside_its_prefill_and_the_last_layer_follows(
    network: int, landed_ns: int
) -> None:
    """Three of four layers take 12 ms of 16 of prefill; on a link ten times slower it is never idle."""
    cluster = deployment(disaggregated(rates=Rates(network=network)))
    record = only(run(cluster, [Request(0, 160, 2)]))
    assert (record.first_token_ns, record.landed_ns) == (16_256_000, landed_ns)


def test_a_burst_is_served_in_order_and_all_of_it() -> None:
    requests = [Request(7, 50 + number, 20) for number in range(300)]
    records = run(deployment(disaggregated(3, 2)), requests).records
    assert all(record.status is COMPLETED for record in records)
    for slot in range(3):
        times = [record.first_token_ns for record in records if record.prefill == slot]
        assert times == sorted(set(times))


def test_a_request_too_long_for_any_node_is_refused() -> None:
    specs = nodes(Role.PREFILL, 1, kv_blocks=4) + nodes(Role.DECODE, 1)
    result = run(deployment(specs), [Request(0, 65, 2), Request(0, 60, 2)])
    assert [record.status for record in result.records] == [REFUSED, COMPLETED]
    assert result.records[0].stage == "too_long"
    nothing = run(deployment(specs), [])
    assert (nothing.records, nothing.num_events, nothing.end_ns) == ([], 0, 0)


def test_a_pre_empted_request_has_all_its_tokens_and_a_gap_for_the_pause() -> None:
    """Two answers that do not fit together: the younger is pre-empted, and computed anew when the first is over."""
    cluster = deployment(nodes(Role.MIXED, 1, kv_blocks=24))
    result = run(cluster, [Request(0, 100, 150), Request(1, 100, 150)])
    first, second = result.records
    assert result.nodes[0].preemptions == 1
    assert first.tbt_ns < 20 * MS < second.tbt_ns
    assert second.end_ns > first.end_ns


def test_tokens_are_told_when_they_are_there_and_before_what_the_run_left() -> None:
    """Also of prompts in several runs, where the next run begins before the tokens of the one before go out."""
    heard: list[tuple[int, Any]] = []
    result = run(*mixed_bag(), log=lambda now, event, actions: heard.append((now, event)))
    first = [(now, int(event.request)) for now, event in heard if isinstance(event, FirstToken)]
    again = {record.index for record in result.records if record.attempts > 1}
    told = {index: now for now, index in first}
    assert len(told) == len(first) > 50 and not again
    assert all(result.records[index].first_token_ns == now for index, now in told.items())
    slots = {str(node.node): slot for slot, node in enumerate(result.nodes)}
    for (now, event), (then, follows) in pairwise(heard):
        if isinstance(event, BlocksStored | BlocksEvicted) and isinstance(follows, FirstToken) and now == then:
            assert slots[event.node] != result.records[int(follows.request)].prefill, "of one node"


# Where the workload names answers they are kept where they were decoded.


def test_answers_with_names_are_kept_and_fetched_from_where_they_were_decoded() -> None:
    """A prompt of ten blocks and an answer that fills four, then both as a prompt with two blocks more."""
    cached = {"dram_blocks": 100, "rates": Rates(network=10**9, memory=10**9)}
    rules, prompt, answer = Rules(policy="isthmus", max_requests=1 << 30), tuple(range(10)), (10, 11, 12, 13)

    def second(specs: tuple[NodeFacts, ...], named: tuple[int, ...] = answer) -> RequestRecord:
        first = Request(0, 160, 64, prompt, answer=named)
        again = Request(10 * NS_PER_S, 256, 2, (*prompt, *answer, 98, 99))
        return run(deployment(specs, rules), [first, again]).records[1]

    plain, kept = second(disaggregated(**cached), ()), second(disaggregated(**cached))
    assert (plain.cached_tokens, plain.fetched_tokens) == (160, 0)
    assert (kept.cached_tokens, kept.fetched_tokens) == (224, 64)
    assert kept.first_token_ns < plain.first_token_ns
    assert second(nodes(Role.MIXED, 1, **cached)).cached_tokens == 224


# How far ahead a node plans is a matter of speed alone.

EVEN = msgspec.structs.replace(CURVE, prefill_pair_s=0.0)  # whole ns: nothing is rounded where a run ends


@settings(max_examples=40)
@given(
    st.integers(0, 1000),
    st.sampled_from([nodes(Role.MIXED, 2, cost=EVEN), disaggregated(2, 2, cost=EVEN, dram_blocks=50)]),
)
def test_one_iteration_at_a_time_gives_the_same(seed: int, specs: tuple[NodeFacts, ...]) -> None:
    load = shared_prompts(seed, 30, 300)
    far = run(deployment(specs), load, check=False)
    near = run(deployment(specs, max_steps=1, max_chunks=1), load)
    assert near.num_events > far.num_events
    times = [
        [(each.first_token_ns, each.end_ns, each.tbt_ns) for each in result.records] for result in (near, far)
    ]
    assert times[0] == times[1]


def test_ten_times_the_requests_are_about_ten_times_the_events() -> None:
    def events(count: int) -> int:
        cluster = deployment(disaggregated(4, 4))
        return run(cluster, shared_prompts(1, count, 20 * count), check=False).num_events

    assert 9 * events(100) < events(1000) < 11 * events(100)
