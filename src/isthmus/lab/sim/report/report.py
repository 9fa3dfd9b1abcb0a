"""The report of a run: what came out, what was simulated, charts, configuration."""

from __future__ import annotations

from pathlib import Path

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.records import Result
from isthmus.lab.sim.report import charts
from isthmus.lab.sim.report.curves import Curves, bins_of, crossings, curves_of
from isthmus.lab.sim.report.gantt import chosen
from isthmus.lab.sim.report.page import Chart, Html, configuration, heading, headline, page
from isthmus.lab.sim.report.words import percent, seconds
from isthmus.lab.sim.sheets import group_sheets, summary_sheets
from isthmus.lab.sim.spread import Percentiles
from isthmus.lab.sim.summary import Summary
from isthmus.sheet import NOTHING, Sheet, texts


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
        *_outcomes(curves),
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


def _outcomes(curves: Curves) -> list[Chart | Html]:
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
