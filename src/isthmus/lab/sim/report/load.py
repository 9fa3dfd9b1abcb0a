"""Load of the pools over time: queue and work of prefill, batches and KV of decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from isthmus.core.types import Role
from isthmus.lab.sim.records import Result
from isthmus.lab.sim.report import series
from isthmus.lab.sim.report.charts import Picture, Plot, draw_x_grid, draw_x_labels, draw_y_axis
from isthmus.lab.sim.report.scales import Scale, amount, clock, nice_high, seconds, ticks, time_ticks
from isthmus.lab.sim.report.series import Bins, Curve

_WIDTH, _LEFT, _RIGHT = 1000, 76, 868
_ROW, _PLOT = 128, 84
_BINS = 240


class Row(NamedTuple):
    title: str
    curve: Curve
    kind: str
    capacity: float = 0.0


def load_figure(result: Result) -> str:
    """Four curves over one time axis. Filled: the mean of each bin; line: the largest value in it."""
    bins = bins_of(result)
    return rows_figure("load", "Load by pool over time", _rows(result, bins), bins)


def rows_figure(name: str, title: str, rows: Sequence[Row], bins: Bins) -> str:
    """Curves one below the other, over one time axis."""
    picture = Picture(
        name,
        _WIDTH,
        _ROW * len(rows) + 8,
        title=title,
        description="; ".join(f"{row.title}: {_in_words(row.curve)}" for row in rows),
    )
    span_s = bins.span_s
    times = time_ticks(span_s)
    plot = None
    for number, row in enumerate(rows):
        plot = _draw_row(picture, row, bins, times, top=_ROW * number)
    if plot is not None:
        draw_x_labels(picture, plot, times, lambda time_s: clock(time_s, span_s))
    return picture.markup()


def bin_length(result: Result) -> str:
    """How long one bin of the load figure lasts, in words."""
    return seconds(bins_of(result).length_s)


def bins_of(result: Result) -> Bins:
    return Bins.covering(result.start_ns, result.end_ns, _BINS)


def _rows(result: Result, bins: Bins) -> list[Row]:
    roles = [node.role for node in result.nodes]
    prefill_nodes = roles.count(Role.PREFILL) + roles.count(Role.MIXED)

    def binned(changes: list[series.Change]) -> Curve:
        return series.binned(changes, bins)

    return [
        Row("Requests waiting for prefill", binned(series.prefill_queue(result)), "prefill"),
        Row(
            f"Prefill nodes at work, of {prefill_nodes}",
            binned(series.prefill_nodes_at_work(result)),
            "prefill",
            prefill_nodes,
        ),
        Row(
            "Requests waiting for decode (KV on its way, or no room)",
            binned(series.waiting_for_decode(result)),
            "decode",
        ),
        Row("Requests in decode batches", binned(series.decoding(result)), "decode"),
        Row("KV tokens of requests in decode batches", binned(series.decode_tokens(result)), "decode"),
    ]


def _draw_row(picture: Picture, row: Row, bins: Bins, times: Sequence[float], *, top: int) -> Plot:
    high = nice_high(max(row.capacity, *row.curve.largest), 3)
    base = top + _ROW - 14
    plot = Plot(Scale(0, bins.span_s, _LEFT, _RIGHT), Scale(0, high, base, base - _PLOT))
    draw_x_grid(picture, plot, times)
    draw_y_axis(picture, plot, ticks(0, high, 3), amount)
    picture.text(_LEFT, base - _PLOT - 10, row.title, kind="row-title")
    edges = [plot.x(bins.length_s * index) for index in range(bins.count + 1)]
    picture.area(edges, [plot.y(value) for value in row.curve.mean], plot.bottom, f"area {row.kind}")
    picture.steps(edges, [plot.y(value) for value in row.curve.largest], f"line thin {row.kind}")
    if row.capacity:
        picture.line(plot.point(0, row.capacity), plot.point(bins.span_s, row.capacity), "limit")
    picture.text(_RIGHT + 10, base - _PLOT / 2 - 4, f"mean {amount(_mean(row.curve))}", kind="label")
    picture.text(_RIGHT + 10, base - _PLOT / 2 + 12, f"largest {amount(max(row.curve.largest))}", kind="label")
    return plot


def _mean(curve: Curve) -> float:
    return sum(curve.mean) / len(curve.mean)


def _in_words(curve: Curve) -> str:
    return f"mean {amount(_mean(curve))}, largest {amount(max(curve.largest))}"
