"""Starts, watches and stops the processes of this machine: nodes, and links between clusters.

A child reads what it is to be as one JSON line on standard input and keeps that pipe open: when the launcher dies,
however it dies, the pipe closes and the child leaves. A node that cannot start writes one JSON line with the
error on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from isthmus.cluster.shaper import LinkPorts, LinkSpec, Point
from isthmus.config import Config, child_environment
from isthmus.deploy import Place, node_threads, places_of
from isthmus.errors import StartError
from isthmus.types import NodeId, Role

log = logging.getLogger(__name__)

STOP_S = 5.0
LINK_START_S = 30.0
RESTART_S = 1.0


class LaunchSpec(msgspec.Struct, frozen=True):
    """What a launched node is told. `config`: that of its cluster, as JSON. `stage`: which part of the pipeline
    group `node` it is; `start`: how often it was started, this time included; `cores`: for what it starts itself."""

    node: NodeId
    role: Role
    join: str
    token: str
    model: str
    threads: int
    config: str
    stage: int = 0
    cluster: str = ""
    start: int = 1
    cores: tuple[int, ...] = ()


class Trouble(msgspec.Struct, frozen=True):
    """Why a launched node could not start."""

    error: str


class Process(msgspec.Struct, frozen=True):
    """One process of this machine: a node, or one stage of the pipeline group that is a node."""

    place: Place
    stage: int

    @property
    def name(self) -> str:
        return f"{self.place.node}.{self.stage}" if self.stage else self.place.node


def planned_processes(config: Config) -> list[Process]:
    """All processes of all nodes. Raises as `places_of`."""
    return [Process(place, stage) for place in places_of(config) for stage in range(place.stages)]


def check_memory(config: Config, node_bytes: Sequence[int]) -> None:
    """Raises StartError when all nodes, with `node_bytes` of weights and KV each, cannot fit what is available."""
    if config.engine.device is not None and config.engine.device != "cpu":
        return
    needed, available = sum(node_bytes), available_bytes()
    if available is not None and needed > available:
        raise StartError(
            f"{len(node_bytes)} nodes need {_mib(needed)} ({_mib(max(node_bytes))} each, weights and KV memory); "
            f"{_mib(available)} are available: lower engine.kv_memory or the number of nodes"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def available_bytes() -> int | None:
    """Memory that processes could still take (Linux); None where that cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


async def start_child(verb: str, *arguments: str, threads: int, spec: Any) -> asyncio.subprocess.Process:
    """`isthmus VERB ARGUMENTS`, and what it reads. Its name among the arguments is for `ps`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "isthmus", verb, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        env=child_environment(threads),
        start_new_session=True,  # Ctrl-C reaches the launcher only, which stops the children in order
    )
    tell_child(process, spec)
    return process


def tell_child(process: asyncio.subprocess.Process, message: Any) -> None:
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.write(msgspec.json.encode(message) + b"\n")


async def stop_child(process: asyncio.subprocess.Process) -> None:
    """Closes its input, which tells it to leave, and kills it if it does not. It is gone afterwards."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Launcher:
    """Owns the nodes. `start`, then `failure` ends (with StartError) if one cannot start; then `stop`."""

    def __init__(self, config: Config, model: Path, *, join: str, token: str) -> None:
        self._config, self._model, self._join, self._token = config, model, join, token
        self._planned = planned_processes(config)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._starts: Counter[str] = Counter()
        self._stopping = False
        self.ready = False
        """Set once the cluster is complete: from then on a node that ends is started again."""

    @property
    def nodes(self) -> list[NodeId]:
        return [process.place.node for process in self._planned if not process.stage]

    async def start(self) -> None:
        for planned in self._planned:
            await self._spawn(planned)

    async def failure(self) -> None:
        """Waits until a child ends before the cluster is ready; raises its StartError. From then on starts each that
        ends again, until it is cancelled."""
        await asyncio.gather(*map(self._watch, self._planned))

    async def stop(self) -> None:
        """Waits for children that were told to stop; kills those that do not. None is left afterwards."""
        self._stopping = True
        await asyncio.gather(*map(stop_child, self._processes.values()))

    async def _spawn(self, planned: Process) -> None:
        spec = self._spec_of(planned)
        name = ("--launched", "--name", planned.name)
        self._processes[planned.name] = await start_child("node", *name, threads=spec.threads, spec=spec)

    def _spec_of(self, planned: Process) -> LaunchSpec:
        """For its next start."""
        place, fair = planned.place, node_threads(len(os.sched_getaffinity(0)), len(self._planned))
        threads = self._config.engine.threads or fair
        self._starts[planned.name] += 1
        return LaunchSpec(
            node=place.node,
            role=place.role,
            join=self._join,
            token=self._token,
            model=str(self._model),
            threads=threads,
            config=place.cluster.config.model_dump_json(exclude_unset=True),
            stage=planned.stage,
            cluster=place.cluster.name,
            start=self._starts[planned.name],
            cores=_cores_of(self._planned.index(planned), threads),
        )

    async def _watch(self, planned: Process) -> None:
        while True:
            process = self._processes[planned.name]
            assert process.stdout is not None
            output = await process.stdout.read()
            code = await process.wait()
            if self._stopping:
                return
            trouble = _trouble(output, code)
            if not self.ready:
                raise StartError(f"node {planned.name}: {trouble}")
            log.error("node %s ended: %s; starting it again", planned.name, trouble)
            while self._processes[planned.name] is process:
                await asyncio.sleep(RESTART_S)
                try:
                    await self._spawn(planned)
                except OSError as error:
                    log.error("node %s cannot be started: %s; trying again", planned.name, error)


def _cores_of(number: int, threads: int) -> tuple[int, ...]:
    """Of this machine's cores, for process `number` of those that have so many threads each."""
    cores = sorted(os.sched_getaffinity(0))
    return tuple(sorted({cores[(number * threads + at) % len(cores)] for at in range(threads)}))


def _trouble(output: bytes, code: int) -> str:
    try:
        return msgspec.json.decode(output.strip().split(b"\n")[-1], type=Trouble).error
    except msgspec.DecodeError:
        killed = " (killed; is there enough memory?)" if code == -9 else ""
        return f"exit status {code}{killed}"


class LinkProcess:
    """The link between the clusters `between`, in a process that this one started."""

    def __init__(self, between: tuple[str, str], process: asyncio.subprocess.Process, ports: LinkPorts) -> None:
        self.between = between
        self._process, self._spare = process, [list(towards) for towards in ports.ports]

    @staticmethod
    async def start(between: tuple[str, str], spec: LinkSpec) -> LinkProcess:
        """Raises StartError."""
        process = await start_child("link", "--name", "-".join(between), threads=1, spec=spec)
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), LINK_START_S)
            return LinkProcess(between, process, msgspec.json.decode(line, type=LinkPorts))
        except (msgspec.DecodeError, TimeoutError):
            await stop_child(process)
            raise StartError(f"the process of the link between {' and '.join(between)} did not start") from None

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
        tell_child(self._process, point)

    async def watch(self) -> None:
        """Until it ends by itself."""
        code = await self._process.wait()
        log.error("the link between %s and %s ended: exit status %d", *self.between, code)

    async def stop(self) -> None:
        await stop_child(self._process)
