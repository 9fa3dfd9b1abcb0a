"""Starts, watches and stops the processes of nodes, on this machine or on those of a Ray cluster.

A child reads its orders as one JSON line on standard input and keeps that pipe open: when its launcher dies, in
whatever way, the pipe closes and the child exits. A node that cannot start writes its error as one JSON line on
standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from abc import ABC, abstractmethod
from asyncio import sleep
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from isthmus.config import Config, child_environment, visible_devices
from isthmus.core.errors import StartError
from isthmus.core.types import NodeId, Role
from isthmus.extras import missing as extra_missing
from isthmus.facts import Place, gpus_of, node_threads, places_of, role_config
from isthmus.live.cluster.joining import JoinToken, reached_at
from isthmus.live.cluster.machines import available_bytes, check_memory

log = logging.getLogger(__name__)

RESTART_S, LONGEST_RESTART_S = 1.0, 30.0
STOP_S = 5.0


class LaunchSpec(msgspec.Struct, frozen=True):
    """Orders of a launched process."""

    node: NodeId
    role: Role
    join: str
    token: str
    model: str
    threads: int
    config: str  # of its cluster, as JSON
    stage: int = 0  # of the pipeline group `node`
    cluster: str = ""
    start: int = 1  # how often it was started, this time included
    host: str = "127.0.0.1"  # where other nodes reach it
    cores: tuple[int, ...] = ()  # for a server that it starts
    devices: str = ""  # the same, as CUDA_VISIBLE_DEVICES; "": all
    pin: str = ""  # of the authority that signs certificates, "" without one

    @property
    def name(self) -> str:
        return process_name(self.node, self.stage)


def process_name(node: NodeId, stage: int) -> str:
    return f"{node}.{stage}" if stage else node


class Trouble(msgspec.Struct, frozen=True):
    """A launched process's report that it could not start."""

    error: str


class Process(msgspec.Struct, frozen=True):
    """One process of the deployment: a node, or a stage of a pipeline group."""

    place: Place
    stage: int

    @property
    def name(self) -> str:
        return process_name(self.place.node, self.stage)


class Launcher(ABC):
    """Runs the processes of a deployment: `prepare`, then `run`; `close` in any case. Subclasses say where.

    `address`: the head's, unless configured; `ready`: set when the cluster is complete: later a process that ends is
    started again.
    """

    address = "127.0.0.1"
    ready = False

    def prepare(self, config: Config, model: Path, num_bytes: Mapping[NodeId, int]) -> None:
        """Plans processes, without taking resources. `num_bytes`: of weights and KV in each process of a node. Raises
        StartError if they do not fit or machines are not reached; else as `places_of`."""
        self._config, self._model, self._threads = config, model, 1
        self._processes = [Process(place, at) for place in places_of(config) for at in range(place.stages)]
        self._starts: Counter[str] = Counter()

    @property
    def nodes(self) -> list[NodeId]:
        return [process.place.node for process in self._processes if not process.stage]

    async def run(self, join: JoinToken) -> None:
        """Starts all processes, and each that ends again, until cancelled. Raises StartError if one cannot start, or
        ends before the cluster is ready."""
        await self.open()
        for process in self._processes:
            await self._start(process, join)
        await asyncio.gather(*[self._watch(process, join) for process in self._processes])

    async def _start(self, process: Process, join: JoinToken) -> None:
        place = process.place
        self._starts[process.name] += 1
        spec = LaunchSpec(
            node=place.node,
            role=place.role,
            join=join.address,
            token=join.secret,
            pin=join.pin,
            model=str(self._model.absolute()),
            threads=self._config.engine.threads or self._threads,
            config=place.cluster.config.model_dump_json(exclude_unset=True),
            stage=process.stage,
            cluster=place.cluster.name,
            start=self._starts[process.name],
        )
        await self.start(process, spec)

    async def _watch(self, process: Process, join: JoinToken) -> None:
        while True:
            trouble = await self.wait(process)
            if not self.ready:
                raise StartError(f"node {process.name}: {trouble}")
            log.error("node %s ended: %s; starting it again", process.name, trouble)
            await start_again(f"node {process.name}", partial(self._start, process, join))

    async def open(self) -> None:  # noqa: B027
        """Waits until each process has a place. Raises StartError for an unsuitable one."""

    def missing(self) -> str:
        """Returns what `open` waits for, "" if unknown."""
        return ""

    @abstractmethod
    async def start(self, process: Process, spec: LaunchSpec) -> None:
        """Starts a process that is not running. Raises OSError or StartError."""

    @abstractmethod
    async def wait(self, process: Process) -> str:
        """Waits until a started process ends; returns why it did."""

    @abstractmethod
    async def close(self) -> None:
        """Waits for processes that were told to stop, kills those that do not, and frees their places."""


def with_ray(asked: str) -> Any:
    """Returns the module `ray_launcher`, which loads Ray, for the option `asked`. Raises ConfigError without Ray."""
    try:
        from isthmus.live.cluster import ray_launcher
    except ModuleNotFoundError as error:
        raise extra_missing(error, asked) from None
    return ray_launcher


