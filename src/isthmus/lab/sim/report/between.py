"""What crossed between clusters: requests by the clusters they went through, links over time, the threshold."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.lab.sim.records import Result
from isthmus.lab.sim.report import series
from isthmus.lab.sim.report.load import Row, bins_of, rows_figure
from isthmus.lab.sim.report.scales import amount, percent, seconds, size
from isthmus.lab.sim.report.series import Bins, Change
from isthmus.lab.sim.spread import Spread
from isthmus.lab.sim.summary import Summary

ROUTE_HEAD = (
    "prefill > home",
    "requests",
    "uncached tokens",
    "TTFT",
    "queue",
    "waiting for KV",
    "prefill",
    "transfer",
    "TTFT P90",
    "with transfer P90",
)
LINK_HEAD = ("link", "moved", "mean rate", "utilisation", "busy")


def route_rows(summary: Summary) -> list[Sequence[str]]:
    """A row for each pair of clusters; times are means unless they say otherwise."""
    rows: list[Sequence[str]] = []
    for name, use in summary.by_route.items():
        parts = use.ttft_parts
        means = () if parts is None else (parts.queue, parts.load, parts.prefill, parts.transfer)
        times = ("" if use.ttft_s is None else seconds(use.ttft_s.mean), *map(seconds, means))
        rows.append(
            (
                name,
                f"{use.requests:,}",
                f"{use.uncached_tokens:,.0f}",
                *times,
                _p90(use.ttft_s),
                _p90(use.ready_s),
            )
        )
    return rows


def link_rows(summary: Summary) -> list[Sequence[str]]:
    return [
        (name, size(use.bytes_moved), f"{use.gbps:.2f} Gbps", percent(use.utilisation), percent(use.busy_share))
        for name, use in summary.between_clusters.items()
    ]


def threshold_text(summary: Summary) -> str:
    """The threshold in a sentence; empty if there is none."""
    use = summary.threshold
    if use is None:
        return ""
    if not use.changes:
        return f"Prompts with more than {_tokens(use.last)} uncached tokens were prefilled in another cluster."
    return (
        f"The threshold was {_tokens(use.first)} at first and {_tokens(use.last)} at last, between "
        f"{_tokens(use.least)} and {_tokens(use.most)}; it changed {use.changes} times, "
        f"{use.changes_per_min:.2f} times a minute and at most {use.most_changes_in_a_min} times within one."
    )


def links_figure(result: Result) -> str | None:
    """Rate and queue of every link that anything crossed, and the threshold; None where nothing was measured."""
    if not result.link_samples:
        return None
    bins = bins_of(result)
    rows = []
    for at, link in enumerate([link for link in result.links if link.kind == "cluster"]):
        if not link.bytes_moved:
            continue
        gbps, queued = _gbps(result, at), _queued(result, at)
        limit = 8 * link.bytes_per_s / 1e9
        rows.append(Row(f"{link.name}, Gbps of {amount(limit)}", series.binned(gbps, bins), "link"))
        rows.append(Row(f"{link.name}, MB computed and not sent", series.binned(queued, bins), "link"))
    rows += _threshold(result, bins)
    return rows_figure("between", "Links between clusters over time", rows, bins) if rows else None


def _threshold(result: Result, bins: Bins) -> list[Row]:
    """Only where it changed."""
    if len(result.thresholds) < 2:
        return []
    steps = [(change.at_ns, float(change.threshold or 0)) for change in result.thresholds]
    return [
        Row(
            "Threshold, tokens (0 also where nothing is offloaded)",
            series.binned(_steps(steps), bins),
            "prefill",
        )
    ]


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


def _tokens(threshold: int | None) -> str:
    return "infinite" if threshold is None else f"{threshold:,}"


def _p90(spread: Spread | None) -> str:
    return "–" if spread is None else seconds(spread.p90)
