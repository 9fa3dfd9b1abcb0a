"""The minimum cut of a small network: what must be severed, at least, between a source and a sink.

By the theorem of Ford and Fulkerson (1956) it weighs as much as the largest flow; paths are taken shortest first
(Edmonds and Karp, 1972).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

Node = Hashable
Capacities = dict[Node, dict[Node, int]]
"""What each edge can still take, backwards too."""

ENDLESS = 1 << 62
"""Of an edge that may not be cut."""


def min_cut(edges: Iterable[tuple[Node, Node, int]], source: Node, sink: Node) -> tuple[int, frozenset[Node]]:
    """`edges`: (from, to, weight), weights 0 or more. Returns the weight of what is cut, and all nodes on the sink's
    side: of several minimum cuts those of the one nearest to the sink. Nodes from which nothing gets there are not
    among them."""
    assert source != sink, "nothing can be cut between a node and itself"
    left: Capacities = defaultdict(dict)
    for start, stop, weight in edges:
        assert weight >= 0, "a flow has one direction"
        left[start][stop] = left[start].get(stop, 0) + weight
        left[stop].setdefault(start, 0)
    flow = 0
    while path := _path(left, source, sink):
        most = min(left[start][stop] for start, stop in path)
        for start, stop in path:
            left[start][stop] -= most
            left[stop][start] += most
        flow += most
    return flow, _reaching(left, sink)


def _path(left: Capacities, source: Node, sink: Node) -> list[tuple[Node, Node]]:
    """The edges of a shortest way on which more can flow; none if there is none."""
    came: dict[Node, Node] = {source: source}
    ring = [source]
    while ring and sink not in came:
        further = []
        for start in ring:
            for stop, most in left[start].items():
                if most and stop not in came:
                    came[stop] = start
                    further.append(stop)
        ring = further
    path, at = [], sink
    while at in came and at != source:
        path.append((came[at], at))
        at = came[at]
    return path[::-1]


def _reaching(left: Capacities, sink: Node) -> frozenset[Node]:
    found, new = {sink}, [sink]
    while new:
        at = new.pop()
        for before in left[at]:  # edges are in there both ways
            if left[before][at] and before not in found:
                found.add(before)
                new.append(before)
    return frozenset(found)
