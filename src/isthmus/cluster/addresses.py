"""How nodes reach each other: at their own addresses in their own cluster; in another one over a link, as it is or
emulated by a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from isthmus.cluster.launcher import LinkProcess
from isthmus.cluster.messages import Neighbours
from isthmus.conductor import LinkRule
from isthmus.errors import UnavailableError
from isthmus.types import NodeId


class _Place(msgspec.Struct, frozen=True):
    """Where a node is: its cluster, its address for the nodes of its own and of each linked one, and the ports that it
    takes up."""

    cluster: str
    addresses: dict[str, str]
    ports: list[tuple[LinkProcess, int]]


class AddressBook:
    """For the head. `clusters`: the names of all of them."""

    def __init__(self, clusters: Sequence[str] = ("",), links: Iterable[LinkRule] = ()) -> None:
        self.clusters = tuple(clusters)
        self._linked: dict[str, list[str]] = {cluster: [] for cluster in clusters}
        for link in links:
            self._linked[link.target].append(link.source)
        self._processes: dict[frozenset[str], LinkProcess] = {}
        self._places: dict[NodeId, _Place] = {}

    def emulate(self, link: LinkProcess) -> None:
        """From now on nodes on both sides of this link reach each other through its process."""
        self._processes[frozenset(link.between)] = link

    def linked(self, cluster: str) -> Sequence[str]:
        """The clusters that a link joins to this one."""
        return self._linked[cluster]

    def open(self, node: NodeId, cluster: str, address: str) -> None:
        """A node is there. Raises UnavailableError when an emulated link cannot take one more."""
        place = self._places[node] = _Place(cluster, {cluster: address}, [])
        for other in self._linked[cluster]:
            process = self._processes.get(frozenset((cluster, other)))
            if process is None:
                place.addresses[other] = address
                continue
            port = process.open(cluster, address)
            if port is None:
                self.close(node)
                raise UnavailableError(f"the link between {cluster} and {other} has no port left for it")
            place.ports.append((process, port))
            place.addresses[other] = f"127.0.0.1:{port}"

    def close(self, node: NodeId) -> None:
        """It is gone: nobody reaches it any more."""
        place = self._places.pop(node, None)
        if place is not None:
            for process, port in place.ports:
                process.close(place.cluster, port)

    def crosses(self, node: NodeId, target: NodeId) -> bool:
        """Whether they are in different clusters."""
        return self._places[node].cluster != self._places[target].cluster

    def view(self, cluster: str, other: str) -> Neighbours:
        """The nodes of `cluster` as its own see them, or those of a linked one."""
        places = [(node, place) for node, place in self._places.items() if place.cluster == cluster]
        return Neighbours(cluster, {node: place.addresses[other] for node, place in places})
