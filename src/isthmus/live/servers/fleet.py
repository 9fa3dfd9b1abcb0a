"""The plain servers behind a router: what each says of itself, whether it lives, and the conductor that it belongs to.

Servers that list the same models, and take requests of the same length, form a pool with a conductor of its own. A
server is asked for a sign of life every `PROBE_S`; one without is left, and taken in again when it answers. A server
that is no longer wanted (`Fleet.want`) drains: it gets no new requests, and is removed when those that it has have
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial
from typing import Any

import aiohttp

from isthmus.core import conductor
from isthmus.core.errors import UnavailableError, UnknownModelError
from isthmus.core.node.plain_server import Answers, Reports
from isthmus.core.types import MIXED, NodeId, PassedRequest, RequestId, Role
from isthmus.live.cluster.recorder import Recorder
from isthmus.live.servers import split
from isthmus.live.servers.cached import Cached
from isthmus.live.servers.naming import Naming
from isthmus.live.servers.plain import PlainClient, is_ours, life_of, new_session, refuses, said
from isthmus.live.servers.state_file import Kept, StateFile
from isthmus.live.servers.told import Description

log = logging.getLogger(__name__)

UNLIMITED_TOKENS = 1 << 40
"""The server says itself what is too long for it."""
PROBE_S, SILENCE_S = 1.0, 2.0
"""How often each server is asked for a sign of life, and how long it may take or be silent."""

Samples = Sequence[tuple[bytes, tuple[int, ...]]]
"""Questions for a server's `/tokenize`, and the tokens that it should answer with."""
Decide = Callable[["Pool", conductor.Event], None]
"""Tells the conductor of a pool an event, and carries out its answers."""


class Server:
    """One server: what it says of itself, what it does, and what is known of its cache.

    `pool`: None while it is not used; `home`: its last one; `is_draining`: it is not wanted any more; `reason`: why it
    was not taken in. `role`: PREFILL or DECODE for one that computes prompts, or takes their KV; `transfer`: how those
    hand KV over."""

    def __init__(self, node: NodeId, client: PlainClient, role: Role = MIXED) -> None:
        self.node, self.client, self.role = node, client, role
        self.transfer: split.Transfer | None = None
        self.description: Description | None = None
        self.cache: Cached | None = None  # None until it has said what it is
        self.pool: Pool | None = None
        self.home: Pool | None = None
        self.is_draining = False
        self.reason = ""
        self.looked = asyncio.Event()
        self.watching: asyncio.Task[None] | None = None
        self.running: set[RequestId] = set()
        self.heard_s = 0.0
        self.counts: Counter[str] = Counter()

    @property
    def kind(self) -> str:
        """As in `Description`."""
        return "" if self.description is None else self.description.kind

    def hear(self) -> None:
        """Takes a sign of life."""
        self.heard_s = time.monotonic()

    def close(self) -> None:
        """Hears nothing of its cache any more."""
        if self.cache is not None:
            self.cache.close()

    @property
    def is_slow(self) -> bool:
        """Whether it gets no requests since it is far slower than it was."""
        node = None if self.pool is None else self.pool.desk.conductor.view.nodes.get(self.node)
        return node is not None and node.is_aside

    @property
    def takes_requests(self) -> bool:
        return self.pool is not None and not self.is_draining

    def gauges(self) -> dict[str, float]:
        cache = self.cache
        return {
            "server_up": float(self.takes_requests),
            "server_requests_running": len(self.running),
            "server_cache_blocks": 0 if cache is None else cache.num_blocks,
            "server_cache_capacity_blocks": 0 if cache is None else cache.capacity_blocks,
            **{f"server_{name}_total": self.counts[name] for name in _COUNTERS},
        }


_COUNTERS = (
    "requests", "failures", "leaves", "continued", "prompt_tokens", "cache_told_tokens", "cached_tokens",
    "expected_tokens",
)  # fmt: skip


class Pool:
    """The servers that list the same models and take requests of the same length, behind a conductor of their own.
    `longest`: tokens of the longest request, prompt and answer; 0 if they do not say."""

    def __init__(self, models: tuple[str, ...], longest: int, naming: Naming, desk: conductor.Desk) -> None:
        self.models, self.longest, self.naming, self.desk = models, longest, naming, desk
        self.answers = Answers()
        self.handover = split.HandoverTime()

    def has(self, role: Role) -> bool:
        """Whether a node of a role is there."""
        return any(node.role is role for node in self.desk.conductor.view.nodes.values())


