"""Runs nodes, and workers of sweeps, on the machines of a Ray cluster. The only module that imports ray.

    driver (`isthmus serve`)                    a machine of the cluster
    RayLauncher ── placement groups ──> Ray ──> actor `Keeper` ── pipe ──> `isthmus node --launched`
       head <───────────────────── sessions of our own ─────────────────────┘

Ray places processes and reports when they are gone. Requests, KV and events never pass through it; calls of actors
carry bytes encoded here. Nothing is detached: when the driver dies, in whatever way, its actors die, their pipes
close, and the nodes exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from isthmus.config import Config, keep_ray_to_itself, ray_address
from isthmus.core.errors import ConfigError, IsthmusError, StartError
from isthmus.core.types import NodeId
from isthmus.facts import gpus_of, role_config
from isthmus.live.cluster.launcher import (
    STOP_S,
    Launcher,
    LaunchSpec,
    Process,
    ended,
    on_device,
    start_node,
    stop_child,
)
from isthmus.live.cluster.machines import (
    Bundle,
    Machine,
    MachineQuestion,
    Report,
    Seat,
    check_seats,
    fair_threads,
    report_of,
    unplaced,
)
from isthmus.live.cluster.private import private
from isthmus.workers import Pool, Progress, Work, answer

log = logging.getLogger(__name__)

CONNECT_S = 5.0
TAIL_BYTES = 4096
_LINE = 300


def connect() -> None:
    """Connects to the Ray cluster that RAY_ADDRESS names or that runs on this machine, else starts one for this
    process. Raises StartError."""
    _look_at_address()
    keep_ray_to_itself()
    try:
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    except (RayError, OSError, RuntimeError, ValueError, AssertionError) as error:
        raise StartError(f"no Ray cluster can be reached: {_one_line(error)}") from None
    addresses = {machine.address for machine in machines()}
    if len(addresses) > 1 and get_authentication_mode() != AuthenticationMode.TOKEN:
        ray.shutdown()
        raise StartError(
            f"this Ray cluster has {len(addresses)} machines and no authentication, so whoever reaches one can run "
            "anything on all: start it with RAY_AUTH_MODE=token and a token on each (`ray get-auth-token --generate`)"
        )


def _look_at_address() -> None:
    """Raises StartError for a RAY_ADDRESS where nobody listens: Ray itself would retry it for minutes."""
    address = ray_address()
    if address is None or address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "//" in host:
        raise StartError(
            f"RAY_ADDRESS {address}: is for clients outside the cluster; run this on one of its machines"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise StartError(f"RAY_ADDRESS {address}: no Ray cluster can be reached there: {error}") from None


def machines() -> list[Machine]:
    """Returns the machines of the cluster."""
    return [
        Machine(node["NodeManagerAddress"], node["Resources"], node["Labels"])
        for node in ray.nodes()
        if node["Alive"]
    ]


class RayLauncher(Launcher):
    """A placement group for each cluster and each pipeline group, with a bundle for each process, and in the bundle an
    actor for each start of the process."""

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []
        self._places: dict[str, PlacementGroupSchedulingStrategy] = {}
        self._keepers: dict[str, Any] = {}
        self._started: dict[str, Any] = {}
        self._seats: dict[str, Seat] = {}

    def prepare(self, config: Config, model: Path, num_bytes: Mapping[NodeId, int]) -> None:
        super().prepare(config, model, num_bytes)
        connect()
        self.address = ray.util.get_node_ip_address()
        self._taken = config.join_host if "join_host" in config.model_fields_set else self.address
        self._question = MachineQuestion(str(model), config.cache.folder if config.cache.ssd else None)
        self._here = report_of(self._question, self.address)
        # An emulated engine sleeps; more threads would only ask for cores that nobody uses.
        fair = 1 if config.engine.kind == "emulated" else fair_threads(machines(), len(self._processes))
        self._threads = config.engine.threads or fair
        self._bundles = {each.name: self._bundle(each, num_bytes[each.place.node]) for each in self._processes}

    def _bundle(self, process: Process, num_bytes: int) -> Bundle:
        cluster = process.place.cluster
        resources: dict[str, float] = {"CPU": self._threads + 1}
        if on_device(self._config):
            resources["GPU"] = gpus_of(cluster.config, role_config(cluster.config, process.place.role))
        else:
            resources["memory"] = num_bytes
        return Bundle(process.name, cluster.name, resources)

    async def open(self) -> None:
        if missing := self.missing():
            log.warning("waiting for machines: %s", missing)
        groups: dict[str, list[Process]] = {}
        for process in self._processes:
            place = process.place
            groups.setdefault(place.node if place.stages > 1 else f"/{place.cluster.name}", []).append(process)
        for group in groups.values():
            self._reserve(group)
        seats = await asyncio.gather(*map(self._sit, self._processes))
        check_seats(self._here, seats, self._taken)
        self._seats = {seat.name: seat for seat in seats}

    def missing(self) -> str:
        return unplaced(self._bundles.values(), machines(), alone=self._config.ray.spread == "strict")

    def _reserve(self, processes: Sequence[Process]) -> None:
        """Reserves a placement group. Stages, which exchange every chunk, are packed whatever `ray.spread` says."""
        bundles = [self._bundles[process.name] for process in processes]
        strict = self._config.ray.spread == "strict" and processes[0].place.stages == 1
        group = placement_group(
            [bundle.resources for bundle in bundles],
            strategy="STRICT_SPREAD" if strict else "PACK",
            bundle_label_selector=[bundle.labels for bundle in bundles],
        )
        self._groups.append(group)
        for index, process in enumerate(processes):
            self._places[process.name] = PlacementGroupSchedulingStrategy(group, index)

    async def _sit(self, process: Process) -> Seat:
        """Starts an actor in the bundle of a process, when a machine has room; returns its seat. Raises StartError."""
        self._leave(process.name)
        resources = dict(self._bundles[process.name].resources)
        options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "max_restarts": 0}
        if memory := resources.get("memory", 0):
            options["memory"] = memory
        # Ray would start an actor again with the arguments of its first start.
        keeper = self._keepers[process.name] = _KEEPER.options(
            **options, scheduling_strategy=self._places[process.name]
        ).remote()
        try:
            said = await keeper.report.remote(msgspec.json.encode(self._question))
        except RayError as error:
            raise StartError(f"no actor for {process.name}: {_one_line(error)}") from None
        return Seat(process.name, msgspec.json.decode(said, type=Report), int(memory))

    def _leave(self, name: str) -> None:
        self._started.pop(name, None)
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            ray.kill(keeper)

    async def start(self, process: Process, spec: LaunchSpec) -> None:
        seat = self._seats.pop(process.name, None)
        if seat is None:  # it ran before
            seat = await self._sit(process)
            report = msgspec.structs.replace(seat.report, no_folder="")  # it goes on with DRAM alone
            check_seats(self._here, [msgspec.structs.replace(seat, report=report)], self._taken)
        spec = msgspec.structs.replace(spec, host=seat.report.address)
        keeper = self._started[process.name] = self._keepers[process.name]
        try:
            await keeper.start.remote(msgspec.json.encode(spec))
        except RayError as error:
            raise StartError(f"{process.name} on {seat.report.address}: {_one_line(error)}") from None

    async def wait(self, process: Process) -> str:
        try:
            return (await self._started[process.name].wait.remote()).decode()
        except RayError as error:
            return f"its actor is gone: {_one_line(error)}"

    async def close(self) -> None:
        if not ray.is_initialized():
            return
        await asyncio.gather(*[_stopped(keeper.stop.remote()) for keeper in self._started.values()])
        for name in list(self._keepers):
            self._leave(name)
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()


async def _stopped(answer: Any) -> None:
    """Waits until an actor has stopped its process; an actor that is gone has none."""
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(2 * STOP_S):
            await answer


class Keeper:
    """Actor that runs one process of a node, once, and outlives its crash to report it."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._log = Path()

    async def report(self, question: bytes) -> bytes:
        address = ray.util.get_node_ip_address()
        report = await asyncio.to_thread(
            report_of, msgspec.json.decode(question, type=MachineQuestion), address
        )
        return msgspec.json.encode(report)

    async def start(self, spec: bytes) -> None:
        orders = msgspec.json.decode(spec, type=LaunchSpec)
        context = ray.get_runtime_context()
        logs = Path(context.get_temp_dir(), context.get_session_name(), "logs")
        self._log = logs / f"isthmus-{context.get_job_id()}-{orders.name}-{orders.start}.err"
        with open(self._log, "wb", opener=private) as errors:
            self._child = await start_node(orders, errors)

    async def wait(self) -> bytes:
        assert self._child is not None
        return f"{await ended(self._child)}{self._last_line()} (standard error: {self._log})".encode()

    def _last_line(self) -> str:
        with self._log.open("rb") as errors:
            errors.seek(max(0, errors.seek(0, 2) - TAIL_BYTES))
            lines = errors.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {said}" if said else ""

    async def stop(self) -> None:
        if self._child is not None:
            await stop_child(self._child)


