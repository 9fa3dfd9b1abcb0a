"""Charts of one run, and of several in the same charts. Dashes, fillings and names say what colours say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle
from typing import Any

from isthmus.core.types import NS_PER_S, Role
from isthmus.facts import UNLIMITED
from isthmus.lab.sim.records import RequestRecord, Result
from isthmus.lab.sim.report.curves import OUTCOMES, Curves, Row, Times
from isthmus.lab.sim.report.gantt import describe, phases
from isthmus.lab.sim.report.page import Chart
from isthmus.lab.sim.report.words import amount, clock, percent, seconds, shorten, size
from isthmus.lab.sim.summary import link_utilisation

Trace = dict[str, Any]
Runs = Mapping[str, Curves]
"""Curves by the name of their run; the name of one alone is empty."""

LIMIT = {"color": "--red", "dash": "dash", "width": 1.5}
_SHARES = {"tickvals": [0, 0.25, 0.5, 0.75, 1], "tickformat": ".0%", "range": [0, 1.01]}
_STYLES = (("--blue", "solid"), ("--orange", "dash"), ("--purple", "dot"), ("--green", "dashdot"))
"""Of runs or sources in one chart."""
_HOLLOW = {"color": "--none", "line": {"color": "--grey", "width": 1}}
_MOST_LIMITS, _MOST_BARS = 3, 24


def line(name: str, x: Sequence[float], y: Sequence[float | None], color: str, dash: str = "solid") -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": color, "dash": dash},
    }


def bars(
    name: str, marks: Sequence[str], values: Sequence[float], marker: Mapping[str, Any], **more: Any
) -> Trace:
    """Horizontal ones; a mark is what its bar says when pointed at."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": values,
        "y": list(range(len(marks))),
        "marker": marker,
        "hovertext": marks,
        "hovertemplate": "%{hovertext}",
        **more,
    }


def bar_axes(labels: Sequence[tuple[str, str]], **x_axis: Any) -> dict[str, Any]:
    """The layout of horizontal bars, the first at the top: each with its name, short enough for a phone, and value."""
    ticks = [f"{shorten(name)}  {value}" for name, value in labels]
    y_axis = {"tickvals": list(range(len(ticks))), "ticktext": ticks, "autorange": "reversed"}
    height = 100 + 22 * max(2, len(ticks))
    return {"height": height, "hovermode": "closest", "xaxis": x_axis, "yaxis": y_axis, "showlegend": False}


def load(runs: Runs) -> list[Chart]:
    """A chart for each curve of the pools."""
    bin_s = {name: curves.bin_s for name, curves in runs.items()}
    alike = zip(*(curves.load for curves in runs.values()), strict=True)
    return [over_time(dict(zip(runs, rows, strict=True)), bin_s) for rows in alike]


def over_time(rows: Mapping[str, Row], bin_s: Mapping[str, float], color: str | None = None) -> Chart:
    """One curve of each run; of one run alone also the largest value of each bin. `color`: of that one."""
    (title, *_) = (row.title for row in rows.values())
    tone = color or ("--orange" if "decode" in title else "--blue")
    unit_s, axis = _clock(bin_s[name] * len(row.mean) for name, row in rows.items())
    traces, words = [], []
    for (name, row), (own, dash) in zip(rows.items(), cycle(_STYLES), strict=False):
        x = [bin_s[name] * at / unit_s for at in range(len(row.mean) + 1)]
        mean = line(name or "mean", x, _stepped(row.mean), own if name else tone, dash)
        traces.append(mean)
        if not name:
            mean |= {"fill": "tozeroy", "fillcolor": f"{tone}-pale"}
            largest = line("largest", x, _stepped(row.largest), tone)
            largest["line"]["width"] = 1
            traces.append(largest)
        if row.most:
            traces.append(line(f"all {row.most}", [x[0], x[-1]], [row.most] * 2, "--red", "dash"))
        means = amount(sum(row.mean) / len(row.mean))
        words.append(f"{name + ': ' if name else ''}mean {means}, largest {amount(max(row.largest))}")
    for trace in traces:
        trace["line"]["shape"] = "hv"
    layout = {"height": 210, "xaxis": axis, "yaxis": {"rangemode": "tozero"}}
    return Chart(title, f"{'; '.join(words)}.", traces, layout, time=True)


