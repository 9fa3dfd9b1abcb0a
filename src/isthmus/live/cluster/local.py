"""A whole deployment: the head here, every emulated link a child process, every node a process of a launcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.config import Config
from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.errors import ConfigError, StartError
from isthmus.core.types import ModelCard, Role
from isthmus.facts import clusters_of, links_of, places_of, rules_of
from isthmus.live.cluster.authority import JoinToken, is_loopback, outward_host
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.launcher import Launcher
from isthmus.live.cluster.links import AddressBook, LinkProcess
from isthmus.live.cluster.recorder import LiveRecorder, RecordingHeader, opaque
from isthmus.live.cluster.shaper import LinkSpec, shape_of
from isthmus.live.messenger import address_of, split_address
from isthmus.live.peers.sessions import network_of

if TYPE_CHECKING:
    from isthmus.live.cluster.authority import Authority, HeadCredentials

log = logging.getLogger(__name__)

LEAVE_S = 5.0
"""How long nodes that somebody else started may take to leave."""
SPARE_PORTS = 16
"""Of each direction of an emulated link, for nodes that are added to those started here."""


class LocalCluster:
    """`run` it as a context; `wait_ready` inside. `head` is the gateway's handle, unhealthy until then; `links`: those
    that are emulated; `launcher`: of the nodes; `join_host`: at which they join; `invitation`: what nodes that are
    started elsewhere join with, "" before `run` and where the head has no authority of its own."""

    def __init__(self, config: Config, card: ModelCard, launcher: Launcher) -> None:
        limits, rules = config.limits, rules_of(config)
        self._recorder = (
            LiveRecorder(Path(config.record), RecordingHeader(RECORDING_FORMAT, rules))
            if config.record
            else None
        )
        self._config, self._launcher = config, launcher
        self._addresses = AddressBook([cluster.name for cluster in clusters_of(config)], rules.links)
        self.links: list[LinkProcess] = []
        self.invitation = ""
        self.join_host = config.join_host if "join_host" in config.model_fields_set else launcher.address
        self._token, self._authority, credentials = trust_of(config, self.join_host)
        self.head = Head(
            rules,
            card,
            silence_s=limits.silence_s,
            rejoin_s=limits.rejoin_s,
            recorder=self._recorder,
            network=network_of(config, self._token, credentials),
            addresses=self._addresses,
            alias_of=partial(opaque, secret=self._token),
            enrolment=self._authority,
        )

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Starts all nodes; on the way out stops them, and none is left. Raises StartError."""
        try:
            join = await self._open_head()
            self._failure: asyncio.Future[Any] | None = None
            try:
                await self._start_links()
                self._failure = asyncio.gather(
                    self._launcher.run(self._joining(join)), *[link.watch() for link in self.links]
                )
                yield
            finally:
                if self._failure is not None:  # no node is started any more, and all are told to stop
                    self._failure.cancel()
                    await asyncio.gather(self._failure, return_exceptions=True)
                await self.head.close()
        finally:
            await self._launcher.close()
            await asyncio.gather(*[link.stop() for link in self.links])
            if self._recorder is not None:
                self._recorder.close()

    async def _open_head(self) -> str:
        """Where nodes join. Raises StartError."""
        port = self._config.join_port
        try:
            join = await self.head.open(self.join_host, port)
        except OSError as error:
            where = address_of(self.join_host, port)
            raise StartError(f"cannot listen for nodes on {where}: {error.strerror}") from None
        if self._authority is not None:
            host, port = split_address(join)
            self.invitation = str(self._joining(address_of(outward_host(host), port)))
        return join

    def _joining(self, address: str) -> JoinToken:
        return JoinToken(address, self._authority.pin if self._authority is not None else "", self._token)

    async def _start_links(self) -> None:
        """Raises StartError."""
        nodes = places_of(self._config)
        rates = {(link.source, link.target): link for link in links_of(self._config)}
        for link in self._config.links:
            if link.emulate == "none":
                continue
            rule = rates[link.between]
            counts = [sum(node.cluster.name == end for node in nodes) for end in link.between]
            ports = ((0,) * (counts[0] + SPARE_PORTS), (0,) * (counts[1] + SPARE_PORTS))
            spec = LinkSpec(shape_of(rule.bytes_per_s, rule.rtt_ns), ports)
            process = LinkProcess(link.between, spec)
            self.links.append(process)
            await process.start()
            self._addresses.emulate(process)

    async def wait_ready(self) -> None:
        """Returns when every node has joined. Raises StartError when one cannot, or it takes too long."""
        assert self._failure is not None
        joined = asyncio.create_task(self.head.wait_for(self._launcher.nodes))
        limit = self._config.limits.start_s
        done, _ = await asyncio.wait(
            {joined, self._failure}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
        )
        joined.cancel()  # if it is not done
        if self._failure in done:
            self._failure.result()
        if joined not in done:
            late = f"the nodes were not ready within {limit:g} s (limits.start_s)"
            raise StartError(": ".join(filter(None, (late, self._launcher.missing()))))
        self._launcher.ready = True


