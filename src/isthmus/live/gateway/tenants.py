"""Tenants: what each may ask for, before its body is read and when its prompt is counted; and, where metrics may name
tenants, what each asked for. Quotas are pure: `now_s`, of one clock that never goes back, is given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.live.gateway.headers import tenant_of
from isthmus.live.gateway.node_metrics import PREFIX
from isthmus.live.gateway.problems import RateLimitError
from isthmus.live.gateway.settings import TenantLimits


class Bucket:
    """A token bucket: `rate` a second run in, up to `size`, which is in it at first. It may be overdrawn; then what is
    owed has to run in first."""

    __slots__ = ("_at_s", "_level", "_rate", "_size")

    def __init__(self, rate: float, size: float) -> None:
        self._rate, self._size, self._level, self._at_s = rate, size, size, -math.inf

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much may be taken, or, of more than it holds, until it is full; 0: now. Does not mutate."""
        missing = min(amount, self._size) - self._level_at(now_s)
        return missing / self._rate if missing > 0 else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Whether so much is there or not. What is below 0 is put back."""
        self._level = self._level_at(now_s) - amount
        self._at_s = now_s

    def _level_at(self, now_s: float) -> float:
        gained = self._rate * (now_s - self._at_s)
        return min(self._size, self._level + gained)


class Quota:
    """What one tenant has used of its `limits`."""

    def __init__(self, limits: TenantLimits) -> None:
        self._limits, self.num_running = limits, 0
        self._requests = _bucket(limits.requests_per_s, limits.burst_s)
        self._tokens = _bucket(limits.tokens_per_s, limits.burst_s)

    def enter(self, now_s: float) -> None:
        """A request begins; `leave` ends it. Raises RateLimitError, and nothing has begun."""
        most = self._limits.concurrent
        if most is not None and self.num_running >= most:
            raise RateLimitError("concurrent", f"{most} requests in progress", 0.0)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now_s)
            if wait_s:
                allowed = f"{self._limits.requests_per_s:g} requests per second"
                raise RateLimitError("requests_per_s", allowed, wait_s)
            self._requests.take(1, now_s)
        self.num_running += 1

    def leave(self) -> None:
        self.num_running -= 1

    def check_prompt(self, num_tokens: int, now_s: float) -> None:
        """Raises RateLimitError when a prompt of so many tokens has to wait. Does not mutate."""
        wait_s = self._tokens.wait_s(num_tokens, now_s) if self._tokens is not None else 0.0
        if wait_s:
            allowed = f"{self._limits.tokens_per_s:g} tokens per second, of prompts and answers"
            raise RateLimitError("tokens_per_s", allowed, wait_s)

    def spend(self, num_tokens: int, now_s: float) -> None:
        """So many tokens of a prompt or an answer are the tenant's."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)


class Quotas:
    """Of all tenants. `own`: limits of those that have some of their own, `default`: of each other one."""

    def __init__(self, own: Mapping[str, TenantLimits], default: TenantLimits) -> None:
        self._own, self._default = own, default
        self._of: dict[str, Quota] = {}

    def of(self, tenant: str) -> Quota:
        """Known tenants only are asked for, so that their number is limited by that of the keys."""
        quota = self._of.get(tenant)
        if quota is None:
            quota = self._of[tenant] = Quota(self._own.get(tenant, self._default))
        return quota


def _bucket(rate: float | None, burst_s: float) -> Bucket | None:
    return None if rate is None else Bucket(rate, max(1.0, rate * burst_s))


_ACCOUNT = "isthmus.account"


class TenantMeter:
    """Metrics that name tenants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}tenant_{name}", text, ("tenant", *labels), registry=registry)

        self.requests = counter("requests", "HTTP requests that ask for work, by tenant.")
        self.refused = counter(
            "requests_refused",
            "Those answered with 429, by the limit of the tenant that they exceed; `cluster`: it was full.",
            "limit",
        )
        self.tokens = counter("tokens", "Tokens of prompts that started, and generated, by tenant.", "kind")


class Account:
    """What one request of a tenant takes of its quota. `meter` None: no metrics name tenants. `clock`: seconds."""

    def __init__(
        self, tenant: str, quota: Quota, meter: TenantMeter | None, clock: Callable[[], float]
    ) -> None:
        self._tenant, self._quota, self._meter, self._clock = tenant, quota, meter, clock
        self._limit = "cluster"

    def enter(self) -> None:
        """Raises RateLimitError; else `leave` ends it."""
        if self._meter is not None:
            self._meter.requests.labels(self._tenant).inc()
        self._within(lambda: self._quota.enter(self._clock()))

    def leave(self) -> None:
        self._quota.leave()

    def check_prompt(self, num_tokens: int) -> None:
        """Raises RateLimitError when a prompt of so many tokens has to wait."""
        self._within(lambda: self._quota.check_prompt(num_tokens, self._clock()))

    def spend(self, num_tokens: int, kind: str) -> None:
        """`kind`: `prompt` or `generation`."""
        self._quota.spend(num_tokens, self._clock())
        if self._meter is not None:
            self._meter.tokens.labels(self._tenant, kind).inc(num_tokens)

    def watching(self, send: Send) -> Send:
        """Counts an answer that refuses."""
        meter = self._meter
        if meter is None:
            return send

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 429:
                meter.refused.labels(self._tenant, self._limit).inc()
            await send(message)

        return watch

    def _within(self, check: Callable[[], None]) -> None:
        try:
            check()
        except RateLimitError as error:
            self._limit = error.limit
            raise


class TenantGate:
    """ASGI middleware behind `ApiKeys`: requests beyond their tenant's limits are answered by `refuse`, their bodies
    unread. What only reads (GET) is not counted."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        quotas: Quotas,
        meter: TenantMeter | None,
        refuse: Callable[[Exception], ASGIApp],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._quotas, self._meter, self._refuse, self._clock = app, quotas, meter, refuse, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = tenant_of(scope)
        if tenant is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        account = scope[_ACCOUNT] = Account(tenant, self._quotas.of(tenant), self._meter, self._clock)
        send = account.watching(send)
        try:
            account.enter()
        except RateLimitError as error:
            await self._refuse(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            account.leave()


def account_of(scope: Scope) -> Account | None:
    """Of the request; None where tenants have no limits and no metrics name them."""
    found: Account | None = scope.get(_ACCOUNT)
    return found
