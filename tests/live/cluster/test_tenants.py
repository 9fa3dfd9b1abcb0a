"""Tenants of a whole cluster: one floods it, another keeps its share of the cache and is answered in its turn."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import httpx
import pytest

from isthmus.core.conductor import Event, FirstToken, RequestArrived
from tests.inside import Inside, inside

from .test_keys import ACME, EMULATED, GLOBEX, KEYS

BLOCKS = 8
"""Full blocks of a prompt; an answer of one token fills no more."""
MIXED, APART = {"mixed": 1, "prefill": 0, "decode": 0}, {"prefill": 1, "decode": 1}


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """No two of them share anything."""
    drawn = random.Random(seed)
    return [[drawn.randrange(256) for _ in range(BLOCKS * 16 + 1)] for _ in range(count)]


def ask(served: Inside, key: str, prompts: list[list[int]]) -> int:
    """All of them in one HTTP request. Returns how many of their blocks came from a cache."""
    body, headers = {"prompt": prompts, "max_tokens": 1}, {"Authorization": f"Bearer {key}"}
    url = f"{served.url}/v1/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) // 16


@pytest.mark.parametrize(("roles", "cache", "fits"), [(MIXED, {"dram": "4MiB"}, 112), (APART, {}, 128)])
def test_many_prompts_of_one_tenant_leave_another_about_half_of_what_fits(
    roles: dict[str, int], cache: dict[str, str], fits: int
) -> None:
    """In DRAM; and in the engine's memory, where there is no other cache."""
    engine = {**EMULATED["engine"], "kv_memory": "4MiB"}
    settings = {"engine": engine, "roles": roles, "cache": cache, "auth": {"keys": KEYS, "metrics": "tenants"}}
    with inside(settings, key=ACME) as served:
        own = prompts_of(1, 20)
        ask(served, GLOBEX, own)
        for at in range(0, 160, 20):
            ask(served, ACME, prompts_of(2 + at, 20))
        served.check_idle()
        served.be_told()
        text = served.http.get("/metrics").text
        kept = ask(served, GLOBEX, own[: -1 - fits // BLOCKS // 2 : -1])
        assert 0.35 * fits <= kept <= 0.65 * fits
        for tenant in ("acme", "globex"):
            assert (
                f'isthmus_tenant_cache_bytes{{node="{served.processes[0]._facts.node}",tenant="{tenant}"}}'
                in text
            )


def test_a_tenant_behind_another_s_flood_is_answered_in_its_turn() -> None:
    engine = {**EMULATED["engine"], "max_sequences": 4}
    with inside({"engine": engine, "roles": APART, "auth": {"keys": KEYS}}, key=ACME) as served:
        tenant_of, order, on = dict[str, str](), list[str](), served.head._desk.conductor.on

        def heard(event: Event, now: int) -> Any:
            if isinstance(event, RequestArrived):
                tenant_of[event.request] = event.tenant
            elif isinstance(event, FirstToken):
                order.append(tenant_of[event.request])
            return on(event, now)

        with (
            mock.patch.object(served.head._desk.conductor, "on", heard),
            served.together(66),
            ThreadPoolExecutor(2) as pool,
        ):
            flood = pool.submit(ask, served, ACME, prompts_of(1, 60))
            served.wait_until_asked(60)
            own = pool.submit(ask, served, GLOBEX, prompts_of(2, 6))
            flood.result(), own.result()
        acme, globex = map(served.head._alias_of, ("acme", "globex"))
        last = len(order) - order[::-1].index(globex)
        assert order.count(globex) == 6 and order.count(acme) == 60
        assert order[:last].count(acme) <= 16  # as many turns, and what had begun before
