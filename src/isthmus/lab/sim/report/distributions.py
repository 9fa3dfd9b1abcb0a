"""How TTFT and TBT are distributed: a histogram above its cumulative curve, the limit marked on both."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise

from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.records import Result, Status
from isthmus.lab.sim.report.charts import Picture, Plot, draw_limit, draw_x_grid, draw_x_labels, draw_y_axis
from isthmus.lab.sim.report.scales import (
    Scale,
    amount,
    log_range,
    log_ticks,
    nice_high,
    percent,
    seconds,
    ticks,
)
from isthmus.lab.sim.spread import nearest_rank

_WIDTH, _LEFT, _RIGHT = 490, 52, 464
_BINS = 56
_MOST_LIMITS = 3
_LOWEST_S = 1e-6


def ttft_figure(result: Result) -> str | None:
    """None if no request got a first token."""
    first = [each for each in result.records if each.first_token_ns >= 0]
    times_s = [(each.first_token_ns - each.arrival_ns) / NS_PER_S for each in first]
    return _figure("ttft", "Time to first token", times_s, limits_s([each.ttft_limit_ns for each in first]))


def tbt_figure(result: Result) -> str | None:
    """None if no request completed with two tokens or more."""
    gaps = [
        each for each in result.records if each.status is Status.COMPLETED and each.request.output_tokens > 1
    ]
    times_s = [each.tbt_ns / NS_PER_S for each in gaps]
    return _figure("tbt", "Time between tokens", times_s, limits_s([each.tbt_limit_ns for each in gaps]))


def limits_s(limits_ns: Sequence[int]) -> list[float]:
    """The different limits there are, ascending."""
    return sorted({limit_ns / NS_PER_S for limit_ns in limits_ns if limit_ns > 0})


def _figure(name: str, title: str, times_s: list[float], limits: list[float]) -> str | None:
    if not times_s:
        return None
    ordered = sorted(max(_LOWEST_S, time_s) for time_s in times_s)
    marked = limits if len(limits) <= _MOST_LIMITS else []
    low, high = log_range(min([ordered[0], *marked]), max([ordered[-1], *marked]))
    points = [(percent_, nearest_rank(ordered, percent_)) for percent_ in (50, 90, 99)]
    picture = Picture(
        name,
        _WIDTH,
        364,
        title=f"{title}: histogram and cumulative share",
        description=_in_words(ordered, points, limits),
    )
    x = Scale(low, high, _LEFT, _RIGHT, log=True)
    upper = _draw_histogram(picture, ordered, x)
    lower = _draw_shares(picture, ordered, points, x)
    for index, limit_s in enumerate(marked):
        label = f"limit {seconds(limit_s)}: {percent(_share_within(ordered, limit_s))} inside"
        draw_limit(picture, upper, limit_s, label, label_y=upper.top - 4 + 14 * index)
        picture.line((x(limit_s), lower.top), (x(limit_s), lower.bottom), "limit")
    return picture.markup()


def _in_words(ordered: Sequence[float], points: Sequence[tuple[int, float]], limits: Sequence[float]) -> str:
    words = [f"{amount(len(ordered))} requests, from {seconds(ordered[0])} to {seconds(ordered[-1])}"]
    words += [f"P{percent_} {seconds(value)}" for percent_, value in points]
    if len(limits) > _MOST_LIMITS:
        words.append(f"{len(limits)} different limits, from {seconds(limits[0])} to {seconds(limits[-1])}")
    else:
        words += [f"{percent(_share_within(ordered, limit))} inside {seconds(limit)}" for limit in limits]
    return "; ".join(words)


def _share_within(ordered: Sequence[float], limit_s: float) -> float:
    return bisect.bisect_right(ordered, limit_s) / len(ordered)


def _draw_histogram(picture: Picture, ordered: Sequence[float], x: Scale) -> Plot:
    edges_s = [x.inverse(index / _BINS) for index in range(_BINS + 1)]
    edges_s[-1] = x.high
    cuts = [0, *(bisect.bisect_left(ordered, edge) for edge in edges_s[1:-1]), len(ordered)]
    counts = [last - first for first, last in pairwise(cuts)]
    plot = Plot(x, Scale(0, nice_high(max(counts), 4), 162, 26))
    picture.text(0, 12, "requests", kind="row-title")
    draw_y_axis(picture, plot, ticks(0, plot.y.high, 4), amount)
    draw_x_grid(picture, plot, log_ticks(x.low, x.high))
    for index, count in enumerate(counts):
        if count:
            left, right, top = x(edges_s[index]), x(edges_s[index + 1]), plot.y(count)
            title = f"{seconds(edges_s[index])} to {seconds(edges_s[index + 1])}: {count} requests"
            picture.box((left + 0.5, top, right - left - 1, plot.bottom - top), "fill prefill", title=title)
    return plot


def _draw_shares(
    picture: Picture, ordered: Sequence[float], points: Sequence[tuple[int, float]], x: Scale
) -> Plot:
    plot = Plot(x, Scale(0, 1, 340, 190))
    draw_y_axis(picture, plot, [0, 0.25, 0.5, 0.75, 1], lambda share: f"{100 * share:.0f} %")
    marks = log_ticks(x.low, x.high)
    draw_x_grid(picture, plot, marks)
    draw_x_labels(picture, plot, marks, seconds)
    samples = [x.inverse(index / (4 * _BINS)) for index in range(4 * _BINS + 1)]
    picture.lines([[plot.point(value, _share_within(ordered, value)) for value in samples]], "line decode")
    for percent_, value in points:
        px, py = plot.point(value, percent_ / 100)
        picture.dot(px, py, "dot")
        at_left = px - _LEFT > 90
        picture.text(
            px - 7 if at_left else px + 7,
            py - 3 if at_left else py + 14,
            f"P{percent_} {seconds(value)}",
            kind="label",
            anchor="end" if at_left else "start",
        )
    return plot
