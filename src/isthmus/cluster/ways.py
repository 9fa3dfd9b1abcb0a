"""How nodes of one cluster reach those of another: over a link as it is, or through the process that emulates it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.cluster.link_process import LinkProcess
from isthmus.conductor import LinkRule
from isthmus.errors import UnavailableError
from isthmus.types import NodeId


class Ways:
    """For the head. `clusters`: the names of all of them."""

    def __init__(self, clusters: Sequence[str] = ("",), links: Iterable[LinkRule] = ()) -> None:
        self.clusters = tuple(clusters)
        self._linked: dict[str, list[str]] = {cluster: [] for cluster in clusters}
        for link in links:
            self._linked[link.target].append(link.source)
        self._processes: dict[frozenset[str], LinkProcess] = {}
        self._ports: dict[NodeId, list[tuple[LinkProcess, str, int]]] = {}

    def emulate(self, link: LinkProcess) -> None:
        """From now on nodes on both sides of this link reach each other through its process."""
        self._processes[frozenset(link.between)] = link

    def linked(self, cluster: str) -> Sequence[str]:
        """The clusters that a link joins to this one."""
        return self._linked[cluster]

    def open(self, node: NodeId, cluster: str, address: str) -> dict[str, str]:
        """A node is there: at which address those of each linked cluster reach it.

        Raises UnavailableError when an emulated link cannot take one more.
        """
        found: dict[str, str] = {}
        for other in self._linked[cluster]:
            process = self._processes.get(frozenset((cluster, other)))
            if process is None:
                found[other] = address
                continue
            port = process.open(cluster, address)
            if port is None:
                self.close(node)
                raise UnavailableError(f"the link between {cluster} and {other} has no port left for it")
            self._ports.setdefault(node, []).append((process, cluster, port))
            found[other] = f"127.0.0.1:{port}"
        return found

    def close(self, node: NodeId) -> None:
        """It is gone: nobody reaches it any more."""
        for process, cluster, port in self._ports.pop(node, []):
            process.close(cluster, port)
