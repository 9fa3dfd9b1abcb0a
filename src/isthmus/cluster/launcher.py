"""Starts, watches and stops the processes of a deployment: nodes, wherever they run, and links between clusters."""

from __future__ import annotations

import asyncio
import logging
from asyncio import sleep
from collections import Counter
from pathlib import Path

import msgspec

from isthmus.cluster.hosts import (
    Hosts,
    LaunchSpec,
    Process,
    planned_processes,
    start_child,
    stop_child,
    tell_child,
)
from isthmus.cluster.join_token import JoinToken
from isthmus.cluster.shaper import LinkPorts, LinkSpec, Point
from isthmus.config import Config
from isthmus.errors import StartError
from isthmus.types import NodeId

log = logging.getLogger(__name__)

LINK_START_S = 30.0
RESTART_S, LONGEST_RESTART_S = 1.0, 30.0


class Launcher:
    """Decides which processes of nodes run, on `hosts`. `run` starts them and ends (with StartError) if one cannot
    start; once it was cancelled, `hosts` end those that are there."""

    def __init__(self, config: Config, model: Path, hosts: Hosts, *, join: JoinToken) -> None:
        self._config, self._model, self._join = config, model, join
        self._hosts, self._planned = hosts, planned_processes(config)
        self._starts: Counter[str] = Counter()
        self.ready = False
        """Set once the cluster is complete: from then on a node that ends is started again."""

    @property
    def nodes(self) -> list[NodeId]:
        return [process.place.node for process in self._planned if not process.stage]

    async def run(self) -> None:
        """Raises StartError when a node cannot start, or ends before the cluster is ready. From then on starts each
        that ends again, until it is cancelled."""
        await self._hosts.open()
        for process in self._planned:
            await self._start(process)
        await asyncio.gather(*map(self._watch, self._planned))

    async def _start(self, process: Process) -> None:
        self._starts[process.name] += 1
        await self._hosts.start(process, self._spec_of(process))

    def _spec_of(self, process: Process) -> LaunchSpec:
        place = process.place
        return LaunchSpec(
            node=place.node,
            role=place.role,
            join=self._join.address,
            token=self._join.secret,
            pin=self._join.pin,
            model=str(self._model.absolute()),
            threads=self._config.engine.threads or self._hosts.threads(),
            config=place.cluster.config.model_dump_json(exclude_unset=True),
            stage=process.stage,
            cluster=place.cluster.name,
            start=self._starts[process.name],
        )

    async def _watch(self, process: Process) -> None:
        while True:
            trouble = await self._hosts.wait(process)
            if not self.ready:
                raise StartError(f"node {process.name}: {trouble}")
            log.error("node %s ended: %s; starting it again", process.name, trouble)
            await self._start_again(process)

    async def _start_again(self, process: Process) -> None:
        while True:
            await sleep(RESTART_S)
            try:
                return await self._start(process)
            except (OSError, StartError) as error:
                log.error("node %s cannot be started: %s; trying again", process.name, error)


class LinkProcess:
    """The link between the clusters `between`, in a process that this one starts, and again when it ends: at the same
    ports, since nodes know these, and with the same targets."""

    def __init__(self, between: tuple[str, str], spec: LinkSpec) -> None:
        self.between = between
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._spare = [list(towards) for towards in spec.ports]
        self._targets: dict[int, str] = {}

    async def start(self) -> None:
        """For the first time, at ports that it finds. Raises StartError."""
        await self._start()
        self._spare = [list(towards) for towards in self._spec.ports]

    async def _start(self) -> None:
        process = await start_child("link", "--name", "-".join(self.between), threads=1, spec=self._spec)
        self._process = process
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), LINK_START_S)
            found = msgspec.json.decode(line, type=LinkPorts)
        except (msgspec.DecodeError, TimeoutError):
            await stop_child(process)
            raise StartError(
                f"the process of the link between {' and '.join(self.between)} did not start"
            ) from None
        self._spec = msgspec.structs.replace(self._spec, ports=found.ports)
        for port, target in self._targets.items():
            tell_child(process, Point(port, target))

    def open(self, towards: str, target: str) -> int | None:
        """A port that leads to `target`, in the cluster `towards`; None when there are no more."""
        spare = self._spare[self.between.index(towards)]
        if not spare:
            return None
        port = spare.pop(0)
        self.point(Point(port, target))
        return port

    def close(self, towards: str, port: int) -> None:
        self.point(Point(port, ""))
        self._spare[self.between.index(towards)].append(port)

    def point(self, point: Point) -> None:
        self._targets[point.port] = point.target
        if self._process is not None:
            tell_child(self._process, point)

    async def watch(self) -> None:
        """Starts the process again whenever it ends, until this is cancelled. It was started."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.error(
                "the link between %s and %s ended: exit status %d; starting it again", *self.between, code
            )
            await self._start_again()

    async def _start_again(self) -> None:
        """One second later; after each failure twice as long, up to `LONGEST_RESTART_S`."""
        wait_s = RESTART_S
        while True:
            await sleep(wait_s)
            try:
                return await self._start()
            except (OSError, StartError) as error:
                wait_s = min(2 * wait_s, LONGEST_RESTART_S)
                log.error("%s; trying again in %g s", error, wait_s)

    async def stop(self) -> None:
        if self._process is not None:
            await stop_child(self._process)