def signs(config: Config, host: str) -> bool:
    """Whether a head that nodes join at `host` has an authority of its own: beyond loopback, unless told otherwise."""
    tls = config.tls
    if tls.mode == "none" or tls.certificate is not None:
        return False
    return tls.folder is not None or not is_loopback(host)


def trust_of(config: Config, host: str) -> tuple[str, Authority | None, HeadCredentials | None]:
    """The cluster's token, drawn at random where the file gives none; who signs certificates where nodes join at
    `host`, and the head's own, both None where the head signs none. Raises ConfigError."""
    if not signs(config, host):
        return config.token or secrets.token_hex(16), None, None
    from isthmus.live.cluster.authority import Authority, HeadCredentials, kept_token

    if config.tls.folder is None:
        token, authority = config.token or secrets.token_hex(16), Authority.made()
    else:
        folder = Path(config.tls.folder).expanduser()
        token, authority = config.token or kept_token(folder), Authority.kept(folder)
    return token, authority, HeadCredentials(authority)


def check_joining(config: Config) -> None:
    """Raises ConfigError for what only `isthmus serve` can start, and where nobody could show the token."""
    if config.token is None and not signs(config, config.join_host):
        raise ConfigError(
            "placement: join: nodes need the cluster's token: set ISTHMUS_TOKEN, or token in the file"
        )
    if any(place.stages > 1 for place in places_of(config)):
        raise ConfigError("roles.prefill.pipeline: groups are started with placement: local only")
    for link in config.links:
        if link.emulate != "none":
            between = " and ".join(link.between)
            raise ConfigError(
                f"links: between {between}: placement: join has no emulated links; write emulate: none"
            )


class JoinedCluster(LocalCluster):
    """A deployment whose nodes others start: by hand, with `srun`, or Kubernetes. Only the head is here; it waits
    for so many nodes of each role, for as long as they take, wherever they are and whatever they are called."""

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """On the way out nodes are told to stop. Raises StartError."""
        join = await self._open_head()
        log.warning("waiting for %s to join at %s", _in_words(self._missing()), join)
        try:
            yield
        finally:
            await self.head.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self.head.wait_until(lambda: not self.head.nodes())
            if self._recorder is not None:
                self._recorder.close()

    async def wait_ready(self) -> None:
        """Returns when as many nodes of each role as configured have joined."""
        await self.head.wait_until(lambda: not self._missing())
        self.head.complete()

    def _missing(self) -> Counter[tuple[str, Role]]:
        """How many nodes are still to come, by cluster and role."""
        wanted = Counter((place.cluster.name, place.role) for place in places_of(self._config))
        return wanted - Counter((cluster, role) for role, _, cluster in self.head.nodes().values())


def _in_words(nodes: Counter[tuple[str, Role]]) -> str:
    found = [f"{count} {role}{f' of {cluster}' if cluster else ''}" for (cluster, role), count in nodes.items()]
    return f"{', '.join(found)} node{'s' if sum(nodes.values()) > 1 else ''}"