def latency(title: str, caption: str, runs: Mapping[str, Times | None], otherwise: str) -> Chart:
    """The share of requests that took no longer; of one run alone also how many took how long, and limits."""
    known = {name: times for name, times in runs.items() if times is not None}
    if not known:
        return Chart(title, otherwise, [], half=True)
    traces: list[Trace] = []
    shapes: list[dict[str, Any]] = []
    for (name, times), (color, dash) in zip(known.items(), cycle(_STYLES), strict=False):
        shares = [count / sum(times.counts) for count in accumulate(times.counts, initial=0)]
        curve = line(
            name or "share that took no longer", times.edges_s, shares, color if name else "--orange", dash
        )
        traces.append({**curve, "yaxis": "y2"})
        if name:
            continue
        widths = [right - left for left, right in zip(times.edges_s, times.edges_s[1:], strict=False)]
        ranges = [
            f"{seconds(at)} to {seconds(at + width)}" for at, width in zip(times.edges_s, widths, strict=False)
        ]
        traces.append(
            {
                "type": "bar",
                "name": "requests",
                "x": times.edges_s[:-1],
                "y": times.counts,
                "width": widths,
                "offset": 0,
                "marker": _filled("blue"),
                "hovertext": ranges,
                "textposition": "none",
                "hovertemplate": "%{hovertext}: %{y}",
            }
        )
        if len(times.limits) <= _MOST_LIMITS:
            shapes += [limit(at, f"limit {seconds(at)}: {percent(share)} inside") for at, share in times.limits]
        else:
            first, last = times.limits[0][0], times.limits[-1][0]
            caption += f" {len(times.limits)} different limits, from {seconds(first)} to {seconds(last)}."
    layout = {
        "xaxis": {"type": "log", "ticksuffix": "s", "exponentformat": "SI"},
        "yaxis": {"title": {"text": "requests"}, "rangemode": "tozero", "visible": len(traces) > len(known)},
        "yaxis2": {**_SHARES, "side": "right", "overlaying": "y", "showgrid": False, "automargin": True},
        "shapes": shapes,
    }
    return Chart(title, caption, traces, layout, half=True)


def limit(x: float, name: str) -> dict[str, Any]:
    """A line across the chart at a limit on its x axis, which the legend explains."""
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": LIMIT,
        "name": name,
        "showlegend": True,
    }


def outcomes(runs: Runs) -> Chart:
    """What became of the requests: of one run by time of arrival, of several in total."""
    title = "What became of the requests"
    if len(runs) == 1:
        (curves,) = runs.values()
        return _stacked(
            title,
            f"By time of arrival, in bins of {seconds(curves.bin_s)}.",
            curves,
            curves.outcomes,
            half=False,
        )
    totals = {
        run: {name: sum(counts) for name, counts in curves.outcomes.items()} for run, curves in runs.items()
    }
    traces = [
        bars(name, [f"{run}, {name}: {each.get(name, 0):,}" for run, each in totals.items()],
             [each.get(name, 0) for each in totals.values()], _marker(name))
        for name in dict.fromkeys(name for each in totals.values() for name in each)
    ]  # fmt: skip
    axes = bar_axes([(run, f"{sum(each.values()):,}") for run, each in totals.items()])
    return Chart(title, "Requests, in total.", traces, {**axes, "showlegend": True})


def refusals(curves: Curves) -> Chart:
    if not curves.refused:
        return Chart("Refused requests", "No request was refused.", [], half=True)
    return _stacked(
        "Refused requests", "By the time and the stage of the refusal.", curves, curves.refused, half=True
    )


