"""The live cluster with emulated engines in virtual time, and the simulator, decide alike: same events at the same
nanoseconds, same answers.

Both drive the same conductor and schedulers. What must agree beside them is when things happen and in which order:
the length of each iteration, what is taken in at its end, and who is told first.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cli.models import bytes_folder
from isthmus.config import Config, load_config
from isthmus.core.attempts import BlocksEvicted, RequestFailed, RoleChanged, Route
from isthmus.core.conductor import LinksMeasured, NodeLeft
from isthmus.core.cost import Cost, Curve, Handling, to_mapping
from isthmus.core.types import Reuse, Role
from isthmus.facts import at_home
from isthmus.lab.papers.infinite_llm.lending import GREEDY, LEDGER
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.faults import DiskFault, Faults, LinkFault, NodeFault, SessionFault
from tests.soak import matrix
from tests.tape import Entry
from tests.virtual import Flight, VirtualCluster, VirtualRequest

from .worlds import NO_FAULTS, deployed, same_worlds, simulated, until_over

MS = 1_000_000
CURVE = Curve(
    kv_token_bytes=1024,
    num_layers=8,
    prefill_token_s=1e-5,
    prefill_fixed_s=1e-3,
    prefill_pair_s=1.3e-9,
    decode_fixed_s=5e-3,
    decode_sequence_s=1e-5,
    decode_context_s=1.234567e-8,
)
SLOWER = Curve(
    kv_token_bytes=1024,
    num_layers=8,
    prefill_token_s=2.1e-5,
    decode_points=((1, 0.006), (8, 0.0071), (64, 0.0123)),
    decode_context_s=2.345678e-8,
)
COSTS = {Role.PREFILL: CURVE, Role.DECODE: SLOWER, Role.MIXED: CURVE, Role.ATTENTION: CURVE}
SHAPES = {
    "1P1D": {},
    "3P2D": {"roles.prefill": 3, "roles.decode": 2},
    "2M": {"roles.prefill": 0, "roles.decode": 0, "roles.mixed": 2},
    "2P2D1M": {"roles.prefill": 2, "roles.decode": 2, "roles.mixed": 1},
}
SLO = {"slo.ttft_ms": 60, "slo.tbt_ms": 9}


def config_of(overrides: dict[str, Any]) -> Config:
    usual = {"engine.kind": "emulated", "engine.kv_memory": "64MiB", "engine.cost": to_mapping(CURVE)}
    return load_config(None, usual | overrides)


def workload(count: int, every_ns: int, *, seed: int = 1, terms: bool = False) -> list[VirtualRequest]:
    """Prompts of up to 900 tokens, some with shared prefixes; with `terms`, priorities and limits of their own."""
    draw = random.Random(seed)
    shared = [draw.randrange(1000) for _ in range(400)]
    at_ns, requests = 0, []
    for _ in range(count):
        at_ns += draw.randrange(2 * every_ns)
        own = tuple(draw.randrange(1000) for _ in range(draw.randrange(1, 500)))
        prefix = tuple(shared[: draw.choice([0, 0, 100, 400])])
        request = VirtualRequest(at_ns, prefix + own, draw.randrange(1, 60))
        if terms:
            request = msgspec.structs.replace(
                request,
                priority=draw.choice([0, 0, 0, 1, 5]),
                ttft_ms=draw.choice([None, 20, 50]),
                tbt_ms=draw.choice([None, None, 8, 10]),
            )
        requests.append(request)
    return requests


def same_logs(
    overrides: dict[str, Any],
    requests: Sequence[VirtualRequest],
    faults: Faults = NO_FAULTS,
    costs: Mapping[Role, Cost] = COSTS,
) -> Flight:
    """The live flight; its log and bytes of KV from node to node are the simulator's, up to the last request's end. And
    every answer's tokens are those of the model."""
    config = config_of(overrides)
    deployment = deployed(config, costs, faults)
    flight = same_worlds(config, deployment, requests)
    flight = msgspec.structs.replace(flight, log=until_over(flight.log))
    cluster = VirtualCluster(config, deployment)
    for request, outcome in zip(requests, flight.outcomes, strict=True):
        answer = cluster.answer(request)
        assert outcome.tokens == (answer if outcome.error is None else answer[: len(outcome.tokens)])
    kinds = Counter(type(entry.event).__name__ for entry in flight.log)
    assert kinds["RequestArrived"] == len(requests)
    return flight


