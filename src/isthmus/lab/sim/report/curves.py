"""What the charts of a run show, in numbers: plain values, which `isthmus simulate --json` writes too.

All bins of a run have one length and begin with its first arrival.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter

import msgspec

from isthmus.core.types import NS_PER_S, Role
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result
from isthmus.lab.sim.report import series
from isthmus.lab.sim.report.series import BinnedCurve, Bins, Change
from isthmus.lab.sim.spread import share
from isthmus.lab.sim.summary import STAGES, Summary, within_limits
from isthmus.lab.sim.summary import to_json as figures_json

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
            rows.append(_row(f"{link.name}, Gbps of {limit:,.4g}", series.binned(_gbps(result, at), bins)))
            rows.append(
                _row(f"{link.name}, MB computed and not sent", series.binned(_queued(result, at), bins))
            )
    if len(result.thresholds) > 1:
        steps = _steps([(change.at_ns, float(change.threshold or 0)) for change in result.thresholds])
        rows.append(_row("Threshold, tokens (0 also where nothing is offloaded)", series.binned(steps, bins)))
    return rows


def _load(result: Result, bins: Bins) -> list[CurveRow]:
    roles = [node.role for node in result.nodes]
    num_prefill = roles.count(Role.PREFILL) + roles.count(Role.MIXED)
    changes = (
        ("Requests waiting for prefill", series.prefill_queue(result), 0),
        ("Prefill nodes at work", series.prefill_nodes_at_work(result), num_prefill),
        ("Requests waiting for decode (KV on its way, or no room)", series.waiting_for_decode(result), 0),
        ("Requests in decode batches", series.decoding(result), 0),
        ("KV tokens of requests in decode batches", series.decode_tokens(result), 0),
    )
    return [_row(title, series.binned(found, bins), most) for title, found, most in changes]


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
