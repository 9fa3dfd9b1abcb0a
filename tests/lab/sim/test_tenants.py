"""One tenant floods a cluster: how much another keeps of its cache, and how soon it is answered."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest

from isthmus.core.conductor import Rules
from isthmus.core.types import NS_PER_S, Role, Shares, Tenant
from isthmus.facts import NodeFacts
from isthmus.lab.sim.records import RequestRecord
from isthmus.lab.sim.workloads import Request

from .cluster import BLOCK_SIZE, MS, deployment, disaggregated, nodes, run

EQUAL = Shares(default=1.0)
MIXED = nodes(Role.MIXED, 1)
APART = disaggregated()


def prompt(at_ns: int, tenant: str, number: int, num_blocks: int = 4, output: int = 1) -> Request:
    """Prompts of different numbers, or tenants, share nothing."""
    first = (sum(map(ord, tenant)) * 10_000 + number) * 1000
    blocks = tuple(range(first, first + num_blocks))
    return Request(at_ns, num_blocks * BLOCK_SIZE, output, blocks, tenant)


def served(
    some: tuple[NodeFacts, ...], requests: list[Request], shares: Shares, **fields: object
) -> list[RequestRecord]:
    return run(deployment(some, shares=shares, **fields), requests).records


# The cache.


@pytest.mark.parametrize("tiers", [{"dram_blocks": 160}, {"dram_blocks": 40, "ssd_blocks": 120}])
@pytest.mark.parametrize("some", [MIXED, APART])
@pytest.mark.parametrize(
    ("shares", "kept"),
    [
        (EQUAL, 20),
        (Shares((Tenant("globex", 3.0),), 1.0), 30),
        (Shares((Tenant("acme", 3.0),), 1.0), 10),
        (Shares(), 0),
    ],
)
def test_one_tenants_400_prompts_leave_another_its_share_of_the_cache(
    some: tuple[NodeFacts, ...], tiers: dict[str, int], shares: Shares, kept: int
) -> None:
    """40 prompts of globex fill the cache; then come 400 of acme; then the 40 again, the newest first. As each of them
    that is computed anew takes room of others of its own tenant, only a run of hits at their begin is counted."""
    requests = [prompt(at * NS_PER_S, "globex", at) for at in range(40)]
    requests += [prompt((100 + at) * NS_PER_S, "acme", at) for at in range(400)]
    requests += [prompt((600 + at) * NS_PER_S, "globex", 39 - at) for at in range(40)]

    again = served(some, requests, shares, transit_blocks=20, **tiers)[-40:]

    hits = [record.cached_tokens > 0 for record in again]
    assert hits == [True] * kept + [False] * (40 - kept)


# The queue.


def first_tokens(records: list[RequestRecord], tenant: str) -> list[int]:
    return [record.first_token_ns for record in records if record.request.tenant == tenant]


@pytest.mark.parametrize("some", [MIXED, APART])
@pytest.mark.parametrize(("order", "partial_prefills"), [("fcfs", 1), ("fcfs", 4), ("promise", 1)])
def test_a_tenant_behind_a_flood_waits_for_as_much_work_as_it_brings(
    some: tuple[NodeFacts, ...], order: str, partial_prefills: int
) -> None:
    """150 prompts of acme, then 10 of globex. By the time these are through so many more of acme's are."""
    requests = [prompt(at, "acme", at, output=4) for at in range(150)]
    requests += [prompt(MS, "globex", at, output=4) for at in range(10)]
    chunking = msgspec.structs.replace(some[0].chunking, partial_prefills=partial_prefills)
    fields = {"order": order, "max_sequences": 8, "chunking": chunking}

    fair = served(some, requests, EQUAL, **fields)
    plain = served(some, requests, Shares(), **fields)

    last = max(first_tokens(fair, "globex"))
    assert sum(at < last for at in first_tokens(fair, "acme")) <= 30
    assert sum(at < max(first_tokens(plain, "globex")) for at in first_tokens(plain, "acme")) >= 140
    # In each tenant's own order.
    if order == "fcfs" and partial_prefills == 1:
        for tenant in ("acme", "globex"):
            assert all(before <= after for before, after in pairwise(first_tokens(fair, tenant)))


