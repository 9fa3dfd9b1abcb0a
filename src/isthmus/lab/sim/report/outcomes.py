"""Over time: what became of the requests, where they were refused, and how much of their prompts was cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from isthmus.lab.sim.records import RequestRecord, Result, Status
from isthmus.lab.sim.report.charts import (
    Picture,
    Plot,
    Point,
    draw_end_labels,
    draw_legend,
    draw_x_grid,
    draw_x_labels,
    draw_y_axis,
)
from isthmus.lab.sim.report.scales import Scale, amount, clock, nice_high, percent, ticks, time_ticks
from isthmus.lab.sim.report.series import Bins
from isthmus.lab.sim.summary import STAGES, within_limits

_KINDS = ("good", "missed", "refused-prefill", "refused-decode", "failed", "unfinished")


class _Outcome(NamedTuple):
    name: str
    kind: str
    counts: list[int]


def outcomes_figure(result: Result) -> str:
    """Requests by time of arrival, stacked by what became of them."""
    bins = outcome_bins(result)
    outcomes = _counted(result.records, bins, _outcome)
    return _stacked("outcomes", "What became of the requests, by time of arrival", outcomes, bins, width=1000)


def rejections_figure(result: Result) -> str | None:
    """Refusals by time and stage; None if nothing was refused."""
    bins = _half_width_bins(result)
    refused = [each for each in result.records if each.status is Status.REFUSED]
    if not refused:
        return None
    outcomes = _counted(refused, bins, _outcome, when=lambda record: record.end_ns)
    return _stacked("rejections", "Refused requests over time, by stage", outcomes, bins, width=490)


def outcome_bins(result: Result) -> Bins:
    return Bins.covering(result.start_ns, result.end_ns, 120)


def _half_width_bins(result: Result) -> Bins:
    return Bins.covering(result.start_ns, result.end_ns, 60)


def _outcome(record: RequestRecord) -> str:
    if record.status is Status.COMPLETED:
        return "inside limits" if within_limits(record) else "missed a limit"
    return f"refused at {record.stage}" if record.status is Status.REFUSED else record.status.value


def _arrival(record: RequestRecord) -> int:
    return record.arrival_ns


def _counted(
    records: Sequence[RequestRecord],
    bins: Bins,
    name_of: Callable[[RequestRecord], str],
    *,
    when: Callable[[RequestRecord], int] = _arrival,
) -> list[_Outcome]:
    """Counts per bin of every outcome there is, good ones first."""
    known = [
        "inside limits",
        "missed a limit",
        *(f"refused at {stage}" for stage in STAGES),
        "failed",
        "unfinished",
    ]
    counts: dict[str, list[int]] = {}
    for record in records:
        name = name_of(record)
        counts.setdefault(name, [0] * bins.count)[bins.index(when(record))] += 1
    order = [*known, *sorted(set(counts) - set(known))]
    return [
        _Outcome(name, _KINDS[index] if index < len(_KINDS) else "failed", counts[name])
        for index, name in enumerate(order)
        if name in counts
    ]


def _stacked(name: str, title: str, outcomes: Sequence[_Outcome], bins: Bins, *, width: int) -> str:
    totals = {outcome.name: sum(outcome.counts) for outcome in outcomes}
    description = "; ".join(f"{outcome}: {total}" for outcome, total in totals.items()) or "no requests"
    picture = Picture(name, width, 236, title=title, description=description)
    span_s = bins.span_s
    highest = max((sum(column) for column in zip(*(each.counts for each in outcomes), strict=True)), default=0)
    plot = Plot(Scale(0, span_s, 52, width - 16), Scale(0, nice_high(highest, 4), 210, 40))
    times = time_ticks(span_s, 8 if width > 600 else 5)
    draw_x_grid(picture, plot, times)
    draw_x_labels(picture, plot, times, lambda time_s: clock(time_s, span_s))
    draw_legend(picture, 52, 18, [(each.kind, f"{each.name}: {totals[each.name]:,}") for each in outcomes])
    below = [0] * bins.count
    bar_width = (plot.right - plot.left) / bins.count
    for outcome in outcomes:
        boxes = []
        for index, count in enumerate(outcome.counts):
            if count:
                top, base = plot.y(below[index] + count), plot.y(below[index])
                boxes.append((plot.left + index * bar_width + 0.5, top, bar_width - 1, base - top))
                below[index] += count
        picture.boxes(boxes, outcome.kind)
    draw_y_axis(picture, plot, ticks(0, plot.y.high, 4), amount)
    return picture.markup()


class _Source(NamedTuple):
    """A curve of the hit-rate figure: cached tokens of one kind in each bin."""

    label: str
    kind: str
    tokens: list[int]


def hits_figure(result: Result) -> str | None:
    """Share of prompt tokens that needed no computing, by the time the prefill began; None if none began."""
    started = [each for each in result.records if each.prefill_start_ns >= 0]
    if not started:
        return None
    bins = _half_width_bins(result)
    prompt = [0] * bins.count
    sources = [
        _Source("all", "prefill", [0] * bins.count),
        _Source("other nodes", "decode dashed", [0] * bins.count),
        _Source("SSD", "link dotted", [0] * bins.count),
    ]
    for each in started:
        index = bins.index(each.prefill_start_ns)
        prompt[index] += each.request.num_tokens
        parts = (each.cached_tokens, each.fetched_tokens, each.disk_tokens)
        for source, tokens in zip(sources, parts, strict=True):
            source.tokens[index] += tokens
    return _draw_hits(bins, prompt, [sources[0], *(each for each in sources[1:] if any(each.tokens))])


def _draw_hits(bins: Bins, prompt: list[int], sources: Sequence[_Source]) -> str:
    overall = [(sum(source.tokens) / sum(prompt), source) for source in sources]
    picture = Picture(
        "hits",
        490,
        236,
        title="Share of prompt tokens found in a cache, over time",
        description="; ".join(f"{source.label}: {percent(share)} overall" for share, source in overall),
    )
    span_s = bins.span_s
    plot = Plot(Scale(0, span_s, 52, 348), Scale(0, 1, 210, 20))
    times = time_ticks(span_s, 5)
    draw_x_grid(picture, plot, times)
    draw_x_labels(picture, plot, times, lambda time_s: clock(time_s, span_s))
    draw_y_axis(picture, plot, [0, 0.25, 0.5, 0.75, 1], lambda share: f"{100 * share:.0f} %")
    labels = []
    for share, source in overall:
        runs = _runs(plot, bins, prompt, source.tokens)
        picture.lines(runs, f"line {source.kind}")
        last = next(index for index in reversed(range(bins.count)) if prompt[index])
        labels.append((source.tokens[last] / prompt[last], f"{source.label} {percent(share)}", ""))
    draw_end_labels(picture, plot, labels)
    return picture.markup()


def _runs(plot: Plot, bins: Bins, prompt: list[int], tokens: list[int]) -> list[list[Point]]:
    """The points of a curve, broken where no prefill began; a lone point is drawn as a short dash."""
    runs: list[list[Point]] = [[]]
    for index in range(bins.count):
        if not prompt[index]:
            runs.append([])
            continue
        runs[-1].append(plot.point(bins.length_s * (index + 0.5), tokens[index] / prompt[index]))
    return [
        run if len(run) > 1 else [(run[0][0] - 2, run[0][1]), (run[0][0] + 2, run[0][1])] for run in runs if run
    ]
