"""Plain servers behind one conductor: each is a node that computes whole requests and is spoken to by HTTP alone.

Carries out the conductor's routes: sends requests on, tells it of first bytes, ends and failures, and what a server's
cache is believed to hold (`core.node.plain_server`). A request that has sent nothing goes elsewhere when its server
fails; what was sent is never sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import aiohttp
import msgspec

from isthmus.core import conductor
from isthmus.core.attempts import RequestFailed
from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus.core.errors import IsthmusError, RequestError, StartError, UnavailableError
from isthmus.core.node.plain_server import PlainServer
from isthmus.core.types import MIXED, NS_PER_S, BlockName, NodeId, PassedRequest, RequestId, sharing
from isthmus.live.cluster.recorder import Recorder
from isthmus.live.cluster.streams import refusal
from isthmus.live.servers.plain import Description, PlainClient, Response, is_ours, refuses, said

log = logging.getLogger(__name__)

TOKEN_BYTES, BLOCK_TOKENS = 4, 16
"""Prompts are counted in bytes, four a token, since no tokenizer is asked: a block is 64 bytes of a body."""
TEXT = KVLayout("float32", BLOCK_TOKENS, 1, 1, 1, form="bytes")
"""Layout of names of text, which are not of KV: no name of a block of KV equals one."""
UNLIMITED_TOKENS = 1 << 40
"""The server says itself what is too long for it."""
UNSAID_TOKENS = 256
"""Tokens of an answer whose request has no limit."""
MAX_NAMERS = 1024
MAX_NAMED_BYTES = 1 << 18
"""Of a prompt, so that naming takes a few milliseconds at most; what follows counts as uncached."""
PROBE_S, SILENCE_S = 1.0, 2.0
"""How often each server is asked for a sign of life, and how long it may take or be silent."""
RETRIED = frozenset((429, 500, 502, 503, 504))
"""Statuses of which another server may know better. The last one's answer is passed back."""
TAIL_BYTES = 4096
"""The end of an answer, where its usage stands."""
_USAGE = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|input_tokens|output_tokens)"\s*:\s*(\d+)'
)


class _Server:
    """One server: what it says of itself, what it does, and what its cache is believed to hold."""

    def __init__(self, node: NodeId, url: str, key: str | None) -> None:
        self.node, self.client = node, PlainClient(url, key)
        self.description: Description | None = None
        self.belief = PlainServer(node, 0)
        self.pool: _Pool | None = None  # None while it is not used
        self.running: set[RequestId] = set()
        self.heard_s = 0.0
        self.counts: Counter[str] = Counter()

    def gauges(self) -> dict[str, float]:
        return {
            "server_up": float(self.pool is not None),
            "server_requests_running": len(self.running),
            "server_cache_blocks": self.belief.num_blocks,
            "server_cache_capacity_blocks": self.belief.capacity_blocks,
            **{f"server_{name}_total": self.counts[name] for name in _COUNTERS},
        }


_COUNTERS = ("requests", "failures", "leaves", "prompt_tokens", "cached_tokens")


class _Pool:
    """The servers that list the same models, behind a conductor of their own."""

    def __init__(self, models: tuple[str, ...], desk: conductor.Desk) -> None:
        self.models, self.desk = models, desk
        self.namer = lru_cache(MAX_NAMERS)(partial(_namer, models[0] if models else ""))


def _namer(revision: str, salt: str) -> BlockNamer:
    return BlockNamer(revision=revision, layout=TEXT, salt=salt)


