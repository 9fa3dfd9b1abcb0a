"""Tenants: what each may ask for, before its body is read and when its prompt is counted; and, where metrics may name
tenants, what each asked for. Quotas are pure: `now_s`, of one clock that never goes back, is given."""

from __future__ import annotations

import collections
import enum
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.live.gateway.headers import tenant_of
from isthmus.live.gateway.http import RateLimitError
from isthmus.live.gateway.node_metrics import PREFIX
from isthmus.live.gateway.settings import HttpLimits, TenantLimits


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


# All connections of one HTTP server: how many, in which phase and since when, and what was turned away of them.
#
# A connection is in one `Phase` at a time, and all of one phase stand in the order in which they came to it: what has
# been there longest is the first to be too late, and the first to go where room is needed.


KEEP_ALIVE_S = 60.0
LINGER_S = 2.0
"""How long the rest of what a client sends is read and dropped after its last answer: a socket that is closed with
unread bytes resets the connection, and the answer may be lost."""
STALL_S, STALL_BYTES = 30.0, 64 * 1024
"""A client that takes less than so much of its answer in such a time keeps its place from others."""
SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size always fit: it is what one connection buffers."""


class Phase(enum.IntEnum):
    """What a connection does now."""

    IDLE = 0  # between requests
    HEADERS = 1  # its next request has begun, or its first is awaited
    BODY = 2
    ANSWER = 3
    LINGER = 4  # its last answer is sent, or nothing more is read of it


SERVED_NOTHING = (Phase.LINGER, Phase.IDLE, Phase.HEADERS, Phase.BODY)
"""Who goes first where room is needed, those of one phase in the order in which they came to it."""


class OpenConnection(Protocol):
    """A connection, as `Traffic` knows it. `body_bytes`: of its request bodies that are not whole yet."""

    phase: Phase
    body_bytes: int

    @property
    def unsent_bytes(self) -> int:
        """Of answers, which the client has not taken."""
        ...

    def refuse(self, reason: str, error: IsthmusError) -> None:
        """Reads no more of this client and answers `error`; an answer under way goes on, and is the last."""
        ...

    def too_late(self) -> None:
        """It has been in its phase for longer than that may last."""
        ...

    def drop(self) -> None:
        """Gives its place to another client."""
        ...

    def shutdown(self) -> None:
        """Ends it after the answer under way, if there is any; takes no further request."""
        ...

    def end(self) -> None:
        """The same, and forgets requests that wait for the answer before theirs."""
        ...

    def abort(self) -> None:
        """Closes it as it is."""
        ...


class Traffic:
    """All connections of one server. `refused`: what was turned away so far, by the limit that did it; `body_bytes`: of
    request bodies that are not whole yet; `clock`: in seconds."""

    def __init__(self, limits: HttpLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self.refused: collections.Counter[str] = collections.Counter()
        self.body_bytes = 0
        self.stopping = False
        self._since: list[dict[OpenConnection, float]] = [{} for _ in Phase]
        """For each phase, by the time at which a connection came to it, the earliest first."""
        self._stalled: dict[OpenConnection, tuple[float, int]] = {}
        """Those that take no more for now, each with a time and what was unsent then."""
        self._deadlines_s = {
            Phase.IDLE: KEEP_ALIVE_S,
            Phase.HEADERS: limits.header_s,
            Phase.BODY: limits.body_s,
            Phase.LINGER: LINGER_S,
        }

    @property
    def num_connections(self) -> int:
        return sum(map(len, self._since))

    def connections(self) -> list[OpenConnection]:
        return [connection for phase in self._since for connection in phase]

    def enter(self, connection: OpenConnection, phase: Phase) -> None:
        """A connection comes to a phase, its first or another."""
        self._since[connection.phase].pop(connection, None)
        connection.phase = phase
        self._since[phase][connection] = self.clock()

    def leave(self, connection: OpenConnection) -> None:
        """A connection is closed. Idempotent."""
        self._since[connection.phase].pop(connection, None)
        self._stalled.pop(connection, None)

    def stall(self, connection: OpenConnection) -> None:
        """More is unsent than is to be written at once."""
        self._stalled[connection] = (self.clock(), connection.unsent_bytes)

    def flow(self, connection: OpenConnection) -> None:
        """More may be written again. Idempotent."""
        self._stalled.pop(connection, None)

    def sweep(self) -> None:
        """Ends what has been in its phase for too long; a byte now and then extends nothing."""
        now_s = self.clock()
        for phase, limit_s in self._deadlines_s.items():
            late = []
            for connection, since_s in self._since[phase].items():
                if now_s - since_s < limit_s:
                    break
                late.append(connection)
            for connection in late:
                connection.too_late()
        for connection, (since_s, unsent_bytes) in list(self._stalled.items()):
            if now_s - since_s < STALL_S:
                continue
            if connection.unsent_bytes > unsent_bytes - STALL_BYTES:
                self.refused["unread"] += 1
                connection.abort()
            else:
                self.stall(connection)

    def make_room(self) -> bool:
        """Whether one more connection may be taken; closes the one that has served nothing for longest, if need be."""
        while self.num_connections >= self.limits.connections:
            self.refused["connections"] += 1
            idle = (each for phase in SERVED_NOTHING for each in self._since[phase])
            victim = next(idle, None)
            if victim is None:
                return False
            victim.drop()
            if victim.phase is Phase.BODY:
                return True  # its refusal is on the way
        return True

    def take_body(self, num_bytes: int) -> None:
        """So much more of bodies has come; ends the large one that has been under way longest, if it is too much."""
        self.body_bytes += num_bytes
        while self.body_bytes > self.limits.bodies:
            large = (each for each in self._since[Phase.BODY] if each.body_bytes > SMALL_BODY_BYTES)
            victim = next(large, None)
            if victim is None:
                return
            victim.refuse(
                "bodies", UnavailableError("too many large request bodies are under way (limits.bodies)")
            )
