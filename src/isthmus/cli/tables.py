"""Tables on the terminal, shared by the verbs. In a file or a pipe they are plain Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import StringIO
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isthmus.lab.sim.spread import Spread
from isthmus.lab.sim.summary import Loss, Parts, ReuseUse, Summary, ThresholdUse

_NONE = "–"
_PLAIN_WIDTH = 1000
"""Columns of a file: no cell is ever folded."""


def show(*tables: Table, file: IO[str] | None = None) -> None:
    """Print tables one below the other; `file`: in place of standard output."""
    console = Console(file=file)
    if console.is_terminal:
        for table in tables:
            console.print(table, "")
    else:
        print("\n".join(map(_markdown, tables)), file=file)


def _markdown(table: Table) -> str:
    table.box = box.MARKDOWN
    table.pad_edge = True
    console = Console(file=StringIO(), width=_PLAIN_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def summary_tables(summary: Summary) -> list[Table]:
    """A simulation on one screen: totals, times, pools, links; with several clusters also what went between them."""
    tables = [_totals(summary), _times(summary)]
    if summary.reuse is not None:
        tables.append(_reuse(summary.reuse))
    if summary.by_route:
        tables.append(_routes(summary))
    tables.append(_pools(summary))
    if summary.between_clusters:
        tables.append(_between(summary))
    if summary.threshold is not None:
        tables.append(_control(summary.threshold, len(summary.conversions)))
    return [*tables, _links(summary)] if summary.links else tables


def comparison_tables(rows: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Published figures, ours and the difference, one table for each `table` of the rows, in their order.

    A row is `{table, row, column, published, ours}`; a figure may be None, then `reason`, if the row has one,
    stands in its place. A row with a true `inferred` has a star. The difference is relative to the published
    figure, absolute where that is 0.
    """
    tables: dict[str, Table] = {}
    before: tuple[str, str] | None = None
    for row in rows:
        name = str(row["table"])
        if name not in tables:
            tables[name] = _table(name, "", "", "published", "ours", "difference", text_columns=2)
        here = (name, str(row["row"]))
        cells = (
            "" if here == before else here[1],
            f"{row['column']}*" if row.get("inferred") else str(row["column"]),
            _figure(row["published"], row.get("reason") if row["ours"] is not None else None),
            _figure(row["ours"], row.get("reason")),
            _difference(row["published"], row["ours"]),
        )
        tables[name].add_row(*map(Text, cells))
        before = here
    return list(tables.values())


def _totals(summary: Summary) -> Table:
    waste = summary.waste
    moved = ", ".join(
        f"{purpose} {_gigabytes(count)}" for purpose, count in summary.bytes_moved.items() if count
    )
    rows = [
        ("requests", f"{summary.requests:,}", "makespan (s)", f"{summary.makespan_s:,.1f}"),
        ("completed", f"{summary.completed:,}", "output (tokens/s)", f"{summary.output_tokens_per_s:,.1f}"),
        (
            "goodput (%)",
            _percent(summary.goodput_share),
            "goodput (requests/s)",
            f"{summary.goodput_per_s:,.3f}",
        ),
        (
            "refused",
            _by_stage(summary.rejected),
            "failed, unfinished",
            f"{summary.failed:,}, {summary.unfinished:,}",
        ),
        (
            "hit rate, tokens (%)",
            _percent(summary.hit_rate_tokens),
            "of which other nodes, SSD (%)",
            _sources(summary),
        ),
        ("hit rate, blocks (%)", _percent(summary.hit_rate_blocks), "moved (GB)", moved or "0"),
        ("waste, refused (node s)", _loss(waste.refused), "waste, limit missed (node s)", _loss(waste.missed)),
        ("simulated in (s)", f"{summary.wall_s:,.2f}", "events", f"{summary.events:,}"),
    ]
    title = f"{summary.workload}: {summary.policy}, admission {summary.admission}, order {summary.order}"
    table = _table(title, "", "", "", "", text_columns=4)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _times(summary: Summary) -> Table:
    table = _table("Times", "", "mean", "P50", "P90", "P99")
    _add_times(table, "TTFT (s)", summary.ttft_s, 1)
    _add_times(table, "TTFT with transfer (s)", summary.ready_s, 1)
    _add_times(table, "TBT (ms)", summary.tbt_s, 1000)
    _add_times(table, "TPOT (ms)", summary.tpot_s, 1000)
    _add_times(table, "end to end (s)", summary.e2e_s, 1)
    _add_times(table, "queue (s)", summary.queue_s, 1)
    if summary.ttft_parts is not None:
        for name, mean in _part_means(summary.ttft_parts)[1:]:
            table.add_row(f"{name} (s)", f"{mean:,.3f}", *[_NONE] * 3)
    _add_times(table, "first token to decode (ms)", summary.transfer_s, 1000)
    return table