def hits(runs: Runs) -> Chart:
    """The share of prompt tokens found in caches, over time; of one run alone also by cache."""
    unit_s, axis = _clock(curves.bin_s * len(curves.prompt_tokens) for curves in runs.values())
    traces: list[Trace] = []
    for run, curves in runs.items():
        if not any(curves.prompt_tokens):
            continue
        x = [curves.bin_s * (at + 0.5) / unit_s for at in range(len(curves.prompt_tokens))]
        for source, tokens in curves.cached_tokens.items():
            if not run or source == "all":
                shares = [
                    part / all_ if all_ else None
                    for part, all_ in zip(tokens, curves.prompt_tokens, strict=True)
                ]
                name = f"{run or source} {percent(sum(tokens) / sum(curves.prompt_tokens))}"
                traces.append(
                    {**line(name, x, shares, *_STYLES[len(traces) % len(_STYLES)]), "mode": "lines+markers"}
                )
    for trace in traces:
        trace["marker"] = {"size": 4}
    caption = (
        "Share of prompt tokens found in a cache, by the time prefill began; names give the overall share."
    )
    return Chart(
        "Hit rate",
        caption if traces else "No prefill began.",
        traces,
        {"xaxis": axis, "yaxis": _SHARES},
        True,
        True,
    )


def nodes(result: Result) -> Chart:
    """The share of time each node computed, the part in which it only waited for KV pale."""
    span_ns = max(1, result.end_ns - result.start_ns)
    chosen = _busiest(result.nodes, [node.busy_ns for node in result.nodes])
    busy = [min(1.0, node.busy_ns / span_ns) for node in chosen]
    stalled = [min(share, node.stalled_ns / span_ns) for share, node in zip(busy, chosen, strict=True)]
    tones = ["orange" if node.role is Role.DECODE else "blue" for node in chosen]
    marks = [
        f"{node.node}: {percent(share)}, of which waiting for KV {percent(part)}"
        for node, share, part in zip(chosen, busy, stalled, strict=True)
    ]
    pale = {"color": [f"--{tone}-pale" for tone in tones], "line": {"color": "--grey", "width": 0.5}}
    traces = [
        bars("computing", marks, [share - part for share, part in zip(busy, stalled, strict=True)],
             {"color": [f"--{tone}" for tone in tones]}),
        bars("waiting for KV", marks, stalled, pale),
    ]  # fmt: skip
    labels = [(str(node.node), percent(share)) for node, share in zip(chosen, busy, strict=True)]
    caption = f"Share of time each node computed; pale: waiting for KV.{_left_out(len(result.nodes), 'nodes')}"
    return Chart("Nodes", caption, traces if chosen else [], bar_axes(labels, **_SHARES), half=True)


def links(result: Result) -> Chart:
    """Utilisation of each link, fullest first."""
    span_ns = result.end_ns - result.start_ns
    uses = [link_utilisation(link, span_ns) for link in result.links]
    chosen = sorted(_busiest(list(zip(uses, result.links, strict=True)), uses), key=lambda each: -each[0])
    labels = [
        (link.name, percent(used) if 0 < link.bytes_per_s < UNLIMITED else "no limit") for used, link in chosen
    ]
    moved = [size(link.bytes_moved) for _, link in chosen]
    marks = [
        f"{name}: {value}, {amount}, {link.kind}"
        for (name, value), amount, (_, link) in zip(labels, moved, chosen, strict=True)
    ]
    trace = bars("used", marks, [used for used, _ in chosen], _filled("purple"), text=moved, textangle=0)
    room = {"range": [0, 1.5 * max(uses, default=0.0) or 1.0]}  # for what stands beside the longest bar
    caption = f"Bytes moved over what the bandwidth allows.{_left_out(len(result.links), 'links')}"
    return Chart("Links", caption, [trace] if chosen else [], bar_axes(labels, **_SHARES | room), half=True)