_KEEPER = ray.remote(Keeper)


class RayPool(Pool):
    """Runs each worker on a core of the Ray cluster."""

    def run(self, module: str, works: Sequence[Work], report: Progress | None = None) -> list[bytes]:
        connect()
        try:
            return self._run(module, works, report)
        finally:
            ray.shutdown()

    def _run(self, module: str, works: Sequence[Work], report: Progress | None) -> list[bytes]:
        moved = {id(work.shared): work.shared for work in works}
        shared = {key: ray.put(common) for key, common in moved.items()}
        waiting = {
            _ANSWER.remote(module, shared[id(work.shared)], work.own): at for at, work in enumerate(works)
        }
        found = [b""] * len(works)
        try:
            while waiting:
                [done], _ = ray.wait(list(waiting), num_returns=1)
                said = ray.get(done)
                if said[0]:
                    raise (ConfigError if said[0] == ConfigError.exit_code else IsthmusError)(said[1:].decode())
                found[waiting.pop(done)] = said[1:]
                if report is not None:
                    report(len(works) - len(waiting), len(works))
        except RayError as error:
            raise IsthmusError(f"a worker was lost: {_one_line(error)}") from None
        finally:
            for task in waiting:
                ray.cancel(task, force=True)
        return found


def _answer(module: str, shared: bytes, own: bytes) -> bytes:
    """Returns a 0 byte and the answer, or the byte of an exit status and the error."""
    try:
        return b"\0" + asyncio.run(answer(module, Work(shared, own)))
    except IsthmusError as error:
        return bytes([error.exit_code]) + str(error).encode()


_ANSWER = ray.remote(num_cpus=1, max_retries=3)(_answer)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LINE]