def _reuse(reuse: ReuseUse) -> Table:
    title = f"Prompts that may be assembled: {reuse.requests:,}, of which {reuse.assembled:,} were"
    table = _table(title, "KV of their tokens", "tokens", "%")
    kinds = ("exact", "moved", "similar", "recomputed")
    counts = [getattr(reuse, f"{kind}_tokens") for kind in kinds]
    for kind, count in zip(kinds, counts, strict=True):
        table.add_row(kind, f"{count:,}", _percent(count / max(1, sum(counts))))
    return table


def _add_times(table: Table, name: str, spread: Spread | None, per_second: int) -> None:
    if spread is None:
        table.add_row(name, *[_NONE] * 4)
        return
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    digits = 3 if per_second == 1 else 1
    table.add_row(name, *(f"{per_second * value:,.{digits}f}" for value in values))


def _part_means(parts: Parts) -> list[tuple[str, float]]:
    return [("queue", parts.queue), ("waiting for KV", parts.load), ("prefill", parts.prefill)]


def _routes(summary: Summary) -> Table:
    """A row for each pair of clusters that requests went through."""
    head = (
        "share (%)",
        "uncached tokens",
        "TTFT",
        "queue",
        "waiting for KV",
        "prefill",
        "transfer",
        "TTFT P90",
    )
    table = _table("Prefill cluster > home, means (s)", "", "requests", *head)
    for name, use in summary.by_route.items():
        if use.ttft_s is None or use.ttft_parts is None:
            continue
        parts = [mean for _, mean in _part_means(use.ttft_parts)]
        times = (use.ttft_s.mean, *parts, use.ttft_parts.transfer, use.ttft_s.p90)
        cells = (f"{use.requests:,}", _percent(use.share), f"{use.uncached_tokens:,.0f}")
        table.add_row(name, *cells, *(f"{time:,.3f}" for time in times))
    return table


def _between(summary: Summary) -> Table:
    """Links between clusters, each direction."""
    table = _table("Between clusters", "", "moved (GB)", "Gbps", "utilisation (%)", "busy (%)")
    for name, use in summary.between_clusters.items():
        shares = (_percent(use.utilisation), _percent(use.busy_share))
        table.add_row(name, _gigabytes(use.bytes_moved), f"{use.gbps:,.2f}", *shares)
    return table


def _control(use: ThresholdUse, num_conversions: int) -> Table:
    """The threshold over time, and nodes that were given another role."""
    head = ("at first", "at last", "least", "most", "changes", "a minute", "most in one", "roles changed")
    table = _table("Threshold (tokens)", *head, text_columns=0)
    tokens = map(_tokens, (use.first, use.last, use.least, use.most))
    changes = (f"{use.changes:,}", f"{use.changes_per_min:.2f}", f"{use.most_changes_in_a_min:,}")
    table.add_row(*tokens, *changes, f"{num_conversions:,}")
    return table


def _tokens(threshold: int | None) -> str:
    return "none" if threshold is None else f"{threshold:,}"


def _pools(summary: Summary) -> Table:
    head = (
        "nodes",
        "busy (%)",
        "of which waiting for KV (%)",
        "tokens prefilled",
        "tokens decoded",
        "preemptions",
    )
    table = _table("Pools", "", *head)
    for role, pool in summary.utilisation.items():
        table.add_row(
            role,
            f"{pool.nodes:,}",
            _percent(pool.busy_share),
            _percent(pool.stalled_share),
            f"{pool.tokens_prefilled:,}",
            f"{pool.tokens_decoded:,}",
            f"{pool.preemptions:,}",
        )
    return table


def _links(summary: Summary) -> Table:
    table = _table("Links", "", "links", "moved (GB)", "utilisation, mean (%)", "highest (%)")
    for kind, use in summary.links.items():
        shares = (_percent(use.utilisation_mean), _percent(use.utilisation_max))
        table.add_row(kind, f"{use.links:,}", _gigabytes(use.bytes_moved), *shares)
    return table


def _table(title: str, *head: str, text_columns: int = 1) -> Table:
    """The first `text_columns` columns are text, the others numbers."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(head),
    )
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < text_columns else "right")
    return table


def _figure(value: float | None, reason: str | None) -> str:
    if value is None:
        return reason or _NONE
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    )


def _difference(published: float | None, ours: float | None) -> str:
    if published is None or ours is None:
        return _NONE
    if published == 0:
        return f"{ours - published:+.4g}"
    return f"{100 * (ours - published) / abs(published):+.1f} %"


def _by_stage(rejected: Mapping[str, int]) -> str:
    return ", ".join(f"{stage} {count:,}" for stage, count in rejected.items())


def _sources(summary: Summary) -> str:
    return f"{_percent(summary.hits_by_source.fetched)}, {_percent(summary.hits_by_source.disk)}"


def _loss(loss: Loss) -> str:
    return f"{loss.node_s:,.1f} ({_percent(loss.share)} %)"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f}"
