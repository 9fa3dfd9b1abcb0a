"""Prompts that are assembled from others' KV, in virtual time: what that takes, and that all end whatever fails."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.core.conductor import Action, Event, Remember, Route, Rules, Unremember
from isthmus.core.cost import compile_cost
from isthmus.core.cost.node_cost import assembled_ns
from isthmus.core.reuse import SELECTIONS, SEMANTIC, pack
from isthmus.core.types import Role
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.faults import DiskFault, Faults, NodeFault, SessionFault
from isthmus.lab.sim.records import COMPLETED, FAILED, REFUSED, RequestRecord, Result
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.summary import summarize
from isthmus.lab.sim.workloads import Workload, generate

from .cluster import BLOCK_SIZE, CURVE, deployment, nodes, rates

DEEP = msgspec.structs.replace(CURVE, num_layers=16)
"""Layers enough that what is computed of the first ones costs little."""

RATES = rates(10**8, memory=10**9, handover=10**8, disk_read=10**7, disk_write=10**7)
SPLIT = {Role.PREFILL: 2, Role.DECODE: 2}
MODEL = compile_cost(DEEP)


def cluster_of(roles: dict[Role, int], *, selector: str = "cacheblend", **fields: Any) -> Deployment:
    made = [each for role, count in roles.items() for each in nodes(role, count, cost=DEEP)]
    rules = Rules(policy="mooncake", max_requests=1 << 30, reuse_selector=selector, reuse_tokens=100)
    wanted = {"dram_blocks": 2000, "transit_blocks": 400, "reuse_layers": DEEP.num_layers, "token_budget": 512}
    return deployment(made, rules, **{"rates": RATES, **wanted, **fields})


COMMON = ",prefixes=1,prefix_tokens=70"


@cache
def documents(reuse: str, num: int = 40, rate: float = 8.0, seed: int = 0, more: str = COMMON) -> Workload:
    return generate(
        f"poisson:rate={rate},num={num},seed={seed},block_size={BLOCK_SIZE},input=40,output=12,documents=8,"
        f"document_tokens=uniform(low=150,high=260),retrieved=3,reuse={reuse}{more}"
    )


def semantic(num: int = 40, rate: float = 8.0, seed: int = 0) -> Workload:
    """Of prompts that have no document in common by much."""
    return documents("semantic", num, rate, seed, f"{COMMON},paraphrases=0.6,alike=0.95,zipf=0")


class Told:
    """What the conductor answered. `assembled`: routes."""

    def __init__(self) -> None:
        self.assembled: list[tuple[int, Route]] = []
        self.counts: Counter[type] = Counter()

    def __call__(self, now: int, event: Event, actions: list[Action]) -> None:
        self.counts.update(map(type, actions))
        routes = [each for each in actions if isinstance(each, Route)]
        self.assembled += [(now, each) for each in routes if each.assembly is not None]


def run(cluster: Deployment, workload: Workload) -> tuple[Result, Told]:
    told = Told()
    return Simulation(cluster, workload, log=told, check=True).run(), told


def reused(record: RequestRecord) -> int:
    return record.moved_tokens + record.similar_tokens


@pytest.mark.parametrize("selector", ["cacheblend", "epic"])
def test_documents_in_another_order_are_moved_and_all_tokens_are_accounted_for(selector: str) -> None:
    found, told = run(cluster_of(SPLIT, selector=selector), documents("chunks"))
    assert {each.status for each in found.records} == {COMPLETED}
    use = summarize(found).reuse
    assert use is not None and use.requests == 40
    assert use.assembled == len(told.assembled) > 20 and use.similar_tokens == 0 < use.moved_tokens
    parts = use.exact_tokens + use.moved_tokens + use.similar_tokens + use.recomputed_tokens
    assert parts == sum(each.request.num_tokens for each in found.records)
    assert told.counts[Remember] == 40 - use.assembled and not told.counts[Unremember]
    as_ever, _ = run(cluster_of(SPLIT), documents("exact"))
    assert summarize(as_ever).reuse is None
    assert sum(node.tokens_prefilled for node in found.nodes) < sum(n.tokens_prefilled for n in as_ever.nodes)


def test_paraphrases_are_packed_and_so_much_less_is_handed_over() -> None:
    found, told = run(cluster_of(SPLIT), semantic())
    assert {each.status for each in found.records} == {COMPLETED}
    packed = {
        int(route.request): route.assembly.packing
        for _, route in told.assembled
        if route.assembly is not None and route.assembly.packing is not None
    }
    assert len(packed) > 5 and all(found.records[number].similar_tokens for number in packed)
    dropped = sum([packing.num_dropped for packing in packed.values()]) * BLOCK_SIZE
    tokens = sum([each.request.num_tokens for each in found.records])
    assert found.bytes_moved["handover"] == (tokens - dropped) * DEEP.kv_token_bytes


def test_a_prompt_alone_takes_what_the_cost_model_says() -> None:
    """Its donors are at its node: it waits for nothing but that they are loaded."""
    found, told = run(
        cluster_of({Role.MIXED: 1}, rates=rates(10**8, memory=10**12)), documents("chunks", 30, 0.2)
    )
    alone = 0
    for _, route in told.assembled:
        record, assembly = found.records[int(route.request)], route.assembly
        assert assembly is not None
        left = record.request.num_tokens - record.cached_tokens
        wanted = assembled_ns(MODEL, assembly.selection, left, record.cached_tokens, assembly.num_reused)
        alone += record.first_token_ns - record.arrival_ns == wanted == record.prefill_ns
    assert alone == len(told.assembled) > 10


def test_a_packed_prompt_decodes_with_what_is_kept() -> None:
    """Whose iterations differ from those of the same prompt in full by what was dropped, and by nothing else."""
    workload = semantic(12, 0.1)
    found, told = run(cluster_of({Role.MIXED: 1}, rates=rates(10**8, memory=10**12)), workload)
    full, _ = run(cluster_of({Role.MIXED: 1}, rates=rates(10**8, memory=10**12), reuse_layers=0), workload)
    number, *_ = [int(each.request) for _, each in told.assembled if each.assembly and each.assembly.packing]
    packing = pack(SEMANTIC, found.records[number].request.num_tokens, DEEP.num_layers, BLOCK_SIZE)
    assert packing is not None
    saved = MODEL.decode_step_ps(1)[1] * packing.num_dropped * BLOCK_SIZE / 1000
    less, more = (
        (each.end_ns - each.first_token_ns) / 11 for each in (found.records[number], full.records[number])
    )
    assert more - less == pytest.approx(saved, abs=2)


def test_donors_are_fetched_and_read_from_disk() -> None:
    found, told = run(cluster_of(SPLIT, dram_blocks=50, ssd_blocks=5000), documents("chunks", 60))
    assert {each.status for each in found.records} == {COMPLETED}
    assert any(donor.fetch for _, route in told.assembled if route.assembly for donor in route.assembly.donors)
    assert found.bytes_moved["fetch"] > 0 == found.bytes_moved["recall"]
    prefixes = sum([each.disk_tokens for each in found.records]) * DEEP.kv_token_bytes
    assert found.bytes_moved["disk_read"] > prefixes


def test_donors_that_are_gone_are_forgotten() -> None:
    """And what has no donor is computed as ever: in less memory than its donors had."""
    found, told = run(cluster_of(SPLIT, dram_blocks=60), documents("chunks", 120, 4.0, 0, ""))
    assert {each.status for each in found.records} == {COMPLETED}
    assert told.counts[Unremember] and sum(node.blocks_evicted for node in found.nodes)


NAMES = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
PAIRS = st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda pair: pair[0] != pair[1])
TENTHS = st.integers(1, 80)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 3),
    st.sampled_from(["chunks", "semantic"]),
    st.sampled_from(["cacheblend", "epic"]),
    st.sampled_from([60, 120, 2000]),
    st.sampled_from([0, 300, 5000]),
    st.sampled_from([110, 200, 10_000]),
    st.lists(st.tuples(st.sampled_from(NAMES), TENTHS, st.integers(1, 20)), max_size=4),
    st.lists(st.tuples(PAIRS, TENTHS, st.integers(1, 20), st.sampled_from([0.01, float("inf")])), max_size=3),
    st.lists(st.tuples(st.sampled_from(NAMES), TENTHS, st.integers(1, 20)), max_size=2),
)
def test_whatever_fails_all_end_and_nothing_is_left(
    seed: int,
    reuse: str,
    selector: str,
    dram_blocks: int,
    ssd_blocks: int,
    kv_blocks: int,
    deaths: list[tuple[str, int, int]],
    cuts: list[tuple[tuple[str, str], int, int, float]],
    disks: list[tuple[str, int, int]],
) -> None:
    faults = Faults(
        nodes=tuple(NodeFault(name, at / 10, (at + lasts) / 10) for name, at, lasts in deaths),
        sessions=tuple(
            SessionFault(*pair, at / 10, (at + lasts) / 10, delay) for pair, at, lasts, delay in cuts
        ),
        disks=tuple(DiskFault(name, at / 10, (at + lasts) / 10) for name, at, lasts in disks)
        if ssd_blocks
        else (),
    )
    cluster = cluster_of(
        SPLIT,
        selector=selector,
        dram_blocks=dram_blocks,
        ssd_blocks=ssd_blocks,
        kv_blocks=kv_blocks,
        faults=faults,
        rejoin_ns=60 * 10**9,
    )
    workload = semantic(40, 10.0, seed) if reuse == "semantic" else documents(reuse, 40, 10.0, seed)
    found, _ = run(cluster, workload)
    assert all(each.status in (COMPLETED, REFUSED, FAILED) for each in found.records)


def test_the_same_input_gives_the_same_result() -> None:
    one, other = (run(cluster_of(SPLIT), semantic())[0] for _ in range(2))
    assert one.records == other.records and one.num_events == other.num_events


def test_selectors_are_those_that_the_rules_name() -> None:
    assert {Rules().reuse_selector, "epic", "semantic"} == set(SELECTIONS)


def test_a_run_without_reuse_has_no_books() -> None:
    with_layers, _ = run(cluster_of(SPLIT), documents("exact"))
    without, _ = run(cluster_of(SPLIT, reuse_layers=0), documents("exact"))
    assert with_layers.records == without.records
