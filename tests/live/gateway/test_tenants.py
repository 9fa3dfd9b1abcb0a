"""Tenants at the gateway: what their quotas hold, who is refused by a limit of its own, and what metrics say."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from isthmus.core.errors import OverloadedError
from isthmus.core.types import Shares, Tenant, sharing
from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, create_app
from isthmus.live.gateway.http import RateLimitError
from isthmus.live.gateway.settings import TenantLimits
from isthmus.live.gateway.tenants import Bucket, Quota, Quotas

from .fake import HANG, FakeBackend, says
from .inprocess import Poster
from .test_headers import ACME, GLOBEX, KEYS, NEW, bearer

# So little runs in that none does in a test, however slow the machine is.
SLOW = {"burst_s": 3600.0}


def app_of(backend: FakeBackend, tokenizer: GatewayTokenizer, of_acme: TenantLimits, **settings: Any) -> Poster:
    """With limits for acme, and none for globex."""
    given = GatewaySettings(keys=KEYS, tenant_limits={"acme": of_acme}, **settings)
    return Poster(create_app(backend, tokenizer, given))


def complete(post: Poster, key: str, prompt: Any = "hi", **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, **fields}
    return post.request("POST", "/v1/completions", json=body, headers=bearer(key))


def assert_limited(response: httpx.Response, limit: str, least_s: int) -> None:
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    assert f"({limit})" in error["message"] and "acme" not in error["message"]
    assert int(response.headers["retry-after"]) >= least_s
    assert response.headers["x-request-id"]


def test_requests_beyond_a_rate_are_refused_whatever_key_of_the_tenant_they_show(
    backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    post = app_of(backend, tokenizer, TenantLimits(requests_per_s=3 / 3600, **SLOW))
    for key in (ACME, NEW, ACME):
        assert complete(post, key).status_code == 200
    assert_limited(complete(post, NEW), "requests_per_s", 1000)
    assert len(backend.jobs) == 3
    for _ in range(5):
        assert complete(post, GLOBEX).status_code == 200
    assert post.request("GET", "/v1/models", headers=bearer(ACME)).status_code == 200, "it only reads"


def test_a_body_beyond_a_limit_is_not_read(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    post = app_of(backend, tokenizer, TenantLimits(requests_per_s=1 / 3600, **SLOW))
    assert complete(post, ACME).status_code == 200

    async def never() -> Message:
        raise AssertionError("the body was read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"authorization", f"Bearer {ACME}".encode())],
    }
    asyncio.run(post.app(scope, never, send))
    assert sent[0]["status"] == 429


def test_tokens_of_prompts_and_answers_count(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    backend.script = lambda _: says([97, 98, 99, 100])
    post = app_of(backend, tokenizer, TenantLimits(tokens_per_s=20 / 3600, **SLOW))
    assert complete(post, ACME, [97] * 8).status_code == 200  # 12 of 20
    assert_limited(complete(post, ACME, [97] * 9), "tokens_per_s", 100)
    assert complete(post, ACME, [97] * 8).status_code == 200  # 4 too many
    assert_limited(complete(post, ACME, [97]), "tokens_per_s", 500)
    assert complete(post, GLOBEX, [97] * 100).status_code == 200


def test_what_the_cluster_refused_costs_no_tokens(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    def full(_: Any) -> Any:
        raise OverloadedError("full", retry_after_s=2)

    usual, backend.script = backend.script, full
    post = app_of(backend, tokenizer, TenantLimits(tokens_per_s=20 / 3600, **SLOW))
    for _ in range(9):
        response = complete(post, ACME, [97] * 15)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    backend.script = usual
    assert complete(post, ACME, [97] * 15).status_code == 200


def test_requests_in_progress_are_counted_until_their_answers_end(
    backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    usual, backend.script = backend.script, lambda _: [HANG]
    post = app_of(backend, tokenizer, TenantLimits(concurrent=2))
    body = {"prompt": "hi", "stream": True}

    async def scenario() -> None:
        transport = httpx.ASGITransport(post.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

            async def ask(key: str) -> httpx.Response:
                return await client.post("/v1/completions", json=body, headers=bearer(key))

            running = [asyncio.create_task(ask(ACME)) for _ in range(2)]
            while len(backend.jobs) < 2:
                await asyncio.sleep(0)
            assert_limited(await ask(NEW), "concurrent", 1)
            backend.script = usual
            assert (await ask(GLOBEX)).status_code == 200
            running[0].cancel()
            await asyncio.wait(running[:1])
            assert (await ask(ACME)).status_code == 200
            running[1].cancel()
            await asyncio.wait(running)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_other_tenants_have_the_default(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    limits = TenantLimits(requests_per_s=1 / 3600, **SLOW)
    post = app_of(backend, tokenizer, TenantLimits(), tenant_default=limits)
    for _ in range(3):
        assert complete(post, ACME).status_code == 200
    assert complete(post, GLOBEX).status_code == 200
    assert_limited(complete(post, GLOBEX), "requests_per_s", 1000)


@pytest.mark.parametrize("keys", [KEYS, ()])
def test_a_job_has_the_weight_of_its_tenant_and_none_without_keys(
    backend: FakeBackend, tokenizer: GatewayTokenizer, keys: Any
) -> None:
    shares = Shares((Tenant("acme", 3.0),), 1.0)
    post = Poster(create_app(backend, tokenizer, GatewaySettings(keys=keys, shares=shares)))
    for key in (ACME, GLOBEX):
        assert complete(post, key, user="initech").status_code == 200
    assert [job.weight for job in backend.jobs] == ([3.0, 1.0] if keys else [0.0, 0.0])
    assert [sharing(job.tenant, job.weight).name for job in backend.jobs] == (
        ["acme", "globex"] if keys else ["", ""]
    )


# Metrics.


def tenant_lines(post: Poster) -> list[str]:
    text = post.request("GET", "/metrics", headers=bearer(GLOBEX)).text
    return [line for line in text.splitlines() if "acme" in line and "_created" not in line]


def test_no_metric_names_a_tenant_unless_it_is_asked_for(
    backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    backend.node_gauges = {"tenant_cache_bytes/acme": {"mixed-0": 5}}
    post = app_of(backend, tokenizer, TenantLimits(requests_per_s=1 / 3600, **SLOW))
    complete(post, ACME)
    complete(post, ACME)
    assert tenant_lines(post) == []


def test_metrics_by_tenant(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    backend.node_gauges = {"tenant_cache_bytes/acme": {"mixed-0": 5, "mixed-1": 7}}
    backend.script = lambda _: says([97, 98, 99])
    limits = TenantLimits(requests_per_s=3 / 3600, tokens_per_s=16 / 3600, **SLOW)
    post = app_of(backend, tokenizer, limits, names_tenants=True)
    assert complete(post, ACME, [97] * 5).status_code == 200
    assert complete(post, ACME, [97] * 9).status_code == 429
    backend.script = lambda _: (_ for _ in ()).throw(OverloadedError("full", retry_after_s=2))
    assert complete(post, ACME, [97]).status_code == 429
    assert complete(post, ACME).status_code == 429
    assert tenant_lines(post) == [
        'isthmus_tenant_requests_total{tenant="acme"} 4.0',
        'isthmus_tenant_requests_refused_total{limit="tokens_per_s",tenant="acme"} 1.0',
        'isthmus_tenant_requests_refused_total{limit="cluster",tenant="acme"} 1.0',
        'isthmus_tenant_requests_refused_total{limit="requests_per_s",tenant="acme"} 1.0',
        'isthmus_tenant_tokens_total{kind="prompt",tenant="acme"} 5.0',
        'isthmus_tenant_tokens_total{kind="generation",tenant="acme"} 3.0',
        'isthmus_tenant_cache_bytes{node="mixed-0",tenant="acme"} 5.0',
        'isthmus_tenant_cache_bytes{node="mixed-1",tenant="acme"} 7.0',
    ]


def test_without_limits_or_metrics_no_request_passes_a_gate(
    backend: FakeBackend, tokenizer: GatewayTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Any, scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("somebody looked")

    monkeypatch.setattr("isthmus.live.gateway.tenants.TenantGate.__call__", fails)
    post = app_of(backend, tokenizer, TenantLimits(), shares=Shares(default=1.0))
    assert complete(post, ACME).status_code == 200


GAPS_S = st.lists(st.floats(0, 3, allow_subnormal=False), min_size=1, max_size=60)


@given(GAPS_S, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1.0, 3.0, 10.0]))
def test_in_no_stretch_of_time_more_is_taken_than_runs_in_and_was_there(
    gaps_s: list[float], rate: float, size: float
) -> None:
    bucket, now_s, taken_s = Bucket(rate, size), 0.0, list[float]()
    for gap_s in gaps_s:
        now_s += gap_s
        if not bucket.wait_s(1, now_s):
            bucket.take(1, now_s)
            taken_s.append(now_s)
    for first in range(len(taken_s)):
        for last in range(first, len(taken_s)):
            assert last - first + 1 <= size + rate * (taken_s[last] - taken_s[first]) + 1e-6


@given(GAPS_S, st.floats(0.1, 40, allow_subnormal=False), st.sampled_from([0.5, 1.0, 4.0]))
def test_who_waits_as_long_as_it_was_told_is_let_in_and_not_before(
    gaps_s: list[float], amount: float, rate: float
) -> None:
    bucket, now_s = Bucket(rate, 10.0), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s:
            assert bucket.wait_s(amount, now_s + wait_s * 0.99) > 0
            assert bucket.wait_s(amount, now_s + wait_s + 1e-9) < 1e-6
            now_s += wait_s + 1e-9
        bucket.take(amount, now_s)


def test_what_is_more_than_a_bucket_holds_is_let_in_when_it_is_full_and_paid_for_afterwards() -> None:
    bucket = Bucket(2.0, 10.0)
    assert bucket.wait_s(100, 0.0) == 0
    bucket.take(100, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(91 / 2)
    assert bucket.wait_s(100, 50.0) == 0


def refused(quota: Quota, now_s: float) -> RateLimitError:
    with pytest.raises(RateLimitError) as raised:
        quota.enter(now_s)
    return raised.value


def test_requests_in_progress_are_limited_and_a_refused_one_takes_nothing() -> None:
    quota = Quota(TenantLimits(requests_per_s=1, burst_s=3, concurrent=2))
    quota.enter(0)
    quota.enter(0)
    assert refused(quota, 0).limit == "concurrent"
    quota.leave()
    quota.enter(0)
    quota.leave()
    error = refused(quota, 0)
    assert (error.limit, error.retry_after_s, quota.num_running) == ("requests_per_s", 1, 1)
    assert str(error) == (
        "this API key's tenant may have 1 requests per second (requests_per_s); try again in 1 s"
    )
    quota.enter(1.0)


def test_answers_are_paid_for_when_they_are_known() -> None:
    quota = Quota(TenantLimits(tokens_per_s=10, burst_s=2))
    quota.check_prompt(15, 0)
    quota.spend(15, 0)
    quota.check_prompt(5, 0)
    quota.spend(40, 0)
    with pytest.raises(RateLimitError) as raised:
        quota.check_prompt(5, 0)
    assert (raised.value.limit, raised.value.retry_after_s) == ("tokens_per_s", 4)
    quota.check_prompt(5, 4.0)


def test_without_limits_nothing_is_refused() -> None:
    quota = Quota(TenantLimits())
    for _ in range(1000):
        quota.enter(0)
        quota.check_prompt(10**9, 0)
        quota.spend(10**9, 0)
    assert quota.num_running == 1000


def test_each_tenant_has_a_quota_of_its_own() -> None:
    quotas = Quotas({"acme": TenantLimits(concurrent=1)}, TenantLimits(concurrent=2))
    quotas.of("acme").enter(0)
    assert refused(quotas.of("acme"), 0).limit == "concurrent"
    for tenant in ("globex", "third"):
        quotas.of(tenant).enter(0)
        quotas.of(tenant).enter(0)
        assert refused(quotas.of(tenant), 0).limit == "concurrent"
