"""Starts, watches and stops the processes of nodes: a `Launcher` decides which run, its kinds run them here or on the
machines of a Ray cluster.

A child reads its orders as one JSON line on standard input and keeps that pipe open: when who holds the other end
dies, however it dies, the pipe closes and the child leaves. A node that cannot start writes one JSON line with the
error on standard output.
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
from isthmus.facts import Place, gpus_of, node_threads, places_of, role_config
from isthmus.live.cluster.authority import JoinToken, reached_at
from isthmus.live.cluster.machines import available_bytes, check_memory
from isthmus.live.cluster.with_ray import with_ray

log = logging.getLogger(__name__)

RESTART_S, LONGEST_RESTART_S = 1.0, 30.0
STOP_S = 5.0


class LaunchSpec(msgspec.Struct, frozen=True):
    """What a launched node is told. `config`: that of its cluster, as JSON. `stage`: which part of the pipeline group
    `node` it is; `start`: how often it was started, this time included; `host`: where other nodes reach it;
    `cores`, `devices` ("": whichever it finds): for what it starts itself. `pin`: the authority whose certificates it
    believes and gets one of, "" where the head has none of its own."""

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
    host: str = "127.0.0.1"
    cores: tuple[int, ...] = ()
    devices: str = ""
    pin: str = ""

    @property
    def name(self) -> str:
        return process_name(self.node, self.stage)


def process_name(node: NodeId, stage: int) -> str:
    return f"{node}.{stage}" if stage else node


class Trouble(msgspec.Struct, frozen=True):
    """Why a launched node could not start."""

    error: str


class Process(msgspec.Struct, frozen=True):
    """One process of the deployment: a node, or one stage of the pipeline group that is a node."""

    place: Place
    stage: int

    @property
    def name(self) -> str:
        return process_name(self.place.node, self.stage)


class Launcher(ABC):
    """`prepare`, then `run`; `close` in any case. Each kind says where processes run.

    `address`: at which the head is reached where the configuration does not say; `ready`: set once the cluster is
    complete, from then on a process that ends is started again.
    """

    address = "127.0.0.1"
    ready = False

    def prepare(self, config: Config, model: Path, num_bytes: Mapping[NodeId, int]) -> None:
        """Takes nothing yet. `num_bytes`: of weights and KV in each process of a node. Raises StartError when that
        cannot fit, or machines cannot be reached; else as `places_of`."""
        self._config, self._model, self._threads = config, model, 1
        self._processes = [Process(place, at) for place in places_of(config) for at in range(place.stages)]
        self._starts: Counter[str] = Counter()

    @property
    def nodes(self) -> list[NodeId]:
        return [process.place.node for process in self._processes if not process.stage]

    async def run(self, join: JoinToken) -> None:
        """Starts all processes, then each that ends again, until it is cancelled. Raises StartError when one cannot
        start, or ends before the cluster is ready."""
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
        """Takes a place for each process, and waits until it has it. Raises StartError when one will not do."""

    def missing(self) -> str:
        """While `open` waits: for what; "" if it is not known."""
        return ""

    @abstractmethod
    async def start(self, process: Process, spec: LaunchSpec) -> None:
        """It is not running. Raises OSError or StartError."""

    @abstractmethod
    async def wait(self, process: Process) -> str:
        """Until a started process ends; why it did."""

    @abstractmethod
    async def close(self) -> None:
        """Waits for processes that were told to stop; kills those that do not. None is left, and no place taken."""


def launcher_of(config: Config) -> Launcher:
    """Of the kind that `placement` names. Raises ConfigError when that needs what is not installed."""
    if config.placement != "ray":
        return LocalLauncher()
    found: Launcher = with_ray("placement: ray").RayLauncher()
    return found


class LocalLauncher(Launcher):
    """On this machine."""

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
    """Of this machine's cores, for process `number` of those that have so many threads each."""
    cores = sorted(os.sched_getaffinity(0))
    return tuple(sorted({cores[(number * threads + at) % len(cores)] for at in range(threads)}))


def devices_of(processes: Sequence[Process]) -> dict[str, str]:
    """Of the GPUs that CUDA shows here, for each process that starts a vLLM server those of its own. Raises StartError
    when there are too few."""
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
    """Whether weights and KV lie in the memory of an accelerator."""
    return config.engine.device not in (None, "cpu")


async def start_node(spec: LaunchSpec, errors: IO[bytes] | None = None) -> asyncio.subprocess.Process:
    """A node's process on this machine. `errors`: where its standard error goes, if not where ours does."""
    name = ("--launched", "--name", spec.name)
    return await start_child("node", *name, threads=spec.threads, spec=spec, errors=errors)


async def start_child(
    verb: str, *arguments: str, threads: int, spec: Any, errors: IO[bytes] | None = None
) -> asyncio.subprocess.Process:
    """`isthmus VERB ARGUMENTS`, and what it reads. Its name among the arguments is for `ps`."""
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
    """Starts it one second later; after each failure waits twice as long, up to `LONGEST_RESTART_S`."""
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
    """Why a node with this standard output and exit status ended."""
    try:
        return msgspec.json.decode(output.strip().split(b"\n")[-1], type=Trouble).error
    except msgspec.DecodeError:
        killed = " (killed; is there enough memory?)" if code == -9 else ""
        return f"exit status {code}{killed}"


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
