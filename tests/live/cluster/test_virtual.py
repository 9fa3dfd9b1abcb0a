"""The whole live cluster in virtual time: exact tokens, exact times, and the same run every time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.config import Config, load_config
from isthmus.core.conductor import (
    BlocksStored,
    FirstToken,
    NodeJoined,
    PrefillFinished,
    Refuse,
    RequestArrived,
    RequestEnded,
    Route,
)
from isthmus.core.cost import Curve, compile_cost, to_mapping
from isthmus.core.errors import OverloadedError
from isthmus.core.types import FinishReason, RequestId, Role, Sampling, Tier
from isthmus.lab.sim.faults import Faults, NodeFault, SessionFault
from isthmus.live.engine.emulated import expected_tokens
from tests.parity.worlds import NO_FAULTS, deployed
from tests.virtual import Flight, VirtualCluster, VirtualRequest

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
COST = compile_cost(CURVE)


def config_of(**overrides: Any) -> Config:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config(None, {"engine.kind": "emulated", "engine.kv_memory": "64MiB", **dotted})


def cluster_of(faults: Faults = NO_FAULTS, **overrides: Any) -> VirtualCluster:
    """On links that take next to no time."""
    config = config_of(**{"network__node_gbps": 1e9, "engine__cost": to_mapping(CURVE)} | overrides)
    return VirtualCluster(config, deployed(config, dict.fromkeys(Role, CURVE), faults))


def workload(count: int, *, every_ns: int = 3 * MS, seed: int = 1) -> list[VirtualRequest]:
    """Prompts of all lengths, some with shared prefixes, of two tenants; answers shorter than asked for."""
    draw = random.Random(seed)
    shared = [draw.randrange(1000) for _ in range(400)]
    requests = []
    for index in range(count):
        own = tuple(draw.randrange(1000) for _ in range(draw.randrange(1, 500)))
        prefix = tuple(shared[: draw.choice([0, 0, 100, 400])])
        tenant = draw.choice(["", "other"])
        requests.append(VirtualRequest(index * every_ns, prefix + own, draw.randrange(1, 60), 100, tenant))
    return requests


def wrong_answers(cluster: VirtualCluster, requests: Sequence[VirtualRequest], flight: Flight) -> int:
    pairs = zip(requests, flight.outcomes, strict=True)
    return sum(outcome.tokens != expected(cluster, request) for request, outcome in pairs)


def expected(cluster: VirtualCluster, request: VirtualRequest) -> list[int]:
    return expected_tokens(cluster.recipe, request.tokens, request.output_tokens, salt=request.salt)


def events(flight: Flight, kind: type) -> list[tuple[int, Any]]:
    return [(entry.at_ns, entry.event) for entry in flight.log if isinstance(entry.event, kind)]


# The cluster.

SHAPES = [
    {},
    {"roles__prefill": 2, "roles__decode": 2},
    {"roles__prefill": 0, "roles__decode": 0, "roles__mixed": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=["1P1D", "2P2D", "mixed"])
def test_every_answer_is_exact_and_every_run_the_same(shape: dict[str, int]) -> None:
    cluster, requests = cluster_of(engine__token_budget=64, **shape), workload(60)
    flight = cluster.run(requests)
    assert wrong_answers(cluster, requests, flight) == 0
    assert [outcome.error for outcome in flight.outcomes] == [None] * 60
    assert cluster.run(requests).log == flight.log


def test_the_log_of_one_request_is_what_it_should_be() -> None:
    cluster = cluster_of()
    (one,) = [VirtualRequest(5 * MS, tuple(range(40)), 4, ttft_ms=300, tbt_ms=40, priority=3)]
    flight = cluster.run([one])
    name = RequestId("0")
    first = 5 * MS + COST.step_ps([(40, 0)], 0, 0) // 1000
    steps = [COST.step_ps((), 1, context) for context in (41, 42, 43)]
    landed = events(flight, PrefillFinished)[0][0]
    assert 0 < landed - first < 1000, "the hand-over of 40 tokens"
    times = [first, *[landed + sum(steps[:count]) // 1000 for count in range(1, 4)]]
    assert flight.outcomes[0].at_ns == times
    names = cluster.names(one.tokens)
    assert len(names) == 2
    assert [(entry.at_ns, entry.event) for entry in flight.log if not isinstance(entry.event, NodeJoined)] == [
        (5 * MS, RequestArrived(name, "", 40, 4, names, 3, 300, 40)),
        (first, FirstToken(name, 1)),
        (first, BlocksStored("prefill-0", names)),
        (landed, PrefillFinished(name, 1)),
        (times[3], RequestEnded(name, 4)),
    ]
    joined = [event for _, event in events(flight, NodeJoined)]
    assert [(event.node, event.role, event.cost) for event in joined] == [
        ("prefill-0", Role.PREFILL, CURVE),
        ("decode-0", Role.DECODE, CURVE),
    ]
    assert joined[0].capacity_tokens == 64 * 1024
    (route,) = [entry.actions[0] for entry in flight.log if isinstance(entry.event, RequestArrived)]
    assert isinstance(route, Route)
    assert (route.prefill, route.decode, route.attempt) == ("prefill-0", "decode-0", 1)


# What a request asks for goes with it, wherever it goes. Of a sampled answer each token depends on its seed and on all
# tokens before it, as with penalties.


def sampled(count: int) -> list[VirtualRequest]:
    """Half of them greedy, half with log-probabilities, two tenants."""
    return [
        replace(
            request,
            output_tokens=30,
            max_tokens=0,
            sampling=Sampling(temperature=0.5 * (at % 2), seed=at // 4, logprobs=1 if at % 4 < 2 else None),
        )
        for at, request in enumerate(workload(count, every_ns=MS // 4))
    ]


def generated(flight: Flight) -> list[list[tuple[Any, ...]]]:
    """All that clients see of tokens. How much was cached is no part of an answer."""
    return [
        [(each.index, each.token, each.finish, each.logprobs) for each in outcome.generated]
        for outcome in flight.outcomes
    ]


MOVES: dict[str, tuple[Faults, dict[str, Any]]] = {
    "handed over": (NO_FAULTS, {}),
    "pre-empted": (NO_FAULTS, {"engine__kv_memory": "1MiB"}),
    "decode dies": (Faults(nodes=(NodeFault("decode-0", 0.05, 0.06), NodeFault("decode-0", 0.1, 0.11))), {}),
    "prefill dies": (Faults(nodes=(NodeFault("prefill-0", 0.01, 0.02), NodeFault("prefill-0", 0.03, 0.2))), {}),
    "all die": (
        Faults(nodes=(NodeFault("decode-0", 0.05, 0.2), NodeFault("decode-1", 0.07, 0.1))),
        {"roles__decode": 2, "roles__prefill": 2},
    ),
    "sessions end": (Faults(sessions=(SessionFault("prefill-0", "decode-0", 0.02, 0.05),)), {}),
    "a group": (NO_FAULTS, {"roles__prefill": {"count": 2, "pipeline": 2}, "roles__decode": 1}),
    "a group dies": (
        Faults(nodes=(NodeFault("decode-0", 0.05, 0.06), NodeFault("prefill-0", 0.08, 0.1))),
        {"roles__prefill": {"count": 2, "pipeline": 2}, "roles__decode": 1},
    ),
    "a mixed node dies": (
        Faults(nodes=(NodeFault("mixed-0", 0.05, 0.06), NodeFault("mixed-0", 0.1, 0.11))),
        {"roles__prefill": 0, "roles__decode": 0, "roles__mixed": 2},
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_sampling_and_what_else_was_asked_for_survive_every_move(move: str) -> None:
    faults, shape = MOVES[move]
    requests = sampled(20)
    alone = cluster_of(roles__prefill=0, roles__decode=0, roles__mixed=1).run(requests)
    flight = cluster_of(faults, cache__dram="4MiB", **shape).run(requests)
    assert generated(flight) == generated(alone)
    for request, outcome in zip(requests, flight.outcomes, strict=True):
        assert [each.index for each in outcome.generated] == list(range(30))
        for each in outcome.generated:
            assert (each.logprobs is None) == (request.sampling.logprobs is None)
            assert each.logprobs is None or each.logprobs.top[0][0] == each.token
        assert [each.finish for each in outcome.generated[-2:]] == [None, FinishReason.LENGTH]
        assert outcome.generated[0].cached_tokens is not None
        if faults is NO_FAULTS:
            assert not [each for each in outcome.generated[1:] if each.cached_tokens is not None]
    if faults is not NO_FAULTS:
        again = [action for entry in flight.log for action in entry.actions if isinstance(action, Route)]
        assert max(route.attempt for route in again) > 1


# Caches: whatever is found in them must be what would be computed, and the tenant's own.


def turns(cluster: VirtualCluster, count: int, *, seed: int = 1) -> list[VirtualRequest]:
    """Conversations of three tenants, each turn with all before it and the answer. Every text of one is asked by the
    others as well, word by word. Some begin with less than a block, and answers end at every place in one."""
    draw, requests = random.Random(seed), list[VirtualRequest]()
    texts: list[tuple[int, ...]] = []
    for number in range(count):
        text = texts[draw.randrange(len(texts))] if texts and draw.random() < 0.7 else ()
        text += tuple(draw.randrange(1000) for _ in range(draw.choice([3, 5, 16, 40, 90])))
        for salt in draw.sample(["", "one", "other"], 2):
            at = len(requests)
            requests.append(VirtualRequest(at * 60 * MS, text, 1 + (number * 7 + at) % 37, salt=salt))
            texts.append((*text, *cluster.answer(requests[-1])))
    return requests


CACHES: dict[str, dict[str, Any]] = {
    "in the engine": {},
    "in DRAM": {"cache__dram": "4MiB"},
    "on the SSD": {"cache__dram": "512KiB", "cache__ssd": "8MiB", "cache__folder": "/nowhere"},
    "all full": {"cache__dram": "512KiB", "cache__ssd": "512KiB", "cache__folder": "/nowhere"},
    "of others": {"roles__prefill": 3, "roles__decode": 2, "cache__dram": "2MiB", "policy": "isthmus"},
    "mixed": {"roles__prefill": 0, "roles__decode": 0, "roles__mixed": 2, "cache__dram": "2MiB"},
}


@pytest.mark.parametrize("cache", CACHES)
def test_conversations_of_several_tenants_are_exact_and_reuse_their_own(cache: str) -> None:
    cluster = cluster_of(**CACHES[cache])
    requests = turns(cluster, 40)
    flight = cluster.run(requests)
    assert wrong_answers(cluster, requests, flight) == 0
    cached = [outcome.generated[0].cached_tokens or 0 for outcome in flight.outcomes]
    assert sum(cached) > 1000, "nothing was reused"


@pytest.mark.parametrize("deaths", [[(1.0, 1.2), (1.21, 1.3)], [(1.0, 1.2), (1.5, 1.6), (2.6, 2.7)]])
def test_what_a_disk_kept_is_used_again_after_each_restart(deaths: list[tuple[float, float]]) -> None:
    """Also when the next death comes before anything was used."""
    config = config_of(
        **CACHES["on the SSD"],
        roles__prefill=0,
        roles__decode=0,
        roles__mixed=2,
        engine__cost=to_mapping(CURVE),
    )
    faults = Faults(nodes=tuple([NodeFault("mixed-0", *death) for death in deaths]))
    cluster = VirtualCluster(config, deployed(config, dict.fromkeys(Role, CURVE), faults), disks_stay=True)
    requests = turns(cluster, 30)
    flight = cluster.run(requests)
    assert wrong_answers(cluster, requests, flight) == 0
    back = [at for at, event in events(flight, NodeJoined) if event.node == "mixed-0"][1:]
    assert len(back) == len(deaths)
    found = [(at, event) for at, event in events(flight, BlocksStored) if event.node == "mixed-0"]
    for joined in back:
        kept = [len(event.names) for at, event in found if at == joined and event.tier is Tier.DISK]
        assert sum(kept) > 10, "it came back with nothing"
    used = [
        action.num_cached
        for entry in flight.log
        if entry.at_ns > back[-1]
        for action in entry.actions
        if isinstance(action, Route) and action.prefill == "mixed-0" and action.num_cached
    ]
    assert used, "nothing of it was used again"


@pytest.mark.parametrize("move", ["in the engine", "pre-empted", "in DRAM", "on the SSD"])
def test_recurrent_states_go_wherever_their_prompts_go(move: str) -> None:
    """A state that is not the one after just these tokens shows in every token that follows."""
    curve = replace(CURVE, state_bytes=20_000)
    knobs = {"engine__kv_memory": "2560KiB"} if move == "pre-empted" else CACHES[move]
    config = config_of(**{"network__node_gbps": 1e9, "engine__cost": to_mapping(curve)} | knobs)
    cluster = VirtualCluster(config, deployed(config, dict.fromkeys(Role, curve), NO_FAULTS))
    requests = workload(20) if move == "pre-empted" else turns(cluster, 12)
    flight = cluster.run(requests)
    assert [str(outcome.error) for outcome in flight.outcomes if outcome.error] == []
    assert wrong_answers(cluster, requests, flight) == 0
    cached = [outcome.generated[0].cached_tokens or 0 for outcome in flight.outcomes]
    assert sum(cached) > 100, "nothing was reused"


@pytest.mark.parametrize("num_prompt", [5, 21])
def test_an_answer_belongs_to_its_tenant_however_short_the_prompt(num_prompt: int) -> None:
    """With less than a block of prompt, no name before the answer's knows whose it is."""
    cluster = cluster_of(roles__prefill=0, roles__decode=0, roles__mixed=1, cache__dram="4MiB")
    first = VirtualRequest(0, tuple(range(num_prompt)), 44, salt="one")
    text = (*first.tokens, *cluster.answer(first), 1, 2, 3)
    after = [
        VirtualRequest((1 + at) * 1000 * MS, text, 8, salt=salt) for at, salt in enumerate(["", "two", "one"])
    ]
    flight = cluster.run([first, *after])
    assert wrong_answers(cluster, [first, *after], flight) == 0
    cached = [outcome.generated[0].cached_tokens for outcome in flight.outcomes]
    assert cached == [0, 0, 0, (num_prompt + 43) // 16 * 16]


# Refusals, live.


def test_a_refusal_after_the_prefill_reaches_the_client_before_any_token() -> None:
    """`baseline` looks at the decode pool only when a request gets there."""
    cluster = cluster_of(scheduling__admission="baseline", slo__tbt_ms=5)
    flight = cluster.run([VirtualRequest(0, tuple(range(50)), 5), VirtualRequest(0, tuple(range(60)), 5)])
    late = [entry for entry in flight.log if isinstance(entry.event, FirstToken)]
    assert any(isinstance(action, Refuse) and action.stage == "decode" for e in late for action in e.actions)
    refused = [outcome for outcome in flight.outcomes if outcome.error is not None]
    assert refused
    assert all(isinstance(outcome.error, OverloadedError) and not outcome.tokens for outcome in refused)
