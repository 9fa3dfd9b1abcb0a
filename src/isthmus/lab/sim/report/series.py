"""From records to curves over time: how many requests were where, averaged over bins of equal length.

A curve is a list of changes `(time_ns, jump, slope)`: then its value jumps, and its growth per ns changes.
Sorted and walked over once, they give every bin its mean and its largest value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result

Change = tuple[int, float, float]
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Bins:
    """`count` bins of `length_ns` each, the first from `start_ns`."""

    start_ns: int
    length_ns: int
    count: int

    @classmethod
    def covering(cls, start_ns: int, end_ns: int, most: int) -> Bins:
        """At most `most` bins of a round length over `[start_ns, end_ns)`; the last may reach beyond."""
        length_ns = max(1, round(_round_time((end_ns - start_ns) / NS_PER_S / most) * NS_PER_S))
        return cls(start_ns, length_ns, max(1, -(-(end_ns - start_ns) // length_ns)))

    @property
    def length_s(self) -> float:
        return self.length_ns / NS_PER_S

    def edge(self, index: int) -> int:
        """Where bin `index` starts."""
        return self.start_ns + self.length_ns * index

    def index(self, time_ns: int) -> int:
        """The bin of a time; times outside belong to the first or the last bin."""
        return min(self.count - 1, max(0, (time_ns - self.start_ns) // self.length_ns))


class BinnedCurve(NamedTuple):
    """A binned curve: each bin's mean and largest value."""

    mean: list[float]
    largest: list[float]


def presence(intervals: Iterable[Interval]) -> list[Change]:
    """How many half-open intervals hold a time."""
    changes: list[Change] = []
    for start_ns, end_ns in intervals:
        if end_ns > start_ns:
            changes.append((start_ns, 1, 0))
            changes.append((end_ns, -1, 0))
    return changes


def binned(changes: list[Change], bins: Bins) -> BinnedCurve:
    """Mean and largest value of a curve in each bin; it is 0 before its first change. Sorts `changes`."""
    changes.sort()
    mean: list[float] = []
    largest: list[float] = []
    value = slope = 0.0
    now_ns = bins.start_ns
    position = 0
    for index in range(bins.count):
        end_ns = bins.edge(index + 1)
        area = top = 0.0
        while True:
            changing = position < len(changes) and changes[position][0] < end_ns
            stop_ns = max(now_ns, changes[position][0]) if changing else end_ns
            if stop_ns > now_ns:  # a value counts only if it lasted
                after = value + slope * (stop_ns - now_ns)
                area += (value + after) / 2 * (stop_ns - now_ns)
                top = max(top, value, after)
                value, now_ns = after, stop_ns
            if not changing:
                break
            value += changes[position][1]
            slope += changes[position][2]
            position += 1
        mean.append(max(area, 0.0) / bins.length_ns)
        largest.append(top)
    return BinnedCurve(mean, largest)


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The union of half-open intervals, in ascending order."""
    union: list[Interval] = []
    for start_ns, end_ns in sorted(intervals):
        if union and start_ns <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end_ns))
        elif end_ns > start_ns:
            union.append((start_ns, end_ns))
    return union


def prefill_queue(result: Result) -> list[Change]:
    """Requests that have arrived and whose prefill has not begun."""
    return presence((each.arrival_ns, _until(each.prefill_start_ns, each, result)) for each in result.records)


def prefill_nodes_at_work(result: Result) -> list[Change]:
    """Nodes with at least one prefill under way."""
    by_node: dict[int, list[Interval]] = {}
    for each in result.records:
        if each.prefill_start_ns >= 0:
            interval = (each.prefill_start_ns, _until(each.first_token_ns, each, result))
            by_node.setdefault(each.prefill, []).append(interval)
    return presence(interval for intervals in by_node.values() for interval in merged(intervals))


def waiting_for_decode(result: Result) -> list[Change]:
    """Requests between their first token and the batch: KV on its way, or waiting for room."""
    return presence(
        (each.first_token_ns, _until(each.joined_ns, each, result))
        for each in result.records
        if each.first_token_ns >= 0
    )


def decoding(result: Result) -> list[Change]:
    """Requests in a decode batch."""
    return presence(
        (each.joined_ns, _until(-1, each, result)) for each in result.records if each.joined_ns >= 0
    )


def decode_tokens(result: Result) -> list[Change]:
    """KV tokens of the requests in decode batches: the prompt, growing evenly to prompt and output at the end.

    A request that did not complete counts its prompt alone: how far it got is not in its record.
    """
    changes: list[Change] = []
    for each in result.records:
        if each.joined_ns < 0:
            continue
        end_ns = _until(-1, each, result)
        if end_ns <= each.joined_ns:
            continue
        grown = each.request.output_tokens if each.status is RequestStatus.COMPLETED else 0
        slope = grown / (end_ns - each.joined_ns)
        changes.append((each.joined_ns, each.request.num_tokens, slope))
        changes.append((end_ns, -(each.request.num_tokens + grown), -slope))
    return changes


def _until(station_ns: int, record: RequestRecord, result: Result) -> int:
    """When a request left for a station: on reaching it, else when it ended, else never."""
    if station_ns >= 0:
        return station_ns
    return record.end_ns if record.end_ns >= 0 else result.end_ns


def _round_time(at_least_s: float) -> float:
    """The next round length of time: 1, 2 or 5 of a power of ten up to 10 s and from a day on, between them 15 s, 30 s,
    1 min ..."""
    if 10 < at_least_s <= _LONG_S[-1]:
        return next(each for each in _LONG_S if each >= at_least_s)
    unit_s = 1 if at_least_s <= 10 else 86_400
    if at_least_s <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(at_least_s / unit_s) + 1e-9)
    return unit_s * next(
        part * power for part in (1, 2, 5, 10) if part * power * unit_s >= at_least_s * (1 - 1e-9)
    )


_LONG_S = (
    *(15, 30),
    *(60 * each for each in (1, 2, 5, 10, 15, 30)),
    *(3600 * each for each in (1, 2, 3, 6, 12, 24)),
)
