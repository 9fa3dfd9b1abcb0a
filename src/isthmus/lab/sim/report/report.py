"""Two results beside each other: of every figure both values and the difference, and both runs in each chart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.records import Result
from isthmus.lab.sim.report import charts
from isthmus.lab.sim.report.charts import chosen
from isthmus.lab.sim.report.curves import Curves, bins_of, crossings, curves_of
from isthmus.lab.sim.report.page import (
    Chart,
    Html,
    configuration,
    heading,
    headline,
    page,
    percent,
    seconds,
    shorten,
)
from isthmus.lab.sim.sheets import group_sheets, summary_sheets
from isthmus.lab.sim.spread import Percentiles
from isthmus.lab.sim.summary import Summary
from isthmus.sheet import NOTHING, Cell, Column, Sheet, numbers, texts

Results = Mapping[str, Any]
"""Two results by name, as `--json` of a verb writes them."""

_CURVES = "curves"
_CHARTED = "Charts need what `isthmus simulate --json` writes."
_TILES = {
    "goodput_share": "goodput",
    "ttft_s.p90": "TTFT, P90",
    "tbt_s.p90": "TBT, P90",
    "output_tokens_per_s": "output tokens/s",
    "hit_rate_tokens": "hit rate",
}


def comparison_sheet(results: Results) -> Sheet:
    """A row for each figure of either result, and a note for each text that differs.

    A figure is named by its keys in the JSON, one in a list by the texts beside it. The difference is relative to the
    first result. Raises ConfigError if the two have no figure in common.
    """
    (one, first), (other, second) = ((name, dict(_leaves(result))) for name, result in results.items())
    rows: list[tuple[Cell, ...]] = []
    notes = []
    for name in dict.fromkeys([*first, *second]):
        values = first.get(name), second.get(name)
        if not any(isinstance(value, str) for value in values):
            rows.append((name, *values, _difference(*values)))
        elif values[0] != values[1]:
            notes.append(f"{name}: {values[0] or NOTHING} / {values[1] or NOTHING}")
    if not any(None not in row[:3] for row in rows):
        raise ConfigError(f"{one} and {other}: have no figure in common; compare two results of the same verb")
    columns = (*texts("figure"), *numbers(one, other), Column("difference", "%", "+.1f"))
    return Sheet(f"{one} and {other}", columns, rows, notes)


def comparison_page(results: Results) -> str:
    """The sheet, and charts if both have curves. Raises ConfigError as above, and for curves that cannot be read."""
    sheet = comparison_sheet(results)
    tiles = []
    for name, one, other, difference in sheet.rows:
        if name in _TILES and difference is not None:
            values = f"{sheet.columns[1].write(one)} → {sheet.columns[2].write(other)}"
            tiles.append((f"{difference:+.1f} %", f"{_TILES[str(name)]}: {values}"))
    runs = {shorten(name, 30): _curves(name, result) for name, result in results.items()}
    known = {name: curves for name, curves in runs.items() if curves is not None}
    blocks: list[Sheet | Chart | Html] = [headline("Isthmus comparison", sheet.title, tiles)]
    blocks += _charts(known) if len(known) == len(runs) else [Chart("", _CHARTED, [])]
    return page(f"Isthmus comparison: {sheet.title}", [*blocks, heading("Figures"), sheet])


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Cell]]:
    """All numbers and texts of a JSON value but curves, by where they are."""
    if isinstance(value, dict):
        for key, each in value.items():
            if path or key != _CURVES:
                yield from _leaves(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        seen: Counter[str] = Counter()
        for at, each in enumerate(value):
            name = _named(each) or str(at)
            seen[name] += 1
            again = f" ({seen[name]})" if seen[name] > 1 else ""
            yield from _leaves(each, f"{path}.{name}{again}" if path else f"{name}{again}")
    elif isinstance(value, bool):
        yield path, "yes" if value else "no"
    elif value is not None:
        yield path, value


def _named(value: Any) -> str:
    """What a value of a list is called, if anything."""
    if not isinstance(value, dict):
        return ""
    return str(value.get("name") or ", ".join(word for word in value.values() if isinstance(word, str)))


def _difference(first: Cell, second: Cell) -> float | None:
    """In percent of the first."""
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    if first == second:
        return 0.0
    difference = 100 * (second - first) / abs(first) if first else math.inf
    return difference if math.isfinite(difference) else None


def _curves(name: str, result: Any) -> Curves | None:
    if not isinstance(result, dict) or _CURVES not in result:
        return None
    try:
        return msgspec.convert(result[_CURVES], Curves)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{name}: its curves cannot be read: {error}; let isthmus simulate write it again"
        ) from None


def _charts(runs: Mapping[str, Curves]) -> list[Chart | Html]:
    unit_s, axis = charts.time_axis(curves.bin_s * len(curves.prompt_tokens) for curves in runs.values())
    found: list[Chart | Html] = [_outcomes_comparison(runs), heading("Load by pool")]
    rows = [{row.title: row for row in curves.load} for curves in runs.values()]
    for title in rows[0]:
        means = {
            name: (curves.times(unit_s), charts.stairs(of[title].mean))
            for (name, curves), of in zip(runs.items(), rows, strict=True)
            if title in of
        }
        traces = charts.lines(means, shape="hv")
        found.append(
            Chart(title, "", traces, {"height": 210, "xaxis": axis, "yaxis": charts.FROM_0}, time=True)
        )
    found.append(heading("Latency and cache"))
    for title, times in (
        ("Time to first token", {name: curves.ttft for name, curves in runs.items()}),
        ("Time between tokens", {name: curves.tbt for name, curves in runs.items()}),
    ):
        known = {name: each for name, each in times.items() if each is not None}
        if known:
            shares = charts.lines({name: (each.edges_s, each.shares()) for name, each in known.items()})
            layout = {"xaxis": charts.seconds_axis(known.values()), "yaxis": charts.SHARES}
            found.append(Chart(title, "The share of requests that took no longer.", shares, layout, half=True))
    hits = {name: curves.hits("all", unit_s) for name, curves in runs.items()}
    layout = {"xaxis": axis, "yaxis": charts.SHARES}
    caption = "Share of prompt tokens found in a cache, by the time prefill began."
    return [*found, Chart("Hit rate", caption, charts.lines(hits), layout, time=True)]


def _outcomes_comparison(runs: Mapping[str, Curves]) -> Chart:
    totals = {
        run: {name: sum(counts) for name, counts in curves.outcomes.items()} for run, curves in runs.items()
    }
    traces = []
    for name in dict.fromkeys(name for each in totals.values() for name in each):
        counts = [each.get(name, 0) for each in totals.values()]
        marks = [f"{run}, {name}: {count:,}" for run, count in zip(runs, counts, strict=True)]
        traces.append(charts.bars(name, marks, counts, charts.outcome_marker(name)))
    axes = charts.bar_axes([(run, f"{sum(each.values()):,}") for run, each in totals.items()])
    return Chart("What became of the requests", "", traces, {**axes, "showlegend": True})


# The report of a run: what came out, what was simulated, charts, configuration.


def write_report(
    result: Result, summary: Summary, config_text: str, path: Path, *, request: int | None = None
) -> None:
    """Write the page. `request`: whose way to show, in place of the median and the worst.

    Raises ConfigError if there is no such request or the file cannot be written.
    """
    text = report(result, summary, config_text, request=request)
    try:
        path.write_text(text, encoding="utf8")
    except OSError as error:
        raise ConfigError(f"{path}: the report cannot be written: {error.strerror}") from None


def report(result: Result, summary: Summary, config_text: str, *, request: int | None = None) -> str:
    """The page's text."""
    curves = curves_of(result)
    blocks: list[Sheet | Chart | Html] = [
        _headline(summary),
        heading("Figures"),
        *summary_sheets(summary),
        _setup(summary),
        *group_sheets(summary),
        heading("Load by pool"),
        _bins(curves),
        *_load(curves),
        *_latency(curves, summary),
        *_outcomes_report(curves),
        *_between(result, summary),
        heading("Nodes and links"),
        charts.nodes(result),
        charts.links(result),
        charts.moved(result),
        heading("The way of one request"),
        *[charts.gantt(reason, record, result) for reason, record in chosen(result, request)],
        configuration(config_text),
    ]
    return page(f"Isthmus simulation: {summary.workload}", blocks)


