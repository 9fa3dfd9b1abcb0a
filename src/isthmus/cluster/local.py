"""A whole deployment: the head here, every emulated link a child process, every node a process on one of the hosts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cluster.addresses import AddressBook
from isthmus.cluster.enrolment import Enrolment
from isthmus.cluster.head import Head
from isthmus.cluster.hosts import Hosts
from isthmus.cluster.join_token import JoinToken
from isthmus.cluster.launcher import Launcher, LinkProcess
from isthmus.cluster.own_address import is_loopback, outward_host
from isthmus.cluster.recorder import Header, LiveRecorder, opaque
from isthmus.cluster.sessions import network_of
from isthmus.cluster.shaper import LinkSpec, shape_of
from isthmus.conductor.events import RECORDING_FORMAT
from isthmus.config import Config
from isthmus.deploy import clusters_of, links_of, places_of, rules_of
from isthmus.errors import StartError
from isthmus.messenger import address_of, split_address
from isthmus.types import ModelCard

if TYPE_CHECKING:
    from isthmus.cluster.authority import Authority, HeadCredentials

SPARE_PORTS = 16
"""Of each direction of an emulated link, for nodes that are added to those started here."""


class LocalCluster:
    """`run` it as a context; `wait_ready` inside. `head` is the gateway's handle, unhealthy until then; `links`: those
    that are emulated; `hosts`: where the nodes run; `join_host`: at which they join; `invitation`: what nodes that are
    started elsewhere join with, "" before `run` and where the head has no authority of its own."""

    def __init__(self, config: Config, model: Path, card: ModelCard, hosts: Hosts) -> None:
        limits, rules = config.limits, rules_of(config)
        self._recorder = (
            LiveRecorder(Path(config.record), Header(RECORDING_FORMAT, rules)) if config.record else None
        )
        self._config, self._model, self._hosts = config, model, hosts
        self._addresses = AddressBook([cluster.name for cluster in clusters_of(config)], rules.links)
        self.links: list[LinkProcess] = []
        self.invitation = ""
        self.join_host = config.join_host if "join_host" in config.model_fields_set else hosts.address
        self._authority = authority_of(config, self.join_host)
        self._token = config.token or token_of(config)
        self.head = Head(
            rules,
            card,
            silence_s=limits.silence_s,
            rejoin_s=limits.rejoin_s,
            recorder=self._recorder,
            network=network_of(config, self._token, credentials_of(self._authority)),
            addresses=self._addresses,
            alias_of=partial(opaque, secret=self._token),
            enrolment=Enrolment(self._authority) if self._authority is not None else None,
        )

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Starts all nodes; on the way out stops them, and none is left. Raises StartError."""
        try:
            join = await self._open_head()
            self._launcher = Launcher(self._config, self._model, self._hosts, join=self._joining(join))
            self._failure: asyncio.Future[Any] | None = None
            try:
                await self._start_links()
                self._failure = asyncio.gather(self._launcher.run(), *[link.watch() for link in self.links])
                yield
            finally:
                await self._end()
        finally:
            await self._hosts.close()
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

    async def _end(self) -> None:
        """Starts no node any more, and tells all to stop."""
        if self._failure is not None:
            self._failure.cancel()
            await asyncio.gather(self._failure, return_exceptions=True)
        await self.head.close()

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
            raise StartError(": ".join(filter(None, (late, self._hosts.missing()))))
        self._launcher.ready = True


def signs(config: Config, host: str) -> bool:
    """Whether a head that nodes join at `host` has an authority of its own: beyond loopback, unless told otherwise."""
    tls = config.tls
    if tls.mode == "none" or tls.certificate is not None:
        return False
    return tls.folder is not None or not is_loopback(host)


def authority_of(config: Config, host: str) -> Authority | None:
    """Who signs certificates where nodes join at `host`; None where the head signs none. Raises ConfigError."""
    if not signs(config, host):
        return None
    from isthmus.cluster.authority import Authority  # takes a moment to import

    folder = config.tls.folder
    return Authority.made() if folder is None else Authority.kept(Path(folder).expanduser())


def token_of(config: Config) -> str:
    """Drawn at random, and kept where the authority's key is. Raises ConfigError."""
    if config.tls.folder is None:
        return secrets.token_hex(16)
    from isthmus.cluster.authority import kept_token

    return kept_token(Path(config.tls.folder).expanduser())


def credentials_of(authority: Authority | None) -> HeadCredentials | None:
    if authority is None:
        return None
    from isthmus.cluster.authority import HeadCredentials

    return HeadCredentials(authority)