class Fleet:
    """All servers by URL, and their pools.

    `key`: an API key that the servers ask for; `new_recorder`: makes the recorder of the pool of a number, None where
    nothing is recorded; `samples`: what the servers make of prompts, by the tokenizer from which requests have their
    tokens, None where they have none; `state`: where what is believed of caches stays, None for nowhere; `role_of`: the
    role of the server at a URL, where `rules` are `split.divided`.
    """

    def __init__(
        self,
        rules: conductor.Rules,
        *,
        rejoin_s: float,
        key: str | None,
        new_recorder: Callable[[int], Recorder] | None,
        decide: Decide,
        samples: Samples | None = None,
        state: StateFile | None = None,
        timeout_s: float | None = None,
        role_of: Callable[[str], Role] = lambda url: MIXED,
    ) -> None:
        self._samples, self._state, self._role_of = samples, state, role_of
        self.servers: dict[NodeId, Server] = {}
        self._wanted: dict[NodeId, None] = {}
        self._pools: dict[tuple[tuple[str, ...], int], Pool] = {}
        self._rules, self._rejoin_ms, self._decide = rules, round(rejoin_s * 1000), decide
        self._key, self._new_recorder = key, new_recorder
        self._recorders: list[Recorder] = []
        self._watching: set[asyncio.Task[None]] = set()
        self._timeout_s = timeout_s
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = (
            None  # the second keeps nothing
        )

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Watches the servers that are wanted, inside the context."""
        self._sessions = new_session(self._timeout_s), new_session(self._timeout_s, keeps=False)
        if self._state is not None:
            keeping = self._state.keep(self._snapshots, self._num_requests, lambda: self._wanted)
            self._watching.add(asyncio.get_running_loop().create_task(keeping))
        try:
            yield
        finally:
            watching = [*self._watching]
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            for server in self.servers.values():
                server.close()
            for session in self._sessions:
                await session.close()
            for recorder in self._recorders:
                recorder.close()

    def want(self, urls: Collection[str]) -> None:
        """Makes these the servers, inside `run`. New ones join as soon as they say what they are; others drain as soon
        as all new ones have been asked, so that one may take another's place. One that drains and is wanted again
        stays."""
        self._wanted = dict.fromkeys(map(NodeId, urls))
        for node in self._wanted:
            server = self.servers.get(node)
            if server is None:
                self._add(node)
            elif server.is_draining and server.pool is not None:
                server.is_draining = False
                self._decide(server.pool, conductor.NodeStays(node))
                self._measure(server)
        self._settle()

    def _settle(self) -> None:
        """Drains what is not wanted, unless a server that is wanted has not been asked yet."""
        if not all(self.servers[node].looked.is_set() for node in self._wanted):
            return
        for server in list(self.servers.values()):
            if server.node not in self._wanted and not server.is_draining:
                self._drain(server)

    def _add(self, node: NodeId) -> None:
        assert self._sessions is not None, "outside `run`"
        server = self.servers[node] = Server(
            node, PlainClient(node, self._key, *self._sessions), self._role_of(node)
        )
        server.watching = asyncio.get_running_loop().create_task(self._watch(server))
        self._watching.add(server.watching)
        server.watching.add_done_callback(self._watching.discard)

    def _drain(self, server: Server) -> None:
        server.is_draining = True
        if server.pool is None:
            self._remove(server)
        else:
            self._decide(server.pool, conductor.NodeDrains(server.node))

    def dismiss(self, node: NodeId) -> None:
        """Takes leave of a server that has drained."""
        server = self.servers[node]
        assert server.is_draining and server.pool is not None
        pool, server.pool = server.pool, None
        self._decide(pool, conductor.NodeLeft(node))
        self._remove(server)

    def _remove(self, server: Server) -> None:
        assert server.is_draining and server.watching is not None
        server.close()
        del self.servers[server.node]
        server.watching.cancel()
        server.looked.set()

    async def settled(self) -> None:
        """Returns when every server has been asked what it is, or is removed."""
        for server in list(self.servers.values()):
            await server.looked.wait()

    @property
    def healthy(self) -> bool:
        return any(server.takes_requests for server in self.servers.values())

    def models(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for server in self.servers.values():
            if server.takes_requests and server.description is not None:
                for each in server.description.models:
                    found.setdefault(str(each["id"]), each)
        return list(found.values())

    def gauges(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for server in self.servers.values():
            for name, value in server.gauges().items():
                found.setdefault(name, {})[str(server.node)] = value
        return found

    def status(self) -> list[Any]:
        found: list[Any] = []
        for server in self.servers.values():
            told = server.description or Description(())
            known = {
                "models": told.names,
                "kind": told.kind,
                "version": told.version,
                "longest": told.longest,
                "kv_tokens": told.kv_tokens,
                "role": str(server.role),
                "cache_from": "" if server.cache is None else server.cache.capacity_from,
            }
            counts = {name.removeprefix("server_"): round(value) for name, value in server.gauges().items()}
            state = {"up": server.pool is not None, "draining": server.is_draining, "slow": server.is_slow}
            found.append({"server": str(server.node), **counts, **state, **known})
        return found

    def lines(self) -> list[str]:
        """Returns a line for each server: what it says of itself."""
        return [self.line(str(node)) for node in self.servers]

    def line(self, url: str) -> str:
        """Returns what a server says of itself, and what becomes of it."""
        server = self.servers.get(NodeId(url))
        if server is None:
            return f"{url}: is removed"
        told = server.description
        if server.is_draining:
            return f"{url}: gets no new requests, and is removed when {len(server.running)} have ended"
        if told is None:
            return f"{url}: does not answer; it is asked every {PROBE_S:g} s"
        num_guessed = 0 if server.cache is None else server.cache.capacity_tokens
        guessed = f"its KV memory is guessed, {num_guessed:,} tokens" if num_guessed else ""
        facts = [
            " ".join(filter(None, [told.kind, told.version])),
            f"requests of up to {told.longest:,} tokens" if told.longest else "",
            f"{told.kv_tokens:,} tokens of KV memory" if told.kv_tokens else guessed,
            f"{server.role} ({type(server.transfer).__name__})" if server.transfer is not None else "",
        ]
        return f"{url}: {', '.join([*told.names, *filter(None, facts)])}"

    @property
    def pools(self) -> list[Pool]:
        return list(self._pools.values())

    def pools_of(self, passed: PassedRequest) -> list[Pool]:
        """Returns the pools that serve a request's model, the best first; the only one, whose servers know best, for
        any name. Raises UnknownModelError or UnavailableError."""
        homes = dict.fromkeys(server.home for server in self.servers.values())
        known_pools = [pool for pool in homes if pool is not None]
        live = [pool for pool in known_pools if pool.desk.conductor.view.prefills] or known_pools
        for pools in (live, known_pools):  # a server that left may come back
            found = [pool for pool in pools if passed.model in pool.models]
            if found:
                return self._ranked(found, passed)
        if len({pool.models for pool in live}) == 1:
            return self._ranked(live, passed)
        known = ", ".join(sorted({name for pool in live for name in pool.models}))
        if not known:
            raise UnavailableError("no server is there", retry_after_s=1)
        raise UnknownModelError(passed.model, known)

    def _ranked(self, pools: list[Pool], passed: PassedRequest) -> list[Pool]:
        """Sorts pools by what a server has to do before this request's first token, counted in requests like it: those
        that run there, and the part of its prompt that is not cached. A pool that it looks too long for comes last."""
        if len(pools) == 1:
            return pools
        keys: dict[Pool, tuple[bool, float]] = {}
        for pool in pools:
            servers = [server for server in self.servers.values() if server.pool is pool]
            named = pool.naming.named(passed)
            caches = [server.cache for server in servers if server.cache is not None]
            cached = max([cache.match(named) for cache in caches], default=0) / max(1, len(named.names))
            busy = sum([len(server.running) for server in servers]) / max(1, len(servers))
            too_long = 0 < pool.longest < named.num_tokens + passed.max_tokens
            keys[pool] = too_long, busy + 1 - cached
        return sorted(pools, key=keys.__getitem__)

    def suspect(self, server: Server, error: BaseException) -> None:
        """Leaves a server at once that refuses connections, or keeps no KV; another failure may be of the request
        alone."""
        if refuses(error) or isinstance(error, split.NotKeptError):
            self._leave(server, said(error))

    def _leave(self, server: Server, reason: str) -> None:
        pool, server.pool = server.pool, None
        server.close()
        if pool is not None:
            log.warning("%s is left: %s", server.node, reason)
            server.counts["leaves"] += 1
            self._decide(pool, conductor.NodeLeft(server.node))
            if server.is_draining:
                self._remove(server)

    def _new_pool(
        self, models: tuple[str, ...], longest: int, first: Description, *, knows_tokens: bool
    ) -> Pool:
        if self._new_recorder is not None:
            self._recorders.append(self._new_recorder(len(self._pools)))
        log = self._recorders[-1].record if self._recorders else None
        desk = conductor.Desk(conductor.Conductor(self._rules), self._rejoin_ms, log)
        return Pool(models, longest, Naming(first, knows_tokens=knows_tokens), desk)

    async def _knows_tokens(self, server: Server, told: Description) -> bool:
        """Whether requests come with the tokens that this server makes of their prompts, as far as it says."""
        for question, expected in self._samples or ():
            found = await server.client.tokenize(told.names[0], question) if told.names else ()
            if found and found != expected:
                log.warning(
                    "%s has another tokenizer or chat template: prompts are known by their text", server.node
                )
                return False
        return self._samples is not None

    def _kept_of(self, server: Server) -> Kept | None:
        """Returns what was believed of a server that is asked what it is: in an earlier run, or until it left, where it
        says whether it is still the same process."""
        if server.cache is None or server.description is None:
            return self._state.take(str(server.node)) if self._state is not None else None
        return server.cache.snapshot()() if server.description.started_s else None

    def _snapshots(self) -> list[Callable[[], Kept]]:
        """What is believed of all servers' caches."""
        return [server.cache.snapshot() for server in self.servers.values() if server.cache is not None]

    def _num_requests(self) -> int:
        return sum(server.counts["requests"] for server in self.servers.values())

    def _report(self, pool: Pool, reports: Reports) -> None:
        for report in reports:
            self._decide(pool, report)

    def _measure(self, server: Server) -> None:
        if server.role is not MIXED and server.pool is not None:
            self._decide(server.pool, server.pool.handover.measured())

    async def _look(self, server: Server) -> str:
        """Asks a server what it is, and takes it in. Returns why not, "" if so."""
        try:
            description = await server.client.describe()
            if server.role is not MIXED:
                server.transfer = await split.transfer_of(server.client, server.role, description.kind)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return f"{server.node}: {said(error)}"
        kept = self._kept_of(server)
        server.description = description
        server.hear()
        # Servers that hand KV over are of one pool, whatever each takes.
        longest = 0 if self._rules.links else description.longest
        key = tuple(sorted(description.names)), longest
        knows_tokens = await self._knows_tokens(server, description)
        if key not in self._pools:
            self._pools[key] = self._new_pool(*key, description, knows_tokens=knows_tokens)
        server.pool = server.home = pool = self._pools[key]
        server.cache = Cached(server.node, description, pool.naming, partial(self._report, pool))
        self._decide(
            pool,
            conductor.NodeJoined(
                server.node, split.role_of(server.role, server.transfer), UNLIMITED_TOKENS, pool.naming.block_tokens,
                cache_blocks=server.cache.capacity_blocks, cluster=split.CLUSTERS[server.role], lends=False,
            ),
        )  # fmt: skip
        self._measure(server)
        if kept is not None:
            server.cache.restore(kept)
        if knows_tokens:
            server.cache.listen(kept)
        return ""

    async def _watch(self, server: Server) -> None:
        """Asks what a server is, and for a sign of life every `PROBE_S`; leaves a server without one, and takes in one
        that is back."""
        while True:
            try:
                await self._probe(server)
            except Exception:  # a bug of ours ends no watch
                log.exception("%s: a probe failed", server.node)
            if not server.looked.is_set():
                server.looked.set()
                self._settle()
            await asyncio.sleep(PROBE_S)

    async def _probe(self, server: Server) -> None:
        if server.pool is None:
            server.reason = await self._look(server)
            if server.looked.is_set() and not server.reason:
                log.warning("%s is back", server.node)
            return
        if time.monotonic() - server.heard_s < PROBE_S:
            return
        try:
            await server.client.alive(life_of(server.description), SILENCE_S)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if is_ours(error):
                return
            if time.monotonic() - server.heard_s > SILENCE_S or refuses(error):
                self._leave(server, f"no sign of life: {said(error)}")
        else:
            server.hear()
