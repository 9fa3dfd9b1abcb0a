"""Tenants at the gateway: what each may ask for, before its body is read and when its prompt is counted; and, where
metrics may name tenants, what each asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.live.gateway.auth import tenant_of
from isthmus.live.gateway.node_metrics import PREFIX
from isthmus.live.gateway.problems import RateLimitError
from isthmus.live.gateway.quotas import Quota, Quotas

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
