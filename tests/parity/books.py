"""What the simulator's own books say of KV that came from node to node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isthmus.core.node import Node
from isthmus.core.node.events import (
    Action,
    BlocksFetched,
    Event,
    Fetch,
    HandoverComplete,
    Reclaimed,
    Ship,
    ShipmentStored,
)
from isthmus.core.types import NodeId, RequestId
from isthmus.lab.sim.node import SimNode
from isthmus.lab.sim.simulation import Simulation
from tests.virtual.carried import Transfer

PURPOSES = {"recall": "fetch"}


class Books:
    """Of one simulation: bytes of each transfer that its target was told of."""

    def __init__(self) -> None:
        self.bytes_moved: Counter[Transfer] = Counter()
        self._under_way: dict[Transfer, int] = {}
        self._starts: dict[tuple[NodeId, RequestId], int] = {}
        self._ships: dict[tuple[NodeId, RequestId], int] = {}

    def began(self, purpose: str, source: SimNode, target: SimNode, key: RequestId, num_bytes: int) -> None:
        ends = source.facts.node, target.facts.node
        self._under_way[Transfer(PURPOSES.get(purpose, purpose), *ends, key)] = num_bytes

    def heard(self, node: NodeId, event: Event) -> None:
        match event:
            case HandoverComplete(key):
                self._came("handover", key, target=node)
            case BlocksFetched(key, stop, True) if stop > self._starts[node, key]:
                self._came("fetch", key, target=node)
            case ShipmentStored(key, home, stop) if stop > self._ships[home, key]:
                self._came("shipment", key, target=node, source=home)
            case Reclaimed(key, True):
                self._came("shipment", key, target=node)

    def does(self, node: NodeId, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Fetch):
                self._starts[node, action.key] = action.start
            elif isinstance(action, Ship):
                self._ships[node, action.key] = action.first

    def _came(self, purpose: str, key: RequestId, *, target: NodeId, source: NodeId | None = None) -> None:
        [transfer] = [
            each
            for each in self._under_way
            if (each.purpose, each.target, each.key) == (purpose, target, key) and source in (None, each.source)
        ]
        self.bytes_moved[transfer] += self._under_way.pop(transfer)

    @contextmanager
    def kept(self, simulation: Simulation) -> Iterator[None]:
        """While it runs."""
        moves: Any = simulation._moves
        counted, on = moves._count, Node.on

        def count(*moved: Any) -> None:
            self.began(*moved)
            counted(*moved)

        def hear(decider: Node, event: Event, now: int) -> list[Action]:
            self.heard(decider.node, event)
            actions = on(decider, event, now)
            self.does(decider.node, actions)
            return actions

        moves._count, Node.on = count, hear  # type: ignore[method-assign]
        try:
            yield
        finally:
            Node.on = on  # type: ignore[method-assign]