def test_turns_follow_weights() -> None:
    requests = [prompt(0, tenant, at) for at in range(90) for tenant in ("acme", "globex")]
    records = served(MIXED, requests, Shares((Tenant("globex", 2.0),), 1.0), max_sequences=4)
    last = max(first_tokens(records, "globex"))
    assert 43 <= sum(at <= last for at in first_tokens(records, "acme")) <= 48


def test_nobody_saves_turns_up() -> None:
    """globex comes when acme has been served for long: then they take turns, and acme does not stand still."""
    requests = [prompt(0, "acme", at) for at in range(300)]
    requests += [prompt(200 * MS, "globex", at) for at in range(30)]
    records = served(MIXED, requests, EQUAL, max_sequences=4)
    first, last = min(first_tokens(records, "globex")), max(first_tokens(records, "globex"))
    between = sum(first <= at <= last for at in first_tokens(records, "acme"))
    assert 27 <= between <= 33


@pytest.mark.parametrize("shares", [Shares(), EQUAL])
def test_a_lone_tenant_is_served_as_without_tenants(shares: Shares) -> None:
    requests = [prompt(at * MS, "acme", at % 17, 1 + at % 9, 1 + at % 5) for at in range(150)]
    unnamed = [msgspec.structs.replace(request, tenant="") for request in requests]
    fields = {"dram_blocks": 40, "transit_blocks": 10, "kv_blocks": 60, "max_sequences": 6}
    named = served(APART, requests, shares, **fields)
    assert [(each.first_token_ns, each.end_ns, each.cached_tokens) for each in named] == [
        (each.first_token_ns, each.end_ns, each.cached_tokens)
        for each in served(APART, unnamed, shares, **fields)
    ]


@pytest.mark.parametrize("seed", [5, 49, 51, 52, *range(60, 72)])  # the first four once ended in such rings
def test_nodes_with_little_memory_never_wait_for_each_other_in_a_ring(seed: int) -> None:
    """Each prompt needs memory on two nodes at a time, much of what there is, and tenants pass each other on both. A
    request that never ends fails the simulation's own check."""
    random = Random(seed)
    requests = []
    for number in range(120):
        tenant, weight = random.choice(["acme", "globex", "third"]), random.choice([1, 2, 5, 14, 28])
        at = random.choice([0, number * MS, random.randrange(400) * MS])
        requests.append(prompt(at, tenant, number, weight, random.choice([1, 3, 40])))
    some = disaggregated(random.choice([1, 2]), random.choice([1, 2]))
    records = served(
        some,
        requests,
        Shares((Tenant("third", 4.0),), 1.0),
        kv_blocks=random.choice([34, 40, 64]),
        max_sequences=random.choice([2, 3, 8]),
        order=random.choice(["fcfs", "promise"]),
        dram_blocks=random.choice([0, 24]),
        transit_blocks=8,
    )
    assert {record.status.name for record in records} == {"COMPLETED"}


# The limit of requests.


def test_a_full_cluster_is_shared_by_tenants_that_ask_again_and_again() -> None:
    """acme asks ten times as often as globex, both more than the cluster can do: each gets about half."""
    requests = [prompt(at * 2 * MS, "acme", at, output=30) for at in range(500)]
    requests += [prompt(at * 20 * MS, "globex", at, output=30) for at in range(50)]
    rules = Rules(policy="round_robin", max_requests=8)

    def completed(shares: Shares, tenant: str) -> int:
        records = served(MIXED, requests, shares, rules=rules)
        return sum(each.status.name == "COMPLETED" for each in records if each.request.tenant == tenant)

    assert completed(Shares(), "globex") * 5 < completed(Shares(), "acme")
    acme, globex = completed(EQUAL, "acme"), completed(EQUAL, "globex")
    assert 0.8 < globex / acme < 1.25
