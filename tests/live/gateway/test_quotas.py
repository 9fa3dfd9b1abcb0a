from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.live.gateway.problems import RateLimitError
from isthmus.live.gateway.settings import TenantLimits
from isthmus.live.gateway.tenants import Bucket, Quota, Quotas

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