def actions_of(log: Sequence[Entry]) -> Counter[str]:
    return Counter(type(action).__name__ for entry in log for action in entry.actions)


@matrix("admission, order, shape", ["baseline", "early", "predictive", "survival"], ["fcfs", "promise"], SHAPES)
def test_every_admission_refuses_alike(admission: str, order: str, shape: str) -> None:
    """Twice as much as two nodes can do; some requests bring limits and priorities of their own."""
    knobs = {"scheduling.admission": admission, "scheduling.order": order, "scheduling.reserve": 0.1}
    log = same_logs(
        {**knobs, **SLO, **SHAPES[shape], "limits.max_requests": 12}, workload(120, MS, terms=True)
    ).log
    assert actions_of(log)["Refuse"] > 0
    arrived = [entry for entry in log if type(entry.event).__name__ == "RequestArrived"]
    assert any(len(entry.actions) > 1 for entry in arrived), "nobody was turned away for another"


@matrix("kv_memory, shape", ["1MiB", "2MiB"], SHAPES)
def test_memory_pressure_and_evictions_are_the_same(kv_memory: str, shape: str) -> None:
    knobs = {"engine.kv_memory": kv_memory, "engine.token_budget": 64}
    log = same_logs({**knobs, **SHAPES[shape]}, workload(80, 3 * MS)).log
    assert any(type(entry.event).__name__ == "BlocksEvicted" for entry in log)


@matrix("budget, prompt_batch, chunking, partial", [1, 16, 1024], [None, 32], ["fixed", "tbt"], [1, 3])
def test_chunks_are_the_same(budget: int, prompt_batch: int | None, chunking: str, partial: int) -> None:
    """By tokens and by time, with one and several prompts at once."""
    knobs = {
        "engine.token_budget": budget,
        "engine.prompt_batch": prompt_batch,
        "engine.max_sequences": 6,
        "scheduling.chunking": chunking,
        "scheduling.partial_prefills": partial,
        "slo.tbt_ms": 7,
    }
    same_logs({**knobs, **SHAPES["2P2D1M"]}, workload(40 if budget > 1 else 10, 4 * MS))


