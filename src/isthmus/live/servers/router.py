"""Plain servers behind one conductor: each is a node that is spoken to by HTTP alone, and computes whole requests, or
prompts whose KV another server takes (`split`).

Carries out the conductor's routes: sends requests on, tells it of first bytes, ends and failures, and what a server's
cache is believed to hold (`core.node.plain_server`). A request that has sent nothing goes elsewhere when its server
fails; one amid its answer is continued elsewhere where that is exact (`continuing.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

from isthmus.config import server_entry
from isthmus.core import conductor
from isthmus.core.attempts import RequestFailed
from isthmus.core.errors import IsthmusError, RequestError, StartError, TimedOutError, UnavailableError
from isthmus.core.types import DECODE, MIXED, NS_PER_S, PassedRequest, RequestId, Role, sharing
from isthmus.live.cluster.recorder import Recorder
from isthmus.live.cluster.streams import refusal
from isthmus.live.servers import split
from isthmus.live.servers.continuing import BrokenOffError, DiffersError, answer_to
from isthmus.live.servers.fleet import Fleet, Pool, Samples, Server
from isthmus.live.servers.gaps import Gaps
from isthmus.live.servers.members import Members
from isthmus.live.servers.plain import ASK_S, Response, said, unheard
from isthmus.live.servers.probing import Probing
from isthmus.live.servers.state_file import StateFile

log = logging.getLogger(__name__)

UNSAID_TOKENS = 256
"""Tokens of an answer whose request has no limit."""
RETRIED = frozenset((429, 500, 502, 503, 504))
"""Statuses of which another server may know better. The last one's answer is passed back."""
TOO_LONG = frozenset((400, 413, 422))
_TOO_LONG = re.compile(rb"context.{0,8}(length|size|window)|too (long|large)|longer than", re.IGNORECASE)
"""How servers word it that a prompt, or prompt and answer, are longer than they take."""
TAIL_BYTES = 4096
"""The end of an answer, where its usage stands."""
_USAGE = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|input_tokens|output_tokens|eval_count|tokens_predicted)"\s*:\s*(\d+)'
)
_GENERATED = ("completion_tokens", "output_tokens", "eval_count", "tokens_predicted")
"""OpenAI's words for the length of an answer, in both of its APIs, Ollama's and llama.cpp's."""


def _usage(text: bytes) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in _USAGE.findall(text)}


class _Open:
    """A request that has not ended. `route`: of the attempt to make or under way; `sending`: until its first bytes;
    `believed`: leading blocks that its server was believed to have.

    With prefill servers, `fields`: of its body, None if it has none to read; `leg`: what its decode server gets, and
    whether that has KV to take (`is_handed_over`); `beside`: the prefill leg while both are under way; `kept`: the
    dictionary of KV that a prefill server keeps for it and no decode server has heard of yet.
    """

    def __init__(self, passed: PassedRequest, pool: Pool) -> None:
        self.passed, self.pool = passed, pool
        self.named = pool.naming.named(passed)
        self.answer = answer_to(passed)
        self.route: conductor.Route | None = None
        self.error: IsthmusError | None = None
        self.sending: asyncio.Task[Response] | None = None
        self.response: Response | None = None
        self.believed = 0
        self.fields: split.Fields | None = None
        self.leg, self.is_handed_over = passed, False
        self.beside: asyncio.Task[None] | None = None
        self.kept = b""
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
        if self.beside is not None:
            self.beside.cancel()


class Attempt(msgspec.Struct, frozen=True):
    """An attempt at a request whose answer has begun."""

    server: Server
    route: conductor.Route
    response: Response