def launcher_of(config: Config) -> Launcher:
    """Returns the launcher that `placement` names. Raises ConfigError if Ray is needed and not installed."""
    if config.placement != "ray":
        return LocalLauncher()
    found: Launcher = with_ray("placement: ray").RayLauncher()
    return found


class LocalLauncher(Launcher):
    """Runs processes on this machine."""

    def __init__(self) -> None:
        self._children: dict[str, asyncio.subprocess.Process] = {}

    def prepare(self, config: Config, model: Path, num_bytes: Mapping[NodeId, int]) -> None:
        super().prepare(config, model, num_bytes)
        if not on_device(config):
            needed = {each.name: num_bytes[each.place.node] for each in self._processes}
            check_memory("here", needed, available_bytes())
        self._devices = devices_of(self._processes) if config.engine.kind == "vllm" else {}
        self._threads = node_threads(len(os.sched_getaffinity(0)), len(self._processes))

    async def start(self, process: Process, spec: LaunchSpec) -> None:
        host = reached_at(None, spec.join, 0)
        cores = cores_of(self._processes.index(process), spec.threads)
        devices = self._devices.get(process.name, "")
        here = msgspec.structs.replace(spec, host=host, cores=cores, devices=devices)
        self._children[process.name] = await start_node(here)

    async def wait(self, process: Process) -> str:
        return await ended(self._children[process.name])

    async def close(self) -> None:
        await asyncio.gather(*map(stop_child, self._children.values()))


def cores_of(number: int, threads: int) -> tuple[int, ...]:
    """Returns the cores of this machine for process number `number`, in turn, for processes of equal `threads`."""
    cores = sorted(os.sched_getaffinity(0))
    return tuple(sorted({cores[(number * threads + at) % len(cores)] for at in range(threads)}))


def devices_of(processes: Sequence[Process]) -> dict[str, str]:
    """Assigns GPUs that CUDA shows here to processes that start vLLM servers. Raises StartError for too few."""
    counts = dict[str, int]()
    for process in processes:
        config = process.place.cluster.config
        if config.engine.device != "cpu" and config.engine.vllm.attach is None:
            counts[process.name] = gpus_of(config, role_config(config, process.place.role))
    needed, visible = sum(counts.values()), visible_devices()
    devices = list(map(str, range(needed))) if visible is None else list(filter(None, visible.split(",")))
    if len(devices) < needed:
        raise StartError(
            f"{len(counts)} nodes need {needed} GPUs, CUDA_VISIBLE_DEVICES names {len(devices)}: give more, or "
            "engine.device: cpu"
        )
    rest = iter(devices)
    return {name: ",".join(islice(rest, count)) for name, count in counts.items()}


def on_device(config: Config) -> bool:
    """Whether weights and KV are in an accelerator's memory."""
    return config.engine.device not in (None, "cpu")


async def start_node(spec: LaunchSpec, errors: IO[bytes] | None = None) -> asyncio.subprocess.Process:
    """Starts a node's process on this machine. `errors`: takes its standard error, else this process's does."""
    name = ("--launched", "--name", spec.name)
    return await start_child("node", *name, threads=spec.threads, spec=spec, errors=errors)


async def start_child(
    verb: str, *arguments: str, threads: int, spec: Any, errors: IO[bytes] | None = None
) -> asyncio.subprocess.Process:
    """Starts `isthmus VERB ARGUMENTS` and sends it `spec`. A name among the arguments is for `ps`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "isthmus", verb, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        stderr=errors,
        env=child_environment(threads),
        start_new_session=True,  # Ctrl-C reaches the launcher only, which stops the children in order
    )
    tell_child(process, spec)
    return process


def tell_child(process: asyncio.subprocess.Process, message: Any) -> None:
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.write(msgspec.json.encode(message) + b"\n")


async def start_again(what: str, start: Callable[[], Awaitable[None]]) -> None:
    """Calls `start` after `RESTART_S`; after each failure waits twice as long, up to `LONGEST_RESTART_S`."""
    wait_s = RESTART_S
    while True:
        await sleep(wait_s)
        try:
            return await start()
        except (OSError, StartError) as error:
            wait_s = min(2 * wait_s, LONGEST_RESTART_S)
            log.error("%s cannot be started: %s; trying again in %g s", what, error, wait_s)


async def ended(process: asyncio.subprocess.Process) -> str:
    """Waits until a node's process ends; returns why it did."""
    assert process.stdout is not None
    return trouble_of(await process.stdout.read(), await process.wait())


def trouble_of(output: bytes, code: int) -> str:
    """Returns why a node with this standard output and exit status ended."""
    try:
        return msgspec.json.decode(output.strip().split(b"\n")[-1], type=Trouble).error
    except msgspec.DecodeError:
        killed = " (killed; is there enough memory?)" if code == -9 else ""
        return f"exit status {code}{killed}"


async def stop_child(process: asyncio.subprocess.Process) -> None:
    """Closes a child's input, upon which it exits, and kills it after `STOP_S`."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
