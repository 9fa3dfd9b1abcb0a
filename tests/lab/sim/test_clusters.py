"""Several clusters, recurrent states, faults, nodes that change roles: whatever happens, each request ends once."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from isthmus.core.conductor import LinkRule, Rules
from isthmus.core.types import NS_PER_MS, NS_PER_S, Role
from isthmus.facts import NodeFacts, Rates
from isthmus.lab.sim.deployment import Deployment
from isthmus.lab.sim.faults import Faults, LinkFault, NodeFault
from isthmus.lab.sim.records import RequestStatus
from isthmus.lab.sim.simulation import Simulation
from isthmus.lab.sim.workloads import Request

from .cluster import CURVE, deployment, facts, workload
from .test_simulation import assert_each_ends_once, shared_prompts

HYBRID = msgspec.structs.replace(CURVE, state_bytes=40_000)  # three blocks of 16 tokens

NOTHING = Faults()


class Feature(msgspec.Struct, frozen=True):
    """Two or three clusters of a few nodes, under some strain."""

    roles: tuple[str, ...]  # of each cluster: p, d or m for each node
    policy: str
    hybrid: bool
    threshold: int | None
    cache_mode: str
    control: bool
    convert: bool
    dram_blocks: int
    kv_blocks: int
    link: int
    rtt_ms: int

    def deployment(self, faults: Faults = NOTHING) -> Deployment:
        names = [f"c{number}" for number in range(len(self.roles))]
        links = tuple(
            LinkRule(one, other, self.link, self.rtt_ms * NS_PER_MS)
            for one in names
            for other in names
            if one != other
        )
        rules = Rules(
            policy=self.policy,
            max_requests=1000,
            links=links if len(names) > 1 else (),
            threshold=self.threshold,
            cache_mode=self.cache_mode,
            control=self.control,
            convert=self.convert,
            cool_down_s=0.5,
            period_ns=NS_PER_S // 10,
        )
        limits: dict[str, Any] = {"token_budget": 96, "max_sequences": 12}
        waits = {"link_ns": NS_PER_S // 5, "rejoin_ns": NS_PER_S}
        return deployment(self._nodes(names), rules, faults=faults, **limits, **waits)

    def _nodes(self, names: list[str]) -> list[NodeFacts]:
        roles = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
        return [
            facts(
                f"{cluster}-{number}",
                roles[letter],
                HYBRID if self.hybrid else CURVE,
                kv_blocks=self.kv_blocks,
                dram_blocks=self.dram_blocks,
                rates=Rates(network=10**7, memory=10**8),
                cluster=cluster,
            )
            for cluster, letters in zip(names, self.roles, strict=True)
            for number, letter in enumerate(letters)
        ]


FEATURES = st.builds(
    Feature,
    roles=st.sampled_from(
        [
            ("pp", "pddd"),
            ("p", "dd"),
            ("p", "pd", "pd"),
            ("p", "mm"),
            ("m", "mm"),
            ("pm", "mm"),
            ("pmd", "ppd"),
            ("ppdd",),
        ]
    ),
    policy=st.sampled_from(["isthmus", "isthmus", "least_loaded", "mooncake"]),
    hybrid=st.booleans(),
    threshold=st.sampled_from([None, 0, 60, 150]),
    cache_mode=st.sampled_from(["scarce", "abundant", "auto"]),
    control=st.booleans(),
    convert=st.booleans(),
    dram_blocks=st.sampled_from([0, 30, 300]),
    kv_blocks=st.sampled_from([50, 300]),
    link=st.sampled_from([10**6, 10**7]),
    rtt_ms=st.sampled_from([0, 0, 20]),
)

TIMES = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def scripts(draw: st.DrawFn) -> Faults:
    """Faults that may overlap, touch, and never end."""

    def span() -> tuple[float, float]:
        start = draw(TIMES)
        return start, start + draw(st.sampled_from([0.1, 0.5, 2.0, float("inf")]))

    links = [
        LinkFault("c0", "c1", *span(), draw(st.sampled_from([0.0, 0.0, 0.3])))
        for _ in range(draw(st.integers(0, 2)))
    ]
    names = st.sampled_from(["c0", "c1", "c0-0", "c1-0", "c1-1"])
    nodes = [NodeFault(draw(names), *span()) for _ in range(draw(st.integers(0, 2)))]
    return Faults(tuple(links), tuple(nodes))


@settings(max_examples=50, phases=(Phase.explicit, Phase.generate))
@given(FEATURES, st.integers(0, 1000), st.sampled_from([0, 200, 3000]))
def test_without_faults_every_request_completes(feature: Feature, seed: int, span_ms: int) -> None:
    result = Simulation(feature.deployment(), shared_prompts(seed, 30, span_ms), check=True).run()
    assert_each_ends_once(result)
    for record in result.records:
        assert record.status is RequestStatus.COMPLETED or record.stage == "too_long"
        if feature.dram_blocks:  # else what is to be recalled may be evicted from an engine's memory meanwhile
            assert record.attempts <= 1


@settings(max_examples=50, phases=(Phase.explicit, Phase.generate))
@given(FEATURES, scripts(), st.integers(0, 1000), st.sampled_from([200, 3000]))
def test_whatever_fails_every_request_ends_once(
    feature: Feature, faults: Faults, seed: int, span_ms: int
) -> None:
    result = Simulation(feature.deployment(faults), shared_prompts(seed, 30, span_ms), check=True).run()
    assert_each_ends_once(result)


def test_the_features_above_do_happen() -> None:
    """Else the tests before would say little."""
    kinds = ("offloaded", "recalled", "fetched", "retried", "failed", "threshold changed", "snapshots used")
    seen = dict.fromkeys(kinds, 0)
    base = Feature(("pp", "pddd"), "isthmus", True, 60, "scarce", False, False, 300, 300, 10**7, 20)
    gone = Faults(nodes=(NodeFault("c1", 0.1, float("inf")),))
    cut = Faults((LinkFault("c0", "c1", 0.05, 2.0, 0.0),), (NodeFault("c1-1", 0.3, 1.0),))
    changed = msgspec.structs.replace
    for feature, faults, span_ms in (
        (base, NOTHING, 3000),
        (changed(base, cache_mode="abundant", threshold=0), NOTHING, 3000),
        (changed(base, threshold=None, control=True), cut, 1000),
        (changed(base, roles=("p", "pd"), hybrid=False), gone, 300),
    ):
        result = Simulation(feature.deployment(faults), shared_prompts(2, 80, span_ms), check=True).run()
        crossed = [each for each in result.records if result.nodes[each.prefill].cluster == "c0"]
        seen["offloaded"] += len(crossed)
        seen["recalled"] += result.bytes_moved["recall"]
        seen["fetched"] += sum(each.fetched_tokens for each in crossed)
        seen["retried"] += sum(each.attempts > 1 for each in result.records)
        seen["failed"] += sum(each.status is RequestStatus.FAILED for each in result.records)
        seen["threshold changed"] += len({change.threshold for change in result.thresholds}) > 1
        seen["snapshots used"] += sum(each.cached_tokens for each in result.records if feature.hybrid)
    assert all(seen.values()), seen


def test_nodes_change_roles_under_load_and_every_request_completes() -> None:
    """Four nodes decode and one prefills, which is pressed all the time: twice 5.2 s of work every 12 s."""
    slow = msgspec.structs.replace(CURVE, prefill_token_s=1e-2)
    specs = [
        facts(
            f"c0-{number}",
            Role.PREFILL if not number else Role.DECODE,
            slow,
            2000,
            dram_blocks=300,
            cluster="c0",
        )
        for number in range(5)
    ]
    rules = Rules(max_requests=1000, convert=True, cool_down_s=5.0)
    requests = [Request(number // 2 * 12 * NS_PER_S, 520, 20) for number in range(120)]
    result = Simulation(deployment(specs, rules), workload(requests), check=True).run()
    assert {change.role for change in result.conversions} == {Role.PREFILL}
    assert all(record.status is RequestStatus.COMPLETED for record in result.records)
    turned = {change.node for change in result.conversions}
    used = {result.nodes[record.prefill].node for record in result.records}
    assert turned & used
    assert sum(node.tokens_decoded for node in result.nodes) == 120 * 19
