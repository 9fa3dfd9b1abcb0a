"""How nodes reach each other: at their own addresses in their own cluster; in another one over a link, as it is or
emulated by a process. And which address that is, of a node that is started on its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

import msgspec

from isthmus.cluster.launcher import LinkProcess
from isthmus.cluster.messages import Neighbours
from isthmus.conductor import LinkRule
from isthmus.errors import ConfigError, StartError, UnavailableError
from isthmus.messenger import split_address
from isthmus.types import NodeId

RETRY_S = 0.5


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


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reached_at(host: str | None, join: str, limit_s: float) -> str:
    """Where other nodes reach this one: at `host`, else at the address from which it reaches the head at `join`, for
    whose name it waits so long. Raises ConfigError for a `host` that leads nobody here, StartError."""
    own = _own_host(join, limit_s)
    if host is None:
        return own
    try:
        found = [ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    instead = f"leave it out for {own}, from where the head is reached"
    if any(address.is_unspecified for address in found):
        raise ConfigError(
            f"--host: other nodes reach this one there, and nobody is reached at {host}; {instead}"
        )
    if any(address.is_loopback for address in found) and not is_loopback(own):
        raise ConfigError(f"--host: no other machine reaches this one at {host}, a loopback address; {instead}")
    return host


def _own_host(join: str, limit_s: float) -> str:
    """Nothing is sent: the kernel says which of this machine's addresses it would send from."""
    host, port = split_address(join)
    until = time.monotonic() + limit_s
    while True:
        failed: OSError = OSError(f"{host} has no address")
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind, protocol) as probe:
                    try:
                        probe.connect(address)
                    except OSError as error:
                        failed = error
                        continue
                    return str(probe.getsockname()[0])
        except OSError as error:
            failed = error
        if time.monotonic() >= until:
            raise StartError(f"cannot reach the head at {join}: {failed.strerror or failed}")
        time.sleep(RETRY_S)
