"""Faults of a simulation: a script with times, so that a run can be repeated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, TypeVar

import msgspec

from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S


class _Fault(msgspec.Struct, frozen=True):
    """Syntax of a fault's option: an example, the largest value of its last field, and a sentence on that value."""

    option: ClassVar[str]
    example: ClassVar[str]
    most: ClassVar[float] = math.inf
    rule: ClassVar[str] = ""


class _At(_Fault, frozen=True):
    """A fault of a node, or of all nodes of a cluster, of that `name`."""

    name: str
    start_s: float
    stop_s: float

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.name,))


class _Between(_Fault, frozen=True):
    one: str
    other: str
    start_s: float
    stop_s: float

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.one, self.other))


class LinkFault(_Between, frozen=True):
    """Gives the link between two clusters `factor` of its rate, both ways; 0: it is down. Of overlapping faults the
    smallest factor holds."""

    option, example = "--link-fault", "dense:local:60:120:0.2"
    most, rule = 1.0, "a factor is from 0 (down) to 1"
    factor: float = 0.0


class NodeFault(_At, frozen=True):
    """The node dies at `start_s` and joins again, empty, at `stop_s`."""

    option, example = "--node-fault", "dense-prefill-0:60:120"


class Drain(_At, frozen=True):
    """The node is removed at `start_s`: it gets no new request, ends those that it has, and is gone then. It joins
    again, empty, at `stop_s`, or stays if it has not left by then."""

    option, example = "--drain", "dense-prefill-0:60:120"


class SessionFault(_Between, frozen=True):
    """Messages between two nodes, or between all nodes of two clusters, take `delay_s` longer. Infinite: their
    sessions end at `start_s`, and none can be opened until `stop_s`."""

    option, example = "--session-fault", "prefill-0:decode-1:60:120:0.5, inf to cut it"
    rule = "a delay is 0 or more"
    delay_s: float = math.inf


class DiskFault(_At, frozen=True):
    """The node's SSD can be neither read nor written."""

    option, example = "--disk-fault", "prefill-0:60:120"


Fault = TypeVar("Fault", LinkFault, NodeFault, Drain, SessionFault, DiskFault)

Names = tuple[str, ...]
"""Names of a node and its cluster."""


class Faults(msgspec.Struct, frozen=True):
    """All faults of one simulation; times count from 0 of the workload."""

    links: tuple[LinkFault, ...] = ()
    nodes: tuple[NodeFault, ...] = ()
    sessions: tuple[SessionFault, ...] = ()
    disks: tuple[DiskFault, ...] = ()
    drains: tuple[Drain, ...] = ()

    def factor(self, ends: frozenset[str], now: int) -> float:
        """Share of the rate that the link between these clusters has now."""
        return min([fault.factor for fault in _holding(self.links, now) if fault.ends == ends], default=1.0)

    def is_dead(self, names: Names, now: int) -> bool:
        return any(fault.name in names for fault in _holding(self.nodes, now))

    def is_unwanted(self, names: Names, now: int) -> bool:
        """Whether the node drains, or has drained."""
        return any(fault.name in names for fault in _holding(self.drains, now))

    def has_disk(self, names: Names, now: int) -> bool:
        return not any(fault.name in names for fault in _holding(self.disks, now))

    def delay_ns(self, one: Names, other: Names, now: int) -> int | None:
        """Delay of a message between two nodes now; None: no session."""
        delays_s = [
            fault.delay_s
            for fault in _holding(self.sessions, now)
            if (fault.one in one and fault.other in other) or (fault.one in other and fault.other in one)
        ]
        delay_s = max(delays_s, default=0.0)
        return None if math.isinf(delay_s) else int(delay_s * NS_PER_S)

    def check(self, links: Iterable[tuple[str, str]], names: Iterable[str]) -> None:
        """Raises ConfigError for a fault of nothing there is. `links`: their ends; `names`: of nodes and clusters."""
        ends = dict.fromkeys(map(frozenset, links))
        for link in self.links:
            if link.ends not in ends:
                have = ", ".join(":".join(sorted(each)) for each in ends) or "none"
                raise ConfigError(f"--link-fault {link.one}:{link.other}: no such link; there are: {have}")
        known = dict.fromkeys(names)
        others: tuple[_At | _Between, ...] = (*self.nodes, *self.drains, *self.disks, *self.sessions)
        for fault in others:
            for name in sorted(fault.ends - known.keys()):
                have = ", ".join(known)
                raise ConfigError(f"{fault.option} {name}: no node or cluster has that name; there are: {have}")

    def times(self) -> list[int]:
        """Times in ns at which a fault begins or ends, ascending."""
        faults: tuple[_At | _Between, ...] = (
            *self.links,
            *self.nodes,
            *self.drains,
            *self.sessions,
            *self.disks,
        )
        ends = {_ns(end) for fault in faults for end in (fault.start_s, fault.stop_s)}
        return sorted(end for end in ends if end < _ns(_NEVER_S))


_NEVER_S = 1e9


def _ns(time_s: float) -> int:
    return int(min(time_s, _NEVER_S) * NS_PER_S)


def _holding(faults: Iterable[Fault], now: int) -> list[Fault]:
    return [fault for fault in faults if _ns(fault.start_s) <= now < _ns(fault.stop_s)]


def read(kind: type[Fault], text: str) -> Fault:
    """Reads a fault from its option, e.g. `dense:local:60:120:0.2`: times in s, `inf` for never. Raises ConfigError."""
    option, fields, parts = kind.option, kind.__struct_fields__, text.split(":")
    shape = ":".join(field.removesuffix("_s").upper() for field in fields) + f", e.g. {kind.example}"
    if len(parts) != len(fields):
        raise ConfigError(f"{option} {text}: write {shape}")
    at = fields.index("start_s")
    numbers = [_number(part) for part in parts[at:]]
    for part, number in zip(parts[at:], numbers, strict=True):
        if math.isnan(number):
            raise ConfigError(f"{option} {text}: {part!r} is no number; write {shape}")
    start, stop = numbers[:2]
    if not (0 <= start < stop and math.isfinite(start)):
        raise ConfigError(f"{option} {text}: it must stop after it starts; write {shape}")
    if not 0 <= numbers[-1] <= kind.most:
        raise ConfigError(f"{option} {text}: {kind.rule}; write {shape}")
    return kind(*parts[:at], *numbers)  # type: ignore[arg-type]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
