"""One request's way through the cluster, phase by phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S, Role
from isthmus.facts import UNLIMITED
from isthmus.lab.sim.records import RequestRecord, RequestStatus, Result
from isthmus.lab.sim.report.curves import OUTCOMES, CurveRow, Curves, Times
from isthmus.lab.sim.report.page import Chart, clock, percent, seconds, shorten, size
from isthmus.lab.sim.spread import nearest_rank
from isthmus.lab.sim.summary import link_utilisation
from isthmus.sheet import written


class GanttPhase(NamedTuple):
    name: str
    start_ns: int
    end_ns: int


def chosen(result: Result, index: int | None) -> list[tuple[str, RequestRecord]]:
    """Requests worth a look and why: the one asked for, else median and worst TTFT of those completed.

    Raises ConfigError if there is no request `index`.
    """
    if index is not None:
        found = next((each for each in result.records if each.index == index), None)
        if found is None:
            count = len(result.records)
            raise ConfigError(f"report: there is no request {index}; the workload has {count}, counted from 0")
        return [("As asked for", found)]
    completed = [each for each in result.records if each.status is RequestStatus.COMPLETED]
    if not completed:
        return []
    completed.sort(key=lambda each: (each.first_token_ns - each.arrival_ns, each.index))
    ranked = range(len(completed))
    return [
        ("Median time to first token", completed[nearest_rank(ranked, 50)]),
        ("Worst time to first token", completed[-1]),
    ]


def phases(record: RequestRecord, end_ns: int) -> list[GanttPhase]:
    """What a request went through, one phase where the one before ended. `end_ns`: of the simulation.

    From the start of its prefill to its first token, what was not node time of this prefill went into loading
    and fetching KV and into other requests' chunks. How the two alternate is not recorded: it is drawn first.
    """
    stations = [
        ("wait for prefill", record.prefill_start_ns),
        ("load, fetch, others", _computing_from(record)),
        ("prefill", record.first_token_ns),
        ("hand-over", record.landed_ns),
        ("wait for the batch", record.joined_ns),
        ("decode", record.end_ns),
    ]
    found: list[GanttPhase] = []
    start_ns = record.arrival_ns
    for name, reached_ns in stations:
        if reached_ns < 0 and name == "hand-over" and record.joined_ns >= 0:
            continue  # prefilled where it decodes: nothing was handed over
        if reached_ns < 0:
            stop_ns = record.end_ns if record.end_ns >= 0 else end_ns
            return [*found, GanttPhase(name, start_ns, max(start_ns, stop_ns))]
        found.append(GanttPhase(name, start_ns, max(start_ns, reached_ns)))
        start_ns = max(start_ns, reached_ns)
    return found


def _computing_from(record: RequestRecord) -> int:
    if record.first_token_ns < 0:
        return record.prefill_start_ns
    return max(record.prefill_start_ns, record.first_token_ns - record.prefill_ns)


def describe(record: RequestRecord, result: Result) -> str:
    """What the request was and how it went, in a sentence or two."""
    request = record.request
    words = [f"Request {record.index}: {request.num_tokens:,} tokens in, {request.output_tokens:,} out"]
    if record.prefill_start_ns >= 0:
        words.append(f"{percent(record.cached_tokens / request.num_tokens)} of the prompt cached")
        words.append(f"prefilled on {_node(result, record.prefill)}")
    if record.joined_ns >= 0:
        words.append(f"decoded on {_node(result, record.decode)}")
    if record.first_token_ns >= 0:
        words.append(f"first token after {seconds((record.first_token_ns - record.arrival_ns) / NS_PER_S)}")
    if record.status is RequestStatus.COMPLETED and record.tbt_ns:
        words.append(f"TBT {seconds(record.tbt_ns / NS_PER_S)}")
    ending = f"refused at {record.stage}" if record.status is RequestStatus.REFUSED else record.status.value
    return f"{', '.join(words)}; {ending}."


def _node(result: Result, index: int) -> str:
    return result.nodes[index].node if 0 <= index < len(result.nodes) else f"node {index}"


# Charts of a run, as plain data. Dashes, fillings and names say what colours say.


Trace = dict[str, Any]
Points = tuple[Sequence[float], Sequence[float | None]]
"""x, y."""

SHARES = {"tickvals": [0, 0.25, 0.5, 0.75, 1], "tickformat": ".0%", "range": [0, 1.01]}
FROM_0 = {"rangemode": "tozero"}
_STYLES = (("--blue", "solid"), ("--orange", "dash"), ("--purple", "dot"), ("--green", "dashdot"))
_MOST_BARS = 24


# Parts of charts.


def line(name: str, points: Points, color: str, dash: str = "solid", **more: Any) -> Trace:
    x, y = points
    look = {"color": color, "dash": dash, **more}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": look}


def lines(curves: Mapping[str, Points], **more: Any) -> list[Trace]:
    """A line for each name, each in a style of its own."""
    styled = zip(curves.items(), cycle(_STYLES), strict=False)
    return [line(name, points, *style, **more) for (name, points), style in styled]


def bars(
    name: str, marks: Sequence[str], values: Sequence[float], marker: Mapping[str, Any], **more: Any
) -> Trace:
    """Horizontal ones; a mark is what its bar says when pointed at."""
    places = {"orientation": "h", "x": values, "y": list(range(len(marks)))}
    words = {"name": name, "hovertext": marks, "hovertemplate": "%{hovertext}"}
    return {"type": "bar", **places, **words, "marker": marker, **more}


def bar_axes(labels: Sequence[tuple[str, str]], **x_axis: Any) -> dict[str, Any]:
    """The layout of horizontal bars, the first at the top: each with its name, short enough for a phone, and value."""
    ticks = [f"{shorten(name)}  {value}" for name, value in labels]
    y_axis = {"tickvals": list(range(len(ticks))), "ticktext": ticks, "autorange": "reversed"}
    height = 100 + 22 * max(2, len(ticks))
    return {"height": height, "hovermode": "closest", "xaxis": x_axis, "yaxis": y_axis, "showlegend": False}


def limit(x: float, name: str) -> dict[str, Any]:
    """A line across the chart at a limit on its x axis, which the legend explains."""
    look = {"color": "--red", "dash": "dash", "width": 1.5}
    ends = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    return {"type": "line", **ends, "line": look, "name": name, "showlegend": True}


def filled(color: str) -> dict[str, Any]:
    return {"color": f"--{color}"}


def pale(color: str) -> dict[str, Any]:
    return {"color": f"--{color}-pale", "line": {"color": f"--{color}", "width": 1}}


def outcome_marker(outcome: str) -> dict[str, Any]:
    hollow = {"color": "--none", "line": {"color": "--grey", "width": 1}}
    markers = (filled("green"), pale("green"), filled("orange"), pale("orange"), filled("ink"), hollow)
    return dict(zip(OUTCOMES, markers, strict=True)).get(outcome, filled("ink"))


def time_axis(spans_s: Iterable[float]) -> tuple[float, dict[str, Any]]:
    """The unit, in seconds, of an axis over the longest of these times, and the axis."""
    unit_s, unit = clock(max(spans_s))
    return unit_s, {"title": {"text": f"time ({unit})", "standoff": 6}, **FROM_0}


def seconds_axis(times: Iterable[Times]) -> dict[str, Any]:
    """A logarithmic axis with as many ticks as a phone has room for."""
    edges_s = [edge for each in times for edge in each.edges_s]
    decades = math.log10(max(edges_s) / min(edges_s))
    ticks = {"dtick": 1} if decades > 2 else {"dtick": "D2"} if decades > 0.7 else {"nticks": 4}
    return {"type": "log", "ticksuffix": "s", "exponentformat": "SI", **ticks}


# Over time, by bins.


def over_time(row: CurveRow, bin_s: float, color: str) -> Chart:
    """Filled: the mean of each bin; thin: the largest value in it; dashed: how much there is at all."""
    unit_s, axis = time_axis([bin_s * len(row.mean)])
    x = [bin_s * at / unit_s for at in range(len(row.mean) + 1)]
    mean = line("mean", (x, stairs(row.mean)), f"--{color}", shape="hv")
    traces = [
        mean | {"fill": "tozeroy", "fillcolor": f"--{color}-pale"},
        line("largest", (x, stairs(row.largest)), f"--{color}", shape="hv", width=1),
    ]
    if row.most:
        traces.append(line(f"all {row.most}", ([x[0], x[-1]], [row.most] * 2), "--red", "dash"))
    words = f"mean {written(sum(row.mean) / len(row.mean))}, largest {written(max(row.largest))}."
    return Chart(row.title, words, traces, {"height": 210, "xaxis": axis, "yaxis": FROM_0}, time=True)


def stairs(values: Sequence[float]) -> list[float]:
    """The values of bins, with one more where the last bin ends."""
    return [*values, values[-1]]


def stacked(title: str, caption: str, curves: Curves, counts: Mapping[str, list[int]], *, half: bool) -> Chart:
    """Requests by outcome."""
    unit_s, axis = time_axis([curves.bin_s * len(curves.prompt_tokens)])
    width = curves.bin_s / unit_s
    traces = [
        {
            "type": "bar",
            "name": f"{name}: {sum(each):,}",
            "x": [width * at for at in range(len(each))],
            "y": each,
        }
        | {"offset": 0, "width": width, "marker": outcome_marker(name)}
        for name, each in counts.items()
    ]
    return Chart(title, caption, traces, {"xaxis": axis, "showlegend": True}, time=True, half=half)


def refusals(curves: Curves) -> Chart:
    if not curves.refused:
        return Chart("Refused requests", "No request was refused.", [], half=True)
    return stacked(
        "Refused requests", "By the time and the stage of the refusal.", curves, curves.refused, half=True
    )


def hits(curves: Curves) -> Chart:
    """The share of prompt tokens found in each cache."""
    if not any(curves.prompt_tokens):
        return Chart("Hit rate", "No prefill began.", [], half=True)
    unit_s, axis = time_axis([curves.bin_s * len(curves.prompt_tokens)])
    found = {
        f"{name} {percent(curves.hit_rate(name))}": curves.hits(name, unit_s) for name in curves.cached_tokens
    }
    traces = [trace | {"mode": "lines+markers", "marker": {"size": 4}} for trace in lines(found)]
    caption = (
        "Share of prompt tokens found in a cache, by the time prefill began; names give the overall share."
    )
    return Chart("Hit rate", caption, traces, {"xaxis": axis, "yaxis": SHARES}, time=True, half=True)


# Of all requests, nodes and links.


def latency(title: str, caption: str, times: Times) -> Chart:
    """How many requests took how long, and the share that took no longer."""
    sides = list(zip(times.edges_s, times.edges_s[1:], strict=False))
    counts = {
        "type": "bar",
        "name": "requests",
        "x": times.edges_s[:-1],
        "y": times.counts,
        "offset": 0,
        "width": [right - left for left, right in sides],
        "marker": filled("blue"),
        "textposition": "none",
        "hovertext": [f"{seconds(left)} to {seconds(right)}" for left, right in sides],
        "hovertemplate": "%{hovertext}: %{y}",
    }
    shares = line("share that took no longer", (times.edges_s, times.shares()), "--orange") | {"yaxis": "y2"}
    shapes = []
    if len(times.limits) == times.num_limits:
        shapes = [limit(at, f"limit {seconds(at)}: {percent(share)} inside") for at, share in times.limits]
    else:
        first, last = times.limits[0][0], times.limits[-1][0]
        caption += f" {times.num_limits} different limits, from {seconds(first)} to {seconds(last)}."
    right = {**SHARES, "side": "right", "overlaying": "y", "showgrid": False, "automargin": True}
    layout = {
        "xaxis": seconds_axis([times]),
        "yaxis": {"title": {"text": "requests"}, **FROM_0},
        "yaxis2": right,
    }
    return Chart(title, caption, [counts, shares], {**layout, "shapes": shapes}, half=True)


def nodes(result: Result) -> Chart:
    """The share of time each node computed, the part in which it only waited for KV pale."""
    span_ns = max(1, result.end_ns - result.start_ns)
    chosen = _busiest(result.nodes, [node.busy_ns for node in result.nodes])
    busy = [min(1.0, node.busy_ns / span_ns) for node in chosen]
    stalled = [min(share, node.stalled_ns / span_ns) for share, node in zip(busy, chosen, strict=True)]
    tones = ["--orange" if node.role is Role.DECODE else "--blue" for node in chosen]
    marks = [
        f"{node.node}: {percent(share)}, of which waiting for KV {percent(part)}"
        for node, share, part in zip(chosen, busy, stalled, strict=True)
    ]
    computing = [share - part for share, part in zip(busy, stalled, strict=True)]
    waiting = {"color": [f"{tone}-pale" for tone in tones], "line": {"color": "--grey", "width": 0.5}}
    traces = [
        bars("computing", marks, computing, {"color": tones}),
        bars("waiting for KV", marks, stalled, waiting),
    ]
    labels = [(str(node.node), percent(share)) for node, share in zip(chosen, busy, strict=True)]
    caption = f"Share of time each node computed; pale: waiting for KV.{_left_out(len(result.nodes), 'nodes')}"
    return Chart("Nodes", caption, traces if chosen else [], bar_axes(labels, **SHARES), half=True)


def links(result: Result) -> Chart:
    """Utilisation of each link, fullest first."""
    span_ns = result.end_ns - result.start_ns
    uses = [link_utilisation(link, span_ns) for link in result.links]
    chosen = sorted(_busiest(list(zip(uses, result.links, strict=True)), uses), key=lambda each: -each[0])
    labels = [
        (link.name, percent(used) if 0 < link.bytes_per_s < UNLIMITED else "no limit") for used, link in chosen
    ]
    sizes = [size(link.bytes_moved) for _, link in chosen]
    marks = [
        f"{name}: {value}, {moved}, {link.kind}"
        for (name, value), moved, (_, link) in zip(labels, sizes, chosen, strict=True)
    ]
    trace = bars("used", marks, [used for used, _ in chosen], filled("purple"), text=sizes, textangle=0)
    room = {"range": [0, 1.5 * max(uses, default=0.0) or 1.0]}  # for what stands beside the longest bar
    caption = f"Bytes moved over what the bandwidth allows.{_left_out(len(result.links), 'links')}"
    return Chart(
        "Links", caption, [trace] if chosen else [], bar_axes(labels, tickformat=".0%", **room), half=True
    )


def moved(result: Result) -> Chart:
    labels = [(purpose.replace("_", " "), size(value)) for purpose, value in result.bytes_moved.items()]
    trace = bars("moved", list(map(": ".join, labels)), list(result.bytes_moved.values()), filled("purple"))
    layout = bar_axes(labels, exponentformat="SI", ticksuffix="B", **FROM_0)
    return Chart("Bytes moved", "Over all links, by purpose.", [trace] if labels else [], layout)


def gantt(reason: str, record: RequestRecord, result: Result) -> Chart:
    """A bar for each phase of one request."""
    steps = phases(record, result.end_ns)
    span_s = (steps[-1].end_ns - record.arrival_ns) / NS_PER_S
    unit_s, axis = time_axis([span_s])
    lengths = [(step.end_ns - step.start_ns) / NS_PER_S for step in steps]
    labels = [(step.name, seconds(length)) for step, length in zip(steps, lengths, strict=True)]
    begins = [(step.start_ns - record.arrival_ns) / NS_PER_S / unit_s for step in steps]
    marker = {
        "color": [_PHASES.get(step.name, "--none") for step in steps],
        "line": {"color": "--grey", "width": 1},
    }
    values = [length / unit_s for length in lengths]
    trace = bars("phase", list(map(": ".join, labels)), values, marker, base=begins, showlegend=False)
    layout = {**bar_axes(labels), "xaxis": axis}
    limit_s = record.ttft_limit_ns / NS_PER_S
    if 0 < limit_s <= span_s:
        layout |= {"shapes": [limit(limit_s / unit_s, f"TTFT limit {seconds(limit_s)}")], "showlegend": True}
    return Chart(reason, describe(record, result), [trace], layout)


_PHASES = {
    "load, fetch, others": "--purple-pale",
    "prefill": "--blue",
    "hand-over": "--purple",
    "decode": "--orange",
}
"""Colours; a phase of waiting has none."""


def _busiest(things: Sequence[Any], values: Sequence[float]) -> list[Any]:
    """At most `_MOST_BARS`, those with the largest values, in the order they came."""
    order = sorted(range(len(things)), key=lambda at: (-values[at], at))[:_MOST_BARS]
    return [things[at] for at in sorted(order)]


def _left_out(count: int, noun: str) -> str:
    return f" The {_MOST_BARS} busiest of {count} {noun} are shown." if count > _MOST_BARS else ""
