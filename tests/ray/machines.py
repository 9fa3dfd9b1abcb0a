"""A Ray cluster of several machines, each of them a few processes here with an address of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.served import alive

HEAD, EAST, WEST, SPARE = (f"127.0.0.{number}" for number in range(2, 6))
"""Loopback addresses, but none that two machines could take for their own."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Machines:
    """`address`: what RAY_ADDRESS has to be."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address = str(cluster.address)

    def add(self, address: str, cluster: str = "", gpus: int = 0) -> Any:
        """Of 6 cores. Its GPUs are only counted."""
        labels = {"isthmus-cluster": cluster} if cluster else {}
        return self._cluster.add_node(num_cpus=6, num_gpus=gpus, node_ip_address=address, labels=labels)

    def remove(self, machine: Any) -> None:
        """As if it lost its power."""
        self._cluster.remove_node(machine, allow_graceful=False)


@contextlib.contextmanager
def machines() -> Iterator[Machines]:
    """One that takes no node; the environment is that of its clients for as long."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        from ray.cluster_utils import Cluster  # it reads the environment now, and never again

        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "node_ip_address": HEAD, "include_dashboard": False},
        )
        try:
            with mock.patch.dict(os.environ, {"RAY_ADDRESS": cluster.address}):
                yield Machines(cluster)
        finally:
            cluster.shutdown()


def nodes() -> dict[str, int]:
    """Process ids of all nodes on these machines, by name."""
    return {words[words.index("--name") + 1]: pid for pid, words in _started("--launched")}


def workers() -> list[int]:
    """Process ids of all workers of sweeps on these machines."""
    return [pid for pid, _ in _started("isthmus.bench.policy_cells")]


def _started(word: str) -> Iterator[tuple[int, list[str]]]:
    """Processes with this word among their arguments, whose parent a machine has started. Others of this computer, of
    tests that run beside these, are none of ours."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, pid = _words(int(folder.name)), int(folder.name)
            if word in words and alive(pid) and machine_of(pid):
                yield pid, words


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


def machine_of(pid: int) -> str:
    """The address of the machine that a process was started on: that of the raylet which started its actor or task."""
    words = _words(parent_of(parent_of(pid)))
    return next((word.partition("=")[2] for word in words if word.startswith("--node_ip_address=")), "")


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if word)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
