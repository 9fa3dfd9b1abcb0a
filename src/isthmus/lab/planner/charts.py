"""Charts of a plan: rate over split, over threshold and over bandwidth; TTFT in parts; formula beside simulation."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.lab.planner.answer import PlanAnswer, Simulated
from isthmus.lab.sim.report.charts import Trace, bar_axes, bars, limit, line
from isthmus.lab.sim.report.page import Chart
from isthmus.lab.sim.report.words import seconds
from isthmus.sheet import written

_HIGHEST = 1.8
"""Of the best rate: where curves that go to infinity are cut off."""
_REACH = 4
"""Of the best threshold: where the curves end, for beyond it they are flat."""
SHOWN = 0.8
"""The fraction of the formula whose TTFT is drawn."""
_RATE = {"title": {"text": "requests/s"}, "rangemode": "tozero"}


def split(answer: PlanAnswer) -> Chart:
    """Rate over the number of prefill nodes (the paper's Figure 5a)."""
    points = answer.what_if.split
    x = [each.prefill for each in points]
    traces = [line("own threshold", (x, [each.rate for each in points]), "--green")]
    if answer.what_if.threshold:
        at_best = [each.rate_at_best for each in points]
        representative = [each.representative_at_best for each in points]
        traces.append(line("best threshold", (x, at_best), "--blue", "dash"))
        traces.append(line("representative", (x, representative), "--orange", "dot"))
    nodes = points[0].prefill + points[0].decode
    shown = x[:: max(1, -(-len(x) // 12))]
    axis = {
        "title": {"text": "prefill / decode nodes at home"},
        "tickvals": shown,
        "ticktext": [f"{prefill} / {nodes - prefill}" for prefill in shown],
    }
    return Chart("Rate over the split", "", _dotted(traces), {"xaxis": axis, "yaxis": _RATE})


def threshold(answer: PlanAnswer) -> Chart:
    """What each stage allows over the threshold, and the least of it (the paper's Figure 5b)."""
    best, all_points = answer.plans[0], answer.what_if.threshold
    reach = _REACH * (best.threshold or all_points[-1].threshold or 1)
    points = [each for each in all_points if each.threshold is not None and each.threshold <= reach]
    x = [each.threshold or 0 for each in points]
    least = line("the least", (x, [each.rate for each in points]), "--green")
    least["line"]["width"] = 5
    traces = [
        least,
        line("remote compute", (x, [each.remote for each in points]), "--blue", "dash"),
        line("link", (x, [each.link for each in points]), "--grey", "dot"),
        line("local compute", (x, [each.local for each in points]), "--purple", "dashdot"),
        line("decode", (x, [best.exact.decode] * len(x)), "--orange", "longdash"),
    ]
    layout = {
        "height": 380,
        "xaxis": {"title": {"text": "threshold, tokens"}, "rangemode": "tozero", "tickformat": ","},
        "yaxis": {**_RATE, "range": [0, _HIGHEST * max(best.exact.rate, best.exact.decode)]},
        "shapes": [] if best.threshold is None else [limit(best.threshold, f"best: {best.threshold:,} tokens")],
    }
    return Chart("What each stage allows, over the threshold", "", traces, layout)


def bandwidth(answer: PlanAnswer) -> Chart:
    """The best rate over the links' bandwidth."""
    points = answer.what_if.bandwidth
    x = [each.gbps for each in points]
    traces = [
        line("KV as it is", (x, [each.rate for each in points]), "--green"),
        line("8-bit KV", (x, [each.int8 for each in points]), "--purple", "dash"),
        line("representative", (x, [each.representative for each in points]), "--orange", "dot"),
    ]
    axis = {"type": "log", "title": {"text": "Gbps"}}
    return Chart("Rate over the bandwidth", "", _dotted(traces), {"xaxis": axis, "yaxis": _RATE})


def sustained(found: Simulated) -> Chart:
    """What the formula promises, and what was simulated within the limits."""
    labels = [f"{each.plan}, {each.arrivals}" for each in found.sustained]
    rates = [each.rate for each in found.sustained]
    gaps = [max(0.0, each.formula - each.rate) for each in found.sustained]
    parts = {
        "simulated": (rates, {"color": "--green"}),
        "what the formula adds": (gaps, {"color": "--orange-pale"}),
    }
    marks = [
        f"{label}: simulated {written(each.rate)}, formula {written(each.formula)}"
        for label, each in zip(labels, found.sustained, strict=True)
    ]
    traces = [bars(name, marks, lengths, marker) for name, (lengths, marker) in parts.items()]
    axes = bar_axes(list(zip(labels, map(written, rates), strict=True)), title={"text": "requests/s"})
    return Chart("Formula and simulation", "", traces if labels else [], {**axes, "showlegend": True})


def parts(found: Simulated) -> Chart:
    """Mean TTFT in parts: waiting, prefill; and the way to the decode batch after it."""
    trials = [trial for trial in found.trials if trial.ttft is not None and trial.fraction == SHOWN]
    of_parts = {
        "queue": ([trial.queue for trial in trials], {"color": "--blue-pale"}),
        "prefill": ([trial.prefill for trial in trials], {"color": "--blue"}),
        "then to decode": ([trial.transfer for trial in trials], {"color": "--orange"}),
    }
    means = {name: [each.mean if each else 0.0 for each in spreads] for name, (spreads, _) in of_parts.items()}
    labels = [f"{trial.plan}, {trial.arrivals}" for trial in trials]
    columns = list(zip(*means.values(), strict=True))
    marks = [f"{label}: {' + '.join(map(seconds, each))}" for label, each in zip(labels, columns, strict=True)]
    traces = [bars(name, marks, means[name], marker) for name, (_, marker) in of_parts.items()]
    totals = [seconds(sum(each)) for each in columns]
    axes = bar_axes(list(zip(labels, totals, strict=True)), title={"text": "seconds"})
    title = f"TTFT in parts, at {SHOWN:g} of the formula"
    if not labels:
        return Chart(title, "No plan got a first token there.", [])
    return Chart(title, "", traces, {**axes, "showlegend": True})


def _dotted(traces: Sequence[Trace]) -> list[Trace]:
    return [{**trace, "mode": "lines+markers"} for trace in traces]
