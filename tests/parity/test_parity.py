"""The live cluster with emulated engines in virtual time, and the simulator, decide alike: same events at the same
nanoseconds, same answers.

Both drive the same conductor and schedulers. What must agree beside them is when things happen and in which order:
the length of each iteration, what is taken in at its end, and who is told first.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from isthmus.cluster.recorder import Entry
from isthmus.cluster.virtual import VirtualRequest
from isthmus.config import Config, load_config
from isthmus.cost import Curve, to_mapping
from isthmus.types import Role

from .worlds import live_log, simulated_log

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
COSTS = {Role.PREFILL: CURVE, Role.DECODE: SLOWER, Role.MIXED: CURVE}
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
            request = VirtualRequest(
                at_ns,
                prefix + own,
                draw.randrange(1, 60),
                priority=draw.choice([0, 0, 0, 1, 5]),
                ttft_ms=draw.choice([None, 20, 50]),
                tbt_ms=draw.choice([None, None, 8, 10]),
            )
        requests.append(request)
    return requests


def same_logs(overrides: dict[str, Any], requests: Sequence[VirtualRequest]) -> list[Entry]:
    """Both worlds' log, which is one. Compared entry by entry, so that a failure shows the first that differs."""
    config = config_of(overrides)
    live, simulated = live_log(config, COSTS, requests), simulated_log(config, COSTS, requests)
    for number, (ours, theirs) in enumerate(zip(live, simulated, strict=False)):
        assert ours == theirs, f"entry {number} of {len(live)} live and {len(simulated)} simulated ones differs"
    assert len(live) == len(simulated)
    kinds = Counter(type(entry.event).__name__ for entry in live)
    assert kinds["RequestArrived"] == len(requests)
    return live


def actions_of(log: Sequence[Entry]) -> Counter[str]:
    return Counter(type(action).__name__ for entry in log for action in entry.actions)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "policy", ["random", "round_robin", "least_loaded", "sticky", "local_aware", "isthmus"]
)
def test_every_policy_places_alike(policy: str, shape: str) -> None:
    log = same_logs({"policy": policy, **SHAPES[shape]}, workload(80, 2 * MS))
    assert actions_of(log)["Route"] == 80


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["fcfs", "promise"])
@pytest.mark.parametrize("admission", ["baseline", "early", "predictive", "survival"])
def test_every_admission_refuses_alike(admission: str, order: str, shape: str) -> None:
    """Twice as much as two nodes can do; some requests bring limits and priorities of their own."""
    knobs = {"scheduling.admission": admission, "scheduling.order": order, "scheduling.reserve": 0.1}
    log = same_logs({**knobs, **SLO, **SHAPES[shape]}, workload(120, MS, terms=True))
    assert actions_of(log)["Refuse"] > 0


def test_displaced_requests_are_the_same() -> None:
    log = same_logs({"limits.max_requests": 12}, workload(120, MS, terms=True))
    late = [entry for entry in log if len(entry.actions) > 1 and type(entry.event).__name__ == "RequestArrived"]
    assert late, "nobody was displaced"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv_memory", ["1MiB", "2MiB"])
def test_memory_pressure_and_evictions_are_the_same(kv_memory: str, shape: str) -> None:
    knobs = {"engine.kv_memory": kv_memory, "engine.token_budget": 64}
    log = same_logs({**knobs, **SHAPES[shape]}, workload(80, 3 * MS))
    assert any(type(entry.event).__name__ == "BlocksEvicted" for entry in log)


@pytest.mark.parametrize("budget", [1, 16, 100])
@pytest.mark.parametrize("prompt_batch", [None, 32])
def test_chunks_are_the_same(budget: int, prompt_batch: int | None) -> None:
    knobs = {"engine.token_budget": budget, "engine.prompt_batch": prompt_batch, "engine.max_sequences": 6}
    same_logs({**knobs, **SHAPES["2P2D1M"]}, workload(30, 5 * MS))


@pytest.mark.parametrize("partial", [1, 3])
@pytest.mark.parametrize("chunking", ["fixed", "tbt"])
def test_chunks_by_time_and_several_prompts_at_once_are_the_same(chunking: str, partial: int) -> None:
    knobs = {"scheduling.chunking": chunking, "scheduling.partial_prefills": partial, "slo.tbt_ms": 7}
    same_logs({**knobs, "engine.token_budget": 1024, **SHAPES["2M"]}, workload(60, 2 * MS))


@pytest.mark.parametrize("shape", ["1P1D", "3P2D"])
@pytest.mark.parametrize("policy", ["round_robin", "isthmus"])
def test_what_happens_at_one_instant_happens_in_one_order(policy: str, shape: str) -> None:
    """Eight requests at a time, as like as can be: nodes work in lockstep, and prompts end together."""
    requests = [
        VirtualRequest(index // 8 * 20 * MS, tuple(range(index * 1000, index * 1000 + 200)), 10)
        for index in range(80)
    ]
    log = same_logs({"policy": policy, **SHAPES[shape]}, requests)
    times = Counter(entry.at_ns for entry in log)
    assert max(times.values()) > 8