@matrix("policy, shape", ["round_robin", "isthmus"], ["1P1D", "3P2D"])
def test_what_happens_at_one_instant_happens_in_one_order(policy: str, shape: str) -> None:
    """Eight requests at a time, as like as can be: nodes work in lockstep, and prompts end together."""
    requests = [
        VirtualRequest(index // 8 * 20 * MS, tuple(range(index * 1000, index * 1000 + 200)), 10)
        for index in range(80)
    ]
    log = same_logs({"policy": policy, **SHAPES[shape]}, requests).log
    times = Counter(entry.at_ns for entry in log)
    assert max(times.values()) > 8


# Everything on: caches in DRAM and on SSD, fetches, answers kept, codecs, links between clusters, conversions,
# recurrent states, and what goes wrong.

TIERS = {"cache.dram": "1MiB", "cache.ssd": "2MiB", "cache.folder": "/nowhere"}


@lru_cache(16)
def chats(count: int, every_ns: int, *, seed: int = 3, longest: int = 600) -> Sequence[VirtualRequest]:
    """Conversations: each turn repeats the prompt before it, with the answer, and adds a question."""
    draw = random.Random(seed)
    cluster = VirtualCluster(config_of({}), deployed(config_of({}), COSTS))
    open_chats: list[tuple[int, ...]] = []
    at_ns, requests = 0, []
    for _ in range(count):
        at_ns += draw.randrange(2 * every_ns)
        if open_chats and draw.random() < 0.6:
            tokens = open_chats.pop(draw.randrange(len(open_chats)))
        else:
            tokens = tuple([draw.choice([7, 9])] * 64)
        tokens += tuple(draw.randrange(1000) for _ in range(draw.randrange(1, longest)))
        request = VirtualRequest(at_ns, tokens, draw.randrange(1, 40))
        requests.append(request)
        open_chats.append(tokens + tuple(cluster.answer(request)))
    return tuple(requests)


@matrix(
    "policy, shape, tiers",
    ["random", "round_robin", "least_loaded", "sticky", "local_aware", "isthmus", "mooncake"],
    SHAPES,
    [{}, {"cache.dram": "1MiB"}, TIERS],
)
def test_every_policy_places_alike_with_caches_fetches_and_answers(
    policy: str, shape: str, tiers: dict[str, Any]
) -> None:
    log = same_logs({"policy": policy, **tiers, **SHAPES[shape], "network.node_gbps": 2}, chats(80, 4 * MS)).log
    kinds = Counter(type(entry.event).__name__ for entry in log)
    assert actions_of(log)["Route"] == 80 and bool(kinds["BlocksStored"] and kinds["BlocksEvicted"]) == bool(
        tiers
    )


AUTH = {"auth.tenants": {"globex": {"weight": 3}}}


def of_tenants(requests: Sequence[VirtualRequest]) -> list[VirtualRequest]:
    """Each conversation is of one of two, whose blocks have other names."""
    tenants = [("acme", "globex")[request.tokens[0] == 7] for request in requests]
    pairs = zip(requests, tenants, strict=True)
    return [msgspec.structs.replace(request, tenant=tenant, salt=tenant) for request, tenant in pairs]


@matrix("order, shape, tiers", ["fcfs", "promise"], SHAPES, [{}, {"cache.dram": "512KiB"}, TIERS])
def test_turns_and_shares_of_tenants_are_the_same(order: str, shape: str, tiers: dict[str, Any]) -> None:
    knobs = {"scheduling.order": order, "engine.max_sequences": 4, "limits.max_requests": 40, **SLO, **tiers}
    log = same_logs({**knobs, **AUTH, **SHAPES[shape]}, of_tenants(chats(80, MS))).log
    actions = actions_of(log)
    assert actions["Refuse"] and actions["Route"] > 40


LINKED = {
    "engine.cost": None,
    "clusters": {
        "home": {"roles": {"prefill": 1, "decode": 2}, "cost": to_mapping(CURVE)},
        "far": {"roles": {"prefill": 2}, "cost": to_mapping(CURVE)},
    },
    "links": [{"between": ["far", "home"], "gbps": 0.2, "rtt_ms": 3}],
    "offload.period_s": 0.05,
}


@matrix(
    "cache, compression, control",
    ["scarce", "abundant"],
    ["none", "lossless"],
    [{"offload.threshold": 200, "offload.control": "none"}, {}],
    strength=2,
)
def test_two_clusters_are_the_same(cache: str, compression: str, control: dict[str, Any]) -> None:
    knobs = {"offload.cache": cache, "network.compression": compression, "cache.dram": "1MiB", **control}
    log = same_logs({**LINKED, **knobs}, chats(60, 6 * MS)).log
    far = [each for each in routes(log) if each.prefill.startswith("far")]
    assert far, "nothing was offloaded"
    assert any(isinstance(entry.event, LinksMeasured) for entry in log)


@pytest.mark.parametrize("cache", ["scarce", "abundant"])
def test_recalls_from_a_failed_disk_are_the_same(cache: str) -> None:
    faults = Faults(disks=(DiskFault("home", 0.1, math.inf),))
    knobs = {
        **TIERS,
        "cache.dram": "512KiB",
        "cache.ssd": "64MiB",
        "offload.cache": cache,
        "offload.threshold": 200,
    }
    log = same_logs({**LINKED, **knobs, "offload.control": "none"}, chats(60, 6 * MS), faults).log
    assert any(each.recall is not None for each in routes(log)) or cache == "scarce"


def routes(log: Sequence[Entry]) -> list[Route]:
    return [action for entry in log for action in entry.actions if isinstance(action, Route)]


def test_a_link_that_falls_is_the_same() -> None:
    faults = Faults(links=(LinkFault("far", "home", 0.053, 0.407), LinkFault("far", "home", 0.511, 0.903, 0.1)))
    knobs = {"offload.threshold": 200, "limits.link_s": 0.1, "cache.dram": "1MiB"}
    log = same_logs({**LINKED, **knobs}, chats(80, 8 * MS), faults).log
    assert any(isinstance(entry.event, RequestFailed) for entry in log) or any(
        isinstance(entry.event, LinksMeasured) and not all(link.up for link in entry.event.links)
        for entry in log
    )


@matrix(
    "policy, faults",
    ["isthmus", "mooncake"],
    [
        *[Faults(nodes=(NodeFault(name, 0.04, 0.15),)) for name in ("prefill-0", "decode-0", "prefill-1")],
        *[
            Faults(sessions=(SessionFault(*ends, 0.03, 0.4, delay_s), SessionFault(*ends, 0.6, 0.7, delay_s)))
            for ends in (("prefill-0", "decode-0"), ("prefill-1", "prefill-0"))
            for delay_s in (0.004, 0.3, math.inf)
        ],
    ],
)
def test_lost_nodes_late_messages_and_lost_sessions_are_the_same(policy: str, faults: Faults) -> None:
    knobs = {"policy": policy, **SHAPES["3P2D"], **TIERS, "network.node_gbps": 2}
    log = same_logs(knobs, chats(60, 3 * MS), faults).log
    assert any(isinstance(entry.event, NodeLeft) for entry in log) == bool(faults.nodes)
    cut = any(math.isinf(each.delay_s) and each.other == "decode-0" for each in faults.sessions)
    assert actions_of(log)["Route"] > 60 or not cut


@pytest.mark.parametrize(("victim", "every_s"), [("prefill-0", 0.004), ("decode-0", 0.02), ("mixed-0", 0.02)])
def test_deaths_again_and_again_cost_no_request(victim: str, every_s: float) -> None:
    """More of them than a request has attempts."""
    shape = {"roles.prefill": 0, "roles.decode": 0, "roles.mixed": 1} if victim == "mixed-0" else {}
    deaths = [NodeFault(victim, at * every_s, (at + 0.5) * every_s) for at in range(1, 7)]
    faults = Faults(nodes=tuple(deaths))
    requests = [VirtualRequest(index * MS // 4, tuple(range(index, 300 + index)), 60) for index in range(8)]
    log = same_logs({**shape, **TIERS}, requests, faults).log
    assert not actions_of(log)["Fail"] and max(route.attempt for route in routes(log)) > 3


@matrix("policy, shape", ["isthmus", "mooncake"], SHAPES)
def test_a_failed_disk_is_the_same(policy: str, shape: str) -> None:
    """Large enough for all, so that it was written behind what was kept before."""
    victims = ["mixed-0"] if shape == "2M" else ["prefill-0", "decode-0"]
    faults = Faults(disks=tuple([DiskFault(victim, 0.15, math.inf) for victim in victims]))
    knobs = {"policy": policy, **SHAPES[shape], **TIERS, "cache.ssd": "64MiB", "network.node_gbps": 2}
    log = same_logs(knobs, chats(60, 4 * MS), faults).log
    assert any(isinstance(entry.event, BlocksEvicted) for entry in log), "nobody missed the disk"


@matrix("shape, tiers", ["3P2D", "2M"], [{"cache.dram": "1MiB"}, TIERS])
def test_arenas_without_a_slot_to_spare_give_the_right_tokens(shape: str, tiers: dict[str, Any]) -> None:
    """Fetches come in rounds then, and what finds no slot is lost: other events, the same answers."""
    config = config_of({**tiers, **SHAPES[shape], "network.node_gbps": 2})
    cluster, requests = VirtualCluster(config, deployed(config, COSTS), spare_slots=0), chats(60, 4 * MS)
    flight = cluster.run(requests)
    assert [outcome.tokens for outcome in flight.outcomes] == [cluster.answer(each) for each in requests]


@matrix(
    "tiers, groups, policy, faults",
    [{"cache.dram": "1MiB"}, TIERS],
    [{"count": 4, "pipeline": 2}, {"count": 8, "pipeline": 4}],
    ["isthmus", "mooncake"],
    [
        NO_FAULTS,
        Faults(nodes=(NodeFault("prefill-0", 0.04, 0.15),)),
        Faults(nodes=(NodeFault("decode-0", 0.04, 0.15),)),
        Faults(sessions=(SessionFault("prefill-0", "decode-0", 0.03, 0.4),)),
        Faults(sessions=(SessionFault("prefill-0", "decode-0", 0.03, 0.4, 0.02),)),
        Faults(disks=(DiskFault("prefill-0", 0.1, math.inf),)),
    ],
)
def test_pipeline_groups_are_the_same(
    tiers: dict[str, Any], groups: dict[str, int], policy: str, faults: Faults
) -> None:
    """Of a group the first stage's disk fails; what it has lost the others drop."""
    if faults.disks:
        tiers = TIERS | {"cache.ssd": "64MiB"}
    shape = {"roles.prefill": groups, "roles.decode": 2, "engine.token_budget": 128}
    log = same_logs({"policy": policy, **tiers, **shape, "network.node_gbps": 2}, chats(40, 4 * MS), faults).log
    assert actions_of(log)["Route"] >= 40


def test_nodes_that_change_their_role_are_the_same() -> None:
    knobs = {
        "offload.convert": "auto",
        "offload.period_s": 0.5,
        "offload.cool_down_s": 1,
        "limits.max_requests": 10_000,
    }
    shape = {"roles.prefill": 1, "roles.decode": 3, "cache.dram": "1MiB"}
    slow = {role: msgspec.structs.replace(CURVE, prefill_token_s=2e-3) for role in Role}
    requests = [
        VirtualRequest(index * 150 * MS, tuple((index + at) % 997 for at in range(80 + index * 37 % 41)), 4)
        for index in range(420)
    ]
    log = same_logs({**knobs, **shape}, requests, costs=slow).log
    assert any(isinstance(entry.event, RoleChanged) for entry in log), "no node changed its role"


@matrix("shape, tiers", SHAPES, [{}, {"network.compression": "lossless"}, {"cache.dram": "2MiB"}, TIERS])
def test_recurrent_states_and_what_handling_kv_takes_are_the_same(shape: str, tiers: dict[str, Any]) -> None:
    handling = Handling(2e-9, 3e-9, 1e-5, 4e-9, 2e-5, 7e-9, message_s=5e-5, shares_core=True)
    for more in ({"state_bytes": 40_000}, {"handling": handling}):
        costs = {role: msgspec.structs.replace(cost, **more) for role, cost in COSTS.items()}
        knobs = {"engine.cost": to_mapping(msgspec.structs.replace(CURVE, **more))}
        same_logs({**knobs, **tiers, **SHAPES[shape], "network.node_gbps": 2}, chats(40, 5 * MS), costs=costs)


# KV elsewhere: on nodes of role attention, and with nodes that lend.

NO_ROLES = {"roles.prefill": 0, "roles.decode": 0}
ATTENDED = {
    "1P2D1A": {"roles.prefill": 1, "roles.decode": 2, "roles.attention": 1},
    "1P2D2A": {"roles.prefill": 1, "roles.decode": 2, "roles.attention": 2},
    "2M3A": {**NO_ROLES, "roles.mixed": 2, "roles.attention": 3},
}
LENDING = {
    "2M": SHAPES["2M"],
    "3M": {**NO_ROLES, "roles.mixed": 3},
    "1P2D": {"roles.prefill": 1, "roles.decode": 2},
}
LENT = {"lending.period_s": 0.02, "engine.kv_memory": "1536KiB"}


@lru_cache(16)
def spread(count: int, every_ns: int, *, seed: int = 1) -> Sequence[VirtualRequest]:
    """Prompts and answers of very different lengths."""
    draw = random.Random(seed)
    lengths = [(draw.choice([60, 100, 700]), draw.choice([10, 40, 300])) for _ in range(count)]
    prompts = [tuple([draw.randrange(1000) for _ in range(tokens)]) for tokens, _ in lengths]
    return tuple([VirtualRequest(at * every_ns, prompts[at], output) for at, (_, output) in enumerate(lengths)])


def carried(flight: Flight) -> Counter[str]:
    return Counter(transfer.purpose for transfer in flight.bytes_moved)


@matrix("shape, tiers, kv_memory", ATTENDED, [{}, {"cache.dram": "1MiB"}], ["1MiB", "64MiB"])
def test_attention_nodes_are_the_same(shape: str, tiers: dict[str, Any], kv_memory: str) -> None:
    """Growth, shares of heads, and holders without room."""
    knobs = {**ATTENDED[shape], **tiers, "engine.kv_memory": kv_memory, "engine.token_budget": 64}
    flight = same_logs(knobs, spread(24, 5 * MS))
    assert carried(flight)["shipment"]


@matrix(
    "faults",
    [
        Faults(nodes=(NodeFault("attention-0", 0.0731, 0.2),)),
        Faults(nodes=(NodeFault("mixed-0", 0.0731, 0.2),)),
        Faults(sessions=(SessionFault("mixed-0", "attention-0", 0.0731, 0.2),)),
        Faults(sessions=(SessionFault("mixed-0", "attention-0", 0.0731, 0.2, 0.013),)),
    ],
)
def test_a_holder_or_a_home_that_is_lost_is_the_same(faults: Faults) -> None:
    log = same_logs(ATTENDED["2M3A"], workload(40, 5 * MS), faults).log
    assert max(route.attempt for route in routes(log)) > 1 or not faults.nodes


def test_prompts_that_wait_for_room_elsewhere_keep_no_others_from_being_computed() -> None:
    """Two of one tenant waited at their prefill node for a place of their decode node, which those of the other had
    that waited at the prefill node for these two."""
    config = config_of(
        {
            **ATTENDED["1P2D2A"],
            **AUTH,
            **SLO,
            "policy": "round_robin",
            "scheduling.admission": "survival",
            "scheduling.partial_prefills": 2,
            "engine.token_budget": 512,
            "engine.max_sequences": 4,
            "lending.policy": LEDGER,
            "lending.period_s": 0.02,
            "network.node_gbps": 1,
            "network.handover_gbps": 1,
            "network.compression": "lossless",
        }
    )
    faults = Faults(sessions=(SessionFault("prefill-0", "decode-0", 0.0211, 0.4, math.inf),))
    simulated(config, deployed(config, COSTS, faults), of_tenants(chats(30, 4 * MS, seed=24, longest=300)))


LONG = [VirtualRequest(0, tuple(range(900)), 100), VirtualRequest(3 * MS, tuple(range(1000, 1300)), 200)]


def test_tokens_of_a_run_whose_holder_is_lost_are_not_lost() -> None:
    """The next attempts prefill them, and hand over all that they have: nobody is left to hold it."""
    faults = Faults(nodes=(NodeFault("attention-0", 0.3, 0.5),))
    log = same_logs(ATTENDED["1P2D1A"], LONG, faults).log
    assert [route.holdings for route in routes(log) if route.attempt == 2] == [(), ()]


def test_a_decode_node_that_is_lost_leaves_all_full_blocks_with_their_holder() -> None:
    """What the next attempt hands over is the block that is not full."""
    faults = Faults(nodes=(NodeFault("decode-0", 0.3, math.inf),))
    flight = same_logs(ATTENDED["1P2D1A"], LONG, faults)
    moved = [size for each, size in flight.bytes_moved.items() if each.purpose == "handover"]
    assert len(moved) > 2 and max(moved) <= 16 * CURVE.kv_token_bytes


@matrix("policy, shape, victim", [LEDGER, GREEDY, "isthmus"], LENDING, ["", "mixed-0", "mixed-1"])
def test_lending_and_repaying_are_the_same(policy: str, shape: str, victim: str) -> None:
    """A lender or a debtor may be lost."""
    victim = victim if "M" in shape else ""
    faults = Faults(nodes=(NodeFault(victim, 0.0661, 0.1163),)) if victim else NO_FAULTS
    flight = same_logs({**LENDING[shape], **LENT, "lending.policy": policy}, spread(30, 4 * MS), faults)
    actions, moved = actions_of(flight.log), carried(flight)
    assert actions["Lend"] and (victim or (actions["Repay"] and moved["shipment"] > 1))


def test_a_prompt_longer_than_a_node_is_the_same() -> None:
    requests = [
        VirtualRequest(0, tuple(range(2500)), 100),
        VirtualRequest(5 * MS, tuple(range(5000, 5100)), 20),
    ]
    flight = same_logs({**NO_ROLES, "roles.mixed": 4, "engine.kv_memory": "1MiB"}, requests)
    assert carried(flight)["shipment"]


# KV of other prompts. Packed prompts are not among these: the emulated engine keeps all of a prompt.

REUSED = {"reuse.kept": "whole", "reuse.min_tokens": 100, "engine.token_budget": 2048, "network.node_gbps": 2}


def documents(count: int, every_ns: int, reuse: Reuse, *, seed: int = 1) -> list[VirtualRequest]:
    """Prompts of the same few texts in another order, and a question."""
    draw = random.Random(seed)
    texts = [tuple([draw.randrange(1000) for _ in range(draw.randrange(150, 260))]) for _ in range(6)]
    requests = []
    for at in range(count):
        question = tuple([draw.randrange(1000) for _ in range(40)])
        tokens = (*[5] * 32, *sum(draw.sample(texts, 3), ()), *question)
        requests.append(VirtualRequest(at * every_ns, tokens, draw.randrange(1, 30), reuse=reuse))
    return requests


@matrix(
    "reuse, selector, policy",
    [Reuse.CHUNKS, Reuse.SEMANTIC],
    ["cacheblend", "epic"],
    ["round_robin", "isthmus"],
)
def test_prompts_assembled_from_others_are_the_same(reuse: Reuse, selector: str, policy: str) -> None:
    knobs = {**REUSED, "reuse.selector": selector, "policy": policy, "cache.dram": "16MiB"}
    flight = same_logs({**knobs, **SHAPES["3P2D"]}, documents(24, 8 * MS, reuse))
    names = {route.assembly.selection.name for route in routes(flight.log) if route.assembly is not None}
    assert names >= ({"semantic"} if reuse is Reuse.SEMANTIC else {selector})
    assert any("~" in transfer.key for transfer in flight.bytes_moved), "no donor was fetched"


@matrix(
    "faults",
    [
        Faults(nodes=(NodeFault("prefill-1", 0.0611, 0.1417),)),
        Faults(sessions=(SessionFault("prefill-1", "prefill-0", 0.0411, 0.3, math.inf),)),
        Faults(sessions=(SessionFault("prefill-1", "prefill-0", 0.0411, 0.3, 0.0137),)),
    ],
)
def test_donors_that_are_lost_are_the_same(faults: Faults) -> None:
    knobs = {**REUSED, **TIERS, "policy": "round_robin", "cache.ssd": "8MiB", **SHAPES["3P2D"]}
    log = same_logs(knobs, documents(20, 8 * MS, Reuse.CHUNKS), faults).log
    assert any(route.assembly is not None for route in routes(log))


# Whatever a configuration says.

KNOBS: dict[str, st.SearchStrategy[Any]] = {
    "policy": st.sampled_from(
        ["random", "round_robin", "least_loaded", "sticky", "local_aware", "mooncake", "isthmus"]
    ),
    "scheduling.admission": st.sampled_from(["none", "baseline", "early", "predictive", "survival"]),
    "scheduling.order": st.sampled_from(["fcfs", "promise"]),
    "scheduling.chunking": st.sampled_from(["fixed", "tbt"]),
    "scheduling.partial_prefills": st.sampled_from([1, 2]),
    "engine.token_budget": st.sampled_from([64, 512]),
    "engine.max_sequences": st.sampled_from([4, 64]),
    "engine.kv_memory": st.sampled_from(["1536KiB", "6MiB", "64MiB"]),
    "lending.period_s": st.sampled_from([0.02, 0.25]),
    "cache.dram": st.sampled_from(["0", "512KiB", "2MiB"]),
    "cache.ssd": st.sampled_from(["0", "1MiB"]),
    "network.node_gbps": st.sampled_from([1, 40]),
    "network.handover_gbps": st.sampled_from([None, 1]),
    "network.compression": st.sampled_from(["none", "lossless"]),
    "offload.cache": st.sampled_from(["auto", "scarce", "abundant"]),
    "auth.tenants": st.sampled_from([{}, {}, AUTH["auth.tenants"]]),
    "lending.policy": st.sampled_from(["none", LEDGER, GREEDY, "isthmus"]),
}
FAULTS = st.sampled_from(
    [
        Faults(),
        Faults(nodes=(NodeFault("prefill-1", 0.0314, 0.1417),)),
        Faults(nodes=(NodeFault("decode-0", 0.0271, 0.0828),)),
        Faults(sessions=(SessionFault("prefill-0", "decode-0", 0.0211, 0.4, math.inf),)),
        Faults(sessions=(SessionFault("prefill-1", "prefill-0", 0.0122, 0.3, math.inf),)),
        Faults(sessions=(SessionFault("prefill-1", "decode-0", 0.0153, 0.2, 0.0137),)),
    ]
)


def names_of(faults: Faults) -> set[str]:
    return {each.name for each in faults.nodes} | {
        end for each in faults.sessions for end in (each.one, each.other)
    }


PLACES: dict[str, dict[str, Any]] = SHAPES | ATTENDED | {"linked": LINKED}


@settings(max_examples=25)
@given(st.fixed_dictionaries(KNOBS), st.sampled_from([*PLACES]), FAULTS, st.integers(0, 1 << 16))
def test_any_configuration_is_the_same(knobs: dict[str, Any], shape: str, faults: Faults, seed: int) -> None:
    if knobs["cache.dram"] == "0":
        knobs = knobs | {"cache.ssd": "0"}
    knobs |= {"cache.folder": "/nowhere"} if knobs["cache.ssd"] != "0" else {}
    if knobs["scheduling.order"] == "promise":
        knobs = knobs | {"scheduling.partial_prefills": 1}
    knobs |= SLO if knobs["scheduling.admission"] != "none" or knobs["scheduling.chunking"] == "tbt" else {}
    nodes = {facts.node for facts in deployed(config_of(PLACES[shape]), COSTS).nodes}
    if not names_of(faults) <= nodes:
        faults = Faults()
    requests = chats(30, 4 * MS, seed=seed, longest=300)
    same_logs({**knobs, **PLACES[shape]}, of_tenants(requests) if knobs["auth.tenants"] else requests, faults)


def fails(log: Sequence[Entry]) -> bool:
    return any(isinstance(entry.event, RequestFailed) for entry in log)


FOUND: dict[str, tuple[str, dict[str, Any], Faults, int, Callable[[Sequence[Entry]], bool]]] = {
    # A prompt that passed another is not cut twice for one iteration; and none passes that waits for its decode node,
    # whose places those have that it passed.
    "several prompts at once with KV elsewhere": (
        "1P2D1A",
        {"scheduling.partial_prefills": 2, "engine.token_budget": 64, "engine.max_sequences": 4},
        NO_FAULTS, 0, lambda log: bool(routes(log)),
    ),
    # A session ends, and after the same grace both ends give up what was to cross it, and report their memory: the node
    # with the lower number first.
    "timers of two nodes at one instant": (
        "1P1D",
        {"lending.policy": LEDGER, "lending.period_s": 0.02, "network.handover_gbps": 1, **SLO},
        Faults(sessions=(SessionFault("prefill-0", "decode-0", 0.0211, 0.4, math.inf),)), 93, fails,
    ),
    # When the next report of a lost node would have been due, another has come under its name.
    "a lost node reports no memory later": (
        "1P2D1A",
        {"lending.policy": GREEDY, "lending.period_s": 0.25},
        Faults(nodes=(NodeFault("decode-0", 0.0271, 0.0828),)), 3,
        lambda log: max(entry.at_ns for entry in log) > 300 * MS,
    ),
    # Its holders have no room at the instant at which it began.
    "a fetch that ends with its attempt brings nothing": (
        "1P2D1A",
        {
            **LENT, **TIERS, "lending.policy": "isthmus", "scheduling.order": "promise", "cache.dram": "512KiB",
            "cache.ssd": "1MiB", "network.node_gbps": 1, "network.compression": "lossless",
            "engine.max_sequences": 64,
        },
        NO_FAULTS, 60,
        lambda log: any(isinstance(entry.event, RequestFailed) and entry.event.no_room for entry in log),
    ),
    # What others wait for is pinned there; so of what was fetched not all stays.
    "a recall that finds no room in the cache is over at once": (
        "linked",
        {
            **LENT, **AUTH, **SLO, "lending.policy": "isthmus", "lending.period_s": 0.25, "cache.dram": "512KiB",
            "network.node_gbps": 40, "network.handover_gbps": 1,
        },
        NO_FAULTS, 12, fails,
    ),
}  # fmt: skip
"""What the test above found once: shape, configuration, faults, seed, and what has to happen for it to be that."""


@pytest.mark.parametrize("found", FOUND.values(), ids=FOUND)
def test_what_once_differed_is_the_same(
    found: tuple[str, dict[str, Any], Faults, int, Callable[[Sequence[Entry]], bool]],
) -> None:
    shape, knobs, faults, seed, happened = found
    requests = chats(30, 4 * MS, seed=seed, longest=300)
    requests = of_tenants(requests) if "auth.tenants" in knobs else requests
    assert happened(same_logs({**PLACES[shape], **knobs}, requests, faults).log)


OTHERS = {
    Path("examples/plan/attention.yaml"),
    *[path for name in ("kubernetes", "route") for path in Path("examples", name).glob("*.yaml")],
}
EXAMPLES = sorted(set(Path("examples").rglob("*.yaml")) - OTHERS)
"""All but that with attention nodes, whose emulated engines would read all their KV again for each token: minutes."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to("examples")))
def test_every_example_is_the_same(path: Path) -> None:
    """Its nodes, links, caches and rules. Blocks are small, and memory is what a few requests need: the emulated engine
    has it all."""
    size = 64 if "prfaas" in str(path) else 2  # there a state is as large as the KV of 14,000 tokens
    config = at_home(load_config(path, {"engine.block_size": size}), path.parent)
    costs = [config.model, config.engine.cost, *[each.cost for each in config.clusters.values()]]
    if not any(costs):
        config = config.model_copy(update={"model": str(bytes_folder())})
    deployment = deployment_of(config, size)
    nodes = [
        msgspec.structs.replace(
            facts, max_steps=16, max_chunks=1, kv_blocks=min(facts.kv_blocks, 2048 + 20 * facts.state_blocks)
        )
        for facts in deployment.nodes
    ]
    deployment = msgspec.structs.replace(deployment, nodes=tuple(nodes))
    requests = chats(10 if size == 64 else 16, 30 * MS, longest=200)
    same_worlds(config, deployment, requests)