def _headline(summary: Summary) -> Html:
    tiles = [
        (percent(summary.goodput_share), "goodput: requests inside both limits"),
        (_p90(summary.ttft_s), "TTFT, P90"),
        (_p90(summary.tbt_s), "TBT, P90"),
        (percent(summary.hit_rate_tokens), "prompt tokens from cache"),
        (f"{sum(summary.rejected.values()):,}", "requests refused"),
    ]
    subtitle = (
        f"{summary.workload}: {summary.requests:,} requests in {seconds(summary.makespan_s)} of virtual time, "
        f"policy {summary.policy}"
    )
    return headline("Isthmus simulation", subtitle, tiles)


def _setup(summary: Summary) -> Sheet:
    rows = [
        ("workload", summary.workload),
        ("policy", summary.policy),
        ("admission", summary.admission),
        ("order in a queue", summary.order),
        ("nodes", ", ".join(f"{pool.nodes} {role}" for role, pool in summary.utilisation.items()) or "none"),
        *(("note", note) for note in summary.notes),
    ]
    return Sheet("What was simulated", texts("", ""), rows)


def _bins(curves: Curves) -> Html:
    return Html(
        f'<p class="soft">Filled: the mean of each {seconds(curves.bin_s)}. Thin line: the largest value in it. '
        "Dashed: how many nodes there are. Zooming one chart over time zooms all.</p>"
    )