class _Open:
    """A request that has not ended. `route`: of the attempt to make or under way; `sending`: until its first bytes;
    `believed`: leading blocks that its server was believed to have."""

    def __init__(self, passed: PassedRequest, pool: _Pool) -> None:
        self.passed, self.pool = passed, pool
        self.num_tokens = max(1, len(passed.prefix) // TOKEN_BYTES)
        words = memoryview(passed.prefix[: min(self.num_tokens * TOKEN_BYTES, MAX_NAMED_BYTES)])
        self.names: tuple[BlockName, ...] = tuple(
            pool.namer(passed.salt).names(words[: len(words) // TOKEN_BYTES * TOKEN_BYTES].cast("I"))
        )
        self.route: conductor.Route | None = None
        self.error: IsthmusError | None = None
        self.sending: asyncio.Task[Response] | None = None
        self.response: Response | None = None
        self.believed = 0
        self._changed = asyncio.Event()

    def change(self) -> None:
        self._changed.set()

    async def next_route(self, after: int) -> conductor.Route:
        """Returns the route of an attempt after that number. Raises the error by which the request ends."""
        while self.error is None and (self.route is None or self.route.attempt <= after):
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None:
            raise self.error
        assert self.route is not None
        return self.route

    def end_attempt(self) -> None:
        """Withdraws the attempt: from the server, where it has sent nothing; what was sent ends with an error."""
        if self.sending is not None:
            self.sending.cancel()
        if self.response is not None:
            self.response.abort()


class Router:
    """Plain servers by URL, for the gateway (`isthmus.live.gateway.passing.PassingBackend`), in one event loop.

    `rules`: of the conductor; `rejoin_s`: how long requests wait for a server that comes back; `key`: an API key that
    the servers ask for; `recorder_of`: makes the recorder of the pool of a number, None where nothing is recorded;
    `alias_of`: the name of a tenant for the conductor.
    """

    def __init__(
        self,
        rules: conductor.Rules,
        urls: Sequence[str],
        *,
        rejoin_s: float,
        key: str | None = None,
        recorder_of: Callable[[int], Recorder] | None = None,
        alias_of: Callable[[str], str] = str,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder_of, self._alias_of = recorder_of, alias_of
        self._recorders: list[Recorder] = []
        self._rules, self._rejoin_ms, self._clock_ns = rules, round(rejoin_s * 1000), clock_ns
        self._servers = {NodeId(url): _Server(NodeId(url), url, key) for url in urls}
        self._pools: dict[tuple[str, ...], _Pool] = {}
        self._open: dict[RequestId, _Open] = {}

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Asks all servers what they are, then serves inside the context. Raises StartError if none answers."""
        try:
            found = await asyncio.gather(*[self._look(server) for server in self._servers.values()])
            if not any(not reason for reason in found):
                raise StartError("no server answers: " + "; ".join(found))
            loop = asyncio.get_running_loop()
            watching = [loop.create_task(self._watch(server)) for server in self._servers.values()]
            try:
                yield
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.gather(*watching, return_exceptions=True)
                for each in list(self._open.values()):
                    each.end_attempt()
        finally:
            await asyncio.gather(*[server.client.close() for server in self._servers.values()])
            for recorder in self._recorders:
                recorder.close()

    # For the gateway.

    @property
    def healthy(self) -> bool:
        return any(server.pool is not None for server in self._servers.values())

    def models(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for server in self._servers.values():
            if server.pool is not None and server.description is not None:
                found |= {
                    str(each["id"]): each for each in server.description.models if each["id"] not in found
                }
        return list(found.values())

    def gauges(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for server in self._servers.values():
            for name, value in server.gauges().items():
                found.setdefault(name, {})[str(server.node)] = value
        return found

    def status(self) -> list[Any]:
        found: list[Any] = []
        for server in self._servers.values():
            told = server.description
            known = (
                {"models": told.names, "kind": told.kind, "kv_tokens": told.kv_tokens}
                if told is not None
                else {}
            )
            counts = {name.removeprefix("server_"): round(value) for name, value in server.gauges().items()}
            found.append({"server": str(server.node), **counts, "up": server.pool is not None, **known})
        return found

    def lines(self) -> list[str]:
        """Returns a line for each server: what it says of itself."""
        found = []
        for server in self._servers.values():
            told = server.description
            if told is None:
                found.append(f"{server.node}: does not answer; it is asked every {PROBE_S:g} s")
                continue
            memory = (
                f"{told.kv_tokens:,} tokens of KV memory" if told.kv_tokens else "does not say its KV memory"
            )
            found.append(
                ": ".join([str(server.node), ", ".join([*told.names, *filter(None, [told.kind]), memory])])
            )
        return found

    async def forward(self, passed: PassedRequest) -> PassedBack:
        """Passes a request on, to as many servers one after another as the conductor's rules allow."""
        pool = self._pool_of(passed.model)
        passed = msgspec.structs.replace(passed, tenant=self._alias_of(passed.tenant))
        request = _Open(passed, pool)
        tenant = sharing(passed.tenant, passed.weight)
        self._open[passed.request] = request
        self._decide(
            pool,
            conductor.RequestArrived(
                passed.request, tenant.name, request.num_tokens, passed.max_tokens or UNSAID_TOKENS, request.names,
                passed.priority, passed.ttft_ms, passed.tbt_ms, weight=passed.weight,
            ),
        )  # fmt: skip
        attempt, last = 0, None
        try:
            while True:
                try:
                    route = await request.next_route(attempt)
                except UnavailableError:
                    if last is None:
                        raise
                    return PassedBack(self, request, self._servers[route.prefill], last)
                attempt, server = route.attempt, self._servers[route.prefill]
                response = await self._send(request, server, route)
                if response is None:
                    continue
                if request.route is not route or request.error is not None:
                    response.abort()  # withdrawn as its first bytes came
                    server.running.discard(passed.request)
                    continue
                if response.status in RETRIED:
                    if last is not None:
                        last.abort()
                    last = response
                    self._failed(request, server, route, f"{server.node} answered HTTP {response.status}")
                    continue
                self._begun(request, server, route, is_computed=response.status == 200)
                if request.error is not None:
                    response.abort()
                    raise request.error
                if last is not None:
                    last.abort()
                return PassedBack(self, request, server, response)
        except BaseException:
            self._decide(pool, conductor.RequestCancelled(passed.request))
            if last is not None:
                last.abort()
            raise

    async def _send(self, request: _Open, server: _Server, route: conductor.Route) -> Response | None:
        """Returns the answer with its first bytes; None if there is none and the conductor has been told."""
        passed = request.passed
        server.running.add(passed.request)
        server.counts["requests"] += 1
        request.believed = server.belief.match(request.names)
        request.sending = asyncio.ensure_future(server.client.send(passed))
        presumed = None if passed.is_streamed else self._presume(request, server, route)
        try:
            response = await request.sending
        except asyncio.CancelledError:
            server.running.discard(passed.request)
            current = asyncio.current_task()
            if (
                not request.sending.cancelled()
                and request.sending.done()
                and request.sending.exception() is None
            ):
                request.sending.result().abort()
            if current is not None and current.cancelling():
                raise
            return None  # withdrawn: another attempt follows, or the end
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._failed(request, server, route, f"{server.node}: {said(error)}")
            self._suspect(server, error)
            return None
        finally:
            request.sending = None
            if presumed is not None:
                presumed.cancel()
        server.heard_s = time.monotonic()
        request.response = response
        return response

    # Decisions.

    def _pool_of(self, model: str) -> _Pool:
        """Returns the pool that serves a model; the only one, whose servers know best, for any name. Raises
        RequestError or UnavailableError."""
        live = [pool for pool in self._pools.values() if pool.desk.conductor.view.nodes] or [
            *self._pools.values()
        ]
        for pools in (live, self._pools.values()):  # a server that left may come back
            for pool in pools:
                if model in pool.models:
                    return pool
        if len(live) == 1:
            return live[0]
        known = ", ".join(sorted({name for pool in live for name in pool.models}))
        if not known:
            raise UnavailableError("no server is there", retry_after_s=1)
        raise RequestError(
            f"the model {model!r} does not exist; there are {known}", param="model", code="model_not_found"
        )

    def _decide(self, pool: _Pool, event: conductor.Event) -> None:
        for answer in pool.desk.on(event, self._clock_ns()):
            self._act(pool, answer)

    def _act(self, pool: _Pool, answer: conductor.Answer) -> None:
        match answer:
            case conductor.Route():
                request = self._open[answer.request]
                request.route = answer
                request.change()
            case conductor.Abort():
                request = self._open[answer.request]
                for node in answer.nodes:
                    self._servers[node].running.discard(answer.request)
                request.end_attempt()
            case conductor.Hold():
                expired = conductor.HoldExpired(answer.request, answer.attempt)
                asyncio.get_running_loop().call_later(answer.wait_ms / 1000, self._decide, pool, expired)
            case conductor.Refuse():
                self._end(answer.request, refusal(answer))
            case conductor.Fail():
                self._end(
                    answer.request,
                    RequestError(answer.reason) if answer.final else UnavailableError(answer.reason),
                )
            case conductor.RequestEnded() | conductor.RequestCancelled():
                self._open.pop(answer.request)

    def _end(self, name: RequestId, error: IsthmusError) -> None:
        request = self._open.pop(name)
        request.error = error
        request.end_attempt()
        request.change()

    def _failed(self, request: _Open, server: _Server, route: conductor.Route, reason: str) -> None:
        server.counts["failures"] += 1
        server.running.discard(request.passed.request)
        request.response = None
        self._decide(request.pool, RequestFailed(request.passed.request, route.attempt, reason))

    def _presume(self, request: _Open, server: _Server, route: conductor.Route) -> asyncio.TimerHandle:
        """Presumes a prompt computed when that is expected: an answer that is not streamed says nothing until its end,
        and would count as a prompt that takes as long."""
        node = request.pool.desk.conductor.view.nodes.get(server.node)
        delay_ns = 0 if node is None else node.free_ns - self._clock_ns()
        begun = partial(self._begun, request, server, route, is_computed=False)
        return asyncio.get_running_loop().call_later(max(0, delay_ns) / NS_PER_S, begun)

    def _begun(self, request: _Open, server: _Server, route: conductor.Route, *, is_computed: bool) -> None:
        """Takes the first bytes of an answer: its prompt is computed, and cached, unless they are an error's."""
        self._decide(request.pool, conductor.FirstToken(request.passed.request, route.attempt))
        if is_computed and request.error is None and server.pool is request.pool:
            tenant = sharing(request.passed.tenant, request.passed.weight)
            for report in server.belief.computed(request.names, tenant):
                self._decide(request.pool, report)

    def ended(self, request: _Open, server: _Server, tail: bytes, num_events: int) -> None:
        """Takes the end of an answer, whose last bytes are `tail`."""
        usage = {name.decode(): int(value) for name, value in _USAGE.findall(tail)}
        num_prompt = usage.get("prompt_tokens") or usage.get("input_tokens", 0)
        num_generated = usage.get("completion_tokens") or usage.get("output_tokens") or num_events
        server.counts["prompt_tokens"] += num_prompt
        server.heard_s = time.monotonic()
        if num_prompt and "cached_tokens" in usage:
            server.counts["cached_tokens"] += usage["cached_tokens"]
            believed = request.believed * BLOCK_TOKENS / request.num_tokens
            server.belief.told(believed, usage["cached_tokens"] / num_prompt)
        server.running.discard(request.passed.request)
        self._decide(request.pool, conductor.RequestEnded(request.passed.request, max(1, num_generated)))

    def broken(self, request: _Open, server: _Server, error: BaseException | None) -> None:
        """Takes the end of an answer that is not whole: its server failed, or (None) its client left."""
        server.running.discard(request.passed.request)
        self._decide(request.pool, conductor.RequestCancelled(request.passed.request))
        if error is not None:
            server.counts["failures"] += 1
            self._suspect(server, error)

    def heard(self, server: _Server) -> None:
        server.heard_s = time.monotonic()

    # Liveness.

    def _suspect(self, server: _Server, error: BaseException) -> None:
        """Leaves a server at once that refuses connections; another failure may be of the request alone."""
        if refuses(error):
            self._leave(server, said(error))

    def _leave(self, server: _Server, reason: str) -> None:
        pool, server.pool = server.pool, None
        if pool is not None:
            log.warning("%s is left: %s", server.node, reason)
            server.counts["leaves"] += 1
            self._decide(pool, conductor.NodeLeft(server.node))

    def _new_pool(self, models: tuple[str, ...]) -> _Pool:
        if self._recorder_of is not None:
            self._recorders.append(self._recorder_of(len(self._pools)))
        log = self._recorders[-1].record if self._recorders else None
        return _Pool(models, conductor.Desk(conductor.Conductor(self._rules), self._rejoin_ms, log))

    async def _look(self, server: _Server) -> str:
        """Asks a server what it is, and takes it in. Returns why not, "" if so."""
        try:
            description = await server.client.describe()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return f"{server.node}: {said(error)}"
        server.description, server.heard_s = description, time.monotonic()
        num_blocks = description.kv_tokens // BLOCK_TOKENS
        server.belief = PlainServer(server.node, num_blocks)
        models = tuple(sorted(description.names))
        if models not in self._pools:
            self._pools[models] = self._new_pool(models)
        server.pool = self._pools[models]
        self._decide(
            server.pool,
            conductor.NodeJoined(
                server.node, MIXED, UNLIMITED_TOKENS, BLOCK_TOKENS, cache_blocks=server.belief.capacity_blocks
            ),
        )
        return ""

    async def _watch(self, server: _Server) -> None:
        """Asks for a sign of life every `PROBE_S`; leaves a server without one, and takes in one that is back."""
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                await self._probe(server)
            except Exception:  # a bug of ours ends no watch
                log.exception("%s: a probe failed", server.node)

    async def _probe(self, server: _Server) -> None:
        if server.pool is None:
            if not await self._look(server):
                log.warning("%s is back", server.node)
            return
        if time.monotonic() - server.heard_s < PROBE_S:
            return
        try:
            await server.client.alive(SILENCE_S)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if is_ours(error):
                return
            if time.monotonic() - server.heard_s > SILENCE_S or refuses(error):
                self._leave(server, f"no sign of life: {said(error)}")
        else:
            server.heard_s = time.monotonic()


class PassedBack:
    """An answer whose first bytes are here."""

    def __init__(self, router: Router, request: _Open, server: _Server, response: Response) -> None:
        self.status, self.headers = response.status, response.headers
        self._router, self._request, self._server, self._response = router, request, server, response
        self._is_over = False

    def close(self) -> None:
        """Gives the request up, if its answer is not whole."""
        if not self._is_over:
            self._is_over = True
            self._response.abort()
            self._router.broken(self._request, self._server, None)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the body as it comes. One that breaks off ends with an error event where it is a stream of events,
        else as an answer cut short."""
        router, request, server = self._router, self._request, self._server
        tail, num_events, whole = b"", 0, False
        error: BaseException | None = None
        try:
            async for chunk in self._response.body():
                router.heard(server)
                tail = (tail + chunk)[-TAIL_BYTES:]
                num_events += chunk.count(b"\ndata:")
                yield chunk
            whole = True
        except (aiohttp.ClientError, OSError, TimeoutError) as broke:
            error = broke
            if not self._response.takes_events:
                raise UnavailableError(f"{server.node} broke off amid its answer") from None
            yield CUT_EVENT
        finally:
            self._is_over = True
            self._response.abort()
            if whole:
                router.ended(request, server, tail, num_events)
            else:
                router.broken(request, server, error)


CUT_EVENT = (
    b'\n\ndata: {"error": {"message": "the server broke off amid its answer; send the request again", '
    b'"type": "server_error", "param": null, "code": "unavailable"}}\n\n'
)