def moved(result: Result) -> Chart:
    labels = [(purpose.replace("_", " "), size(value)) for purpose, value in result.bytes_moved.items()]
    trace = bars("moved", list(map(": ".join, labels)), list(result.bytes_moved.values()), _filled("purple"))
    layout = bar_axes(labels, exponentformat="SI", ticksuffix="B", rangemode="tozero")
    return Chart("Bytes moved", "Over all links, by purpose.", [trace] if labels else [], layout)


def gantt(reason: str, record: RequestRecord, result: Result) -> Chart:
    """A bar for each phase of one request."""
    steps = phases(record, result.end_ns)
    span_s = (steps[-1].end_ns - record.arrival_ns) / NS_PER_S
    unit_s, axis = _clock([span_s])
    lengths = [(step.end_ns - step.start_ns) / NS_PER_S for step in steps]
    labels = [(step.name, seconds(length)) for step, length in zip(steps, lengths, strict=True)]
    begins = [(step.start_ns - record.arrival_ns) / NS_PER_S / unit_s for step in steps]
    marker = {"color": [_PHASES[step.name] for step in steps], "line": {"color": "--grey", "width": 1}}
    values = [length / unit_s for length in lengths]
    trace = bars("phase", list(map(": ".join, labels)), values, marker, base=begins, showlegend=False)
    layout = {**bar_axes(labels), "xaxis": axis}
    limit_s = record.ttft_limit_ns / NS_PER_S
    if 0 < limit_s <= span_s:
        layout |= {"shapes": [limit(limit_s / unit_s, f"TTFT limit {seconds(limit_s)}")], "showlegend": True}
    return Chart(reason, describe(record, result), [trace], layout)


_PHASES = {
    "wait for prefill": "--none",
    "load, fetch, others": "--purple-pale",
    "prefill": "--blue",
    "hand-over": "--purple",
    "wait for the batch": "--none",
    "decode": "--orange",
}


def _stacked(title: str, caption: str, curves: Curves, counts: Mapping[str, list[int]], *, half: bool) -> Chart:
    unit_s, axis = _clock([curves.bin_s * len(curves.prompt_tokens)])
    width = curves.bin_s / unit_s
    traces = [
        {
            "type": "bar",
            "name": f"{name}: {sum(each):,}",
            "x": [width * at for at in range(len(each))],
            "y": each,
            "offset": 0,
            "width": width,
            "marker": _marker(name),
        }
        for name, each in counts.items()
    ]
    return Chart(title, caption, traces, {"xaxis": axis, "showlegend": True}, True, half)


def _filled(color: str) -> dict[str, Any]:
    return {"color": f"--{color}"}


def _pale(color: str) -> dict[str, Any]:
    return {"color": f"--{color}-pale", "line": {"color": f"--{color}", "width": 1}}


def _marker(outcome: str) -> dict[str, Any]:
    markers = (_filled("green"), _pale("green"), _filled("orange"), _pale("orange"), _filled("ink"), _HOLLOW)
    return dict(zip(OUTCOMES, markers, strict=True)).get(outcome, _filled("ink"))


def _stepped(values: Sequence[float]) -> list[float]:
    """The values of bins as a staircase, which ends where the last bin does."""
    return [*values, values[-1]]


def _clock(spans_s: Any) -> tuple[float, dict[str, Any]]:
    """The unit of a time axis over the longest span, in seconds, and the axis."""
    unit_s, unit = clock(max(spans_s))
    return unit_s, {"title": {"text": f"time ({unit})", "standoff": 6}, "rangemode": "tozero"}


def _busiest(things: Sequence[Any], values: Sequence[float]) -> list[Any]:
    """At most `_MOST_BARS`, those with the largest values, in the order they came."""
    order = sorted(range(len(things)), key=lambda at: (-values[at], at))[:_MOST_BARS]
    return [things[at] for at in sorted(order)]


def _left_out(count: int, noun: str) -> str:
    return f" The {_MOST_BARS} busiest of {count} {noun} are shown." if count > _MOST_BARS else ""
