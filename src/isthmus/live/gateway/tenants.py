"""Limits of tenants, checked before a body is read and when its prompt is counted, with their metrics; and the
traffic of HTTP connections. Neither reads a clock: `now_s` or `clock` is given, monotonic, in seconds."""

from __future__ import annotations

import collections
import enum
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.core.errors import UnavailableError
from isthmus.live.gateway.headers import tenant_of
from isthmus.live.gateway.http import RateLimitError
from isthmus.live.gateway.node_metrics import PREFIX
from isthmus.live.gateway.settings import GatewaySettings, HttpLimits, TenantLimits

if TYPE_CHECKING:
    from isthmus.live.gateway.connections import Connection


class Bucket:
    """A token bucket: fills by `rate` a second up to `size`, and is full at first. It may be overdrawn; the debt then
    fills first."""

    __slots__ = ("_at_s", "_level", "_rate", "_size")

    def __init__(self, rate: float, size: float) -> None:
        self._rate, self._size, self._level, self._at_s = rate, size, size, -math.inf

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` may be taken, or, of more than `size`, until the bucket is full; 0: now. Does not
        mutate."""
        missing = min(amount, self._size) - self._level_at(now_s)
        return missing / self._rate if missing > 0 else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Takes `amount`, whether it is there or not."""
        self._level = self._level_at(now_s) - amount
        self._at_s = now_s

    def _level_at(self, now_s: float) -> float:
        gained = self._rate * (now_s - self._at_s)
        return min(self._size, self._level + gained)


class Quota:
    """One tenant's use of its `limits`."""

    def __init__(self, limits: TenantLimits) -> None:
        self._limits, self.num_running = limits, 0
        self._requests = _bucket(limits.requests_per_s, limits.burst_s)
        self._tokens = _bucket(limits.tokens_per_s, limits.burst_s)

    def enter(self, now_s: float) -> None:
        """Begins a request, which `leave` ends. Raises RateLimitError instead of beginning it."""
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
        """Raises RateLimitError when a prompt of `num_tokens` has to wait. Does not mutate."""
        wait_s = self._tokens.wait_s(num_tokens, now_s) if self._tokens is not None else 0.0
        if wait_s:
            allowed = f"{self._limits.tokens_per_s:g} tokens per second, of prompts and answers"
            raise RateLimitError("tokens_per_s", allowed, wait_s)

    def spend(self, num_tokens: int, now_s: float) -> None:
        """Charges tokens of a prompt or an answer."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)


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
    """One request's use of its tenant's quota. `meter` None: no metric names tenants."""

    def __init__(self, tenant: str, quota: Quota, meter: TenantMeter | None) -> None:
        self._tenant, self._quota, self._meter = tenant, quota, meter
        self._limit = "cluster"

    def enter(self) -> None:
        """Begins the request, which `leave` ends. Raises RateLimitError."""
        if self._meter is not None:
            self._meter.requests.labels(self._tenant).inc()
        self._within(lambda: self._quota.enter(time.monotonic()))

    def leave(self) -> None:
        self._quota.leave()

    def check_prompt(self, num_tokens: int) -> None:
        """Raises RateLimitError when a prompt of `num_tokens` has to wait."""
        self._within(lambda: self._quota.check_prompt(num_tokens, time.monotonic()))

    def spend(self, num_tokens: int, kind: str) -> None:
        """Charges tokens. `kind`: `prompt` or `generation`."""
        self._quota.spend(num_tokens, time.monotonic())
        if self._meter is not None:
            self._meter.tokens.labels(self._tenant, kind).inc(num_tokens)

    def watching(self, send: Send) -> Send:
        """A `send` that also counts an answer with status 429."""
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
    """ASGI middleware behind `ApiKeys`: POST requests beyond their tenant's limits are answered by `refuse`, their
    bodies unread."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: GatewaySettings,
        meter: TenantMeter | None,
        refuse: Callable[[Exception], ASGIApp],
    ) -> None:
        self._app, self._settings, self._meter, self._refuse = app, settings, meter, refuse
        self._quotas: dict[str, Quota] = {}  # as many as there are tenants with keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = tenant_of(scope)
        if tenant is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if tenant not in self._quotas:
            limits = self._settings.tenant_limits.get(tenant, self._settings.tenant_default)
            self._quotas[tenant] = Quota(limits)
        account = scope[_ACCOUNT] = Account(tenant, self._quotas[tenant], self._meter)
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
    """The account of a request; None where tenants have neither limits nor metrics."""
    found: Account | None = scope.get(_ACCOUNT)
    return found


KEEP_ALIVE_S = 60.0
LINGER_S = 2.0
"""After a client's last answer its further bytes are read and dropped for so long: a socket closed with unread bytes
resets the connection, and the answer may be lost."""
STALL_S, STALL_BYTES = 30.0, 64 * 1024
"""A client that takes fewer bytes of its answer in this time is disconnected."""
SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are never ended for want of room: one connection buffers as much."""


class Phase(enum.IntEnum):
    """The state of a connection."""

    IDLE = 0  # between requests
    HEADERS = 1  # a request has begun, or the first is awaited
    BODY = 2
    ANSWER = 3
    LINGER = 4  # the last answer is sent, or nothing more is read


SERVED_NOTHING = (Phase.LINGER, Phase.IDLE, Phase.HEADERS, Phase.BODY)
"""Phases whose connections are dropped to make room, in this order; within one, the connection that entered it first.
"""


class Traffic:
    """All connections of one server. A connection is in one `Phase` at a time, and each phase keeps its connections
    in the order they entered it, so the first is the first to be late. `refused`: count by the limit that refused;
    `body_bytes`: of request bodies that are not complete."""

    def __init__(self, limits: HttpLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self.refused: collections.Counter[str] = collections.Counter()
        self.body_bytes = 0
        self.stopping = False
        self._since: list[dict[Connection, float]] = [{} for _ in Phase]
        """For each phase, the time at which each connection entered it, earliest first."""
        self._stalled: dict[Connection, tuple[float, int]] = {}
        """Connections whose client takes nothing for now: the time, and the unsent bytes then."""
        self._deadlines_s = {
            Phase.IDLE: KEEP_ALIVE_S,
            Phase.HEADERS: limits.header_s,
            Phase.BODY: limits.body_s,
            Phase.LINGER: LINGER_S,
        }

    @property
    def num_connections(self) -> int:
        return sum(map(len, self._since))

    def connections(self) -> list[Connection]:
        return [connection for phase in self._since for connection in phase]

    def enter(self, connection: Connection, phase: Phase) -> None:
        """A connection enters a phase."""
        self._since[connection.phase].pop(connection, None)
        connection.phase = phase
        self._since[phase][connection] = self.clock()

    def leave(self, connection: Connection) -> None:
        """A connection is closed. Idempotent."""
        self._since[connection.phase].pop(connection, None)
        self._stalled.pop(connection, None)

    def stall(self, connection: Connection) -> None:
        """The write buffer of a connection is full."""
        self._stalled[connection] = (self.clock(), connection.unsent_bytes)

    def unstall(self, connection: Connection) -> None:
        """The write buffer has room again. Idempotent."""
        self._stalled.pop(connection, None)

    def sweep(self) -> None:
        """Ends every connection whose phase has exceeded its deadline; bytes that trickle in extend nothing."""
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
        """Whether one more connection may be taken; if need be, drops the one that has served nothing for longest."""
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
        """Counts body bytes; beyond the limit, refuses the large body that has been under way longest."""
        self.body_bytes += num_bytes
        while self.body_bytes > self.limits.bodies:
            large = (each for each in self._since[Phase.BODY] if each.body_bytes > SMALL_BODY_BYTES)
            victim = next(large, None)
            if victim is None:
                return
            error = UnavailableError("too many large request bodies are under way (limits.bodies)")
            victim.refuse("bodies", error)
