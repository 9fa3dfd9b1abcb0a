"""The page: what came out, what was simulated, charts, configuration. Inline style and SVG, no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.records import Result
from isthmus.lab.sim.report import bars, between, distributions, gantt, load, outcomes
from isthmus.lab.sim.report.charts import escape
from isthmus.lab.sim.report.scales import amount, percent, seconds, size
from isthmus.lab.sim.report.style import CSS
from isthmus.lab.sim.spread import Spread
from isthmus.lab.sim.summary import Group, Loss, Summary

_MOST_GROUPS = 20


def write_report(
    result: Result, summary: Summary, config_text: str, path: Path, *, request: int | None = None
) -> None:
    """Write the page. `request`: whose way to show, in place of the median and the worst.

    Raises ConfigError if there is no such request or the file cannot be written.
    """
    text = page(result, summary, config_text, request=request)
    try:
        path.write_text(text, encoding="utf8")
    except OSError as error:
        raise ConfigError(f"{path}: the report cannot be written: {error.strerror}") from None


def page(result: Result, summary: Summary, config_text: str, *, request: int | None = None) -> str:
    """The page's text, well-formed both as HTML and as XML."""
    body = "".join(
        (
            _headline(summary),
            _figures_table(summary),
            _setup(summary),
            _load(result),
            _times(result),
            _outcomes(result),
            _between(result, summary),
            _use(result),
            _groups(summary),
            _gantt(result, request),
            f"<h2>Configuration</h2><pre>{escape(config_text)}</pre>",
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>Isthmus simulation: {escape(summary.workload)}</title><style>{CSS}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _headline(summary: Summary) -> str:
    tiles = [
        (percent(summary.goodput_share), "goodput: requests inside both limits"),
        (_spread_value(summary.ttft_s, "p90"), "TTFT, P90"),
        (_spread_value(summary.tbt_s, "p90"), "TBT, P90"),
        (percent(summary.hit_rate_tokens), "prompt tokens from cache"),
        (f"{sum(summary.rejected.values()):,}", "requests refused"),
    ]
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{name}</span></div>' for value, name in tiles
    )
    return (
        f'<h1>Isthmus simulation</h1><p class="soft">{escape(summary.workload)}: {summary.requests:,} requests '
        f"in {escape(seconds(summary.makespan_s))} of virtual time, policy {escape(summary.policy)}</p>"
        f'<div class="tiles">{boxes}</div>'
    )


def _figures_table(summary: Summary) -> str:
    spreads = [
        ("Time to first token (TTFT)", summary.ttft_s),
        ("TTFT with transfer", summary.ready_s),
        ("Time between tokens (TBT)", summary.tbt_s),
        ("Mean token gap (TPOT)", summary.tpot_s),
        ("Arrival to last token", summary.e2e_s),
        ("Wait for prefill", summary.queue_s),
        ("Wait for decode", summary.transfer_s),
    ]
    times = _table(
        ("", "mean", "P50", "P90", "P99"),
        ((name, *_spread_cells(spread)) for name, spread in spreads),
    )
    waste = summary.waste
    rows = [
        ("Completed", f"{summary.completed:,} of {summary.requests:,}"),
        ("Goodput", f"{percent(summary.goodput_share)}, {amount(summary.goodput_per_s)} requests/s"),
        ("Output", f"{amount(summary.output_tokens_per_s)} tokens/s"),
        ("Refused", ", ".join(f"{count:,} at {stage}" for stage, count in summary.rejected.items())),
        ("Failed, unfinished", f"{summary.failed:,}, {summary.unfinished:,}"),
        ("Prompt blocks from cache", percent(summary.hit_rate_blocks)),
        (
            "Node time wasted: refused later",
            _loss(waste.refused),
        ),
        (
            "Node time wasted: limit missed",
            _loss(waste.missed),
        ),
        *_ttft_parts(summary),
        ("Bytes moved", size(sum(summary.bytes_moved.values()))),
    ]
    return (
        f'<h2>Figures</h2><div class="pair"><figure><div class="scroll">{times}</div></figure>'
        f'<figure><div class="scroll">{_table((), rows)}</div></figure></div>'
    )


def _ttft_parts(summary: Summary) -> list[tuple[str, str]]:
    parts = summary.ttft_parts
    if parts is None:
        return []
    means = (("queue", parts.queue), ("waiting for KV", parts.load), ("prefill", parts.prefill))
    text = ", ".join(f"{name} {seconds(mean)}" for name, mean in means)
    return [("Mean TTFT", text), ("Mean transfer after it", seconds(parts.transfer))]


def _between(result: Result, summary: Summary) -> str:
    """What went between clusters; nothing where there is one."""
    if not summary.by_route and not summary.between_clusters:
        return ""
    routes = _table(between.ROUTE_HEAD, between.route_rows(summary))
    links = _table(between.LINK_HEAD, between.link_rows(summary))
    moves = "".join(
        f"<dt>{seconds(change.at_s)}</dt><dd>{escape(change.node)} becomes a {escape(change.role)} node</dd>"
        for change in summary.conversions[:_MOST_GROUPS]
    )
    caption = (
        f"Filled: the mean of each {load.bin_length(result)}. Thin line: the largest value in it. "
        f"{between.threshold_text(summary)}"
    )
    drawing = between.links_figure(result)
    return (
        f'<h2>Between clusters</h2><figure><div class="scroll">{routes}</div></figure>'
        f'<figure><div class="scroll">{links}</div></figure>'
        f"{_figure('', caption, drawing, otherwise='Nothing crossed a link between clusters.')}"
        f"{f'<figure><dl>{moves}</dl></figure>' if moves else ''}"
    )


def _loss(loss: Loss) -> str:
    return f"{percent(loss.share)}, {seconds(loss.node_s)}"


def _setup(summary: Summary) -> str:
    facts = [
        ("Workload", summary.workload),
        ("Policy", summary.policy),
        ("Admission", summary.admission),
        ("Order in a queue", summary.order),
        ("Nodes", ", ".join(f"{pool.nodes} {role}" for role, pool in summary.utilisation.items()) or "none"),
        *(("Note", note) for note in summary.notes),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f"<h2>What was simulated</h2><figure><dl>{rows}</dl></figure>"


def _load(result: Result) -> str:
    caption = (
        f"Filled: the mean of each {load.bin_length(result)}. Thin line: the largest value in it. "
        "Dashed: how many nodes there are."
    )
    return f"<h2>Load by pool</h2>{_figure('', caption, load.load_figure(result))}"


def _times(result: Result) -> str:
    ttft = _figure(
        "Time to first token",
        "From arrival, on a logarithmic axis. Above: requests; below: the share of them that took no longer.",
        distributions.ttft_figure(result),
        otherwise="No request got a first token.",
    )
    tbt = _figure(
        "Time between tokens",
        "Mean of the longest tenth of each completed request's token gaps, on a logarithmic axis.",
        distributions.tbt_figure(result),
        otherwise="No request completed with two tokens or more.",
    )
    return f'<h2>Latency</h2><div class="pair">{ttft}{tbt}</div>'


def _outcomes(result: Result) -> str:
    whole = _figure(
        "What became of the requests",
        f"By time of arrival; requests in each {seconds(outcomes.outcome_bins(result).length_s)}.",
        outcomes.outcomes_figure(result),
    )
    rejections = _figure(
        "Refused requests",
        "By the time and the stage of the refusal.",
        outcomes.rejections_figure(result),
        otherwise="No request was refused.",
    )
    hits = _figure(
        "Hit rate",
        "Share of prompt tokens found in a cache, by the time prefill began; labels give the overall share.",
        outcomes.hits_figure(result),
        otherwise="No prefill began.",
    )
    return f'<h2>Outcome and cache</h2>{whole}<div class="pair">{rejections}{hits}</div>'


def _use(result: Result) -> str:
    nodes = _figure(
        "Nodes",
        f"Share of time each node computed; pale: waiting for KV.{bars.left_out(len(result.nodes), 'nodes')}",
        bars.nodes_figure(result),
    )
    links = _figure(
        "Links",
        f"Bytes moved over what the bandwidth allows.{bars.left_out(len(result.links), 'links')}",
        bars.links_figure(result),
    )
    moved = _figure("Bytes moved", "Over all links, by purpose.", bars.bytes_figure(result))
    return f'<h2>Nodes and links</h2><div class="pair"><div>{nodes}{moved}</div><div>{links}</div></div>'


def _groups(summary: Summary) -> str:
    parts = []
    for name, groups in (("priority", summary.by_priority), ("tenant", summary.by_tenant)):
        if groups:
            rows = [_group_cells(key, group) for key, group in groups.items()]
            head = (name, "requests", "goodput", "refused", "TTFT P50", "TTFT P90", "TBT P90", "hit rate")
            more = (
                f'<p class="soft">{len(rows) - _MOST_GROUPS} more are not shown.</p>'
                if len(rows) > _MOST_GROUPS
                else ""
            )
            table = _table(head, rows[:_MOST_GROUPS])
            parts.append(f'<h2>By {name}</h2><figure><div class="scroll">{table}</div>{more}</figure>')
    return "".join(parts)


def _group_cells(name: str, group: Group) -> Sequence[str]:
    return (
        name or "(none)",
        f"{group.requests:,}",
        percent(group.goodput_share),
        f"{sum(group.rejected.values()):,}",
        _spread_value(group.ttft_s, "p50"),
        _spread_value(group.ttft_s, "p90"),
        _spread_value(group.tbt_s, "p90"),
        percent(group.hit_rate_tokens),
    )


def _gantt(result: Result, request: int | None) -> str:
    figures = [
        _figure(reason, gantt.describe(record, result), gantt.gantt_figure(record, result, f"request-{number}"))
        for number, (reason, record) in enumerate(gantt.chosen(result, request))
    ]
    return f"<h2>The way of one request</h2>{''.join(figures) or '<p>No request completed.</p>'}"


def _figure(title: str, caption: str, drawing: str | None, *, otherwise: str = "") -> str:
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    if drawing is None:
        return f"<figure>{heading}<p>{escape(otherwise)}</p></figure>"
    text = f"{heading}<figcaption>{escape(caption)}</figcaption>"
    return f'<figure>{text}<div class="scroll">{drawing}</div></figure>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first cell of each row is its name."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(f"<tr>{_row(row[0], row[1:])}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{lines}</tbody></table>"


def _row(name: str, cells: Iterable[str]) -> str:
    return f'<th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}'


def _spread_cells(spread: Spread | None) -> Sequence[str]:
    if spread is None:
        return ("–",) * 4
    return tuple(seconds(value) for value in (spread.mean, spread.p50, spread.p90, spread.p99))


def _spread_value(spread: Spread | None, name: str) -> str:
    return "–" if spread is None else seconds(getattr(spread, name))
