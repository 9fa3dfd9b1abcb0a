"""Checks before nodes are started on machines: each machine's report, and whether a bundle of resources has a place.

Pure but for `report_of` and `available_bytes`, which look at this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus import __version__
from isthmus.core.errors import StartError
from isthmus.live.peers.messages import PROTOCOL
from isthmus.model_files import fingerprint

LOOPBACK = "127.0.0.1"
LABEL = "isthmus-cluster"
"""The label that names a machine's cluster."""


class MachineQuestion(msgspec.Struct, frozen=True):
    """Asks a machine for a deployment's model, and for the `folder` of its SSD tier (None without one)."""

    model: str
    folder: str | None


class Report(msgspec.Struct, frozen=True):
    """A machine's answer. `model`: a fingerprint, or `no_model` says why there is none; `no_folder`: why the folder
    cannot be used, "" if it can."""

    address: str
    version: str
    protocol: int
    model: str
    no_model: str
    no_folder: str
    available_bytes: int | None


def available_bytes() -> int | None:
    """Returns memory that processes could still take (Linux), None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def report_of(question: MachineQuestion, address: str) -> Report:
    model = no_model = no_folder = ""
    try:
        model = fingerprint(Path(question.model))
    except OSError as error:
        no_model = f"{question.model}: {error.strerror}"
    if question.folder is not None:
        try:
            folder = Path(question.folder).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            no_folder = "" if os.access(folder, os.W_OK) else f"{folder}: cannot be written"
        except OSError as error:
            no_folder = f"{question.folder}: {error.strerror}"
    return Report(address, __version__, PROTOCOL, model, no_model, no_folder, available_bytes())


class Seat(msgspec.Struct, frozen=True):
    """A process, its machine's report, and the host memory that it will take, 0 on an accelerator."""

    name: str
    report: Report
    num_bytes: int


def check_seats(here: Report, seats: Sequence[Seat], taken: str) -> None:
    """Raises StartError for the first process that cannot start on its machine, or would not be reached. `here`: the
    report of the head's machine; `taken`: the address at which the head listens."""
    for seat in seats:
        if wrong := _difference(here, seat.report):
            raise StartError(f"{seat.name} on {seat.report.address}: {wrong}")
    addresses = {here.address, *(seat.report.address for seat in seats)}
    if len(addresses | {taken}) > 1 and LOOPBACK in addresses | {taken}:
        far = min(addresses - {LOOPBACK})
        raise StartError(
            f"{LOOPBACK} is the address of one machine and {far} that of another, which cannot reach it: start Ray "
            "with --node-ip-address there, and give join_host if need be"
        )
    for address in sorted(addresses):
        there = [seat for seat in seats if seat.report.address == address]
        known = [seat.report.available_bytes for seat in there if seat.report.available_bytes is not None]
        check_memory(f"on {address}", {seat.name: seat.num_bytes for seat in there}, min(known, default=None))


def _difference(here: Report, there: Report) -> str:
    if (there.version, there.protocol) != (here.version, here.protocol):
        return (
            f"has isthmus {there.version}, protocol {there.protocol}; the head has {here.version}, protocol "
            f"{here.protocol}: install the same"
        )
    if there.no_model:
        return f"the model is not there: {there.no_model}; it must lie at the same path on all machines"
    if there.model != here.model:
        return "another model lies at that path than on the machine of the head: copy it anew"
    return f"cache.folder: {there.no_folder}" if there.no_folder else ""


def check_memory(where: str, needed: Mapping[str, int], available: int | None) -> None:
    """Raises StartError if the processes of a machine do not fit its memory. `needed`: bytes of each, by name."""
    if available is not None and sum(needed.values()) > available:
        raise StartError(
            f"{', '.join(needed)} {where} need {_mib(sum(needed.values()))} (weights and KV memory); "
            f"{_mib(available)} are available: lower engine.kv_memory or the number of nodes"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


class Bundle(msgspec.Struct, frozen=True):
    """Resources that a process takes on a machine of its `cluster`, "" for any machine."""

    name: str
    cluster: str
    resources: dict[str, float]

    @property
    def labels(self) -> dict[str, str]:
        return {LABEL: self.cluster} if self.cluster else {}


class Machine(msgspec.Struct, frozen=True):
    """A machine with its total resources."""

    address: str
    resources: dict[str, float]
    labels: dict[str, str]

    def takes(self, bundle: Bundle) -> bool:
        return self.labels.items() >= bundle.labels.items()


def unplaced(bundles: Iterable[Bundle], machines: Sequence[Machine], *, alone: bool) -> str:
    """Returns why the first bundle without a place has none, "" if all have one. `alone`: a machine takes one
    bundle."""
    left = [dict(machine.resources) for machine in machines]
    for bundle in bundles:
        right = [at for at, machine in enumerate(machines) if machine.takes(bundle)]
        if not machines:
            return f"{bundle.name} needs {shown(bundle.resources)}, and there is no machine"
        if not right:
            return f"{bundle.name} needs a machine with the label {LABEL}={bundle.cluster}, and none has it"
        if not any(_holds(machines[at].resources, bundle.resources) for at in right):
            there = [machines[at].resources for at in right]
            most = {name: max(each.get(name, 0.0) for each in there) for name in bundle.resources}
            where = f" with the label {LABEL}={bundle.cluster}" if bundle.cluster else ""
            return f"{bundle.name} needs {shown(bundle.resources)}; the most that a machine{where} has: {shown(most)}"
        free = [at for at in right if _holds(left[at], bundle.resources)]
        if not free:
            strict = "ray.spread: strict gives each node a machine"
            why = strict if alone else "the other nodes take what there is"
            return f"{bundle.name} needs {shown(bundle.resources)}, and {why}"
        taken, needed = left[free[0]], bundle.resources
        left[free[0]] = {} if alone else {name: count - needed.get(name, 0.0) for name, count in taken.items()}
    return ""


def _holds(there: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= count for name, count in needed.items())


def shown(resources: Mapping[str, float]) -> str:
    return ", ".join(
        f"{_mib(int(count))} of memory" if name == "memory" else f"{count:g} {name}"
        for name, count in resources.items()
    )


def fair_threads(machines: Sequence[Machine], num_processes: int) -> int:
    """Returns the threads of each of `num_processes` spread evenly over machines, with a core of each for its
    sessions."""
    each = -(-num_processes // max(1, len(machines)))
    cores = min((machine.resources.get("CPU", 0.0) for machine in machines), default=0.0)
    return max(1, int(cores) // each - 1)
