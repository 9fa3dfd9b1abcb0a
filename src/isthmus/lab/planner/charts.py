"""Charts of a plan: rate over split, over threshold and over bandwidth; TTFT in parts; formula beside simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from isthmus.lab.planner.answer import Answer, Simulated, Sustained, Trial
from isthmus.lab.sim.report.charts import (
    Picture,
    Plot,
    draw_end_labels,
    draw_legend,
    draw_limit,
    draw_x_grid,
    draw_x_labels,
    draw_y_axis,
    shorten,
    text_width,
)
from isthmus.lab.sim.report.scales import Scale, amount, log_range, log_ticks, nice_high, seconds, ticks

_WIDTH, _LEFT, _RIGHT, _HEIGHT, _TOP = 1000, 60, 820, 320, 34
_BAR_LEFT, _BAR_RIGHT, _ROW = 250, 850, 20
_HIGHEST = 1.8
"""Of the best rate: where curves that go to infinity are cut off."""
_REACH = 4
"""Of the best threshold: where the curves end, for beyond it they are flat."""
SHOWN = 0.8
"""The fraction of the formula whose TTFT is drawn."""


class Curve(NamedTuple):
    """Points by x; None: no value there. `kind`: its classes in the style sheet."""

    label: str
    kind: str
    points: Sequence[tuple[float, float | None]]


class Axis(NamedTuple):
    marks: Sequence[float]
    write: Callable[[float], str]
    log: bool = False


def split_figure(answer: Answer) -> str:
    """Rate over the number of prefill nodes (the paper's Figure 5a)."""
    points = answer.what_if.split
    curves = [
        Curve("own threshold", "line best", [(each.prefill, each.rate) for each in points]),
    ]
    if answer.what_if.threshold:
        at_best = [(each.prefill, each.rate_at_best) for each in points]
        paper = [(each.prefill, each.representative_at_best) for each in points]
        curves.append(Curve("best threshold", "line prefill dashed", at_best))
        curves.append(Curve("representative", "line decode dotted", paper))
    marks = [float(each.prefill) for each in points]
    axis = Axis(
        _thinned(marks),
        lambda prefill: f"{prefill:.0f} / {points[-1].prefill + points[-1].decode - prefill:.0f}",
    )
    return _curves("split", "Rate over the split: prefill / decode nodes at home", curves, axis, dots=True)


def threshold_figure(answer: Answer) -> str:
    """What each stage allows over the threshold, and the least of it (the paper's Figure 5b)."""
    best = answer.plans[0]
    reach = _REACH * (best.threshold or answer.what_if.threshold[-1].threshold or 1)
    points = [
        each for each in answer.what_if.threshold if each.threshold is not None and each.threshold <= reach
    ]
    x = [float(each.threshold or 0) for each in points]
    curves = [
        Curve("the least", "line best thick", list(zip(x, [each.rate for each in points], strict=True))),
        Curve(
            "remote compute", "line prefill dashed", list(zip(x, [each.remote for each in points], strict=True))
        ),
        Curve("link", "line wire dotted", list(zip(x, [each.link for each in points], strict=True))),
        Curve("local compute", "line local dashed", list(zip(x, [each.local for each in points], strict=True))),
        Curve("decode", "line decode dotted", [(at, best.exact.decode) for at in x]),
    ]
    high = nice_high(_HIGHEST * max(best.exact.rate, best.exact.decode))
    axis = Axis(ticks(0, max(1.0, x[-1]), 8), lambda tokens: f"{tokens:,.0f}")
    mark = None if best.threshold is None else (float(best.threshold), f"{best.threshold:,} tokens")
    return _curves("threshold", "Rate over the threshold, tokens", curves, axis, high=high, mark=mark)


def bandwidth_figure(answer: Answer) -> str:
    """The best rate over the links' bandwidth."""
    points = answer.what_if.bandwidth
    low, high = log_range(points[0].gbps, points[-1].gbps)
    curves = [
        Curve("KV as it is", "line best", [(each.gbps, each.rate) for each in points]),
        Curve("8-bit KV", "line link dashed", [(each.gbps, each.int8) for each in points]),
        Curve("representative", "line decode dotted", [(each.gbps, each.representative) for each in points]),
    ]
    axis = Axis(log_ticks(low, high), lambda gbps: f"{amount(gbps)} Gbps", log=True)
    return _curves("bandwidth", "Rate over the bandwidth of the links", curves, axis, dots=True)


def parts_figure(found: Simulated) -> str:
    """Mean TTFT in parts: waiting, prefill; and the way to the decode batch after it."""
    trials = [trial for trial in found.trials if trial.ttft is not None and trial.fraction == SHOWN]
    bars = [(f"{trial.plan}, {trial.arrivals}", _parts(trial)) for trial in trials]
    legend = [("faint prefill", "queue"), ("fill prefill", "prefill"), ("fill decode", "then to decode")]
    return _bars(
        "parts", f"Mean time to first token in parts, at {SHOWN:g} of the formula", bars, legend, seconds
    )


def sustained_figure(found: Simulated) -> str:
    """What the formula promises, and what was simulated within the limits."""
    bars = [(f"{each.plan}, {each.arrivals}", _gap(each)) for each in found.sustained]
    legend = [("fill good", "simulated"), ("faint decode", "what the formula adds")]
    return _bars("sustained", "Requests/s within the limits", bars, legend, amount)


def _parts(trial: Trial) -> list[tuple[float, str]]:
    parts = ((trial.queue, "faint prefill"), (trial.prefill, "fill prefill"), (trial.transfer, "fill decode"))
    return [(spread.mean, kind) for spread, kind in parts if spread is not None]


def _gap(each: Sustained) -> list[tuple[float, str]]:
    return [(each.rate, "fill good"), (max(0.0, each.formula - each.rate), "faint decode")]


def _curves(
    name: str,
    title: str,
    curves: Sequence[Curve],
    axis: Axis,
    *,
    high: float | None = None,
    mark: tuple[float, str] | None = None,
    dots: bool = False,
) -> str:
    """`high`: where the y axis ends, None as the curves need; `mark`: a place on the x axis and its label."""
    top = high or nice_high(max(y for curve in curves for _, y in curve.points if y is not None))
    description = "; ".join(f"{curve.label}: {_in_words(curve, axis)}" for curve in curves)
    picture = Picture(name, _WIDTH, _HEIGHT, title=title, description=description)
    first, last = min(axis.marks[0], curves[0].points[0][0]), max(axis.marks[-1], curves[0].points[-1][0])
    x = Scale(first, last if last > first else first + 1, _LEFT, _RIGHT, log=axis.log)
    plot = Plot(x, Scale(0, top, _HEIGHT - 40, _TOP))
    draw_x_grid(picture, plot, axis.marks)
    draw_y_axis(picture, plot, ticks(0, top), amount)
    draw_x_labels(picture, plot, axis.marks, axis.write)
    picture.text(_LEFT, _TOP - 16, "requests/s", kind="tick")
    for curve in curves:
        runs = _runs(curve.points, top)
        picture.lines([[plot.point(*point) for point in run] for run in runs], curve.kind)
        if dots:
            for run in runs:
                for point in run:
                    picture.dot(*plot.point(*point), "dot")
    if mark is not None:
        draw_limit(picture, plot, *mark, label_y=_TOP - 4)
    ends = [(_last(curve, top), curve.label, curve.kind) for curve in curves]
    draw_end_labels(picture, plot, ends)
    return picture.markup()


def _runs(points: Sequence[tuple[float, float | None]], top: float) -> list[list[tuple[float, float]]]:
    """Connected parts below the top of the chart, each up to where it leaves it."""
    runs: list[list[tuple[float, float]]] = [[]]
    before: tuple[float, float] | None = None
    for x, y in points:
        here = None if y is None else (x, y)
        if here is not None and here[1] <= top:
            if before is not None and before[1] > top:
                runs[-1].append(_cut(before, here, top))
            runs[-1].append(here)
        else:
            if here is not None and before is not None and before[1] <= top:
                runs[-1].append(_cut(before, here, top))
            runs.append([])
        before = here
    return [run for run in runs if run]


def _cut(one: tuple[float, float], other: tuple[float, float], y: float) -> tuple[float, float]:
    """Where the line between two points has the height y."""
    return one[0] + (other[0] - one[0]) * (y - one[1]) / (other[1] - one[1]), y


def _last(curve: Curve, top: float) -> float:
    return min(top, next((y for _, y in reversed(curve.points) if y is not None), 0.0))


def _in_words(curve: Curve, axis: Axis) -> str:
    known = [(x, y) for x, y in curve.points if y is not None]
    if not known:
        return "nothing"
    x, y = max(known, key=lambda point: point[1])
    return f"highest {amount(y)} at {axis.write(x)}, {amount(known[-1][1])} at {axis.write(known[-1][0])}"


def _thinned(marks: list[float]) -> list[float]:
    """Labels that do not touch."""
    return marks[:: max(1, -(-len(marks) // 12))]


def _bars(
    name: str,
    title: str,
    bars: Sequence[tuple[str, Sequence[tuple[float, str]]]],
    legend: Sequence[tuple[str, str]],
    write: Callable[[float], str],
) -> str:
    """Rows of parts side by side. Text after each: the parts, in order."""
    texts = [" + ".join(write(value) for value, _ in parts) for _, parts in bars]
    height = 34 + _ROW * len(bars)
    words = "; ".join(f"{label}: {text}" for (label, _), text in zip(bars, texts, strict=True))
    picture = Picture(name, _WIDTH, height + 30, title=title, description=words or "nothing to show")
    high = nice_high(max((sum(value for value, _ in parts) for _, parts in bars), default=0.0))
    plot = Plot(Scale(0, high, _BAR_LEFT, _BAR_RIGHT), Scale(0, 1, height, 30))
    marks = ticks(0, high)
    draw_legend(picture, _BAR_LEFT, 18, legend)
    draw_x_grid(picture, plot, marks)
    draw_x_labels(picture, plot, marks, write)
    for row, ((label, parts), text) in enumerate(zip(bars, texts, strict=True)):
        y, reached = 32 + _ROW * row, 0.0
        picture.text(_BAR_LEFT - 8, y + 12, shorten(label, 38), kind="label", anchor="end")
        for value, kind in parts:
            start, stop = plot.x(reached), plot.x(reached + value)
            reached += value
            if stop > start:
                picture.box((start, y + 2, stop - start, 12), kind, title=f"{label}: {text}")
        picture.text(min(plot.x(reached) + 6, _WIDTH - text_width(text)), y + 12, text, kind="tick")
    return picture.markup()