class Router:
    """Plain servers, for the gateway (`isthmus.live.gateway.passing.PassingBackend`), in one event loop.

    `rules`: of the conductor; `entries`: URLs, and names of several servers (`members.py`); `rejoin_s`: how long
    requests wait for a server that comes back; `key`: an API key that the servers ask for; `new_recorder`: makes the
    recorder of the pool of a number, None where nothing is recorded; `alias_of`: the name of a tenant for the
    conductor; `timeout_s`: the longest time to the first bytes of an answer, and between its bytes, None without one;
    `samples`, `state`: as of the `Fleet`; `roles`: PREFILL of entries that only compute prompts, DECODE of those that
    take their KV, with `rules` that are `split.divided`.
    """

    def __init__(
        self,
        rules: conductor.Rules,
        entries: Sequence[str],
        *,
        rejoin_s: float,
        roles: Mapping[str, Role] = MappingProxyType({}),
        key: str | None = None,
        new_recorder: Callable[[int], Recorder] | None = None,
        alias_of: Callable[[str], str] = str,
        timeout_s: float | None = None,
        samples: Samples | None = None,
        state: StateFile | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._alias_of, self._timeout_s, self._clock_ns = alias_of, timeout_s, clock_ns
        self._fleet = Fleet(
            rules, rejoin_s=rejoin_s, key=key, new_recorder=new_recorder, decide=self._decide, timeout_s=timeout_s,
            samples=samples, state=state, role_of=self._role_of,
        )  # fmt: skip
        self._roles = roles
        self._beside: set[asyncio.Task[None]] = set()  # prefill legs and releases
        self._members = Members(entries, self._fleet.want)
        self._open: dict[RequestId, _Open] = {}
        self._is_closing = False

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Asks all servers what they are, then serves inside the context. Raises StartError if none answers."""
        async with self._fleet.run(), self._members.run():
            servers = self._fleet.servers
            await self._fleet.settled()
            if not any(server.pool is not None for server in servers.values()):
                reasons = [f"{entry}: {reason}" for entry, reason in self._members.reasons.items()]
                reasons += [server.reason for server in servers.values()]
                raise StartError("no server answers: " + "; ".join(reasons))
            probing = Probing(
                lambda: self._fleet.pools, lambda node: servers[node.node], self._decide, self._clock_ns
            )
            watching = asyncio.get_running_loop().create_task(probing.watch())
            try:
                yield
            finally:
                self._is_closing = True
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                for each in list(self._open.values()):
                    each.end_attempt()
                for task in self._beside:
                    task.cancel()
                await asyncio.gather(*self._beside, return_exceptions=True)

    @property
    def healthy(self) -> bool:
        return self._fleet.healthy

    def models(self) -> list[dict[str, Any]]:
        return self._fleet.models()

    def gauges(self) -> dict[str, dict[str, float]]:
        return self._fleet.gauges()

    def status(self) -> list[Any]:
        return self._fleet.status()

    def lines(self) -> list[str]:
        """Returns a line for each server: what it says of itself."""
        return self._fleet.lines()

    @property
    def entries(self) -> list[str]:
        """URLs, and names of several servers, in the order in which they came."""
        return self._members.entries

    def change(self, *, add: Sequence[str], remove: Sequence[str]) -> None:
        """Adds entries and removes others; servers that no entry stands for any more drain. Raises RequestError, and
        changes nothing, if one to remove is not there."""
        self._members.change(add=add, remove=remove)

    async def change_servers(self, add: Sequence[str], remove: Sequence[str]) -> list[str]:
        """Does as `change`, for an operator. Returns a line for each server that this concerns, as soon as new ones
        have been asked what they are. Raises RequestError, also for what is no entry."""
        try:
            add, remove = [[*map(server_entry, entries)] for entries in (add, remove)]
        except ValueError as error:
            raise RequestError(str(error)) from None
        members, concerned = self._members, [url for entry in remove for url in self._members.urls(entry)]
        self.change(add=add, remove=remove)
        await members.looked_up(add)
        concerned += [url for entry in add for url in members.urls(entry)]
        await self._fleet.settled()
        failed = [f"{entry}: {members.reasons[entry]}" for entry in add if entry in members.reasons]
        return failed + [self._fleet.line(url) for url in concerned]

    async def forward(self, passed: PassedRequest) -> PassedBack:
        """Passes a request on; one that is too long for its servers, to servers that take longer ones. Raises
        TimedOutError, and what the conductors decide."""
        passed = msgspec.structs.replace(passed, tenant=self._alias_of(passed.tenant))
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._to_pools(passed)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimedOutError(f"no answer began within {self._timeout_s:g} s (--timeout-s)") from None

    async def _to_pools(self, passed: PassedRequest) -> PassedBack:
        """Passes a request on to a pool, and as long as that finds it too long, to one that takes longer ones."""
        pool, *others = self._fleet.pools_of(passed)
        while True:
            answer = await self._forward(passed, pool)
            longer = [other for other in others if other.longest > pool.longest > 0]
            if not longer or not answer.is_too_long:
                return answer
            answer.close()
            pool = longer[0]

    async def _forward(self, passed: PassedRequest, pool: Pool) -> PassedBack:
        """Passes a request on, to as many servers of a pool one after another as the conductor's rules allow."""
        request = _Open(passed, pool)
        if self._roles:
            request.fields = split.read(passed)
        tenant = sharing(passed.tenant, passed.weight)
        self._open[passed.request] = request
        self._take_answer(request)
        self._decide(
            pool,
            conductor.RequestArrived(
                passed.request, tenant.name, request.named.num_tokens, self._num_expected(request),
                request.named.names,
                passed.priority, passed.ttft_ms, passed.tbt_ms, weight=passed.weight,
                whole=self._is_whole(request),
            ),
        )  # fmt: skip
        return PassedBack(self, request, await self._answered(request))

    async def go_on(self, request: _Open, broke: Attempt, error: BaseException) -> Attempt | None:
        """Continues elsewhere an answer that broke off amid an attempt. Returns None if it cannot be continued. Raises
        TimeoutError if nobody does so in the time allowed."""
        server = broke.server
        broke.response.abort()
        is_late = isinstance(error, TimeoutError)  # the client has waited as long as it may
        if self._is_closing or is_late or request.answer is None or not request.answer.can_go_on:
            self.broken(request, server, error)
            return None
        if request.route is broke.route and request.error is None:
            self._failed(request, server, broke.route, f"{server.node} broke off: {said(error)}")
        self._fleet.suspect(server, error)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._answered(request, broke.route.attempt)
        except IsthmusError as failed:
            log.warning("an answer of %s is not continued: %s", server.node, said(failed))
            return None
        if found.response.status == 200 and found.response.takes_events:
            server.counts["continued"] += 1
            return found
        log.warning("an answer of %s is not continued: HTTP %s", server.node, found.response.status)
        found.response.abort()
        self.broken(request, found.server, None)
        return None

    async def _answered(self, request: _Open, attempt: int = 0) -> Attempt:
        """Returns the first attempt after that number whose answer has begun; of those that another server may know
        better, the last one."""
        pool, passed, goes_on = request.pool, request.passed, attempt > 0
        last: Attempt | None = None
        try:
            while True:
                self._release(request)
                try:
                    route = await request.next_route(attempt)
                except UnavailableError:
                    if last is None:
                        raise
                    return last
                attempt = route.attempt
                if pool.desk.under_way(passed.request, attempt) is None:
                    continue  # its server has left since
                server = self._fleet.servers[route.decode]
                asked = passed if request.answer is None else request.answer.request_to(server.kind)
                if asked is None:
                    reason = f"{server.node} is of another kind"
                    self._decide(pool, RequestFailed(passed.request, attempt, reason))  # no failure of its own
                    continue
                request.leg, request.is_handed_over = asked, False
                has_legs = route.prefill != route.decode and not goes_on
                if has_legs and not await self._prefill(request, route):
                    continue
                request.is_handed_over = request.leg is not asked
                sent_ns = self._clock_ns()
                response = await self._send(request, server, route, request.leg, once=request.is_handed_over)
                if response is None:
                    continue
                if request.is_handed_over and passed.is_streamed and response.status == 200:
                    self._learn(pool, self._clock_ns() - sent_ns)
                if request.route is not route or request.error is not None:
                    response.abort()  # withdrawn as its first bytes came
                    server.running.discard(passed.request)
                    continue
                if response.status in RETRIED:
                    if last is not None:
                        last.response.abort()
                    last = Attempt(server, route, response)
                    self._failed(request, server, route, f"{server.node} answered HTTP {response.status}")
                    continue
                self._begun(request, server, route, is_computed=response.status == 200)
                if request.error is not None:
                    response.abort()
                    raise request.error
                if last is not None:
                    last.response.abort()
                return Attempt(server, route, response)
        except BaseException:
            self._decide(pool, conductor.RequestCancelled(passed.request))
            self._release(request)
            if last is not None:
                last.response.abort()
            raise

    async def _send(
        self, request: _Open, server: Server, route: conductor.Route, passed: PassedRequest, *, once: bool
    ) -> Response | None:
        """Returns the answer with its first bytes; None if there is none and the conductor has been told. `once`: as of
        `PlainClient.send`."""
        server.running.add(passed.request)
        server.counts["requests"] += 1
        cache = server.cache
        request.believed = 0 if cache is None else cache.match(request.named)
        request.sending = asyncio.ensure_future(server.client.send(passed, once=once))
        has_legs = route.prefill != route.decode
        presumed = None if passed.is_streamed or has_legs else self._presume(request, server, route)
        try:
            response = await request.sending
        except asyncio.CancelledError:
            request.kept = b""  # the server may have heard of it: then it says itself that it is not wanted
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
            if not unheard(error):
                request.kept = b""
            self._failed(request, server, route, f"{server.node}: {said(error)}")
            self._fleet.suspect(server, error)
            return None
        finally:
            request.sending = None
            if presumed is not None:
                presumed.cancel()
        server.hear()
        request.response, request.kept = response, b""
        return response

    # Prefill and decode apart.

    def _role_of(self, url: str) -> Role:
        """The role of a server by the entry that stands for it."""
        entries = (entry for entry in self._roles if url == entry or url in self._members.urls(entry))
        return next((self._roles[entry] for entry in entries), MIXED)

    def _is_whole(self, request: _Open) -> bool:
        """Whether one server has to compute a request, of those that can."""
        if not self._roles or (request.fields is not None and request.fields.divides):
            return False
        return request.pool.has(MIXED)

    def _num_expected(self, request: _Open) -> int:
        """Tokens of the answer. One token is left to a prefill server alone, but not to SGLang's, which answers
        nobody."""
        num_tokens = request.passed.max_tokens or UNSAID_TOKENS
        return max(2, num_tokens) if self._roles and request.pool.has(DECODE) else num_tokens

    async def _prefill(self, request: _Open, route: conductor.Route) -> bool:
        """Has a prompt computed by the prefill server of a route, and makes the request for the decode server. Returns
        whether the attempt goes on; if not, the conductor has been told."""
        server, passed, fields = self._fleet.servers[route.prefill], request.passed, request.fields
        transfer = server.transfer
        assert transfer is not None
        rooms = isinstance(transfer, split.Sglang)
        if fields is None or not (fields.generates if rooms else fields.divides):
            return True  # the decode server does all, or judges
        if isinstance(transfer, split.Sglang):
            request.leg = transfer.in_room(request.leg)
            request.beside = self._start(self._compute_beside(request, server, route))
            return True
        asked = transfer.asked()
        leg = split.prefill_leg(passed, fields, asked)
        response = await self._send(request, server, route, leg, once=True)
        if response is None:
            return False
        try:
            answer = await split.read_answer(response)
            if response.status in RETRIED:
                raise ValueError(f"answered HTTP {response.status}")
            computed = split.computed(answer, asked) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._failed(request, server, route, f"{server.node}: {said(error)}")
            self._fleet.suspect(server, error)
            return False
        finally:
            response.abort()
            server.running.discard(passed.request)
        request.response, request.kept = None, b"" if computed is None else computed.params
        if request.route is not route or request.error is not None:
            return False
        self._begun(request, server, route, is_computed=computed is not None)
        if request.error is not None:
            raise request.error
        if computed is not None:  # else the request is wrong, and the decode server says so
            self._count(request, server, _usage(computed.usage))
            request.leg = split.decode_leg(request.leg, computed.params)
        if not passed.is_streamed:
            self._handed_over(request, route)
        return True

    async def _compute_beside(self, request: _Open, server: Server, route: conductor.Route) -> None:
        """The prefill leg while the decode server waits for its KV."""
        name = request.passed.request
        server.running.add(name)
        server.counts["requests"] += 1
        response = None
        try:
            response = await server.client.send(request.leg, once=True)
            server.hear()
            if response.status in RETRIED:
                raise ValueError(f"answered HTTP {response.status}")
            if response.status == 200:
                self._begun(request, server, route, is_computed=True)
            await split.read_answer(response)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._failed(request, server, route, f"{server.node}: {said(error)}")
            self._fleet.suspect(server, error)
        finally:
            server.running.discard(name)
            if response is not None:
                response.abort()

    def _handed_over(self, request: _Open, route: conductor.Route) -> None:
        self._decide(request.pool, conductor.PrefillFinished(request.passed.request, route.attempt))

    def _learn(self, pool: Pool, handover_ns: int) -> None:
        measured = pool.handover.add(handover_ns, self._clock_ns())
        if measured is not None:
            self._decide(pool, measured)

    def _release(self, request: _Open) -> None:
        """Has KV freed that a prefill server keeps for a request that will not be decoded with it. No decode server has
        heard of it; one that had would have its own way, and may be reading."""
        params, request.kept = request.kept, b""
        if params:
            servers = [each for each in self._fleet.servers.values() if each.role is DECODE]
            here = [each for each in servers if each.pool is request.pool]
            if here:  # else the prefill server keeps it until its lease ends
                self._start(_release_by(here[0], params))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    # Decisions.

    def _decide(self, pool: Pool, event: conductor.Event) -> None:
        for answer in pool.desk.on(event, self._clock_ns()):
            self._act(pool, answer)

    def _act(self, pool: Pool, answer: conductor.Answer) -> None:
        match answer:
            case conductor.Route():
                request = self._open[answer.request]
                request.route = answer
                request.change()
            case conductor.Abort():
                request = self._open[answer.request]
                for node in answer.nodes:
                    self._fleet.servers[node].running.discard(answer.request)
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
            case conductor.Dismiss():
                self._fleet.dismiss(answer.node)
            case conductor.RequestEnded() | conductor.RequestCancelled():
                self._open.pop(answer.request)

    def _end(self, name: RequestId, error: IsthmusError) -> None:
        request = self._open.pop(name)
        request.error = error
        request.end_attempt()
        request.change()

    def _failed(self, request: _Open, server: Server, route: conductor.Route, reason: str) -> None:
        server.counts["failures"] += 1
        server.running.discard(request.passed.request)
        request.response = None
        self._decide(request.pool, RequestFailed(request.passed.request, route.attempt, reason))

    def _presume(self, request: _Open, server: Server, route: conductor.Route) -> asyncio.TimerHandle:
        """Presumes a prompt computed when that is expected: an answer that is not streamed says nothing until its end,
        and would count as a prompt that takes as long."""
        node = request.pool.desk.conductor.view.nodes.get(server.node)
        delay_ns = 0 if node is None else node.free_ns - self._clock_ns()
        begun = conductor.FirstToken(request.passed.request, route.attempt, presumed=True)
        return asyncio.get_running_loop().call_later(
            max(0, delay_ns) / NS_PER_S, self._decide, request.pool, begun
        )

    def _begun(self, request: _Open, server: Server, route: conductor.Route, *, is_computed: bool) -> None:
        """Takes the first bytes of an answer: its prompt is computed, and cached, unless they are an error's."""
        first = conductor.FirstToken(
            request.passed.request, route.attempt, teaches=is_computed and server.node == route.prefill
        )
        self._decide(request.pool, first)
        if is_computed and request.error is None and server.pool is request.pool and server.cache is not None:
            tenant = sharing(request.passed.tenant, request.passed.weight)
            server.cache.computed(request.named, tenant)
        if server.node == route.decode != route.prefill:
            self._handed_over(request, route)

    def _take_answer(self, request: _Open) -> None:
        """Believes a prompt that goes on from an answer to be cached as far as that goes, where it was generated."""
        named = request.named
        stop, behind = request.pool.answers.behind(named.names)
        tenant = sharing(request.passed.tenant, request.passed.weight)
        for node, num_blocks in behind.items():
            server = self._fleet.servers.get(node)
            cache = None if server is None or server.pool is not request.pool else server.cache
            if cache is not None and cache.match(named) == stop:
                longer = msgspec.structs.replace(named, names=named.names[: stop + num_blocks])
                cache.computed(longer, tenant)

    def ended(
        self, request: _Open, server: Server, tail: bytes, num_events: int, gaps: Gaps
    ) -> tuple[int, int]:
        """Takes the end of an answer, whose last bytes are `tail`. Returns the tokens of prompt and answer, as it says
        them, else by their bytes and events."""
        usage = _usage(tail)
        num_prompt = usage.get("prompt_tokens") or usage.get("input_tokens", 0)
        num_generated = next(
            (usage[name] for name in _GENERATED if usage.get(name)),
            num_events - tail.rstrip().endswith(b"data: [DONE]"),
        )
        if not request.is_handed_over:  # else its prompt was computed elsewhere
            self._count(request, server, usage)
        server.hear()
        server.running.discard(request.passed.request)
        block_tokens = request.pool.naming.block_tokens
        behind = (request.named.num_tokens % block_tokens + num_generated) // block_tokens
        request.pool.answers.ended(server.node, request.named.names, behind)
        tbt_ns = gaps.tbt_ns(num_generated) if request.passed.is_streamed else 0
        self._decide(
            request.pool, conductor.RequestEnded(request.passed.request, max(1, num_generated), tbt_ns)
        )
        return num_prompt or request.named.num_tokens, num_generated

    def _count(self, request: _Open, server: Server, usage: dict[str, int]) -> None:
        """Counts a prompt that a server has computed, and corrects what is known of its cache."""
        num_prompt = usage.get("prompt_tokens") or usage.get("input_tokens", 0)
        server.counts["prompt_tokens"] += num_prompt
        if num_prompt and "cached_tokens" in usage:
            server.counts["cache_told_tokens"] += num_prompt
            server.counts["cached_tokens"] += usage["cached_tokens"]
            block_tokens = request.pool.naming.block_tokens
            # Servers compute the last token in any case.
            whole = max(0, num_prompt - 1) // block_tokens
            server.counts["expected_tokens"] += min(request.believed, whole) * block_tokens
            believed = request.believed * block_tokens / request.named.num_tokens
            if server.cache is not None:
                server.cache.corrected(request.named, believed, usage["cached_tokens"] / num_prompt, num_prompt)

    def broken(self, request: _Open, server: Server, error: BaseException | None) -> None:
        """Takes the end of an answer that is not whole: its server failed, or (None) its client left."""
        server.running.discard(request.passed.request)
        self._decide(request.pool, conductor.RequestCancelled(request.passed.request))
        if error is not None:
            server.counts["failures"] += 1
            self._fleet.suspect(server, error)


class PassedBack:
    """An answer whose first bytes are here, with the attempt that it comes from. `num_tokens`: of prompt and answer,
    exact at the end; 0 of an error."""

    def __init__(self, router: Router, request: _Open, attempt: Attempt) -> None:
        self.status, self.headers = attempt.response.status, attempt.response.headers
        self._router, self._request, self._attempt = router, request, attempt
        self.num_tokens = (request.named.num_tokens, 0) if self.status == 200 else (0, 0)
        self._is_over = False
        if self.status != 200 or not attempt.response.takes_events:
            request.answer = None  # nothing of tokens is in it

    @property
    def is_too_long(self) -> bool:
        """Whether the server refuses the request for its length."""
        return self.status in TOO_LONG and _TOO_LONG.search(self._attempt.response.first) is not None

    def close(self) -> None:
        """Gives the request up, if its answer is not whole."""
        if not self._is_over:
            self._is_over = True
            self._attempt.response.abort()
            self._router.broken(self._request, self._attempt.server, None)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the body as it comes. One that breaks off goes on elsewhere if it can; else it ends with an error
        event where it is a stream of events, or as an answer cut short."""
        router, request, answer = self._router, self._request, self._request.answer
        tail, num_events, whole, gaps = b"\n", 0, False, Gaps()
        attempt: Attempt | None = self._attempt
        has_timed_out = False
        try:
            while attempt is not None and not whole:
                self._attempt = attempt
                try:
                    async for chunk in attempt.response.body():
                        attempt.server.hear()
                        gaps.take(attempt.server.heard_s)
                        if answer is not None:
                            chunk = answer.take(chunk)
                        num_events += (tail[-5:] + chunk).count(b"\ndata:")  # in no part of the tail alone
                        tail = (tail + chunk)[-TAIL_BYTES:]
                        if chunk:
                            yield chunk
                        if answer is not None and answer.error is not None:
                            raise answer.error
                    if answer is not None and answer.is_followed and not answer.is_over:
                        raise BrokenOffError("it ended the stream before the answer")
                    whole = True
                except (*BREAKS, BrokenOffError) as broke:
                    has_timed_out = isinstance(broke, TimeoutError)
                    try:
                        attempt = await router.go_on(request, attempt, broke)
                    except TimeoutError:
                        attempt, has_timed_out = None, True
                except DiffersError as differs:
                    log.warning("%s does not continue an answer: %s", attempt.server.node, differs)
                    attempt = None
            if not whole:
                if not self._attempt.response.takes_events:
                    raise UnavailableError(f"{self._attempt.server.node} broke off amid its answer")
                yield TIMEOUT_EVENT if has_timed_out else CUT_EVENT
        finally:
            self._is_over = True
            self._attempt.response.abort()
            if whole:
                ended = router.ended(request, self._attempt.server, tail, num_events, gaps)
                self.num_tokens = ended if self.status == 200 else (0, 0)
            else:
                self.num_tokens = self.num_tokens[0], num_events
                router.broken(request, self._attempt.server, None)


async def _release_by(server: Server, params: bytes) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(ASK_S):
            (await server.client.send(split.release(params), once=True)).abort()


BREAKS = (aiohttp.ClientError, OSError, TimeoutError)
"""How a connection that breaks off is told."""
CUT_EVENT = (
    b'\n\ndata: {"error": {"message": "the server broke off amid its answer; send the request again", '
    b'"type": "server_error", "param": null, "code": "unavailable"}}\n\n'
)
TIMEOUT_EVENT = (
    b'\n\ndata: {"error": {"message": "the server sent nothing for longer than --timeout-s allows", '
    b'"type": "server_error", "param": null, "code": "timeout"}}\n\n'
)
