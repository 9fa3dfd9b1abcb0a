"""From records to curves over time: how many requests were where, averaged over bins of equal length.

A curve is a list of changes `(time_ns, jump, slope)`: then its value jumps, and its growth per ns changes.
Sorted and walked over once, they give every bin its mean and its largest value.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import msgspec

from isthmus.core.types import NS_PER_S, Role
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result
from isthmus.lab.sim.spread import share
from isthmus.lab.sim.summary import STAGES, Summary, within_limits
from isthmus.lab.sim.summary import to_json as figures_json

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


# What the charts of a run show, in numbers: plain values, which `isthmus simulate --json` writes too.
#
# All bins of a run have one length and begin with its first arrival.


_MOST_BINS = 120
_TIME_BINS = 60
_MOST_LIMITS = 3
_LOWEST_S = 1e-6
OUTCOMES = (
    "inside limits",
    "missed a limit",
    *(f"refused at {stage}" for stage in STAGES),
    "failed",
    "unfinished",
)
"""What may become of a request, good ones first."""


class CurveRow(msgspec.Struct, frozen=True):
    """A curve over time: mean and largest value of each bin. `most`: where it ends, 0 for nowhere."""

    title: str
    mean: list[float]
    largest: list[float]
    most: int = 0


class Times(msgspec.Struct, frozen=True):
    """`counts[i]` requests took from `edges_s[i]` to `edges_s[i + 1]`. `limits`: in seconds, with the share inside;
    of more than three, the lowest and the highest. `num_limits`: how many different ones there are."""

    edges_s: list[float]
    counts: list[int]
    limits: list[tuple[float, float]]
    num_limits: int

    def __post_init__(self) -> None:
        if len(self.edges_s) != len(self.counts) + 1 or min(self.edges_s) <= 0 or sum(self.counts) <= 0:
            raise ValueError("times need counts, and one edge above 0 more than those")

    def shares(self) -> list[float]:
        """Of the requests, that took at most as long as each edge."""
        return [count / sum(self.counts) for count in accumulate(self.counts, initial=0)]


class Curves(msgspec.Struct, frozen=True):
    """`outcomes`: requests by what became of them, in the bin of their arrival; `refused`: by stage, in that of the
    refusal. `prompt_tokens`: of the prefills that began in a bin; `cached_tokens`: those found in caches."""

    bin_s: float
    load: list[CurveRow]
    ttft: Times | None
    tbt: Times | None
    outcomes: dict[str, list[int]]
    refused: dict[str, list[int]]
    prompt_tokens: list[int]
    cached_tokens: dict[str, list[int]]

    def __post_init__(self) -> None:
        rows = (row.mean for row in self.load)
        curves: list[Sequence[float]] = [*rows, *self.outcomes.values(), *self.cached_tokens.values()]
        if self.bin_s <= 0 or not self.prompt_tokens or "all" not in self.cached_tokens:
            raise ValueError("curves need bins, and cached_tokens those of all caches")
        if any(len(each) != len(self.prompt_tokens) for each in curves):
            raise ValueError("curves need as many bins as each other")

    def times(self, unit_s: float) -> list[float]:
        """Where bins begin, and where the last one ends, in the unit."""
        return [self.bin_s * at / unit_s for at in range(len(self.prompt_tokens) + 1)]

    def hits(self, source: str, unit_s: float) -> tuple[list[float], list[float | None]]:
        """The middles of bins, and the share of prompt tokens that the caches had."""
        shares = zip(self.cached_tokens[source], self.prompt_tokens, strict=True)
        middles = [self.bin_s * (at + 0.5) / unit_s for at in range(len(self.prompt_tokens))]
        return middles, [part / whole if whole else None for part, whole in shares]

    def hit_rate(self, source: str) -> float:
        return share(sum(self.cached_tokens[source]), sum(self.prompt_tokens))


def curves_of(result: Result) -> Curves:
    """The curves of a finished simulation."""
    bins = bins_of(result)
    records = result.records
    first = [each for each in records if each.first_token_ns >= 0]
    gaps = [
        each for each in records if each.status is RequestStatus.COMPLETED and each.request.output_tokens > 1
    ]
    refused = [each for each in records if each.status is RequestStatus.REFUSED]
    started = [each for each in records if each.prefill_start_ns >= 0]
    sources = {"all": "cached_tokens", "other nodes": "fetched_tokens", "SSD": "disk_tokens"}
    cached = {name: _summed(bins, started, attrgetter(field)) for name, field in sources.items()}
    return Curves(
        bin_s=bins.length_s,
        load=_load(result, bins),
        ttft=_times(
            [each.first_token_ns - each.arrival_ns for each in first], [each.ttft_limit_ns for each in first]
        ),
        tbt=_times([each.tbt_ns for each in gaps], [each.tbt_limit_ns for each in gaps]),
        outcomes=_counted(records, bins, lambda each: each.arrival_ns),
        refused=_counted(refused, bins, lambda each: each.end_ns),
        prompt_tokens=_summed(bins, started, attrgetter("request.num_tokens")),
        cached_tokens={name: tokens for name, tokens in cached.items() if name == "all" or any(tokens)},
    )


def to_json(summary: Summary, curves: Curves) -> bytes:
    """The figures, indented, and after them the curves on one line."""
    figures = figures_json(summary).rstrip().removesuffix(b"}").rstrip()
    return figures + b',\n "curves": ' + msgspec.json.encode(curves) + b"\n}\n"


def bins_of(result: Result) -> Bins:
    return Bins.covering(result.start_ns, result.end_ns, _MOST_BINS)


def crossings(result: Result) -> list[CurveRow]:
    """Rate and queue of every link between clusters that anything crossed, and the threshold where it changed."""
    if not result.link_samples:
        return []
    bins, rows = bins_of(result), []
    for at, link in enumerate([link for link in result.links if link.kind == "cluster"]):
        if link.bytes_moved:
            limit = 8 * link.bytes_per_s / 1e9
            rows.append(_row(f"{link.name}, Gbps of {limit:,.4g}", binned(_gbps(result, at), bins)))
            rows.append(_row(f"{link.name}, MB computed and not sent", binned(_queued(result, at), bins)))
    if len(result.thresholds) > 1:
        steps = _steps([(change.at_ns, float(change.threshold or 0)) for change in result.thresholds])
        rows.append(_row("Threshold, tokens (0 also where nothing is offloaded)", binned(steps, bins)))
    return rows


def _load(result: Result, bins: Bins) -> list[CurveRow]:
    roles = [node.role for node in result.nodes]
    num_prefill = roles.count(Role.PREFILL) + roles.count(Role.MIXED)
    changes = (
        ("Requests waiting for prefill", prefill_queue(result), 0),
        ("Prefill nodes at work", prefill_nodes_at_work(result), num_prefill),
        ("Requests waiting for decode (KV on its way, or no room)", waiting_for_decode(result), 0),
        ("Requests in decode batches", decoding(result), 0),
        ("KV tokens of requests in decode batches", decode_tokens(result), 0),
    )
    return [_row(title, binned(found, bins), most) for title, found, most in changes]


def _row(title: str, curve: BinnedCurve, most: int = 0) -> CurveRow:
    mean, largest = ([float(f"{value:.5g}") for value in values] for values in curve)
    return CurveRow(title, mean, largest, most)


def _times(times_ns: Sequence[float], limits_ns: Sequence[int]) -> Times | None:
    """None of none."""
    if not times_ns:
        return None
    ordered = sorted(max(_LOWEST_S, time_ns / NS_PER_S) for time_ns in times_ns)
    low, high = ordered[0] / 1.05, ordered[-1] * 1.05
    edges_s = [float(f"{low * (high / low) ** (index / _TIME_BINS):.5g}") for index in range(_TIME_BINS + 1)]
    cuts = [0, *(bisect.bisect_left(ordered, edge) for edge in edges_s[1:-1]), len(ordered)]
    limits = sorted({limit_ns / NS_PER_S for limit_ns in limits_ns if limit_ns > 0})
    shown = limits if len(limits) <= _MOST_LIMITS else [limits[0], limits[-1]]
    within = [(limit, bisect.bisect_right(ordered, limit) / len(ordered)) for limit in shown]
    return Times(edges_s, [last - first for first, last in pairwise(cuts)], within, len(limits))


def _counted(
    records: Iterable[RequestRecord], bins: Bins, when: Callable[[RequestRecord], int]
) -> dict[str, list[int]]:
    """How many records of each outcome there are in a bin, in the order of `OUTCOMES`."""
    counts: dict[str, list[int]] = {}
    for record in records:
        counts.setdefault(_outcome(record), [0] * bins.count)[bins.index(when(record))] += 1
    order = [*OUTCOMES, *sorted(set(counts) - set(OUTCOMES))]
    return {name: counts[name] for name in order if name in counts}


def _outcome(record: RequestRecord) -> str:
    if record.status is RequestStatus.COMPLETED:
        return "inside limits" if within_limits(record) else "missed a limit"
    return f"refused at {record.stage}" if record.status is RequestStatus.REFUSED else record.status.value


def _summed(bins: Bins, started: Iterable[RequestRecord], tokens: Callable[[RequestRecord], int]) -> list[int]:
    """Tokens of the prefills that began in each bin."""
    sums = [0] * bins.count
    for record in started:
        sums[bins.index(record.prefill_start_ns)] += tokens(record)
    return sums


def _gbps(result: Result, link: int) -> list[Change]:
    """The mean rate of each period, 0 after the last."""
    before, values = 0, []
    for sample in result.link_samples:
        values.append((before, 8 * sample.sent_bytes[link] / max(1, sample.at_ns - before)))
        before = sample.at_ns
    return _steps([*values, (before, 0.0)])


def _queued(result: Result, link: int) -> list[Change]:
    """What was queued at the end of each period, taken to hold until the next one's."""
    samples = result.link_samples
    values = [(sample.at_ns, sample.queued_bytes[link] / 1e6) for sample in samples]
    return _steps([*values, (samples[-1].at_ns + 1, 0.0)])


def _steps(values: Sequence[tuple[int, float]]) -> list[Change]:
    """A curve that has each value from its time on."""
    changes, before = [], 0.0
    for time, value in values:
        changes.append((time, value - before, 0.0))
        before = value
    return changes
