"""Slow servers behind a router: tells conductors the time while requests wait too long, and finds out whether a server
that is set aside is quick again.

A probe is a prompt that nobody asked before, with an answer of one token: it meets what a client's request would meet,
at no client's cost. The server computes nothing else meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable

import aiohttp

from isthmus.core import conductor
from isthmus.core.conductor.view import NodeView
from isthmus.core.types import NS_PER_S
from isthmus.live.servers.fleet import PROBE_S, Decide, Pool, Server
from isthmus.live.servers.plain import said
from isthmus.live.servers.split import Sglang

log = logging.getLogger(__name__)

TICK_S = 0.25
PROBE_TOKENS = 256
"""Long enough that computing is most of its time, short enough for a server that does nothing else."""
OVERLOADED = (429, 500, 502, 503, 504)


class Probing:
    """Watches the servers of a fleet. `pools`: returns those there are; `server_of`: returns a node's server."""

    def __init__(
        self,
        pools: Callable[[], Iterable[Pool]],
        server_of: Callable[[NodeView], Server],
        decide: Decide,
        clock_ns: Callable[[], int],
    ) -> None:
        self._pools, self._server_of, self._decide, self._clock_ns = pools, server_of, decide, clock_ns
        self._probed: set[Server] = set()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as probes:
            while True:
                await asyncio.sleep(TICK_S)
                try:
                    for pool in self._pools():
                        self._tick(pool, probes)
                except Exception:  # a bug of ours ends no watch
                    log.exception("servers were not watched")

    def _tick(self, pool: Pool, probes: asyncio.TaskGroup) -> None:
        slowness = pool.desk.conductor.slowness
        if slowness.is_any_late(self._clock_ns()):
            aside = {node.node for node in slowness.to_probe()}
            self._decide(pool, conductor.TimePassed())
            for node in slowness.to_probe():
                if node.is_aside and node.node not in aside:
                    log.warning(
                        "%s is far slower than it was: it is asked again every %g s", node.node, PROBE_S
                    )
        for node in slowness.to_probe():
            server = self._server_of(node)
            answers = server.description is not None and not isinstance(
                server.transfer, Sglang
            )  # without a room
            if server not in self._probed and answers and not server.is_draining:
                self._probed.add(server)
                probes.create_task(self._probe(pool, server, slowness.expected_ns(node, PROBE_TOKENS)))

    async def _probe(self, pool: Pool, server: Server, expected_ns: float) -> None:
        """Tells a conductor how long a server took for a prompt, if not much too long; not again before `PROBE_S`."""
        began_s = time.monotonic()
        try:
            await self._ask(pool, server, max(PROBE_S, 2 * expected_ns / NS_PER_S))
            await asyncio.sleep(max(0.0, PROBE_S - (time.monotonic() - began_s)))
        except Exception:
            log.exception("%s: a probe failed", server.node)
        finally:
            self._probed.discard(server)

    async def _ask(self, pool: Pool, server: Server, limit_s: float) -> None:
        assert server.description is not None
        prompt = secrets.token_hex(8) + " the" * (PROBE_TOKENS - 4)
        begin_ns = self._clock_ns()
        try:
            status = await server.client.probe(server.description.names[0], prompt, limit_s)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("%s: %s", server.node, said(error))
            return
        took_ns = self._clock_ns() - begin_ns
        if status not in OVERLOADED:
            num_tokens = PROBE_TOKENS if status == 200 else 0
            self._decide(pool, conductor.NodeProbed(server.node, num_tokens, took_ns))