def _load(curves: Curves) -> list[Chart]:
    return [
        charts.over_time(row, curves.bin_s, "orange" if "decode" in row.title else "blue")
        for row in curves.load
    ]


def _latency(curves: Curves, summary: Summary) -> list[Chart | Html]:
    ttft, tbt = "Time to first token", "Time between tokens"
    gaps = "Mean of the longest tenth of each completed request's token gaps"
    return [
        heading("Latency"),
        charts.latency(ttft, f"From arrival: {_percentiles(summary.ttft_s)}.", curves.ttft)
        if curves.ttft
        else Chart(ttft, "No request got a first token.", [], half=True),
        charts.latency(tbt, f"{gaps}: {_percentiles(summary.tbt_s)}.", curves.tbt)
        if curves.tbt
        else Chart(tbt, "No request completed with two tokens or more.", [], half=True),
    ]


def _outcomes_report(curves: Curves) -> list[Chart | Html]:
    caption = f"By time of arrival, in bins of {seconds(curves.bin_s)}."
    whole = charts.stacked("What became of the requests", caption, curves, curves.outcomes, half=False)
    return [heading("Outcome and cache"), whole, charts.refusals(curves), charts.hits(curves)]


def _between(result: Result, summary: Summary) -> list[Chart | Html]:
    """Links between clusters and the threshold over time; nothing where there is one cluster."""
    if not summary.by_route and not summary.between_clusters:
        return []
    bin_s = bins_of(result).length_s
    found = [charts.over_time(row, bin_s, "purple") for row in crossings(result)]
    return [
        heading("Between clusters"),
        *(found or [Chart("", "Nothing crossed a link between clusters.", [])]),
    ]


def _percentiles(spread: Percentiles | None) -> str:
    return (
        NOTHING
        if spread is None
        else f"P50 {seconds(spread.p50)}, P90 {seconds(spread.p90)}, P99 {seconds(spread.p99)}"
    )


def _p90(spread: Percentiles | None) -> str:
    return NOTHING if spread is None else seconds(spread.p90)
