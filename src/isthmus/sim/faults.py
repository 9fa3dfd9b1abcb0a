"""What goes wrong in a simulation, and when: a script, so that the same run can be had again."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from isthmus.errors import ConfigError
from isthmus.types import NS_PER_S


class LinkFault(msgspec.Struct, frozen=True):
    """The link between two clusters has `factor` of its rate from `start_s` to `stop_s`, both ways; 0: it is down.

    Where faults of one link overlap, the smallest factor holds.
    """

    one: str
    other: str
    start_s: float
    stop_s: float
    factor: float = 0.0

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.one, self.other))


class NodeFault(msgspec.Struct, frozen=True):
    """A node, or all nodes of a cluster of that name, dies at `start_s` and joins again, empty, at `stop_s`."""

    name: str
    start_s: float
    stop_s: float


class SessionFault(msgspec.Struct, frozen=True):
    """What two nodes, or any nodes of two clusters, say to each other takes `delay_s` longer from `start_s` to
    `stop_s`. Infinite: their sessions end at `start_s`, and none can be opened until `stop_s`."""

    one: str
    other: str
    start_s: float
    stop_s: float
    delay_s: float = math.inf


class DiskFault(msgspec.Struct, frozen=True):
    """The SSD of a node, or of all nodes of a cluster, takes and gives nothing from `start_s` to `stop_s`."""

    name: str
    start_s: float
    stop_s: float


Names = tuple[str, ...]
"""Of a node and its cluster."""


class Faults(msgspec.Struct, frozen=True):
    """All that goes wrong in one simulation, its times counted from 0 of the workload's."""

    links: tuple[LinkFault, ...] = ()
    nodes: tuple[NodeFault, ...] = ()
    sessions: tuple[SessionFault, ...] = ()
    disks: tuple[DiskFault, ...] = ()

    def factor(self, ends: frozenset[str], now: int) -> float:
        """Of the rate of the link between these clusters."""
        return min(
            (fault.factor for fault in self.links if fault.ends == ends and _holds(fault, now)), default=1.0
        )

    def is_dead(self, names: Names, now: int) -> bool:
        return any(fault.name in names and _holds(fault, now) for fault in self.nodes)

    def has_disk(self, names: Names, now: int) -> bool:
        return not any(fault.name in names and _holds(fault, now) for fault in self.disks)

    def delay_ns(self, one: Names, other: Names, now: int) -> int | None:
        """Of what one node says to another now; None: it cannot."""
        delay_s = max(
            (
                fault.delay_s
                for fault in self.sessions
                if _holds(fault, now)
                and ((fault.one in one and fault.other in other) or (fault.one in other and fault.other in one))
            ),
            default=0.0,
        )
        return None if math.isinf(delay_s) else int(delay_s * NS_PER_S)

    def check(self, links: Iterable[tuple[str, str]], names: Iterable[str]) -> None:
        """Raises ConfigError for a fault of nothing there is. `links`: their ends; `names`: of nodes and clusters."""
        ends = dict.fromkeys(map(frozenset, links))
        for fault in self.links:
            if fault.ends not in ends:
                have = ", ".join(":".join(sorted(each)) for each in ends) or "none"
                raise ConfigError(f"--link-fault {fault.one}:{fault.other}: no such link; there are: {have}")
        known = dict.fromkeys(names)
        named = [("--node-fault", fault.name) for fault in self.nodes]
        named += [("--disk-fault", fault.name) for fault in self.disks]
        named += [("--session-fault", name) for each in self.sessions for name in (each.one, each.other)]
        for option, name in named:
            if name not in known:
                have = ", ".join(known)
                raise ConfigError(f"{option} {name}: no node or cluster has that name; there are: {have}")

    def times(self) -> list[int]:
        """When anything changes, in ns, ascending."""
        faults: tuple[Fault, ...] = (*self.links, *self.nodes, *self.sessions, *self.disks)
        ends = {_ns(end) for fault in faults for end in (fault.start_s, fault.stop_s)}
        return sorted(end for end in ends if end < _ns(_NEVER_S))


_NEVER_S = 1e9


Fault = LinkFault | NodeFault | SessionFault | DiskFault


def _ns(time_s: float) -> int:
    return int(min(time_s, _NEVER_S) * NS_PER_S)


def _holds(fault: Fault, now: int) -> bool:
    return _ns(fault.start_s) <= now < _ns(fault.stop_s)


def link_fault(text: str) -> LinkFault:
    """`dense:local:60:120:0.2`: ends of the link, start, stop (s, `inf` for never), factor. Raises ConfigError."""
    shape = "ONE:OTHER:START:STOP:FACTOR, e.g. dense:local:60:120:0.2"
    parts = _parts("--link-fault", text, 5, shape)
    start, stop = _span("--link-fault", text, parts[2:4], shape)
    factor = _number("--link-fault", text, parts[4], shape)
    if not 0 <= factor <= 1:
        raise ConfigError(f"--link-fault {text}: a factor is from 0 (down) to 1; write {shape}")
    return LinkFault(parts[0], parts[1], start, stop, factor)


def node_fault(text: str) -> NodeFault:
    """`dense-prefill-0:60:120`: a node or a cluster, start, stop (s, `inf` for never). Raises ConfigError."""
    shape = "NAME:START:STOP, e.g. dense-prefill-0:60:120"
    parts = _parts("--node-fault", text, 3, shape)
    return NodeFault(parts[0], *_span("--node-fault", text, parts[1:], shape))


def disk_fault(text: str) -> DiskFault:
    """`prefill-0:60:120`: a node or a cluster, start, stop (s, `inf` for never). Raises ConfigError."""
    shape = "NAME:START:STOP, e.g. prefill-0:60:120"
    parts = _parts("--disk-fault", text, 3, shape)
    return DiskFault(parts[0], *_span("--disk-fault", text, parts[1:], shape))


def session_fault(text: str) -> SessionFault:
    """`prefill-0:decode-1:60:120:0.5`: two nodes or clusters, start, stop, delay (s, `inf` for cut). Raises
    ConfigError."""
    shape = "ONE:OTHER:START:STOP:DELAY, e.g. prefill-0:decode-1:60:120:0.5, inf to cut it"
    parts = _parts("--session-fault", text, 5, shape)
    start, stop = _span("--session-fault", text, parts[2:4], shape)
    delay = _number("--session-fault", text, parts[4], shape)
    if delay < 0:
        raise ConfigError(f"--session-fault {text}: a delay is 0 or more; write {shape}")
    return SessionFault(parts[0], parts[1], start, stop, delay)


def _parts(option: str, text: str, count: int, shape: str) -> list[str]:
    parts = text.split(":")
    if len(parts) != count:
        raise ConfigError(f"{option} {text}: write {shape}")
    return parts


def _span(option: str, text: str, parts: list[str], shape: str) -> tuple[float, float]:
    start, stop = (_number(option, text, part, shape) for part in parts)
    if not (0 <= start < stop and math.isfinite(start)):
        raise ConfigError(f"{option} {text}: it must stop after it starts; write {shape}")
    return start, stop


def _number(option: str, text: str, part: str, shape: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"{option} {text}: {part!r} is no number; write {shape}")
    return value
